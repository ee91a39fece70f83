"""Proof → canonical row: what a trainer reads, one row a rollout, whatever became of the rollout.

A rollout that was proven becomes a row with its tokens; a rejected one becomes a *placeholder*: a
single pad token that is masked everywhere and carries no weight, so that a group always has its N
rows, each under its own sample id, and rewards never shift. Rows stay jagged; whoever trains pads.

    valid         input_ids = the chain's tokens [T]   token_mask [T]     sample_mask = loss_multiplier
    placeholder   input_ids = [pad]                    token_mask = [0]   sample_mask = 0, mask_sample

A masked row (`mask_sample`) keeps its tokens and reward; it is up to the trainer not to let it vote.
Placeholders are masked as well, whatever the request says, so that one flag tells who votes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_reassembler.contract.call_info import CallInfo, FinishReason
from rollout_reassembler.contract.digests import Floats, Integers
from rollout_reassembler.contract.settings import Branches
from rollout_reassembler.data_plane.base import FieldSpec, RowStore, Schema
from rollout_reassembler.reassembly.route_plan import RoutePlan
from rollout_reassembler.reassembly.routes import sentinel_routes

ROUTES_FIELD = "routed_experts"
SPANS_FIELD = "spans"

ROLLOUT_TAG = "rollout"
SEGMENT_TAG = "segment"
SEGMENTS_TAG = "segments"
ROLLOUT_TOKENS_TAG = "rollout_tokens"
"""Tags of a row that may be one of several of its rollout: whose it is, which of how many, owned tokens of all."""

CANONICAL_SCHEMA: Schema = {
    "input_ids": FieldSpec("int64", 1),
    "input_lengths": FieldSpec("int64"),
    "token_mask": FieldSpec("float32", 1),
    "generation_logprobs": FieldSpec("float32", 1),
    "sample_mask": FieldSpec("float32"),
    "prompt_ids_for_adv": FieldSpec("int64", 1),
    "total_reward": FieldSpec("float32"),
    "mask_sample": FieldSpec("bool"),
    "truncated": FieldSpec("bool"),
    SPANS_FIELD: FieldSpec("bytes"),
}
ROUTES_SCHEMA: Schema = {ROUTES_FIELD: FieldSpec("int16", 3)}

Routes = npt.NDArray[np.int16]


def canonical_schema(*, with_routes: bool) -> Schema:
    """The columns of the canonical partition; with routes where they are assembled before publication."""
    return {**CANONICAL_SCHEMA, **ROUTES_SCHEMA} if with_routes else CANONICAL_SCHEMA


def register_canonical_partition(dp_client: RowStore, partition_id: str, *, with_routes: bool = False) -> None:
    """Create the canonical partition; doing it again changes nothing."""
    dp_client.register_partition(partition_id, canonical_schema(with_routes=with_routes))


@dataclass(frozen=True, eq=False)
class FinalizedRollout:
    """What became of one rollout, before publication.

    `token_ids` int64 `[T]`, `token_mask` and `logprobs` float32 `[T]`, `routed_experts` int16
    `[T, L, K]` in direct mode. A rejected rollout has empty columns and a `rejection_reason`.
    `staging_keys` are the places of the rows that were read and proven to be this rollout's own, `missing_keys`
    those that its receipt names and that are not there. `min_wv` and `max_wv` span the calls that are
    trained. `spans` is the row's proof (`spans.py`), no bytes where there is none.
    Of a rollout with several rows each is one of these: `segment` of `segments`; the keys are those of the first,
    `sampled_tokens`, `trained_tokens` and `dropped` (calls that were not proven, by code) are of the whole rollout.
    `older_calls` counts trained calls with a weight version before their parent's.
    `info_places`, `call_infos` and `owned_calls` are one a call of the chain: where its extras say something of it,
    what they say, whether the row trains it (`call_infos.py`); empty where no call says anything.
    """

    rollout_id: str
    valid: bool
    rejection_reason: str | None
    token_ids: Integers
    token_mask: Floats
    logprobs: Floats
    prompt_len: int
    reward: float
    staging_keys: tuple[str, ...]
    min_wv: int | None = None
    max_wv: int | None = None
    routed_experts: Routes | None = None
    route_plan: RoutePlan | None = None
    calls: int = 0
    generated_tokens: int = 0
    rejection_detail: str = ""
    spans: bytes = b""
    missing_keys: tuple[str, ...] = ()
    segment: int = 0
    segments: int = 1
    sampled_tokens: int = 0
    trained_tokens: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    older_calls: int = 0
    info_places: tuple[str | None, ...] = ()
    call_infos: tuple[CallInfo | None, ...] = ()
    owned_calls: tuple[bool, ...] = ()

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the row's last call ended, where that is known."""
        last = self.call_infos[-1] if self.call_infos else None
        return last.finish_reason if last is not None else None


def rejected(
    rollout_id: str,
    reason: str,
    detail: str = "",
    *,
    reward: float = 0.0,
    staging_keys: tuple[str, ...] = (),
    missing_keys: tuple[str, ...] = (),
) -> FinalizedRollout:
    """A rollout that will be a placeholder."""
    return FinalizedRollout(
        rollout_id=rollout_id,
        valid=False,
        rejection_reason=reason,
        token_ids=np.empty(0, np.int64),
        token_mask=np.empty(0, np.float32),
        logprobs=np.empty(0, np.float32),
        prompt_len=0,
        reward=reward,
        staging_keys=staging_keys,
        rejection_detail=detail,
        missing_keys=missing_keys,
    )


def canonical_columns(
    rollouts: Sequence[FinalizedRollout],
    *,
    pad_token_id: int,
    loss_multiplier: float,
    mask_sample: Sequence[bool],
    truncated: Sequence[bool | None],
    max_seq_len: int | None,
    with_routes: bool,
) -> dict[str, Any]:
    """The group's rows as columns, one entry a rollout, in the order of `rollouts`.

    `truncated` holds what the request says of each rollout; where it says nothing (`None`), a row is
    truncated when its last call ended for its length, or, where nobody says how it ended, when it fills
    `max_seq_len`.
    """
    pad = np.array([pad_token_id], np.int64)
    zero = np.zeros(1, np.float32)
    prompts = [rollout.token_ids[: rollout.prompt_len] for rollout in rollouts if rollout.valid]
    prompt_for_placeholders = prompts[0] if prompts else pad
    valid = np.array([rollout.valid for rollout in rollouts], bool)
    lengths = np.array([len(rollout.token_ids) if rollout.valid else 1 for rollout in rollouts], np.int64)
    columns: dict[str, Any] = {
        "input_ids": [r.token_ids if r.valid else pad for r in rollouts],
        "input_lengths": lengths,
        "token_mask": [r.token_mask if r.valid else zero for r in rollouts],
        "generation_logprobs": [r.logprobs if r.valid else zero for r in rollouts],
        "sample_mask": np.where(valid, np.float32(loss_multiplier), np.float32(0)),
        "prompt_ids_for_adv": [r.token_ids[: r.prompt_len] if r.valid else prompt_for_placeholders for r in rollouts],
        "total_reward": np.array([r.reward for r in rollouts], np.float32),
        "mask_sample": np.array(mask_sample, bool) | ~valid,
        "truncated": np.array(
            [
                said if said is not None else r.valid and _is_truncated(r, max_seq_len)
                for said, r in zip(truncated, rollouts, strict=True)
            ],
            bool,
        ),
        SPANS_FIELD: [r.spans for r in rollouts],
    }
    if with_routes:
        shapes = [r.routed_experts.shape[1:] for r in rollouts if r.routed_experts is not None]
        layers, topk = max(shapes, default=(0, 0))
        columns[ROUTES_FIELD] = [
            r.routed_experts if r.routed_experts is not None else sentinel_routes(int(length), (layers, topk))
            for r, length in zip(rollouts, lengths, strict=True)
        ]
    return columns


def _is_truncated(row: FinalizedRollout, max_seq_len: int | None) -> bool:
    if row.finish_reason is not None:
        return row.finish_reason == "length"
    return max_seq_len is not None and len(row.token_ids) >= max_seq_len


def sample_ids_of(
    given: Sequence[str], by_rollout: Sequence[Sequence[FinalizedRollout]], branches: Branches
) -> list[str]:
    """The rows' ids: those of their rollouts, or with all branches `"{id}_s{segment}"`."""
    if branches == "terminal":
        return list(given)
    return [f"{name}_s{j}" for name, rows in zip(given, by_rollout, strict=True) for j in range(len(rows))]


def by_row(values: Sequence[Any], by_rollout: Sequence[Sequence[FinalizedRollout]]) -> list[Any]:
    """What is said of each rollout, once for each of its rows."""
    return [value for value, rows in zip(values, by_rollout, strict=True) for _ in rows]


def segment_tags(row: FinalizedRollout, branches: Branches) -> dict[str, Any]:
    """Whose row it is, and which of how many: what a trainer needs to give a rollout one vote and one weight."""
    if branches == "terminal":
        return {}
    return {
        ROLLOUT_TAG: row.rollout_id,
        SEGMENT_TAG: row.segment,
        SEGMENTS_TAG: row.segments,
        ROLLOUT_TOKENS_TAG: row.trained_tokens,
    }
