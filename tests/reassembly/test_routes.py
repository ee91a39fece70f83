"""The executor: what a row's routes are, and each way in which there are none."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.digests import encode_extras, extras_digest
from rollout_reassembler.contract.errors import DataPlaneTimeout
from rollout_reassembler.contract.routed_experts import BOUNDARY_KEY, ROUTES_KEY, encode_routed_experts, route_extras
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.route_plan import RoutePlan, RouteSpan
from rollout_reassembler.reassembly.routes import (
    FAILURE_CODES,
    RouteFailure,
    assemble_group,
    assemble_routes,
    missing_token_count,
    read_fragments,
    sentinel_routes,
)
from rollout_reassembler.staging.source import StagingSource
from tests.captures import STAGING, MadeRollout, at_places, memory_plane, place_in, staging_key_of
from tests.route_captures import Turn, expected, fragments, made, planned, stage, truth

MISSING = [[-1, -1]]


def source(plane: MemoryDataPlane) -> StagingSource:
    return StagingSource(plane, staging_partition=STAGING)


def assembled(rollout: MadeRollout, **options: Any) -> np.ndarray:
    """Staged, proven, planned, executed."""
    plane = memory_plane()
    stage(plane, rollout)
    return assemble_routes(planned(plane, rollout), fragments(rollout), **options)


def rows(*routes: list[list[int]], dtype: str = "int16") -> dict[str, str]:
    return {ROUTES_KEY: encode_routed_experts([list(route) for route in routes], dtype=dtype)}


def one_span(
    extras: dict[str, Any] | None, *, carry: int = 1, generated: int = 1, staged: int | None = None
) -> tuple[RoutePlan, dict[str, bytes]]:
    """The plan of a row that is one call, and its fragment."""
    span = RouteSpan(
        staging_key="r/c0",
        carry_len=carry,
        generation_len=generated,
        staged_route_len=carry + generated if staged is None else staged,
        extras_digest_version=1,
        extras_digest=extras_digest(extras),
    )
    plan = RoutePlan(
        schema_version=2,
        staging_partition=STAGING,
        spans=(span,),
        cleanup_staging_keys=("r/c0",),
        expected_token_length=carry + generated,
    )
    return plan, {"r/c0": encode_extras(extras) if extras is not None else b""}


def failure(plan: RoutePlan, found: dict[str, bytes], **options: Any) -> str:
    with pytest.raises(RouteFailure) as failed:
        assemble_routes(plan, found, **options)
    assert failed.value.code in FAILURE_CODES
    return failed.value.code


class TestBoundary:
    """Prompt [1, 2], sampled [3]; the engine makes up [0, 1] for token 3. Then a tool result [4], sampled [5]."""

    ENGINE = np.array([[[10, 11]], [[20, 21]], [[30, 31]], [[40, 41]]])

    def rollout(self, *, turns: int) -> MadeRollout:
        rollout = MadeRollout("r")
        first = rollout.call([1, 2], [3], extras=rows([[10, 11]], [[20, 21]], [[0, 1]]))
        if turns == 2:
            rollout.call([4], [5], parent=first, extras=route_extras(self.ENGINE, prev_len=3, delta_len=2))
        return rollout

    def test_the_next_calls_prefill_routes_the_last_sampled_token(self) -> None:
        routes = assembled(self.rollout(turns=2))
        assert routes.tolist() == [[[10, 11]], [[20, 21]], [[30, 31]], [[40, 41]], MISSING]

    def test_without_a_next_call_the_last_sampled_token_is_missing(self) -> None:
        assert assembled(self.rollout(turns=1)).tolist() == [[[10, 11]], [[20, 21]], MISSING]

    def test_without_a_boundary_the_last_sampled_token_is_missing(self) -> None:
        rollout = MadeRollout("r")
        first = rollout.call([1, 2], [3], extras=rows([[10, 11]], [[20, 21]], [[0, 1]]))
        rollout.call([4], [5], parent=first, extras=rows([[40, 41]], [[0, 1]]))
        assert assembled(rollout).tolist() == [[[10, 11]], [[20, 21]], MISSING, [[40, 41]], MISSING]

    def test_a_branch_off_the_chain_supplies_nothing(self) -> None:
        """Two calls continue the first; only the one of the chain may route its last token."""
        rollout = MadeRollout("r")
        first = rollout.call([1, 2], [3], extras=route_extras(self.ENGINE[:2], prev_len=0, delta_len=3))
        rollout.call([8], [9], parent=first, extras=route_extras(self.ENGINE + 50, prev_len=3, delta_len=2))
        rollout.call([4], [5], parent=first)
        assert assembled(rollout).tolist() == [[[10, 11]], [[20, 21]], MISSING, MISSING, MISSING]

    def test_a_boundary_of_a_root_has_no_token_and_is_left_alone(self) -> None:
        """Staging refuses it; a row that was staged by something else may still hold one."""
        extras = rows([[7, 8]], [[0, 1]]) | {BOUNDARY_KEY: encode_routed_experts([[[5, 6]]])}
        assert assemble_routes(*one_span(extras)).tolist() == [[[7, 8]], MISSING]


class TestNeverShifted:
    """What is staged is not what the call's tokens need: -1, never expert 0, never a token off."""

    def test_one_row_less_than_tokens_is_no_tail(self) -> None:
        """Taken as a tail of two, 2→[20, 21] would land on token 3."""
        rollout = MadeRollout("r")
        rollout.call([1, 2], [3, 4], extras=rows([[10, 11]], [[20, 21]], [[30, 31]]))
        assert assembled(rollout).tolist() == [MISSING] * 4

    def test_one_row_less_that_says_where_it_ends_is_a_tail(self) -> None:
        rollout = MadeRollout("r")
        rollout.call([1, 2], [3, 4], extras=rows([[20, 21]], [[30, 31]], MISSING))
        assert assembled(rollout).tolist() == [MISSING, MISSING, [[30, 31]], MISSING]

    def test_a_tail_covers_the_generation_and_nothing_carried(self) -> None:
        rollout = MadeRollout("r")
        rollout.call([1, 2, 3], [4, 5], extras=rows([[30, 31]], [[40, 41]], [[0, 1]]))
        assert assembled(rollout).tolist() == [MISSING, MISSING, MISSING, [[40, 41]], MISSING]

    def test_18057_route_rows_for_17804_tokens(self) -> None:
        rollout = MadeRollout("r")
        routes = np.ones((18_057, 1, 2), np.int16)
        rollout.call(range(10_000), range(7_804), extras={ROUTES_KEY: encode_routed_experts(routes)})
        routes = assembled(rollout, model_shape=(1, 2))
        assert routes.shape == (17_804, 1, 2)
        assert (routes == -1).all()

    def test_routes_of_the_whole_sequence_where_the_delta_was_wanted(self) -> None:
        turns = [Turn(2, 2), Turn(1, 2, "surplus")]
        routes = assembled(made("r", turns))
        assert (routes[4:] == -1).all()
        assert np.array_equal(routes, expected(turns))

    def test_routes_dropped_by_a_preemption(self) -> None:
        rollout = MadeRollout("r")
        rollout.call([1, 2], [3, 4, 5], extras=rows([[10, 11]], [[20, 21]]))
        assert assembled(rollout, model_shape=(1, 2)).tolist() == [MISSING] * 5

    def test_a_fragment_that_gives_nothing_is_not_read(self) -> None:
        rollout = made("r", [Turn(2, 2), Turn(1, 2, "surplus"), Turn(1, 3, "too_few"), Turn(1, 1, "none"), Turn(2, 1)])
        plane = memory_plane()
        stage(plane, rollout)
        plan = planned(plane, rollout)
        assert plan.fragment_keys == at_places("r/c0", "r/c4")
        assert list(read_fragments(source(plane), [plan])) == plan.fragment_keys


class TestFailures:
    """Every failure code, from the smallest input that earns it."""

    def test_canonical_length_mismatch(self) -> None:
        plan, found = one_span(rows([[1]], [[2]]))
        assert failure(plan, found, canonical_length=3) == "canonical_length_mismatch"
        assert assemble_routes(plan, found, canonical_length=2).shape == (2, 1, 1)

    def test_missing_fragment(self) -> None:
        plan, _ = one_span(rows([[1]], [[2]]))
        assert failure(plan, {}) == "missing_fragment"

    @pytest.mark.parametrize("extras", [{}, {ROUTES_KEY: None}, {"other": "x"}])
    def test_missing_fragment_where_the_extras_hold_no_routes(self, extras: dict[str, Any]) -> None:
        assert failure(*one_span(extras, staged=2)) == "missing_fragment"

    def test_fragment_integrity_of_a_changed_value(self) -> None:
        plan, _ = one_span(rows([[1]], [[2]]))
        assert failure(plan, {"r/c0": encode_extras(rows([[1]], [[3]]))}) == "fragment_integrity"

    @pytest.mark.parametrize("found", [b"", b"N", b"D", b"D" + b"\0" * 8, b"\0" * 40, b"\xff"])
    def test_fragment_integrity_of_other_bytes(self, found: bytes) -> None:
        plan, _ = one_span(rows([[1]], [[2]]))
        assert failure(plan, {"r/c0": found}) == "fragment_integrity"

    @pytest.mark.parametrize(
        "payload",
        ["nrlre1:int16:2x1x1:AQA*AgA=", "nrlre1:int16:999999999x128x8:AQA=", [[[1]], [[2], [3]]], [[[1]], [[True]]]],
    )
    def test_fragment_integrity_of_a_malformed_payload_under_a_sound_digest(self, payload: Any) -> None:
        assert failure(*one_span({ROUTES_KEY: payload})) == "fragment_integrity"

    def test_fragment_integrity_of_an_expert_that_int16_cannot_hold(self) -> None:
        assert failure(*one_span(rows([[1]], [[1 << 15]], dtype="int32"))) == "fragment_integrity"
        assert failure(*one_span({ROUTES_KEY: [[[1 << 15]], [[2]]]})) == "fragment_integrity"
        assert failure(*one_span(rows([[1]], [[2]]) | {BOUNDARY_KEY: [[[1 << 15]]]})) == "fragment_integrity"

    @pytest.mark.parametrize("payload", ["nrlre1:int16:2x1:AQACAA==", [[1], [2]], [[[[1]]], [[[2]]]], 7])
    def test_fragment_rank(self, payload: Any) -> None:
        assert failure(*one_span({ROUTES_KEY: payload})) == "fragment_rank"

    def test_fragment_length(self) -> None:
        assert failure(*one_span(rows([[1]], [[2]], [[3]]))) == "fragment_length"
        assert failure(*one_span(rows([[1]]))) == "fragment_length"

    def test_fragment_length_of_a_boundary_that_is_not_one_row(self) -> None:
        assert failure(*one_span(rows([[1]], [[2]]) | {BOUNDARY_KEY: [[[1]], [[2]]]})) == "fragment_length"

    def test_fragment_model_shape(self) -> None:
        plan, found = one_span(rows([[1]], [[2]]))
        assert failure(plan, found, model_shape=(1, 2)) == "fragment_model_shape"
        assert failure(plan, found, model_shape=(2, 1)) == "fragment_model_shape"

    def test_fragment_model_shape_of_a_boundary(self) -> None:
        assert failure(*one_span(rows([[1]], [[2]]) | {BOUNDARY_KEY: [[[1, 2]]]})) == "fragment_model_shape"

    def test_fragment_model_shape_of_two_calls_that_disagree(self) -> None:
        rollout = MadeRollout("r")
        first = rollout.call([1], [2], extras=rows([[1]], [[2]]))
        rollout.call([3], [4], parent=first, extras=rows([[1, 2]], [[3, 4]]))
        plane = memory_plane()
        stage(plane, rollout)
        assert failure(planned(plane, rollout), fragments(rollout)) == "fragment_model_shape"

    def test_assembled_length_mismatch_of_a_plan_that_was_not_checked(self) -> None:
        plan, found = one_span(rows([[1]], [[2]]))
        unchecked = plan.model_copy(update={"expected_token_length": 3})
        assert failure(unchecked, found) == "assembled_length_mismatch"

    def test_a_failure_keeps_its_code_across_processes(self) -> None:
        error = pickle.loads(pickle.dumps(RouteFailure("gone", code="missing_fragment")))
        assert (type(error), error.code, error.detail) == (RouteFailure, "missing_fragment", "gone")


class TestGroups:
    def staged(self, *rollouts: MadeRollout) -> tuple[MemoryDataPlane, list[RoutePlan]]:
        plane = memory_plane()
        stage(plane, *rollouts)
        return plane, [planned(plane, rollout) for rollout in rollouts]

    def test_a_bad_fragment_leaves_its_siblings_untouched(self) -> None:
        turns = [Turn(2, 2), Turn(1, 2)]
        plane, plans = self.staged(*(made(f"r{i}", turns) for i in range(3)))
        plane.put_samples([place_in(plane, "r1/c1")], STAGING, {"extras": [b"garbled"]})
        good, bad, also_good = assemble_group(source(plane), plans)
        assert isinstance(bad, RouteFailure)
        assert bad.code == "fragment_integrity"
        assert np.array_equal(good, expected(turns))
        assert np.array_equal(also_good, expected(turns))

    def test_a_row_under_another_rows_key_is_caught(self) -> None:
        plane, plans = self.staged(made("r0", [Turn(2, 2)]), made("r1", [Turn(3, 2)]))
        stranger = plane.get_samples([place_in(plane, "r1/c0")], STAGING, ["extras"])["extras"][0]
        plane.put_samples([place_in(plane, "r0/c0")], STAGING, {"extras": [stranger]})
        assert [getattr(o, "code", "sound") for o in assemble_group(source(plane), plans)] == [
            "fragment_integrity",
            "sound",
        ]

    def test_one_rollout_of_another_shape_is_rejected_and_the_group_lives(self) -> None:
        turns = [Turn(2, 2)]
        plane, plans = self.staged(made("r0", turns, layers=3), made("r1", turns), made("r2", turns))
        odd, *others = assemble_group(source(plane), plans)
        assert isinstance(odd, RouteFailure)
        assert odd.code == "fragment_model_shape"
        assert all(np.array_equal(routes, expected(turns)) for routes in others)

    def test_a_row_without_routes_takes_the_groups_shape(self) -> None:
        plane, plans = self.staged(made("r0", [Turn(2, 2, "none")]), made("r1", [Turn(2, 2)]))
        without, with_routes = assemble_group(source(plane), plans)
        assert isinstance(without, np.ndarray)
        assert without.shape == (4, 2, 2)
        assert (without == -1).all()
        assert np.array_equal(with_routes, expected([Turn(2, 2)]))

    def test_a_group_without_any_routes_says_so(self) -> None:
        plane, plans = self.staged(made("r0", [Turn(2, 2, "none")]), made("r1", [Turn(3, 2, "too_few")]))
        outcomes = assemble_group(source(plane), plans)
        assert [outcome.shape for outcome in outcomes if isinstance(outcome, np.ndarray)] == [(4, 0, 0), (5, 0, 0)]

    def test_the_model_is_the_judge_where_it_is_known(self) -> None:
        plane, plans = self.staged(made("r0", [Turn(2, 2)], layers=3), made("r1", [Turn(2, 2)]))
        first, second = assemble_group(source(plane), plans, model_shape=(2, 2))
        assert isinstance(first, RouteFailure)
        assert isinstance(second, np.ndarray)

    def test_a_shape_from_a_config_may_be_a_list(self) -> None:
        plane, plans = self.staged(made("r0", [Turn(2, 2)]), made("r1", [Turn(2, 2, "none")]))
        outcomes = assemble_group(source(plane), plans, model_shape=[2, 2])  # type: ignore[arg-type]
        assert [outcome.shape for outcome in outcomes if isinstance(outcome, np.ndarray)] == [(4, 2, 2)] * 2

    def test_an_empty_group_has_no_routes(self) -> None:
        assert assemble_group(source(memory_plane()), []) == []

    def test_fragments_are_read_once_a_group_and_tokens_not_at_all(self) -> None:
        plane, plans = self.staged(*(made(f"r{i}", [Turn(2, 2), Turn(1, 2), Turn(1, 1, "none")]) for i in range(4)))
        reads: list[tuple[list[str], list[str]]] = []
        get_samples = plane.get_samples

        def counted(keys: Any, partition: str, fields: Any = None, **options: Any) -> Any:
            reads.append((list(map(staging_key_of, keys)), list(fields)))
            return get_samples(keys, partition, fields, **options)

        plane.get_samples = counted  # type: ignore[method-assign]
        assemble_group(source(plane), plans)
        assert reads == [([f"r{i}/c{c}" for i in range(4) for c in range(2)], ["extras"])]

    @pytest.mark.parametrize("fault", ["missing", "strange"])
    def test_a_passing_fault_of_the_plane_costs_no_routes(self, fault: str) -> None:
        """A place that is reused while it is read: the row is not there, or another's bytes come back."""
        turns = [Turn(2, 2), Turn(1, 2)]
        plane, plans = self.staged(made("r0", turns), made("r1", turns))
        get_samples = plane.get_samples
        reads: list[list[str]] = []

        def faulty_once(keys: Any, *args: Any, **options: Any) -> Any:
            reads.append(list(map(staging_key_of, keys)))
            batch = get_samples(keys, *args, **options)
            if len(reads) > 1:
                return batch
            if fault == "strange":
                batch.columns["extras"][0] = batch.columns["extras"][3]
                return batch
            return type(batch)(batch.sample_ids[1:], {"extras": batch.columns["extras"][1:]}, batch.sample_ids[:1])

        plane.get_samples = faulty_once  # type: ignore[method-assign]
        assert all(np.array_equal(routes, expected(turns)) for routes in assemble_group(source(plane), plans))
        assert reads == [["r0/c0", "r0/c1", "r1/c0", "r1/c1"], ["r0/c0", "r0/c1"]]

    def test_a_read_that_times_out_is_not_a_missing_fragment(self) -> None:
        plane, plans = self.staged(made("r0", [Turn(2, 2)]))

        def timing_out(*_args: Any, **_options: Any) -> Any:
            raise DataPlaneTimeout("no answer", call="get_samples", seconds=60.0)

        plane.get_samples = timing_out  # type: ignore[method-assign]
        with pytest.raises(DataPlaneTimeout):
            assemble_group(source(plane), plans)

    def test_memory_stays_near_the_encoded_fragments(self) -> None:
        """8 rows of 200 tokens × 16 × 8: less than 1.6 times the routes, beside the fragments that the plane holds."""
        turns = [Turn(20, 30)] * 4
        plane, plans = self.staged(*(made(f"r{i}", turns, layers=16, topk=8) for i in range(8)))
        tracemalloc.start()
        outcomes = assemble_group(source(plane), plans)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1.6 * sum(routes.nbytes for routes in outcomes if isinstance(routes, np.ndarray))


class TestSentinels:
    def test_missing_tokens_are_counted(self) -> None:
        routes = truth(5)
        routes[[1, 4]] = -1
        routes[2, 0, 0] = -1
        assert missing_token_count(routes) == 2
        assert missing_token_count(sentinel_routes(3, (2, 2))) == 3
        assert missing_token_count(sentinel_routes(3)) == 3

    def test_sentinels_are_int16_and_say_when_no_shape_is_known(self) -> None:
        assert sentinel_routes(3, (2, 4)).shape == (3, 2, 4)
        assert sentinel_routes(3).shape == (3, 0, 0)
        assert sentinel_routes(3).dtype == np.int16
