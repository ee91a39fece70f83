"""One agent's receipt costs one rollout: thirty that are meant to harm, each among five good groups."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import rollout_reassembler as rr
from rollout_reassembler.reassembly.collector import LostRollouts
from tests.actors.conftest import Site
from tests.actors.groups import request_of, rollouts_of, stage_group
from tests.hostile_receipts import HOSTILE, Receipt


def _requests(site: Site, first: int, make: Callable[[Receipt], Any]) -> list[rr.ReassemblyRequest]:
    """Five good groups, and in their middle one whose second rollout's receipt is hostile."""
    made = {group: rollouts_of(group, rollouts=2, turns=1) for group in range(first, first + 6)}
    for group, rollouts in made.items():
        stage_group(site.plane, site.config.staging_partition, group, rollouts)
    requests = [request_of(group, rollouts) for group, rollouts in made.items()]
    good, harmed = requests[2].receipts
    assert harmed is not None
    requests[2] = dataclasses.replace(requests[2], receipts=(good, make(dict(harmed))))
    return requests


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_receipt_costs_its_rollout_alone(site: Site, pool: rr.ReassemblerPool, name: str) -> None:
    first = 30_000 + 10 * list(HOSTILE).index(name)
    answers = list(pool.finalize_all(_requests(site, first, HOSTILE[name])))
    rejections = {rollout: reason for answer in answers for rollout, reason in answer.rejections.items()}
    print(f"{name}: {len(answers) - 1} answers of 5 good groups; {rejections}")
    assert [answer.valid_row_count for answer in answers] == [2, 2, 1, 2, 2, 2]
    assert rejections == {f"g{first + 2}/r1": "invalid_receipt"}
    LostRollouts(site.plane, staging_partition=site.config.staging_partition).collect()
    left = [key for key in site.plane.list_samples(site.config.staging_partition) if key.startswith(f"g{first // 10}")]
    assert left == []


def test_asyncio_callers_lose_one_rollout_as_well(site: Site, pool: rr.ReassemblerPool) -> None:
    requests = _requests(site, 39_000, HOSTILE["a tensor in it"])

    async def finalize() -> list[int]:
        return [answer.valid_row_count async for answer in pool.afinalize_all(requests)]

    assert asyncio.run(finalize()) == [2, 2, 1, 2, 2, 2]
