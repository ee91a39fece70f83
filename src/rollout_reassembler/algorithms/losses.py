"""Log probabilities and advantages → a loss a token, before it is weighted and added up.

Every function takes tensors of one shape ("tokens": `[B, S]` or `[sum T]`) and gives another of it; the
advantage of a token is that of its row. Gradients flow through `log_probs` alone. What stands where the mask
is 0 is never used; `aggregate` leaves it out.

    clipped_loss     PPO / GRPO (one epsilon), DAPO (two), dual clip         arXiv 1707.06347, 2503.14476, 1912.09729
    cispo_loss       -sg(clip(r)) A log pi                                   2506.13585
    gspo_loss        the ratio of a whole rollout, clipped                   2507.18071
    decoupled_loss   clipped against a proximal policy, weighted by it       2505.24298
    aipo_loss        -sg(min(pi / mu, rho_max)) A log pi                     2505.24034

r = pi_theta / pi_old; sg is "stop gradient". With A = 1, r = 1.5 and clip 0.2 the clipped loss is -1.2 and
has no gradient; with A = -1 it is 1.5 and has one.
"""

from __future__ import annotations

import torch

from rollout_reassembler.algorithms.rollouts import MAX_LOG, Rollouts


def clipped_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) a token.

    `dual_clip`, above 1, bounds the loss of a token with a negative advantage at `-A * dual_clip`.
    """
    return _clipped(_ratio(log_probs, old_log_probs), advantages, clip_low, clip_high, dual_clip)


def cispo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
) -> torch.Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi a token: clipped tokens keep a gradient.

    The paper bounds the ratio from above alone: `clip_low` 1 is no bound.
    """
    weight = _ratio(log_probs, old_log_probs).detach().clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * log_probs


def gspo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    rollouts: Rollouts,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> torch.Tensor:
    """The clipped loss with s = exp(mean log r) of the token's rollout as its ratio.

    The value is that of the rollout, the gradient that of the token (GSPO-token). Raises `ValueError` when
    the batch lacks a part of a rollout.
    """
    log_ratio = log_probs.detach() - old_log_probs.detach()
    of_rollout = rollouts.mean(log_ratio, mask).clamp(-MAX_LOG, MAX_LOG)
    ratio = (of_rollout + log_probs - log_probs.detach()).exp()
    return _clipped(ratio, advantages, clip_low, clip_high, None)


def decoupled_loss(
    log_probs: torch.Tensor,
    proximal_log_probs: torch.Tensor,
    behavior_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_weight: float | None = None,
) -> torch.Tensor:
    """pi_prox / pi_behave times the clipped loss against pi_prox, a token.

    `max_weight` truncates that weight. Where tokens are rejected by it, the denominator of the mean still
    counts them: reject by `rejection_mask` on the loss, and aggregate over the mask from before.
    """
    weight = _ratio(proximal_log_probs, behavior_log_probs).detach()
    if max_weight is not None:
        weight = weight.clamp(max=max_weight)
    return weight * _clipped(_ratio(log_probs, proximal_log_probs), advantages, clip_low, clip_high, None)


def aipo_loss(
    log_probs: torch.Tensor, behavior_log_probs: torch.Tensor, advantages: torch.Tensor, *, max_ratio: float = 2.0
) -> torch.Tensor:
    """-sg(min(pi / mu, max_ratio)) A log pi a token, mu being the policy that sampled it."""
    weight = _ratio(log_probs, behavior_log_probs).detach().clamp(max=max_ratio)
    return -weight * advantages * log_probs


def _ratio(log_probs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (log_probs - other.detach()).clamp(-MAX_LOG, MAX_LOG).exp()


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual_clip: float | None
) -> torch.Tensor:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual_clip is None:
        return loss
    if dual_clip <= 1:
        raise ValueError(f"dual_clip bounds a ratio from above 1, got {dual_clip}")
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
