"""Capture, from a model call to a receipt.

    agent ── messages ──▶ ledger.admit ── CaptureAdmission ──▶ recorder.begin_call ──▶ engine
    agent ◀── answer ──── ledger.record ◀── CommitCoords ───── recorder.complete_call ◀──┘
                                                                     └──▶ staged call, by the sink
    ledger.receipt ──▶ RolloutReceipt

`records` is what travels; `recorder` (with `prefixes`) is the inference worker's side; `ledger` is the
agent's side, made of `journal` (the file) and its `rows`, `fingerprint` and `requests` (conversations),
`lineage` (parents), `terminal` (the answer) and `receipts`. The two sides share no memory and exchange no token.
"""

from rollout_reassembler.capture.ledger import CaptureLedger
from rollout_reassembler.capture.receipts import LedgerView
from rollout_reassembler.capture.recorder import CallRecorder, CaptureCounts, OpenCall
from rollout_reassembler.capture.records import CaptureAdmission, CommitCoords
from rollout_reassembler.contract.call_info import CallInfo
from rollout_reassembler.contract.errors import CallClosed, LedgerConflict

__all__ = [
    "CallClosed",
    "CallInfo",
    "CallRecorder",
    "CaptureAdmission",
    "CaptureCounts",
    "CaptureLedger",
    "CommitCoords",
    "LedgerConflict",
    "LedgerView",
    "OpenCall",
]
