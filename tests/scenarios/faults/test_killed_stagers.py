"""SIGKILL to a staging process while its threads stage: what it was told is durable is there, the rest is swept."""

from __future__ import annotations

import random

import pytest

from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.reassembly.sweep import sweep_staging
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.source import StagingSource
from tests.captures import STAGING, chain, finalize, stage
from tests.data_plane.plain_queue import PlainQueue
from tests.scenarios.faults.victims import Stage, VictimHost

pytestmark = pytest.mark.slow

KILLS = 16
ROLLOUTS = 60
CALLS = 3 * ROLLOUTS


def test_acknowledged_rows_outlive_their_stager_and_a_sweep_clears_what_is_left(
    queue: PlainQueue, plane: DataPlaneClient, victims: VictimHost
) -> None:
    draw = random.Random(5)
    source = StagingSource(plane, staging_partition=STAGING)
    living = chain("living")
    stage(plane, living)
    seen = {"kills": 0, "acknowledged": 0, "lost": 0, "unacknowledged but there": 0, "without tags": 0}
    for number in range(KILLS):
        rollout_ids = [f"k{number}/r{index}" for index in range(ROLLOUTS)]
        kill_at = (draw.randint(1, CALLS // 2), draw.uniform(0.0, 0.01))
        end = victims.run(Stage(queue, rollout_ids, kill_at=kill_at))
        acknowledged = end.said[1:]
        seen["kills"] += end.was_killed
        seen["acknowledged"] += len(acknowledged)
        fetched = source.fetch_packed(acknowledged)
        seen["lost"] += len(fetched.missing) + len(fetched.invalid)

        listed = {key: tags for key, tags in plane.list_samples(STAGING).items() if key.startswith(f"k{number}/")}
        seen["unacknowledged but there"] += len(listed) - len(acknowledged)
        seen["without tags"] += sum("rollout_id" not in tags for tags in listed.values())
        if number % 2:
            by_rollout = sweep_staging(plane, STAGING, rollout_ids=rollout_ids[::2], dry_run=False)
            assert by_rollout.found.keys() <= set(rollout_ids[::2])
            sweep_staging(plane, STAGING, older_than_s=0, live_rollouts=["living"], dry_run=False)
            sweep_staging(plane, STAGING, untagged_after_s=0, dry_run=False)
        else:
            again = victims.run(Stage(queue, rollout_ids))
            assert len(again.said[1:]) == CALLS, "a stager that starts over mends what the dead one left"
            assert len(source.fetch_packed(again.said[1:]).calls) == CALLS
            sweep_staging(plane, STAGING, rollout_ids=rollout_ids, dry_run=False)
        assert plane.list_samples(STAGING).keys() == {place_of(call) for call in living.calls}
    assert finalize(plane, [living]).valid_row_count == 1
    seen["staging left"] = len(plane.list_samples(STAGING))
    print(f"\nkilled while they staged {CALLS} calls: {seen}")
    assert seen["kills"] == KILLS
    assert seen["acknowledged"] > 0
    assert seen["unacknowledged but there"] > 0
    assert seen["lost"] == seen["staging left"] == 0
