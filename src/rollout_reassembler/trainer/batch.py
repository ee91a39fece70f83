"""One batch of canonical rows as torch tensors, and what a loss wants to know of its rows.

Rows of several groups may be in one batch, and rows of one rollout or group in several. So each row says
where it belongs, by numbers that hold over the whole iteration that the batch is part of:

    batch.row_number       the row's place in the iteration: advantage[batch.row_number]
    batch.group_index      its prompt group
    batch.rollout_index    its rollout; a rollout may have several rows
    batch.rollout_tokens   how many sampled tokens its rollout owns, in all of its rows

"Tokens" below is `[B, S]` when padded, `[sum T]` when packed. `spread` lays a value a row out over its tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from rollout_reassembler.algorithms import Rollouts
from rollout_reassembler.data_plane.base import Tags
from rollout_reassembler.reassembly.spans import RowSpans
from rollout_reassembler.trainer.deferred_routes import RouteReport

Layout = Literal["padded", "packed"]


@dataclass(frozen=True)
class TrainBatch:
    """B rows in one layout.

    `input_ids` int64, `token_mask`, `generation_logprobs` and `loss_weight` float32: tokens. `input_lengths` int64
    `[B]`, `cu_seqlens` int32 `[B + 1]`. `sample_mask` and `total_reward` float32 `[B]`, `mask_sample` and
    `truncated` bool `[B]`. `prompt_ids_for_adv` int64 `[B, P]`, padded in both layouts, its lengths in
    `prompt_lengths` `[B]`: the prompt as the trainer's own checks may want it. It does not tell groups apart: a
    rollout whose history was compacted has another prompt, and two groups may share one; `group_index` does.
    `row_number`, `group_index`, `rollout_index`, `rollout_tokens` and `weight_version` int64 `[B]`; the version is
    the oldest of the row's group, -1 where the row does not say.

    Where they were asked for: `token_weight_version` int64, tokens, the version that each token's call was
    admitted at (-1 for padding and placeholders), with `spans`, the proof of each row (none for a placeholder);
    `routed_experts` int16, tokens + `[L, K]`.
    """

    sample_ids: list[str]
    tags: list[Tags]
    layout: Layout
    input_ids: torch.Tensor
    token_mask: torch.Tensor
    generation_logprobs: torch.Tensor
    input_lengths: torch.Tensor
    cu_seqlens: torch.Tensor
    sample_mask: torch.Tensor
    total_reward: torch.Tensor
    mask_sample: torch.Tensor
    truncated: torch.Tensor
    prompt_ids_for_adv: torch.Tensor
    prompt_lengths: torch.Tensor
    row_number: torch.Tensor
    group_index: torch.Tensor
    rollout_index: torch.Tensor
    rollout_tokens: torch.Tensor
    weight_version: torch.Tensor
    loss_weight: torch.Tensor
    token_weight_version: torch.Tensor | None = None
    spans: list[RowSpans | None] | None = None
    routed_experts: torch.Tensor | None = None
    route_report: RouteReport | None = None

    @property
    def attention_mask(self) -> torch.Tensor:
        """Which tokens are data, bool: `[B, S]`, or all of `[sum T]`."""
        if self.layout == "packed":
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        positions = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return positions[None, :] < self.input_lengths[:, None]

    @property
    def row_index(self) -> torch.Tensor:
        """The row of this batch that each token is of, int64, tokens; padding is its row's."""
        rows = torch.arange(len(self.sample_ids), device=self.input_ids.device)
        if self.layout == "packed":
            return rows.repeat_interleave(self.input_lengths)
        return rows[:, None].expand_as(self.input_ids)

    @property
    def rollouts(self) -> Rollouts:
        """The rollouts of this batch, for what is taken over a whole one."""
        here, index = torch.unique(self.rollout_index, return_inverse=True)
        tokens = self.rollout_tokens.new_zeros(len(here)).scatter(0, index, self.rollout_tokens)
        return Rollouts(index[self.row_index], tokens)

    @property
    def may_vote(self) -> torch.Tensor:
        """Which rows' rollouts may vote, bool `[B]`: neither masked nor placeholders."""
        return ~self.mask_sample

    def spread(self, by_row: torch.Tensor) -> torch.Tensor:
        """A value a row, `[B]`, at each of its tokens."""
        return by_row[self.row_index]

    def to(self, device: torch.device | str) -> Self:
        """The same batch with its tensors on `device`."""
        tensors: dict[str, Any] = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **tensors)
