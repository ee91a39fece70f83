"""Many groups over a few actors: least-loaded dispatch, bounded in flight, answers as they come.

    with ReassemblerPool(actors) as pool:
        future = pool.submit(request)                      # blocks while too many are pending
        for group in pool.finalize_all(requests): ...      # in the order of the requests
        for group in pool.finalize_all(requests, ordered=False): ...   # as they complete
        async for group in pool.afinalize_all(requests): ...

A request goes to the actor with the fewest calls in hand, counted by manifest size. An actor has
`in_flight_per_actor` requests at a time (one by default: the death of an actor then concerns the
request that it worked on and no other); the rest waits here, at most `max_pending` of them, and
`submit` blocks beyond that. Receipts are what a waiting request costs in memory.

Restarts and retries are Ray's. A request whose actor died each time it was tried fails with
`RequestCrashedActor`, naming the group; the others go on. An actor that is dead for good (killed, or
out of restarts) gets no further request. After `deadline_s` seconds with an actor a request fails
with `RequestDeadlineExceeded`; its slot is free again when the actor has answered, which the data
plane's own deadlines bound. Where no actor answers anything for that long, those that wait fail too.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from rollout_reassembler.contract.errors import PoolClosed, RequestCrashedActor, RequestDeadlineExceeded
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest
from rollout_reassembler.contract.rpc_guard import assert_metadata_only


@dataclass
class PoolCounters:
    """What went through a pool so far."""

    submitted: int = 0
    completed: int = 0
    failed: int = 0
    in_flight: int = 0
    rows: int = 0
    valid_rows: int = 0


@dataclass
class _Seat:
    """One actor and what it has in hand."""

    actor: ray.actor.ActorHandle[Any]
    requests: int = 0
    calls: int = 0
    is_dead: bool = False


class ReassemblerPool:
    """Dispatches requests over actors made by `create_rollout_reassembler_actors`. Thread-safe."""

    def __init__(
        self,
        actors: Sequence[ray.actor.ActorHandle[Any]],
        *,
        in_flight_per_actor: int = 1,
        max_pending: int = 256,
        deadline_s: float = 600.0,
        owns_actors: bool = True,
    ) -> None:
        if not actors or in_flight_per_actor < 1 or max_pending < 1:
            raise ValueError("a pool needs at least one actor, one request in flight and one pending")
        self._seats = [_Seat(actor) for actor in actors]
        self._in_flight_per_actor = in_flight_per_actor
        self._deadline_s = deadline_s
        self._owns_actors = owns_actors
        self._capacity = threading.BoundedSemaphore(max_pending)
        self._counters = PoolCounters()
        self._open: set[Future[FinalizedGroup]] = set()
        self._closing = False
        self._entry = threading.Lock()
        self._answers = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reassembler-pool", daemon=True)
        self._thread.start()
        self._seat_free = asyncio.Condition()

    @property
    def counters(self) -> PoolCounters:
        """A snapshot of the pool's counters."""
        return PoolCounters(**vars(self._counters))

    def submit(self, request: ReassemblyRequest) -> Future[FinalizedGroup]:
        """Hand in one request. Blocks while `max_pending` are waiting or in flight.

        Raises `RpcPayloadError` at once for a request that is more than metadata.
        """
        assert_metadata_only(request)
        self._capacity.acquire()
        with self._entry:
            if self._closing:
                self._capacity.release()
                raise PoolClosed(f"group {request.group_id!r}: the pool is closed")
            future = asyncio.run_coroutine_threadsafe(self._run(request), self._loop)
            self._open.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[FinalizedGroup]) -> None:
        self._open.discard(future)
        self._capacity.release()

    def finalize_all(self, requests: Iterable[ReassemblyRequest], *, ordered: bool = True) -> Iterator[FinalizedGroup]:
        """Finalize all requests; yields answers in their order, or as they complete.

        Takes requests only as fast as they are dispatched. The first failure is raised when its turn
        comes; requests already submitted are finalized all the same.
        """
        return self._in_order(requests) if ordered else self._as_completed(requests)

    def _in_order(self, requests: Iterable[ReassemblyRequest]) -> Iterator[FinalizedGroup]:
        futures: deque[Future[FinalizedGroup]] = deque()
        for request in requests:
            futures.append(self.submit(request))
            while futures and futures[0].done():
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()

    def _as_completed(self, requests: Iterable[ReassemblyRequest]) -> Iterator[FinalizedGroup]:
        pending: set[Future[FinalizedGroup]] = set()
        for request in requests:
            pending.add(self.submit(request))
            done, pending = wait(pending, timeout=0)
            for future in done:
                yield future.result()
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()

    async def afinalize(self, request: ReassemblyRequest) -> FinalizedGroup:
        """`submit` for asyncio: waits for room and for the answer without blocking the loop."""
        future = await asyncio.to_thread(self.submit, request)
        return await asyncio.wrap_future(future)

    async def afinalize_all(
        self, requests: Iterable[ReassemblyRequest], *, ordered: bool = True
    ) -> AsyncIterator[FinalizedGroup]:
        """`finalize_all` for asyncio."""
        tasks = [asyncio.create_task(self.afinalize(request)) for request in requests]
        for next_answer in tasks if ordered else asyncio.as_completed(tasks):
            yield await next_answer

    def close(self) -> None:
        """Wait for what is in flight, refuse the rest, then end the actors that the pool owns. Safe to call twice."""
        with self._entry:
            if self._closing:
                return
            self._closing = True
        asyncio.run_coroutine_threadsafe(self._wake_waiting(), self._loop).result()
        wait(list(self._open), self._deadline_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._owns_actors:
            for seat in self._seats:
                ray.kill(seat.actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _run(self, request: ReassemblyRequest) -> FinalizedGroup:
        self._counters.submitted += 1
        try:
            group = await self._dispatch(request)
        except BaseException:
            self._counters.failed += 1
            raise
        self._counters.completed += 1
        self._counters.rows += group.total_row_count
        self._counters.valid_rows += group.valid_row_count
        return group

    async def _dispatch(self, request: ReassemblyRequest) -> FinalizedGroup:
        calls = _manifest_size(request)
        seat = await self._take_seat(calls, request.group_id)
        answer = asyncio.ensure_future(_answer(seat.actor, request))
        answer.add_done_callback(lambda done: asyncio.ensure_future(self._leave_seat(seat, calls, done)))
        try:
            return await asyncio.wait_for(asyncio.shield(answer), self._deadline_s)
        except TimeoutError as error:
            if answer.done():
                raise
            raise RequestDeadlineExceeded(
                f"group {request.group_id!r} was not finalized within {self._deadline_s:g} s of reaching an actor"
            ) from error

    async def _take_seat(self, calls: int, group_id: str) -> _Seat:
        async with self._seat_free:
            while not self._is_decided():
                answers = self._answers
                try:
                    await asyncio.wait_for(self._seat_free.wait_for(self._is_decided), self._deadline_s)
                except TimeoutError as error:
                    if self._answers == answers:
                        what = f"waited for an actor, and none answered anything for {self._deadline_s:g} s"
                        raise RequestDeadlineExceeded(f"group {group_id!r} {what}") from error
            seat = self._free_seat()
            if self._closing:
                raise PoolClosed(f"group {group_id!r}: the pool was closed while it waited for an actor")
            if seat is None:
                raise RequestCrashedActor(f"group {group_id!r}: all actors of the pool are dead; start others")
            seat.requests += 1
            seat.calls += calls
            self._counters.in_flight += 1
            return seat

    def _is_decided(self) -> bool:
        """Whether one that waits has a seat, or will never have one."""
        return self._closing or self._free_seat() is not None or all(seat.is_dead for seat in self._seats)

    def _free_seat(self) -> _Seat | None:
        free = [seat for seat in self._seats if seat.requests < self._in_flight_per_actor and not seat.is_dead]
        return min(free, key=lambda seat: seat.calls, default=None)

    async def _leave_seat(self, seat: _Seat, calls: int, answer: asyncio.Future[FinalizedGroup]) -> None:
        error = None if answer.cancelled() else answer.exception()
        async with self._seat_free:
            seat.requests -= 1
            seat.calls -= calls
            seat.is_dead |= error is not None and isinstance(error.__cause__, ActorDiedError)
            self._answers += 1
            self._counters.in_flight -= 1
            self._seat_free.notify_all()

    async def _wake_waiting(self) -> None:
        async with self._seat_free:
            self._seat_free.notify_all()


async def _answer(actor: ray.actor.ActorHandle[Any], request: ReassemblyRequest) -> FinalizedGroup:
    """The actor's answer, or its error with the type that it was raised with."""
    try:
        group: FinalizedGroup = await actor.finalize.remote(request)
    except RayTaskError as error:
        raise error.cause from error
    except (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError) as error:
        raise RequestCrashedActor(f"group {request.group_id!r}: its actor died on every try: {error}") from error
    assert_metadata_only(group)
    return group


def _manifest_size(request: ReassemblyRequest) -> int:
    """How many calls a request is about; the measure of its work."""
    manifests = (receipt.get("manifest") for receipt in request.receipts if receipt is not None)
    return sum(len(manifest) for manifest in manifests if isinstance(manifest, list | tuple))
