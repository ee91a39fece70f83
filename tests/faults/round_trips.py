"""Where in its work a process is, counted in round trips to the queue, and dying there.

    trips = RoundTrips(plane)              # a connected TransferQueueDataPlane
    trips.die_at((7, "before"))            # SIGKILL to this process in place of its seventh round trip
    trips.steps                            # ["KV_RETRIEVE_META", "store.get", …] so far

A data-plane call is several round trips (see `data_plane/transfer_queue/rows.py`), so this is finer
than the calls: a put that dies in its middle has numbered its keys, or stored values that nobody was
told of. Those of the plane's own gate are not counted; it beats in the background.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from rollout_reassembler.data_plane.barrier import GATE_PARTITION

Death = tuple[int | str, Literal["before", "after"]]
"""At which round trip, and whether it still takes effect: the 7th, or `"store.get#1"`, the first of its name."""


class RoundTrips:
    """Counts what a plane sends, and ends the process at one of it."""

    def __init__(self, plane: Any) -> None:
        self.steps: list[str] = []
        self.die_at(None)
        queue, store = plane._rows._queue, plane._rows._store
        request = queue._request_controller

        async def watched_request(socket: Any, request_type: Any, response_type: Any, body: Any) -> Any:
            def send() -> Awaitable[Any]:
                return request(socket, request_type, response_type, body)

            return await (send() if GATE_PARTITION in str(body) else self._step(request_type.name, send))

        queue._request_controller = watched_request
        for name in ("put", "get", "clear"):
            setattr(store, name, self._watched(f"store.{name}", getattr(store, name)))

    def die_at(self, death: Death | None) -> None:
        """Die then, counted from now; `None` is to live."""
        self._death = death
        self._count = 0
        self._by_name = Counter[str]()

    def _watched(self, step: str, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def watched(*args: Any) -> Any:
            return await self._step(step, lambda: send(*args))

        return watched

    async def _step(self, step: str, send: Callable[[], Awaitable[Any]]) -> Any:
        self.steps.append(step)
        self._count += 1
        self._by_name[step] += 1
        here = (self._count, f"{step}#{self._by_name[step]}")
        self._die_if(here, "before")
        answer = await send()
        self._die_if(here, "after")
        return answer

    def _die_if(self, here: tuple[int, str], where: str) -> None:
        if self._death is not None and self._death[0] in here and self._death[1] == where:
            os.kill(os.getpid(), signal.SIGKILL)
