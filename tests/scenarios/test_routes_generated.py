"""Generated captures: the row is right token by token, and both modes give the same tensor or the same reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_reassembler.contract.digests import encode_extras
from rollout_reassembler.contract.routed_experts import ROUTES_KEY, encode_routed_experts
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.route_plan import RoutePlan, encode_route_plan
from rollout_reassembler.reassembly.routes import RouteFailure, assemble_group
from rollout_reassembler.staging.source import StagingSource
from rollout_reassembler.trainer.deferred_routes import execute_route_plans
from tests.captures import STAGING, memory_plane
from tests.route_captures import Turn, expected, made, planned, stage

pytestmark = pytest.mark.exhaustive

SHAPE = (2, 2)

STAGED = st.sampled_from(["full", "dummy_last", "tail", "tail_dummy", "one_short", "too_few", "surplus", "none"])


@st.composite
def rollouts(draw: st.DrawFn) -> list[Turn]:
    return [
        Turn(
            carry=draw(st.integers(0 if turn else 1, 4)),
            generated=draw(st.integers(1, 4)),
            staged=draw(STAGED),
            boundary=draw(st.booleans()),
            dtype=draw(st.sampled_from(["int8", "int16", "int32"])),
        )
        for turn in range(draw(st.integers(1, 5)))
    ]


@dataclass(frozen=True)
class Capture:
    """A staged group: the plane that holds it, its rollouts' turns and their plans."""

    plane: MemoryDataPlane
    turns: list[list[Turn]]
    plans: list[RoutePlan]

    @classmethod
    def of(cls, turns: list[list[Turn]]) -> Capture:
        plane = memory_plane()
        group = [made(f"r{index}", of_rollout) for index, of_rollout in enumerate(turns)]
        stage(plane, *group)
        return cls(plane, turns, [planned(plane, rollout) for rollout in group])

    def direct(self) -> list[np.ndarray | RouteFailure]:
        source = StagingSource(self.plane, staging_partition=STAGING)
        return assemble_group(source, self.plans, model_shape=SHAPE)

    def deferred(self) -> tuple[list[np.ndarray], dict[str, str]]:
        """The rows' routes by the trainer, from the tags alone; and what failed, by row."""
        routes, report = execute_route_plans(
            self.plane,
            [f"g_g{index}" for index in range(len(self.plans))],
            [plan.expected_token_length for plan in self.plans],
            [{"route_plan": encode_route_plan(plan)} for plan in self.plans],
            model_shape=SHAPE,
            release=False,
        )
        assert sum(report.failures.values()) == len(report.failed_rows)
        return routes, report.failed_rows


@settings(max_examples=150, deadline=None)
@given(rollouts())
def test_every_token_has_its_own_route_or_none(turns: list[Turn]) -> None:
    (routes,) = Capture.of([turns]).direct()
    assert isinstance(routes, np.ndarray)
    assert routes.dtype == np.int16
    assert np.array_equal(routes, expected(turns))


@settings(max_examples=60, deadline=None)
@given(st.lists(rollouts(), min_size=1, max_size=4))
def test_direct_and_deferred_give_the_same_tensors(turns: list[list[Turn]]) -> None:
    capture = Capture.of(turns)
    routes, failed = capture.deferred()
    assert failed == {}
    for direct, deferred in zip(capture.direct(), routes, strict=True):
        assert np.array_equal(direct, deferred)


Fault = Callable[[MemoryDataPlane, str], None]


def cleared(plane: MemoryDataPlane, key: str) -> None:
    plane.clear_samples([key], STAGING)


def emptied(plane: MemoryDataPlane, key: str) -> None:
    plane.put_samples([key], STAGING, {"extras": [b""]})


def changed(plane: MemoryDataPlane, key: str) -> None:
    encoded = bytearray(plane.get_samples([key], STAGING, ["extras"])["extras"][0])
    encoded[-5] ^= 1
    plane.put_samples([key], STAGING, {"extras": [bytes(encoded)]})


def replaced(plane: MemoryDataPlane, key: str) -> None:
    extras = {ROUTES_KEY: encode_routed_experts(np.ones((3, 1, 1), np.int16))}
    plane.put_samples([key], STAGING, {"extras": [encode_extras(extras)]})


FAULTS: dict[Fault, str] = {
    cleared: "missing_fragment",
    emptied: "fragment_integrity",
    changed: "fragment_integrity",
    replaced: "fragment_integrity",
}


@settings(max_examples=60, deadline=None)
@given(st.lists(rollouts(), min_size=1, max_size=4), st.sampled_from(list(FAULTS)), st.data())
def test_both_modes_name_the_same_fault_and_spare_the_siblings(
    turns: list[list[Turn]], fault: Fault, data: st.DataObject
) -> None:
    capture = Capture.of(turns)
    read = [key for plan in capture.plans for key in plan.fragment_keys]
    if not read:
        return
    key = data.draw(st.sampled_from(read))
    hit = int(key.split("/")[0].removeprefix("r"))
    fault(capture.plane, key)
    direct = capture.direct()
    routes, failed = capture.deferred()
    for index, outcome in enumerate(direct):
        if index == hit:
            assert isinstance(outcome, RouteFailure)
            assert outcome.code == FAULTS[fault]
            assert failed == {f"g_g{index}": str(outcome)}
            assert (routes[index] == -1).all()
        else:
            assert np.array_equal(outcome, expected(capture.turns[index]))
            assert np.array_equal(outcome, routes[index])


@settings(max_examples=60, deadline=None)
@given(rollouts(), st.data())
def test_a_plan_that_is_one_token_off_is_refused_by_both_modes(turns: list[Turn], data: st.DataObject) -> None:
    """A fragment whose rows are not as many as planned, or a row that is not as long as planned."""
    capture = Capture.of([turns])
    plan = capture.plans[0]
    if not plan.fragment_keys:
        return
    key = data.draw(st.sampled_from(plan.fragment_keys))
    off = data.draw(st.sampled_from([-1, 1]))
    spans = [
        span.model_copy(update={"staged_route_len": span.staged_route_len + off}) if span.staging_key == key else span
        for span in plan.spans
    ]
    wrong = Capture(capture.plane, capture.turns, [plan.model_copy(update={"spans": tuple(spans)})])
    (outcome,) = wrong.direct()
    routes, failed = wrong.deferred()
    if isinstance(outcome, RouteFailure):
        assert outcome.code == "fragment_length"
        assert list(failed) == ["g_g0"]
    else:
        assert np.array_equal(outcome, routes[0])
        known = (outcome != -1).all(axis=(1, 2))
        assert np.array_equal(outcome[known], expected(turns)[known])
