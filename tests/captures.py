"""Made-up rollouts for tests: staged calls with sound digests, and receipts that fit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout_reassembler.contract.records import CallRecord, RolloutReceipt, StagedCall, seal_call
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from rollout_reassembler.reassembly.rows import register_canonical_partition
from rollout_reassembler.staging.places import is_place
from rollout_reassembler.staging.schema import register_staging_partition
from rollout_reassembler.staging.sink import StagingSink

PAD = 0
STAGING = "staging"
CANONICAL = "canonical"


@dataclass
class MadeRollout:
    """A rollout under construction: add calls, then ask for its receipt."""

    rollout_id: str
    calls: list[StagedCall] = field(default_factory=list)
    sequences: dict[str, np.ndarray] = field(default_factory=dict)

    def call(
        self,
        carry: Sequence[int],
        generated: Sequence[int],
        *,
        parent: StagedCall | None = None,
        call_id: str | None = None,
        logprobs: Sequence[float] | None = None,
        weight_version: int = 1,
        extras: dict[str, Any] | None = None,
    ) -> StagedCall:
        """One more call: `carry` tokens behind `parent` (a root for `None`), then `generated` ones."""
        prefix = self.sequences[parent.model_call_id] if parent is not None else np.empty(0, np.int64)
        ids = np.array([*carry, *generated], np.int64)
        sampled = logprobs if logprobs is not None else [-0.5 - 0.25 * (i % 1000) for i in range(len(generated))]
        call = seal_call(
            rollout_id=self.rollout_id,
            model_call_id=call_id or f"c{len(self.calls)}",
            token_ids_delta=ids,
            token_mask_delta=np.array([0.0] * len(carry) + [1.0] * len(generated), np.float32),
            generation_log_probs_delta=np.array([0.0] * len(carry) + list(sampled), np.float32),
            weight_version=weight_version,
            parent=parent,
            prefix_token_ids=prefix,
            extras=extras,
        )
        self.calls.append(call)
        self.sequences[call.model_call_id] = np.concatenate([prefix, ids])
        return call

    def receipt(self, terminal: StagedCall | None = None, **changes: Any) -> dict[str, Any]:
        """The rollout's receipt as a plain dict; `changes` replace its fields."""
        receipt = RolloutReceipt(
            rollout_id=self.rollout_id,
            terminal_model_call_id=(terminal or self.calls[-1]).model_call_id,
            terminal_selection="declared",
            manifest=[CallRecord.of(call, response_id=f"resp-{call.model_call_id}") for call in self.calls],
        ).model_dump()
        return {**receipt, **changes}

    def tokens(self, terminal: StagedCall | None = None) -> list[int]:
        return self.sequences[(terminal or self.calls[-1]).model_call_id].tolist()


def chain(rollout_id: str, turns: int = 3, *, weight_version: int = 1, seed: int = 0) -> MadeRollout:
    """A plain multi-turn rollout: a prompt of 5 tokens, then `turns` calls of 3 tokens and a tool result each."""
    rng = np.random.default_rng([seed, *rollout_id.encode()])
    made = MadeRollout(rollout_id)
    parent = None
    for turn in range(turns):
        carry = rng.integers(1, 1000, 5 if turn == 0 else 2).tolist()
        parent = made.call(carry, rng.integers(1, 1000, 3).tolist(), parent=parent, weight_version=weight_version)
    return made


def registered(plane: DataPlaneClient, *, with_routes: bool = False) -> DataPlaneClient:
    register_staging_partition(plane, STAGING)
    register_canonical_partition(plane, CANONICAL, with_routes=with_routes)
    return plane


def memory_plane(*, with_routes: bool = False) -> MemoryDataPlane:
    plane = MemoryDataPlane()
    registered(plane, with_routes=with_routes)
    return plane


def stage(plane: DataPlaneClient, *rollouts: MadeRollout) -> None:
    calls = [call for made in rollouts for call in made.calls]
    results = StagingSink(plane, staging_partition=STAGING).stage_all(calls)
    assert all(result.ok for result in results), results


def reassembler(plane: DataPlaneClient, **options: Any) -> RolloutReassembler:
    settings = {"pad_token_id": PAD, "max_seq_len": None, **options}
    return RolloutReassembler(plane, partition_id=CANONICAL, staging_partition=STAGING, **settings)


def finalize(
    plane: DataPlaneClient,
    rollouts: Sequence[MadeRollout],
    *,
    group_id: str = "g",
    receipts: Sequence[Any] | None = None,
    rewards: Sequence[Any] | None = None,
    options: dict[str, Any] | None = None,
    **request: Any,
):
    """Finalize these rollouts as one group with sensible defaults."""
    request = {"mask_sample": None, "fallback_weight_version": 0, "prompt_idx": 0, **request}
    return reassembler(plane, **(options or {})).finalize_group(
        group_id,
        [made.rollout_id for made in rollouts],
        receipts if receipts is not None else [made.receipt() for made in rollouts],
        rewards if rewards is not None else [1.0] * len(rollouts),
        **request,
    )


def collect(plane: DataPlaneClient) -> None:
    """Clear the rows of rejected rollouts, as actors do in the background."""
    reassembler(plane).collect_lost()


def staged_places(plane: DataPlaneClient) -> set[str]:
    return set(plane.list_samples(STAGING))


def staged_keys(plane: DataPlaneClient) -> set[str]:
    """The staging keys of what is staged, whatever the bytes are."""
    return {staging_key_of(key) for key in staged_places(plane)}


def staging_key_of(place: str) -> str:
    return place.rpartition("#")[0] if is_place(place) else place


def place_in(plane: DataPlaneClient, key: str) -> str:
    """The place of the one call that is staged under a staging key."""
    (found,) = [place for place in staged_places(plane) if staging_key_of(place) == key]
    return found


def at_places(*keys: str) -> Matching:
    """Equal to a sequence of places with these staging keys."""
    return Matching(keys)


class Matching:
    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._keys == tuple(
            staging_key_of(key) for key in other if is_place(key)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"at_places{self._keys}"
