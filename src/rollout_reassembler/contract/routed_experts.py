"""Which experts each token was routed to: the envelope on the wire, and what producers must put into it.

Routes are an integer array `[T, L, K]`: for each token and each of L routed layers, the K experts
that the engine chose. They travel in a call's extras as text, so that the extras digest covers them:

    nrlre1:int16:3x2x8:<base64 of the values, little-endian, C order>

-1 (`MISSING_ROUTE`) says that a route is not known. 0 is an expert; nothing is ever filled with 0.

**What a producer stages.** Rows for the tokens of the call's delta, ending with the last sampled
token: all of them, or the last ones as long as they cover the generation. An engine computes a
token's route when the token is fed to it, and the last one it samples never was: it has no row
there, or a dummy one. Handing over what the engine gave would shift every row by one, so a producer
states the end with a row of -1 (`pad_last_route`), and hands the row that the *next* call's prefill
computes for that token beside its own fragment, as `routed_experts_boundary` `[1, L, K]`.
`route_extras` does both. Worked example, L = 1, K = 2; prompt [1, 2], sampled [3], then a tool
result [4] and sampled [5]; the engine gives routes for all tokens but the last:

    call a   engine: 1→[10, 11] 2→[20, 21]
             routed_experts = [10, 11] [20, 21] [-1, -1]
    call b   engine: 1→… 2→… 3→[30, 31] 4→[40, 41]
             routed_experts = [40, 41] [-1, -1]                   routed_experts_boundary = [30, 31]

The format and `classify_route_span` are those of `nemo_gym.token_id_capture.staging.routes`
(nemo-gym 0.7.0); values below -1 and rows wider than `MAX_ROUTE_VALUES` are refused here as well.
Errors are `InvalidRoutes`; its code is `invalid_route_rank` where the shape is not `[T, L, K]`.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rollout_reassembler.contract.errors import InvalidRoutes

MISSING_ROUTE = -1
ROUTES_KEY = "routed_experts"
BOUNDARY_KEY = "routed_experts_boundary"

ROUTES_MAGIC = "nrlre1"
INVALID_RANK = "invalid_route_rank"
MAX_ROUTE_VALUES = 1 << 14
"""The most values (layers × topk) of one token's row. A row's array has the row's full length, so a
fragment of one wide row would otherwise make its reader allocate many times what was sent."""

Routes = npt.NDArray[np.integer[Any]]
"""Expert ids, `[T, L, K]`."""

RoutesPayload = str | memoryview | list[Any]
"""An envelope, as text or as a view of its ASCII bytes, or legacy nested lists `[tokens][layers][topk]`."""

RouteDims = tuple[int, int, int]
RouteSpanMode = Literal["full", "tail", "sentinel"]

_DTYPES: dict[str, np.dtype[Any]] = {"int8": np.dtype("i1"), "int16": np.dtype("<i2"), "int32": np.dtype("<i4")}
_MAX_HEADER = 80
_DIMENSION = re.compile(r"[0-9]{1,9}", re.ASCII)


def encode_routed_experts(routes: Routes | Sequence[Any], *, dtype: str | None = "int16") -> str:
    """Routes `[T, L, K]` (an array, or nested lists) as an envelope.

    `dtype=None` takes the narrowest that holds the values. Raises `InvalidRoutes` when they do not
    fit, or are no routes.
    """
    array = routes if isinstance(routes, np.ndarray) else _from_nested(list(routes))
    tokens, layers, topk = _check_array(array)
    _check_lowest(int(array.min()))
    highest = int(array.max())
    dtype = dtype or _narrowest(highest)
    if highest > np.iinfo(_dtype(dtype)).max:
        raise InvalidRoutes(f"expert {highest} does not fit {dtype}")
    encoded = binascii.b2a_base64(np.ascontiguousarray(array, _dtype(dtype)).data, newline=False)
    return f"{ROUTES_MAGIC}:{dtype}:{tokens}x{layers}x{topk}:{encoded.decode('ascii')}"


def decode_routed_experts(payload: RoutesPayload) -> Routes:
    """Routes `[T, L, K]` of an envelope (a read-only view of the decoded bytes) or of legacy nested lists."""
    if not isinstance(payload, str | memoryview):
        return _from_nested(payload)
    dtype, shape, data_at = _header(payload)
    try:
        raw = binascii.a2b_base64(payload[data_at:], strict_mode=True)
    except ValueError as error:
        raise InvalidRoutes(f"the envelope's values are not base64: {error}") from error
    if len(raw) != _byte_count(shape, dtype):
        raise InvalidRoutes(f"{len(raw)} bytes; {shape} values of {dtype.name} take {_byte_count(shape, dtype)}")
    routes: Routes = np.frombuffer(raw, dtype).reshape(shape)
    _check_lowest(int(routes.min()))
    return routes


def routed_experts_shape(payload: RoutesPayload) -> RouteDims:
    """`(T, L, K)` as the payload claims it and as its size allows it; no value is looked at."""
    if isinstance(payload, str | memoryview):
        return _header(payload)[1]
    tokens = _row_length([payload])
    layers = _row_length(payload[:1])
    return _check_dims((tokens, layers, _row_length(payload[0][:1])))


def classify_route_span(carry_len: int, generation_len: int, staged_route_len: int) -> RouteSpanMode:
    """How a fragment of `staged_route_len` rows contributes to a call's `carry_len + generation_len` tokens.

    `full`: a row for each token. `tail`: its last `generation_len` rows, for the generation.
    `sentinel`: nothing, the whole span is -1.
    """
    for name, value in (
        ("carry_len", carry_len),
        ("generation_len", generation_len),
        ("staged_route_len", staged_route_len),
    ):
        if type(value) is not int or value < 0:
            raise InvalidRoutes(f"{name} must be a non-negative integer, got {value!r}")
    if staged_route_len > 0 and staged_route_len == carry_len + generation_len:
        return "full"
    if 0 < generation_len <= staged_route_len:
        return "tail"
    return "sentinel"


def pad_last_route(routes: Routes, token_count: int) -> Routes:
    """An engine's routes for `token_count` tokens as `[token_count, L, K]`, the last row -1.

    The engine gave n-1 rows for n tokens (the row is added) or n rows (the last one is a dummy, and
    replaced). Any other count is `InvalidRoutes`: nobody can say which token a row belongs to.
    """
    _check_array(routes)
    if len(routes) not in (token_count - 1, token_count):
        raise InvalidRoutes(f"{len(routes)} route rows for {token_count} tokens; expected one a token, or one less")
    signed = routes.dtype if routes.dtype.kind == "i" else np.int64
    padded = np.full((token_count, *routes.shape[1:]), MISSING_ROUTE, signed)
    padded[:-1] = routes[: token_count - 1]
    return padded


def route_extras(routes: Routes, *, prev_len: int, delta_len: int, dtype: str | None = None) -> dict[str, str]:
    """The extras entries of a call, from the engine's routes for its *whole* sequence.

    `routes` is `[prev_len + delta_len, L, K]`, or one row shorter, as engines give it. The delta's
    rows are cut out with the last one -1; a child also gets the row of its parent's last token.
    """
    whole = pad_last_route(routes, prev_len + delta_len)
    extras = {ROUTES_KEY: encode_routed_experts(whole[prev_len:], dtype=dtype)}
    if prev_len:
        extras[BOUNDARY_KEY] = encode_routed_experts(whole[prev_len - 1 : prev_len], dtype=dtype)
    return extras


def _narrowest(highest: int) -> str:
    return "int8" if highest < 1 << 7 else "int16" if highest < 1 << 15 else "int32"


def _header(payload: str | memoryview) -> tuple[np.dtype[Any], RouteDims, int]:
    """Dtype, shape and where the values begin. Their length is settled here, before anything is allocated."""
    start = payload[:_MAX_HEADER]
    parts = (start if isinstance(start, str) else start.tobytes().decode("ascii", "replace")).split(":", 3)
    if len(parts) != 4 or parts[0] != ROUTES_MAGIC:
        raise InvalidRoutes(f"not a {ROUTES_MAGIC} envelope: starts with {':'.join(parts)[:16]!r}")
    _, dtype_name, dims_text, _ = parts
    dtype = _dtype(dtype_name)
    dimensions = dims_text.split("x")
    if not all(map(_DIMENSION.fullmatch, dimensions)):
        raise InvalidRoutes(f"dimensions must be positive integers, got {dims_text!r}")
    dims = _check_dims([int(dimension) for dimension in dimensions])
    data_at = len(ROUTES_MAGIC) + len(dtype_name) + len(dims_text) + 3
    expected = -(-_byte_count(dims, dtype) // 3) * 4
    if len(payload) - data_at != expected:
        raise InvalidRoutes(
            f"{len(payload) - data_at} characters; {dims_text} values of {dtype_name} take {expected} in base64"
        )
    return dtype, dims, data_at


def _dtype(name: str) -> np.dtype[Any]:
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise InvalidRoutes(f"unsupported dtype {name!r}; expected one of {', '.join(_DTYPES)}")
    return dtype


def _check_array(routes: Routes) -> RouteDims:
    if routes.dtype.kind not in "iu":
        raise InvalidRoutes(f"expert ids are integers, got {routes.dtype}")
    return _check_dims(routes.shape)


def _check_dims(dims: Sequence[int]) -> RouteDims:
    if len(dims) != 3:
        raise InvalidRoutes(f"routes are [tokens, layers, topk], got {list(dims)}", code=INVALID_RANK)
    tokens, layers, topk = dims
    if min(tokens, layers, topk) <= 0:
        raise InvalidRoutes(f"dimensions must be positive, got {tokens}x{layers}x{topk}")
    if layers * topk > MAX_ROUTE_VALUES:
        raise InvalidRoutes(f"{layers}x{topk} values a token, more than MAX_ROUTE_VALUES={MAX_ROUTE_VALUES}")
    return tokens, layers, topk


def _byte_count(dims: RouteDims, dtype: np.dtype[Any]) -> int:
    return dims[0] * dims[1] * dims[2] * dtype.itemsize


def _check_lowest(expert: int) -> None:
    if expert < MISSING_ROUTE:
        raise InvalidRoutes(f"expert ids are {MISSING_ROUTE} (missing) or more, found {expert}")


def _from_nested(payload: Any) -> Routes:
    """Legacy nested lists `[tokens][layers][topk]` of exact ints, as int32 `[T, L, K]`."""
    dims = [_row_length([payload]), _row_length(payload)]
    layer_rows = list(chain.from_iterable(payload))
    dims.append(_row_length(layer_rows))
    values = list(chain.from_iterable(layer_rows))
    if found := set(map(type, values)) - {int}:
        names = ", ".join(sorted(kind.__name__ for kind in found))
        code = INVALID_RANK if list in found else None
        raise InvalidRoutes(f"expert ids are exact integers, found {names}", code=code)
    _check_dims(dims)
    _check_lowest(min(values))
    if (highest := max(values)) > np.iinfo(np.int32).max:
        raise InvalidRoutes(f"expert {highest} does not fit int32")
    return np.array(values, np.int32).reshape(dims)


def _row_length(rows: list[Any]) -> int:
    """The one length that these rows have. Raises where one is no list, is empty, or is longer than its neighbour."""
    if found := set(map(type, rows)) - {list}:
        names = ", ".join(sorted(kind.__name__ for kind in found))
        raise InvalidRoutes(f"routes are nested lists [tokens][layers][topk], found {names}", code=INVALID_RANK)
    lengths = set(map(len, rows))
    if len(lengths) != 1 or 0 in lengths:
        raise InvalidRoutes(f"rows of routes have one length, above 0; found {sorted(lengths)[:3]}")
    return int(lengths.pop())
