"""What crosses a process boundary: requests to a reassembler actor and its answers.

All of these are frozen dataclasses of metadata: ids, numbers, receipts, keys. Tokens, arrays and
bytes never appear in them (`assert_metadata_only` holds that on both sides of the call); rows
travel through the data plane, and an answer only names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollout_reassembler.contract.bounds import DEFAULT_BOUNDS, ReceiptBounds
from rollout_reassembler.contract.settings import Branches, RouteMode, checked_settings


@dataclass(frozen=True)
class KVBatchMeta:
    """Names of rows in a partition: what a consumer needs to read them, without the rows."""

    partition_id: str
    task_name: str | None = None
    sample_ids: list[str] = field(default_factory=list)
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class ReassemblyRequest:
    """One prompt group to finalize. Produced by the rollout driver, consumed by an actor.

    The tuples are parallel: entry `i` of each belongs to rollout `i`. A receipt is the plain dict of
    a `RolloutReceipt`, or `None` when it was lost. `mask_sample` and `truncated` may be left out per
    group (`None`): no row is masked, and a row is truncated when it fills `max_seq_len`. `staged_on` is
    the plane's `epoch()` as it was before the group's first rollout: keep it with the request, and do not read it
    anew when you send the request again. `accept_lost` gives up rows that went with a plane (`PlaneLost`).
    """

    group_id: str
    rollout_ids: tuple[str, ...]
    canonical_sample_ids: tuple[str, ...] | None
    receipts: tuple[Mapping[str, Any] | None, ...]
    rewards: tuple[float | None, ...]
    fallback_weight_version: int
    prompt_idx: int
    mask_sample: tuple[bool, ...] | bool | None = None
    loss_multiplier: float = 1.0
    truncated: tuple[bool, ...] | None = None
    staged_on: str | None = None
    accept_lost: bool = False
    branches: Branches | None = None


@dataclass(frozen=True)
class RefusedReceipt:
    """What crosses in place of a receipt that may not: why, for people. Its rollout is rejected (`invalid_receipt`)."""

    detail: str


@dataclass(frozen=True)
class FinalizedGroup:
    """The answer to a request: which rows were published and what became of each rollout.

    `metrics` are plain numbers by name. `rejections` maps a rejected rollout's id to its reason.
    `staging_keys` are the staged rows that were proven to be the group's own, by their keys in the staging
    partition (places, see `staging/places.py`), to be cleared once it is published; `cleanup_pending` are
    those that may still be there (none on a good day), and `to_collect` the rejected rollouts, whose rows a
    collection finds and clears (`RolloutReassembler.collect_lost`; actors do it by themselves). `timings` are
    milliseconds a phase; they tell of one run, so they take no part in comparing answers. `rows_by_rollout` says how
    many rows each rollout has, in the order of the request: one, unless the request was for all branches.
    """

    meta: KVBatchMeta
    group_min_wv: int
    group_max_wv: int
    staging_keys: tuple[str, ...] = ()
    canonical_output_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    dropped: bool = False
    drop_reason: str | None = None
    valid_row_count: int = 0
    total_row_count: int = 0
    rejections: dict[str, str] = field(default_factory=dict)
    cleanup_pending: tuple[str, ...] = ()
    to_collect: tuple[str, ...] = ()
    timings: dict[str, float] = field(default_factory=dict, compare=False)
    rows_by_rollout: tuple[int, ...] = ()


@dataclass(frozen=True)
class FailedGroup:
    """What stands in a group's place when it failed and its caller wants the others (`on_error="yield"`).

    `error` is what would have been raised; nothing of the group is lost, and asking again is safe.
    """

    group_id: str
    error: Exception


@dataclass(frozen=True)
class RolloutReassemblerActorConfig:
    """What every actor of a pool reassembles, and where to.

    `model_shape` is the policy's `(routed layers, experts a token)`, by which routes of another shape are told
    from right ones where a group alone cannot tell. `branches` is `"terminal"`, one row a rollout, or `"all"`, one a
    chain of its conversation; a request may say otherwise.
    `bounds` says how large a receipt, and a request as a whole, may be. Raises `ValueError` for a setting that
    cannot be, naming it.
    """

    partition_id: str
    staging_partition: str
    pad_token_id: int
    router_replay_enabled: bool = False
    defer_routed_experts_to_policy: bool = False
    max_seq_len: int | None = None
    model_shape: tuple[int, int] | None = None
    bounds: ReceiptBounds = DEFAULT_BOUNDS
    branches: Branches = "terminal"

    def __post_init__(self) -> None:
        settings = {name: value for name, value in self.settings().items() if name != "model_shape"}
        for name, value in checked_settings(**settings).items():
            object.__setattr__(self, name, value)

    @property
    def route_mode(self) -> RouteMode:
        return RouteMode.of(self.router_replay_enabled, self.defer_routed_experts_to_policy)

    def settings(self) -> dict[str, Any]:
        """By name, as `RolloutReassembler` takes them."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}
