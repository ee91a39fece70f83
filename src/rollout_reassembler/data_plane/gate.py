"""A gate before the writes of one process: open, or closed while somebody needs the plane to stand still.

    with gate.writing("put_samples", partition, keys, seconds):     # waits while the gate is closed
        write()

A write that has begun is never stopped half way: whoever closes the gate waits for those inside. So
the safe point at which writers stop is between two calls of a data-plane client. Each call is all that
a finalizer has to say at a time, and it may be stopped between any two of them (DESIGN: finalizing
twice equals finalizing once), so that is safe for finalizers too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout


class WriteGate:
    """Counts the writes that are inside and holds new ones back. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writing = 0
        self._closed = False

    @contextmanager
    def writing(self, call: str, partition: str, keys: Sequence[str], seconds: float) -> Iterator[None]:
        """Be inside for one write. Raises `DataPlaneTimeout` when the gate stays closed for `seconds`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._closed, seconds):
                raise quiesced_too_long(call, partition, keys, seconds)
            self._writing += 1
        try:
            yield
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self, seconds: float) -> Iterator[None]:
        """Keep the gate closed for a block, which runs once no write is inside.

        Raises `DataPlaneTimeout`, with the gate open again, when writes do not end within `seconds`.
        """
        until = time.monotonic() + seconds
        with self._changed:
            if not self._changed.wait_for(lambda: not self._closed, seconds):
                raise DataPlaneTimeout("somebody else keeps the plane quiesced", call="quiesce", seconds=seconds)
            self._closed = True
            drained = self._changed.wait_for(lambda: self._writing == 0, max(until - time.monotonic(), 0.0))
            late = self._writing
            if not drained:
                self._open()
        if not drained:
            raise DataPlaneTimeout(f"{late} writes of this process did not end", call="quiesce", seconds=seconds)
        try:
            yield
        finally:
            with self._changed:
                self._open()

    def _open(self) -> None:
        self._closed = False
        self._changed.notify_all()


def quiesced_too_long(call: str, partition: str, keys: Sequence[str], seconds: float, by: str = "") -> DataPlaneTimeout:
    """The error of a write that waited for a closed gate in vain."""
    what = f"the plane is quiesced{f' by {by}' if by else ''} and stayed so; nothing was written"
    return DataPlaneTimeout(what, call=call, partition=partition, keys=keys, seconds=seconds)


def relabelled(error: DataPlaneError, call: str, partition: str, keys: Sequence[str]) -> DataPlaneError:
    """The same fault as that of another call, which it stopped before anything was written."""
    return type(error)(error.what, call=call, partition=partition, keys=keys, seconds=error.seconds)
