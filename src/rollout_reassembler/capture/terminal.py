"""Which call's chain earned the reward? Witnesses first, the shape of the call graph last.

A rollout records more calls than its answer needed: retries, side agents, abandoned branches. Up to
three *witnesses* tell which call gave the answer that was scored, in this order:

    declared      the agent names the call, by its id or its response id
    response_id   the scored response's id is that of one recorded call
    content       the scored answer says what one recorded call said

A witness that finds no call, or several that differ, abstains beside one that names a call; only a declaration that
finds none ends the matter. Witnesses that name different calls attribute *nothing*: one of them is wrong, and
ranking them would hide which. Calls with one and the same token sequence count as one call. Where witnesses were heard
and fit no call at all, what they look for was not captured: nothing is attributed (`terminal_not_found`).

Without a witness the *heuristic* follows the parent links of one conversation:

    a ── b ── c        c: at each level a call that was continued beats one that was not
     └── b'            (b' is an abandoned retry), and the earliest root begins
    a ── b, b'         ambiguous: nothing says which of the two was kept
    a ── f             f's capture failed and it may be the answer: nothing

Several conversations are roots that were asked different things: a compacted history, side agents. Which of them was
scored is the caller's to say (`among_conversations`); nothing is guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from rollout_reassembler.capture.fingerprint import (
    FINGERPRINT_VERSION,
    Output,
    conversation_fingerprint,
    output_messages,
    shown,
)
from rollout_reassembler.contract.errors import RequestError, UnreadableConversation
from rollout_reassembler.contract.records import CallRecord, TerminalMethod

# The reasons of the parent-link walk, in the reference release's words.
SELECTED = "selected"
NO_RECORDS = "no_records"
DUPLICATE_CALL_ID = "duplicate_call_id"
ORPHANED_ROW = "orphaned_row"
NO_ROOT = "no_root"
AMBIGUOUS_TERMINAL = "ambiguous_terminal"

WITNESS_DISAGREEMENT = "witness_disagreement"
ANSWER_NOT_CAPTURED = "answer_not_captured"
TERMINAL_NOT_FOUND = "terminal_not_found"
SEVERAL_CONVERSATIONS = "several_conversations"

ConversationPolicy = Literal["reject", "latest", "longest"]
"""Of several conversations, none of them named by a witness, the one whose answer was scored: nobody can tell, that of
the call that was admitted last, that with the most tokens in one chain."""

_EXCERPT_CHARS = 80


class LinkedCall(Protocol):
    """A call as the walk along parent links sees it."""

    @property
    def model_call_id(self) -> str: ...
    @property
    def parent_call_id(self) -> str | None: ...
    @property
    def admitted_at(self) -> float | None: ...


@dataclass(frozen=True)
class UncapturedCall:
    """A call that was answered and whose tokens are not staged."""

    model_call_id: str
    parent_call_id: str | None
    admitted_at: float | None


@dataclass(frozen=True)
class TerminalSelection:
    """The terminal and the method that chose it; or none, with the last method tried and the reason.

    `method` is `None` when witnesses disagreed, or found nothing: then nothing was chosen by anything.
    """

    model_call_id: str | None
    method: TerminalMethod | None
    reason: str


@dataclass(frozen=True)
class Witnesses:
    """What is known of the answer that was scored; each part may be missing."""

    declared: str | None = None
    response_id: str | None = None
    output: Output | None = None


@dataclass(frozen=True)
class _Testimony:
    """The calls that fit a witness: one, or several that differ; and a note where that is not one."""

    method: TerminalMethod
    matches: tuple[CallRecord, ...] = ()
    sought: str = ""
    note: str = ""

    @property
    def call(self) -> CallRecord | None:
        return _as_one(self.matches) if self.matches else None


def select_terminal(
    records: Sequence[CallRecord],
    witnesses: Witnesses,
    *,
    empty_calls: Collection[str] = (),
    uncaptured: Sequence[UncapturedCall] = (),
    requests: Mapping[str, str] | None = None,
    among_conversations: ConversationPolicy = "reject",
) -> TerminalSelection:
    """Choose the terminal of one rollout's recorded calls.

    `empty_calls` generated nothing: the heuristic passes them over while there are others. `uncaptured` calls were
    answered, so the scored answer may be theirs. `requests` holds the fingerprint of each call's messages, by which a
    retry of a root is known from another conversation. Raises `RequestError` for a policy that is none.
    """
    if among_conversations not in get_args(ConversationPolicy):
        expected = ", ".join(map(repr, get_args(ConversationPolicy)))
        raise RequestError(f"among_conversations must be one of {expected}, got {among_conversations!r:.80}")
    testimonies = _testimonies(records, witnesses)
    notes = [testimony.note for testimony in testimonies if testimony.note]
    if testimonies and testimonies[0].method == "declared" and not testimonies[0].matches:
        return TerminalSelection(None, "declared", ",".join([*notes, _not_found(testimonies[:1], records)]))
    heard = [(testimony.method, testimony.call) for testimony in testimonies if testimony.call is not None]
    if heard:
        return _agreed(heard, notes)
    sought = [testimony for testimony in testimonies if testimony.sought]
    if sought and not any(testimony.matches for testimony in sought):
        return TerminalSelection(None, None, ",".join([*notes, _not_found(sought, records)]))
    generated = [record for record in records if record.model_call_id not in empty_calls] or records
    terminal, reason = _guess(generated, uncaptured, requests or {}, among_conversations, is_free=not sought)
    fits = {record.model_call_id for testimony in sought for record in testimony.matches}
    if terminal is not None and fits and terminal not in fits:
        terminal, reason = None, AMBIGUOUS_TERMINAL
    return TerminalSelection(terminal, "heuristic", ",".join([*notes, reason]))


def _agreed(heard: list[tuple[TerminalMethod, CallRecord]], notes: list[str]) -> TerminalSelection:
    """The call that all witnesses name, or nothing."""
    if _as_one([call for _, call in heard]) is None:
        claims = ";".join(f"{method}={call.model_call_id}" for method, call in heard)
        return TerminalSelection(None, None, ",".join([*notes, f"{WITNESS_DISAGREEMENT}[{claims}]"]))
    corroborated = ["corroborated_by=" + "+".join(method for method, _ in heard[1:])] if len(heard) > 1 else []
    method, call = heard[0]
    return TerminalSelection(call.model_call_id, method, ",".join([*notes, *corroborated]))


def _not_found(testimonies: Sequence[_Testimony], records: Sequence[CallRecord]) -> str:
    sought = ";".join(f"{testimony.method}={testimony.sought}" for testimony in testimonies)
    return f"{TERMINAL_NOT_FOUND}[{sought} of {len(records)} captured calls]"


def select_by_parent_links(records: Sequence[LinkedCall]) -> tuple[str | None, str]:
    """The terminal by the shape of the graph alone, and `selected`; or `None` and why not.

    Roots with children are preferred, then the earliest admitted (those without a time last, equals in
    manifest order). Below, children with children are preferred; more than one left is ambiguous.
    """
    if not records:
        return None, NO_RECORDS
    known = {record.model_call_id for record in records}
    if len(known) != len(records):
        return None, DUPLICATE_CALL_ID
    children: dict[str | None, list[LinkedCall]] = defaultdict(list)
    for record in records:
        children[record.parent_call_id].append(record)
    if children.keys() - known - {None}:
        return None, ORPHANED_ROW
    if None not in children:
        return None, NO_ROOT

    def preferred(level: list[LinkedCall]) -> list[LinkedCall]:
        return [record for record in level if record.model_call_id in children] or level

    call = min(preferred(children[None]), key=_admission_order)
    while call.model_call_id in children:
        survivors = preferred(children[call.model_call_id])
        if len(survivors) > 1:
            return None, AMBIGUOUS_TERMINAL
        call = survivors[0]
    return call.model_call_id, SELECTED


def _admission_order(call: LinkedCall) -> tuple[bool, float]:
    return call.admitted_at is None, call.admitted_at or 0.0


def _guess(
    records: Sequence[CallRecord],
    uncaptured: Sequence[UncapturedCall],
    requests: Mapping[str, str],
    policy: ConversationPolicy,
    *,
    is_free: bool,
) -> tuple[str | None, str]:
    """The terminal by parent links within one conversation, and `selected`; or `None` and why not.

    Where it `is_free`, no witness was heard, and of several conversations the policy picks one.
    """
    calls: list[LinkedCall] = [*records, *uncaptured]
    conversations = _conversations(calls, requests)
    note = SELECTED
    if is_free and len(conversations) > 1:
        if policy == "reject":
            return None, f"{SEVERAL_CONVERSATIONS}[{len(conversations)}]"
        calls = max(conversations, key=_latest if policy == "latest" else _longest)
        note = f"{policy}_of_{len(conversations)}_conversations"
    terminal, reason = select_by_parent_links(calls)
    if terminal is None:
        return None, reason
    if terminal in {call.model_call_id for call in uncaptured}:
        return None, ANSWER_NOT_CAPTURED
    return (None, AMBIGUOUS_TERMINAL) if _has_twins(terminal, calls, requests) else (terminal, note)


def _conversations(calls: Sequence[LinkedCall], requests: Mapping[str, str]) -> list[list[LinkedCall]]:
    """The calls by what the roots of their trees were asked; a root without a fingerprint is alone."""
    asked = {call.model_call_id: requests.get(call.model_call_id, call.model_call_id) for call in calls}
    parents = {call.model_call_id: call.parent_call_id for call in calls}
    of_root: dict[str, list[LinkedCall]] = defaultdict(list)
    roots: dict[str, str] = {}
    for call in calls:
        walked: dict[str, None] = {}
        at = call.model_call_id
        while at not in roots and at not in walked and (parent := parents[at]) in parents:
            walked[at] = None
            at = str(parent)
        root = roots.get(at, at)
        roots.update(dict.fromkeys([*walked, at], root))
        of_root[asked[root]].append(call)
    return list(of_root.values())


def _latest(calls: Sequence[LinkedCall]) -> tuple[bool, float]:
    return max((call.admitted_at is not None, call.admitted_at or 0.0) for call in calls)


def _longest(calls: Sequence[LinkedCall]) -> int:
    return max(getattr(call, "cum_len", 0) for call in calls)


def _has_twins(terminal: str, calls: Sequence[LinkedCall], requests: Mapping[str, str]) -> bool:
    """Whether a root that was never continued has a retry that answers otherwise: the agent kept one of them.

    The walk takes the earlier one; nothing says which it was.
    """
    chosen = next(call for call in calls if call.model_call_id == terminal)
    if chosen.parent_call_id is not None or terminal not in requests:
        return False
    twins = [
        call for call in calls if call.parent_call_id is None and requests.get(call.model_call_id) == requests[terminal]
    ]
    captured = [call for call in twins if isinstance(call, CallRecord)]
    return len(captured) < len(twins) or _as_one(captured) is None


def _testimonies(records: Sequence[CallRecord], witnesses: Witnesses) -> list[_Testimony]:
    heard = []
    if (declared := witnesses.declared) is not None:
        heard.append(
            _testimony("declared", records, _quoted(declared), lambda r: declared in (r.model_call_id, r.response_id))
        )
    if (response_id := witnesses.response_id) is not None:
        heard.append(_testimony("response_id", records, _quoted(response_id), lambda r: r.response_id == response_id))
    if witnesses.output is not None:
        heard.append(_content_testimony(records, witnesses.output))
    return heard


def _testimony(
    method: TerminalMethod, records: Sequence[CallRecord], sought: str, fits: Callable[[CallRecord], bool]
) -> _Testimony:
    matches = tuple(record for record in records if fits(record))
    if not matches:
        return _Testimony(method, sought=sought, note=f"{method}_no_match")
    return _Testimony(method, matches, sought, "" if _as_one(matches) is not None else f"{method}_ambiguous")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT_CHARS else f"{text[: _EXCERPT_CHARS - 1]}…")


def _content_testimony(records: Sequence[CallRecord], output: Output) -> _Testimony:
    """Read the answer as a whole conversation, as one call's answer, or as a transcript's last turn."""
    try:
        messages = output_messages(output)
        whole, last = conversation_fingerprint(messages), conversation_fingerprint(messages[-1:])
    except UnreadableConversation:
        return _Testimony("content", note="content_unreadable")
    if not messages:
        return _Testimony("content", note="content_empty")
    sought = _quoted(shown(messages[-1]))
    readable = [record for record in records if record.fingerprint_version == FINGERPRINT_VERSION]
    if any(record.continuation_fingerprint == whole for record in readable):
        return _testimony("content", readable, sought, lambda r: r.continuation_fingerprint == whole)
    return _testimony("content", readable, sought, lambda r: r.output_fingerprint in (whole, last))


def _as_one(calls: Sequence[CallRecord]) -> CallRecord | None:
    """The first of the calls, if all of them are the same sequence of tokens."""
    sequences = {(call.cumulative_hash, call.cum_len) for call in calls}
    return calls[0] if len(sequences) == 1 else None
