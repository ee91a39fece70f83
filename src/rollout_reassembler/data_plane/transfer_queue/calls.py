"""What errors say about a call, the processes that it depends on, and blocking work under a deadline.

Imported before the queue is: import nothing here that imports `transfer_queue`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout, DataPlaneUnavailable
from rollout_reassembler.data_plane.ports import why_unreachable

T = TypeVar("T")


@dataclass(frozen=True)
class Peer:
    """A process that a call depends on, for example the queue's controller. `id` is its name on the queue."""

    name: str
    host: str
    port: int
    id: str = ""

    def __str__(self) -> str:
        return f"{self.name} at {self.host}:{self.port}"

    def is_refusing(self, seconds: float) -> bool:
        """Whether nothing listens at its port any more.

        Only a refusal counts: a host that does not answer may be slow, and is left to the deadline.
        """
        return isinstance(why_unreachable(self.host, self.port, seconds), ConnectionRefusedError)


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
