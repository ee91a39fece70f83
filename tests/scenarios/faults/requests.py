"""Where in its work a process is, counted in requests to the queue, and dying there.

    requests = Requests(plane)         # a connected QueueDataPlane
    requests.die_at((7, "before"))     # SIGKILL to this process in place of its seventh request
    requests.steps                     # ["KV_RETRIEVE_META", "GET_DATA", …] so far

A data-plane call is several requests (see `data_plane/transfer_queue/rows.py`), so this is finer
than the calls: a put that dies in its middle has numbered its keys, or stored values that nobody was
told of. Those of the plane's own gate are not counted; it beats in the background.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any, Literal

from rollout_reassembler.data_plane.barrier import GATE_PARTITION

Death = tuple[int | str, Literal["before", "after"]]
"""At which request, and whether it still takes effect: the 7th, or `"GET_DATA#1"`, the first of its name."""


class Requests:
    """Counts what a plane sends, and ends the process at one of it."""

    def __init__(self, plane: Any) -> None:
        from rollout_reassembler.data_plane.transfer_queue.sockets import Call

        self.steps: list[str] = []
        self.die_at(None)
        sockets, send = plane._rows.sockets, Call.send

        def watched(call: Any, peer: Any, request: Any, body: Any) -> Any:
            if call._sockets is not sockets or call.site.partition == GATE_PARTITION:
                return send(call, peer, request, body)
            here = self._next(request.name)
            if self._is(here, "before"):
                take_answers(call)  # what was sent before it has taken effect
                os.kill(os.getpid(), signal.SIGKILL)
            reply = send(call, peer, request, body)
            if self._is(here, "after"):
                take_answers(call)
                os.kill(os.getpid(), signal.SIGKILL)
            return reply

        Call.send = watched  # type: ignore[method-assign]

    def die_at(self, death: Death | None) -> None:
        """Die then, counted from now; `None` is to live."""
        self._death = death
        self._count = 0
        self._by_name = Counter[str]()

    def _next(self, step: str) -> tuple[int, str]:
        self.steps.append(step)
        self._count += 1
        self._by_name[step] += 1
        return self._count, f"{step}#{self._by_name[step]}"

    def _is(self, here: tuple[int, str], where: str) -> bool:
        return self._death is not None and self._death[0] in here and self._death[1] == where


def take_answers(call: Any) -> None:
    for line in call.lines.values():
        for reply in tuple(line.outstanding):
            reply.body()
