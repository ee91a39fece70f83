"""What goes into a plane, checked before anything is written; the same rules for every adapter.

A put comes in as the caller has it (lists of arrays, dense arrays, Python numbers) and leaves here
as *checked columns*: a list of `bytes`, a list of C-ordered arrays of the registered dtype and rank,
or one dense array `[rows]` for a column of scalars. An adapter stores checked columns as they are and
needs no check of its own.

Nothing is cast. The one convenience: a plain Python `bool`, `int` or `float` takes the dtype of a
scalar column of its own kind, and is refused when it does not fit into it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_reassembler.contract.errors import RowsCondemned, SchemaViolation
from rollout_reassembler.data_plane.base import CONDEMNED_TAG, Column, FieldSpec, Schema, Tags
from rollout_reassembler.data_plane.cells import DTYPES

CheckedColumn = list[bytes] | list[npt.NDArray[Any]] | npt.NDArray[Any]

_REGISTER = "register_partition"

_PYTHON_KINDS: dict[type, str] = {bool: "b", int: "iu", float: "f"}


def checked_schema(fields: Schema, partition: str) -> dict[str, FieldSpec]:
    """The columns to register, under numpy's own dtype names; none for rows of tags alone.

    Raises `SchemaViolation`.
    """
    if not all(isinstance(name, str) and name and not name.startswith("__") for name in fields):
        raise _violation(partition, "each column needs a name, and `__` begins those of the plane itself", _REGISTER)
    checked: dict[str, FieldSpec] = {}
    for name, spec in fields.items():
        dtype = spec.dtype if spec.dtype == "bytes" else np.dtype(spec.dtype).name
        if dtype not in ("bytes", *DTYPES):
            known = ", ".join(("bytes", *DTYPES))
            raise _violation(partition, f"{name} cannot be {dtype}; choose one of {known}", _REGISTER)
        checked[name] = FieldSpec(dtype, spec.rank)
    return checked


def checked_sample_ids(sample_ids: Sequence[str]) -> list[str]:
    """The keys of a put: at least one, none empty, none twice. Raises `ValueError`."""
    keys = list(sample_ids)
    if not keys:
        raise ValueError("no sample ids: a put writes at least one row")
    if not all(isinstance(key, str) and key for key in keys):
        raise ValueError("every sample id must be a non-empty string")
    if len(set(keys)) != len(keys):
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"a put names each row once; repeated: {', '.join(map(repr, repeated[:3]))}")
    return keys


def checked_tags(tags: Sequence[Tags] | None, rows: int) -> list[Tags] | None:
    """A private copy of one tags dict a row, as JSON brings it back (tuples become lists).

    Raises `ValueError` for another count or for values that are not JSON: tags are metadata.
    """
    if tags is None:
        return None
    if len(tags) != rows:
        raise ValueError(f"{len(tags)} tags for {rows} rows")
    if not all(isinstance(row, dict) and all(isinstance(name, str) for name in row) for row in tags):
        raise ValueError("the tags of a row are a dict with string keys")
    try:
        return [json.loads(json.dumps(row)) for row in tags]
    except TypeError as error:
        raise ValueError(f"tags hold metadata only (JSON values): {error}") from error


def checked_columns(
    fields: Mapping[str, Column] | None, schema: Schema, rows: int, partition: str
) -> dict[str, CheckedColumn]:
    """Every given column, checked against the registered fields.

    Raises `SchemaViolation` for an unknown column or a value of another dtype or rank, `ValueError`
    for a column of another length.
    """
    checked: dict[str, CheckedColumn] = {}
    for name, column in (fields or {}).items():
        spec = schema.get(name)
        if spec is None:
            known = ", ".join(sorted(schema))
            raise _violation(partition, f"no column {name!r} is registered; there are: {known}")
        if len(column) != rows:
            raise ValueError(f"column {name!r} has {len(column)} values for {rows} rows")
        checked[name] = _checked_column(name, column, spec, partition)
    return checked


def selected_fields(select_fields: Sequence[str] | None, schema: Schema, partition: str) -> list[str]:
    """The columns that a get reads: those named, or all registered ones. Raises `SchemaViolation`."""
    names = list(schema) if select_fields is None else list(dict.fromkeys(select_fields))
    unknown = [name for name in names if name not in schema]
    if unknown:
        known = ", ".join(sorted(schema))
        what = f"no column {', '.join(map(repr, unknown))} is registered; there are: {known}"
        raise SchemaViolation(what, call="get_samples", partition=partition)
    if not names:
        raise ValueError("no column to read: name one; a partition of tags alone is read with get_tags")
    return names


def _checked_column(name: str, column: Column, spec: FieldSpec, partition: str) -> CheckedColumn:
    if spec.dtype == "bytes":
        return _checked_bytes(name, column, partition)
    if spec.rank == 0:
        return _checked_scalars(name, column, spec, partition)
    return _checked_arrays(name, column, spec, partition)


def _checked_bytes(name: str, column: Column, partition: str) -> list[bytes]:
    for index, cell in enumerate(column):
        if type(cell) is not bytes:
            raise _violation(partition, f"{name}[{index}] must be bytes, got {_described(cell)}")
    return list(column)


def _checked_arrays(name: str, column: Column, spec: FieldSpec, partition: str) -> list[npt.NDArray[Any]]:
    """`[...]` arrays of exactly the registered dtype and rank, C-ordered (a view where it already was)."""
    dtype = np.dtype(spec.dtype)
    arrays: list[npt.NDArray[Any]] = []
    for index, cell in enumerate(column):
        if not isinstance(cell, np.ndarray) or cell.dtype != dtype or cell.ndim != spec.rank:
            expected = f"a {spec.dtype} array of rank {spec.rank}"
            raise _violation(partition, f"{name}[{index}] must be {expected}, got {_described(cell)}")
        arrays.append(np.ascontiguousarray(cell))
    return arrays


def _checked_scalars(name: str, column: Column, spec: FieldSpec, partition: str) -> npt.NDArray[Any]:
    """One dense array `[rows]` of exactly the registered dtype; always the caller's values, never rounded ints."""
    dtype = np.dtype(spec.dtype)
    if isinstance(column, np.ndarray):
        if column.dtype != dtype or column.ndim != 1:
            raise _violation(partition, f"{name} must be {spec.dtype} scalars, got {_described(column)}")
        return np.ascontiguousarray(column)
    for index, cell in enumerate(column):
        is_exact = isinstance(cell, np.generic | np.ndarray) and cell.dtype == dtype and cell.ndim == 0
        if not is_exact and dtype.kind not in _PYTHON_KINDS.get(type(cell), ""):
            raise _violation(partition, f"{name}[{index}] must be a {spec.dtype} scalar, got {_described(cell)}")
    try:
        with np.errstate(over="raise"):
            return np.array(column, dtype=dtype)
    except (OverflowError, FloatingPointError) as error:
        raise _violation(partition, f"{name} holds a number that does not fit {spec.dtype}: {error}") from error


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"a {value.dtype} array of shape {list(value.shape)}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _violation(partition: str, what: str, call: str = "put_samples") -> SchemaViolation:
    return SchemaViolation(f"{what}; nothing was written", call=call, partition=partition)


def refuse_condemned(partition_id: str, keys: Sequence[str], tags: Sequence[Tags]) -> None:
    """Raise `RowsCondemned` for a put of columns into rows that have these tags, if a sweep condemned one of them."""
    condemned = [key for key, found in zip(keys, tags, strict=True) if found.get(CONDEMNED_TAG) is not None]
    if condemned:
        what = "a sweep is about to clear these rows; put them again when it has"
        raise RowsCondemned(what, call="put_samples", partition=partition_id, keys=condemned)
