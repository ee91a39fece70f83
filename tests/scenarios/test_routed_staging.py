"""Router replay and the plane: who holds staged routes how long, what crashes leave, what a group costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.bench.counting import CallCounter, counted
from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout
from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.contract.routed_experts import ROUTES_KEY, encode_routed_experts, route_extras
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.route_plan import ROUTE_PLAN_TAG, decode_route_plan
from rollout_reassembler.reassembly.routed_rows import assemble_group_routes
from rollout_reassembler.reassembly.sweep import sweep_staging
from rollout_reassembler.staging.source import StagingSource
from tests.captures import MadeRollout, staging_key_of
from tests.reassembly.crash_plane import CrashPlane
from tests.reassembly.routed_pipeline import MODES, SOUND, Mode, Pipeline, finalized, routes_of
from tests.route_captures import Turn, expected, made, truth


@pytest.fixture(params=MODES)
def pipeline(request: pytest.FixtureRequest) -> Pipeline:
    return Pipeline.on(MemoryDataPlane(), request.param)


@pytest.fixture
def deferred() -> Pipeline:
    return Pipeline.on(MemoryDataPlane(), "deferred")


@pytest.fixture
def direct() -> Pipeline:
    return Pipeline.on(MemoryDataPlane(), "direct")


# --- who holds staged rows, and how long ------------------------------------------------------------


def with_branch(rollout_id: str) -> MadeRollout:
    """Two turns, and an abandoned try of the second one before it."""
    rollout, routes = MadeRollout(rollout_id), truth(8)
    first = rollout.call([1, 2], [3, 4], extras=route_extras(routes[:4], prev_len=0, delta_len=4))
    rollout.call([9], [9], parent=first, call_id="abandoned", extras=route_extras(routes[:6], prev_len=4, delta_len=2))
    rollout.call([5], [6, 7, 8], parent=first, call_id="kept", extras=route_extras(routes, prev_len=4, delta_len=4))
    return rollout


def test_deferred_keeps_exactly_the_rows_that_plans_name(deferred: Pipeline) -> None:
    """Whatever the trainer still needs, with what goes with it; nothing of the rows that have no routes."""
    rollouts = [with_branch("a"), made("plain", [Turn(2, 2, "none")]), made("short", [Turn(1, 3, "too_few")])]
    rollouts += [made("b", SOUND), made("lost", SOUND)]
    receipts = [*(rollout.receipt() for rollout in rollouts[:4]), None]
    answer = finalized(deferred, *rollouts, receipts=receipts)
    tags = [tag[ROUTE_PLAN_TAG] for tag in deferred.plane.get_tags(answer.meta.sample_ids, deferred.canonical)]
    assert [tag is not None for tag in tags] == [True, False, False, True, False]
    named = {staging_key_of(key) for tag in tags if tag for key in decode_route_plan(tag).cleanup_staging_keys}
    assert deferred.staged() == named == {"a/c0", "a/abandoned", "a/kept", "b/c0", "b/c1"}
    batch = deferred.batch(answer)
    assert deferred.staged() == set()
    assert np.array_equal(routes_of(batch)[0][:-1], truth(8)[:-1])


def test_direct_keeps_nothing(direct: Pipeline) -> None:
    finalized(direct, with_branch("a"), made("plain", [Turn(2, 2, "none")]))
    assert direct.staged() == set()


@pytest.mark.parametrize("released", [0, 1, 2])
def test_a_deferred_group_finalized_again_gives_the_same_answer_and_clears_nothing(
    deferred: Pipeline, released: int
) -> None:
    """Before, while and after the trainer works through its rows."""
    rollouts = [made("a", SOUND), made("b", SOUND)]
    first = finalized(deferred, *rollouts)
    for index in range(released):
        meta = first.meta
        batch = deferred.batch(type(meta)(meta.partition_id, sample_ids=[meta.sample_ids[index]]))
        assert np.array_equal(routes_of(batch)[0], expected(SOUND))
    staged = deferred.staged()
    assert len(staged) == 2 * (2 - released)
    published = deferred.plane.list_samples(deferred.canonical)
    assert deferred.finalize(rollouts) == first
    assert deferred.staged() == staged
    assert deferred.plane.list_samples(deferred.canonical) == published


def test_a_sweep_spares_live_rollouts_and_a_rollout_lives_until_its_routes_are_released(deferred: Pipeline) -> None:
    answer = finalized(deferred, made("live", SOUND), made("forgotten", SOUND))
    swept = sweep_staging(deferred.plane, deferred.staging, older_than_s=0.0, live_rollouts=["live"], dry_run=False)
    assert set(swept.found) == {"forgotten"}
    batch = deferred.batch(answer)
    assert np.array_equal(routes_of(batch)[0], expected(SOUND))
    assert batch.route_report.failures == {"missing_fragment": 1}
    assert deferred.staged() == set()


# --- faults of the plane ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "during", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_a_crash_at_any_step_costs_no_route(mode: Mode, where: Any) -> None:
    undisturbed = Pipeline.on(MemoryDataPlane(), mode)
    rollouts = [with_branch("a"), made("b", SOUND), made("plain", [Turn(2, 2, "none")])]
    counting = CrashPlane(undisturbed.plane)
    undisturbed.stage(*rollouts)
    once = undisturbed.over(counting).finalize(rollouts)
    steps = len(counting.calls)
    assert steps >= 5
    for step in range(1, steps + 1):
        pipeline = Pipeline.on(MemoryDataPlane(), mode)
        pipeline.stage(*rollouts)
        failing = CrashPlane(pipeline.plane)
        failing.fail_at(step, where=where)
        with suppress(DataPlaneError):
            assert pipeline.over(failing).finalize(rollouts).cleanup_pending
        assert pipeline.finalize(rollouts) == once
        assert pipeline.staged() == undisturbed.staged()
        routes = pipeline.routes(once)
        assert np.array_equal(routes[0][:-1], truth(8)[:-1])
        assert np.array_equal(routes[1], expected(SOUND))
        assert (routes[2] == -1).all()
        assert pipeline.staged() == set()


def test_a_route_read_that_times_out_is_no_missing_fragment(direct: Pipeline) -> None:
    rollout = made("r", SOUND)
    direct.stage(rollout)
    plane = CrashPlane(direct.plane)
    plane.fail_at(2)
    with pytest.raises(DataPlaneTimeout, match="group 'g'"):
        direct.over(plane).finalize([rollout])
    assert plane.calls == ["get_samples", "get_samples"]
    assert direct.staged() == {"r/c0", "r/c1"}
    (routes,) = direct.routes(direct.finalize([rollout]))
    assert np.array_equal(routes, expected(SOUND))


def test_a_row_written_again_without_a_plan_has_no_plan(deferred: Pipeline) -> None:
    """`[1]|[2]` with routes is stored and the finalizer dies; what is asked for then is `[1]|[3]`, without any.

    The first plan fits the second row by its length: kept as its tag, it would route token 3 as token 2.
    """
    rollout = MadeRollout("r")
    first = rollout.call([1], [2], extras={ROUTES_KEY: encode_routed_experts(truth(2))})
    second = rollout.call([1], [3])
    deferred.stage(rollout)
    plane = CrashPlane(deferred.plane)
    plane.fail("store_samples", where="after")
    with pytest.raises(DataPlaneTimeout):
        deferred.over(plane).finalize([rollout], receipts=[rollout.receipt(first)])
    answer = deferred.finalize([rollout], receipts=[rollout.receipt(second)])
    batch = deferred.batch(answer)
    assert batch.input_ids.tolist() == [1, 3]
    assert (batch.routed_experts == -1).all()
    assert (batch.route_report.failures, batch.route_report.rows_without_routes) == ({}, 1)


# --- what it costs ----------------------------------------------------------------------------------


def counted_pipeline(pipeline: Pipeline) -> tuple[Pipeline, CallCounter]:
    """The same pipeline over a client that counts its calls by kind, and the bytes it reads."""
    plane, counter = counted(pipeline.plane, staging_partition=pipeline.staging, partition_id=pipeline.canonical)
    return pipeline.over(plane), counter


def test_a_direct_group_is_two_reads_one_publication_one_clear_and_its_record(direct: Pipeline) -> None:
    rollouts = [with_branch(f"r{index}") for index in range(4)]
    direct.stage(*rollouts)
    over, counter = counted_pipeline(direct)
    reassembler = over.reassembler()
    counter.reset()
    answer = over.finalize(rollouts, reassembler=reassembler)
    assert counter.traffic().calls == {"base_read": 1, "route_read": 1, "record": 2, "publish": 2, "clear": 1}
    counter.reset()
    over.batch(answer)
    assert counter.traffic().calls == {f"get_tags:{direct.canonical}": 1, f"get_samples:{direct.canonical}": 1}


def test_a_deferred_group_reads_no_route_until_the_trainer_does(deferred: Pipeline) -> None:
    rollouts = [made(f"r{index}", [Turn(200, 200)] * 2, layers=8, topk=8) for index in range(4)]
    deferred.stage(*rollouts)
    routes_bytes = 4 * 800 * 8 * 8 * 2
    over, counter = counted_pipeline(deferred)
    reassembler = over.reassembler()
    counter.reset()
    answer = over.finalize(rollouts, reassembler=reassembler)
    assert counter.traffic().calls == {"base_read": 1, "record": 2, "publish": 2, "clear": 1}
    assert counter.traffic().bytes_read < routes_bytes / 4
    counter.reset()
    batch = over.batch(answer, model_shape=(8, 8))
    assert batch.route_report.failures == {}
    assert counter.traffic().calls == {
        f"get_tags:{deferred.canonical}": 1,
        f"get_samples:{deferred.canonical}": 1,
        "route_read": 1,
        "clear": 1,
    }
    assert counter.traffic().bytes_read > routes_bytes


def test_routes_of_abandoned_calls_are_never_read(direct: Pipeline) -> None:
    rollouts = [with_branch("a")]
    direct.stage(*rollouts)
    reads: list[tuple[list[str], list[str]]] = []
    get_samples = direct.plane.get_samples

    def noted(keys: Any, partition: str, fields: Any = None, **options: Any) -> Any:
        reads.append((list(map(staging_key_of, keys)), list(fields)))
        return get_samples(keys, partition, fields, **options)

    direct.plane.get_samples = noted
    direct.finalize(rollouts)
    assert reads == [(["a/c0", "a/abandoned", "a/kept"], ["call"]), (["a/c0", "a/kept"], ["extras"])]


def peak_of(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_group_is_never_padded_to_its_longest_row(pipeline: Pipeline) -> None:
    """31 rows of 4 tokens and one of 3,000: padded, their routes would be 31 times what they are."""
    rollouts = [made(f"r{index}", [Turn(2, 2)], layers=8, topk=8) for index in range(31)]
    rollouts.append(made("long", [Turn(1_000, 2_000)], layers=8, topk=8))
    pipeline.stage(*rollouts)
    receipts = [rollout.receipt() for rollout in rollouts]
    routes_bytes = (31 * 4 + 3_000) * 8 * 8 * 2
    answers: list[FinalizedGroup] = []
    most = 4 * routes_bytes
    assert peak_of(lambda: answers.append(pipeline.finalize(rollouts, receipts=receipts))) < most
    assert peak_of(lambda: pipeline.batch(answers[0], model_shape=(8, 8))) < most


def test_a_fragments_bytes_are_given_back_as_it_is_opened(direct: Pipeline) -> None:
    """A queue hands out bytes of its reader's own: 4/3 of the routes. Held to the end, they would add up to 7/3."""
    rollouts = [made(f"r{index}", [Turn(20, 30)] * 4, layers=16, topk=8) for index in range(8)]
    direct.stage(*rollouts)
    proven = [direct.reassembler().finalize_rollout(r.rollout_id, r.receipt(), reward=1.0) for r in rollouts]
    get_samples = direct.plane.get_samples

    def copied(*args: Any, **options: Any) -> Any:
        batch = get_samples(*args, **options)
        batch.columns["extras"] = [value[:1] + value[1:] for value in batch.columns["extras"]]
        return batch

    direct.plane.get_samples = copied
    source = StagingSource(direct.plane, staging_partition=direct.staging)
    peak = peak_of(lambda: assemble_group_routes(source, proven))
    assert peak < 1.8 * sum(rollout.routed_experts.nbytes for rollout in proven)
