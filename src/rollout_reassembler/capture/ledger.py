"""The ledger: what every rollout's calls were, durable, without a token.

One file of JSON lines a rollout, appended to by any number of threads and processes. A call leaves at
most two rows: when it is *admitted* (its parent is decided, from the messages alone) and when it is
*recorded*, *failed* (the worker has answered) or *aborted* (nobody saw an answer). At the end the rows
become a receipt.

    ledger = CaptureLedger(directory)
    admission = ledger.admit("r1", messages)                        # root / resolved / unresolved
    answer, coords = worker.generate(admission, messages)           # see recorder.py
    ledger.record(admission, coords, response_id=answer.id, output=answer.message)
    serve(answer)                                                   # only now may the agent see it
    ...
    receipt = ledger.receipt("r1", reward=1.0, response_id=answer.id)

What must stay true: *record before you serve*. A message that an agent can send back then always has
its row on disk, and a call without one was seen by nobody. An admission is on disk with the first row
behind it at the latest: until then nothing depends on it.

A request that continues no captured call begins a new conversation, a root whose whole prompt is context
(`on_unresolved="root"`), or poisons the rollout (`"reject"`).

Whatever a worker says is data: wrong or missing coordinates are a failed call and raise nothing. What
raises is a disk that fails (`OSError`) and a caller that contradicts itself (`LedgerConflict`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pydantic import ValidationError

from rollout_reassembler.capture import journal
from rollout_reassembler.capture.fingerprint import (
    FINGERPRINT_VERSION,
    Marks,
    Output,
    conversation_fingerprint,
    output_messages,
    prefix_marks,
)
from rollout_reassembler.capture.lineage import UNREADABLE, ParentDecision, RolloutIndex
from rollout_reassembler.capture.receipts import LedgerView, assemble_receipt
from rollout_reassembler.capture.records import (
    CAPTURE_FAILED,
    INVALID_COORDS,
    MISSING_COORDS,
    MISSING_RESPONSE_ID,
    CaptureAdmission,
    CommitCoords,
    Message,
    one_line,
)
from rollout_reassembler.capture.requests import RecentRequests, Request
from rollout_reassembler.capture.rows import (
    AbortedRow,
    AdmittedRow,
    AttemptRow,
    FailedRow,
    LedgerRow,
    RecordedRow,
    parse_row,
)
from rollout_reassembler.capture.terminal import ConversationPolicy, Witnesses
from rollout_reassembler.contract.errors import LedgerConflict, RequestError, UnreadableConversation
from rollout_reassembler.contract.records import CallRecord, RolloutReceipt
from rollout_reassembler.data_plane.durable import sync_directory

LOGGER = logging.getLogger(__name__)

OnUnresolved = Literal["root", "reject"]

_NAME_CHARS = 100


@dataclass
class _OpenRollout:
    """What this process has read of one rollout's file: all rows up to `end`, of which the disk has `synced` bytes."""

    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    index: RolloutIndex = field(default_factory=RolloutIndex)
    torn: list[int] = field(default_factory=list)
    inode: int = 0
    end: int = 0
    syncing: threading.Lock = field(default_factory=threading.Lock)
    synced: int = 0

    def catch_up(self, descriptor: int) -> None:
        """Read what was appended since; from the start, if this is no longer the file that was read."""
        status = os.fstat(descriptor)
        if status.st_ino != self.inode or status.st_size < self.end:
            self.index, self.torn, self.end, self.synced = RolloutIndex(), [], 0, 0
            self.inode = status.st_ino
        if status.st_size == self.end:
            return
        tail = journal.read_from(descriptor, self.end)
        for row in [parse_row(row) for row in tail.rows]:
            self.index = self.index.followed_by(row)
        for offset in tail.torn:
            LOGGER.warning("%s: torn line at byte %d; its writer died before it was acknowledged", self.path, offset)
        self.torn += tail.torn
        self.end = tail.end

    def append(self, descriptor: int, row: LedgerRow) -> None:
        self.end += journal.append(descriptor, row.model_dump_json(exclude_none=True))
        self.index = self.index.followed_by(row)

    def sync(self) -> None:
        """Wait until the disk has all rows that this process knows, together with whoever else waits for it."""
        known = self.end
        with self.syncing:
            if self.synced >= known:
                return
            is_new, known = self.synced == 0, self.end
            journal.sync(self.path)
            if is_new:
                sync_directory(self.path.parent)
            self.synced = known


class CaptureLedger:
    """The ledger files of one directory. Safe to share between threads; processes share the directory.

    `on_unresolved` says what becomes of a request that continues no captured call, and is not the first: `"root"`
    begins a conversation with it, `"reject"` poisons the rollout. A rollout's rows are read once a process and kept
    for the `max_open_rollouts` used last. Files are never rewritten or removed here.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        on_unresolved: OnUnresolved = "root",
        clock: Callable[[], float] = time.time,
        max_open_rollouts: int = 1024,
    ) -> None:
        if on_unresolved not in ("root", "reject"):
            raise RequestError(f"on_unresolved must be 'root' or 'reject', got {on_unresolved!r:.80}")
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._on_unresolved = on_unresolved
        self._clock = clock
        self._max_open_rollouts = max_open_rollouts
        self._rollouts: OrderedDict[str, _OpenRollout] = OrderedDict()
        self._rollouts_lock = threading.Lock()

    def begin_attempt(self, rollout_id: str, attempt: str | None = None) -> str:
        """Start a rollout again under its own id, after a crash, say; the attempt's name.

        The receipt lists this attempt's calls alone, and nothing that was said before is continued. What earlier
        attempts staged is for a sweep to find. Naming the attempt under way again changes
        nothing. Raises `LedgerConflict` for the name of an earlier one.
        """
        name = uuid.uuid4().hex if attempt is None else attempt
        with self._writing(rollout_id) as (rollout, descriptor):
            if name in rollout.index.earlier_attempts:
                raise LedgerConflict(f"attempt {name!r} of rollout {rollout_id!r} was followed by another one")
            if name != rollout.index.attempt:
                rollout.append(descriptor, AttemptRow(rollout_id=rollout_id, attempt=name))
        rollout.sync()
        return name

    def admit(
        self, rollout_id: str, messages: Sequence[Message], *, model_call_id: str | None = None
    ) -> CaptureAdmission:
        """Decide whose child a request is, and let it be generated.

        `messages` are the request's, as the agent sent them. The same messages again are another call
        with the same parent. A request that continues no captured call is a root of its own, with `new_root_reason`;
        or, with `on_unresolved="reject"`, it is admitted too (its answer is owed to the agent), and poisons the
        rollout at once. Raises `LedgerConflict` for a call id that the rollout had before, in any attempt.
        """
        call_id = uuid.uuid4().hex if model_call_id is None else model_call_id
        with self._writing(rollout_id) as (rollout, descriptor):
            index = rollout.index
            if call_id in index.admissions or call_id in index.earlier_calls:
                raise LedgerConflict(f"call {call_id!r} of rollout {rollout_id!r} was admitted before")
            request, unreadable = _read_request(index.recent, messages)
            decision = self._settled(unreadable if request is None else index.resolve(request))
            admitted_at = max(float(self._clock()), math.nextafter(index.last_admitted_at, math.inf))
            admission = _admission(rollout_id, call_id, decision, index, admitted_at)
            rollout.append(descriptor, _admitted_row(admission, request))
            if request is not None:
                added = request.messages[request.heard :]
                index.known.add(added, [marks.said for marks in request.prefixes[request.heard :]])
        if admission.resolution == "unresolved":
            rollout.sync()
        return admission

    def record(
        self,
        admission: CaptureAdmission,
        coords: CommitCoords | Mapping[str, Any] | None,
        *,
        response_id: str,
        output: Output,
    ) -> CallRecord | None:
        """Write down what became of an admitted call, before its answer is served.

        `coords` are the worker's, as they came (`None` when it sent none), `response_id` and `output` are
        the response's as the agent will see it. Returns the manifest row, or `None` for a failed
        capture. Recording the same again changes nothing. Raises `LedgerConflict` when it was recorded otherwise,
        aborted, or belongs to an earlier attempt.
        """
        call_id = admission.model_call_id
        with self._writing(admission.rollout_id) as (rollout, descriptor):
            admitted = _admitted(rollout.index, admission)
            if call_id in rollout.index.aborted:
                raise LedgerConflict(f"call {call_id!r} of {admission.rollout_id!r} was aborted")
            row = _outcome(admission, admitted, coords, response_id, output)
            record = self._note(rollout, descriptor, call_id, admitted, row, output)
        rollout.sync()
        return record

    def abort(self, admission: CaptureAdmission) -> None:
        """Close a call whose answer nobody saw: an engine that gave none, a client that went away.

        Doing it twice changes nothing. Raises `LedgerConflict` for a call whose outcome is on record.
        """
        call_id = admission.model_call_id
        with self._writing(admission.rollout_id) as (rollout, descriptor):
            index = rollout.index
            _admitted(index, admission)
            if call_id in index.records:
                raise LedgerConflict(f"call {call_id!r} of {admission.rollout_id!r} was recorded")
            if call_id not in index.aborted:
                rollout.append(descriptor, AbortedRow(model_call_id=call_id))
        rollout.sync()

    def fail(self, rollout_id: str, reason: str, *, model_call_id: str | None = None) -> None:
        """Note that one of a rollout's calls was not captured; without a call, poison the rollout."""
        with self._writing(rollout_id) as (rollout, descriptor):
            rollout.append(descriptor, FailedRow(model_call_id=model_call_id, reason=one_line(reason)))
        rollout.sync()

    def read(self, rollout_id: str) -> LedgerView:
        """All that is known of a rollout's last attempt; empty when nothing is."""
        rollout = self._rollout(rollout_id)
        with rollout.lock:
            try:
                with journal.locked(rollout.path, write=False) as descriptor:
                    rollout.catch_up(descriptor)
            except FileNotFoundError:
                return LedgerView(rollout_id)
            index = rollout.index
            return LedgerView(
                rollout_id,
                attempt=index.attempt,
                records=tuple(index.records.values()),
                failures=tuple(index.failures),
                pending=index.pending_calls(),
                torn=tuple(rollout.torn),
                empty_calls=frozenset(index.empty_calls),
                admissions=dict(index.admissions),
            )

    def receipt(
        self,
        rollout_id: str,
        *,
        reward: float | None = None,
        declared: str | None = None,
        response_id: str | None = None,
        output: Output | None = None,
        among_conversations: ConversationPolicy = "reject",
    ) -> RolloutReceipt:
        """The receipt of a rollout that has ended.

        The witnesses of its answer, each optional: the call (or response) that the agent says it kept,
        the scored response's id, and what the scored response says. Where there is none, and the rollout holds several
        conversations, `among_conversations` says whose answer was scored: that of the `"latest"`, of the `"longest"`
        (in tokens), or nobody's (`"reject"`).
        """
        witnesses = Witnesses(declared=declared, response_id=response_id, output=output)
        return assemble_receipt(
            self.read(rollout_id), witnesses, reward=reward, among_conversations=among_conversations
        )

    def _settled(self, decision: ParentDecision) -> ParentDecision:
        is_new_root = decision.resolution == "unresolved" and self._on_unresolved == "root"
        return ParentDecision("root", reason=decision.reason) if is_new_root else decision

    def _note(
        self,
        rollout: _OpenRollout,
        descriptor: int,
        call_id: str,
        admitted: AdmittedRow,
        row: RecordedRow | FailedRow,
        output: Output,
    ) -> CallRecord | None:
        index = rollout.index
        if isinstance(row, FailedRow):
            if call_id not in index.failed_calls():
                rollout.append(descriptor, row)
            return None
        before = index.records.get(call_id)
        if before is None:
            rollout.append(descriptor, row)
            if row.spoken is not None and admitted.marks is not None:
                messages = output_messages(output)
                index.known.add(messages, [marks.said for marks in prefix_marks(messages, admitted.marks)])
        elif before != row.record:
            raise LedgerConflict(f"call {call_id!r} was recorded with other contents")
        return row.record

    def path_of(self, rollout_id: str) -> Path:
        """The rollout's file: a readable beginning of its id, then a hash of all of it."""
        try:
            digest = hashlib.sha256(rollout_id.encode()).hexdigest()[:32]
        except (AttributeError, UnicodeEncodeError) as error:
            raise RequestError(f"a rollout id is valid unicode text, got {rollout_id!r:.80}") from error
        if not rollout_id:
            raise RequestError("a rollout id cannot be empty")
        return self._directory / f"{quote(rollout_id, safe='')[:_NAME_CHARS]}-{digest}.jsonl"

    @contextmanager
    def _writing(self, rollout_id: str) -> Iterator[tuple[_OpenRollout, int]]:
        """The rollout, read up to its end, with nobody else writing to it."""
        rollout = self._rollout(rollout_id)
        with rollout.lock, journal.locked(rollout.path, write=True) as descriptor:
            rollout.catch_up(descriptor)
            yield rollout, descriptor

    def _rollout(self, rollout_id: str) -> _OpenRollout:
        path = self.path_of(rollout_id)
        with self._rollouts_lock:
            rollout = self._rollouts.setdefault(rollout_id, _OpenRollout(path))
            self._rollouts.move_to_end(rollout_id)
            while len(self._rollouts) > self._max_open_rollouts:
                self._rollouts.popitem(last=False)
            return rollout


def _read_request(recent: RecentRequests, messages: Sequence[Message]) -> tuple[Request | None, ParentDecision]:
    """The request as it is looked up, or none and what is decided without it."""
    try:
        return recent.read(messages), ParentDecision("root")
    except UnreadableConversation as error:
        return None, ParentDecision("unresolved", reason=f"{UNREADABLE}: {error}")


def _admitted(index: RolloutIndex, admission: CaptureAdmission) -> AdmittedRow:
    """The row by which a call was admitted. Raises `LedgerConflict` when it was not, or in an earlier attempt."""
    call_id, rollout_id = admission.model_call_id, admission.rollout_id
    if call_id in index.earlier_calls:
        raise LedgerConflict(f"call {call_id!r} of {rollout_id!r} belongs to an attempt before {index.attempt!r}")
    admitted = index.admissions.get(call_id)
    if admitted is None or admitted.parent_call_id != admission.parent_call_id:
        raise LedgerConflict(f"call {call_id!r} of {rollout_id!r} was not admitted like this here")
    return admitted


def _admission(
    rollout_id: str, call_id: str, decision: ParentDecision, index: RolloutIndex, admitted_at: float
) -> CaptureAdmission:
    parent = decision.parent
    keys, digests = index.staging_chain(parent) if parent is not None else ((), ())
    return CaptureAdmission(
        rollout_id=rollout_id,
        model_call_id=call_id,
        resolution=decision.resolution,
        unresolved_reason=decision.reason if decision.resolution == "unresolved" else None,
        new_root_reason=one_line(decision.reason) if decision.resolution == "root" and decision.reason else None,
        admitted_at=admitted_at,
        parent_call_id=parent.model_call_id if parent is not None else None,
        prev_len=parent.cum_len if parent is not None else 0,
        parent_chain_hash=parent.chain_hash if parent is not None else None,
        staging_chain=keys,
        staging_digests=digests,
    )


def _admitted_row(admission: CaptureAdmission, request: Request | None) -> AdmittedRow:
    return AdmittedRow(
        rollout_id=admission.rollout_id,
        model_call_id=admission.model_call_id,
        admitted_at=admission.admitted_at or 0.0,
        parent_call_id=admission.parent_call_id,
        unresolved_reason=one_line(admission.unresolved_reason) if admission.unresolved_reason else None,
        new_root_reason=admission.new_root_reason,
        request=request.marks.said if request is not None else None,
        preamble=request.preamble() if request is not None and admission.resolution == "root" else None,
        verbatim=request.marks.verbatim if request is not None else None,
        spoken=request.marks.spoken if request is not None else None,
        spoken_verbatim=request.marks.spoken_verbatim if request is not None else None,
    )


def _outcome(
    admission: CaptureAdmission,
    admitted: AdmittedRow,
    coords: CommitCoords | Mapping[str, Any] | None,
    response_id: str,
    output: Output,
) -> RecordedRow | FailedRow:
    """The row that a worker's acknowledgement earns, judged against what was admitted."""
    said, continued = _fingerprints(admitted.marks, output)
    coords, fault = _acknowledged(admission, coords, response_id)
    if coords is None:
        return FailedRow(
            model_call_id=admission.model_call_id,
            reason=one_line(fault),
            continuation=continued.said if continued is not None and continued != admitted.marks else None,
        )
    record = CallRecord.model_validate(
        {
            **coords.model_dump(exclude={"rollout_id", "disposition", "generation_len", "failure_reason"}),
            "mode": coords.mode,
            "response_id": response_id,
            "admitted_at": admission.admitted_at,
            "output_fingerprint": said,
            "continuation_fingerprint": continued.said if continued is not None else None,
            "fingerprint_version": 0 if said is None else FINGERPRINT_VERSION,
        }
    )
    return RecordedRow(
        record=record,
        generation_len=coords.generation_len,
        verbatim=continued.verbatim if continued is not None else None,
        spoken=continued.spoken if continued is not None else None,
        spoken_verbatim=continued.spoken_verbatim if continued is not None else None,
    )


def _acknowledged(
    admission: CaptureAdmission, coords: CommitCoords | Mapping[str, Any] | None, response_id: str
) -> tuple[CommitCoords | None, str]:
    """The coordinates of a staged call, or none and what is wrong."""
    if coords is None:
        return None, MISSING_COORDS
    if not isinstance(coords, CommitCoords):
        try:
            coords = CommitCoords.model_validate(coords)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return None, f"{INVALID_COORDS}: {first['loc']}: {first['msg']}"
    for name in ("rollout_id", "model_call_id", "parent_call_id", "prev_len"):
        said, asked = getattr(coords, name), getattr(admission, name)
        if said != asked:
            return None, f"{INVALID_COORDS}: {name} is {said!r}, admitted was {asked!r}"
    if coords.disposition == "capture_failed":
        return None, ": ".join(filter(None, (CAPTURE_FAILED, coords.failure_reason)))
    return (coords, "") if response_id else (None, MISSING_RESPONSE_ID)


def _fingerprints(request: Marks | None, output: Output) -> tuple[str | None, Marks | None]:
    """The fingerprint of an answer and the marks of its request continued by it; none for what cannot be read."""
    try:
        messages = output_messages(output)
        continued = None if request is None else prefix_marks(messages, request)[-1]
        return conversation_fingerprint(messages), continued
    except UnreadableConversation:
        return None, None
