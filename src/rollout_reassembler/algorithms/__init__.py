"""From proven rows to a gradient: who votes, what a vote is worth, and what each token's loss is.

    advantages.py    rewards [R] of whole groups  →  advantages [R], one vote a rollout
    losses.py        log probabilities, advantages  →  a loss a token
    corrections.py   trainer against engine: weights and masks a token
    aggregation.py   a loss a token  →  one number, by token, sequence, rollout or a constant
    staleness.py     how old the policy was that sampled each token

Rows are those of a `TrainBatch`. Three rules hold everywhere: a rollout has one vote however many rows
it was cut into, whoever is masked does not vote, and a token counts only where its mask is 1. Shapes:
`[R]` is rows, "tokens" is `[B, S]` or `[sum T]`, whichever layout the batch has.
"""

from rollout_reassembler.algorithms.advantages import Estimator, advantages, informative_groups
from rollout_reassembler.algorithms.aggregation import Aggregation, aggregate
from rollout_reassembler.algorithms.corrections import (
    Divergence,
    Level,
    icepop_weights,
    rejection_mask,
    truncated_weights,
)
from rollout_reassembler.algorithms.losses import (
    aipo_loss,
    cispo_loss,
    clipped_loss,
    decoupled_loss,
    gspo_loss,
)
from rollout_reassembler.algorithms.rollouts import Rollouts
from rollout_reassembler.algorithms.staleness import staleness, token_weight_versions

__all__ = [
    "Aggregation",
    "Divergence",
    "Estimator",
    "Level",
    "Rollouts",
    "advantages",
    "aggregate",
    "aipo_loss",
    "cispo_loss",
    "clipped_loss",
    "decoupled_loss",
    "gspo_loss",
    "icepop_weights",
    "informative_groups",
    "rejection_mask",
    "staleness",
    "token_weight_versions",
    "truncated_weights",
]
