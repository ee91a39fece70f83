"""Votes and what they are worth: values by hand, and what never votes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.algorithms import Estimator, advantages, informative_groups

NAN = float("nan")
GROUP = [0, 0, 0, 0]
MASKED = [True, False, True, True]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [1.1547, 0, -0.57735, -0.57735]),
        ("dr_grpo", [2 / 3, 0, -1 / 3, -1 / 3]),
        ("rloo", [1, 0, -0.5, -0.5]),
    ],
)
def test_a_masked_rollout_does_not_vote(estimator: Estimator, expected: list[float]) -> None:
    found = advantages([1, 1, 0, 0], GROUP, may_vote=MASKED, estimator=estimator)
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [0.866024, 0.866024, -0.866024, -0.866024]),
        ("dr_grpo", [0.5, 0.5, -0.5, -0.5]),
        ("rloo", [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
    ],
)
def test_a_group_of_four(estimator: Estimator, expected: list[float]) -> None:
    assert advantages([1, 1, 0, 0], GROUP, estimator=estimator) == pytest.approx(expected, abs=1e-5)


def test_an_unknown_reward_does_not_vote() -> None:
    assert advantages([1, NAN, 0, 0], GROUP).tolist() == advantages([1, 1, 0, 0], GROUP, may_vote=MASKED).tolist()


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize(
    ("rewards", "may_vote"),
    [
        ([1 / 3] * 7, None),
        ([0.1 + 0.2] * 5, None),
        ([1e30] * 3, None),
        ([1.0, 0.0], [True, False]),
        ([1.0, 0.0], [False, False]),
        ([1.0], None),
        ([NAN, NAN], None),
        ([NAN, 3.0], None),
    ],
)
def test_without_two_different_votes_every_advantage_is_exactly_zero(
    estimator: Estimator, rewards: list[float], may_vote: list[bool] | None
) -> None:
    group = [0] * len(rewards)
    assert advantages(rewards, group, may_vote=may_vote, estimator=estimator).tolist() == [0.0] * len(rewards)
    assert not informative_groups(rewards, group, may_vote=may_vote).any()


def test_rewards_that_differ_by_a_rounding_follow_the_formula() -> None:
    rewards = np.array([1 + 2.4e-7, 1, 1, 1])
    by_hand = (rewards[0] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert advantages(rewards, GROUP)[0] == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_rollout_of_several_rows_has_one_vote(estimator: Estimator) -> None:
    whole = advantages([1, 0, 0], [0, 0, 0], estimator=estimator)
    cut = advantages([1, 1, 1, 0, 0], [0] * 5, [7, 7, 7, 3, 9], estimator=estimator)
    assert cut.tolist() == [*[whole[0]] * 3, whole[1], whole[2]]


def test_groups_are_told_by_their_index_and_may_be_interleaved() -> None:
    found = advantages([1, 5, 0, 7], [4, -2, 4, -2], estimator="dr_grpo")
    assert found.tolist() == [0.5, -1.0, -0.5, 1.0]
    assert informative_groups([1, 5, 0, 5], [4, -2, 4, -2]).tolist() == [True, False, True, False]


def test_a_group_that_was_split_is_refused() -> None:
    with pytest.raises(ValueError, match="group 1 has 2 rollouts here, rollouts_per_group is 4: compute"):
        advantages([1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1], rollouts_per_group=4)
    assert advantages([1, 0] * 4, [0] * 4 + [1] * 4, rollouts_per_group=4).shape == (8,)


def test_a_cut_rollout_counts_once_for_the_size_of_its_group() -> None:
    assert advantages([1, 1, 0], [0, 0, 0], [5, 5, 6], rollouts_per_group=2).tolist() == pytest.approx(
        [0.707106, 0.707106, -0.707106], abs=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": [1, 0], "rollout_index": [3, 3]}, "rows of rollout 3 contradict each other: rewards is 1.0"),
        (
            {"rewards": [1, 1], "rollout_index": [3, 3], "group_index": [0, 1]},
            "group_index is 0 in its first row and",
        ),
        ({"rewards": [1, 1], "rollout_index": [3, 3], "may_vote": [True, False]}, "may_vote is True in its first row"),
        ({"rewards": [1, 0], "group_index": [0]}, r"group_index must have one entry a row, \[2\]; got shape \[1\]"),
        ({"rewards": [1, 0], "group_index": ["a", "b"]}, "group_index must be int64, got <U1"),
        ({"rewards": [1, 0], "may_vote": [1, 0]}, "may_vote must be bool, got int64"),
        ({"rewards": [[1, 0]]}, r"rewards must be one a row, \[R\]; got shape \[1, 2\]"),
        ({"rewards": [1, 0], "estimator": "gae"}, "estimator must be one of grpo, dr_grpo, rloo, got 'gae'"),
    ],
)
def test_contradictions_are_named(arguments: dict[str, Any], message: str) -> None:
    given_arguments = {"group_index": [0, 0], **arguments}
    with pytest.raises(ValueError, match=message):
        advantages(given_arguments.pop("rewards"), given_arguments.pop("group_index"), **given_arguments)


def test_rows_of_a_rollout_with_an_unknown_reward_agree() -> None:
    assert advantages([NAN, NAN, 1, 0], [0] * 4, [1, 1, 2, 3], estimator="dr_grpo").tolist() == [0, 0, 0.5, -0.5]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0, NAN]), st.booleans()), min_size=1, max_size=24
    ),
    st.sampled_from(["grpo", "dr_grpo", "rloo"]),
    st.randoms(use_true_random=False),
)
def test_order_and_cuts_change_no_vote(
    rollouts: list[tuple[int, float, bool]], estimator: Estimator, random: Any
) -> None:
    group, reward, vote = (list(column) for column in zip(*rollouts, strict=True))
    plain = advantages(reward, group, may_vote=vote, estimator=estimator)
    rows = [index for index in range(len(rollouts)) for _ in range(random.randint(1, 3))]
    random.shuffle(rows)
    cut = advantages(
        [reward[i] for i in rows], [group[i] for i in rows], rows, may_vote=[vote[i] for i in rows], estimator=estimator
    )
    assert cut == pytest.approx(plain[rows], abs=1e-6)
    for index in set(group):
        members = [value for value, of in zip(plain, group, strict=True) if of == index]
        assert sum(members) == pytest.approx(0, abs=1e-4)
