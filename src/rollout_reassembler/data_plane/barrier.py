"""The gate before the writes of all processes of a plane, kept in the plane itself.

Whoever quiesces puts a row `gate` into a partition of tags; each process that writes keeps a row of its
own there, reads `gate` about once a second, and says in its row that it has stopped:

    quiescer                                 writer                          its row in the partition
                                             first write: joins              {name, beat: 1}
    gate = {id, name, beat}                  writes …                        {name, beat: 7}
    waits for every row                      sees the gate: lets no write    {name, beat: 8}
                                             begin, waits for those inside   {name, beat: 9, stopped: id}
    all stopped: the block runs              its writes wait
    clears `gate`                            sees it gone: writes again      {name, beat: 12}
                                             no write for a while: leaves    -

Who does not write costs nothing. What makes this safe without a clock that all share: a process may
begin a write only within `LEASE` seconds after it began to read an open gate, and a row is taken for
that of a dead process only after its beat stood still for longer than that (`SILENT`). A gate whose
beat stands still that long was left by a dead quiescer, and counts as open.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self
from uuid import uuid4

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout
from rollout_reassembler.data_plane.base import Tags
from rollout_reassembler.data_plane.gate import relabelled, stood_still

GATE_PARTITION = "rollout_reassembler.gate"

BEAT = 1.0
"""Seconds between two looks at the gate, and between two signs of life."""

LEASE = 5.0
SILENT = 8.0

_GATE = "gate"
_WATCH = 0.1
_LEAVE = 2.0


class GateRows(Protocol):
    """The rows of tags in `GATE_PARTITION`. Each call raises `DataPlaneError` when the plane fails.

    A row whose first put is still under way has no tags yet; it counts as not there. That is safe: who
    puts a row looks at those of the others afterwards.
    """

    def put(self, key: str, tags: Tags) -> None: ...

    def list(self) -> Mapping[str, Tags]: ...

    def get(self, key: str) -> Tags | None: ...

    def clear(self, keys: Sequence[str]) -> None: ...


class SharedGate:
    """One process's view of the gate, and its part in it. Thread-safe."""

    def __init__(self, rows: GateRows) -> None:
        self._rows = rows
        self._name = f"{socket.gethostname()}/{os.getpid()}"
        self._pulse = _Pulse()
        self._held: _HeldGate | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._writing = 0
        self._waiting = 0
        self._last_write = 0.0
        self._read_open_at: float | None = None
        self._holder: _Holder | None = None
        self._stopped_for = ""
        self._fault: Exception | None = None

    @contextmanager
    def writing(self, call: str, partition: str, keys: Sequence[str], seconds: float) -> Iterator[None]:
        """Be inside for one write.

        Raises `DataPlaneTimeout` when the gate stays closed for `seconds`, and the plane's own error
        when the gate cannot be read.
        """
        self._enter(call, partition, keys, seconds)
        try:
            yield
        finally:
            with self._changed:
                self._writing -= 1
                self._last_write = time.monotonic()
                self._changed.notify_all()

    @contextmanager
    def quiesced(self, seconds: float) -> Iterator[list[str]]:
        """Keep all writers of the plane stopped for a block; yields their names.

        Raises `DataPlaneTimeout`, with the gate open again, naming those that did not stop within
        `seconds`; `DataPlaneError` when another process holds the gate, or when it turns out at the end
        of the block that the gate could not be kept closed.
        """
        until = time.monotonic() + seconds
        self._refuse_other_holder(until, seconds)
        with _HeldGate(self._rows, self._name) as held:
            self._held = held
            try:
                yield self._await_writers(held.id, until, seconds)
            finally:
                self._held = None

    def forget_restored(self) -> None:
        """Take away the closed gate of another time, which a checkpoint brought back."""
        if self._held is not None:
            self._held.put()
        else:
            self._rows.clear([_GATE])

    def close(self) -> None:
        """Leave, if this process is among the writers."""
        self._closing.set()
        watcher = self._watcher
        if watcher is not None:
            watcher.join(_LEAVE)

    def _enter(self, call: str, partition: str, keys: Sequence[str], seconds: float) -> None:
        until = time.monotonic() + seconds
        with self._changed:
            self._waiting += 1
            try:
                self._watch()
                while not self._may_write() and not self._closing.is_set():
                    if self._watcher is None:
                        if isinstance(self._fault, DataPlaneError):
                            raise relabelled(self._fault, call, partition, keys)
                        if self._fault is not None:
                            raise self._fault
                        self._watch()
                    left = until - time.monotonic()
                    if left <= 0:
                        raise stood_still(call, partition, keys, seconds, self._holder.name if self._holder else "")
                    self._changed.wait(left)
                self._writing += 1
            finally:
                self._waiting -= 1

    def _may_write(self) -> bool:
        return self._read_open_at is not None and time.monotonic() - self._read_open_at < LEASE

    def _watch(self) -> None:
        """See to it that somebody looks at the gate. The caller holds the lock."""
        if self._watcher is None and not self._closing.is_set():
            self._fault = None
            # A row of its own for each watcher: the last one may still be about to clear its row.
            key = f"writer/{uuid4().hex}"
            self._watcher = threading.Thread(
                target=self._keep_watching, args=(key,), name="data-plane-gate", daemon=True
            )
            self._watcher.start()

    def _keep_watching(self, key: str) -> None:
        """Until nobody has written for a while, or the plane fails: a fault is raised by the writes that wait."""
        try:
            for beat in itertools.count():
                self._rows.put(key, {"name": self._name, "beat": beat, "stopped": self._stopped_for})
                self._read_gate()
                if self._has_left():
                    break
                self._rest()
        except Exception as error:  # not swallowed: raised by the writes that wait
            with self._changed:
                self._fault = error
                self._watcher = None
                self._changed.notify_all()
            return
        # A row that stays is nobody's; it delays the next barrier by `SILENT` seconds.
        with contextlib.suppress(DataPlaneError):
            self._rows.clear([key])

    def _read_gate(self) -> None:
        began = time.monotonic()
        tags = self._rows.get(_GATE)
        holder = _Holder(tags["id"], tags["name"], tags["beat"]) if tags else None
        if holder is not None and self._pulse.is_silent(_GATE, holder):
            holder = None
        with self._changed:
            self._holder = holder
            self._read_open_at = began if holder is None else None
            if holder is None or self._stopped_for != holder.id:
                self._stopped_for = ""
            self._changed.notify_all()

    def _has_left(self) -> bool:
        with self._changed:
            idle = self._writing == self._waiting == 0 and time.monotonic() - self._last_write > LEASE
            if not self._closing.is_set() and (self._holder is not None or not idle):
                return False
            self._read_open_at = None
            self._watcher = None
            self._changed.notify_all()
            return True

    def _rest(self) -> None:
        """Until the next look: a while, or as soon as the last write has left a closed gate."""
        holder = self._holder
        if holder is None:
            self._closing.wait(BEAT)
        elif self._stopped_for:
            self._closing.wait(BEAT / 4)
        else:
            with self._changed:
                if self._changed.wait_for(lambda: self._writing == 0, BEAT):
                    self._stopped_for = holder.id

    def _refuse_other_holder(self, until: float, seconds: float) -> None:
        pulse, first = _Pulse(), self._rows.get(_GATE)
        tags = first
        while tags and not pulse.is_silent(_GATE, tags):
            if tags != first:
                raise DataPlaneError(f"{tags['name']} keeps the plane quiesced", call="quiesce")
            if time.monotonic() > until:
                what = f"{tags['name']} seems to keep the plane quiesced"
                raise DataPlaneTimeout(what, call="quiesce", seconds=seconds)
            time.sleep(_WATCH)
            tags = self._rows.get(_GATE)

    def _await_writers(self, gate_id: str, until: float, seconds: float) -> list[str]:
        """The names of the writers, once each of them has stopped or is dead."""
        pulse = _Pulse()
        while True:
            rows = {key: tags for key, tags in self._rows.list().items() if key != _GATE and tags}
            dead = [key for key, tags in rows.items() if pulse.is_silent(key, tags.get("beat"))]
            late = [tags["name"] for key, tags in rows.items() if tags["stopped"] != gate_id and key not in dead]
            if not late:
                if dead:
                    self._rows.clear(dead)
                return [tags["name"] for key, tags in rows.items() if key not in dead]
            if time.monotonic() > until:
                what = f"writers that did not stop: {', '.join(late)}"
                raise DataPlaneTimeout(what, call="quiesce", seconds=seconds)
            time.sleep(_WATCH)


class _HeldGate:
    """The closed gate of a quiescer: a row that beats until the block ends."""

    def __init__(self, rows: GateRows, name: str) -> None:
        self.id = uuid4().hex
        self._rows = rows
        self._name = name
        self._beats = itertools.count()
        self._last = time.monotonic()
        self._lost = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="data-plane-barrier", daemon=True)

    def __enter__(self) -> Self:
        self.put()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if not self._lost:
            try:
                self._rows.clear([_GATE])
            except DataPlaneError:
                if kind is None:
                    raise
        elif kind is None:
            raise DataPlaneError(f"the plane was not quiesced to the end: {self._lost}", call="quiesce")

    def put(self) -> None:
        """Close the gate, or keep it closed."""
        began = time.monotonic()
        self._rows.put(_GATE, {"id": self.id, "name": self._name, "beat": next(self._beats)})
        if began - self._last > LEASE:
            self._lost = f"it could not be kept closed for {began - self._last:.1f} s"
        self._last = began

    def _keep_beating(self) -> None:
        while not self._done.wait(BEAT):
            # A beat that fails is tried again; a gap that was too long is told at the end.
            with contextlib.suppress(DataPlaneError):
                now = self._rows.get(_GATE)
                if now and now["id"] != self.id:
                    self._lost = f"{now['name']} took the gate"
                    return
                self.put()


class _Holder(NamedTuple):
    """Who keeps the gate closed, as of its last beat."""

    id: str
    name: str
    beat: int


class _Pulse:
    """Tells whether a row still beats, by this process's own clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, float]] = {}

    def is_silent(self, key: str, sign: Any) -> bool:
        """Whether `sign` has been the same for `SILENT` seconds, as far as was watched."""
        known, since = self._seen.get(key, (None, 0.0))
        now = time.monotonic()
        if known != sign:
            self._seen[key] = (sign, now)
            return False
        return now - since > SILENT
