"""Router replay by whole groups, in both modes: from what engines gave to what a trainer replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.contract.routed_experts import ROUTES_KEY, encode_routed_experts, route_extras
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from rollout_reassembler.reassembly.route_plan import ROUTE_PLAN_TAG
from rollout_reassembler.reassembly.routes import FAILURE_CODES, RouteFailure
from tests.captures import MadeRollout, at_places, staging_key_of
from tests.reassembly.routed_pipeline import (
    AT_CAPTURE,
    IN_STAGING,
    MODEL,
    MODES,
    SOUND,
    AtCapture,
    Capture,
    InStaging,
    Pipeline,
    Planned,
    captures,
    claimed_one_less,
    claimed_one_more,
    finalized,
    routes_of,
)
from tests.route_captures import Turn, expected, made, truth

NARROW = (1, 2)
"""`(L, K)` where routes are written out by hand."""

MISSING = [[-1, -1]]


@pytest.fixture(params=MODES)
def pipeline(request: pytest.FixtureRequest) -> Pipeline:
    return Pipeline.on(MemoryDataPlane(), request.param)


@pytest.fixture
def deferred() -> Pipeline:
    return Pipeline.on(MemoryDataPlane(), "deferred")


@pytest.fixture
def direct() -> Pipeline:
    return Pipeline.on(MemoryDataPlane(), "direct")


def rows(*routes: list[list[int]]) -> dict[str, str]:
    return {ROUTES_KEY: encode_routed_experts([list(route) for route in routes])}


# --- the boundary -----------------------------------------------------------------------------------


def conversation(*, turns: int) -> MadeRollout:
    """Prompt [1, 2], sampled [3]; the engine makes up [0, 1] for token 3. Then a tool result [4], sampled [5]."""
    engine = np.array([[[10, 11]], [[20, 21]], [[30, 31]], [[40, 41]]])
    rollout = MadeRollout("r")
    first = rollout.call([1, 2], [3], extras=rows([[10, 11]], [[20, 21]], [[0, 1]]))
    if turns == 2:
        rollout.call([4], [5], parent=first, extras=route_extras(engine, prev_len=3, delta_len=2))
    return rollout


def test_the_next_turns_prefill_routes_the_last_sampled_token(pipeline: Pipeline) -> None:
    (routes,) = pipeline.routes(finalized(pipeline, conversation(turns=2)), model_shape=NARROW)
    assert routes.tolist() == [[[10, 11]], [[20, 21]], [[30, 31]], [[40, 41]], MISSING]


def test_without_a_next_turn_the_last_sampled_token_is_missing(pipeline: Pipeline) -> None:
    (routes,) = pipeline.routes(finalized(pipeline, conversation(turns=1)), model_shape=NARROW)
    assert routes.tolist() == [[[10, 11]], [[20, 21]], MISSING]


def test_a_branch_off_the_chain_never_routes_a_token_of_the_row(pipeline: Pipeline) -> None:
    """Two calls continue the first one, and the one of the chain was staged without routes."""
    engine = np.array([[[10, 11]], [[20, 21]], [[30, 31]], [[40, 41]]])
    rollout = MadeRollout("r")
    first = rollout.call([1, 2], [3], extras=route_extras(engine[:2], prev_len=0, delta_len=3))
    rollout.call([8], [9], parent=first, extras=route_extras(engine + 50, prev_len=3, delta_len=2))
    rollout.call([4], [5], parent=first)
    (routes,) = pipeline.routes(finalized(pipeline, rollout), model_shape=NARROW)
    assert routes.tolist() == [[[10, 11]], [[20, 21]], MISSING, MISSING, MISSING]


# --- CASES: routes ----------------------------------------------------------------------------------


def valid_but_missing(pipeline: Pipeline, rollout: MadeRollout, tokens: int) -> None:
    """The rollout's row is published with its tokens, and not one of them has a route. Its sibling has all."""
    answer = finalized(pipeline, rollout, made("sibling", SOUND))
    assert answer.rejections == {}
    row, sibling = pipeline.routes(answer)
    assert row.shape == (tokens, *MODEL)
    assert (row == -1).all()
    assert np.array_equal(sibling, expected(SOUND))


def test_18057_route_rows_for_17804_tokens(pipeline: Pipeline) -> None:
    rollout = MadeRollout("r")
    staged = np.ones((18_057, *MODEL), np.int16)
    rollout.call(range(10_000), range(7_804), extras={ROUTES_KEY: encode_routed_experts(staged)})
    valid_but_missing(pipeline, rollout, 17_804)


def test_one_row_less_than_tokens(pipeline: Pipeline) -> None:
    """Taken as the generation's two rows, token 2's route would land on token 3."""
    rollout = MadeRollout("r")
    rollout.call([1, 2], [3, 4], extras={ROUTES_KEY: encode_routed_experts(truth(3))})
    valid_but_missing(pipeline, rollout, 4)


def test_routes_for_the_whole_sequence_where_the_delta_was_wanted(pipeline: Pipeline) -> None:
    rollout, routes = MadeRollout("r"), truth(6)
    first = rollout.call([1, 2], [3], extras={ROUTES_KEY: encode_routed_experts(routes[:3])})
    rollout.call([4], [5, 6], parent=first, extras={ROUTES_KEY: encode_routed_experts(routes)})
    (row,) = pipeline.routes(finalized(pipeline, rollout))
    assert np.array_equal(row[:2], routes[:2])
    assert (row[2:] == -1).all()


def test_routes_dropped_by_a_preemption(pipeline: Pipeline) -> None:
    rollout = MadeRollout("r")
    rollout.call([1, 2], [3, 4, 5], extras={ROUTES_KEY: encode_routed_experts(truth(2))})
    valid_but_missing(pipeline, rollout, 5)


def test_one_rollout_of_another_shape_and_the_group_lives(pipeline: Pipeline) -> None:
    odd, *others = made("odd", SOUND, layers=3), made("a", SOUND), made("b", SOUND)
    answer = finalized(pipeline, odd, *others)
    batch = pipeline.batch(answer)
    if pipeline.mode == "direct":
        assert answer.rejections == {"odd": "route_assembly:fragment_model_shape"}
    else:
        assert answer.rejections == {}
        assert batch.route_report.failures == {"fragment_model_shape": 1}
    first, *routed = routes_of(batch)
    assert (first == -1).all()
    assert all(np.array_equal(row, expected(SOUND)) for row in routed)


def test_a_group_with_valid_rows_but_no_routes_yet_is_published(pipeline: Pipeline) -> None:
    answer = finalized(pipeline, made("a", [Turn(2, 2, "none")]), made("b", [Turn(3, 2, "too_few")]))
    assert (answer.valid_row_count, answer.total_row_count) == (2, 2)
    assert [row.shape for row in pipeline.routes(answer)] == [(4, *MODEL), (5, *MODEL)]
    if pipeline.mode == "direct":
        assert [row["routed_experts"].shape for row in pipeline.rows(answer)] == [(4, 0, 0), (5, 0, 0)]


# --- every failure, from its smallest input ---------------------------------------------------------

FAILURES: dict[AtCapture | InStaging, str] = {**AT_CAPTURE, **IN_STAGING, claimed_one_more: "fragment_length"}


@pytest.mark.parametrize("spoil", FAILURES, ids=lambda spoil: spoil.__name__)
def test_a_bad_fragment_costs_its_own_rollout_and_is_counted_by_its_code(
    pipeline: Pipeline, spoil: AtCapture | InStaging
) -> None:
    """One call of two tokens, `[1]|[2]`, staged with a row for the second; and siblings on both sides."""
    code = FAILURES[spoil]
    small = Planned((Turn(1, 1, "tail"),), spoil=spoil)
    capture = Capture((Planned(SOUND), small, Planned(SOUND)))
    outcome = capture.through(pipeline, "g")
    assert [outcome.failure(index) for index in range(3)] == [None, code, None]
    assert (outcome.routes[1] == -1).all()
    for sibling in (0, 2):
        assert np.array_equal(outcome.routes[sibling], expected(SOUND))
    if pipeline.mode == "direct":
        assert outcome.answer.rejections == {"g-r1": f"route_assembly:{code}"}
        assert "g-r1/c0" in map(staging_key_of, outcome.answer.staging_keys)
        assert outcome.answer.metrics["finalize/capture_failure_reason_route_assembly_count"] == 1.0
        assert outcome.answer.metrics[f"finalize/capture_failure_reason_route_assembly_{code}_count"] == 1.0
    else:
        assert outcome.answer.rejections == {}
        assert list(outcome.failed_rows) == ["g_g1"]
    assert pipeline.staged() == set()


@pytest.mark.parametrize("spoil", FAILURES, ids=lambda spoil: spoil.__name__)
def test_or_stops_the_trainer_as_configured_and_nothing_is_lost(
    deferred: Pipeline, spoil: AtCapture | InStaging
) -> None:
    rollout = Planned((Turn(1, 1, "tail"),), spoil=spoil).stage(deferred, "r")
    answer = deferred.finalize([rollout])
    with pytest.raises(RouteFailure, match="row 'g_g0'") as failed:
        deferred.batch(answer, on_failure="raise")
    assert failed.value.code == FAILURES[spoil]
    assert deferred.staged() == {"r/c0"}


@pytest.mark.parametrize("spoil", [claimed_one_more, claimed_one_less], ids=lambda spoil: spoil.__name__)
def test_a_claim_that_is_one_token_off_shifts_nothing(pipeline: Pipeline, spoil: InStaging) -> None:
    """`[1]|[2]` with a row for each: a claim of three gives nothing, one of one row is found out."""
    outcome = Capture((Planned(SOUND), Planned((Turn(1, 1),), spoil=spoil))).through(pipeline, "g")
    assert outcome.failure(1) == (None if spoil is claimed_one_more else "fragment_length")
    assert (outcome.routes[1] == -1).all()
    assert np.array_equal(outcome.routes[0], expected(SOUND))


def test_a_plan_of_another_row_is_a_canonical_length_mismatch(deferred: Pipeline) -> None:
    answer = finalized(deferred, made("a", SOUND), made("b", [Turn(1, 1)]))
    (tags,) = deferred.plane.get_tags(["g_g0"], deferred.canonical)
    deferred.plane.put_samples(["g_g1"], deferred.canonical, tags=[{ROUTE_PLAN_TAG: tags[ROUTE_PLAN_TAG]}])
    batch = deferred.batch(answer)
    assert batch.route_report.failures == {"canonical_length_mismatch": 1}
    assert np.array_equal(routes_of(batch)[0], expected(SOUND))
    assert batch.route_report.unreleased == at_places("a/c0", "a/c1")


def test_routes_of_another_length_than_the_row_are_an_assembled_length_mismatch(direct: Pipeline) -> None:
    answer = finalized(direct, made("a", SOUND), made("b", [Turn(1, 1)]))
    direct.plane.put_samples(["g_g1"], direct.canonical, {"routed_experts": [truth(3)]})
    batch = direct.batch(answer)
    assert batch.route_report.failures == {"assembled_length_mismatch": 1}
    assert np.array_equal(routes_of(batch)[0], expected(SOUND))


def test_every_failure_code_was_earned_above() -> None:
    assert {*FAILURES.values(), "canonical_length_mismatch", "assembled_length_mismatch"} == set(FAILURE_CODES)


# --- groups mix -------------------------------------------------------------------------------------


def test_rows_with_routes_rows_without_and_placeholders_share_a_group(pipeline: Pipeline) -> None:
    rollouts = [made("routed", SOUND), made("plain", [Turn(2, 2, "none")]), made("lost", SOUND)]
    answer = finalized(pipeline, *rollouts, receipts=[rollouts[0].receipt(), rollouts[1].receipt(), None])
    assert answer.meta.sample_ids == ["g_g0", "g_g1", "g_g2"]
    assert (answer.valid_row_count, answer.total_row_count) == (2, 3)
    batch = pipeline.batch(answer)
    routed, plain, placeholder = routes_of(batch)
    assert np.array_equal(routed, expected(SOUND))
    assert plain.shape == (4, *MODEL)
    assert placeholder.shape == (1, *MODEL)
    assert (plain == -1).all()
    assert (placeholder == -1).all()
    assert (batch.route_report.rows_without_routes, batch.route_report.failures) == (2, {})
    if pipeline.mode == "direct":
        assert [row["routed_experts"].shape for row in pipeline.rows(answer)] == [(8, 2, 2), (4, 2, 2), (1, 2, 2)]
    assert pipeline.staged() == set()


@pytest.mark.parametrize("receipt", [None, "unreadable"])
def test_an_all_rejected_group_before_any_routes_were_seen(pipeline: Pipeline, receipt: Any) -> None:
    answer = finalized(pipeline, made("a", SOUND), made("b", SOUND), receipts=[receipt, receipt])
    assert (answer.valid_row_count, answer.total_row_count) == (0, 2)
    batch = pipeline.batch(answer)
    assert batch.input_lengths.tolist() == [1, 1]
    assert (batch.routed_experts == -1).all()
    if pipeline.mode == "direct":
        assert [row["routed_experts"].shape for row in pipeline.rows(answer)] == [(1, 0, 0), (1, 0, 0)]
    is_kept = receipt is not None
    assert bool(pipeline.staged()) == bool(answer.cleanup_pending) == is_kept


def test_a_group_whose_every_fragment_is_bad_is_published(pipeline: Pipeline) -> None:
    bad = Planned(SOUND, spoil=next(iter(IN_STAGING)))
    outcome = Capture((bad, bad)).through(pipeline, "g")
    assert outcome.answer.total_row_count == 2
    assert outcome.answer.valid_row_count == (0 if pipeline.mode == "direct" else 2)
    assert [outcome.failure(index) for index in range(2)] == [bad.code] * 2
    assert all((row == -1).all() for row in outcome.routes)
    assert pipeline.staged() == set()


def test_one_rollout_alone_is_proven_with_its_routes(pipeline: Pipeline) -> None:
    rollout = made("r", SOUND)
    pipeline.stage(rollout)
    proven = pipeline.reassembler().finalize_rollout("r", rollout.receipt(), reward=1.0)
    assert proven.route_plan is not None
    if pipeline.mode == "direct":
        assert np.array_equal(proven.routed_experts, expected(SOUND))
    else:
        assert proven.routed_experts is None
    assert pipeline.staged() == {"r/c0", "r/c1"}


# --- generated --------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(captures())
def test_both_modes_give_the_same_tensor_row_by_row_or_the_same_reason(capture: Capture) -> None:
    capture.check({mode: capture.through(Pipeline.on(MemoryDataPlane(), mode), "g") for mode in MODES})


# --- in numbers -------------------------------------------------------------------------------------


def mixed_group(pipeline: Pipeline) -> FinalizedGroup:
    """Rows of 8 tokens (7 routed), 4 (none routed), 2 (bad: a fragment of another rank), and a placeholder."""
    planned = (
        Planned(SOUND),
        Planned((Turn(2, 2, "none"),)),
        Planned((Turn(1, 1),), spoil=next(spoil for spoil, code in AT_CAPTURE.items() if code == "fragment_rank")),
        Planned(SOUND, has_receipt=False),
    )
    made_rollouts = [rollout.stage(pipeline, f"r{index}") for index, rollout in enumerate(planned)]
    receipts = [rollout.receipt() for rollout in made_rollouts[:3]]
    return pipeline.finalize(made_rollouts, receipts=[*receipts, None])


def route_figures(answer: FinalizedGroup) -> dict[str, float]:
    return {name: value for name, value in answer.metrics.items() if "/route" in name}


def test_the_metrics_of_a_direct_group(direct: Pipeline) -> None:
    answer = mixed_group(direct)
    assert route_figures(answer) == {
        "finalize/route_plan_span_count": 3.0,
        "finalize/route_plan_encoded_bytes": 0.0,
        "finalize/routed_experts_row_coverage": 1 / 2,
        "finalize/routed_experts_sentinel_token_fraction": 5 / 12,
    }
    assert answer.metrics["finalize/invalid_row_rate"] == 1 / 2
    assert answer.metrics["finalize/capture_failure_reason_route_assembly_fragment_rank_count"] == 1.0
    assert answer.timings["row_assembly/routes_ms"] > 0


def test_the_metrics_of_a_deferred_group(deferred: Pipeline) -> None:
    answer = mixed_group(deferred)
    tags = deferred.plane.get_tags(answer.meta.sample_ids, deferred.canonical)
    encoded = [tag[ROUTE_PLAN_TAG] for tag in tags]
    assert [tag is None for tag in encoded] == [False, True, False, True]
    assert route_figures(answer) == {
        "finalize/route_plan_span_count": 4.0,
        "finalize/route_plan_encoded_bytes": float(sum(len(tag) for tag in encoded if tag)),
    }
    report = deferred.batch(answer).route_report
    assert report.metrics() == {
        "router_replay/failure_reason_fragment_rank_count": 1.0,
        "router_replay/rows": 4.0,
        "router_replay/rows_without_routes": 2.0,
        "router_replay/failed_rows": 1.0,
        "router_replay/sentinel_token_fraction": 8 / 15,
        "router_replay/unreleased_keys": 0.0,
    }


def test_coverage_does_not_depend_on_the_siblings(direct: Pipeline) -> None:
    """A row without routes takes its group's shape, and is as uncovered as in a group that has none."""
    alone = finalized(direct, made("a", [Turn(2, 2, "none")]), group_id="alone")
    beside = finalized(direct, made("a", [Turn(2, 2, "none")]), made("b", SOUND), group_id="beside")
    assert alone.metrics["finalize/routed_experts_row_coverage"] == 0.0
    assert beside.metrics["finalize/routed_experts_row_coverage"] == 0.5


def test_no_route_metric_where_router_replay_is_off(direct: Pipeline) -> None:
    rollout = made("r", SOUND)
    direct.stage(rollout)
    off = Pipeline.on(direct.plane, "deferred", prefix="off-")
    off.stage(rollout)
    reassembler = type(off.reassembler())(
        off.plane, partition_id=off.canonical, staging_partition=off.staging, pad_token_id=0, max_seq_len=None
    )
    answer = reassembler.finalize_group(
        "g", ["r"], [rollout.receipt()], [1.0], mask_sample=None, fallback_weight_version=0, prompt_idx=0
    )
    assert route_figures(answer) == {}
    assert off.staged() == set()
    assert off.plane.get_tags(["g_g0"], off.canonical) == [{"weight_version": 1, "prompt_idx": 0, "group_id": "g"}]


def odd_and_even(pipeline: Pipeline, group: str) -> list[MadeRollout]:
    """A group of two: the first one's routes are of another `(L, K)` than the model's."""
    rollouts = [made(f"{group}-odd", SOUND, layers=3), made(f"{group}-even", SOUND)]
    pipeline.stage(*rollouts)
    return rollouts


@pytest.mark.parametrize("model_shape", [MODEL, list(MODEL)])
def test_in_a_group_of_two_the_models_shape_tells_the_bad_one(direct: Pipeline, model_shape: Any) -> None:
    rollouts = odd_and_even(direct, "g")
    reassembler = RolloutReassembler(
        direct.plane,
        partition_id=direct.canonical,
        staging_partition=direct.staging,
        pad_token_id=0,
        max_seq_len=None,
        router_replay_enabled=True,
        model_shape=model_shape,
    )
    answer = direct.finalize(rollouts, reassembler=reassembler)
    assert answer.rejections == {"g-odd": "route_assembly:fragment_model_shape"}


def test_in_a_group_of_two_an_earlier_groups_shape_tells_the_bad_one(direct: Pipeline) -> None:
    reassembler = direct.reassembler()
    sound = [made("s0", SOUND), made("s1", SOUND)]
    direct.stage(*sound)
    assert direct.finalize(sound, group_id="s", reassembler=reassembler).rejections == {}
    answer = direct.finalize(odd_and_even(direct, "g"), reassembler=reassembler)
    assert answer.rejections == {"g-odd": "route_assembly:fragment_model_shape"}


def test_a_single_row_of_another_shape_does_not_become_the_shape_of_later_groups(direct: Pipeline) -> None:
    reassembler = direct.reassembler()
    sound, lone = [made("s0", SOUND), made("s1", SOUND)], [made("lone", SOUND, layers=3)]
    direct.stage(*sound, *lone)
    direct.finalize(sound, group_id="s", reassembler=reassembler)
    direct.finalize(lone, group_id="lone", reassembler=reassembler)
    answer = direct.finalize(odd_and_even(direct, "g"), reassembler=reassembler)
    assert answer.rejections == {"g-odd": "route_assembly:fragment_model_shape"}
