"""Router replay on a real TransferQueue: the same tensors and answers as on the memory plane."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from rollout_reassembler.bench.counting import counted
from rollout_reassembler.contract.routed_experts import ROUTES_KEY, encode_routed_experts, route_extras
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.route_plan import ROUTE_PLAN_TAG
from tests.captures import MadeRollout
from tests.reassembly.routed_pipeline import (
    AT_CAPTURE,
    IN_STAGING,
    MODEL,
    MODES,
    ONE_OFF,
    SOUND,
    Capture,
    Mode,
    Pipeline,
    Planned,
    captures,
    routes_of,
)
from tests.route_captures import Turn, expected, made

pytestmark = pytest.mark.ray

_numbers = itertools.count()


@pytest.fixture(scope="module")
def on_queue(queue_plane: DataPlaneClient) -> Callable[[Mode], Pipeline]:
    """The queue's two pipelines, which all tests here share; a test has group ids and rollout ids of its own."""
    pipelines = {mode: pipeline_on(queue_plane, mode) for mode in MODES}
    return pipelines.__getitem__


def pipeline_on(plane: DataPlaneClient, mode: Mode) -> Pipeline:
    """Partition names count in the size of a plan, so they are the same on both planes."""
    return Pipeline.on(plane, mode, prefix=f"routes-{mode}-")


@pytest.fixture(params=MODES)
def pipeline(request: pytest.FixtureRequest, on_queue: Callable[[Mode], Pipeline]) -> Pipeline:
    return on_queue(request.param)


@pytest.fixture
def group_id() -> str:
    return unused_id()


def unused_id() -> str:
    return f"group-{next(_numbers)}"


# --- both modes, both planes ------------------------------------------------------------------------


def check_everywhere(capture: Capture, on_queue: Callable[[Mode], Pipeline]) -> None:
    """Put a capture through both modes on both planes: four times the same tensors, or the same reasons.

    A failing one is best shrunk on the memory plane, by the like test in `test_routed_groups.py`.
    """
    group_id = unused_id()
    queued = {mode: capture.through(on_queue(mode), group_id) for mode in MODES}
    held = {mode: capture.through(pipeline_on(MemoryDataPlane(), mode), group_id) for mode in MODES}
    capture.check(queued)
    for mode in MODES:
        assert all(map(np.array_equal, queued[mode].routes, held[mode].routes))
        assert queued[mode].failed_rows == held[mode].failed_rows
        assert queued[mode].answer.rejections == held[mode].answer.rejections
        assert queued[mode].answer.metrics == held[mode].answer.metrics


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(capture=captures())
def test_generated_captures_give_the_tensors_of_the_memory_plane(
    on_queue: Callable[[Mode], Pipeline], capture: Capture
) -> None:
    check_everywhere(capture, on_queue)


def test_every_fault_at_once_costs_only_its_own_rollouts(on_queue: Callable[[Mode], Pipeline]) -> None:
    spoiled = [Planned(SOUND, spoil=spoil, spoiled=1) for spoil in [*AT_CAPTURE, *IN_STAGING, *ONE_OFF]]
    odd = [Planned(SOUND, layers=3), Planned(SOUND, has_receipt=False), Planned((Turn(2, 2, "none"),))]
    sound = [Planned(SOUND)] * 8
    capture = Capture(
        tuple(rollout for group in itertools.zip_longest(spoiled, odd, sound) for rollout in group if rollout)
    )
    check_everywhere(capture, on_queue)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_every_width_of_envelope(on_queue: Callable[[Mode], Pipeline], dtype: str) -> None:
    turns = (Turn(3, 2, "full", dtype=dtype), Turn(2, 2, "tail", dtype=dtype), Turn(1, 2, "none", dtype=dtype))
    check_everywhere(Capture((Planned(turns), Planned(turns[:1]))), on_queue)


# --- the case, and groups that mix ------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 2])
def test_the_next_turns_prefill_routes_the_last_sampled_token_else_it_is_missing(
    pipeline: Pipeline, group_id: str, turns: int
) -> None:
    """Prompt [1, 2], sampled [3]; the engine makes up [0, 1] for token 3. Then a tool result [4], sampled [5]."""
    engine = np.array([[[10, 11]], [[20, 21]], [[30, 31]], [[40, 41]]])
    rollout = MadeRollout(group_id)
    dummy_last = np.concatenate([engine[:2], [[[0, 1]]]])
    first = rollout.call([1, 2], [3], extras={ROUTES_KEY: encode_routed_experts(dummy_last)})
    if turns == 2:
        rollout.call([4], [5], parent=first, extras=route_extras(engine, prev_len=3, delta_len=2))
    pipeline.stage(rollout)
    (routes,) = pipeline.routes(pipeline.finalize([rollout], group_id=group_id), model_shape=(1, 2))
    missing = [[-1, -1]]
    last = {1: [missing], 2: [[[30, 31]], [[40, 41]], missing]}[turns]
    assert routes.tolist() == [[[10, 11]], [[20, 21]], *last]


def test_rows_with_routes_rows_without_and_placeholders_share_a_group(pipeline: Pipeline, group_id: str) -> None:
    turns = {"routed": SOUND, "plain": [Turn(2, 2, "none")], "lost": SOUND}
    rollouts = [made(f"{group_id}-{name}", of_rollout) for name, of_rollout in turns.items()]
    pipeline.stage(*rollouts)
    receipts = [rollouts[0].receipt(), rollouts[1].receipt(), None]
    answer = pipeline.finalize(rollouts, group_id=group_id, receipts=receipts)
    routed, plain, placeholder = pipeline.routes(answer)
    assert np.array_equal(routed, expected(SOUND))
    assert (plain.shape, placeholder.shape) == ((4, *MODEL), (1, *MODEL))
    assert (plain == -1).all()
    assert (placeholder == -1).all()
    if pipeline.mode == "direct":
        assert [row["routed_experts"].shape for row in pipeline.rows(answer)] == [(8, 2, 2), (4, 2, 2), (1, 2, 2)]


def test_a_group_that_knows_no_shape_says_so_and_is_read_beside_one_that_does(
    on_queue: Callable[[Mode], Pipeline], group_id: str
) -> None:
    direct = on_queue("direct")
    unknown = [made(f"{group_id}-a", [Turn(2, 2, "none")]), made(f"{group_id}-b", SOUND)]
    known = made(f"{group_id}-c", SOUND)
    direct.stage(*unknown, known)
    first = direct.finalize(unknown, group_id=f"{group_id}-1", receipts=[unknown[0].receipt(), None])
    second = direct.finalize([known], group_id=f"{group_id}-2")
    assert [row["routed_experts"].shape for row in direct.rows(first)] == [(4, 0, 0), (1, 0, 0)]
    both = type(first.meta)(direct.canonical, sample_ids=[*first.meta.sample_ids, *second.meta.sample_ids])
    batch = direct.batch(both)
    assert (batch.routed_experts[:5] == -1).all()
    assert np.array_equal(routes_of(batch)[2], expected(SOUND))
    assert batch.route_report.failures == {}


# --- staging, retries, calls ------------------------------------------------------------------------


def test_deferred_staging_stays_until_the_trainer_releases_it(
    on_queue: Callable[[Mode], Pipeline], group_id: str
) -> None:
    deferred = on_queue("deferred")
    rollouts = [made(f"{group_id}-a", SOUND), made(f"{group_id}-b", [Turn(2, 2, "none")]), made(f"{group_id}-c", SOUND)]
    deferred.stage(*rollouts)
    receipts = [rollouts[0].receipt(), rollouts[1].receipt(), None]
    answer = deferred.finalize(rollouts, group_id=group_id, receipts=receipts)
    kept = {f"{group_id}-a/c0", f"{group_id}-a/c1"}
    assert own(deferred, group_id) == kept
    assert deferred.finalize(rollouts, group_id=group_id, receipts=receipts) == answer
    assert own(deferred, group_id) == kept
    assert np.array_equal(deferred.routes(answer, release=False)[0], expected(SOUND))
    assert own(deferred, group_id) == kept
    assert np.array_equal(deferred.routes(answer)[0], expected(SOUND))
    assert own(deferred, group_id) == set()
    assert deferred.finalize(rollouts, group_id=group_id, receipts=receipts) == answer
    tags = deferred.plane.get_tags(answer.meta.sample_ids, deferred.canonical)
    assert [tag[ROUTE_PLAN_TAG] is not None for tag in tags] == [True, False, False]


def test_direct_staging_is_empty_and_finalizing_again_keeps_the_routes(
    on_queue: Callable[[Mode], Pipeline], group_id: str
) -> None:
    direct = on_queue("direct")
    rollouts = [made(f"{group_id}-a", SOUND), made(f"{group_id}-b", SOUND)]
    direct.stage(*rollouts)
    answer = direct.finalize(rollouts, group_id=group_id)
    assert own(direct, group_id) == set()
    assert direct.finalize(rollouts, group_id=group_id) == answer
    assert all(np.array_equal(row, expected(SOUND)) for row in direct.routes(answer))


def own(pipeline: Pipeline, group_id: str) -> set[str]:
    return {key for key in pipeline.staged() if key.startswith(f"{group_id}-")}


def test_what_a_group_asks_of_the_queue(pipeline: Pipeline, group_id: str) -> None:
    rollouts = [made(f"{group_id}-{index}", SOUND) for index in range(4)]
    pipeline.stage(*rollouts)
    plane, counter = counted(pipeline.plane, staging_partition=pipeline.staging, partition_id=pipeline.canonical)
    over = pipeline.over(plane)
    reassembler = over.reassembler()
    counter.reset()
    answer = over.finalize(rollouts, group_id=group_id, reassembler=reassembler)
    route_reads = {"route_read": 1} if pipeline.mode == "direct" else {}
    assert counter.traffic().calls == {"base_read": 1, "record": 2, "publish": 2, "clear": 1} | route_reads
    assert all(np.array_equal(row, expected(SOUND)) for row in over.routes(answer))


def test_a_plan_of_256_calls_rides_as_a_tag(on_queue: Callable[[Mode], Pipeline], group_id: str) -> None:
    deferred, turns = on_queue("deferred"), [Turn(1, 1)] * 256
    rollout = made(group_id, turns)
    deferred.stage(rollout)
    answer = deferred.finalize([rollout], group_id=group_id)
    (tags,) = deferred.plane.get_tags(answer.meta.sample_ids, deferred.canonical)
    assert len(tags[ROUTE_PLAN_TAG]) < 60 * 256
    assert np.array_equal(deferred.routes(answer)[0], expected(turns))
