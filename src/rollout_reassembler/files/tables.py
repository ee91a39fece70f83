"""What the commands show of finalized groups: one table, one line a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from rollout_reassembler.contract.messages import FinalizedGroup


def groups_table(groups: Sequence[FinalizedGroup], *, title: str) -> Table:
    """Rows, valid rows, rejections with their reasons, tokens and milliseconds of each group."""
    table = Table(title=title, title_justify="left")
    table.add_column("group", overflow="fold")
    for name in ("rows", "valid"):
        table.add_column(name, justify="right")
    table.add_column("rejected", overflow="fold")
    for name in ("tokens", "trained", "ms"):
        table.add_column(name, justify="right")
    for group in groups:
        reasons = Counter(group.rejections.values())
        table.add_row(
            str((group.meta.tags or [{}])[0].get("group_id", "")),
            str(group.total_row_count),
            str(group.valid_row_count),
            ", ".join(f"{reason} × {count}" if count > 1 else reason for reason, count in reasons.items()) or "–",
            f"{sum(group.meta.sequence_lengths or []):,}",
            f"{group.canonical_output_tokens:,}",
            f"{sum(group.timings.values()):.1f}",
        )
    return table


def rejection_counts(groups: Sequence[FinalizedGroup]) -> dict[str, int]:
    """Reason → how many rollouts it rejected."""
    return dict(Counter(reason for group in groups for reason in group.rejections.values()))
