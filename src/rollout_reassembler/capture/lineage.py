"""Which recorded call does a request continue? What one rollout's ledger knows, and the answer.

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

What becomes of an unresolved request is the ledger's to say. Where it begins anew, none of its prompt is trained, and
the first word of the reason is the **cause** that is counted (`NEW_ROOT_CAUSES`).

A call that generated nothing is nobody's parent. Of several equal candidates those are meant that are equal to the
letter, and of these one that was already continued is the one the agent kept; calls with one and the same token
sequence are one. An unresolved request is told the nearest message that was recorded, and where it differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rollout_reassembler.capture.fingerprint import FINGERPRINT_VERSION, conversation_fingerprint, is_model_authored
from rollout_reassembler.capture.nearest import KnownMessages
from rollout_reassembler.capture.records import UNRESOLVED_PARENT, Message, Resolution
from rollout_reassembler.capture.requests import RecentRequests, Request
from rollout_reassembler.capture.rows import AbortedRow, AdmittedRow, AttemptRow, FailedRow, LedgerRow, RecordedRow
from rollout_reassembler.contract.records import CallRecord

ANOTHER_CONVERSATION = "another_conversation"
EDITED_HISTORY = "edited_history"
FOREIGN_TURN = "foreign_turn"
FAILED_CALL = "failed_call"
AMBIGUOUS = "ambiguous"
UNREADABLE = "unreadable"
NEW_ROOT_CAUSES = (ANOTHER_CONVERSATION, EDITED_HISTORY, FOREIGN_TURN, FAILED_CALL, AMBIGUOUS, UNREADABLE)
"""Why a request that does not begin a rollout begins a conversation: it holds no model's word, and is no root's; all
turns are a call's, and what stands around them is not; a turn is nobody's; it goes on behind a call that was not
captured; two calls could have led to it; it cannot be read."""


StagingChain = tuple[tuple[str, ...], tuple[str, ...]]
"""Staging keys and digests, from the root on."""

_CHAINS_HELD = 8


@dataclass(frozen=True)
class CallFailure:
    """A call that was not captured, or, where `poisons_rollout`, why the rollout cannot be trained at all."""

    model_call_id: str | None
    reason: str
    poisons_rollout: bool = False


@dataclass(frozen=True)
class ParentDecision:
    """Whose child a request is: a recorded call's, nobody's, or nobody can tell.

    `reason` of one that begins or would have to begin another conversation starts with the cause.
    """

    resolution: Resolution
    parent: CallRecord | None = None
    reason: str | None = None


@dataclass
class RolloutIndex:
    """The rows of one rollout's last attempt, in the order they were appended, and what is looked up in them."""

    attempt: str | None = None
    earlier_attempts: set[str | None] = field(default_factory=set)
    earlier_calls: set[str] = field(default_factory=set)
    admissions: dict[str, AdmittedRow] = field(default_factory=dict)
    records: dict[str, CallRecord] = field(default_factory=dict)
    failures: list[CallFailure] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    empty_calls: set[str] = field(default_factory=set)
    last_admitted_at: float = 0.0
    known: KnownMessages = field(default_factory=KnownMessages)
    recent: RecentRequests = field(default_factory=RecentRequests)
    _by_continuation: dict[str, list[CallRecord]] = field(default_factory=dict)
    _by_spoken: dict[str, list[CallRecord]] = field(default_factory=dict)
    _rows: dict[str, RecordedRow] = field(default_factory=dict)
    _continued: set[str] = field(default_factory=set)
    _preambles: set[str] = field(default_factory=set)
    _roots: set[str] = field(default_factory=set)
    _outputs: set[str] = field(default_factory=set)
    _unheard: set[str] = field(default_factory=set)
    _chains: OrderedDict[str, StagingChain] = field(default_factory=OrderedDict)

    def followed_by(self, row: LedgerRow) -> RolloutIndex:
        """The index with one row more: itself, or a new one where the row begins an attempt."""
        if isinstance(row, AttemptRow):
            return RolloutIndex(
                attempt=row.attempt,
                earlier_attempts=self.earlier_attempts | {self.attempt},
                earlier_calls=self.earlier_calls | self.admissions.keys(),
                last_admitted_at=self.last_admitted_at,
            )
        if isinstance(row, AdmittedRow):
            self._add_admission(row)
        elif isinstance(row, RecordedRow):
            self._add_record(row)
        elif isinstance(row, FailedRow):
            self.failures.append(CallFailure(row.model_call_id, row.reason, row.model_call_id is None))
            if row.continuation is not None:
                self._unheard.add(row.continuation)
        elif isinstance(row, AbortedRow):
            self.aborted.add(row.model_call_id)
        return self

    def _add_admission(self, row: AdmittedRow) -> None:
        self.admissions[row.model_call_id] = row
        self.last_admitted_at = max(self.last_admitted_at, row.admitted_at)
        if row.unresolved_reason is not None:
            reason = f"{UNRESOLVED_PARENT}: {row.unresolved_reason}"
            self.failures.append(CallFailure(row.model_call_id, reason, poisons_rollout=True))
        if row.parent_call_id is not None:
            self._continued.add(row.parent_call_id)
        elif row.preamble is not None and row.request is not None and row.fingerprint_version == FINGERPRINT_VERSION:
            self._preambles.add(row.preamble)
            self._roots.add(row.request)

    def _add_record(self, row: RecordedRow) -> None:
        record = row.record
        self.records[record.model_call_id] = record
        if row.generation_len == 0:
            self.empty_calls.add(record.model_call_id)
        elif record.continuation_fingerprint and record.fingerprint_version == FINGERPRINT_VERSION:
            self._by_continuation.setdefault(record.continuation_fingerprint, []).append(record)
            self._rows[record.model_call_id] = row
            if record.output_fingerprint is not None:
                self._outputs.add(record.output_fingerprint)
            admitted = self.admissions.get(record.model_call_id)
            if row.spoken is not None and admitted is not None and row.spoken != admitted.spoken:
                self._by_spoken.setdefault(row.spoken, []).append(record)

    def failed_calls(self) -> set[str | None]:
        return {failure.model_call_id for failure in self.failures}

    def pending_calls(self) -> tuple[str, ...]:
        """Calls that were admitted and of which nothing was heard since."""
        closed = self.failed_calls() | self.aborted | self.records.keys()
        return tuple(call for call in self.admissions if call not in closed)

    def staging_chain(self, record: CallRecord) -> StagingChain:
        """The staged calls from the root to `record`. A parent is always recorded before its child."""
        added = [record]
        while (parent := added[-1].parent_call_id) is not None and parent not in self._chains:
            added.append(self.records[parent])
        keys, digests = self._chains.get(parent or "", ((), ()))
        added.reverse()
        keys += tuple(call.staging_key for call in added)
        digests += tuple(call.digest for call in added)
        self._chains[record.model_call_id] = keys, digests
        while len(self._chains) > _CHAINS_HELD:
            self._chains.popitem(last=False)
        return keys, digests

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
            return self._root(request)
        if heard := self._heard(request):
            return self._choose(heard, None)
        is_beginning = not is_behind_a_call and (not self.admissions or request.preamble() in self._preambles)
        if is_beginning or request.marks.said in self._roots:
            return self._root(request)
        return self._unaccounted(request, stranger)

    def _root(self, request: Request) -> ParentDecision:
        if not self.admissions or request.marks.said in self._roots:
            return ParentDecision("root")
        reason = f"{ANOTHER_CONVERSATION}: it holds no captured call's word, and {len(self._roots)} others began before"
        return ParentDecision("root", reason=reason)

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
            return ParentDecision("unresolved", reason=f"{AMBIGUOUS}: {names} were answered alike")
        return ParentDecision("resolved", parent=kept[0])

    def _unaccounted(self, request: Request, at: int) -> ParentDecision:
        prefixes = [marks.said for marks in request.prefixes]
        behind = next((length for length in range(len(prefixes) - 1, 0, -1) if prefixes[length] in self._unheard), None)
        if behind is not None:
            reason = f"{FAILED_CALL}: message {behind - 1} is the answer of a call that was not captured"
            return ParentDecision("unresolved", reason=reason)
        if all(self._is_output(turn) for turn in _turns(request.messages)):
            reason = f"{EDITED_HISTORY}: the answers are captured calls', what stands around them is not"
        else:
            reason = f"{FOREIGN_TURN}: message {at} is an assistant's that no call answered"
        nearest = self.known.nearest(request.messages, prefixes)
        return ParentDecision("unresolved", reason=f"{reason}; {nearest}" if nearest else reason)

    def _is_output(self, turn: Sequence[Message]) -> bool:
        """Whether these messages of models, one after the other, are one call's answer, or an answer each."""
        return conversation_fingerprint(turn) in self._outputs or all(
            conversation_fingerprint([message]) in self._outputs for message in turn
        )


def _turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Runs of messages that models said."""
    for is_models, run in groupby(messages, is_model_authored):
        if is_models:
            yield list(run)
