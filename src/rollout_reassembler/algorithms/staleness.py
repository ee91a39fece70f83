"""How many updates old the policy was that sampled each token.

    versions = token_weight_versions([(0, 5, 7), (5, 9, 8)], length=9)     # int64 [9]: 7 7 7 7 7 8 8 8 8
    staleness(versions, current=9)                                        # int64 [9]: 2 2 2 2 2 1 1 1 1

A rollout that was going on while weights changed has several versions; an average over the row, or its oldest,
says less than its tokens do. A token that nobody sampled keeps the version of the call that carried it.
Source: AReaL, arXiv 2505.24298.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Versions = npt.NDArray[np.int64]


def token_weight_versions(spans: Iterable[tuple[int, int, int]], *, length: int) -> Versions:
    """The weight version of each token, int64 `[length]`, from `(start, end, weight_version)` spans.

    Raises `ValueError` unless the spans cover the row from 0 to `length` in order, without gaps.
    """
    starts, ends, versions = np.array([*spans], np.int64).reshape(-1, 3).T
    if not np.array_equal(starts, np.concatenate([[0], ends[:-1]])[: len(starts)]) or (ends < starts).any():
        raise ValueError("spans must follow one another from token 0 on, without gaps")
    if (int(ends[-1]) if len(ends) else 0) != length:
        raise ValueError(f"spans cover {int(ends[-1]) if len(ends) else 0} tokens of {length}")
    return np.repeat(versions, ends - starts)


def staleness(weight_versions: npt.ArrayLike, *, current: int) -> Versions:
    """`current` minus each token's version, any shape. Raises `ValueError` for a version that is yet to come."""
    versions = np.asarray(weight_versions, np.int64)
    if versions.size and int(versions.max()) > current:
        raise ValueError(f"a token of weight version {int(versions.max())} cannot be older than version {current}")
    return current - versions
