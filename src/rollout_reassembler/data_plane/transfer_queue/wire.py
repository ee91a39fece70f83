"""A checked column as the queue holds it, one value a row, and back.

With `cells="bytes"` nearly everything is what msgpack writes without help: one bytes value for an
array (see `data_plane/cells.py`) and a plain number for a scalar, which is exact for every dtype we
allow. That is several times cheaper than tensors, for which the queue pays by the cell. Only an array
so large that copying costs more than that goes as it is: it then travels as a frame of its own.

With `cells="tensors"` arrays are tensors and scalars one dense tensor, as any TransferQueue client
expects them. Reading takes both, whatever this client writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.cells import MalformedCell, decode_cell, encode_cell
from rollout_reassembler.data_plane.columns import CheckedColumn

QueueValues = list[Any] | torch.Tensor
"""One value a row: bytes, Python numbers, arrays or tensors `[...]` in a list, or one dense tensor `[rows]`."""

_FRAME_BYTES = 64 << 10
"""From this size on an array goes as it is."""

_PYTHON_TYPES: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float}


def to_queue(column: CheckedColumn, cells: Literal["bytes", "tensors"]) -> QueueValues:
    """The column's values as they are sent. Large arrays, and tensors where they may be written to, are not copied."""
    if isinstance(column, np.ndarray):
        return column.tolist() if cells == "bytes" else torch.from_numpy(column.copy())
    if isinstance(column[0], bytes):
        return list(column)
    if cells == "bytes":
        return [array if array.nbytes >= _FRAME_BYTES else encode_cell(array) for array in column]
    return [_tensor(array) for array in column]


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """The same memory where it may be written to. The queue cannot send numpy's strides of an empty array."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if array.size else torch.empty(array.shape, dtype=tensor.dtype)


def field_schema(values: QueueValues, global_indexes: Sequence[int]) -> dict[str, Any]:
    """What the queue's controller wants to know of a column: dtype and shapes of tensors, nothing of other values."""
    schema: dict[str, Any] = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
    if isinstance(values, torch.Tensor):
        return {**schema, "dtype": values.dtype, "shape": torch.Size([1])}
    if not isinstance(values[0], torch.Tensor):
        return {**schema, "is_non_tensor": True}
    shapes = {index: tuple(tensor.shape) for index, tensor in zip(global_indexes, values, strict=True)}
    return {
        **schema,
        "dtype": values[0].dtype,
        "shape": values[0].shape,
        "is_nested": True,
        "per_sample_shapes": shapes,
    }


def from_queue(values: Sequence[Any], spec: FieldSpec) -> tuple[Any, set[int]]:
    """The column as a `SampleBatch` holds it, and the positions whose value is not one of `spec`.

    At those positions the column holds filler; the caller drops the rows.
    """
    if spec.dtype == "bytes":
        return list(values), {index for index, value in enumerate(values) if type(value) is not bytes}
    if spec.rank == 0:
        return _scalars(values, spec)
    arrays: list[Any] = []
    unreadable: set[int] = set()
    for index, value in enumerate(values):
        try:
            arrays.append(_array(value, spec))
        except MalformedCell:
            arrays.append(None)
            unreadable.add(index)
    return arrays, unreadable


def _array(value: object, spec: FieldSpec) -> npt.NDArray[Any]:
    """A read-only array `[...]` from one cell, one array or one tensor."""
    if isinstance(value, torch.Tensor):
        array = value.numpy()
    elif isinstance(value, np.ndarray):
        array = value
    else:
        return decode_cell(value, spec)
    if array.dtype != np.dtype(spec.dtype) or array.ndim != spec.rank:
        raise MalformedCell(f"expected {spec.dtype} of rank {spec.rank}, got {array.dtype} of rank {array.ndim}")
    array.flags.writeable = False
    return array


def _scalars(values: Sequence[Any], spec: FieldSpec) -> tuple[npt.NDArray[Any], set[int]]:
    """One dense array `[rows]`, and the positions that hold no scalar of `spec`."""
    dtype = np.dtype(spec.dtype)
    numbers = [_number(value, dtype) for value in values]
    unreadable = {index for index, number in enumerate(numbers) if not _fits(number, dtype)}
    if unreadable:
        numbers = [0 if index in unreadable else number for index, number in enumerate(numbers)]
    return np.array(numbers, dtype=dtype), unreadable


def _number(value: object, dtype: np.dtype[Any]) -> object:
    """The Python number in a one-element tensor of the column's dtype; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.numpy().dtype == dtype:
        return value.item()
    return value


def _fits(number: object, dtype: np.dtype[Any]) -> bool:
    if type(number) is not _PYTHON_TYPES[dtype.kind]:
        return False
    if dtype.kind not in "iu":
        return True
    limits = np.iinfo(dtype)
    return limits.min <= number <= limits.max  # type: ignore[operator]
