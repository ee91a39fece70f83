"""What a reassembler is set to, checked where it is set: in an actor's config as in `RolloutReassembler`.

Each setting decides every row of a run, so one that cannot be is refused at construction with its name, not found
out at the first group. What must stay true: what passes here fits the columns that it will be written to.
"""

from __future__ import annotations

import operator
from enum import StrEnum
from typing import Any, Literal, get_args

from rollout_reassembler.contract.bounds import ReceiptBounds
from rollout_reassembler.contract.text import described

_INT64 = 2**63 - 1

Branches = Literal["terminal", "all"]
"""One row a rollout, its terminal's chain; or one a kept leaf (`reassembly/branches.py`)."""

BRANCHES: tuple[Branches, ...] = get_args(Branches)


class RouteMode(StrEnum):
    """Where a row's expert routes are put together: nowhere, before it is published, or by whoever reads it.

    On the wire and in configs it is two booleans, `router_replay_enabled` and `defer_routed_experts_to_policy`.
    """

    OFF = "off"
    DIRECT = "direct"
    DEFERRED = "deferred"

    @classmethod
    def of(cls, router_replay_enabled: bool, defer_routed_experts_to_policy: bool) -> RouteMode:
        """Raises `ValueError` for routes that are deferred and not replayed."""
        if defer_routed_experts_to_policy and not router_replay_enabled:
            raise ValueError(
                "defer_routed_experts_to_policy=True needs router_replay_enabled=True: without router replay there are "
                "no routes to defer"
            )
        if not router_replay_enabled:
            return cls.OFF
        return cls.DEFERRED if defer_routed_experts_to_policy else cls.DIRECT


DEFERRED_BRANCHES = (
    "branches='all' cannot go with defer_routed_experts_to_policy=True: a staged row may hold routes of several rows, "
    "and the trainer clears it behind the first; assemble routes before publication (defer_routed_experts_to_policy="
    "False), or train the terminal's chain"
)


def checked_settings(
    *,
    partition_id: Any,
    staging_partition: Any,
    pad_token_id: Any,
    max_seq_len: Any,
    router_replay_enabled: Any,
    defer_routed_experts_to_policy: Any,
    bounds: Any,
    branches: Any,
) -> dict[str, Any]:
    """The settings as Python's own values, by name. Raises `ValueError` naming the one that cannot be."""
    for name, partition in (("partition_id", partition_id), ("staging_partition", staging_partition)):
        if not isinstance(partition, str) or not partition:
            raise ValueError(f"{name} must be a non-empty str, got {described(partition)}")
    if partition_id == staging_partition:
        raise ValueError(f"partition_id and staging_partition must differ, got {partition_id!r:.200} for both")
    mode = RouteMode.of(bool(router_replay_enabled), bool(defer_routed_experts_to_policy))
    if branches not in BRANCHES:
        raise ValueError(f"branches must be one of {', '.join(map(repr, BRANCHES))}, got {described(branches)}")
    if branches == "all" and mode is RouteMode.DEFERRED:
        raise ValueError(DEFERRED_BRANCHES)
    if not isinstance(bounds, ReceiptBounds):
        raise ValueError(f"bounds must be a ReceiptBounds, got {described(bounds)}")
    return {
        "partition_id": str(partition_id),
        "staging_partition": str(staging_partition),
        "pad_token_id": _token_id(pad_token_id),
        "max_seq_len": None if max_seq_len is None else _length(max_seq_len),
        "router_replay_enabled": bool(router_replay_enabled),
        "defer_routed_experts_to_policy": bool(defer_routed_experts_to_policy),
        "bounds": bounds,
        "branches": str(branches),
    }


def _token_id(value: Any) -> int:
    number = _whole(value)
    if number is None or not 0 <= number <= _INT64:
        raise ValueError(f"pad_token_id must be an int from 0 to 2**63 - 1, got {value!r:.80}")
    return number


def _length(value: Any) -> int:
    number = _whole(value)
    if number is None or not 1 <= number <= _INT64:
        raise ValueError(f"max_seq_len must be a positive int of tokens, or None for no limit, got {value!r:.80}")
    return number


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
