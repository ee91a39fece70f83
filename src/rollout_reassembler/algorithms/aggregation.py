"""A loss a token → one number to differentiate.

    token      sum / tokens                        DAPO, and most frameworks' default: long rollouts weigh more
    sequence   mean over rows of a row's mean      GRPO as published: each row weighs the same
    rollout    mean over rollouts of its mean      the same, however a rollout was cut into rows
    constant   sum / a constant                    Dr.GRPO: no length in the gradient

Worked example, losses [1, 1, 1] and [3], each row a rollout: token 6 / 4 = 1.5, sequence and rollout
(1 + 3) / 2 = 2, constant 8: 0.75. Had the first rollout been cut into rows [1] and [1, 1], token, rollout and
constant stay; sequence would become (1 + 1 + 3) / 3, so it is refused there.

What counts is where the mask is 1: a row that is masked out is neither in the sum nor in the denominator. A
step that is split into several backward passes (or several ranks) needs the denominator of the whole step in
each: give it as `denominator` (tokens, rows or rollouts of the step; the constant itself for `constant`).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from rollout_reassembler.algorithms.rollouts import Rollouts

Aggregation = Literal["token", "sequence", "rollout", "constant"]


def aggregate(
    losses: torch.Tensor,
    mask: torch.Tensor,
    how: Aggregation = "token",
    *,
    row_index: torch.Tensor | None = None,
    rollouts: Rollouts | None = None,
    denominator: float | None = None,
) -> torch.Tensor:
    """The scalar loss of a batch; 0 (with a gradient of 0) when no token counts.

    `losses` and `mask` are tokens-shaped, the mask 1 where a token counts and 0 elsewhere; `row_index` int64,
    tokens-shaped, is each token's row, for a packed batch (`[B, S]` knows its rows). "rollout" needs `rollouts`,
    whose parts need not all be in this batch; "sequence" refuses rollouts of several rows where it is given them.
    """
    if how not in get_args(Aggregation):
        raise ValueError(f"how must be one of {', '.join(get_args(Aggregation))}, got {how!r}")
    if losses.shape != mask.shape:
        raise ValueError(f"losses have shape {list(losses.shape)}, the mask {list(mask.shape)}")
    counted = torch.where(mask > 0, losses, torch.zeros_like(losses))
    if how == "constant":
        if denominator is None:
            raise ValueError("'constant' divides by a constant of the run: give it as denominator")
        return counted.sum() / denominator
    if how == "token":
        return counted.sum() / _over(denominator, (mask > 0).sum())
    if how == "rollout":
        if rollouts is None:
            raise ValueError("'rollout' needs the rollouts of the batch")
        present = torch.unique(rollouts.index[mask > 0]).numel()
        return (counted * rollouts.weight((mask > 0).to(losses.dtype))).sum() / _over(denominator, present)
    rows = _rows(losses, row_index)
    if rollouts is not None:
        _require_a_row_a_rollout(rows, rollouts, mask)
    size = int(rows.max()) + 1 if rows.numel() else 0
    tokens = torch.bincount(rows[mask > 0], minlength=size)
    sums = losses.new_zeros(size).index_add(0, rows.flatten(), counted.flatten())
    return (sums / tokens.clamp(min=1)).sum() / _over(denominator, (tokens > 0).sum())


def _over(denominator: float | None, counted: torch.Tensor | int) -> float:
    """What to divide by; 1 where nothing was counted, so that an empty batch gives 0 and not NaN."""
    return float(denominator) if denominator is not None else max(float(counted), 1.0)


def _rows(losses: torch.Tensor, row_index: torch.Tensor | None) -> torch.Tensor:
    if row_index is not None:
        return row_index
    if losses.dim() != 2:
        raise ValueError("'sequence' needs the row of each token of a packed batch: give row_index")
    return torch.arange(losses.shape[0], device=losses.device)[:, None].expand_as(losses)


def _require_a_row_a_rollout(rows: torch.Tensor, rollouts: Rollouts, mask: torch.Tensor) -> None:
    pairs = torch.unique(torch.stack([rows[mask > 0], rollouts.index[mask > 0]]), dim=1)
    several = torch.nonzero(torch.bincount(pairs[1]) > 1).flatten() if pairs.numel() else pairs[0]
    if len(several):
        raise ValueError(
            f"rollout {int(several[0])} has several rows, so a mean by row depends on how it was cut; use 'rollout'"
        )
