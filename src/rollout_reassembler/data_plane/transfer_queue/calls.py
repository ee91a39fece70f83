"""Calls that end: every wait of this adapter goes through one of the two functions of this file.

TransferQueue's synchronous calls wait for ever when the controller is gone, and its sockets never
report a lost peer. So its coroutines run on one event loop, on one daemon thread, for the life of
the process (a socket belongs to the loop that opened it), each under a deadline. While a call
waits, its peers are knocked at once a second: one that refuses connections is dead, and the call
ends then, long before its deadline.

    caller's thread ──run──▶ loop thread: [slot of 8] ─▶ coroutine ─▶ answer, or a typed error
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout, DataPlaneUnavailable

T = TypeVar("T")

_KNOCK_EVERY = 1.0
_KNOCK_TIMEOUT = 2.0
_CONCURRENT_CALLS = 8
"""One client saturates at four to eight calls at a time; more only wait inside the queue."""

_GRACE = 5.0
"""How much longer than the deadline a caller waits for the loop itself to say so."""


@dataclass(frozen=True)
class Peer:
    """A process that a call depends on, for example the queue's controller."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.name} at {self.host}:{self.port}"


@dataclass(frozen=True)
class CallSite:
    """What an error says about its call."""

    call: str
    partition: str = ""
    keys: Sequence[str] = ()

    def timeout(self, seconds: float, what: str = "no answer within the deadline") -> DataPlaneTimeout:
        return DataPlaneTimeout(what, call=self.call, partition=self.partition, keys=self.keys, seconds=seconds)

    def unavailable(self, what: str, seconds: float | None = None) -> DataPlaneUnavailable:
        return DataPlaneUnavailable(what, call=self.call, partition=self.partition, keys=self.keys, seconds=seconds)

    def failed(self, what: str) -> DataPlaneError:
        return DataPlaneError(what, call=self.call, partition=self.partition, keys=self.keys)


class BoundedCalls:
    """Runs coroutines on the process's loop thread for callers on any thread, each under a deadline."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = tuple(peers)
        self._loop = _shared_loop()
        self._slots = asyncio.Semaphore(_CONCURRENT_CALLS)
        self._running: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def run(self, site: CallSite, make: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        """The result of `make()`, awaited on the loop. Waiting for a free slot counts.

        Raises `DataPlaneTimeout` after `seconds`, `DataPlaneUnavailable` as soon as a peer refuses
        connections, and whatever the coroutine raises.
        """
        if self._is_closed:
            raise site.unavailable("this client was closed")
        outer = asyncio.run_coroutine_threadsafe(self._bounded(site, make, seconds), self._loop)
        try:
            return outer.result(timeout=seconds + _GRACE)
        except DataPlaneError:
            raise
        except TimeoutError as error:
            outer.cancel()
            raise site.timeout(seconds, "the event loop is too busy to answer") from error
        except CancelledError as error:
            raise site.unavailable("this client was closed during the call") from error

    def close(self, cleanup: Callable[[], None], seconds: float) -> None:
        """Refuse new calls, cancel those that run, then run `cleanup` on the loop thread."""
        if self._is_closed:
            return
        self._is_closed = True
        done = asyncio.run_coroutine_threadsafe(self._drain(cleanup), self._loop)
        with contextlib.suppress(TimeoutError):
            done.result(timeout=seconds)

    async def _drain(self, cleanup: Callable[[], None]) -> None:
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        cleanup()

    async def _bounded(self, site: CallSite, make: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        started = time.monotonic()
        try:
            async with asyncio.timeout(seconds), self._slots:
                return await self._watched(site, make, started)
        except DataPlaneError:
            raise
        except TimeoutError as error:
            raise site.timeout(seconds) from error

    async def _watched(self, site: CallSite, make: Callable[[], Coroutine[Any, Any, T]], started: float) -> T:
        """Await the coroutine, and knock at its peers while it has no answer."""
        task = asyncio.create_task(make())
        self._running.add(task)
        task.add_done_callback(self._forget)
        try:
            while not (await asyncio.wait({task}, timeout=_KNOCK_EVERY))[0]:
                refusing = await self._refusing_peer()
                if refusing is not None and not task.done():
                    raise site.unavailable(f"{refusing} is gone: it refuses connections", time.monotonic() - started)
            return task.result()
        finally:
            task.cancel()

    async def _refusing_peer(self) -> Peer | None:
        refused = await asyncio.gather(*(is_refusing(peer) for peer in self._peers))
        return next((peer for peer, refuses in zip(self._peers, refused, strict=True) if refuses), None)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()


async def is_refusing(peer: Peer) -> bool:
    """Whether nothing listens at the peer's port any more.

    Only a refusal counts: a host that does not answer may be slow, and is left to the deadline.
    """
    try:
        async with asyncio.timeout(_KNOCK_TIMEOUT):
            _, writer = await asyncio.open_connection(peer.host, peer.port)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    writer.close()
    return False


def run_blocking(site: CallSite, work: Callable[[], T], seconds: float) -> T:
    """The result of a function that may block for ever, run on a daemon thread of its own.

    After `DataPlaneTimeout` the thread is left behind; it ends when its function does.
    """
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # not swallowed: raised again in the caller's thread
            future.set_exception(error)

    threading.Thread(target=target, name=f"data-plane-{site.call}", daemon=True).start()
    if not wait((future,), timeout=seconds).done:
        raise site.timeout(seconds)
    return future.result()


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def _shared_loop() -> asyncio.AbstractEventLoop:
    """The process's loop, started on first use and never stopped."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="data-plane-loop", daemon=True).start()
        return _loop
