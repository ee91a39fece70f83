"""Groups to finalize, each with one thing wrong or nothing, and the count of what became of them.

A group is made from a kind and a number, so that any process makes the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.reassembly.collector import LostRollouts
from rollout_reassembler.trainer.rows import iter_batches
from tests.captures import CANONICAL, PAD, STAGING, MadeRollout, chain, memory_plane, place_in, reassembler
from tests.reassembly.contents import RECORDS
from tests.route_captures import Turn
from tests.route_captures import made as routed
from tests.route_captures import stage as stage_rollouts

HEALTHY = "healthy"
DEFERRED = "routes for the trainer"
BRANCHED = "all branches"
KINDS = (HEALTHY, "lost receipt", "garbled row", "nothing valid", DEFERRED, BRANCHED)

SIZE = 3
"""Rollouts a group."""


@dataclass(frozen=True)
class Group:
    """One prompt's rollouts. The number tells it from all other groups of a test."""

    kind: str
    number: int

    @property
    def group_id(self) -> str:
        return f"g{self.number}"

    @property
    def sample_ids(self) -> list[str]:
        names = [f"{self.group_id}_g{index}" for index in range(SIZE)]
        if self.kind != BRANCHED:
            return names
        return [f"{name}_s{j}" for name, rows in zip(names, (3, 2, 1), strict=True) for j in range(rows)]

    @property
    def rollouts(self) -> list[MadeRollout]:
        names = [f"{self.group_id}/r{index}" for index in range(SIZE)]
        if self.kind == DEFERRED:
            return [routed(name, [Turn(3, 2), Turn(2, index + 1)]) for index, name in enumerate(names)]
        if self.kind == BRANCHED:
            return [branched(name, roots) for name, roots in zip(names, (3, 2, 1), strict=True)]
        return [chain(name, index + 1, seed=self.number) for index, name in enumerate(names)]

    @property
    def options(self) -> dict[str, Any]:
        """What its reassembler is asked for beyond the defaults."""
        return {"router_replay_enabled": True, "defer_routed_experts_to_policy": True} if self.kind == DEFERRED else {}

    @property
    def request(self) -> ReassemblyRequest:
        rollouts = self.rollouts
        receipts: list[Any] = [made.receipt() for made in rollouts]
        if self.kind == "lost receipt":
            receipts[1] = None
        if self.kind == "nothing valid":
            receipts = [None, {}, {**receipts[2], "capture_poisoned": True}]
        return ReassemblyRequest(
            group_id=self.group_id,
            rollout_ids=tuple(made.rollout_id for made in rollouts),
            canonical_sample_ids=None,
            receipts=tuple(receipts),
            rewards=(0.0, 0.5, 1.0),
            fallback_weight_version=1,
            prompt_idx=self.number,
            branches="all" if self.kind == BRANCHED else None,
        )

    def stage(self, plane: DataPlaneClient) -> None:
        stage_rollouts(plane, *self.rollouts)
        if self.kind == "garbled row":
            plane.put_samples([place_in(plane, f"{self.group_id}/r1/c0")], STAGING, {"call": [b"garbage"]})

    def finalize(self, plane: DataPlaneClient) -> FinalizedGroup:
        """The answer, without the timings of this run."""
        return dataclasses.replace(reassembler(plane, **self.options).finalize(self.request), timings={})


def branched(rollout_id: str, roots: int) -> MadeRollout:
    """A rollout of as many conversations; the first goes on two ways, of which the later answers the former again."""
    made = MadeRollout(rollout_id)
    for root in range(roots):
        first = made.call([1, 2 + root], [3, 4 + root])
        made.call([5], [6 + root], parent=first)
    made.call([5], [9], parent=first)
    return made


def undisturbed(groups: Iterable[Group]) -> tuple[DataPlaneClient, dict[str, FinalizedGroup]]:
    """A plane on which these groups were finalized on a good day, and the answers."""
    plane = memory_plane()
    answers = {}
    for group in groups:
        group.stage(plane)
        answers[group.group_id] = group.finalize(plane)
    return plane, answers


def train_deferred(plane: DataPlaneClient, groups: Iterable[Group]) -> None:
    """What a trainer does with deferred rows: reads their routes from staging, which it then clears."""
    rows = [sample_id for group in groups if group.kind == DEFERRED for sample_id in group.sample_ids]
    batches = iter_batches(
        plane, rows, CANONICAL, batch_size=max(len(rows), 1), pad_token_id=PAD, routes="deferred", model_shape=(2, 2)
    )
    for batch in batches:
        assert batch.route_report is not None
        assert not batch.route_report.failures


def left_in_staging(plane: DataPlaneClient) -> int:
    """How many staged rows are there once those of lost rollouts were collected."""
    LostRollouts(plane, staging_partition=STAGING).collect()
    return len(plane.list_samples(STAGING))


@dataclass(frozen=True)
class Figures:
    """What a test of faults has seen: the plane held against one on which nothing was disturbed."""

    kills: int
    groups: int
    rows: int
    rows_lost: int
    rows_doubled: int
    rows_wrong: int
    answers_wrong: int
    records_wrong: int
    staging_left: int

    @property
    def is_clean(self) -> bool:
        faults = dataclasses.astuple(self)[3:]
        return not any(faults)


def count(
    plane: DataPlaneClient, groups: Sequence[Group], answers: dict[str, FinalizedGroup], *, kills: int
) -> Figures:
    """Compare rows, tags, records and answers, bit by bit. Rows that a trainer may claim twice are doubled."""
    good, expected_answers = undisturbed(groups)
    train_deferred(plane, groups)
    expected, found = rows_of(good), rows_of(plane)
    claimed: list[str] = []
    while batch := plane.claim_meta(CANONICAL, "counting", ["input_ids"], 1000).sample_ids:
        claimed += batch
    records, expected_records = records_of(plane), records_of(good)
    return Figures(
        kills=kills,
        groups=len(groups),
        rows=len(found),
        rows_lost=len(expected.keys() - found.keys()),
        rows_doubled=len(found.keys() - expected.keys()) + len(claimed) - len(set(claimed)),
        rows_wrong=sum(found[key] != expected[key] for key in expected.keys() & found.keys()),
        answers_wrong=sum(answers.get(name) != answer for name, answer in expected_answers.items()),
        records_wrong=sum(records.get(name) != record for name, record in expected_records.items())
        + len(records.keys() - expected_records.keys()),
        staging_left=left_in_staging(plane),
    )


Row = tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, Any]]


def rows_of(plane: DataPlaneClient) -> dict[str, Row]:
    """Every canonical row that can be read: its columns as bytes, with dtype and shape, and its tags."""
    tags = plane.list_samples(CANONICAL)
    batch = plane.get_samples(list(tags), CANONICAL, partial=True)
    return {key: ({name: _bits(cell) for name, cell in cells.items()}, tags[key]) for key, cells in batch.rows()}


def records_of(plane: DataPlaneClient) -> dict[str, dict[str, Any]]:
    """The groups' records but for the numbers of their rows, which each plane gives as it likes."""
    return {
        group_id: {name: tag for name, tag in tags.items() if name != "numbers"}
        for group_id, tags in plane.list_samples(RECORDS).items()
    }


def _bits(cell: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(cell)
    return str(array.dtype), array.shape, array.tobytes()
