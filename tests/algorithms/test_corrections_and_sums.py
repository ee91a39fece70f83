"""Trainer against engine, one number for a batch, and the age of a token."""

from __future__ import annotations

import math

import pytest
import torch

from rollout_reassembler.algorithms import (
    Aggregation,
    Rollouts,
    aggregate,
    icepop_weights,
    rejection_mask,
    staleness,
    token_weight_versions,
    truncated_weights,
)

TRAIN = torch.tensor([0.1, 1.0, -3.0, math.nan])
ENGINE = torch.zeros(4)
MASK = torch.tensor([1.0, 1.0, 1.0, 0.0])
TWO = Rollouts(torch.tensor([0, 0, 1, 1]), torch.tensor([2, 1]))


def test_truncated_weights_by_token_and_by_rollout() -> None:
    assert truncated_weights(TRAIN, ENGINE, MASK).tolist() == pytest.approx([1.10517, 2, 0.049787, 0], rel=1e-5)
    by_rollout = truncated_weights(TRAIN, ENGINE, MASK, limit=4.0, rollouts=TWO)
    assert by_rollout.tolist() == pytest.approx([math.exp(1.1), math.exp(1.1), math.exp(-3), 0], rel=1e-5)


def test_icepop_drops_what_lies_outside() -> None:
    assert icepop_weights(TRAIN, ENGINE, MASK, low=0.5, high=2.0).tolist() == pytest.approx(
        [1.10517, 0, 0, 0], rel=1e-5
    )


@pytest.mark.parametrize(
    ("divergence", "level", "high", "expected"),
    [
        ("k1", "token", 0.0, [1, 1, 0, 0]),
        ("k1", "sum", -1.0, [1, 1, 0, 0]),
        ("k2", "token", 0.4, [1, 0, 0, 0]),
        ("k2", "mean", 0.26, [1, 1, 0, 0]),
        ("k2", "mean", 0.25, [0, 0, 0, 0]),
        ("k3", "max", 0.72, [1, 1, 0, 0]),
        ("k3", "max", 0.71, [0, 0, 0, 0]),
    ],
)
def test_rejection_by_divergence_and_level(divergence: str, level: str, high: float, expected: list[int]) -> None:
    found = rejection_mask(TRAIN, ENGINE, MASK, divergence=divergence, level=level, high=high, rollouts=TWO)  # type: ignore[arg-type]
    assert found.tolist() == expected


def test_a_level_over_rollouts_needs_them_whole() -> None:
    with pytest.raises(ValueError, match="level 'sum' is over a rollout's tokens: give its rollouts"):
        rejection_mask(TRAIN, ENGINE, MASK, level="sum")
    with pytest.raises(ValueError, match="divergence must be one of k1, k2, k3, got 'kl'"):
        rejection_mask(TRAIN, ENGINE, MASK, divergence="kl")  # type: ignore[arg-type]
    part = Rollouts(TWO.index, torch.tensor([2, 4]))
    with pytest.raises(ValueError, match="rollout 1 owns 4 tokens and 1 of them are here"):
        rejection_mask(TRAIN, ENGINE, MASK, level="max", rollouts=part)


LOSS = torch.tensor([1.0, 1.0, 1.0, 3.0])
ALL = torch.ones(4)
ROWS = torch.tensor([0, 0, 0, 1])


@pytest.mark.parametrize(("how", "expected"), [("token", 1.5), ("sequence", 2.0), ("rollout", 2.0), ("constant", 0.75)])
def test_aggregations_of_the_worked_example(how: Aggregation, expected: float) -> None:
    rollouts = Rollouts(ROWS, torch.tensor([3, 1]))
    denominator = 8.0 if how == "constant" else None
    found = aggregate(LOSS, ALL, how, row_index=ROWS, rollouts=rollouts, denominator=denominator)
    assert float(found) == pytest.approx(expected)


def test_a_mean_by_row_is_refused_where_a_rollout_has_several_rows() -> None:
    one = Rollouts(torch.zeros(4, dtype=torch.int64), torch.tensor([4]))
    with pytest.raises(ValueError, match="rollout 0 has several rows, so a mean by row depends on how it was cut"):
        aggregate(LOSS, ALL, "sequence", row_index=ROWS, rollouts=one)


@pytest.mark.parametrize("how", ["token", "sequence", "rollout"])
def test_a_batch_in_which_nothing_counts_has_loss_and_gradient_zero(how: Aggregation) -> None:
    losses = torch.tensor([math.nan, 1.0, 2.0, math.inf], requires_grad=True)
    rollouts = Rollouts(ROWS, torch.tensor([0, 0]))
    found = aggregate(losses, torch.zeros(4), how, row_index=ROWS, rollouts=rollouts)
    found.backward()
    assert found.item() == 0.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [0.0] * 4


def test_a_masked_row_is_in_no_denominator() -> None:
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    rollouts = Rollouts(ROWS, torch.tensor([3, 0]))
    for how in ("token", "sequence", "rollout"):
        assert float(aggregate(LOSS, mask, how, row_index=ROWS, rollouts=rollouts)) == pytest.approx(1.0)


def test_what_an_aggregation_lacks_is_named() -> None:
    for how, message in (
        ("constant", "'constant' divides by a constant of the run: give it as denominator"),
        ("rollout", "'rollout' needs the rollouts of the batch"),
        ("sequence", "'sequence' needs the row of each token of a packed batch: give row_index"),
        ("mean", "how must be one of token, sequence, rollout, constant, got 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            aggregate(LOSS, ALL, how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"losses have shape \[4\], the mask \[3\]"):
        aggregate(LOSS, torch.ones(3))
    with pytest.raises(ValueError, match="expected index int64"):
        Rollouts(ROWS.float(), torch.tensor([3, 1]))


def test_staleness_is_by_token() -> None:
    versions = token_weight_versions([(0, 5, 7), (5, 9, 8)], length=9)
    assert versions.tolist() == [7] * 5 + [8] * 4
    assert staleness(versions, current=9).tolist() == [2] * 5 + [1] * 4
    assert token_weight_versions([], length=0).tolist() == []


@pytest.mark.parametrize(
    ("spans", "length", "message"),
    [
        ([(0, 5, 7), (6, 9, 8)], 9, "spans must follow one another from token 0 on, without gaps"),
        ([(1, 5, 7)], 5, "spans must follow one another"),
        ([(0, 5, 7)], 9, "spans cover 5 tokens of 9"),
        ([], 3, "spans cover 0 tokens of 3"),
    ],
)
def test_spans_that_do_not_cover_their_row_are_refused(
    spans: list[tuple[int, int, int]], length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        token_weight_versions(spans, length=length)


def test_a_version_that_is_yet_to_come_is_refused() -> None:
    with pytest.raises(ValueError, match="a token of weight version 8 cannot be older than version 7"):
        staleness([7, 8], current=7)
