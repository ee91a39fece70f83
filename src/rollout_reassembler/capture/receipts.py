"""From what a ledger knows of a rollout to its receipt.

    records, failures, admissions  +  witnesses of the answer   ->   RolloutReceipt

A receipt is *trainable* when a terminal was chosen. Otherwise it is poisoned and says why in `failure_reason`;
`terminal_attribution_reason` keeps the witnesses' notes either way. The manifest is complete even then, so that
whoever rejects the receipt still finds the staged rows.

What could not be captured costs the chains that hold it and no other. A call whose capture failed is in no manifest,
and so in no row; where it may be the one that answered, nothing is attributed. A request that goes on behind it is a
root of its own, in whose row nothing before is trained. What poisons the whole rollout is a failure of no call in
particular, an unresolved request under `on_unresolved="reject"`, and a recorded call that was said to have failed.

A call that was admitted and never recorded poisons nothing: a ledger row is written before its answer
is served, so no agent has seen a word of that call, and none of its tokens can be in a later prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_reassembler.capture.lineage import NEW_ROOT_CAUSES, CallFailure
from rollout_reassembler.capture.rows import AdmittedRow
from rollout_reassembler.capture.terminal import (
    ConversationPolicy,
    TerminalSelection,
    UncapturedCall,
    Witnesses,
    select_terminal,
)
from rollout_reassembler.contract.errors import RequestError
from rollout_reassembler.contract.records import CallRecord, RolloutReceipt

_FAILURES_SHOWN = 5


@dataclass(frozen=True)
class LedgerView:
    """One rollout's ledger at one moment: its last attempt.

    `records` are in the order they were recorded, a parent before its children. `pending` calls were
    admitted and neither recorded, failed nor aborted. `torn` are the offsets of lines that a dying writer left
    unfinished. `empty_calls` are recorded calls that generated nothing; `admissions` has the row of each call.
    """

    rollout_id: str
    attempt: str | None = None
    records: tuple[CallRecord, ...] = ()
    failures: tuple[CallFailure, ...] = ()
    pending: tuple[str, ...] = ()
    torn: tuple[int, ...] = ()
    empty_calls: frozenset[str] = frozenset()
    admissions: Mapping[str, AdmittedRow] = field(default_factory=dict)

    @property
    def new_roots(self) -> dict[str, int]:
        """How many requests began a conversation of their own, by cause."""
        reasons = [row.new_root_reason for row in self.admissions.values() if row.new_root_reason]
        return dict(Counter(reason.partition(":")[0] for reason in reasons))

    def metrics(self) -> dict[str, float]:
        """`lineage/new_root_<cause>` for every cause, and `lineage/calls`, `/failed_calls`, `/pending_calls`."""
        new_roots = self.new_roots
        return {
            "lineage/calls": len(self.admissions),
            "lineage/failed_calls": len({f.model_call_id for f in self.failures if f.model_call_id is not None}),
            "lineage/pending_calls": len(self.pending),
            **{f"lineage/new_root_{cause}": new_roots.get(cause, 0) for cause in NEW_ROOT_CAUSES},
        }

    def uncaptured(self) -> list[UncapturedCall]:
        """The calls that were answered, and of which nothing is staged that could be trained."""
        recorded = {record.model_call_id for record in self.records}
        failed = {failure.model_call_id for failure in self.failures} - recorded
        rows = [row for call, row in self.admissions.items() if call in failed]
        return [UncapturedCall(row.model_call_id, row.parent_call_id, row.admitted_at) for row in rows]


def assemble_receipt(
    view: LedgerView,
    witnesses: Witnesses,
    *,
    reward: float | None = None,
    among_conversations: ConversationPolicy = "reject",
) -> RolloutReceipt:
    """The receipt of a rollout that has ended.

    Raises `RequestError` for a reward that is not finite, or a policy that is none.
    """
    if reward is not None and not math.isfinite(reward):
        raise RequestError(f"rollout {view.rollout_id!r}: the reward of a receipt is finite or None, got {reward}")
    selection = select_terminal(
        view.records,
        witnesses,
        empty_calls=view.empty_calls,
        uncaptured=view.uncaptured(),
        requests={call: row.request for call, row in view.admissions.items() if row.request is not None},
        among_conversations=among_conversations,
    )
    failure = _failure_reason(view, selection)
    return RolloutReceipt(
        rollout_id=view.rollout_id,
        reward=reward,
        terminal_model_call_id=selection.model_call_id,
        manifest=list(view.records),
        capture_poisoned=failure is not None,
        failure_reason=failure,
        terminal_selection=selection.method,
        terminal_attribution_reason=selection.reason or None,
    )


def _failure_reason(view: LedgerView, selection: TerminalSelection) -> str | None:
    """Why the rollout cannot be trained: its failures first, for they may explain a missing terminal."""
    recorded = {record.model_call_id for record in view.records}
    is_poisoned = any(failure.poisons_rollout or failure.model_call_id in recorded for failure in view.failures)
    if selection.model_call_id is not None and not is_poisoned:
        return None
    reasons = [
        failure.reason if failure.model_call_id is None else f"call {failure.model_call_id}: {failure.reason}"
        for failure in view.failures
    ]
    if len(reasons) > _FAILURES_SHOWN:
        reasons[_FAILURES_SHOWN:] = [f"{len(reasons) - _FAILURES_SHOWN} more"]
    if selection.model_call_id is None:
        reasons.append(f"no terminal: {selection.reason}")
    return "; ".join(reasons)
