"""A batch of rows that were cut from branching rollouts has the gradient of its sampled tokens, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rollout_reassembler import iter_batches
from rollout_reassembler.algorithms import aggregate
from rollout_reassembler.demo.policy import DemoPolicy
from tests.captures import MadeRollout, finalize, memory_plane, stage

REWARDS = [1.0, -0.5, 0.25]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """The demo's model, in binary64 so that what differs is not the rounding of a sum."""
    made = DemoPolicy(0).model
    made.set_experts_implementation("eager")  # grouped products are for narrower floats
    return made.double()


def _rollouts(vocab_size: int) -> list[MadeRollout]:
    """A chain; a forest with a sub-agent, a fork and a compaction; and one with three roots."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> Sequence[int]:
        return rng.integers(10, vocab_size, count).tolist()

    plain, forest, roots = MadeRollout("plain"), MadeRollout("forest"), MadeRollout("roots")
    parent = None
    for _ in range(3):
        parent = plain.call(ids(4), ids(5), parent=parent)
    first = forest.call(ids(6), ids(4))
    forest.call(ids(5), ids(3))
    forest.call(ids(2), ids(6), parent=first)
    second = forest.call(ids(3), ids(2), parent=first)
    forest.call(ids(1), ids(7), parent=second)
    forest.call(ids(9), ids(2))
    for _ in range(3):
        roots.call(ids(3), ids(4))
    return [plain, forest, roots]


def _gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def _log_probs(model: torch.nn.Module, token_ids: torch.Tensor, attention: torch.Tensor | None = None) -> torch.Tensor:
    """Of each token behind those before it, `[B, S]`; 0 for the first."""
    logits = model(input_ids=token_ids, attention_mask=attention).logits[:, :-1]
    behind = torch.log_softmax(logits, -1).gather(-1, token_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(behind, (1, 0))


def _reference(model: torch.nn.Module, rollouts: Sequence[MadeRollout], advantages: Sequence[float]) -> torch.Tensor:
    """Each call alone behind its own prompt, each sampled token once, each rollout weighing 1."""
    model.zero_grad()
    for made, advantage in zip(rollouts, advantages, strict=True):
        sampled = sum(int(call.token_mask_delta.sum()) for call in made.calls)
        for call in made.calls:
            token_ids = torch.tensor(made.tokens(call))[None]
            mask = torch.zeros(token_ids.shape[1], dtype=torch.float64)
            mask[call.prev_len :] = torch.tensor(call.token_mask_delta.copy())
            for at in mask.nonzero()[:, 0].tolist():
                loss = -advantage * _log_probs(model, token_ids)[0, at] / (sampled * len(rollouts))
                loss.backward()
    return _gradient(model)


@pytest.mark.parametrize("batch_size", [2, 16])
def test_the_gradient_of_a_branched_batch_is_that_of_its_tokens_one_by_one(
    model: torch.nn.Module, batch_size: int
) -> None:
    rollouts = _rollouts(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    expected = _reference(model, rollouts, REWARDS)
    plane = memory_plane()
    stage(plane, *rollouts)
    group = finalize(plane, rollouts, rewards=REWARDS, branches="all")
    assert group.rows_by_rollout == (1, 4, 3)
    model.zero_grad()
    batches = iter_batches(plane, group.meta, batch_size=batch_size, pad_token_id=0, loss_weight="rollout")
    for batch in batches:
        log_probs = _log_probs(model, batch.input_ids, batch.attention_mask)
        losses = -batch.spread(batch.total_reward) * log_probs * batch.loss_weight.double()
        aggregate(losses, batch.token_mask, "constant", denominator=float(len(rollouts))).backward()
    found = _gradient(model)
    assert torch.count_nonzero(expected) > 1_000
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6
