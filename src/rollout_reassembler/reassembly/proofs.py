"""One rollout, from its receipt and staged values to its rows or its rejection.

    prover = RolloutProver(staging_partition="staging", max_seq_len=32768, with_routes=False)
    rows = prover.prove(rollout_id, receipt, reward, values, "all")      # one a chain, or a rejected rollout
    assert [(row.segment, row.valid) for row in rows] == [(0, True)]

With `"terminal"` all that the receipt lists must be sound, and the terminal's chain is the row. With `"all"` what
cannot be proven costs the chains that hold it and no other; only the terminal's own chain must be sound. The first
of a rollout's rows holds what is said of the whole rollout: its keys, what it sampled, what was left out and why.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from rollout_reassembler.contract.errors import InvalidRoutePlan, InvalidStagedCall, VerificationError
from rollout_reassembler.contract.records import RolloutReceipt
from rollout_reassembler.contract.requests import publishable_reward
from rollout_reassembler.contract.settings import Branches
from rollout_reassembler.reassembly.admission import Rejection
from rollout_reassembler.reassembly.route_plan import RoutePlan, plan_routes
from rollout_reassembler.reassembly.rows import FinalizedRollout, rejected
from rollout_reassembler.reassembly.spans import encode_spans
from rollout_reassembler.reassembly.verify import LinearizedRow, ProvenForest, prove_forest, prove_rollout
from rollout_reassembler.staging.places import place_of


@dataclasses.dataclass(frozen=True)
class RolloutProver:
    """Proves rollouts staged in one partition; with routes each row has the plan of its routes."""

    staging_partition: str
    max_seq_len: int | None
    with_routes: bool

    def prove(
        self,
        rollout_id: str,
        receipt: RolloutReceipt | Rejection,
        reward: Any,
        values: Mapping[str, bytes],
        branches: Branches,
    ) -> list[FinalizedRollout]:
        """The rollout's rows, earliest leaf first, or one entry that says why it is rejected.

        `values` holds what was found, by place. Bad data is an answer; raises nothing of its own.
        """
        publishable = publishable_reward(reward)
        refused = partial(rejected, rollout_id, reward=publishable or 0.0)
        if isinstance(receipt, Rejection):
            return [refused(receipt.reason, receipt.detail)]
        keys = tuple(map(place_of, receipt.manifest))
        missing = tuple(key for key in keys if key not in values)
        if missing and branches == "terminal":
            detail = f"{len(missing)} of {len(keys)} staged rows are missing, first {missing[0]!r}"
            return [refused("missing_staging_row", detail, missing_keys=missing)]
        try:
            forest = self._forest(receipt, [values.get(key) for key in keys], branches)
        except InvalidStagedCall as error:
            return [refused(error.code, error.detail, missing_keys=missing)]
        except VerificationError as error:
            return [refused(f"rebuild_failed:{error.code}", error.detail, missing_keys=missing)]
        pairs = zip(receipt.manifest, keys, strict=True)
        own = tuple(key for record, key in pairs if record.model_call_id not in forest.faults)
        if publishable is None:
            detail = f"expected a reward that binary32 can hold, got {reward}"
            return [refused("invalid_reward", detail, staging_keys=own)]
        (length,) = (r.cum_len for r in receipt.manifest if r.model_call_id == receipt.terminal_model_call_id)
        if self.max_seq_len is not None and length > self.max_seq_len:
            detail = f"{length} tokens, more than max_seq_len={self.max_seq_len}"
            return [refused("exceeds_max_seq_len", detail, staging_keys=own)]
        plans: list[RoutePlan | None] = [None] * len(forest.rows)
        if self.with_routes:
            planned = partial(plan_routes, staging_partition=self.staging_partition, cleanup_keys=keys)
            try:
                plans = [planned(row) for row in forest.rows]
            except InvalidRoutePlan as error:
                return [refused(error.code, error.detail, staging_keys=own)]
        rows = [_proven(row, publishable, plan) for row, plan in zip(forest.rows, plans, strict=True)]
        return _as_one_rollout(rows, forest, own, missing)

    def _forest(self, receipt: RolloutReceipt, values: Sequence[bytes | None], branches: Branches) -> ProvenForest:
        if branches == "all":
            return prove_forest(receipt, values, max_tokens=self.max_seq_len)
        return ProvenForest((prove_rollout(receipt, [value for value in values if value is not None]),), {}, 0)


def whole_or_rejected(rows: list[FinalizedRollout], first: FinalizedRollout) -> list[FinalizedRollout]:
    """The rollout's rows, unless one of them was rejected: then that alone, with the keys of them all."""
    refused = next((row for row in rows if not row.valid), None)
    return rows if refused is None else [dataclasses.replace(refused, staging_keys=first.staging_keys)]


def is_unaccounted(row: FinalizedRollout) -> bool:
    """Whether rows may be staged for its rollout that nothing proves to be its own; found by their tags alone.

    A receipt that claimed someone else's row has nothing cleared.
    """
    return bool(row.dropped) or (not row.valid and row.rejection_reason != "foreign_staging_key")


def _as_one_rollout(
    rows: Sequence[FinalizedRollout], forest: ProvenForest, keys: tuple[str, ...], missing: tuple[str, ...]
) -> list[FinalizedRollout]:
    trained = sum(row.generated_tokens for row in rows)
    numbered = [
        dataclasses.replace(row, segment=j, segments=len(rows), trained_tokens=trained) for j, row in enumerate(rows)
    ]
    numbered[0] = dataclasses.replace(
        numbered[0],
        staging_keys=keys,
        missing_keys=missing,
        sampled_tokens=forest.sampled_tokens,
        dropped=dict(Counter(error.code for error in forest.faults.values())),
    )
    return numbered


def _proven(row: LinearizedRow, reward: float, plan: RoutePlan | None) -> FinalizedRollout:
    owned = [call for call, is_own in zip(row.calls, row.owned, strict=True) if is_own]
    children = zip(pairwise(row.calls), row.owned[1:], strict=True)
    return FinalizedRollout(
        rollout_id=row.rollout_id,
        valid=True,
        rejection_reason=None,
        token_ids=row.token_ids,
        token_mask=row.token_mask,
        logprobs=row.logprobs,
        prompt_len=row.prompt_len,
        reward=reward,
        staging_keys=(),
        min_wv=min(call.weight_version for call in owned),
        max_wv=max(call.weight_version for call in owned),
        calls=len(owned),
        generated_tokens=sum(call.delta_len - (call.carry_len or 0) for call in owned),
        route_plan=plan,
        spans=encode_spans(row),
        older_calls=sum(own and child.weight_version < parent.weight_version for (parent, child), own in children),
        info_places=tuple(place_of(call) if call.has_info else None for call in row.calls)
        if any(call.has_info for call in row.calls)
        else (),
    )
