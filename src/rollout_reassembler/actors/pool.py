"""Many groups over a few actors: least-loaded dispatch, bounded in flight, answers as they come.

    with ReassemblerPool(actors) as pool:
        future = pool.submit(request)                      # blocks while too many are pending
        for group in pool.finalize_all(requests): ...      # in the order of the requests
        for group in pool.finalize_all(requests, ordered=False): ...   # as they complete
        async for group in pool.afinalize_all(requests): ...
        for group in pool.finalize_all(requests, on_error="yield"): ...   # a FailedGroup for a group that failed

A request goes to the actor with the fewest calls in hand, counted by manifest size. An actor has
`in_flight_per_actor` requests at a time (one by default: the death of an actor then concerns the
request that it worked on and no other); the rest waits here, at most `max_pending` of them, and
`submit` blocks beyond that. Receipts are what a waiting request costs in memory.

Restarts and retries are Ray's. A request whose actor died each time it was tried fails with
`RequestCrashedActor`, naming the group; the others go on. An actor that is dead for good (killed, or
out of restarts) gets no further request. After `deadline_s` seconds with an actor a request fails
with `RequestDeadlineExceeded`; its slot is free again when the actor has answered, which the data
plane's own deadlines bound. Where no actor answers anything for that long, those that wait fail too.
What is in hand when Ray is shut down fails with `PoolClosed`, or with `RequestCrashedActor` where the death of its
actor is heard first; what waits and what comes after fails with `PoolClosed`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, get_args, overload

import ray
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from rollout_reassembler.contract.bounds import DEFAULT_BOUNDS, ReceiptBounds
from rollout_reassembler.contract.errors import (
    PoolClosed,
    ReassemblerError,
    RequestCrashedActor,
    RequestDeadlineExceeded,
)
from rollout_reassembler.contract.messages import FailedGroup, FinalizedGroup, ReassemblyRequest
from rollout_reassembler.contract.requests import plain_request
from rollout_reassembler.contract.rpc_guard import assert_metadata_only, guarded_request

OnError = Literal["raise", "yield"]

_RAY_LOOK_S = 1.0
"""How often a request in flight looks whether there is still a Ray to answer it."""


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
class _Slot:
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
        bounds: ReceiptBounds = DEFAULT_BOUNDS,
    ) -> None:
        if not actors or in_flight_per_actor < 1 or max_pending < 1:
            raise ValueError("a pool needs at least one actor, one request in flight and one pending")
        self._slots = [_Slot(actor) for actor in actors]
        self._in_flight_per_actor = in_flight_per_actor
        self._deadline_s = deadline_s
        self._owns_actors = owns_actors
        self._bounds = bounds
        self._ray = _ray_session()
        self._capacity = threading.BoundedSemaphore(max_pending)
        self._counters = PoolCounters()
        self._open: set[Future[FinalizedGroup]] = set()
        self._closing = False
        self._entry = threading.Lock()
        self._answers = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reassembler-pool", daemon=True)
        self._thread.start()
        self._slot_free = asyncio.Condition()

    @property
    def counters(self) -> PoolCounters:
        """A snapshot of the pool's counters."""
        return PoolCounters(**vars(self._counters))

    def submit(self, request: ReassemblyRequest) -> Future[FinalizedGroup]:
        """Hand in one request. Blocks while `max_pending` are waiting or in flight.

        Raises at once, and sends nothing: `RequestError` for a part of another type, `RpcPayloadError` for a group
        that is larger than `bounds.max_rpc_bytes`, `PoolClosed`. A receipt that may not cross costs its rollout.
        """
        request = guarded_request(plain_request(request), max_bytes=self._bounds.max_rpc_bytes)
        self._refuse_without_ray(request.group_id)
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

    @overload
    def finalize_all(
        self, requests: Iterable[ReassemblyRequest], *, ordered: bool = ..., on_error: Literal["raise"] = ...
    ) -> Iterator[FinalizedGroup]: ...
    @overload
    def finalize_all(
        self, requests: Iterable[ReassemblyRequest], *, ordered: bool = ..., on_error: OnError
    ) -> Iterator[FinalizedGroup | FailedGroup]: ...
    def finalize_all(
        self, requests: Iterable[ReassemblyRequest], *, ordered: bool = True, on_error: OnError = "raise"
    ) -> Iterator[FinalizedGroup | FailedGroup]:
        """Finalize all requests; yields answers in their order, or as they complete.

        Takes requests only as fast as they are dispatched. A group's failure is raised when its turn comes, and
        ends the iteration; requests already submitted are finalized all the same. With `on_error="yield"` a
        `FailedGroup` stands in its place and the others follow. Raises `ValueError` for another `on_error`.
        """
        outcome = _outcome_of(on_error)
        return map(outcome, self._in_order(requests) if ordered else self._as_completed(requests))

    def _in_order(self, requests: Iterable[ReassemblyRequest]) -> Iterator[_Submitted]:
        waiting: deque[_Submitted] = deque()
        for request in requests:
            waiting.append(self._submitted(request))
            while waiting and waiting[0].future.done():
                yield waiting.popleft()
        yield from waiting

    def _as_completed(self, requests: Iterable[ReassemblyRequest]) -> Iterator[_Submitted]:
        pending: dict[Future[FinalizedGroup], _Submitted] = {}
        for request in requests:
            submitted = self._submitted(request)
            pending[submitted.future] = submitted
            for future in wait(pending, timeout=0).done:
                yield pending.pop(future)
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                yield pending.pop(future)

    def _submitted(self, request: ReassemblyRequest) -> _Submitted:
        """The request handed in; one that is refused has failed, and its turn to say so comes."""
        try:
            future = self.submit(request)
        except ReassemblerError as error:
            future = Future()
            future.set_exception(error)
        return _Submitted(request, future)

    async def afinalize(self, request: ReassemblyRequest) -> FinalizedGroup:
        """`submit` for asyncio: waits for room and for the answer without blocking the loop."""
        future = await asyncio.to_thread(self.submit, request)
        return await asyncio.wrap_future(future)

    @overload
    def afinalize_all(
        self, requests: Iterable[ReassemblyRequest], *, ordered: bool = ..., on_error: Literal["raise"] = ...
    ) -> AsyncIterator[FinalizedGroup]: ...
    @overload
    def afinalize_all(
        self, requests: Iterable[ReassemblyRequest], *, ordered: bool = ..., on_error: OnError
    ) -> AsyncIterator[FinalizedGroup | FailedGroup]: ...
    async def afinalize_all(
        self, requests: Iterable[ReassemblyRequest], *, ordered: bool = True, on_error: OnError = "raise"
    ) -> AsyncIterator[FinalizedGroup | FailedGroup]:
        """`finalize_all` for asyncio."""
        outcome = _outcome_of(on_error)

        async def finalized(request: ReassemblyRequest) -> _Submitted:
            submitted = await asyncio.to_thread(self._submitted, request)
            await asyncio.wait([asyncio.wrap_future(submitted.future)])
            return submitted

        tasks = [asyncio.create_task(finalized(request)) for request in requests]
        for next_answer in tasks if ordered else asyncio.as_completed(tasks):
            yield outcome(await next_answer)

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
        if self._owns_actors and self._has_ray():
            for slot in self._slots:
                ray.kill(slot.actor)

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
        slot = await self._take_slot(calls, request.group_id)
        answer = asyncio.ensure_future(_answer(slot.actor, request, self._bounds.max_rpc_bytes))
        answer.add_done_callback(lambda done: asyncio.ensure_future(self._leave_slot(slot, calls, done)))
        deadline = self._loop.time() + self._deadline_s
        while (left := deadline - self._loop.time()) > 0:
            done, _ = await asyncio.wait([answer], timeout=min(left, _RAY_LOOK_S))
            if done:
                if answer.exception():
                    self._refuse_without_ray(request.group_id)
                return answer.result()
            # Ray does not end what was asked of it before it was shut down.
            if not self._has_ray():
                await self._wake_waiting()
                self._refuse_without_ray(request.group_id)
        raise RequestDeadlineExceeded(
            f"group {request.group_id!r} was not finalized within {self._deadline_s:g} s of reaching an actor"
        )

    def _has_ray(self) -> bool:
        return _ray_session() == self._ray

    def _refuse_without_ray(self, group_id: str) -> None:
        """Ray would start another cluster for a call that comes after its shutdown, and not find the actor there."""
        if not self._has_ray():
            raise PoolClosed(
                f"group {group_id!r}: Ray was shut down since this pool was made, and its actors with it; "
                "connect again, make actors and a pool, and send the request again"
            )

    async def _take_slot(self, calls: int, group_id: str) -> _Slot:
        async with self._slot_free:
            while not self._is_decided():
                answers = self._answers
                try:
                    await asyncio.wait_for(self._slot_free.wait_for(self._is_decided), self._deadline_s)
                except TimeoutError as error:
                    if self._answers == answers:
                        what = f"waited for an actor, and none answered anything for {self._deadline_s:g} s"
                        raise RequestDeadlineExceeded(f"group {group_id!r} {what}") from error
            slot = self._free_slot()
            if self._closing:
                raise PoolClosed(f"group {group_id!r}: the pool was closed while it waited for an actor")
            self._refuse_without_ray(group_id)
            if slot is None:
                raise RequestCrashedActor(f"group {group_id!r}: all actors of the pool are dead; start others")
            slot.requests += 1
            slot.calls += calls
            self._counters.in_flight += 1
            return slot

    def _is_decided(self) -> bool:
        """Whether one that waits has a slot, or will never have one."""
        is_hopeless = self._closing or not self._has_ray() or all(slot.is_dead for slot in self._slots)
        return is_hopeless or self._free_slot() is not None

    def _free_slot(self) -> _Slot | None:
        free = [slot for slot in self._slots if slot.requests < self._in_flight_per_actor and not slot.is_dead]
        return min(free, key=lambda slot: slot.calls, default=None)

    async def _leave_slot(self, slot: _Slot, calls: int, answer: asyncio.Future[FinalizedGroup]) -> None:
        error = None if answer.cancelled() else answer.exception()
        async with self._slot_free:
            slot.requests -= 1
            slot.calls -= calls
            slot.is_dead |= error is not None and isinstance(error.__cause__, ActorDiedError)
            self._answers += 1
            self._counters.in_flight -= 1
            self._slot_free.notify_all()

    async def _wake_waiting(self) -> None:
        async with self._slot_free:
            self._slot_free.notify_all()


@dataclass(frozen=True)
class _Submitted:
    """A request and what becomes of it."""

    request: ReassemblyRequest
    future: Future[FinalizedGroup]


def _outcome_of(on_error: OnError) -> Callable[[_Submitted], FinalizedGroup | FailedGroup]:
    """How an iterator gives what became of a request."""
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error must be 'raise' or 'yield', got {on_error!r:.80}")

    def outcome(submitted: _Submitted) -> FinalizedGroup | FailedGroup:
        try:
            return submitted.future.result()
        except Exception as error:
            if on_error == "raise":
                raise
            return FailedGroup(str(getattr(submitted.request, "group_id", submitted.request)), error)

    return outcome


def _ray_session() -> tuple[str, str] | None:
    """Which connection to Ray this process has: cluster and job. Either one alone comes again after `ray.init()`."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_session_name(), context.get_job_id()


async def _answer(actor: ray.actor.ActorHandle[Any], request: ReassemblyRequest, max_bytes: int) -> FinalizedGroup:
    """The actor's answer, or its error with the type that it was raised with."""
    try:
        group: FinalizedGroup = await actor.finalize.remote(request)
    except RayTaskError as error:
        raise error.cause from error
    except (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError) as error:
        raise RequestCrashedActor(f"group {request.group_id!r}: its actor died on every try: {error}") from error
    assert_metadata_only(group, max_bytes=max_bytes)
    return group


def _manifest_size(request: ReassemblyRequest) -> int:
    """How many calls a request is about; the measure of its work."""
    manifests = (receipt.get("manifest") for receipt in request.receipts if isinstance(receipt, Mapping))
    return sum(len(manifest) for manifest in manifests if isinstance(manifest, list | tuple))
