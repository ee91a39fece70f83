"""Which recorded call does a request continue? The rows of one rollout's ledger, and the answer.

A request is its messages. It continues the call whose own messages plus answer are the *longest* exact
prefix of them:

    call a   asked [u1]            answered a1      recorded under [u1 a1]
    call b   asked [u1 a1 u2]      answered a2      recorded under [u1 a1 u2 a2]
    request  [u1 a1 u2 a2 u3]      resolved: b, though a's prefix fits as well
    request  [u1 a1 u2]            resolved: a; b's retry becomes b's sibling
    request  [u1]                  root, also after later turns: it holds no model's word
    request  [u1 a1 u2 x2 u3]      unresolved: nobody captured x2

An agent may put other messages between the parts of an answer (a tool's result behind each of its calls). So where
no prefix fits, a call is looked for by what models said alone: all of it must be the call's and its history's, and
the call's own request a prefix of this one.

What must stay true: a policy's words are never smuggled into a prompt as if somebody else had said
them. So a request with an assistant turn behind its longest prefix that no call accounts for is
unresolved, and so is one that two different calls could have led to. Assistant turns that a rollout
*starts* with (examples in a prompt) are the prompt's, and may start another root of it again.

A call that generated nothing is nobody's parent. Of several equal candidates those are meant that are equal to the
letter, and of these one that was already continued is the one the agent kept; calls with one and the same token
sequence are one. An unresolved request is told the nearest message that was recorded, and where it differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictStr, TypeAdapter, ValidationError

from rollout_reassembler.capture.fingerprint import FINGERPRINT_VERSION, Marks, is_model_authored, prefix_marks
from rollout_reassembler.capture.nearest import KnownMessages
from rollout_reassembler.capture.records import UNRESOLVED_PARENT, Message, Resolution
from rollout_reassembler.contract.errors import InvalidLedger
from rollout_reassembler.contract.records import CallRecord, Count, DigestHex, Identifier


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    fingerprint_version: Count = FINGERPRINT_VERSION


class AdmittedRow(_Row):
    """A call may now be generated.

    `request` is the fingerprint of its messages (`verbatim` and the like are its other marks), `preamble`, for a
    root alone, that of the messages up to the last one that a model said.
    """

    kind: Literal["admitted"] = "admitted"
    rollout_id: Identifier
    model_call_id: Identifier
    admitted_at: StrictFloat
    parent_call_id: Identifier | None = None
    unresolved_reason: StrictStr | None = None
    request: DigestHex | None = None
    preamble: DigestHex | None = None
    verbatim: DigestHex | None = None
    spoken: DigestHex | None = None
    spoken_verbatim: DigestHex | None = None

    @property
    def marks(self) -> Marks | None:
        """The request's marks; `None` when it could not be read, or was by another version."""
        if self.fingerprint_version != FINGERPRINT_VERSION:
            return None
        marks = (self.request, self.verbatim, self.spoken, self.spoken_verbatim)
        return Marks(*marks) if None not in marks else None  # type: ignore[arg-type]


class RecordedRow(_Row):
    """A call is staged, and this is its manifest row; `verbatim` and the like are marks of its continuation."""

    kind: Literal["recorded"] = "recorded"
    record: CallRecord
    generation_len: Count | None = None
    verbatim: DigestHex | None = None
    spoken: DigestHex | None = None
    spoken_verbatim: DigestHex | None = None


class FailedRow(_Row):
    """A call, or the rollout as a whole, could not be captured."""

    kind: Literal["failed"] = "failed"
    model_call_id: Identifier | None = None
    reason: Identifier


LedgerRow = AdmittedRow | RecordedRow | FailedRow
_ROWS: TypeAdapter[LedgerRow] = TypeAdapter(Annotated[LedgerRow, Field(discriminator="kind")])


def parse_row(row: dict[str, Any]) -> LedgerRow:
    """A row of a ledger from its JSON. Raises `InvalidLedger`."""
    try:
        return _ROWS.validate_python(row)
    except ValidationError as error:
        raise InvalidLedger(f"not a ledger row: {error.errors(include_url=False, include_input=False)[0]}") from error


@dataclass(frozen=True)
class CallFailure:
    """A poisoned call (or, without an id, a poisoned rollout) and why."""

    model_call_id: str | None
    reason: str


@dataclass(frozen=True)
class Request:
    """A request's messages as they are looked up: `prefixes[n]` are the marks of the first `n`."""

    messages: Sequence[Message]
    prefixes: list[Marks]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Request:
        """Raises `UnreadableConversation`."""
        return cls(messages, prefix_marks(messages))

    @property
    def marks(self) -> Marks:
        """The marks of all its messages."""
        return self.prefixes[-1]

    def preamble(self) -> str:
        """The fingerprint of all up to the last turn that a model said."""
        spoken = [at for at, message in enumerate(self.messages, start=1) if is_model_authored(message)]
        return self.prefixes[spoken[-1] if spoken else 0].said


@dataclass(frozen=True)
class ParentDecision:
    """Whose child a request is: a recorded call's, nobody's, or nobody can tell."""

    resolution: Resolution
    parent: CallRecord | None = None
    reason: str | None = None


@dataclass
class RolloutIndex:
    """One rollout's rows, in the order they were appended, and what is looked up in them."""

    admissions: dict[str, AdmittedRow] = field(default_factory=dict)
    records: dict[str, CallRecord] = field(default_factory=dict)
    failures: list[CallFailure] = field(default_factory=list)
    empty_calls: set[str] = field(default_factory=set)
    known: KnownMessages = field(default_factory=KnownMessages)
    _by_continuation: dict[str, list[CallRecord]] = field(default_factory=dict)
    _by_spoken: dict[str, list[CallRecord]] = field(default_factory=dict)
    _rows: dict[str, RecordedRow] = field(default_factory=dict)
    _continued: set[str] = field(default_factory=set)
    _preambles: set[str] = field(default_factory=set)

    def add(self, row: LedgerRow) -> None:
        if isinstance(row, AdmittedRow):
            self._add_admission(row)
        elif isinstance(row, RecordedRow):
            self._add_record(row)
        else:
            self.failures.append(CallFailure(row.model_call_id, row.reason))

    def _add_admission(self, row: AdmittedRow) -> None:
        self.admissions[row.model_call_id] = row
        if row.unresolved_reason is not None:
            self.failures.append(CallFailure(row.model_call_id, f"{UNRESOLVED_PARENT}: {row.unresolved_reason}"))
        if row.parent_call_id is not None:
            self._continued.add(row.parent_call_id)
        elif row.preamble is not None and row.fingerprint_version == FINGERPRINT_VERSION:
            self._preambles.add(row.preamble)

    def _add_record(self, row: RecordedRow) -> None:
        record = row.record
        self.records[record.model_call_id] = record
        if row.generation_len == 0:
            self.empty_calls.add(record.model_call_id)
        elif record.continuation_fingerprint and record.fingerprint_version == FINGERPRINT_VERSION:
            self._by_continuation.setdefault(record.continuation_fingerprint, []).append(record)
            self._rows[record.model_call_id] = row
            admitted = self.admissions.get(record.model_call_id)
            if row.spoken is not None and admitted is not None and row.spoken != admitted.spoken:
                self._by_spoken.setdefault(row.spoken, []).append(record)

    def failed_calls(self) -> set[str | None]:
        return {failure.model_call_id for failure in self.failures}

    def pending_calls(self) -> tuple[str, ...]:
        """Calls that were admitted and of which nothing was heard since."""
        failed = self.failed_calls()
        return tuple(call for call in self.admissions if call not in self.records and call not in failed)

    def last_admitted_at(self) -> float:
        return max((row.admitted_at for row in self.admissions.values()), default=0.0)

    def staging_chain(self, record: CallRecord) -> tuple[CallRecord, ...]:
        """The staged calls from the root to `record`. A parent is always recorded before its child."""
        chain = [record]
        while record.parent_call_id is not None:
            record = self.records[record.parent_call_id]
            chain.append(record)
        return tuple(reversed(chain))

    def resolve(self, request: Request) -> ParentDecision:
        """Whose child this request is; the module's docstring has the rules."""
        stranger: int | None = None
        is_behind_a_call = False
        for length in range(len(request.messages), 0, -1):
            candidates = self._by_continuation.get(request.prefixes[length].said)
            if candidates is not None and stranger is None:
                return self._choose(candidates, request.prefixes[length].verbatim)
            if candidates is not None:
                is_behind_a_call = True
                break
            if stranger is None and is_model_authored(request.messages[length - 1]):
                stranger = length - 1
        if stranger is None:
            return ParentDecision("root")
        if heard := self._heard(request):
            return self._choose(heard, None)
        if not is_behind_a_call and (not self.admissions or request.preamble() in self._preambles):
            return ParentDecision("root")
        return self._unaccounted(request, stranger)

    def _heard(self, request: Request) -> list[CallRecord]:
        """The calls by which models had said exactly this, and whose own request begins this one."""
        said, verbatim = ({getattr(marks, name) for marks in request.prefixes} for name in ("said", "verbatim"))
        alike = [
            call
            for call in self._by_spoken.get(request.marks.spoken, [])
            if self.admissions[call.model_call_id].request in said
        ]
        to_the_letter = [
            call
            for call in alike
            if self._rows[call.model_call_id].spoken_verbatim == request.marks.spoken_verbatim
            and self.admissions[call.model_call_id].verbatim in verbatim
        ]
        return to_the_letter or alike

    def _choose(self, candidates: list[CallRecord], verbatim: str | None) -> ParentDecision:
        to_the_letter = [
            call for call in candidates if verbatim and self._rows[call.model_call_id].verbatim == verbatim
        ]
        meant = to_the_letter or candidates
        kept = [call for call in meant if call.model_call_id in self._continued] or meant
        if len({call.cumulative_hash for call in kept}) > 1:
            names = ", ".join(sorted(call.model_call_id for call in kept))
            return ParentDecision("unresolved", reason=f"ambiguous: {names} were answered alike")
        return ParentDecision("resolved", parent=kept[0])

    def _unaccounted(self, request: Request, at: int) -> ParentDecision:
        reason = f"no_match: message {at} is an assistant's that no call answered"
        nearest = self.known.nearest(request.messages, [marks.said for marks in request.prefixes])
        return ParentDecision("unresolved", reason=f"{reason}; {nearest}" if nearest else reason)
