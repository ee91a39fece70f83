"""Fragments × plan → the routes of a row, int16 `[T, L, K]`; the same executor for both modes.

*Direct*: the actor makes a plan of each proven row and executes the group's plans at once. *Deferred*:
the plan goes out as a tag of its row, and the trainer executes it where the model's real `(L, K)` is
known. Fragments are read for the chain's calls alone, in one read a group, and each is checked
against the digest that its span carries before a value of it is used.

Worked example, L = 1, K = 2. Call a: prompt [1, 2], sampled [3]; call b: tool result [4], sampled [5]:

    a  full      [10, 11] [20, 21] [0, 1]      the last row is what an engine makes up for a token it sampled
    b  full      [40, 41] [-1, -1]             boundary [30, 31]: b's prefill routed token 3
    row          [10, 11] [20, 21] [30, 31] [40, 41] [-1, -1]

What always holds:

- The route of a span's last token is never taken from its own fragment: only from the boundary of
  the next call of the chain, else it is -1. It is never 0 and never a neighbour's.
- A fragment that cannot be told to end at the last sampled token gives nothing: one with more rows than
  its call has tokens, and one that is a single row short without saying by a last row of -1 where it
  ends (n-1 rows for n tokens; taken as a tail, each of them would be a token off).
- `(L, K)` is one for a row, and one for a group. Where nothing tells it, routes are `[T, 0, 0]`.

Memory: a row is assembled in place, and a group gives each fragment's bytes back as soon as it is
decoded, so that the peak is the group's encoded fragments (4/3 of the routes) and one row. Rows stay
jagged; nothing here has a batch dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_reassembler.contract.errors import InvalidRoutes, InvalidStagedCall, RouteFailure
from rollout_reassembler.contract.routed_experts import (
    INVALID_RANK,
    MISSING_ROUTE,
    ROUTES_KEY,
    Routes,
    RoutesPayload,
    decode_routed_experts,
)
from rollout_reassembler.reassembly.route_plan import RoutePlan, RouteSpan
from rollout_reassembler.staging.routes import open_routes
from rollout_reassembler.staging.source import StagingSource

RowRoutes = npt.NDArray[np.int16]
"""A row's routes, int16 `[T, L, K]`; `[T, 0, 0]` where `(L, K)` is not known."""

LayersAndTopK = tuple[int, int]
"""`(L, K)`: routed layers, experts a token and layer."""

FAILURE_CODES = (
    "canonical_length_mismatch",
    "missing_fragment",
    "fragment_integrity",
    "fragment_rank",
    "fragment_length",
    "fragment_model_shape",
    "assembled_length_mismatch",
)


_UNREAD = frozenset({"missing_fragment", "fragment_integrity"})


class _Fragment(NamedTuple):
    """One call's decoded extras: `rows` is `[staged_route_len, L, K]`, `boundary` `[1, L, K]` or none."""

    rows: Routes
    boundary: Routes | None

    @property
    def model_shape(self) -> LayersAndTopK:
        return self.rows.shape[1], self.rows.shape[2]


def read_fragments(source: StagingSource, plans: Sequence[RoutePlan]) -> dict[str, bytes]:
    """The encoded extras that these plans take rows from, in one read. Rows that are gone are left out."""
    fragments, _missing = source.fetch_extras([key for plan in plans for key in plan.fragment_keys])
    return fragments


def assemble_routes(
    plan: RoutePlan,
    fragments: Mapping[str, bytes],
    *,
    model_shape: LayersAndTopK | None = None,
    canonical_length: int | None = None,
) -> RowRoutes:
    """Execute one plan over encoded extras by staging key. Raises `RouteFailure`.

    `model_shape` is the `(L, K)` that fragments must have; without it they must agree among
    themselves. `canonical_length` is the length of the row that the routes are for.
    """
    return _assemble(plan, fragments.get, model_shape, canonical_length)


def assemble_group(
    source: StagingSource,
    plans: Sequence[RoutePlan],
    *,
    model_shape: LayersAndTopK | None = None,
    canonical_lengths: Sequence[int] | None = None,
    seen_shape: LayersAndTopK | None = None,
) -> list[RowRoutes | RouteFailure]:
    """Execute the plans of a group: for each its routes, or why there are none. One read for all.

    Rows must have the `(L, K)` of `model_shape`. Without it most rows decide, and where as many rows speak for
    each of several shapes, `seen_shape`, that of an earlier group, or else the first row. The others fail with
    `fragment_model_shape`. A row without any fragment takes the group's shape. Fragments that are
    missing or another's may be the plane's passing fault, so they are read once more. A
    `DataPlaneError` is raised.
    """
    lengths = canonical_lengths if canonical_lengths is not None else [None] * len(plans)
    outcomes = _execute(source, plans, lengths, model_shape)
    unread = [at for at, outcome in enumerate(outcomes) if getattr(outcome, "code", None) in _UNREAD]
    if unread:
        again = _execute(source, [plans[at] for at in unread], [lengths[at] for at in unread], model_shape)
        for at, outcome in zip(unread, again, strict=True):
            outcomes[at] = outcome
    return outcomes if model_shape else _agree(outcomes, seen_shape)


def sentinel_routes(length: int, model_shape: LayersAndTopK | None = None) -> RowRoutes:
    """`[length, L, K]` of -1, or `[length, 0, 0]` where the shape is not known."""
    return np.full((length, *(model_shape or (0, 0))), MISSING_ROUTE, np.int16)


def missing_token_count(routes: RowRoutes) -> int:
    """How many tokens of a row have no route at all."""
    if not routes.size:
        return len(routes)
    return int(np.count_nonzero(routes.reshape(len(routes), -1).max(axis=1) == MISSING_ROUTE))


def _execute(
    source: StagingSource,
    plans: Sequence[RoutePlan],
    lengths: Sequence[int | None],
    model_shape: LayersAndTopK | None,
) -> list[RowRoutes | RouteFailure]:
    """One read, then plan after plan; a fragment's bytes are given back as it is opened."""
    fragments = read_fragments(source, plans)
    outcomes: list[RowRoutes | RouteFailure] = []
    for plan, length in zip(plans, lengths, strict=True):
        try:
            outcomes.append(_assemble(plan, lambda key: fragments.pop(key, None), model_shape, length))
        except RouteFailure as failure:
            outcomes.append(failure)
    return outcomes


def _assemble(
    plan: RoutePlan,
    take: Callable[[str], bytes | None],
    model_shape: LayersAndTopK | None,
    canonical_length: int | None,
) -> RowRoutes:
    total = plan.expected_token_length
    if canonical_length is not None and canonical_length != total:
        raise _failure("canonical_length_mismatch", f"the plan is for {total} tokens, the row has {canonical_length}")
    if (planned := sum(span.length for span in plan.spans)) != total:
        raise _failure("assembled_length_mismatch", f"the spans give {planned} rows, expected {total}")
    row: RowRoutes | None = None
    start = 0
    for span in plan.spans:
        if span.mode != "sentinel":
            fragment = _open(span, take(span.staging_key))
            _check_model_shape(span, fragment, model_shape)
            if row is None:
                model_shape = fragment.model_shape
                row = sentinel_routes(total, model_shape)
            _place(row, start, span, fragment)
        start += span.length
    return row if row is not None else sentinel_routes(total, model_shape)


def _open(span: RouteSpan, encoded: bytes | None) -> _Fragment:
    """A span's fragment, proven against its commitment and of the length that the plan says."""
    if encoded is None:
        raise _failure("missing_fragment", f"no staged row {span.staging_key!r}")
    try:
        staged = open_routes(encoded, span.extras_digest)
    except InvalidStagedCall as error:
        raise _failure("fragment_integrity", f"{span.staging_key!r}: {error.detail}") from error
    if staged.rows is None:
        raise _failure("missing_fragment", f"the extras of {span.staging_key!r} hold no {ROUTES_KEY}")
    rows = _decoded(span, staged.rows)
    if len(rows) != span.staged_route_len:
        raise _failure(
            "fragment_length", f"{span.staging_key!r} holds {len(rows)} rows, the plan says {span.staged_route_len}"
        )
    if staged.boundary is None:
        return _Fragment(rows, None)
    boundary = _decoded(span, staged.boundary)
    if len(boundary) != 1:
        raise _failure("fragment_length", f"the boundary of {span.staging_key!r} holds {len(boundary)} rows, not one")
    return _Fragment(rows, boundary)


def _decoded(span: RouteSpan, payload: RoutesPayload) -> Routes:
    try:
        rows = decode_routed_experts(payload)
    except InvalidRoutes as error:
        code = "fragment_rank" if error.code == INVALID_RANK else "fragment_integrity"
        raise _failure(code, f"{span.staging_key!r}: {error.detail}") from error
    if rows.itemsize > 2 and (highest := int(rows.max())) > np.iinfo(np.int16).max:
        raise _failure("fragment_integrity", f"{span.staging_key!r}: expert {highest} does not fit int16")
    return rows


def _check_model_shape(span: RouteSpan, fragment: _Fragment, model_shape: LayersAndTopK | None) -> None:
    layers, topk = model_shape or fragment.model_shape
    for rows in (fragment.rows, fragment.boundary):
        if rows is not None and rows.shape[1:] != (layers, topk):
            found = _other_shape(repr(span.staging_key), rows.shape[1:], (layers, topk))
            raise _failure("fragment_model_shape", found)


def _place(row: RowRoutes, start: int, span: RouteSpan, fragment: _Fragment) -> None:
    """Write what a fragment knows: its own tokens but the last one, and its parent's last one."""
    if span.staged_route_len == span.length - 1 and (fragment.rows[-1] != MISSING_ROUTE).any():
        return
    known = span.length if span.mode == "full" else span.generation_len
    end = start + span.length
    row[end - known : end - 1] = fragment.rows[-known:-1]
    if fragment.boundary is not None and start:
        row[start - 1] = fragment.boundary[0]


def _agree(
    outcomes: list[RowRoutes | RouteFailure], seen_shape: LayersAndTopK | None
) -> list[RowRoutes | RouteFailure]:
    """One `(L, K)` for the group, that of most rows: a row of another fails, one that knows none takes it."""
    shapes = Counter(row.shape[1:] for row in outcomes if isinstance(row, np.ndarray) and row.size)
    if not shapes:
        return outcomes
    (layers, topk), votes = shapes.most_common(1)[0]
    if seen_shape is not None and shapes[seen_shape] == votes:
        layers, topk = seen_shape
    return [_in_shape(outcome, (layers, topk)) for outcome in outcomes]


def _in_shape(outcome: RowRoutes | RouteFailure, model_shape: LayersAndTopK) -> RowRoutes | RouteFailure:
    if isinstance(outcome, RouteFailure) or outcome.shape[1:] == model_shape:
        return outcome
    if not outcome.size:
        return sentinel_routes(len(outcome), model_shape)
    return _failure("fragment_model_shape", _other_shape("the row", outcome.shape[1:], model_shape))


def _other_shape(what: str, found: tuple[int, ...], expected: LayersAndTopK) -> str:
    return f"{what} holds {found[0]} layers of {found[1]} experts; expected {expected[0]} of {expected[1]}"


def _failure(code: str, detail: str) -> RouteFailure:
    return RouteFailure(detail, code=code)
