"""The pool: dispatch, order, back-pressure, deadlines, crashes, closing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

import rollout_reassembler as rr
from rollout_reassembler.actors.rollout_reassembler_actor import _ReassemblerProcess
from rollout_reassembler.contract.errors import PoolClosed, RequestCrashedActor, RequestDeadlineExceeded
from tests.actors.conftest import Site
from tests.actors.groups import assert_rows_proven, request_of, stage_group, stage_groups_elsewhere


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
    _stage(site, 220)
    bad = pool.submit(dataclasses.replace(request_of(221), rewards=(1.0,)))
    good = pool.submit(request_of(220))
    with pytest.raises(rr.RequestError, match="1 rewards for 4 rollout_ids"):
        bad.result(60)
    assert good.result(60).valid_row_count == 4
    assert (pool.counters.failed, pool.counters.completed) == (1, 1)


def test_a_payload_is_refused_before_it_is_sent(pool: rr.ReassemblerPool) -> None:
    with pytest.raises(rr.RpcPayloadError):
        pool.submit(dataclasses.replace(request_of(0), rewards=(b"1",)))
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
