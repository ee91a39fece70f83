"""A client that stands still at a message of its next write, as a process does that gets SIGSTOP.

Neither the write nor the watcher of the gate sends anything until it is resumed; the queue and all others go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rollout_reassembler.data_plane.transfer_queue.sockets import Call


class Stoppable:
    """Stops a client at a message of its next write, as SIGSTOP would, until it is resumed."""

    def __init__(self, plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plane = plane
        self.is_stopped = threading.Event()
        self._runs = threading.Event()
        self._runs.set()
        self._left: int | None = None
        self._behind_look = False
        self._writer: threading.Thread | None = None
        gate_rows = plane._gate._rows
        for name in ("put", "get", "clear", "list"):
            monkeypatch.setattr(gate_rows, name, self._held_up(getattr(gate_rows, name)))
        require_lease = Call.require_lease

        def stopping(call: Call) -> None:
            is_here = call._sockets is plane._rows.sockets and call.lease is not None and self._left == 0
            if is_here and not self._behind_look:
                self._stop()
            require_lease(call)
            if is_here and self._behind_look:
                self._stop()
            if call._sockets is plane._rows.sockets and call.lease is not None and self._left is not None:
                self._left -= 1

        monkeypatch.setattr(Call, "require_lease", stopping)

    def stop_at(self, message: int, *, behind_look: bool = False) -> None:
        self._left, self._behind_look = message, behind_look

    def stop(self) -> None:
        self._runs.clear()

    def resume(self) -> None:
        self._runs.set()

    def _stop(self) -> None:
        self._left = None
        self.stop()
        self.is_stopped.set()
        self._runs.wait(30)

    def _held_up(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def held_up(*args: Any) -> Any:
            self._runs.wait(30)
            return work(*args)

        return held_up
