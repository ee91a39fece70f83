"""A whole run on Ray and Mooncake, killed at its checkpoint, and brought back by another process.

    python -m tests.data_plane.scenarios.mooncake_cluster save FOLDER        # ends by SIGKILL of itself
    python -m tests.data_plane.scenarios.mooncake_cluster restore FOLDER

Each prints what happened as JSON. A script of its own: a process can be in one Ray cluster only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray

from rollout_reassembler import (
    DataPlaneConfig,
    FinalizedGroup,
    GroupRecords,
    RolloutReassemblerActor,
    RolloutReassemblerActorConfig,
    build_data_plane_client,
    create_rollout_reassembler_actors,
    register_canonical_partition,
    register_staging_partition,
    sweep_staging,
)
from rollout_reassembler.data_plane.transfer_queue.cluster import start_local_ray
from tests.actors.groups import assert_rows_proven, request_of, stage_group
from tests.reassembly.contents import whole_plane

CONFIG = RolloutReassemblerActorConfig("canonical", "staging", 0)
FINALIZED, IN_FLIGHT, GIVEN_UP = [0, 1, 2], [3, 4], [5]


def config(memory_hosts: int, client_segment_size: int = 0) -> DataPlaneConfig:
    store = {
        "master_server_address": "127.0.0.1:0",
        "start_master": True,
        "memory_hosts": memory_hosts,
        "global_segment_size": 128 << 20,
        "local_buffer_size": 32 << 20,
        "client_segment_size": client_segment_size,
    }
    return DataPlaneConfig.model_validate({"impl": "transfer_queue", "backend": "mooncake_cpu", "mooncake_cpu": store})


def answers_of(groups: list[FinalizedGroup]) -> list[str]:
    """Each answer without its timings, as JSON."""
    return [json.dumps({**dataclasses.asdict(group), "timings": None}, sort_keys=True) for group in groups]


@ray.remote(num_cpus=0, max_retries=0)
def stage_then_kill_myself(dp_config: DataPlaneConfig, groups: list[int]) -> None:
    """What becomes of a worker that dies just after its rows were durable."""
    plane = build_data_plane_client(dp_config, bootstrap=False)
    for group in groups:
        stage_group(plane, "staging", group)
    os.kill(os.getpid(), signal.SIGKILL)


def save(folder: Path) -> None:
    """Two memory hosts and an actor that gives memory, too: three owners."""
    plane: Any = build_data_plane_client(config(memory_hosts=2))
    register_staging_partition(plane, "staging")
    register_canonical_partition(plane, "canonical")
    (actor,) = create_rollout_reassembler_actors(config(2, client_segment_size=128 << 20), CONFIG, num_workers=1)
    plane.add_owner(actor)
    dying = stage_then_kill_myself.remote(config(memory_hosts=2), IN_FLIGHT)
    for group in (*FINALIZED, *GIVEN_UP):
        stage_group(plane, "staging", group)
    answers = ray.get([actor.finalize.remote(request_of(group)) for group in FINALIZED], timeout=60)
    died = ray.wait([dying], timeout=60)[0] == [dying]
    described = ray.get(actor.mooncake_checkpoint.remote({"operation": "DESCRIBE", "session": plane.session}))
    with plane.quiesce(30.0):
        plane.save_checkpoint(str(folder / "checkpoint"), metadata={"step": 3})
        content = repr(whole_plane(plane))
    (folder / "expected.json").write_text(json.dumps({"content": content, "answers": answers_of(answers)}))
    report = {
        "stager_died": died,
        "owners": len(list((folder / "checkpoint").glob("shard-*-0.rows"))),
        "actor_answers": sorted(described),
        "staged": len(plane.list_samples("staging")),
    }
    print(json.dumps(report), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def restore(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    dp_config = config(memory_hosts=1)
    plane: Any = build_data_plane_client(dp_config)
    metadata = plane.load_checkpoint(str(folder / "checkpoint"))
    identical = repr(whole_plane(plane)) == expected["content"]
    reassembler = RolloutReassemblerActor(dp_config, CONFIG)
    again = [reassembler.finalize(request_of(group)) for group in FINALIZED]
    unchanged = repr(whole_plane(plane)) == expected["content"]
    finished = [reassembler.finalize(request_of(group)) for group in IN_FLIGHT]
    assert_rows_proven(plane, "canonical", [*FINALIZED, *IN_FLIGHT])
    swept = sweep_staging(plane, "staging", older_than_s=0.0, dry_run=False)
    report = {
        "metadata": metadata,
        "identical": identical,
        "same_answers": answers_of(again) == expected["answers"],
        "nothing_finalized_twice": unchanged,
        "valid_rows_of_groups_in_flight": sum(group.valid_row_count for group in finished),
        "swept_rollouts": sorted(swept.found),
        "staged_left": len(plane.list_samples("staging")),
        "recorded": sorted(GroupRecords(plane, partition_id="canonical").group_ids()),
        "owned_here": reassembler.mooncake_checkpoint({"operation": "DESCRIBE", "session": "s"}),
    }
    plane.close()
    ray.shutdown()
    print(json.dumps(report))


def main() -> None:
    start_local_ray(8)
    {"save": save, "restore": restore}[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()
