"""Rewards of whole groups → the advantage of each row: one vote a rollout, nobody masked votes.

Worked example, one group, rewards [1, 1, 0, 0], the second rollout masked. Three vote: their mean is 1/3,
their unbiased standard deviation 0.577.

    grpo      [ 1.155, 0, -0.577, -0.577]      (R - mean) / (std + epsilon)
    dr_grpo   [ 0.667, 0, -0.333, -0.333]      R - mean
    rloo      [ 1,     0, -0.5,   -0.5  ]      n / (n - 1) * (R - mean): R against the mean of the others

A rollout that was cut into several rows is one rollout: its rows say the same reward and get the same
advantage. A group is told by its index, never by equal prompts: a rollout whose context was compacted
has another prompt, and two groups may share one. A reward that nobody knows (NaN) does not vote.

Statistics are those of a group as it is given: give whole groups. `rollouts_per_group` refuses a group
of which a part is missing, as when one was split over two batches.

Sources: GRPO arXiv 2402.03300; Dr.GRPO 2503.20783; RLOO 2402.14740; DAPO's filter 2503.14476.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Estimator = Literal["grpo", "dr_grpo", "rloo"]

Rewards = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def advantages(
    rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    rollout_index: npt.ArrayLike | None = None,
    *,
    may_vote: npt.ArrayLike | None = None,
    estimator: Estimator = "grpo",
    epsilon: float = 1e-6,
    rollouts_per_group: int | None = None,
) -> npt.NDArray[np.float32]:
    """The advantage of each row, float32 `[R]`; exactly 0 for a row that does not vote.

    `rewards` `[R]`, NaN where unknown. `group_index` and `rollout_index` int `[R]`; without the latter each
    row is a rollout. `may_vote` bool `[R]`: neither masked nor a placeholder; all by default. In a group of
    fewer than two votes, or of equal rewards, every advantage is exactly 0. `epsilon` is GRPO's.

    Raises `ValueError` for shapes that differ, rows of one rollout that contradict each other, and a
    group that has not `rollouts_per_group` rollouts.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"estimator must be one of {', '.join(get_args(Estimator))}, got {estimator!r}")
    votes = _Votes.of(rewards, group_index, rollout_index, may_vote, rollouts_per_group)
    n, centered = votes.count, votes.rewards - votes.mean
    if estimator == "grpo":
        value = centered / (votes.deviation + epsilon)
    elif estimator == "rloo":
        value = centered * n / np.maximum(n - 1, 1)
    else:
        value = centered
    decided = np.where(votes.casts & votes.is_informative, value, 0.0)
    return decided[votes.rollout_of_row].astype(np.float32)


def informative_groups(
    rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    rollout_index: npt.ArrayLike | None = None,
    *,
    may_vote: npt.ArrayLike | None = None,
    rollouts_per_group: int | None = None,
) -> Flags:
    """Which rows belong to a group that teaches something, bool `[R]`: DAPO keeps these groups alone.

    Those are groups with two votes or more that are not all equal. Takes what `advantages` takes.
    """
    votes = _Votes.of(rewards, group_index, rollout_index, may_vote, rollouts_per_group)
    kept: Flags = votes.is_informative[votes.rollout_of_row]
    return kept


@dataclass(frozen=True)
class _Votes:
    """One entry a rollout in each array; the statistics are those of the rollout's group over its votes."""

    rewards: Rewards
    casts: Flags
    rollout_of_row: Indices
    count: Rewards
    mean: Rewards
    deviation: Rewards
    is_informative: Flags

    @classmethod
    def of(
        cls,
        rewards: npt.ArrayLike,
        group_index: npt.ArrayLike,
        rollout_index: npt.ArrayLike | None,
        may_vote: npt.ArrayLike | None,
        rollouts_per_group: int | None,
    ) -> _Votes:
        row_rewards = np.asarray(rewards, np.float64)
        rows = row_rewards.shape
        if len(rows) != 1:
            raise ValueError(f"rewards must be one a row, [R]; got shape {list(rows)}")
        groups = _column("group_index", group_index, rows, np.int64)
        rollouts = (
            np.arange(rows[0]) if rollout_index is None else _column("rollout_index", rollout_index, rows, np.int64)
        )
        votes = np.ones(rows, bool) if may_vote is None else _column("may_vote", may_vote, rows, np.bool_)

        _, first, rollout_of_row = np.unique(rollouts, return_index=True, return_inverse=True)
        for name, column in (("group_index", groups), ("rewards", row_rewards), ("may_vote", votes)):
            _require_one_a_rollout(name, column, column[first][rollout_of_row], rollouts)
        reward, casts = row_rewards[first], votes[first] & ~np.isnan(row_rewards[first])

        group_names, group_of = np.unique(groups[first], return_inverse=True)
        if rollouts_per_group is not None:
            _require_whole(group_names, np.bincount(group_of), rollouts_per_group)
        known = np.where(casts, reward, 0.0)
        size = len(group_names)
        count = np.bincount(group_of, casts, size).astype(np.float64)
        mean = np.bincount(group_of, known, size) / np.maximum(count, 1)
        squares = np.where(casts, (known - mean[group_of]) ** 2, 0.0)
        deviation = np.sqrt(np.bincount(group_of, squares, size) / np.maximum(count - 1, 1))
        # Told by the rewards themselves: the mean of equal ones may be off by a rounding, and 0/0 by a lot.
        low, high = np.full(size, np.inf), np.full(size, -np.inf)
        np.minimum.at(low, group_of[casts], reward[casts])
        np.maximum.at(high, group_of[casts], reward[casts])
        return cls(
            known, casts, rollout_of_row, count[group_of], mean[group_of], deviation[group_of], (low < high)[group_of]
        )


def _column(name: str, values: npt.ArrayLike, rows: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    column = np.asarray(values)
    if column.shape != rows:
        raise ValueError(f"{name} must have one entry a row, [{rows[0]}]; got shape {list(column.shape)}")
    if column.dtype.kind not in ("iu" if dtype is np.int64 else "b"):
        raise ValueError(f"{name} must be {np.dtype(dtype).name}, got {column.dtype}")
    return column.astype(dtype)


def _require_one_a_rollout(
    name: str, column: npt.NDArray[Any], said_first: npt.NDArray[Any], rollouts: Indices
) -> None:
    differs = np.flatnonzero((column != said_first) & ~((column != column) & (said_first != said_first)))
    if differs.size:
        row = int(differs[0])
        raise ValueError(
            f"rows of rollout {rollouts[row]} contradict each other: {name} is {said_first[row]} in its first row and "
            f"{column[row]} in row {row}"
        )


def _require_whole(group_names: Indices, found: Indices, expected: int) -> None:
    short = np.flatnonzero(found != expected)
    if short.size:
        which = int(short[0])
        raise ValueError(
            f"group {group_names[which]} has {found[which]} rollouts here, rollouts_per_group is {expected}: compute "
            "advantages over whole groups, before they are split into batches"
        )
