"""Generated rollouts as they are on the wire: plain dicts, with the digests of the reference release.

Everything here is computed by `nemo_gym`, nothing by the package under test, so that a test which
feeds these to both sides compares two independent implementations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nemo_gym.token_id_capture.staging as gym
from hypothesis import settings
from hypothesis import strategies as st

few = settings(max_examples=40)
"""For tests that draw whole rollouts, of which each is worth many values."""

IDENTIFIERS = st.text(min_size=1, max_size=6)
TOKEN_IDS = st.integers(0, 9) | st.integers(0, 2**63 - 1)
FINITE_FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.floats(-3.4e38, 3.4e38).filter(
    lambda value: value == 0 or abs(value) > 1e-45
)
"""Floats that binary32 holds or rounds, but none that vanish in it: there the two sides are meant to differ."""
WEIGHT_VERSIONS = st.integers(0, 3) | st.integers(0, 2**64 - 1)

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
EXTRAS_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
EXTRAS = st.none() | st.dictionaries(st.text(max_size=4), EXTRAS_VALUES, max_size=3)

SIGNED_FIELDS = (
    "schema_version",
    "digest_version",
    "extras_digest_version",
    "rollout_id",
    "model_call_id",
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "token_ids_delta",
    "token_mask_delta",
    "generation_log_probs_delta",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
)
SHARED_FIELDS = (
    "model_call_id",
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "digest",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
)


@dataclass
class WireRollout:
    """A receipt and the staged rows that it lists, both plain dicts; `staged` is in manifest order."""

    receipt: dict[str, Any]
    staged: list[dict[str, Any]]


def columns_of(carry: list[int], generated: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {
        "token_ids_delta": [*carry, *generated],
        "token_mask_delta": [0.0] * len(carry) + [1.0] * len(generated),
        "generation_log_probs_delta": [0.0] * len(carry) + logprobs[: len(generated)],
    }


def gym_sealed(
    rollout_id: str,
    model_call_id: str,
    columns: dict[str, Any],
    *,
    weight_version: int,
    extras: dict[str, Any] | None,
    parent: dict[str, Any] | None = None,
    prefix: list[int] | None = None,
) -> dict[str, Any]:
    """One staged call with the reference's digests."""
    delta = columns["token_ids_delta"]
    prev_len = parent["cum_len"] if parent else 0
    staged: dict[str, Any] = {
        "schema_version": 2,
        "digest_version": 2,
        "extras_digest_version": 1,
        "rollout_id": rollout_id,
        "model_call_id": model_call_id,
        "parent_call_id": parent["model_call_id"] if parent else None,
        "mode": "token_in" if parent else "text",
        "prev_len": prev_len,
        "delta_len": len(delta),
        "cum_len": prev_len + len(delta),
        "weight_version": weight_version,
        **columns,
        "extras_digest": gym.compute_extras_digest(extras),
        "chain_hash": gym.compute_chain_hash(parent["chain_hash"] if parent else None, delta),
        "cumulative_hash": gym.hash_token_ids([*(prefix or []), *delta]),
    }
    return {**staged, "digest": gym.compute_staging_digest(**staged), "extras": extras}


def manifest_row(staged: dict[str, Any]) -> dict[str, Any]:
    """The receipt's row of a staged call."""
    return {
        **{name: staged[name] for name in SHARED_FIELDS},
        "staging_key": f"{staged['rollout_id']}/{staged['model_call_id']}",
        "response_id": f"resp-{staged['model_call_id']}",
    }


def wire_rollout(rollout_id: str, staged: list[dict[str, Any]], terminal: str) -> WireRollout:
    receipt = {
        "rollout_id": rollout_id,
        "terminal_model_call_id": terminal,
        "terminal_selection": "declared",
        "manifest": [manifest_row(row) for row in staged],
    }
    return WireRollout(receipt, staged)


@st.composite
def wire_rollouts(draw: st.DrawFn, *, max_calls: int = 5) -> WireRollout:
    """A rollout of chains, branches and abandoned retries, its calls listed in any order.

    A call may generate nothing; then no chain through it can be trained, and both sides say so.
    """
    rollout_id = draw(IDENTIFIERS)
    call_ids = draw(st.lists(IDENTIFIERS, min_size=1, max_size=max_calls, unique=True))
    staged: list[dict[str, Any]] = []
    sequences: dict[str, list[int]] = {}
    for call_id in call_ids:
        parent = draw(st.none() | st.sampled_from(staged)) if staged else None
        carry = draw(st.lists(TOKEN_IDS, max_size=3))
        generated = draw(st.lists(TOKEN_IDS, min_size=0 if carry else 1, max_size=3))
        logprobs = draw(st.lists(FINITE_FLOATS, min_size=3, max_size=3))
        prefix = sequences[parent["model_call_id"]] if parent else []
        call = gym_sealed(
            rollout_id,
            call_id,
            columns_of(carry, generated, logprobs),
            weight_version=draw(WEIGHT_VERSIONS),
            extras=draw(EXTRAS),
            parent=parent,
            prefix=prefix,
        )
        sequences[call_id] = [*prefix, *call["token_ids_delta"]]
        staged.append(call)
    terminal = draw(st.sampled_from(call_ids))
    return wire_rollout(rollout_id, draw(st.permutations(staged)), terminal)
