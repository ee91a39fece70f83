"""The pool: dispatch, order, back-pressure, deadlines, crashes, closing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch

import rollout_reassembler as rr
from rollout_reassembler.actors.rollout_reassembler_actor import _ReassemblerProcess
from rollout_reassembler.contract.errors import PoolClosed, RequestCrashedActor, RequestDeadlineExceeded
from rollout_reassembler.staging.places import place_of
from tests.actors.conftest import Site
from tests.actors.groups import assert_rows_proven, request_of, rollouts_of, stage_group, stage_groups_elsewhere


class _Moody(_ReassemblerProcess):
    """A reassembler that dies of some requests and takes its time over others."""

    def finalize(self, request: rr.ReassemblyRequest) -> rr.FinalizedGroup:
        if request.prompt_idx == 666:
            os._exit(1)
        if request.prompt_idx == 60:
            time.sleep(3)
        return super().finalize(request)


@pytest.fixture(scope="module")
def moody_actors(site: Site) -> Iterator[list[Any]]:
    made = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=1)(_Moody)
    started = [made.remote(site.dp_config, site.config) for _ in range(2)]
    ray.get([actor.check_dependencies.remote() for actor in started], timeout=120)
    yield started
    for actor in started:
        ray.kill(actor)


def _stage(site: Site, *groups: int) -> None:
    for group in groups:
        stage_group(site.plane, site.config.staging_partition, group)


def _group_ids(answers: list[rr.FinalizedGroup]) -> list[str]:
    return [answer.meta.tags[0]["group_id"] for answer in answers]


def test_sixty_four_groups_in_flight_while_two_processes_stage(site: Site, pool: rr.ReassemblerPool) -> None:
    first, then = list(range(1000, 1064)), list(range(1100, 1120))
    stage = [stage_groups_elsewhere.remote(site.dp_config, site.config.staging_partition, first[i::2]) for i in (0, 1)]
    ray.get(stage)
    more = [stage_groups_elsewhere.remote(site.dp_config, site.config.staging_partition, then[i::2]) for i in (0, 1)]
    answers = list(pool.finalize_all(request_of(group) for group in first))
    assert ray.get(more) == [10, 10]
    answers += list(pool.finalize_all(request_of(group) for group in then))
    assert _group_ids(answers) == [f"g{group}" for group in (*first, *then)]
    assert pool.counters.completed == 84
    assert pool.counters.valid_rows == 84 * 4
    assert all(answer.valid_row_count == 4 and not answer.cleanup_pending for answer in answers)
    assert_rows_proven(site.plane, site.config.partition_id, [*first, *then])
    left = site.plane.list_samples(site.config.staging_partition)
    assert not [key for key in left if key.startswith("g1")]


def test_answers_come_as_they_complete_when_order_does_not_matter(site: Site, pool: rr.ReassemblerPool) -> None:
    groups = range(200, 206)
    _stage(site, *groups)
    answers = list(pool.finalize_all([request_of(group) for group in groups], ordered=False))
    assert set(_group_ids(answers)) == {f"g{group}" for group in groups}


def test_asyncio_callers_get_the_same_answers(site: Site, pool: rr.ReassemblerPool) -> None:
    groups = range(210, 215)
    _stage(site, *groups)

    async def finalize() -> list[rr.FinalizedGroup]:
        return [answer async for answer in pool.afinalize_all([request_of(group) for group in groups])]

    assert _group_ids(asyncio.run(finalize())) == [f"g{group}" for group in groups]


def test_one_groups_failure_is_its_own(site: Site, pool: rr.ReassemblerPool) -> None:
    _stage(site, 220, 221)
    assert pool.submit(request_of(220)).result(60).valid_row_count == 4
    bad = pool.submit(dataclasses.replace(request_of(220), prompt_idx=7))
    good = pool.submit(request_of(221))
    with pytest.raises(rr.GroupConflict, match="'g220' was finalized before, by a request that differs in prompt_idx"):
        bad.result(60)
    assert good.result(60).valid_row_count == 4
    assert (pool.counters.failed, pool.counters.completed) == (1, 2)


def _failing_second(first: int) -> list[rr.ReassemblyRequest]:
    """Three groups, of which the second has a slip of its caller's in it."""
    slip = dataclasses.replace(request_of(first + 1), rewards=(1.0,))
    return [request_of(first), slip, request_of(first + 2)]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_failed_group_is_an_entry_in_its_place_where_asked_for(
    site: Site, pool: rr.ReassemblerPool, ordered: bool
) -> None:
    first = 270 if ordered else 273
    _stage(site, first, first + 2)
    answers = list(pool.finalize_all(_failing_second(first), ordered=ordered, on_error="yield"))
    (failed,) = [answer for answer in answers if isinstance(answer, rr.FailedGroup)]
    assert (failed.group_id, type(failed.error)) == (f"g{first + 1}", rr.RequestError)
    assert sum(answer.valid_row_count for answer in answers if isinstance(answer, rr.FinalizedGroup)) == 8
    if ordered:
        assert answers[1] is failed


def test_asyncio_callers_get_failed_groups_in_their_place(site: Site, pool: rr.ReassemblerPool) -> None:
    _stage(site, 276, 278)

    async def finalize() -> list[rr.FinalizedGroup | rr.FailedGroup]:
        return [answer async for answer in pool.afinalize_all(_failing_second(276), on_error="yield")]

    answers = asyncio.run(finalize())
    assert [type(answer) for answer in answers] == [rr.FinalizedGroup, rr.FailedGroup, rr.FinalizedGroup]


def test_a_failure_is_raised_when_its_turn_comes(site: Site, pool: rr.ReassemblerPool) -> None:
    _stage(site, 280, 282)
    answers = pool.finalize_all(_failing_second(280))
    assert next(answers).valid_row_count == 4
    with pytest.raises(rr.RequestError, match="'g281': 1 rewards for 4 rollout_ids"):
        next(answers)


def test_what_to_do_with_a_failure_is_one_of_two_words(pool: rr.ReassemblerPool) -> None:
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'yield', got 'ignore'"):
        pool.finalize_all([], on_error="ignore")  # type: ignore[call-overload]


def test_numpy_and_torch_values_are_made_plain_before_they_cross(site: Site, pool: rr.ReassemblerPool) -> None:
    _stage(site, 284)
    rewards: Any = torch.tensor([True, False, True, False])
    mask_sample: Any = np.array([0, 1, 0, 0])
    answer = pool.submit(dataclasses.replace(request_of(284), rewards=rewards, mask_sample=mask_sample)).result(60)
    rows = site.plane.get_data(answer.meta, ["total_reward", "mask_sample"])
    assert rows["total_reward"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert rows["mask_sample"].tolist() == [False, True, False, False]


def test_a_group_over_the_budget_is_told_its_size_and_the_setting(site: Site, actors: list[Any]) -> None:
    bounds = rr.ReceiptBounds(max_rpc_bytes=4096)
    with rr.ReassemblerPool(actors, owns_actors=False, bounds=bounds) as pool:
        with pytest.raises(rr.RpcPayloadError) as caught:
            pool.submit(request_of(285))
        assert pool.counters.submitted == 0
    assert re.search(
        r"group 'g285' has \d+ bytes of metadata \(4 rollouts, 12 calls\), more than max_rpc_bytes=4096; raise "
        r"ReceiptBounds.max_rpc_bytes in RolloutReassemblerActorConfig.bounds and in that of ReassemblerPool",
        str(caught.value),
    )


@pytest.mark.slow
def test_a_group_of_64_rollouts_of_500_calls_goes_through_where_the_bound_says_so(site: Site) -> None:
    made = rollouts_of(286, rollouts=64, turns=500)
    request = request_of(286, made)
    stage_group(site.plane, site.config.staging_partition, 286, made)
    bounds = rr.ReceiptBounds(max_rpc_bytes=64 << 20)
    config = dataclasses.replace(site.config, bounds=bounds)
    actors = rr.create_rollout_reassembler_actors(site.dp_config, config, num_workers=1)
    with rr.ReassemblerPool(actors) as refuses, pytest.raises(rr.RpcPayloadError, match="64 rollouts, 32000 calls"):
        refuses.submit(request)
    actors = rr.create_rollout_reassembler_actors(site.dp_config, config, num_workers=1)
    with rr.ReassemblerPool(actors, bounds=bounds) as pool:
        answer = pool.submit(request).result(300)
    assert answer.valid_row_count == 64
    assert (
        site.plane.get_tags([place_of(call) for call in made[0].calls], site.config.staging_partition) == [None] * 500
    )


def test_a_payload_is_refused_before_it_is_sent(pool: rr.ReassemblerPool) -> None:
    with pytest.raises(rr.RequestError, match=r"rewards\[0\] must be a number or None, got bytes of 1 items"):
        pool.submit(dataclasses.replace(request_of(0), rewards=(b"1", 1.0, 1.0, 1.0)))
    assert pool.counters.submitted == 0


def test_submit_blocks_while_too_many_are_pending(site: Site, actors: list[Any]) -> None:
    _stage(site, *range(230, 238))
    with rr.ReassemblerPool(actors, max_pending=2, owns_actors=False) as pool:
        futures: list[Any] = []
        most = 0
        for group in range(230, 238):
            futures.append(pool.submit(request_of(group)))
            most = max(most, sum(not future.done() for future in futures))
        assert most <= 2
        assert all(future.result(60).valid_row_count == 4 for future in futures)


def test_a_request_that_kills_its_actor_is_given_up_and_named(site: Site, moody_actors: list[Any]) -> None:
    _stage(site, 241, 242, 243)
    with rr.ReassemblerPool(moody_actors, owns_actors=False) as pool:
        poison = pool.submit(dataclasses.replace(request_of(240), group_id="poison", prompt_idx=666))
        others = [pool.submit(request_of(group)) for group in (241, 242, 243)]
        assert all(other.result(120).valid_row_count == 4 for other in others)
        with pytest.raises(RequestCrashedActor, match="'poison'"):
            poison.result(120)
    ray.get([actor.check_dependencies.remote() for actor in moody_actors], timeout=120)


def test_a_deadline_fails_one_request_and_its_slot_comes_back(site: Site, moody_actors: list[Any]) -> None:
    slow = dataclasses.replace(request_of(250), prompt_idx=60)
    _stage(site, 250)
    with rr.ReassemblerPool(moody_actors, deadline_s=1, owns_actors=False) as pool:
        with pytest.raises(RequestDeadlineExceeded, match="'g250' was not finalized within 1 s"):
            pool.submit(slow).result(60)
        assert pool.counters.in_flight == 1
        while pool.counters.in_flight:
            time.sleep(0.1)
    with rr.ReassemblerPool(moody_actors, owns_actors=False) as pool:
        assert pool.submit(slow).result(60).valid_row_count == 4


def test_closing_finishes_what_is_in_flight_and_refuses_the_rest(site: Site, actors: list[Any]) -> None:
    _stage(site, *range(260, 264))
    pool = rr.ReassemblerPool(actors[:1], owns_actors=False)
    futures = [pool.submit(request_of(group)) for group in range(260, 264)]
    pool.close()
    outcomes = [future.exception(0) for future in futures]
    assert all(outcome is None or isinstance(outcome, PoolClosed) for outcome in outcomes)
    with pytest.raises(PoolClosed):
        pool.submit(request_of(264))
    pool.close()
    with rr.ReassemblerPool(actors, owns_actors=False) as another:
        assert all(answer.valid_row_count == 4 for answer in another.finalize_all(map(request_of, range(260, 264))))


def test_a_pool_needs_an_actor() -> None:
    with pytest.raises(ValueError, match="at least one actor"):
        rr.ReassemblerPool([])
