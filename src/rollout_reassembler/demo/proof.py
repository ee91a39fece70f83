"""The demo's proof: the policy itself, scoring every published row, must agree with what was captured.

A trainer that gets exactly the tokens that were sampled computes exactly the log probabilities that
were captured, up to float rounding; one wrong token anywhere in a row, or a shift by one, moves the
ones behind it by whole units. Experts are held to the same: each replayed route must be the one that
the teacher-forced pass takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.contract.routed_experts import MISSING_ROUTE
from rollout_reassembler.data_plane.base import ClaimQueue
from rollout_reassembler.demo.agents import Answer
from rollout_reassembler.demo.policy import DemoPolicy
from rollout_reassembler.demo.tokenizer import DemoTokenizer
from rollout_reassembler.reassembly.rows import ROUTES_FIELD

MAX_LOGPROB_ERROR = 1e-4


@dataclass
class Proof:
    """What was checked and what was found; counts are tokens of valid rows."""

    rows: int = 0
    valid_rows: int = 0
    tokens_checked: int = 0
    max_abs_logprob_error: float = 0.0
    routes_checked: int = 0
    routes_equal: int = 0
    routes_missing: int = 0

    @property
    def holds(self) -> bool:
        """Every trained token and every replayed route was right, and there were some."""
        return (
            self.tokens_checked > 0
            and self.max_abs_logprob_error < MAX_LOGPROB_ERROR
            and self.routes_checked > 0
            and self.routes_equal == self.routes_checked
        )


def prove_rows(client: ClaimQueue, groups: Iterable[FinalizedGroup], policy: DemoPolicy) -> Proof:
    """Read the published rows back and score each valid one."""
    proof = Proof()
    for group in groups:
        batch = client.get_data(group.meta)
        for _, row in batch.rows():
            proof.rows += 1
            if row["sample_mask"] > 0:
                _prove_row(
                    row["input_ids"], row["token_mask"], row["generation_logprobs"], row[ROUTES_FIELD], policy, proof
                )
    return proof


def _prove_row(
    token_ids: np.ndarray[tuple[int], np.dtype[np.int64]],
    token_mask: np.ndarray[tuple[int], np.dtype[np.float32]],
    logprobs: np.ndarray[tuple[int], np.dtype[np.float32]],
    routes: np.ndarray[tuple[int, int, int], np.dtype[np.int16]],
    policy: DemoPolicy,
    proof: Proof,
) -> None:
    """Columns of one row: `[T]`, routes `[T, L, K]`."""
    scored = policy.teacher_force(token_ids)
    trained = token_mask == 1.0
    proof.valid_rows += 1
    proof.tokens_checked += int(trained.sum())
    error = float(np.abs(scored.logprobs[trained] - logprobs[trained]).max())
    proof.max_abs_logprob_error = max(proof.max_abs_logprob_error, error)
    if routes.shape[1] == 0:
        proof.routes_missing += int(trained.sum())
        return
    known = trained & (routes != MISSING_ROUTE).all(axis=(1, 2))
    proof.routes_missing += int((trained & ~known).sum())
    proof.routes_checked += int(known.sum())
    proof.routes_equal += int((routes[known] == scored.routed_experts[known]).all(axis=(1, 2)).sum())


def retokenized_rollouts(
    rollouts: Sequence[tuple[Answer, Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]]]], tokenizer: DemoTokenizer
) -> int:
    """How many of these rollouts, each with its rows' tokens, re-tokenising their conversation would have changed."""
    changed = 0
    for answer, rows in rollouts:
        text_ids = tokenizer.render_conversation(answer.messages)
        changed += all(text_ids[: len(token_ids)] != token_ids.tolist() for token_ids in rows)
    return changed
