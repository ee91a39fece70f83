"""What a group is asked to do, and which of its receipts may be read at all.

`GroupRequest` is the request with its tuples checked to align; every later step walks its entries
in order. `admit` takes one receipt as far as it goes without the data plane: it parses, it belongs
to the rollout, it can be trained, and all the keys it names are the rollout's own. The first
failure is the rejection.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Any

from rollout_reassembler.contract.bounds import ReceiptBounds, parse_receipt
from rollout_reassembler.contract.errors import InvalidReceipt, RequestError, VerificationError
from rollout_reassembler.contract.records import RolloutReceipt, staging_key
from rollout_reassembler.reassembly.rows import publishable_reward
from rollout_reassembler.reassembly.verify import check_receipt_state

_OWN_REASONS = frozenset({"rollout_failed", "capture_poisoned", "duplicate_staging_key"})

_MAX_WEIGHT_VERSION = 2**63 - 1
"""The wire holds 64 bits without a sign; tags, exports and tensors hold int64."""


@dataclass(frozen=True)
class Rejection:
    """Why a rollout becomes a placeholder: a reason for metrics, a detail for people."""

    reason: str
    detail: str


@dataclass(frozen=True)
class GroupRequest:
    """One prompt group, with one entry a rollout in each sequence."""

    group_id: str
    rollout_ids: tuple[str, ...]
    sample_ids: tuple[str, ...]
    receipts: tuple[Any, ...]
    rewards: tuple[Any, ...]
    mask_sample: tuple[bool, ...]
    truncated: tuple[bool | None, ...]
    fallback_weight_version: int
    prompt_idx: int
    loss_multiplier: float
    staged_on: str | None
    accept_lost: bool

    @classmethod
    def of(
        cls,
        group_id: str,
        rollout_ids: Sequence[str],
        receipts: Sequence[Any],
        rewards: Sequence[Any],
        *,
        mask_sample: Sequence[bool] | bool | None,
        fallback_weight_version: int,
        prompt_idx: int,
        loss_multiplier: float,
        canonical_sample_ids: Sequence[str] | None,
        truncated: Sequence[bool] | None,
        staged_on: str | None = None,
        accept_lost: bool = False,
    ) -> GroupRequest:
        """Align the parts of a request. Raises `RequestError` naming the one that is off."""
        if not isinstance(group_id, str) or not group_id:
            raise RequestError(f"group_id must be a non-empty str, got {group_id!r:.80}")
        if not isinstance(rollout_ids, Sized) or isinstance(rollout_ids, str) or not len(rollout_ids):
            raise RequestError(f"group {group_id!r}: rollout_ids must name a rollout or more, got {rollout_ids!r:.80}")
        size = len(rollout_ids)
        for name, number in (("fallback_weight_version", fallback_weight_version), ("prompt_idx", prompt_idx)):
            if not isinstance(number, Integral):
                raise RequestError(f"group {group_id!r}: {name} must be an int, got {number!r:.80}")
        if publishable_reward(loss_multiplier) is None:
            raise RequestError(f"group {group_id!r}: loss_multiplier {loss_multiplier!r} is not a finite binary32")
        if staged_on is not None and (not isinstance(staged_on, str) or not staged_on):
            raise RequestError(
                f"group {group_id!r}: staged_on must be what epoch() gave, or None; got {staged_on!r:.80}"
            )
        if not isinstance(accept_lost, bool):
            raise RequestError(f"group {group_id!r}: accept_lost must be a bool, got {accept_lost!r:.80}")
        if mask_sample is None or isinstance(mask_sample, bool):
            mask_sample = (bool(mask_sample),) * size
        sample_ids = tuple(canonical_sample_ids or (f"{group_id}_g{i}" for i in range(size)))
        said = tuple(truncated) if truncated is not None else (None,) * size
        parts = {
            "receipts": receipts,
            "rewards": rewards,
            "mask_sample": mask_sample,
            "canonical_sample_ids": sample_ids,
            "truncated": said,
        }
        for name, part in parts.items():
            found = len(part) if isinstance(part, Sized) else type(part).__name__
            if found != size:
                raise RequestError(f"group {group_id!r}: {found} {name} for {size} rollout_ids")
        for name, ids in (("rollout_ids", rollout_ids), ("canonical_sample_ids", sample_ids)):
            if not all(isinstance(i, str) and i for i in ids) or len(set(ids)) != size:
                raise RequestError(
                    f"group {group_id!r}: {name} must be distinct non-empty strings, got {list(ids)!r:.200}"
                )
        return cls(
            group_id=group_id,
            rollout_ids=tuple(rollout_ids),
            sample_ids=sample_ids,
            receipts=tuple(receipts),
            rewards=tuple(rewards),
            mask_sample=tuple(bool(masked) for masked in mask_sample),
            truncated=tuple(None if cut is None else bool(cut) for cut in said),
            fallback_weight_version=index(fallback_weight_version),
            prompt_idx=index(prompt_idx),
            loss_multiplier=float(loss_multiplier),
            staged_on=staged_on,
            accept_lost=accept_lost,
        )

    def fingerprint(self, admitted: Sequence[RolloutReceipt | Rejection], settings: Sequence[Any]) -> str:
        """Digest of all that decides this group's rows, given the staged bytes.

        Two requests with one fingerprint publish the same rows. `settings` are those of the
        reassembler. Receipts that were not admitted count by their rejection. Where rows were staged, and
        what the caller gave up, decide whether there are rows to publish, not which.
        """
        digest = hashlib.sha256()
        head = (
            self.group_id,
            self.rollout_ids,
            self.sample_ids,
            [publishable_reward(reward) for reward in self.rewards],
            self.mask_sample,
            self.truncated,
            self.fallback_weight_version,
            self.prompt_idx,
            self.loss_multiplier,
            settings,
        )
        digest.update(json.dumps(head).encode())
        for receipt in admitted:
            part = receipt.model_dump_json() if isinstance(receipt, RolloutReceipt) else json.dumps(receipt.reason)
            digest.update(b"\n" + part.encode())
        return digest.hexdigest()


def admit(rollout_id: str, receipt: Any, bounds: ReceiptBounds) -> RolloutReceipt | Rejection:
    """One rollout's receipt, ready to be proven, or why it can't be."""
    if receipt is None:
        return Rejection("missing_receipt", "the request holds no receipt for this rollout")
    try:
        parsed = parse_receipt(receipt, bounds)
    except InvalidReceipt as error:
        return Rejection("invalid_receipt", error.detail)
    if parsed.rollout_id != rollout_id:
        return Rejection("identity_mismatch", f"the receipt is that of rollout {parsed.rollout_id!r}")
    try:
        check_receipt_state(parsed)
    except VerificationError as error:
        return Rejection(error.code if error.code in _OWN_REASONS else f"rebuild_failed:{error.code}", error.detail)
    for record in parsed.manifest:
        if record.weight_version > _MAX_WEIGHT_VERSION:
            detail = f"call {record.model_call_id!r}: weight_version {record.weight_version} does not fit int64"
            return Rejection("invalid_receipt", detail)
        if record.staging_key != staging_key(rollout_id, record.model_call_id):
            own = record.staging_key.startswith(f"{rollout_id}/")
            reason = "staging_key_mismatch" if own else "foreign_staging_key"
            return Rejection(reason, f"call {record.model_call_id!r} names the key {record.staging_key!r}")
    return parsed
