"""Groups to measure with: the sizes of three kinds of agent, filled with random tokens from a seed.

    call 0: [prompt … | generated …]     call i: [tool result … | generated …], a child of call i-1

Digests are sound, so both verifiers do all of their work. A group's rollouts keep their ids from one
repetition to the next, since nothing staged outlives its group; only the group's id changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rollout_reassembler.contract.messages import ReassemblyRequest
from rollout_reassembler.contract.records import CallRecord, RolloutReceipt, StagedCall, seal_call

_VOCABULARY = 150_000
_WEIGHT_VERSION = 7


@dataclass(frozen=True)
class Shape:
    """The size of a group: `rollouts` × `calls`, and tokens of the prompt, of a tool result, of a generation."""

    name: str
    rollouts: int
    calls: int
    prompt: int
    tool: int
    generated: int

    @property
    def tokens(self) -> int:
        """Tokens of all rows of a group."""
        return self.rollouts * (self.prompt + (self.calls - 1) * self.tool + self.calls * self.generated)

    def __str__(self) -> str:
        return f"{self.name} {self.rollouts}×{self.calls}; {self.prompt}, {self.tool}, {self.generated}"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("small", 8, 4, prompt=500, tool=200, generated=100),
        Shape("agentic", 8, 30, prompt=2000, tool=400, generated=300),
        Shape("long", 16, 50, prompt=8000, tool=1000, generated=500),
    )
}


@dataclass(frozen=True)
class MadeGroup:
    """A group's staged calls, by rollout in manifest order, and what its agents handed over."""

    shape: Shape
    rollout_ids: tuple[str, ...]
    calls: tuple[tuple[StagedCall, ...], ...]
    receipts: tuple[dict[str, Any], ...]
    rewards: tuple[float, ...]

    @cached_property
    def all_calls(self) -> list[StagedCall]:
        return [call for calls in self.calls for call in calls]

    def request(self, group_id: str) -> ReassemblyRequest:
        """The request to finalize these rollouts under that id."""
        return ReassemblyRequest(
            group_id=group_id,
            rollout_ids=self.rollout_ids,
            canonical_sample_ids=tuple(f"{group_id}_g{index}" for index in range(len(self.rollout_ids))),
            receipts=self.receipts,
            rewards=self.rewards,
            fallback_weight_version=0,
            prompt_idx=0,
        )


def make_group(shape: Shape, *, seed: int = 0, prefix: str = "bench") -> MadeGroup:
    """A group of that shape; rollout ids begin with `prefix`."""
    rng = np.random.default_rng(seed)
    rollout_ids = tuple(f"{prefix}-{shape.name}/r{index}" for index in range(shape.rollouts))
    calls = tuple(_make_calls(rollout_id, shape, rng) for rollout_id in rollout_ids)
    return MadeGroup(
        shape=shape,
        rollout_ids=rollout_ids,
        calls=calls,
        receipts=tuple(_receipt(rollout_calls) for rollout_calls in calls),
        rewards=tuple(float(index % 2) for index in range(shape.rollouts)),
    )


def _make_calls(rollout_id: str, shape: Shape, rng: np.random.Generator) -> tuple[StagedCall, ...]:
    calls: list[StagedCall] = []
    sequence = np.empty(0, np.int64)
    for index in range(shape.calls):
        carry = shape.tool if calls else shape.prompt
        length = carry + shape.generated
        log_probs = -rng.exponential(0.5, length).astype(np.float32)
        log_probs[:carry] = 0.0
        ids = rng.integers(0, _VOCABULARY, length)
        call = seal_call(
            rollout_id=rollout_id,
            model_call_id=f"call-{index:04d}",
            token_ids_delta=ids,
            token_mask_delta=(np.arange(length) >= carry).astype(np.float32),
            generation_log_probs_delta=log_probs,
            weight_version=_WEIGHT_VERSION,
            parent=calls[-1] if calls else None,
            prefix_token_ids=sequence,
        )
        calls.append(call)
        sequence = np.concatenate([sequence, ids])
    return tuple(calls)


def _receipt(calls: tuple[StagedCall, ...]) -> dict[str, Any]:
    receipt = RolloutReceipt(
        rollout_id=calls[0].rollout_id,
        terminal_model_call_id=calls[-1].model_call_id,
        terminal_selection="declared",
        manifest=[CallRecord.of(call, response_id=f"resp-{call.model_call_id}") for call in calls],
    )
    return receipt.model_dump()
