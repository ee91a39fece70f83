"""Trainer against engine: what a token is worth when the two do not give it the same probability.

rho = pi_train / pi_rollout, a token. Three remedies, all without a gradient, all tokens-shaped:

    truncated_weights   TIS: min(rho, C); by rollout: min(exp(sum log rho), C)      weight of the loss
    icepop_weights      IcePop: rho where it lies in [low, high], else 0            weight of the loss
    rejection_mask      MIS: 1 where a divergence lies in [low, high], else 0       mask of the loss

With log rho = [0.1, 1.0] and C = 2: TIS by token weighs [1.105, 2], by rollout [2, 2]; IcePop in [0.5, 2]
weighs [1.105, 0].

Captured tokens make rho 1 up to the engines' arithmetic. Where it is not, look first at *what* the log
probabilities are of: an engine reports them before temperature unless it is told otherwise.

Sources: TIS and MIS as in verl's rollout correction; IcePop in the Ring-1T report; k1, k2, k3 are
estimators of the KL divergence, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from rollout_reassembler.algorithms.rollouts import MAX_LOG, Rollouts

Level = Literal["token", "sum", "mean", "max"]
"""Over what a divergence is taken: each token, or the sum, mean or maximum over its rollout."""

Divergence = Literal["k1", "k2", "k3"]
"""k1 = -log rho, k2 = log(rho)**2 / 2, k3 = rho - 1 - log rho."""


def truncated_weights(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    limit: float = 2.0,
    rollouts: Rollouts | None = None,
) -> torch.Tensor:
    """min(rho, limit) a token; with `rollouts`, one weight a rollout: min(exp(sum log rho), limit). 0 off the mask."""
    log_rho = _log_rho(train_log_probs, rollout_log_probs, mask)
    if rollouts is not None:
        log_rho = rollouts.sum(log_rho, mask)
    weight = log_rho.clamp(-MAX_LOG, MAX_LOG).exp().clamp(max=limit)
    return torch.where(mask > 0, weight, torch.zeros_like(weight))


def icepop_weights(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> torch.Tensor:
    """rho where it lies in [low, high], 0 elsewhere and off the mask."""
    rho = _log_rho(train_log_probs, rollout_log_probs, mask).clamp(-MAX_LOG, MAX_LOG).exp()
    return torch.where((mask > 0) & (rho >= low) & (rho <= high), rho, torch.zeros_like(rho))


def rejection_mask(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    divergence: Divergence = "k1",
    level: Level = "token",
    low: float = -torch.inf,
    high: float = torch.inf,
    rollouts: Rollouts | None = None,
) -> torch.Tensor:
    """1 where the divergence lies in [low, high], else 0; 0 off the mask. Every level but "token" needs `rollouts`.

    Raises `ValueError` for a level without its rollouts, and where the batch lacks a part of one.
    """
    for name, choice, choices in (("divergence", divergence, Divergence), ("level", level, Level)):
        if choice not in get_args(choices):
            raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {choice!r}")
    log_rho = _log_rho(train_log_probs, rollout_log_probs, mask)
    if divergence == "k1":
        value = -log_rho
    elif divergence == "k2":
        value = log_rho**2 / 2
    else:
        value = log_rho.clamp(-MAX_LOG, MAX_LOG).exp() - 1 - log_rho
    if level != "token":
        if rollouts is None:
            raise ValueError(f"level {level!r} is over a rollout's tokens: give its rollouts")
        value = getattr(rollouts, level)(value, mask)
    return ((mask > 0) & (value >= low) & (value <= high)).to(mask.dtype)


def _log_rho(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    log_rho = train.detach() - rollout.detach()
    return torch.where(mask > 0, log_rho, torch.zeros_like(log_rho))
