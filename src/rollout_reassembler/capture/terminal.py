"""Which call's chain earned the reward? Witnesses first, the shape of the call graph last.

A rollout records more calls than its answer needed: retries, side agents, abandoned branches. Up to
three *witnesses* tell which call gave the answer that was scored, in this order:

    declared      the agent names the call, by its id or its response id
    response_id   the scored response's id is that of one recorded call
    content       the scored answer says what one recorded call said

A witness that finds no call, or several that differ, abstains; only a declaration that finds none
ends the matter. Witnesses that name different calls attribute *nothing*: one of them is wrong, and
ranking them would hide which. Calls with one and the same token sequence count as one call.

When all abstain, the *heuristic* follows the parent links:

    a ── b ── c        c: at each level a call that was continued beats one that was not
     └── b'            (b' is an abandoned retry), and the earliest root begins
    a ── b, b'         ambiguous: nothing says which of the two was kept
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rollout_reassembler.capture.fingerprint import (
    FINGERPRINT_VERSION,
    Output,
    conversation_fingerprint,
    output_messages,
)
from rollout_reassembler.contract.errors import UnreadableConversation
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


@dataclass(frozen=True)
class TerminalSelection:
    """The terminal and the method that chose it; or none, with the last method tried and the reason.

    `method` is `None` when witnesses disagreed: then nothing was chosen by anything.
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
    """The one call a witness names, or why it abstains."""

    method: TerminalMethod
    call: CallRecord | None
    note: str = ""


def select_terminal(
    records: Sequence[CallRecord],
    witnesses: Witnesses,
    *,
    empty_calls: Collection[str] = (),
    pending_calls: Collection[str] = (),
    requests: Mapping[str, str] | None = None,
) -> TerminalSelection:
    """Choose the terminal of one rollout's recorded calls.

    `empty_calls` generated nothing: the heuristic passes them over while there are others.
    `pending_calls` were admitted and never recorded: when a witness was heard and fits no recorded call,
    the answer may be one of theirs, and nothing is guessed. `requests` holds the fingerprint of each
    call's messages, by which the heuristic knows a retry.
    """
    testimonies = _testimonies(records, witnesses)
    notes = [testimony.note for testimony in testimonies if testimony.note]
    if testimonies and testimonies[0].method == "declared" and testimonies[0].call is None:
        return TerminalSelection(None, "declared", ",".join(notes))
    heard = [(testimony.method, testimony.call) for testimony in testimonies if testimony.call is not None]
    if not heard:
        unmatched = any(note.endswith("_no_match") for note in notes)
        if unmatched and pending_calls:
            return TerminalSelection(None, "heuristic", ",".join([*notes, ANSWER_NOT_CAPTURED]))
        generated = [record for record in records if record.model_call_id not in empty_calls]
        terminal, reason = _guess(generated or records, requests or {})
        return TerminalSelection(terminal, "heuristic", ",".join([*notes, reason]))
    if _as_one([call for _, call in heard]) is None:
        claims = ";".join(f"{method}={call.model_call_id}" for method, call in heard)
        return TerminalSelection(None, None, ",".join([*notes, f"{WITNESS_DISAGREEMENT}[{claims}]"]))
    if len(heard) > 1:
        notes.append("corroborated_by=" + "+".join(method for method, _ in heard[1:]))
    method, call = heard[0]
    return TerminalSelection(call.model_call_id, method, ",".join(notes))


def select_by_parent_links(records: Sequence[CallRecord]) -> tuple[str | None, str]:
    """The terminal by the shape of the graph alone, and `selected`; or `None` and why not.

    Roots with children are preferred, then the earliest admitted (those without a time last, equals in
    manifest order). Below, children with children are preferred; more than one left is ambiguous.
    """
    if not records:
        return None, NO_RECORDS
    known = {record.model_call_id for record in records}
    if len(known) != len(records):
        return None, DUPLICATE_CALL_ID
    children: dict[str | None, list[CallRecord]] = defaultdict(list)
    for record in records:
        children[record.parent_call_id].append(record)
    if children.keys() - known - {None}:
        return None, ORPHANED_ROW
    if None not in children:
        return None, NO_ROOT

    def preferred(level: list[CallRecord]) -> list[CallRecord]:
        return [record for record in level if record.model_call_id in children] or level

    call = min(preferred(children[None]), key=_admission_order)
    while call.model_call_id in children:
        survivors = preferred(children[call.model_call_id])
        if len(survivors) > 1:
            return None, AMBIGUOUS_TERMINAL
        call = survivors[0]
    return call.model_call_id, SELECTED


def _admission_order(record: CallRecord) -> tuple[bool, float]:
    return record.admitted_at is None, record.admitted_at or 0.0


def _guess(records: Sequence[CallRecord], requests: Mapping[str, str]) -> tuple[str | None, str]:
    """`select_by_parent_links`, except that it does not choose between a lone root and its retry.

    The walk takes the earliest root; when that root was never continued and another one answers the
    very same messages differently, the agent kept one of them and nothing says which.
    """
    terminal, reason = select_by_parent_links(records)
    chosen = next((record for record in records if record.model_call_id == terminal), None)
    if chosen is None or chosen.parent_call_id is not None or chosen.model_call_id not in requests:
        return terminal, reason
    asked = requests[chosen.model_call_id]
    twins = [call for call in records if call.parent_call_id is None and requests.get(call.model_call_id) == asked]
    return (terminal, reason) if _as_one(twins) is not None else (None, AMBIGUOUS_TERMINAL)


def _testimonies(records: Sequence[CallRecord], witnesses: Witnesses) -> list[_Testimony]:
    heard = []
    if (declared := witnesses.declared) is not None:
        heard.append(_testimony("declared", records, lambda r: declared in (r.model_call_id, r.response_id)))
    if (response_id := witnesses.response_id) is not None:
        heard.append(_testimony("response_id", records, lambda r: r.response_id == response_id))
    if witnesses.output is not None:
        heard.append(_content_testimony(records, witnesses.output))
    return heard


def _testimony(method: TerminalMethod, records: Sequence[CallRecord], fits: Callable[[CallRecord], bool]) -> _Testimony:
    matches = [record for record in records if fits(record)]
    if not matches:
        return _Testimony(method, None, f"{method}_no_match")
    call = _as_one(matches)
    return _Testimony(method, call, "" if call is not None else f"{method}_ambiguous")


def _content_testimony(records: Sequence[CallRecord], output: Output) -> _Testimony:
    """Read the answer as a whole conversation, as one call's answer, or as a transcript's last turn."""
    try:
        messages = output_messages(output)
        whole, last = conversation_fingerprint(messages), conversation_fingerprint(messages[-1:])
    except UnreadableConversation:
        return _Testimony("content", None, "content_unreadable")
    if not messages:
        return _Testimony("content", None, "content_empty")
    readable = [record for record in records if record.fingerprint_version == FINGERPRINT_VERSION]
    if any(record.continuation_fingerprint == whole for record in readable):
        return _testimony("content", readable, lambda r: r.continuation_fingerprint == whole)
    return _testimony("content", readable, lambda r: r.output_fingerprint in (whole, last))


def _as_one(calls: Sequence[CallRecord]) -> CallRecord | None:
    """The first of the calls, if all of them are the same sequence of tokens."""
    sequences = {(call.cumulative_hash, call.cum_len) for call in calls}
    return calls[0] if len(sequences) == 1 else None
