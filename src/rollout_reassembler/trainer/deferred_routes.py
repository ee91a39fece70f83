"""Trainer side of router replay: routes for the rows of a batch, held to the model that will replay them.

    routes, report = execute_route_plans(
        client, meta.sample_ids, meta.sequence_lengths, meta.tags, model_shape=(48, 8)
    )
    # routes[i]: int16 [T_i, 48, 8], -1 where a route is missing; report.failures: {"missing_fragment": 1}

In deferred mode a row carries its route plan as the tag `route_plan` and its route bytes still lie in
staging. Here, where the policy runs and the model's real `(L, K)` is known, the plans of a batch are
executed with one read, by the same executor that the actor has for direct mode. A row whose
plan fails gets -1 throughout, or the call raises; either way the reason is counted and named.

Then the plans' staged rows are released. What to know about that:

- Nothing is released when the call raises; it can be made again.
- A row that fell back to -1 is settled, and releases its staged rows as well: nothing staged outlives
  its row. The exception is a plan that is not for this row (`canonical_length_mismatch`).
- A plan can be executed once. Where several ranks need the routes of one row, all but the last pass
  `release=False`, or all do and one calls `release_route_plans` behind a barrier.
- A clear that fails is reported (`RouteReport.unreleased`), not raised: the routes are right.
- Rows come from answered groups (`FinalizedGroup.meta`). One that is claimed and released before its
  group is on record leaves a request that is sent again, after a crash, without its staged rows.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

import numpy as np

from rollout_reassembler.contract.errors import ContractError, DataPlaneError, InvalidRoutePlan, RouteFailure
from rollout_reassembler.data_plane.base import RowStore, Tags
from rollout_reassembler.reassembly.route_plan import ROUTE_PLAN_TAG, RoutePlan, decode_route_plan
from rollout_reassembler.reassembly.routes import (
    LayersAndTopK,
    RowRoutes,
    assemble_group,
    missing_token_count,
    sentinel_routes,
)
from rollout_reassembler.staging.source import StagingSource

OnFailure = Literal["sentinel", "raise"]

Outcome = RowRoutes | ContractError | None
"""A row's routes, why it has none, or `None` where there was nothing to tell them from."""


@dataclass(frozen=True)
class RouteReport:
    """What became of the routes of a batch's rows.

    `failures` counts failed rows by reason, `failed_rows` says by sample id what was wrong.
    `rows_without_routes` did not fail and have none: placeholders, calls staged without any.
    `unreleased` are the staged rows that still lie there.
    """

    rows: int
    tokens: int
    sentinel_tokens: int
    rows_without_routes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    failed_rows: dict[str, str] = field(default_factory=dict)
    unreleased: tuple[str, ...] = ()
    release_error: str | None = None

    @property
    def sentinel_fraction(self) -> float:
        """The share of tokens without a route; 0 for a batch without tokens."""
        return self.sentinel_tokens / self.tokens if self.tokens else 0.0

    def metrics(self) -> dict[str, float]:
        """The report as plain numbers by name."""
        counts = {f"router_replay/failure_reason_{code}_count": float(n) for code, n in self.failures.items()}
        return counts | {
            "router_replay/rows": float(self.rows),
            "router_replay/rows_without_routes": float(self.rows_without_routes),
            "router_replay/failed_rows": float(len(self.failed_rows)),
            "router_replay/sentinel_token_fraction": self.sentinel_fraction,
            "router_replay/unreleased_keys": float(len(self.unreleased)),
        }


def execute_route_plans(
    client: RowStore,
    sample_ids: Sequence[str],
    lengths: Sequence[int],
    tags: Sequence[Tags | None],
    *,
    model_shape: LayersAndTopK,
    on_failure: OnFailure = "sentinel",
    release: bool = True,
) -> tuple[list[RowRoutes], RouteReport]:
    """The routes of deferred rows, each int16 `[T, L, K]`, and what became of them.

    `sample_ids`, `lengths` (each row's T) and `tags` are parallel. With `on_failure="raise"` the
    first failed row raises `RouteFailure` under its code; a failing data plane always raises `DataPlaneError`.
    """
    plans = [_plan(row_tags) for _, _, row_tags in zip(sample_ids, lengths, tags, strict=True)]
    outcomes = _execute(client, plans, lengths, model_shape)
    routes, report = settle_routes(sample_ids, lengths, outcomes, model_shape=model_shape, on_failure=on_failure)
    return routes, _release(client, plans, outcomes, report) if release else report


def settle_routes(
    sample_ids: Sequence[str],
    lengths: Sequence[int],
    outcomes: Sequence[Outcome],
    *,
    model_shape: LayersAndTopK,
    on_failure: OnFailure,
) -> tuple[list[RowRoutes], RouteReport]:
    """Routes for every row, `[T, L, K]` of the model's shape: as they came, or -1 throughout.

    A row of `[T, 0, 0]` and one without an outcome (`None`) know no routes. A row of another length
    or `(L, K)` fails like one that came as an error.
    """
    routes: list[RowRoutes] = []
    failed: dict[str, ContractError] = {}
    for sample_id, length, outcome in zip(sample_ids, lengths, outcomes, strict=True):
        checked = _checked(outcome, length, model_shape)
        if isinstance(checked, ContractError):
            failed[sample_id] = checked
        routes.append(checked if isinstance(checked, np.ndarray) else sentinel_routes(length, model_shape))
    if failed and on_failure == "raise":
        _raise_first(failed)
    missing = [missing_token_count(row) for row in routes]
    return routes, RouteReport(
        rows=len(routes),
        tokens=sum(lengths),
        sentinel_tokens=sum(missing),
        rows_without_routes=sum(map(operator.eq, missing, lengths)) - len(failed),
        failures=dict(Counter(error.code for error in failed.values())),
        failed_rows={sample_id: str(error) for sample_id, error in failed.items()},
    )


def release_route_plans(client: RowStore, plans: Sequence[RoutePlan]) -> tuple[tuple[str, ...], str | None]:
    """Clear the staged rows of executed plans. Returns the keys whose clear failed, and the first error."""
    unreleased: list[str] = []
    first_error: str | None = None
    for partition in {plan.staging_partition for plan in plans}:
        keys = [key for plan in plans if plan.staging_partition == partition for key in plan.cleanup_staging_keys]
        try:
            client.clear_samples(keys, partition)
        except DataPlaneError as error:
            unreleased.extend(keys)
            first_error = first_error or str(error)
    return tuple(unreleased), first_error


def _plan(tags: Tags | None) -> RoutePlan | InvalidRoutePlan | None:
    encoded = (tags or {}).get(ROUTE_PLAN_TAG)
    if encoded is None:
        return None
    try:
        return decode_route_plan(encoded)
    except InvalidRoutePlan as error:
        return error


def _execute(
    client: RowStore,
    plans: Sequence[RoutePlan | InvalidRoutePlan | None],
    lengths: Sequence[int],
    model_shape: LayersAndTopK,
) -> list[Outcome]:
    """Each row's outcome; one read for all plans of a staging partition."""
    outcomes: list[Outcome] = [plan if isinstance(plan, InvalidRoutePlan) else None for plan in plans]
    sound = {place: plan for place, plan in enumerate(plans) if isinstance(plan, RoutePlan)}
    for partition in {plan.staging_partition for plan in sound.values()}:
        of_partition = {place: plan for place, plan in sound.items() if plan.staging_partition == partition}
        executed = assemble_group(
            StagingSource(client, staging_partition=partition),
            list(of_partition.values()),
            model_shape=model_shape,
            canonical_lengths=[lengths[place] for place in of_partition],
        )
        for place, outcome in zip(of_partition, executed, strict=True):
            outcomes[place] = outcome
    return outcomes


def _release(
    client: RowStore,
    plans: Sequence[RoutePlan | InvalidRoutePlan | None],
    outcomes: Sequence[Outcome],
    report: RouteReport,
) -> RouteReport:
    """Release what the rows' own plans name; the report, with the keys that stayed."""
    own: list[RoutePlan] = []
    kept: list[str] = []
    for plan, outcome in zip(plans, outcomes, strict=True):
        if isinstance(outcome, ContractError) and outcome.code == "canonical_length_mismatch":
            kept.extend(plan.cleanup_staging_keys if isinstance(plan, RoutePlan) else ())
        elif isinstance(plan, RoutePlan):
            own.append(plan)
    unreleased, release_error = release_route_plans(client, own)
    return replace(report, unreleased=(*kept, *unreleased), release_error=release_error)


def _checked(outcome: Outcome, length: int, model_shape: LayersAndTopK) -> Outcome:
    """The outcome, or a failure where its routes are not `[length, *model_shape]`; `None` where it knows none."""
    if not isinstance(outcome, np.ndarray):
        return outcome
    if len(outcome) != length:
        return RouteFailure(f"{len(outcome)} route rows for {length} tokens", code="assembled_length_mismatch")
    if not outcome.size:
        return None
    if outcome.shape[1:] != tuple(model_shape):
        found = f"{outcome.shape[1]} layers of {outcome.shape[2]} experts"
        return RouteFailure(f"routes of {found}; the model has {model_shape}", code="fragment_model_shape")
    return outcome


def _raise_first(failed: dict[str, ContractError]) -> NoReturn:
    (sample_id, error), *others = failed.items()
    more = f" (and {len(others)} more rows)" if others else ""
    raise RouteFailure(f"row {sample_id!r}: {error.detail}{more}", code=error.code) from error
