"""Where the rows of a batch belong, how much a batch holds, and what a token weighs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from rollout_reassembler.algorithms import advantages, aggregate, clipped_loss
from rollout_reassembler.contract.errors import ContractError
from rollout_reassembler.contract.messages import KVBatchMeta
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.trainer.rows import iter_batches, read_votes
from tests.captures import CANONICAL, MadeRollout, chain, finalize, memory_plane, stage
from tests.trainer.test_rows import PAD, batches, put_row


@pytest.fixture
def lengths_1_to_5() -> tuple[MemoryDataPlane, list[str]]:
    plane = memory_plane()
    for length in range(1, 6):
        put_row(plane, f"r{length}", list(range(1, length + 1)))
    return plane, [f"r{length}" for length in range(1, 6)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": 2}, [["r1", "r2"], ["r3", "r4"], ["r5"]]),
        ({"max_tokens": 6, "layout": "packed"}, [["r1", "r2", "r3"], ["r4"], ["r5"]]),
        ({"max_tokens": 6}, [["r1", "r2"], ["r3"], ["r4"], ["r5"]]),
        ({"max_tokens": 9}, [["r1", "r2", "r3"], ["r4"], ["r5"]]),
        ({"max_tokens": 100, "batch_size": 4}, [["r1", "r2", "r3", "r4"], ["r5"]]),
        ({"max_tokens": 9, "batch_size": 2}, [["r1", "r2"], ["r3", "r4"], ["r5"]]),
        ({"max_tokens": 25}, [["r1", "r2", "r3", "r4", "r5"]]),
    ],
    ids=str,
)
def test_a_batch_holds_as_much_as_it_may(
    lengths_1_to_5: tuple[MemoryDataPlane, list[str]], options: dict[str, Any], expected: list[list[str]]
) -> None:
    plane, ids = lengths_1_to_5
    made = list(iter_batches(plane, ids, CANONICAL, pad_token_id=PAD, **options))
    assert [batch.sample_ids for batch in made] == expected
    assert all(batch.input_ids.numel() <= options.get("max_tokens", 10**9) for batch in made)


def test_a_row_beyond_the_budget_is_named(lengths_1_to_5: tuple[MemoryDataPlane, list[str]]) -> None:
    plane, ids = lengths_1_to_5
    with pytest.raises(ValueError, match="row 'r5' has 5 tokens, more than max_tokens=4"):
        list(iter_batches(plane, ids, CANONICAL, max_tokens=4, pad_token_id=PAD))


def two_groups() -> tuple[MemoryDataPlane, list[KVBatchMeta]]:
    """Group a: rewards 1, 0; group b: rewards 3, a lost rollout, 5. Both begin with the same prompt."""
    plane = memory_plane()
    metas = []
    for name, rewards in (("a", [1.0, 0.0]), ("b", [3.0, 4.0, 5.0])):
        rollouts = [chain(f"{name}{index}", seed=1, weight_version=7) for index in range(len(rewards))]
        stage(plane, *rollouts)
        receipts = [made.receipt() for made in rollouts]
        if name == "b":
            receipts[1] = None
        metas.append(finalize(plane, rollouts, group_id=name, receipts=receipts, rewards=rewards).meta)
    return plane, metas


def test_rows_of_several_groups_say_where_they_belong() -> None:
    plane, metas = two_groups()
    made = list(iter_batches(plane, metas, batch_size=2, pad_token_id=PAD))
    assert [batch.group_index.tolist() for batch in made] == [[0, 0], [1, 1], [1]]
    assert [batch.rollout_index.tolist() for batch in made] == [[0, 1], [2, 3], [4]]
    assert [batch.row_number.tolist() for batch in made] == [[0, 1], [2, 3], [4]]
    assert [batch.weight_version.tolist() for batch in made] == [[7, 7], [7, 7], [7]]
    assert [batch.may_vote.tolist() for batch in made] == [[True, True], [True, False], [True]]


def test_votes_are_those_of_the_iteration() -> None:
    plane, metas = two_groups()
    votes = read_votes(plane, metas)
    assert votes.rewards.tolist() == [1, 0, 3, 4, 5]
    assert votes.group_index.tolist() == [0, 0, 1, 1, 1]
    assert votes.rollout_index.tolist() == [0, 1, 2, 3, 4]
    assert votes.may_vote.tolist() == [True, True, True, False, True]
    advantage = advantages(*votes[:3], may_vote=votes.may_vote, estimator="dr_grpo")
    assert advantage.tolist() == [0.5, -0.5, -1, 0, 1]
    assert [len(part) for part in read_votes(plane, [], CANONICAL)] == [0, 0, 0, 0]


def test_siblings_are_told_by_their_group_and_not_by_their_prompts() -> None:
    """Four of one group whose prompts end in other tokens, and another group that begins with one of them."""
    plane, metas = memory_plane(), []
    for name, ends in (("a", [0, 1, 2, 3]), ("b", [0, 0])):
        rollouts = [MadeRollout(f"{name}{index}") for index in range(len(ends))]
        for made, end in zip(rollouts, ends, strict=True):
            made.call([10, 20 + end], [5])
        stage(plane, *rollouts)
        rewards = [1.0, 1.0, 0.0, 0.0][: len(ends)]
        metas.append(finalize(plane, rollouts, group_id=name, rewards=rewards).meta)
    votes = read_votes(plane, metas)
    advantage = advantages(*votes[:3], may_vote=votes.may_vote, estimator="dr_grpo")
    assert advantage.tolist() == [0.5, 0.5, -0.5, -0.5, 0, 0]


def test_rows_of_one_rollout_are_told_by_their_tags() -> None:
    plane = memory_plane()
    put_row(plane, "s0", [1, 2, 3], tags={"group_id": "g", "rollout": "r", "rollout_tokens": 5})
    put_row(plane, "s1", [1, 2, 3, 4], tags={"group_id": "g", "rollout": "r", "rollout_tokens": 5})
    put_row(plane, "s2", [1, 2], tags={"group_id": "h", "rollout": "r", "rollout_tokens": 1})
    for layout in ("padded", "packed"):
        (batch,) = batches(plane, "s0", "s1", "s2", loss_weight="rollout", layout=layout)
        assert batch.rollout_index.tolist() == [0, 0, 1]
        assert batch.rollout_tokens.tolist() == [5, 5, 1]
        sums = torch.zeros(2).index_add(0, batch.spread(batch.rollout_index).flatten(), batch.loss_weight.flatten())
        assert sums.tolist() == pytest.approx([1.0, 1.0])
        assert batch.rollouts.sum(batch.token_mask, batch.token_mask)[batch.token_mask > 0].tolist() == [5.0] * 5 + [
            1.0
        ]
    (plain,) = batches(plane, "s0", "s1", "s2")
    assert torch.equal(plain.loss_weight, plain.token_mask)
    (alone,) = batches(plane, "s0")
    with pytest.raises(ValueError, match="rollout 0 owns 5 tokens and 2 of them are here"):
        alone.rollouts.sum(alone.token_mask, alone.token_mask)


def test_spans_give_a_version_a_token() -> None:
    plane, made = memory_plane(), chain("r", turns=1)
    made.call([5], [6, 7], parent=made.calls[0], weight_version=9)
    stage(plane, made)
    group = finalize(plane, [made, chain("lost")], receipts=[made.receipt(), None])
    (batch,) = iter_batches(plane, group.meta, batch_size=8, pad_token_id=PAD, spans=True)
    assert batch.spans is not None
    assert batch.spans[1] is None
    assert batch.token_weight_version is not None
    assert batch.token_weight_version.tolist() == [[1] * 8 + [9] * 3, [-1] * 11]
    (batch,) = iter_batches(plane, group.meta, batch_size=8, pad_token_id=PAD)
    assert batch.spans is batch.token_weight_version is None


def test_spans_of_another_row_are_refused() -> None:
    plane, made = memory_plane(), chain("r")
    stage(plane, made)
    group = finalize(plane, [made])
    spans = plane.get_data(group.meta)["spans"][0]
    put_row(plane, "other", [1, 2, 3], spans=spans)
    with pytest.raises(ContractError, match="row 'other' has 3 tokens, its spans hold 18"):
        batches(plane, "other", spans=True)


def test_a_batch_moves_as_a_whole() -> None:
    plane, metas = two_groups()
    (batch,) = iter_batches(plane, metas, batch_size=8, pad_token_id=PAD)
    moved = batch.to("meta")
    tensors = [v for v in vars(moved).values() if isinstance(v, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.sample_ids == batch.sample_ids


def test_metas_of_two_partitions_or_a_row_named_twice_are_refused() -> None:
    plane, metas = two_groups()
    other = dataclasses.replace(metas[1], partition_id="other")
    with pytest.raises(ValueError, match="rows of one iteration are of one partition, got 'canonical', 'other'"):
        iter_batches(plane, [metas[0], other], batch_size=1, pad_token_id=PAD)
    with pytest.raises(ValueError, match="row 'a_g0' is named twice"):
        iter_batches(plane, [metas[0], metas[0]], batch_size=1, pad_token_id=PAD)


def test_a_training_step_from_groups_to_a_gradient() -> None:
    plane, metas = two_groups()
    votes = read_votes(plane, metas)
    advantage = torch.from_numpy(advantages(*votes[:3], may_vote=votes.may_vote))
    policy = torch.nn.Embedding(1000, 1)
    for batch in iter_batches(plane, metas, max_tokens=40, pad_token_id=PAD, layout="packed"):
        log_probs = torch.nn.functional.logsigmoid(policy(batch.input_ids))[:, 0]
        losses = clipped_loss(log_probs, batch.generation_logprobs, batch.spread(advantage[batch.row_number]))
        aggregate(losses, batch.token_mask, "token", denominator=float(np.sum(votes.may_vote))).backward()
    assert policy.weight.grad is not None
    assert torch.isfinite(policy.weight.grad).all()
    assert policy.weight.grad.any()
