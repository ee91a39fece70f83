"""Routes of a staged call, worker side and reader side: what is there, told without moving or copying it.

`route_shape` is for the sink: it looks at a call's extras, and the shape of their routes goes into the
packed header, which is read with the tokens; so a route plan is made without reading a route. It is a
hint: whoever reads the routes holds it against them. `open_routes` is for that reader: from the encoded
extras of the row to its two payloads, proven against the digest that commits to them.
"""

from __future__ import annotations

from typing import NamedTuple

from rollout_reassembler.contract.errors import InvalidRoutes
from rollout_reassembler.contract.records import StagedCall
from rollout_reassembler.contract.routed_experts import BOUNDARY_KEY, ROUTES_KEY, RoutesPayload, routed_experts_shape
from rollout_reassembler.staging.codec import NO_ROUTES, RouteShape
from rollout_reassembler.staging.extras import open_extras


class StagedRoutes(NamedTuple):
    """The route payloads of one call, undecoded: rows for its delta, and the row of its parent's last token."""

    rows: RoutesPayload | None
    boundary: RoutesPayload | None


def route_shape(call: StagedCall) -> RouteShape:
    """The shape of a call's routes, `NO_ROUTES` where its extras hold none.

    Raises `InvalidRoutes` for a malformed payload, and for a boundary that nothing can use: one of a
    root, one without routes beside it, or one of another `[L, K]`.
    """
    extras = call.extras or {}
    rows, boundary = extras.get(ROUTES_KEY), extras.get(BOUNDARY_KEY)
    if rows is None and boundary is None:
        return NO_ROUTES
    if rows is None:
        raise InvalidRoutes(f"call {call.model_call_id!r} holds {BOUNDARY_KEY} without {ROUTES_KEY}")
    count, layers, topk = routed_experts_shape(rows)
    if boundary is not None:
        if call.parent_call_id is None:
            raise InvalidRoutes(f"root call {call.model_call_id!r} holds {BOUNDARY_KEY}, but has no parent")
        if (found := routed_experts_shape(boundary)) != (1, layers, topk):
            raise InvalidRoutes(f"{BOUNDARY_KEY} is {list(found)}; expected {[1, layers, topk]}")
    return RouteShape(count, layers, topk, boundary is not None)


def open_routes(encoded: bytes, committed_digest: str) -> StagedRoutes:
    """The route payloads in a row's encoded extras. Raises `InvalidStagedCall` when the digest says no."""
    extras = open_extras(encoded, committed_digest)
    return StagedRoutes(extras.get(ROUTES_KEY), extras.get(BOUNDARY_KEY))
