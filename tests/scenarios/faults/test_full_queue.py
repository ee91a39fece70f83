"""A queue that has no room: an error at once, nothing lost, and the next attempt succeeds once there is room."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.reassembly.sweep import sweep_staging
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.staging.source import StagingSource
from tests.captures import CANONICAL, STAGING, chain, registered, stage
from tests.data_plane.plain_queue import QueueHost
from tests.reassembly.contents import RECORDS
from tests.scenarios.faults.groups import HEALTHY, SIZE, Group, count
from tests.scenarios.faults.victims import DEADLINES, VictimHost

pytestmark = pytest.mark.slow

STAGED = 6
"""Calls of a healthy group."""

AT_ONCE = 5.0


@pytest.fixture
def full_plane(victims: VictimHost, queue_host: QueueHost) -> Iterator[DataPlaneClient]:
    """A queue with room for one group's staged calls and its rows. Rows of tags alone take none."""
    queue = queue_host.start_queue(capacity=STAGED + SIZE)
    plane = queue.connect(DEADLINES)
    registered(plane).register_partition(RECORDS, {})
    yield plane
    plane.close()
    queue.stop()


def test_a_group_that_finds_no_room_is_published_once_there_is(full_plane: DataPlaneClient) -> None:
    group = Group(HEALTHY, 0)
    group.stage(full_plane)
    stage(full_plane, chain("forsaken", 1))
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(DataPlaneError, match=r"group 'g0' was not finalized.*full.*'g0_g0', 'g0_g1', 'g0_g2'"):
            group.finalize(full_plane)
        assert time.monotonic() - started < AT_ONCE
        assert len(full_plane.list_samples(STAGING)) == STAGED + 1
        assert full_plane.get_samples(group.sample_ids, CANONICAL, partial=True).missing == group.sample_ids
        assert full_plane.claim_meta(CANONICAL, "trainer", ["input_ids"], 10).sample_ids == []
        assert full_plane.list_samples(RECORDS) == {}
    sweep_staging(full_plane, STAGING, rollout_ids=["forsaken"], dry_run=False)
    answers = {group.group_id: group.finalize(full_plane)}
    figures = count(full_plane, [group], answers, kills=0)
    print(f"\nthree attempts without room, one with: {figures}")
    assert figures.is_clean


def test_calls_that_find_no_room_say_so_and_the_others_are_durable(full_plane: DataPlaneClient) -> None:
    calls = [call for index in range(4) for call in chain(f"r{index}").calls]
    sink = StagingSink(full_plane, staging_partition=STAGING)
    results = {}

    def run(call):
        results[place_of(call)] = sink.stage(call)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < AT_ONCE
    durable = [key for key, result in results.items() if result.ok]
    assert len(durable) == STAGED + SIZE
    assert all("full" in result.error for result in results.values() if not result.ok)
    source = StagingSource(full_plane, staging_partition=STAGING)
    assert len(source.fetch(durable)) == len(durable)
    full_plane.clear_samples(durable, STAGING)
    left = [call for call in calls if place_of(call) not in durable]
    assert all(result.ok for result in sink.stage_all(left))
    assert len(source.fetch([place_of(call) for call in left])) == len(left)
