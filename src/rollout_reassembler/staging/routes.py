"""What routes a staged call holds, told from its extras without decoding them.

    sink = StagingSink(dp_client, staging_partition="staging", route_shape=route_shape)

The shape goes into the packed header of the call, which is read with the tokens; so a route plan is
made without moving a route. It is a hint: whoever reads the routes holds it against them.
"""

from __future__ import annotations

from rollout_reassembler.contract.errors import InvalidRoutes
from rollout_reassembler.contract.records import StagedCall
from rollout_reassembler.contract.routed_experts import BOUNDARY_KEY, ROUTES_KEY, routed_experts_shape
from rollout_reassembler.staging.codec import NO_ROUTES, RouteShape


def route_shape(call: StagedCall) -> RouteShape:
    """The shape of a call's routes, `NO_ROUTES` where its extras hold none.

    Raises `InvalidRoutes` for a malformed payload, and for a boundary that nothing can use: one of a
    root, one without routes beside it, or one of another `[L, K]`.
    """
    extras = call.extras or {}
    routes, boundary = extras.get(ROUTES_KEY), extras.get(BOUNDARY_KEY)
    if routes is None and boundary is None:
        return NO_ROUTES
    if routes is None:
        raise InvalidRoutes(f"call {call.model_call_id!r} holds {BOUNDARY_KEY} without {ROUTES_KEY}")
    rows, layers, topk = routed_experts_shape(routes)
    if boundary is not None:
        if call.parent_call_id is None:
            raise InvalidRoutes(f"root call {call.model_call_id!r} holds {BOUNDARY_KEY}, but has no parent")
        if (found := routed_experts_shape(boundary)) != (1, layers, topk):
            raise InvalidRoutes(f"{BOUNDARY_KEY} is {list(found)}; expected {[1, layers, topk]}")
    return RouteShape(rows, layers, topk, boundary is not None)
