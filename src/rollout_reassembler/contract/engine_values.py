"""What engines hand over, as columns: token ids int64 `[T]`, log probabilities and masks float32 `[T]`.

In comes whatever a caller has: arrays and tensors of any integer or float width, sequences of Python,
numpy or torch numbers, also mixed as `[*prefix, *ids]` mixes them. Values are judged, not types:

    token_ids([np.int64(1), 2])                    int64 [1, 2]
    token_ids(torch.tensor([1, 2]))                int64 [1, 2], likewise int8, uint64, …
    token_ids(np.array([1.0, 2.0]))                int64 [1, 2]
    token_ids([1.5]), token_ids([True])            InvalidStagedCall, naming the value and its place
    token_ids(np.array([16_777_216], np.float32))  InvalidStagedCall: float32 writes 16,777,217 the same way

What must stay true: no value is changed on its way in but by rounding log probabilities to binary32, and
arrays and lists of plain numbers meet no Python loop. Records of the wire are read by `digests`, which
takes exact types alone; torch is looked at only where its caller has imported it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_reassembler.contract.digests import Floats, Integers, as_floats, as_token_ids
from rollout_reassembler.contract.errors import InvalidStagedCall

Numbers = Sequence[Any] | npt.NDArray[Any]
"""Numbers of one row, `[T]`: a sequence, a numpy array, a torch tensor, or what converts to an array."""

_NOT_SEQUENCES = (str, bytes, bytearray, dict, set, frozenset)


def token_ids(values: Numbers, what: str = "token ids") -> Integers:
    """Token ids as int64 `[T]`: whole numbers from 0 to 2**63 - 1, whatever type they came as."""
    array, exact_below = _array(values, what)
    if array.dtype.kind == "f":
        array = _whole(array, exact_below, what)
    elif array.dtype.kind not in "iu":
        raise InvalidStagedCall(f"{what} must be whole numbers, got {array.dtype}[{len(array)}]")
    return as_token_ids(array)


def floats(values: Numbers, what: str, *, or_bools: bool = False) -> Floats:
    """Values as float32 `[T]`: finite, also when rounded to binary32; with `or_bools`, False is 0 and True is 1."""
    array, _ = _array(values, what)
    if array.dtype.kind not in ("iufb" if or_bools else "iuf"):
        raise InvalidStagedCall(f"{what} must be numbers, got {array.dtype}[{len(array)}]")
    return as_floats(array if array.dtype.kind == "f" else array.astype(np.float64), what)


def count(value: Any, what: str) -> int:
    """A Python, numpy or torch whole number as an int, 0 or more. Raises `ValueError`."""
    if not isinstance(value, bool | np.bool_):
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if number >= 0:
            return number
    raise ValueError(f"{what} is a non-negative int, got {value!r:.80}")


def _array(values: Any, what: str) -> tuple[npt.NDArray[Any], float]:
    """A flat array of the values, and below which size its caller's float type tells whole numbers apart."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        array, exact_below = _of_tensor(values, torch, what)
    elif isinstance(values, Sequence) and not isinstance(values, _NOT_SEQUENCES) and not hasattr(values, "__array__"):
        array, exact_below = _of_sequence(values, torch, what)
    elif isinstance(values, np.ndarray) or hasattr(values, "__array__"):
        array, exact_below = np.asarray(values), 0.0
    else:
        raise InvalidStagedCall(f"{what} must be a sequence or an array of numbers, got {_name(type(values))}")
    if array.ndim != 1:
        raise InvalidStagedCall(f"{what} must be one-dimensional, got {array.dtype}{list(array.shape)}")
    if array.dtype == object:
        array, exact_below = _of_sequence(array.tolist(), torch, what)
    elif array.dtype.name.startswith(("bfloat16", "float8")):
        array, exact_below = array.astype(np.float32), 2.0**8 if array.dtype.name == "bfloat16" else 2.0**3
    return array, exact_below or _exact_below(array.dtype)


def _of_tensor(tensor: Any, torch: Any, what: str) -> tuple[npt.NDArray[Any], float]:
    """A tensor of any device and dtype, with a gradient or without; what numpy has no type for comes as float32."""
    exact_below = 2.0 / torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
    try:
        plain = tensor.detach()
        if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
            plain = plain.float()
        return plain.numpy(force=True), exact_below
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise InvalidStagedCall(f"{what}: a {tensor.dtype} tensor has no values to read: {error}") from error


def _of_sequence(values: Sequence[Any], torch: Any, what: str) -> tuple[npt.NDArray[Any], float]:
    """A sequence of numbers; one loop over it only where it holds others than Python's own."""
    exact_below = 0.0
    kinds = set(map(type, values))
    if not kinds <= {int, float, bool}:
        dtypes = {value.dtype for value in values if hasattr(value, "dtype")}
        exact_below = min((_exact_below(dtype) for dtype in dtypes), default=0.0)
        values = [_plain(value, at, torch, what) for at, value in enumerate(values)]
        kinds = set(map(type, values))
    if bool in kinds and len(kinds) > 1:
        at = next(at for at, value in enumerate(values) if type(value) is bool)
        raise InvalidStagedCall(f"{what} must be numbers, found a bool at {at}")
    dtype = np.int64 if kinds <= {int} else np.bool_ if bool in kinds else np.float64
    try:
        return np.array(values, dtype), exact_below
    except OverflowError as error:
        raise InvalidStagedCall(f"{what} must fit 64 bits: {error}") from error


def _plain(value: Any, at: int, torch: Any, what: str) -> Any:
    """One element as Python's own int, float or bool."""
    scalar = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    if scalar or (torch is not None and isinstance(value, torch.Tensor) and value.ndim == 0):
        value = value.item()
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise InvalidStagedCall(f"{what} must be numbers, found {_name(type(value))} at {at}")


def _exact_below(dtype: Any) -> float:
    """Up to where a float type has every whole number: 2**24 for float32; 0 for other types."""
    try:
        return 2.0 / float(np.finfo(dtype).eps)
    except (TypeError, ValueError):
        return 0.0


def _whole(array: npt.NDArray[Any], exact_below: float, what: str) -> npt.NDArray[np.int64]:
    """Floats that are whole numbers, and small enough that their type did not round them to it."""
    wrong = np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)))
    if wrong.size:
        raise InvalidStagedCall(f"{what} must be whole numbers, found {array[wrong[0]]!s} at {wrong[0]}")
    rounded = np.flatnonzero(np.abs(array) >= exact_below)
    if rounded.size:
        found = f"{int(array[rounded[0]])} at {rounded[0]}"
        detail = f"{what} came as floats that lack whole numbers from {int(exact_below)} on, found {found}"
        raise InvalidStagedCall(f"{detail}; hand them over as integers")
    return array.astype(np.int64)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
