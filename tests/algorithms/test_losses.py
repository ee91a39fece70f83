"""Losses a token, by hand; and one gradient for every way in which the same rollouts can be laid out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rollout_reassembler.algorithms import (
    Aggregation,
    Rollouts,
    aggregate,
    aipo_loss,
    cispo_loss,
    clipped_loss,
    decoupled_loss,
    gspo_loss,
)


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64)


ZERO = torch.zeros(4, dtype=torch.float64)
UP_UP_DOWN_DOWN = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)


def test_clipped_loss() -> None:
    found = clipped_loss(logs(1.5, 0.5, 1.5, 0.5), ZERO, UP_UP_DOWN_DOWN, clip_low=0.2, clip_high=0.28)
    assert found.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8])


def test_a_clipped_token_has_no_gradient() -> None:
    log_probs = logs(1.5, 0.5, 1.5, 0.5).requires_grad_()
    clipped_loss(log_probs, ZERO, UP_UP_DOWN_DOWN).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0, -0.5, 1.5, 0])


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    found = clipped_loss(logs(9, 9, 9, 2), ZERO, UP_UP_DOWN_DOWN, dual_clip=3.0)
    assert found.tolist() == pytest.approx([-1.2, -1.2, 3.0, 2.0])
    with pytest.raises(ValueError, match="dual_clip bounds a ratio from above 1, got 1"):
        clipped_loss(ZERO, ZERO, ZERO, dual_clip=1)


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    log_probs = logs(3.0, 0.5, 3.0, 0.5).requires_grad_()
    cispo_loss(log_probs, ZERO, UP_UP_DOWN_DOWN, clip_high=1.0).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-2.0, -0.5, 2.0, 0.5])


def test_gspo_takes_the_ratio_of_the_rollout() -> None:
    rollouts = Rollouts(torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2]))
    log_probs = logs(2.0, 8.0, 1.0, 1.21)
    found = gspo_loss(log_probs, ZERO, UP_UP_DOWN_DOWN, torch.ones(4), rollouts, clip_low=0.2, clip_high=9.0)
    assert found.tolist() == pytest.approx([-4.0, -4.0, 1.1, 1.1])


def test_gspo_refuses_a_part_of_a_rollout() -> None:
    rollouts = Rollouts(torch.tensor([0, 0, 1, 1]), torch.tensor([2, 3]))
    with pytest.raises(ValueError, match="rollout 1 owns 3 tokens and 2 of them are here: what is taken over a whole"):
        gspo_loss(ZERO, ZERO, ZERO, torch.ones(4), rollouts)


def test_decoupled_loss_is_clipped_against_the_proximal_policy_and_weighted_by_it() -> None:
    proximal, behavior = logs(1, 1, 1, 1), logs(0.5, 0.1, 0.5, 2.0)
    found = decoupled_loss(logs(1.5, 1.0, 1.5, 0.5), proximal, behavior, UP_UP_DOWN_DOWN, max_weight=4.0)
    assert found.tolist() == pytest.approx([-2.4, -4.0, 3.0, 0.4])


def test_aipo_truncates_the_ratio_and_keeps_the_gradient() -> None:
    log_probs = logs(3.0, 0.5, 3.0, 1.0).requires_grad_()
    aipo_loss(log_probs, ZERO, UP_UP_DOWN_DOWN, max_ratio=2.0).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-2.0, -0.5, 2.0, 1.0])


@pytest.mark.parametrize("loss", [clipped_loss, cispo_loss, aipo_loss])
def test_an_absurd_ratio_stays_finite(loss: Callable[..., torch.Tensor]) -> None:
    log_probs = torch.tensor([-1e4, 0.0], dtype=torch.float32).requires_grad_()
    found = loss(log_probs, torch.tensor([0.0, -1e4]), torch.tensor([1.0, -1.0]))
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()


# --- one gradient, however the rollouts are laid out ------------------------------------------------

VOCAB = 11


@dataclass(frozen=True)
class Row:
    """Tokens, which of them this row owns, and whose they are."""

    ids: list[int]
    owned: list[int]
    rollout: int


TREE = [
    # Rollout 0: two branches that share a sampled token, owned by the first; then a compaction's new root.
    Row([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], 0),
    Row([1, 2, 3, 6, 7, 8], [0, 0, 0, 0, 1, 1], 0),
    Row([9, 10, 4], [0, 0, 1], 0),
    Row([1, 2, 2], [0, 0, 1], 1),
    Row([5, 6, 7, 8, 9, 1], [0, 1, 1, 0, 0, 1], 2),
]
LINES = [
    Row([1, 2, 3, 4, 5, 6, 3, 8], [0, 0, 1, 1, 0, 1, 1, 1], 0),
    Row([1, 2, 2], [0, 0, 1], 1),
    Row([5, 6, 7, 8, 9, 1], [0, 1, 1, 0, 0, 1], 2),
]
ADVANTAGE = [0.7, -1.3, 0.4]


class TinyPolicy(torch.nn.Module):
    """Next-token log probabilities from the mean of all earlier tokens: causal, smooth, in binary64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCAB, 6, dtype=torch.float64)
        self.head = torch.nn.Linear(6, VOCAB, dtype=torch.float64)

    def forward(self, ids: list[int]) -> torch.Tensor:
        """The log probability of each token, `[T]`; 0 for the first, which nothing predicts."""
        states = self.embedding(torch.tensor(ids))
        means = states.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        scores = torch.log_softmax(self.head(torch.tanh(means[:-1])), -1)
        taken = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return torch.cat([taken.new_zeros(1), taken])


@dataclass(frozen=True)
class Laid:
    """A batch in one layout, and what the losses want to know of it."""

    log_probs: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old: torch.Tensor
    behavior: torch.Tensor
    rollouts: Rollouts
    row_index: torch.Tensor


def shifted(log_probs: torch.Tensor, ids: list[int], by: int) -> torch.Tensor:
    """Another policy's log probabilities: a function of token and position alone, so that cuts agree on them."""
    noise = torch.tensor([((token * 37 + by) % 13 - 6) / 10 for token in ids], dtype=torch.float64)
    return log_probs.detach() + noise


def laid(policy: TinyPolicy, rows: list[Row], layout: str) -> Laid:
    parts: list[dict[str, torch.Tensor]] = []
    for number, row in enumerate(rows):
        log_probs = policy(row.ids)
        parts.append(
            {
                "log_probs": log_probs,
                "mask": torch.tensor(row.owned, dtype=torch.float64),
                "advantages": torch.full_like(log_probs, ADVANTAGE[row.rollout]).detach(),
                "old": shifted(log_probs, row.ids, 1),
                "behavior": shifted(log_probs, row.ids, 5),
                "index": torch.full((len(row.ids),), row.rollout),
                "row_index": torch.full((len(row.ids),), number),
            }
        )
    if layout == "packed":
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    else:
        # Padding holds what must never be used.
        fill = {"mask": 0.0, "index": 0, "row_index": 0}
        joined = {
            name: torch.nn.utils.rnn.pad_sequence(
                [part[name] for part in parts], batch_first=True, padding_value=fill.get(name, float("nan"))
            )
            for name in parts[0]
        }
    owned = torch.tensor([sum(sum(row.owned) for row in rows if row.rollout == rollout) for rollout in range(3)])
    return Laid(**{k: v for k, v in joined.items() if k != "index"}, rollouts=Rollouts(joined["index"], owned))


LOSSES: dict[str, Callable[[Laid], torch.Tensor]] = {
    "clipped": lambda b: clipped_loss(b.log_probs, b.old, b.advantages, clip_high=0.28),
    "dual": lambda b: clipped_loss(b.log_probs, b.old, b.advantages, dual_clip=1.3),
    "cispo": lambda b: cispo_loss(b.log_probs, b.old, b.advantages),
    "gspo": lambda b: gspo_loss(b.log_probs, b.old, b.advantages, b.mask, b.rollouts, clip_low=0.3, clip_high=0.3),
    "decoupled": lambda b: decoupled_loss(b.log_probs, b.old, b.behavior, b.advantages, max_weight=1.5),
    "aipo": lambda b: aipo_loss(b.log_probs, b.behavior, b.advantages),
}


def by_hand(policy: TinyPolicy, rows: list[Row], loss: str, how: Aggregation) -> torch.Tensor:
    """The same number, one owned token after the other."""
    tokens: list[tuple[int, int, Any, Any, Any]] = []
    for number, row in enumerate(rows):
        log_probs = policy(row.ids)
        old, behavior = shifted(log_probs, row.ids, 1), shifted(log_probs, row.ids, 5)
        tokens += [
            (number, row.rollout, log_probs[t], old[t], behavior[t]) for t, owned in enumerate(row.owned) if owned
        ]
    total, of_rollout, of_row = len(tokens), [0] * 3, [0] * len(rows)
    log_ratio_of = [0.0] * 3
    for number, rollout, log_prob, old, _ in tokens:
        of_rollout[rollout] += 1
        of_row[number] += 1
        log_ratio_of[rollout] += float(log_prob - old)
    share: dict[str, Callable[[int, int], float]] = {
        "token": lambda number, rollout: 1 / total,
        "sequence": lambda number, rollout: 1 / of_row[number] / len(rows),
        "rollout": lambda number, rollout: 1 / of_rollout[rollout] / 3,
        "constant": lambda number, rollout: 1 / 100,
    }
    summed = torch.zeros((), dtype=torch.float64)
    for number, rollout, log_prob, old, behavior in tokens:
        advantage, ratio = ADVANTAGE[rollout], torch.exp(log_prob - old)
        if loss == "gspo":
            ratio = torch.exp(log_ratio_of[rollout] / of_rollout[rollout] + log_prob - log_prob.detach())
        low, high = {"clipped": (0.8, 1.28), "gspo": (0.7, 1.3)}.get(loss, (0.8, 1.2))
        value = -torch.minimum(advantage * ratio, advantage * ratio.clamp(low, high))
        if loss == "dual" and advantage < 0:
            value = torch.minimum(value, torch.tensor(-advantage * 1.3))
        if loss == "decoupled":
            value = value * min(math.exp(old - behavior), 1.5)
        if loss == "cispo":
            value = -min(float(ratio), 1.2) * advantage * log_prob
        if loss == "aipo":
            value = -min(math.exp(log_prob - behavior), 2.0) * advantage * log_prob
        summed = summed + value * share[how](number, rollout)
    return summed


def gradient(policy: TinyPolicy, value: torch.Tensor) -> torch.Tensor:
    policy.zero_grad()
    value.backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("how", ["token", "sequence", "rollout", "constant"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("rows", [LINES, TREE], ids=["lines", "tree"])
def test_every_layout_gives_the_gradient_of_the_sum_by_hand(
    loss: str, how: Aggregation, layout: str, rows: list[Row]
) -> None:
    policy = TinyPolicy()
    batch = laid(policy, rows, layout)
    settings: dict[str, Any] = {"rollouts": batch.rollouts, "denominator": 100.0 if how == "constant" else None}
    if how == "sequence":
        settings["rollouts"] = None
        settings["row_index"] = batch.row_index if layout == "packed" else None
    value = aggregate(LOSSES[loss](batch), batch.mask, how, **settings)
    expected = by_hand(policy, rows, loss, how)
    assert float(value) == pytest.approx(float(expected), abs=1e-12)
    found = gradient(policy, value)
    assert torch.isfinite(found).all()
    assert (found - gradient(policy, expected)).abs().max() < 1e-9


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("how", ["token", "rollout"])
def test_a_step_in_two_backward_passes_has_the_gradient_of_one(loss: str, how: Aggregation) -> None:
    policy = TinyPolicy()
    whole = laid(policy, TREE, "packed")
    expected = gradient(policy, aggregate(LOSSES[loss](whole), whole.mask, how, rollouts=whole.rollouts))
    denominator = float(whole.mask.sum()) if how == "token" else 3.0
    summed = torch.zeros_like(expected)
    for rows in (TREE[:3], TREE[3:]):
        part = laid(policy, rows, "padded")
        value = aggregate(LOSSES[loss](part), part.mask, how, rollouts=part.rollouts, denominator=denominator)
        summed += gradient(policy, value)
    assert (summed - expected).abs().max() < 1e-9
