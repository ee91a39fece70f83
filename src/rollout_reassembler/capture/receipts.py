"""From what a ledger knows of a rollout to its receipt.

    records, failures, pending calls  +  witnesses of the answer   ->   RolloutReceipt

A receipt is *trainable* when nothing failed and a terminal was chosen. Otherwise it is poisoned and
says why in `failure_reason`; `terminal_attribution_reason` keeps the witnesses' notes either way. The
manifest is complete even then, so that whoever rejects the receipt still finds the staged rows.

A call that was admitted and never recorded poisons nothing: a ledger row is written before its answer
is served, so no agent has seen a word of that call, and none of its tokens can be in a later prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_reassembler.capture.lineage import CallFailure
from rollout_reassembler.capture.terminal import TerminalSelection, Witnesses, select_terminal
from rollout_reassembler.contract.errors import RequestError
from rollout_reassembler.contract.records import CallRecord, RolloutReceipt

_FAILURES_SHOWN = 5


@dataclass(frozen=True)
class LedgerView:
    """One rollout's ledger at one moment.

    `records` are in the order they were recorded, a parent before its children. `pending` calls were
    admitted and neither recorded nor failed. `torn` are the offsets of lines that a dying writer left
    unfinished. `empty_calls` are recorded calls that generated nothing; `requests` has the fingerprint of
    each call's messages.
    """

    rollout_id: str
    records: tuple[CallRecord, ...] = ()
    failures: tuple[CallFailure, ...] = ()
    pending: tuple[str, ...] = ()
    torn: tuple[int, ...] = ()
    empty_calls: frozenset[str] = frozenset()
    requests: Mapping[str, str] = field(default_factory=dict)


def assemble_receipt(view: LedgerView, witnesses: Witnesses, *, reward: float | None = None) -> RolloutReceipt:
    """The receipt of a rollout that has ended. Raises `RequestError` for a reward that is not finite."""
    if reward is not None and not math.isfinite(reward):
        raise RequestError(f"rollout {view.rollout_id!r}: the reward of a receipt is finite or None, got {reward}")
    selection = select_terminal(
        view.records,
        witnesses,
        empty_calls=view.empty_calls,
        pending_calls=view.pending,
        requests=view.requests,
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
    """Why the rollout cannot be trained: its failed calls first, for they explain a missing terminal."""
    reasons = [
        failure.reason if failure.model_call_id is None else f"call {failure.model_call_id}: {failure.reason}"
        for failure in view.failures
    ]
    if len(reasons) > _FAILURES_SHOWN:
        reasons[_FAILURES_SHOWN:] = [f"{len(reasons) - _FAILURES_SHOWN} more"]
    if selection.model_call_id is None:
        reasons.append(f"no terminal: {selection.reason}")
    return "; ".join(reasons) or None
