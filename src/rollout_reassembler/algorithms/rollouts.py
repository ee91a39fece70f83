"""Which rollout each token belongs to, for everything that is taken over a whole rollout.

    rollouts = Rollouts(index, tokens)          # index int64, tokens-shaped; tokens int64 [rollouts]
    mean_log_ratio = rollouts.mean(log_ratio, mask)      # one value a token: that of its rollout

A rollout that was cut into several rows (branches, a compaction) is still one: what GSPO or a sequence
weight takes over a sequence is taken over all its owned tokens, wherever they stand in the batch. So the
batch must hold all of them. `tokens` says how many there are; a batch that holds fewer is refused, since
the ratio of a part is another number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG = 20.0
"""Log ratios are held to ±20 before they are exponentiated: e**20 is 4.9e8."""


@dataclass(frozen=True, eq=False)
class Rollouts:
    """`index` int64, tokens-shaped: the rollout of each token, from 0; padding may say anything in range.

    `tokens` int64 `[rollouts]`: how many tokens each rollout owns in all its rows. Raises `ValueError` when
    the shapes are not these.
    """

    index: torch.Tensor
    tokens: torch.Tensor

    def __post_init__(self) -> None:
        if self.index.dtype != torch.int64 or self.tokens.dtype != torch.int64 or self.tokens.dim() != 1:
            raise ValueError(
                f"expected index int64 (tokens) and tokens int64 [rollouts], got {self.index.dtype} "
                f"{list(self.index.shape)} and {self.tokens.dtype} {list(self.tokens.shape)}"
            )

    def sum(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The sum over each token's rollout, tokens-shaped. Raises `ValueError` when a rollout is not whole."""
        return self._spread(self._totals(values, mask))

    def mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The mean over each token's rollout, tokens-shaped. Raises `ValueError` when a rollout is not whole."""
        return self._spread(self._totals(values, mask) / self.tokens.clamp(min=1))

    def max(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The largest value of each token's rollout, tokens-shaped."""
        self._require_whole(mask)
        owned = mask > 0
        largest = values.new_full((len(self.tokens),), -torch.inf)
        largest = largest.scatter_reduce(0, self.index[owned], values[owned], "amax")
        return self._spread(largest)

    def weight(self, mask: torch.Tensor) -> torch.Tensor:
        """1 / (tokens that the rollout owns) at each token, tokens-shaped: a rollout's weights add up to 1."""
        return mask / self._spread(self.tokens.clamp(min=1).to(mask.dtype))

    def _totals(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self._require_whole(mask)
        # Where the mask is 0 a value may be anything, NaN too.
        owned = torch.where(mask > 0, values, torch.zeros_like(values))
        return values.new_zeros(len(self.tokens)).index_add(0, self.index.flatten(), owned.flatten())

    def _spread(self, by_rollout: torch.Tensor) -> torch.Tensor:
        return by_rollout[self.index]

    def _require_whole(self, mask: torch.Tensor) -> None:
        if mask.shape != self.index.shape:
            raise ValueError(f"mask has shape {list(mask.shape)}, the rollout index {list(self.index.shape)}")
        owned = torch.bincount(self.index[mask > 0], minlength=len(self.tokens))
        part = torch.nonzero((owned != self.tokens) & (owned > 0)).flatten()
        if len(part):
            which = int(part[0])
            raise ValueError(
                f"rollout {which} owns {int(self.tokens[which])} tokens and {int(owned[which])} of them are here: "
                "what is taken over a whole rollout needs all its rows in one batch"
            )
