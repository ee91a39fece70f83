"""One agent's receipt costs one rollout: thirty that are meant to harm, each among five good groups."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollout_reassembler as rr
from tests.actors.conftest import Site
from tests.actors.groups import request_of, rollouts_of, stage_group

Receipt = dict[str, Any]


def _nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def _holds_itself(receipt: Receipt) -> Receipt:
    receipt["manifest"] = [*receipt["manifest"], receipt]
    return receipt


def _with_row(receipt: Receipt, **changes: Any) -> Receipt:
    return {**receipt, "manifest": [{**receipt["manifest"][0], **changes}, *receipt["manifest"][1:]]}


HOSTILE: dict[str, Callable[[Receipt], Any]] = {
    "an error page": lambda sound: "internal server error",
    "JSON text": json.dumps,
    "a list": lambda sound: [],
    "a number": lambda sound: 5,
    "a NaN": lambda sound: float("nan"),
    "a bool": lambda sound: True,
    "nothing in it": lambda sound: {},
    "bytes": lambda sound: b"{}",
    "a tensor": lambda sound: torch.zeros(4),
    "an array": lambda sound: np.zeros(4),
    "a set": lambda sound: {1, 2},
    "an object": lambda sound: Path("/"),
    "a field input_ids": lambda sound: {**sound, "input_ids": [1, 2]},
    "a field token_ids in a call": lambda sound: _with_row(sound, token_ids=[1, 2]),
    "a field __class__": lambda sound: {**sound, "__class__": "x"},
    "a tensor in it": lambda sound: {**sound, "reward": torch.ones(())},
    "a numpy scalar in it": lambda sound: _with_row(sound, prev_len=np.int64(0)),
    "nested 40 deep": lambda sound: {**sound, "failure_reason": _nested(40)},
    "nested 5,000 deep": lambda sound: {**sound, "failure_reason": _nested(5000)},
    "a container that holds itself": _holds_itself,
    "a reason of 17 MB": lambda sound: {**sound, "capture_poisoned": True, "failure_reason": "x" * 17_000_000},
    "a reason of 15 MB": lambda sound: {**sound, "capture_poisoned": True, "failure_reason": "x" * 15_000_000},
    "an integer of 5,000 digits": lambda sound: _with_row(sound, weight_version=10**5000),
    "a weight version of 2**63": lambda sound: _with_row(sound, weight_version=2**63),
    "keys that are numbers": lambda sound: {**sound, 1: 2},
    "keys that are tuples": lambda sound: {("a", 1): sound},
    "a key that is a surrogate": lambda sound: {**sound, "\ud800": 1},
    "an id that is a surrogate": lambda sound: _with_row(sound, response_id="\udfff"),
    "a manifest of a million": lambda sound: {**sound, "manifest": [None] * 1_000_000},
    "a manifest by name": lambda sound: {**sound, "manifest": {"c0": sound["manifest"][0]}},
}


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
    left = [key for key in site.plane.list_samples(site.config.staging_partition) if key.startswith(f"g{first // 10}")]
    assert left == []


def test_asyncio_callers_lose_one_rollout_as_well(site: Site, pool: rr.ReassemblerPool) -> None:
    requests = _requests(site, 39_000, HOSTILE["a tensor in it"])

    async def finalize() -> list[int]:
        return [answer.valid_row_count async for answer in pool.afinalize_all(requests)]

    assert asyncio.run(finalize()) == [2, 2, 1, 2, 2, 2]
