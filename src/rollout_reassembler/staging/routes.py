"""Routes of a staged call, worker side and reader side: what is there, told without moving or copying it.

`route_shape` is for the sink: it looks at a call's extras, and the shape of their routes goes into the
packed header, which is read with the tokens; so a route plan is made without reading a route. It is a
hint: whoever reads the routes holds it against them. `open_routes` is for that reader: from the encoded
extras of the row to its two payloads, proven against the digest that commits to them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from rollout_reassembler.contract.digests import encoded_extras_digest
from rollout_reassembler.contract.errors import InvalidRoutes
from rollout_reassembler.contract.records import StagedCall
from rollout_reassembler.contract.routed_experts import BOUNDARY_KEY, ROUTES_KEY, RoutesPayload, routed_experts_shape
from rollout_reassembler.staging.codec import NO_ROUTES, RouteShape
from rollout_reassembler.staging.extras import decode_extras

_U64 = struct.Struct(">Q")


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
    texts = _texts(encoded) if encoded_extras_digest(encoded) == committed_digest else None
    extras = texts if texts is not None else decode_extras(encoded, committed_digest)
    return StagedRoutes(extras.get(ROUTES_KEY), extras.get(BOUNDARY_KEY))


def _texts(encoded: bytes) -> dict[str, memoryview] | None:
    """The extras as views of their texts, `None` where they are anything but a sound mapping of texts.

    A fragment is megabytes of text. `decode_extras` would copy it twice on the way to its string.
    """
    if not encoded.startswith(b"D"):
        return None
    view = memoryview(encoded)
    texts: dict[str, memoryview] = {}
    at, last = 1 + _U64.size, ""
    try:
        for _ in range(_U64.unpack_from(encoded, 1)[0]):
            key_at, key_end = _bounds(encoded, at)
            key = encoded[key_at:key_end].decode()
            if encoded[key_end : key_end + 1] != b"S" or (texts and key <= last):
                return None
            text_at, at = _bounds(encoded, key_end + 1)
            texts[key] = view[text_at:at]
            last = key
    except (struct.error, UnicodeDecodeError):
        return None
    return texts if at == len(encoded) else None


def _bounds(encoded: bytes, at: int) -> tuple[int, int]:
    """Where the text whose length stands at `at` begins and ends."""
    start = at + _U64.size
    end = start + int(_U64.unpack_from(encoded, at)[0])
    if end > len(encoded):
        raise struct.error(f"a text of {end - start} bytes in {len(encoded)}")
    return start, end
