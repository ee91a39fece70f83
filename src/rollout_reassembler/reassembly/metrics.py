"""A finalized group in numbers, under the names that the reference system's dashboards know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rollout_reassembler.contract.records import RolloutReceipt
from rollout_reassembler.reassembly.admission import Rejection
from rollout_reassembler.reassembly.rows import FinalizedRollout


def group_metrics(
    by_rollout: Sequence[Sequence[FinalizedRollout]], admitted: Sequence[RolloutReceipt | Rejection]
) -> dict[str, float]:
    """Counts of one group, and rates over its N rollouts, also those without a receipt.

    Reasons and methods appear only when they occurred. `token_in_rate` is over calls.
    `calls_off_chain_count` is of valid rollouts: calls that were proven, and are not in the row.
    `calls_older_than_their_parent_count` is of trained calls whose weight version is before their parent's: weights
    went back in the middle of a rollout, or a worker was left behind. It appears only when there are some.
    A `rebuild_failed:<code>` rejection counts under `rebuild_failed` and under its code.
    With all branches, `branches/…` says how many rows a valid rollout has, which part of what it sampled is trained,
    and how many calls were left out since they could not be proven, by code.
    """
    rollouts = [rows[0] for rows in by_rollout]
    receipts = [receipt for receipt in admitted if isinstance(receipt, RolloutReceipt)]
    calls = [record for receipt in receipts for record in receipt.manifest]
    reasons = Counter(rollout.rejection_reason for rollout in rollouts if rollout.rejection_reason)
    methods = Counter(receipt.terminal_selection for receipt in receipts if receipt.terminal_selection)
    metrics: dict[str, float] = {
        "finalize/invalid_row_rate": sum(not rollout.valid for rollout in rollouts) / len(rollouts),
        "finalize/calls_per_rollout": len(calls) / len(rollouts),
        "finalize/calls_off_chain_count": float(
            sum(len(rows[0].staging_keys) - sum(row.calls for row in rows) for rows in by_rollout if rows[0].valid)
        ),
        "finalize/token_in_rate": sum(record.mode == "token_in" for record in calls) / len(calls) if calls else 0.0,
        "finalize/capture_poisoned_rollouts": float(reasons["capture_poisoned"] + reasons["rollout_failed"]),
    }
    if older := sum(row.older_calls for rows in by_rollout for row in rows):
        metrics["finalize/calls_older_than_their_parent_count"] = float(older)
    proven = [rollout for rollout in rollouts if rollout.sampled_tokens]
    if proven:
        sampled = sum(rollout.sampled_tokens for rollout in proven)
        metrics["branches/rows_per_rollout"] = sum(rollout.segments for rollout in proven) / len(proven)
        metrics["branches/sampled_tokens"] = float(sampled)
        metrics["branches/trained_fraction"] = sum(rollout.trained_tokens for rollout in proven) / sampled
        for code, count in sum((Counter(rollout.dropped) for rollout in proven), Counter()).items():
            metrics[f"branches/dropped_calls_{code}"] = float(count)
    for method, count in methods.items():
        metrics[f"finalize/terminal_selection_{method}_count"] = float(count)
        metrics[f"finalize/terminal_selection_{method}_fraction"] = count / len(rollouts)
    for reason, count in reasons.items():
        kind, _, code = reason.partition(":")
        for name in (kind, f"{kind}_{code}") if code else (kind,):
            key = f"finalize/capture_failure_reason_{name}_count"
            metrics[key] = metrics.get(key, 0.0) + count
    return metrics
