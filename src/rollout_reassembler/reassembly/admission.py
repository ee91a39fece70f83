"""What a group is asked to do, and which of its receipts may be read at all.

In come a plain request's receipts (`contract/requests.py`). `admit` takes one as far as it goes without the data
plane: it parses, it belongs to the rollout, it can be trained, and all the keys it names are the rollout's own.
The first failure is the rejection, and costs that rollout alone. `fingerprint_of` says what decides the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_reassembler.contract.bounds import ReceiptBounds, parse_receipt
from rollout_reassembler.contract.errors import GroupConflict, InvalidReceipt, VerificationError
from rollout_reassembler.contract.messages import ReassemblyRequest, RefusedReceipt
from rollout_reassembler.contract.records import RolloutReceipt, staging_key
from rollout_reassembler.contract.requests import MAX_WEIGHT_VERSION, publishable_reward
from rollout_reassembler.reassembly.rows import FinalizedRollout
from rollout_reassembler.reassembly.verify import check_receipt_state

_OWN_REASONS = frozenset({"rollout_failed", "capture_poisoned", "duplicate_staging_key"})


@dataclass(frozen=True)
class Rejection:
    """Why a rollout becomes a placeholder: a reason for metrics, a detail for people.

    `is_unread`: what came in the receipt's place was not even a mapping, so it says nothing of the rollout.
    """

    reason: str
    detail: str
    is_unread: bool = False


def fingerprint_of(
    request: ReassemblyRequest, admitted: Sequence[RolloutReceipt | Rejection], settings: Mapping[str, Any]
) -> str:
    """All that decides this group's rows, given the staged bytes, as JSON: settings by value, parts by digest.

    Two requests with one fingerprint publish the same rows, and two with different ones can be told in what they
    differ (`difference`). `request` is plain, `settings` are those of the reassembler. Receipts that were not
    admitted count by their rejection. Where rows were staged, and what the caller gave up, decide whether there
    are rows to publish, not which.
    """
    receipts = [
        receipt.model_dump_json() if isinstance(receipt, RolloutReceipt) else json.dumps(receipt.reason)
        for receipt in admitted
    ]
    parts = {
        "rollout_ids": request.rollout_ids,
        "canonical_sample_ids": request.canonical_sample_ids,
        "receipts": receipts,
        "rewards": [publishable_reward(reward) for reward in request.rewards],
        "mask_sample": request.mask_sample,
        "truncated": request.truncated,
        "fallback_weight_version": request.fallback_weight_version,
        "prompt_idx": request.prompt_idx,
        "loss_multiplier": request.loss_multiplier,
    }
    digests = {name: hashlib.sha256(json.dumps(part).encode()).hexdigest()[:32] for name, part in parts.items()}
    return json.dumps({"settings": settings, "parts": digests})


def difference(recorded: str, here: str) -> str:
    """In what two fingerprints differ: settings with their values, parts of the request by name."""
    try:
        then, now = json.loads(recorded), json.loads(here)
        settings = [
            f"{name} was {then['settings'][name]} and is {value} here"
            for name, value in now["settings"].items()
            if then["settings"][name] != value
        ]
        return ", ".join([*settings, *(name for name in now["parts"] if then["parts"][name] != now["parts"][name])])
    except (ValueError, TypeError, KeyError):  # written by another version: that much differs
        return "contents"


def refuse_held_samples(group_id: str, sample_ids: Sequence[str], held: Sequence[Mapping[str, Any] | None]) -> None:
    """Raise `GroupConflict` for a canonical sample id under which another group's row lies.

    `held` are the tags of the rows that lie there, one a sample id. Default ids are no safer than given ones: those
    of group `g_g0` and a given `g_g0_g0` of group `g` are one. Of two groups that name one id at the same time both
    may find it free; then the later one's row stands, and the group whose row went finds the other's at its next try.
    """
    for sample_id, tags in zip(sample_ids, held, strict=True):
        owner = (tags or {}).get("group_id", group_id)
        if owner != group_id:
            raise GroupConflict(
                f"group {group_id!r:.200}: its canonical sample id {sample_id!r:.200} is that of a row of "
                f"group {owner!r:.200}; give its rows ids of their own, in canonical_sample_ids"
            )


def admit(rollout_id: str, receipt: Any, bounds: ReceiptBounds) -> RolloutReceipt | Rejection:
    """One rollout's receipt, ready to be proven, or why it can't be."""
    if receipt is None:
        return Rejection("missing_receipt", "the request holds no receipt for this rollout")
    if isinstance(receipt, RefusedReceipt):
        return Rejection("invalid_receipt", receipt.detail, is_unread=True)
    try:
        parsed = parse_receipt(receipt, bounds)
    except InvalidReceipt as error:
        return Rejection("invalid_receipt", error.detail, is_unread=not isinstance(receipt, Mapping | RolloutReceipt))
    if parsed.rollout_id != rollout_id:
        return Rejection("identity_mismatch", f"the receipt is that of rollout {parsed.rollout_id!r}")
    try:
        check_receipt_state(parsed)
    except VerificationError as error:
        return Rejection(error.code if error.code in _OWN_REASONS else f"rebuild_failed:{error.code}", error.detail)
    for record in parsed.manifest:
        if record.weight_version > MAX_WEIGHT_VERSION:
            detail = f"call {record.model_call_id!r}: weight_version {record.weight_version} does not fit int64"
            return Rejection("invalid_receipt", detail)
        if record.staging_key != staging_key(rollout_id, record.model_call_id):
            own = record.staging_key.startswith(f"{rollout_id}/")
            reason = "staging_key_mismatch" if own else "foreign_staging_key"
            return Rejection(reason, f"call {record.model_call_id!r} names the key {record.staging_key!r}")
    return parsed


def reads_nothing(admitted: Sequence[RolloutReceipt | Rejection], rollouts: Sequence[FinalizedRollout]) -> bool:
    """Whether not one rollout of the group could be read for what its *caller* handed over.

    All receipts no mapping, all rewards missing, or some of each: a gateway or a grader was down. Such a group
    says nothing of what is staged. Of a group of one it can't be told from one rollout's own fault, which it is then.
    """
    return len(rollouts) > 1 and all(
        rollout.rejection_reason == "invalid_reward" or (isinstance(receipt, Rejection) and receipt.is_unread)
        for receipt, rollout in zip(admitted, rollouts, strict=True)
    )
