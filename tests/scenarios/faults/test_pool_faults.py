"""A pool whose actors are dead or silent: no request waits for ever, and no dead actor swallows the others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError

from rollout_reassembler.actors.pool import PoolClosed, ReassemblerPool, RequestCrashedActor, RequestDeadlineExceeded
from rollout_reassembler.contract.messages import FinalizedGroup, KVBatchMeta, ReassemblyRequest

SECONDS = 20.0


class Actor:
    """What the pool uses of an actor's handle."""

    def __init__(self, finalize: Callable[[ReassemblyRequest], Awaitable[FinalizedGroup]]) -> None:
        self.requests: list[str] = []
        self.finalize = self
        self._finalize = finalize

    def remote(self, request: ReassemblyRequest) -> Awaitable[FinalizedGroup]:
        self.requests.append(request.group_id)
        return self._finalize(request)


async def answers(request: ReassemblyRequest) -> FinalizedGroup:
    return FinalizedGroup(KVBatchMeta("canonical"), 0, 0, (), 0, {}, total_row_count=1)


async def stays_silent(request: ReassemblyRequest) -> FinalizedGroup:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def fails_with(error: Exception) -> Callable[[ReassemblyRequest], Awaitable[FinalizedGroup]]:
    async def finalize(request: ReassemblyRequest) -> FinalizedGroup:
        raise error

    return finalize


def request(number: int) -> ReassemblyRequest:
    return ReassemblyRequest(f"g{number}", ("r",), None, (None,), (1.0,), 0, 0)


def pool_of(*actors: Any, **options: Any) -> ReassemblerPool:
    return ReassemblerPool(actors, owns_actors=False, **options)


def outcomes(futures: list[Future[FinalizedGroup]]) -> list[BaseException | None]:
    return [future.exception(SECONDS) for future in futures]


def test_an_actor_that_is_dead_for_good_gets_one_request_and_no_further() -> None:
    """It answers at once, so it would always be the least loaded one, and fail all that come."""
    dead, alive = Actor(fails_with(ActorDiedError())), Actor(answers)
    with pool_of(dead, alive) as pool:
        errors = outcomes([pool.submit(request(number)) for number in range(20)])
    assert [type(error) for error in errors if error] == [RequestCrashedActor]
    assert len(dead.requests) == 1
    assert len(alive.requests) == 19
    assert (pool.counters.completed, pool.counters.failed) == (19, 1)


def test_an_actor_that_is_being_restarted_stays_in_the_pool() -> None:
    restarting = Actor(fails_with(ActorUnavailableError("restarting", None)))
    with pool_of(restarting) as pool:
        errors = outcomes([pool.submit(request(number)) for number in range(3)])
    assert [type(error) for error in errors] == [RequestCrashedActor] * 3
    assert len(restarting.requests) == 3


def test_a_pool_of_dead_actors_fails_every_request_at_once() -> None:
    with pool_of(Actor(fails_with(ActorDiedError())), Actor(fails_with(ActorDiedError()))) as pool:
        errors = outcomes([pool.submit(request(number)) for number in range(10)])
        assert {type(error) for error in errors} == {RequestCrashedActor}
        with pytest.raises(RequestCrashedActor, match="'g99': all actors of the pool are dead"):
            pool.submit(request(99)).result(SECONDS)


def test_an_actor_that_ran_out_of_memory_has_crashed() -> None:
    with pool_of(Actor(fails_with(OutOfMemoryError("the node is short of memory")))) as pool:
        (error,) = outcomes([pool.submit(request(0))])
    assert isinstance(error, RequestCrashedActor)
    assert "'g0'" in str(error)
    assert "short of memory" in str(error)


def test_requests_that_wait_for_silent_actors_fail_by_the_deadline() -> None:
    with pool_of(Actor(stays_silent), Actor(stays_silent), deadline_s=0.5) as pool:
        started = time.monotonic()
        errors = outcomes([pool.submit(request(number)) for number in range(6)])
        assert [type(error) for error in errors] == [RequestDeadlineExceeded] * 6
        assert "'g5' waited for an actor, and none answered anything for 0.5 s" in str(errors[5])
        assert time.monotonic() - started < 5


def test_requests_that_wait_for_busy_actors_go_on_waiting() -> None:
    async def works(request: ReassemblyRequest) -> FinalizedGroup:
        await asyncio.sleep(0.2)
        return await answers(request)

    with pool_of(Actor(works), deadline_s=0.5) as pool:
        assert outcomes([pool.submit(request(number)) for number in range(8)]) == [None] * 8


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.01])
def test_whatever_is_submitted_while_the_pool_closes_comes_to_an_end(delay_s: float) -> None:
    for _ in range(10):
        pool = pool_of(Actor(answers), max_pending=4)
        futures: list[Future[FinalizedGroup]] = []
        refused = []

        def submit(pool: ReassemblerPool = pool, futures: Any = futures, refused: Any = refused) -> None:
            try:
                while True:
                    futures.append(pool.submit(request(0)))
            except PoolClosed:
                refused.append(True)

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(delay_s)
        pool.close()
        for thread in threads:
            thread.join(SECONDS)
        assert len(refused) == 4
        assert {type(error) for error in outcomes(futures)} <= {type(None), PoolClosed}
