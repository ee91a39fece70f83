"""Routes of a group's rollouts: put together before publication (direct mode), and counted."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

from rollout_reassembler.contract.errors import RouteFailure
from rollout_reassembler.reassembly.route_plan import ROUTE_PLAN_TAG, encode_route_plan
from rollout_reassembler.reassembly.routes import LayersAndTopK, assemble_group, missing_token_count
from rollout_reassembler.reassembly.rows import FinalizedRollout, rejected
from rollout_reassembler.staging.source import StagingSource

PlanTag = dict[str, str | None]
"""What a row's tags say of its route plan; empty where plans are not deferred."""


def assemble_group_routes(
    source: StagingSource,
    rollouts: Sequence[FinalizedRollout],
    *,
    model_shape: LayersAndTopK | None = None,
    seen_shape: LayersAndTopK | None = None,
) -> list[FinalizedRollout]:
    """The rollouts with their routes `[T, L, K]`, in one read for all; one whose routes fail is rejected.

    `model_shape` and `seen_shape` are as in `assemble_group`.
    """
    planned = [rollout for rollout in rollouts if rollout.route_plan is not None]
    plans = [rollout.route_plan for rollout in planned if rollout.route_plan is not None]
    lengths = [len(rollout.token_ids) for rollout in planned]
    outcomes = assemble_group(source, plans, model_shape=model_shape, canonical_lengths=lengths, seen_shape=seen_shape)
    routed: dict[int, FinalizedRollout] = {}
    for rollout, outcome in zip(planned, outcomes, strict=True):
        if isinstance(outcome, RouteFailure):
            reason = f"route_assembly:{outcome.code}"
            routed[id(rollout)] = rejected(
                rollout.rollout_id,
                reason,
                outcome.detail,
                reward=rollout.reward,
                staging_keys=rollout.staging_keys,
            )
        else:
            routed[id(rollout)] = dataclasses.replace(rollout, routed_experts=outcome)
    return [routed.get(id(rollout), rollout) for rollout in rollouts]


def shape_seen(rollouts: Sequence[FinalizedRollout]) -> LayersAndTopK | None:
    """The `(L, K)` that two rows of a group or more agree on."""
    shapes = [r.routed_experts.shape for r in rollouts if r.routed_experts is not None and r.routed_experts.size]
    return (shapes[0][1], shapes[0][2]) if len(shapes) > 1 else None


def route_plan_tags(rollouts: Sequence[FinalizedRollout]) -> list[PlanTag]:
    """The tag of each row in deferred mode: its encoded plan, `None` where the trainer has no routes to read.

    Tags merge when a row is written again, so a row without a plan says so: else it would keep the
    plan of an attempt that died behind its publication, which may be for other tokens.
    """
    return [
        {ROUTE_PLAN_TAG: encode_route_plan(plan) if plan is not None and plan.fragment_keys else None}
        for plan in (rollout.route_plan for rollout in rollouts)
    ]


def route_metrics(rollouts: Sequence[FinalizedRollout], plan_tags: Sequence[PlanTag]) -> dict[str, float]:
    """How far routes cover the group's valid rows; nothing where router replay is off.

    `row_coverage` counts rows of which at least one token has a route; `sentinel_token_fraction`
    tokens that have none.
    """
    plans = [rollout.route_plan for rollout in rollouts if rollout.route_plan is not None]
    if not plans:
        return {}
    metrics = {
        "finalize/route_plan_span_count": float(sum(len(plan.spans) for plan in plans)),
        "finalize/route_plan_encoded_bytes": float(sum(len(tag.get(ROUTE_PLAN_TAG) or "") for tag in plan_tags)),
    }
    assembled = [rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None]
    if assembled:
        tokens = [len(routes) for routes in assembled]
        missing = [missing_token_count(routes) for routes in assembled]
        metrics["finalize/routed_experts_row_coverage"] = sum(map(operator.lt, missing, tokens)) / len(assembled)
        metrics["finalize/routed_experts_sentinel_token_fraction"] = sum(missing) / sum(tokens)
    return metrics
