"""Requests and staged rows for actor tests, made in any process from a group's number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import ray

from rollout_reassembler import (
    DataPlaneClient,
    DataPlaneConfig,
    ReassemblyRequest,
    StagingSink,
    build_data_plane_client,
)
from tests.captures import MadeRollout, chain


def rollouts_of(group: int, *, rollouts: int = 4, turns: int = 3) -> list[MadeRollout]:
    return [chain(f"g{group}/r{index}", turns, seed=group) for index in range(rollouts)]


def request_of(group: int, made: list[MadeRollout] | None = None, **changes: Any) -> ReassemblyRequest:
    made = made if made is not None else rollouts_of(group)
    fields: dict[str, Any] = {
        "group_id": f"g{group}",
        "rollout_ids": tuple(rollout.rollout_id for rollout in made),
        "canonical_sample_ids": None,
        "receipts": tuple(rollout.receipt() for rollout in made),
        "rewards": tuple(float(index) for index in range(len(made))),
        "fallback_weight_version": 0,
        "prompt_idx": group,
    }
    return ReassemblyRequest(**{**fields, **changes})


def stage_group(
    plane: DataPlaneClient, staging_partition: str, group: int, made: list[MadeRollout] | None = None
) -> None:
    made = made if made is not None else rollouts_of(group)
    sink = StagingSink(plane, staging_partition=staging_partition)
    results = sink.stage_all([call for rollout in made for call in rollout.calls])
    assert all(result.ok for result in results), results


@ray.remote(num_cpus=0)
def stage_groups_elsewhere(dp_config: DataPlaneConfig, staging_partition: str, groups: list[int]) -> int:
    """A staging process of its own, as an inference worker is."""
    plane = build_data_plane_client(dp_config, bootstrap=False)
    for group in groups:
        stage_group(plane, staging_partition, group)
    plane.close()
    return len(groups)


def assert_rows_proven(plane: DataPlaneClient, partition: str, groups: Iterable[int]) -> None:
    """Every row of these groups holds exactly the tokens that its rollout was made of."""
    for group in groups:
        made = rollouts_of(group)
        batch = plane.get_samples([f"g{group}_g{index}" for index in range(len(made))], partition)
        for index, rollout in enumerate(made):
            np.testing.assert_array_equal(batch["input_ids"][index], rollout.tokens())
            assert batch["total_reward"][index] == index
            assert batch["sample_mask"][index] == 1.0
