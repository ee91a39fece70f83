"""Made-up rollouts with routes for tests, and what their rows must say, worked out one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollout_reassembler.contract.bounds import parse_receipt
from rollout_reassembler.contract.digests import encode_extras
from rollout_reassembler.contract.routed_experts import (
    BOUNDARY_KEY,
    MISSING_ROUTE,
    ROUTES_KEY,
    encode_routed_experts,
    pad_last_route,
)
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.reassembly.route_plan import RoutePlan, plan_routes
from rollout_reassembler.reassembly.verify import LinearizedRow, verify_and_linearize
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.routes import route_shape
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.staging.source import StagingSource
from tests.captures import STAGING, MadeRollout

Staged = Literal["full", "dummy_last", "tail", "tail_dummy", "one_short", "too_few", "surplus", "none"]
"""What an engine's routes for a call look like in staging.

- `full`: a row a token, the last one -1; `dummy_last`: the last one is made up.
- `tail`: the generation's rows, the last one -1; `tail_dummy`: the last one is made up.
- `one_short`: all rows but the last, not padded; `too_few`: fewer than the generation.
- `surplus`: rows for the whole sequence and one more; `none`: no routes.
"""


@dataclass(frozen=True)
class Turn:
    """One call: its lengths, and how its routes are staged."""

    carry: int
    generated: int
    staged: Staged = "full"
    boundary: bool = True
    dtype: str = "int16"


def truth(tokens: int, *, layers: int = 2, topk: int = 2) -> np.ndarray:
    """The routes that a model would give, int16 `[T, L, K]`: no two tokens alike, none of them 0."""
    numbers = np.arange(tokens * layers * topk).reshape(tokens, layers, topk)
    return (numbers % 125 + 2).astype(np.int16)


def extras(turn: Turn, routes: np.ndarray, start: int) -> dict[str, Any] | None:
    """What the turn's call stages, from the true routes of the whole sequence; `start` is its `prev_len`."""
    end = start + turn.carry + turn.generated
    delta = pad_last_route(routes[start:end], end - start)
    rows = {
        "full": delta,
        "dummy_last": np.concatenate([delta[:-1], np.zeros_like(delta[:1])]),
        "tail": delta[turn.carry :],
        "tail_dummy": np.concatenate([delta[turn.carry : -1], np.zeros_like(delta[:1])]),
        "one_short": delta[:-1],
        "too_few": delta[: turn.generated - 1],
        "surplus": np.concatenate([routes[:1], routes[:end]]),
        "none": delta[:0],
    }[turn.staged]
    if not len(rows):
        return None
    entries = {ROUTES_KEY: encode_routed_experts(rows, dtype=turn.dtype)}
    if turn.boundary and start:
        entries[BOUNDARY_KEY] = encode_routed_experts(routes[start - 1 : start], dtype=turn.dtype)
    return entries


def made(rollout_id: str, turns: Sequence[Turn], *, layers: int = 2, topk: int = 2) -> MadeRollout:
    """A rollout of one chain, its calls named c0, c1, …; nothing is staged yet."""
    routes = truth(sum(turn.carry + turn.generated for turn in turns), layers=layers, topk=topk)
    rollout = MadeRollout(rollout_id)
    parent = None
    for turn in turns:
        start = parent.cum_len if parent is not None else 0
        parent = rollout.call(
            range(100, 100 + turn.carry),
            range(200, 200 + turn.generated),
            parent=parent,
            extras=extras(turn, routes, start),
        )
    return rollout


def expected(turns: Sequence[Turn], *, layers: int = 2, topk: int = 2) -> np.ndarray:
    """The row's routes, token by token."""
    routes = truth(sum(turn.carry + turn.generated for turn in turns), layers=layers, topk=topk)
    row = np.full_like(routes, MISSING_ROUTE)
    position = 0
    for index, turn in enumerate(turns):
        for token in range(turn.carry + turn.generated):
            is_generated = token >= turn.carry
            is_last = token == turn.carry + turn.generated - 1
            if is_last:
                child = turns[index + 1] if index + 1 < len(turns) else None
                is_known = child is not None and child.boundary and _is_used(child)
            else:
                is_known = _is_used(turn) and (is_generated or not turn.staged.startswith("tail"))
            if is_known:
                row[position] = routes[position]
            position += 1
    return row


def _is_used(turn: Turn) -> bool:
    """Whether what the turn staged can be told to end at its last token."""
    return turn.staged in ("full", "dummy_last", "tail") or (turn.staged == "tail_dummy" and turn.carry != 1)


def stage(plane: DataPlaneClient, *rollouts: MadeRollout) -> None:
    sink = StagingSink(plane, staging_partition=STAGING, route_shape=route_shape)
    results = sink.stage_all([call for rollout in rollouts for call in rollout.calls])
    assert all(result.ok for result in results), results


def proven(plane: DataPlaneClient, rollout: MadeRollout) -> LinearizedRow:
    receipt = parse_receipt(rollout.receipt())
    fetched = StagingSource(plane, staging_partition=STAGING).fetch_packed([place_of(r) for r in receipt.manifest])
    return verify_and_linearize(receipt, [fetched.calls[place_of(record)] for record in receipt.manifest])


def planned(plane: DataPlaneClient, rollout: MadeRollout) -> RoutePlan:
    keys = [place_of(call) for call in rollout.calls]
    return plan_routes(proven(plane, rollout), staging_partition=STAGING, cleanup_keys=keys)


def fragments(*rollouts: MadeRollout) -> dict[str, bytes]:
    """The encoded extras of these rollouts' calls, as a read of staging gives them."""
    return {
        place_of(call): encode_extras(call.extras) if call.extras is not None else b""
        for rollout in rollouts
        for call in rollout.calls
    }
