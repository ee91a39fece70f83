"""The gate before the writes of all processes of a plane, kept in the plane itself.

Whoever quiesces puts a row `gate` into a partition of tags; each process that writes keeps a row of its
own there, reads `gate` about once a second, and says in its row that it has stopped:

    quiescer                                 writer                          its row in the partition
                                             first write: joins              {name, beat: 1}
    gate = {id, name, beat, open: no}        writes …                        {name, beat: 7}
    waits for every row                      sees the gate: lets no write    {name, beat: 8}
                                             begin, waits for those inside   {name, beat: 9, stopped: id}
    all stopped: the block runs              its writes wait
    gate = {…, open: yes}                    sees it open: writes again      {name, beat: 12}
                                             no write for a while: leaves    -

Who does not write costs nothing. What makes this safe without a clock that all share: a row is taken for
that of a dead process only after its beat stood still for `SILENT` seconds, and a process begins a write,
and each message of one, only within `LEASE` seconds after it sent a beat. A gate whose beat stands still
for `SILENT` seconds was left by a dead quiescer, and counts as open.

A process that stood still may have been taken for dead, and a block may run. So a write whose lease ran
out sends nothing more until the gate was read anew. Its id is the fence: each quiescer gives it another
one before it looks for writers, and it stays when the gate opens. If it is the one that the write began
under, no block has begun, and the write goes on. Else it ends with `WriteFenced`. Where its last message may
have been on its way too late, it also leaves a row `late/…`, which the quiescer looks for before it opens
the gate: both are told.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self
from uuid import uuid4

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout, DataPlaneUnavailable, WriteFenced
from rollout_reassembler.data_plane.base import Tags
from rollout_reassembler.data_plane.gate import quiesced_too_long, relabelled

GATE_PARTITION = "rollout_reassembler.gate"

BEAT = 1.0
"""Seconds between two looks at the gate, and between two signs of life."""

LEASE = 5.0
SILENT = 8.0

_GATE = "gate"
_WRITER = "writer/"
_LATE = "late/"
_WATCH = 0.1
_LEAVE = 2.0
_RENEWAL = 60.0
"""Longer than a watcher's two calls and its rest take; it tells by itself when one of them fails."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine is suspended, where there is such a clock."""


def _now() -> float:
    return time.clock_gettime(_CLOCK)


class GateRows(Protocol):
    """The rows of tags in `GATE_PARTITION`. Each call raises `DataPlaneError` when the plane fails.

    A row whose first put is still under way has no tags yet; it counts as not there. That is safe: who
    puts a row looks at those of the others afterwards.
    """

    def put(self, key: str, tags: Tags) -> None: ...

    def list(self) -> Mapping[str, Tags]: ...

    def get(self, keys: Sequence[str]) -> Mapping[str, Tags]: ...

    def clear(self, keys: Sequence[str]) -> None: ...


class SharedGate:
    """One process's view of the gate, and its part in it. Thread-safe."""

    def __init__(self, rows: GateRows) -> None:
        self._rows = rows
        self._name = f"{socket.gethostname()}/{os.getpid()}"
        self._pulse = _Pulse()
        self._watched = _Pulse()
        self._held: _HeldGate | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._writing = 0
        self._waiting = 0
        self._last_write = 0.0
        self._read_open_at: float | None = None
        self._beat_at = self._looked_at = -math.inf
        self._gaps = 0
        self._gate_id = ""
        self._holder: _Holder | None = None
        self._stopped_for = ""
        self._fault: Exception | None = None

    @contextmanager
    def writing(self, call: str, partition: str, keys: Sequence[str], seconds: float) -> Iterator[WriteLease]:
        """Be inside for one write, which asks its lease before each message and tells it of each answer.

        Raises `DataPlaneTimeout` when the gate stays closed for `seconds`, the plane's own error when the
        gate cannot be read, and `WriteFenced` when a block began while the write stood still.
        """
        lease = self._enter(call, partition, keys, seconds)
        try:
            try:
                yield lease
            except WriteFenced:
                raise
            except Exception as error:
                lease.give_up(error)
                raise
            lease.complete()
        finally:
            with self._changed:
                self._writing -= 1
                self._last_write = _now()
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
                names = self._await_writers(held.id, until, seconds)
                held.is_within_block = True
                yield names
            finally:
                self._held = None

    def forget_restored(self) -> None:
        """Put this time's gate in the place of the one that a checkpoint brought back. Writes under way are fenced."""
        if self._held is not None:
            self._held.put()
        else:
            self._rows.put(_GATE, {"id": uuid4().hex, "name": self._name, "beat": 0, "open": True})

    def close(self) -> None:
        """Leave, if this process is among the writers."""
        self._closing.set()
        watcher = self._watcher
        if watcher is not None:
            watcher.join(_LEAVE)

    def is_current(self, gaps: int) -> bool:
        """Whether this process has shown without a gap since, and lately, that it is alive."""
        return self._gaps == gaps and _now() - self._beat_at < LEASE

    def look_anew(self, call: str, partition: str, keys: Sequence[str]) -> tuple[str, int, _Holder | None]:
        """The gate's id as of after this call began, the gaps till then, and who keeps it closed.

        Raises the plane's own error when it cannot be read.
        """
        began = _now()
        until = time.monotonic() + _RENEWAL
        with self._changed:
            while not (self._looked_at > began and self.is_current(self._gaps)):
                if self._closing.is_set():
                    raise DataPlaneUnavailable("this client was closed", call=call, partition=partition, keys=keys)
                if self._watcher is None:
                    self._raise_fault(call, partition, keys)
                    self._watch()
                left = until - time.monotonic()
                if left <= 0:
                    raise DataPlaneTimeout(
                        "the gate could not be read", call=call, partition=partition, keys=keys, seconds=_RENEWAL
                    )
                self._changed.wait(left)
            return self._gate_id, self._gaps, self._holder

    def leave_sign(self, gate_id: str, call: str, partition: str) -> None:
        """Tell the quiescer of this gate that a message of a write may have been late."""
        sign = {"gate": gate_id, "name": self._name, "call": call, "partition": partition}
        self._rows.put(f"{_LATE}{uuid4().hex}", sign)

    def _enter(self, call: str, partition: str, keys: Sequence[str], seconds: float) -> WriteLease:
        until = time.monotonic() + seconds
        with self._changed:
            self._waiting += 1
            try:
                self._watch()
                while not self._may_write() and not self._closing.is_set():
                    if self._watcher is None:
                        self._raise_fault(call, partition, keys)
                        self._watch()
                    left = until - time.monotonic()
                    if left <= 0:
                        raise quiesced_too_long(
                            call, partition, keys, seconds, self._holder.name if self._holder else ""
                        )
                    self._changed.wait(left)
                self._writing += 1
                return WriteLease(self, call, partition, keys, self._gate_id, self._gaps)
            finally:
                self._waiting -= 1

    def _raise_fault(self, call: str, partition: str, keys: Sequence[str]) -> None:
        if isinstance(self._fault, DataPlaneError):
            raise relabelled(self._fault, call, partition, keys)
        if self._fault is not None:
            raise self._fault

    def _may_write(self) -> bool:
        return self._read_open_at is not None and _now() - self._read_open_at < LEASE and self.is_current(self._gaps)

    def _watch(self) -> None:
        """See to it that somebody looks at the gate. The caller holds the lock."""
        if self._watcher is None and not self._closing.is_set():
            self._fault = None
            # A row of its own for each watcher: the last one may still be about to clear its row.
            key = f"{_WRITER}{uuid4().hex}"
            self._watcher = threading.Thread(
                target=self._keep_watching, args=(key,), name="data-plane-gate", daemon=True
            )
            self._watcher.start()

    def _keep_watching(self, key: str) -> None:
        """Until nobody has written for a while, or the plane fails: a fault is raised by the writes that wait."""
        try:
            self._beat(key, 0)
            for beat in itertools.count(1):
                self._look(key)
                if self._has_left():
                    break
                self._beat(key, beat)
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

    def _beat(self, key: str, beat: int) -> None:
        began = _now()
        self._rows.put(key, {"name": self._name, "beat": beat, "stopped": self._stopped_for})
        with self._changed:
            if began - self._beat_at >= LEASE:
                self._gaps += 1
            self._beat_at = began

    def _look(self, key: str) -> None:
        """Read the gate, and whether this process's row is there, which no quiescer that comes later overlooks."""
        began = _now()
        tags = self._rows.get([_GATE, key])
        gate = tags.get(_GATE) or {}
        holder = _holder_of(gate)
        if holder is not None and self._pulse.is_silent(_GATE, holder):
            holder = None
        with self._changed:
            is_counted = bool(tags.get(key))
            is_silent = _now() - self._beat_at >= LEASE
            has_written = self._writing > 0 or self._last_write > self._beat_at
            if not is_counted:  # somebody took this process for dead, or loaded another state
                self._gaps += 1
                self._beat_at = -math.inf
            self._holder = holder
            self._gate_id = gate.get("id", "")
            self._looked_at = began if is_counted else -math.inf
            self._read_open_at = began if holder is None and is_counted else None
            if holder is None or self._stopped_for != holder.id:
                self._stopped_for = ""
            self._changed.notify_all()
        # A clock that stood still with the process shows no gap, so no write has noticed.
        if holder is not None and not is_counted and not is_silent and has_written:
            self.leave_sign(holder.id, "a write", "")

    def _has_left(self) -> bool:
        with self._changed:
            idle = self._writing == self._waiting == 0 and _now() - self._last_write > LEASE
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
            self._closing.wait(BEAT if self._read_open_at is not None else BEAT / 4)
        elif self._stopped_for:
            self._closing.wait(BEAT / 4)
        else:
            with self._changed:
                if self._changed.wait_for(lambda: self._writing == 0, BEAT):
                    self._stopped_for = holder.id

    def _refuse_other_holder(self, until: float, seconds: float) -> None:
        first = holder = self._read_holder()
        while holder and not self._watched.is_silent(_GATE, holder):
            if holder != first:
                raise DataPlaneError(f"{holder.name} keeps the plane quiesced", call="quiesce")
            if time.monotonic() > until:
                left = self._watched.left(_GATE)
                what = f"{holder.name} seems to keep the plane quiesced; if it is dead, its gate counts as open in"
                raise DataPlaneTimeout(f"{what} {left:.1f} s", call="quiesce", seconds=seconds)
            time.sleep(_WATCH)
            holder = self._read_holder()

    def _read_holder(self) -> _Holder | None:
        return _holder_of(self._rows.get([_GATE]).get(_GATE) or {})

    def _await_writers(self, gate_id: str, until: float, seconds: float) -> list[str]:
        """The names of the writers, once each of them has stopped or is dead.

        How long each was silent is remembered from one attempt to the next: also short ones succeed in the end.
        """
        while True:
            listed = self._rows.list()
            rows = {key: tags for key, tags in listed.items() if key.startswith(_WRITER) and tags}
            self._watched.forget_all_but({_GATE, *rows})
            dead = [key for key, tags in rows.items() if self._watched.is_silent(key, tags.get("beat"))]
            late = {key: tags for key, tags in rows.items() if tags["stopped"] != gate_id and key not in dead}
            if not late:
                old_signs = [key for key in listed if key.startswith(_LATE)]
                if dead or old_signs:
                    self._rows.clear([*dead, *old_signs])
                return [tags["name"] for key, tags in rows.items() if key not in dead]
            if time.monotonic() > until:
                waited_for = ", ".join(self._described(key, tags["name"]) for key, tags in late.items())
                raise DataPlaneTimeout(f"writers that did not stop: {waited_for}", call="quiesce", seconds=seconds)
            time.sleep(_WATCH)

    def _described(self, key: str, name: str) -> str:
        silent = self._watched.silence(key)
        if silent < 2 * BEAT:
            return f"{name} (alive, within a write)"
        return f"{name} (silent for {silent:.1f} s; taken for dead in {self._watched.left(key):.1f} s, try again then)"


class WriteLease:
    """The right of one write to send messages. Belongs to the thread of the write."""

    def __init__(
        self, gate: SharedGate, call: str, partition: str, keys: Sequence[str], gate_id: str, gaps: int
    ) -> None:
        self._gate = gate
        self._site = (call, partition, keys)
        self._gate_id = gate_id
        self._gaps = gaps
        self._may_be_late = False

    def before_message(self) -> None:
        """Raises `WriteFenced`, and the message must not be sent, if a block began while this process stood still."""
        self._require()
        self._may_be_late = True

    def after_answers(self) -> None:
        """Note that all that was sent has arrived."""
        if self._gate.is_current(self._gaps):
            self._may_be_late = False

    def complete(self) -> None:
        """At the end of the write. Raises `WriteFenced` if a message of it may have arrived within a block."""
        if self._may_be_late:
            self._require()

    def give_up(self, error: Exception) -> None:
        """At the end of a write that failed: see to it that a quiescer is told of messages that may be late."""
        if self._may_be_late:
            try:
                self._require()
            except DataPlaneError as fenced:
                error.add_note(str(fenced))

    def _require(self) -> None:
        if self._gate.is_current(self._gaps):
            return
        call, partition, keys = self._site
        gate_id, gaps, holder = self._gate.look_anew(call, partition, keys)
        if gate_id == self._gate_id:
            self._gaps = gaps
            return
        what = "this process stood still for longer than its lease, and the plane was quiesced meanwhile"
        if self._may_be_late:
            if holder is not None:
                self._gate.leave_sign(holder.id, call, partition)
            what = f"{what}; part of the write may have arrived then"
        raise WriteFenced(f"{what}. Repeat the call", call=call, partition=partition, keys=keys)


class _HeldGate:
    """The closed gate of a quiescer: a row that beats until the block ends."""

    def __init__(self, rows: GateRows, name: str) -> None:
        self.id = uuid4().hex
        self._rows = rows
        self._name = name
        self._beats = itertools.count()
        self._last = _now()
        self._lost = ""
        self.is_within_block = False
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
        try:
            self._open()
        except DataPlaneError:
            if kind is None:
                raise
        if self._lost and kind is None:
            raise DataPlaneError(f"the plane was not quiesced to the end: {self._lost}", call="quiesce")

    def put(self) -> None:
        """Close the gate, or keep it closed."""
        began = _now()
        self._rows.put(_GATE, self._tags(is_open=False))
        self._note_gap(began)
        self._last = began

    def _open(self) -> None:
        """Open the gate, if it is still this one's, once it is known whether any write was late."""
        listed = self._rows.list()
        self._note_gap(_now())
        gate = listed.get(_GATE) or {}
        if gate.get("id") != self.id:
            self._lost = self._lost or f"{gate.get('name', 'somebody')} took the gate"
            return
        signs = {key: tags for key, tags in listed.items() if key.startswith(_LATE) and tags.get("gate") == self.id}
        if signs and self.is_within_block:
            late = "; ".join(f"{tags['name']}: {tags['call']}({tags['partition']!r})" for tags in signs.values())
            self._lost = f"writers that had stood still may have written within the block: {late}"
        if signs:
            self._rows.clear(list(signs))
        self._rows.put(_GATE, self._tags(is_open=True))

    def _tags(self, *, is_open: bool) -> Tags:
        return {"id": self.id, "name": self._name, "beat": next(self._beats), "open": is_open}

    def _note_gap(self, now: float) -> None:
        if now - self._last > LEASE:
            self._lost = f"it could not be kept closed for {now - self._last:.1f} s"

    def _keep_beating(self) -> None:
        while not self._done.wait(BEAT):
            # A beat that fails is tried again; a gap that was too long is told at the end.
            with contextlib.suppress(DataPlaneError):
                now = self._rows.get([_GATE]).get(_GATE)
                if now and now["id"] != self.id:
                    self._lost = f"{now['name']} took the gate"
                    return
                self.put()


class _Holder(NamedTuple):
    """Who keeps the gate closed, as of its last beat."""

    id: str
    name: str
    beat: int


def _holder_of(gate: Mapping[str, Any]) -> _Holder | None:
    """Who keeps it closed, by its tags; a gate without tags is one whose first put is under way."""
    if not gate or gate.get("open"):
        return None
    return _Holder(gate["id"], gate["name"], gate["beat"])


class _Pulse:
    """Tells whether a row still beats, by this process's own clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, float]] = {}

    def is_silent(self, key: str, sign: Any) -> bool:
        """Whether `sign` has been the same for `SILENT` seconds, as far as was watched."""
        known, _ = self._seen.get(key, (None, 0.0))
        if known != sign:
            self._seen[key] = (sign, _now())
            return False
        return self.silence(key) > SILENT

    def silence(self, key: str) -> float:
        """For how long its sign has been the same, in seconds, as of when it was last asked about."""
        return _now() - self._seen[key][1]

    def left(self, key: str) -> float:
        """In how many seconds it is silent, if it stays the same."""
        return max(0.0, SILENT - self.silence(key))

    def forget_all_but(self, keys: Collection[str]) -> None:
        """Drop what is known of rows that are gone."""
        for key in self._seen.keys() - keys:
            del self._seen[key]
