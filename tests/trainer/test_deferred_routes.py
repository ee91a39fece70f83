"""Deferred mode at the trainer: executed, counted by reason, released; or raised, and nothing touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import DataPlaneTimeout, DataPlaneUnavailable
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.route_plan import RoutePlan, encode_route_plan
from rollout_reassembler.reassembly.routes import RouteFailure
from rollout_reassembler.trainer.deferred_routes import execute_route_plans, release_route_plans
from tests.captures import STAGING, at_places, memory_plane, place_in, staged_keys
from tests.route_captures import Turn, expected, made, planned, stage

TURNS = [Turn(2, 2), Turn(1, 3)]
SHAPE = (2, 2)


class Batch:
    """Three staged rollouts and the rows whose tags carry their plans."""

    def __init__(self) -> None:
        self.plane = memory_plane()
        rollouts = [made(f"r{index}", TURNS) for index in range(3)]
        stage(self.plane, *rollouts)
        self.plans = [planned(self.plane, rollout) for rollout in rollouts]
        self.ids = ["g_g0", "g_g1", "g_g2"]
        self.lengths = [8, 8, 8]
        self.tags: list[dict[str, Any] | None] = [{"route_plan": encode_route_plan(plan)} for plan in self.plans]

    def execute(self, **options: Any) -> Any:
        options = {"model_shape": SHAPE, **options}
        return execute_route_plans(self.plane, self.ids, self.lengths, self.tags, **options)


@pytest.fixture
def batch() -> Batch:
    return Batch()


def broken(plane: MemoryDataPlane, call: str, error: Exception) -> None:
    def fails(*_args: Any, **_options: Any) -> Any:
        raise error

    setattr(plane, call, fails)


class TestSuccess:
    def test_routes_of_every_row_and_staging_is_empty(self, batch: Batch) -> None:
        routes, report = batch.execute()
        assert all(np.array_equal(row, expected(TURNS)) for row in routes)
        assert (report.rows, report.tokens, report.sentinel_tokens) == (3, 24, 3)
        assert report.sentinel_fraction == pytest.approx(1 / 8)
        assert (report.failures, report.failed_rows, report.unreleased, report.release_error) == ({}, {}, (), None)
        assert staged_keys(batch.plane) == set()

    def test_abandoned_calls_are_released_too(self) -> None:
        plane, rollout = memory_plane(), made("r", TURNS)
        terminal = rollout.calls[-1]
        rollout.call([7], [8], parent=rollout.calls[0])
        rollout.calls.sort(key=lambda call: call is terminal)
        stage(plane, rollout)
        tag = {"route_plan": encode_route_plan(planned(plane, rollout))}
        execute_route_plans(plane, ["g_g0"], [8], [tag], model_shape=SHAPE)
        assert staged_keys(plane) == set()

    def test_one_read_and_one_clear_a_batch(self, batch: Batch) -> None:
        calls: list[str] = []
        for name in ("get_samples", "clear_samples", "get_tags", "put_samples", "list_samples"):
            original = getattr(batch.plane, name)
            setattr(batch.plane, name, lambda *args, _o=original, _n=name, **kw: (calls.append(_n), _o(*args, **kw))[1])
        batch.execute()
        assert calls == ["get_samples", "clear_samples"]

    def test_a_row_without_a_plan_knows_no_routes(self, batch: Batch) -> None:
        batch.tags[1] = {"group_id": "g"}
        batch.tags[2] = None
        batch.lengths[1] = 1
        routes, report = batch.execute()
        assert [row.shape for row in routes] == [(8, 2, 2), (1, 2, 2), (8, 2, 2)]
        assert (routes[1] == -1).all()
        assert (report.rows_without_routes, report.failures) == (2, {})

    def test_nothing_is_released_on_request_until_asked(self, batch: Batch) -> None:
        batch.execute(release=False)
        assert len(staged_keys(batch.plane)) == 6
        assert release_route_plans(batch.plane, batch.plans) == ((), None)
        assert staged_keys(batch.plane) == set()

    def test_rows_of_two_staging_partitions(self, batch: Batch) -> None:
        other = memory_plane()
        rollout = made("r9", TURNS)
        stage(other, rollout)
        plan = RoutePlan.from_dict({**planned(other, rollout).to_dict(), "staging_partition": "other"})
        batch.plane.register_partition("other", {"call": _spec(other, "call"), "extras": _spec(other, "extras")})
        held = other.get_samples(plan.fragment_keys, STAGING)
        batch.plane.put_samples(held.sample_ids, "other", held.columns)
        batch.tags[1] = {"route_plan": encode_route_plan(plan)}
        routes, _ = batch.execute()
        assert all(np.array_equal(row, expected(TURNS)) for row in routes)
        assert batch.plane.list_samples("other") == {}
        assert staged_keys(batch.plane) == {"r1/c0", "r1/c1"}


def _spec(plane: MemoryDataPlane, column: str) -> Any:
    return plane.tables.partitions[STAGING].schema[column]


class TestFailures:
    def fail(self, batch: Batch, code: str) -> None:
        """Make row 1 fail with this code."""
        if code == "missing_fragment":
            batch.plane.clear_samples([place_in(batch.plane, "r1/c1")], STAGING)
        elif code == "fragment_integrity":
            batch.plane.put_samples([place_in(batch.plane, "r1/c1")], STAGING, {"extras": [b"garbled"]})
        elif code == "canonical_length_mismatch":
            batch.lengths[1] = 9
        elif code == "invalid_route_plan":
            batch.tags[1] = {"route_plan": "rp2:garbled"}
        elif code == "fragment_model_shape":
            rollout = made("r9", TURNS, layers=3)
            stage(batch.plane, rollout)
            batch.tags[1] = {"route_plan": encode_route_plan(planned(batch.plane, rollout))}
        elif code == "fragment_length":
            spans = list(batch.plans[1].spans)
            spans[0] = spans[0].model_copy(update={"staged_route_len": 3})
            plan = batch.plans[1].model_copy(update={"spans": tuple(spans)})
            batch.tags[1] = {"route_plan": encode_route_plan(plan)}

    CODES = (
        "missing_fragment",
        "fragment_integrity",
        "canonical_length_mismatch",
        "invalid_route_plan",
        "fragment_model_shape",
        "fragment_length",
    )

    @pytest.mark.parametrize("code", CODES)
    def test_a_failed_row_is_counted_by_reason_and_falls_back_to_missing(self, batch: Batch, code: str) -> None:
        self.fail(batch, code)
        routes, report = batch.execute()
        assert report.failures == {code: 1}
        assert list(report.failed_rows) == ["g_g1"]
        assert report.failed_rows["g_g1"].startswith(code)
        assert report.metrics()[f"router_replay/failure_reason_{code}_count"] == 1.0
        assert routes[1].shape == (batch.lengths[1], *SHAPE)
        assert (routes[1] == -1).all()
        assert all(np.array_equal(routes[i], expected(TURNS)) for i in (0, 2))

    @pytest.mark.parametrize("code", CODES)
    def test_or_raises_as_configured_and_releases_nothing(self, batch: Batch, code: str) -> None:
        self.fail(batch, code)
        before = staged_keys(batch.plane)
        with pytest.raises(RouteFailure, match="row 'g_g1'") as failed:
            batch.execute(on_failure="raise")
        assert failed.value.code == code
        assert staged_keys(batch.plane) == before

    def test_a_row_that_fell_back_is_settled_and_released(self, batch: Batch) -> None:
        self.fail(batch, "fragment_integrity")
        batch.execute()
        assert staged_keys(batch.plane) == set()

    def test_a_plan_of_another_row_releases_nothing(self, batch: Batch) -> None:
        self.fail(batch, "canonical_length_mismatch")
        _, report = batch.execute()
        assert report.unreleased == at_places("r1/c0", "r1/c1")
        assert staged_keys(batch.plane) == {"r1/c0", "r1/c1"}

    def test_a_clear_that_fails_is_reported_not_raised(self, batch: Batch) -> None:
        broken(batch.plane, "clear_samples", DataPlaneTimeout("no answer", call="clear_samples", seconds=30.0))
        routes, report = batch.execute()
        assert all(np.array_equal(row, expected(TURNS)) for row in routes)
        assert len(report.unreleased) == 6
        assert "no answer" in (report.release_error or "")
        assert report.metrics()["router_replay/unreleased_keys"] == 6.0

    @pytest.mark.parametrize("on_failure", ["sentinel", "raise"])
    @pytest.mark.parametrize("error", [DataPlaneTimeout("no answer"), DataPlaneUnavailable("gone")])
    def test_a_plane_that_fails_is_never_taken_for_missing_routes(
        self, batch: Batch, error: Exception, on_failure: str
    ) -> None:
        broken(batch.plane, "get_samples", error)
        with pytest.raises(type(error)):
            batch.execute(on_failure=on_failure)
        assert len(staged_keys(batch.plane)) == 6

    def test_executing_a_plan_twice_finds_its_fragments_gone_and_says_so(self, batch: Batch) -> None:
        batch.execute()
        _, report = batch.execute()
        assert report.failures == {"missing_fragment": 3}
        assert report.sentinel_fraction == 1.0

    def test_parallel_lists_must_align(self, batch: Batch) -> None:
        with pytest.raises(ValueError, match="shorter"):
            execute_route_plans(batch.plane, batch.ids, batch.lengths, batch.tags[:2], model_shape=SHAPE)

    def test_an_empty_batch(self, batch: Batch) -> None:
        routes, report = execute_route_plans(batch.plane, [], [], [], model_shape=SHAPE)
        assert (routes, report.rows, report.sentinel_fraction) == ([], 0, 0.0)
