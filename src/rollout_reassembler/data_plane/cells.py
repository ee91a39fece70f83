"""An array as one bytes value, and back without a copy.

    magic `RRc1` | dtype code | rank | 2 bytes of zeros | rank × uint64 | the array, little-endian, C order

The header is a multiple of eight bytes, so that the view which `decode_cell` returns is aligned. A
cell says what it holds: one that another row's bytes, another version or a bit flip put under a key
is noticed (`MalformedCell`) as far as dtype, rank and size go. Its content proves itself elsewhere.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_reassembler.data_plane.base import FieldSpec

_MAGIC = b"RRc1"
_PREFIX = struct.Struct("<4sBB2x")

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")
"""Every dtype a column may have: those that numpy, torch and a torch pickle all know (wider unsigned ones are not).

A dtype's place in here is its code on the wire: only ever append.
"""

_CODES = {name: code for code, name in enumerate(DTYPES)}


class MalformedCell(ValueError):
    """Bytes that are not a cell of the expected dtype and rank."""


def encode_cell(array: npt.NDArray[Any]) -> bytes:
    """The array `[...]` of a supported dtype as one bytes value."""
    name = array.dtype.name
    header = _PREFIX.pack(_MAGIC, _CODES[name], array.ndim) + struct.pack(f"<{array.ndim}Q", *array.shape)
    return b"".join((header, np.ascontiguousarray(array, _little_endian(name)).data))


def decode_cell(cell: object, spec: FieldSpec) -> npt.NDArray[Any]:
    """A read-only view `[...]` of the cell's array. Raises `MalformedCell`."""
    if type(cell) is not bytes or len(cell) < _PREFIX.size:
        raise MalformedCell(f"expected a cell of {spec.dtype}, got {type(cell).__name__}")
    magic, code, rank = _PREFIX.unpack_from(cell)
    if (magic, code, rank) != (_MAGIC, _CODES[spec.dtype], spec.rank):
        raise MalformedCell(f"expected a cell of {spec.dtype} of rank {spec.rank}, got another one")
    offset = _PREFIX.size + 8 * rank
    if len(cell) < offset:
        raise MalformedCell("a cell cut short in its header")
    shape = struct.unpack_from(f"<{rank}Q", cell, _PREFIX.size)
    dtype = _little_endian(spec.dtype)
    if len(cell) - offset != math.prod(shape) * dtype.itemsize:
        raise MalformedCell(f"a cell of {len(cell) - offset} bytes cannot hold {spec.dtype} {list(shape)}")
    try:
        return np.frombuffer(cell, dtype, offset=offset).reshape(shape)
    except ValueError as error:
        raise MalformedCell(f"no array can have the shape {list(shape)}") from error


@lru_cache
def _little_endian(name: str) -> np.dtype[Any]:
    """The dtype as it lies in a cell; on little-endian machines the native one."""
    return np.dtype("<" + np.dtype(name).str[1:])
