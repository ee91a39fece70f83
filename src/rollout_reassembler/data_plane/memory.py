"""The data plane in one process: the contract of `base.py` on dicts, behind one lock.

For tests, for notebooks and for `--plane memory`: no torch, no Ray, no server. Rows are stored as
read-only copies, so that neither the writer nor a reader can change what is in the plane. All
threads of a process share one instance; another process cannot reach it.

    plane = MemoryDataPlane()
    plane.register_partition("calls", {"tokens": FieldSpec("int64", 1)})
    plane.put_samples(["r1/0"], "calls", {"tokens": [np.arange(3)]}, tags=[{"rollout": "r1"}])
    plane.get_samples(["r1/0"], "calls")["tokens"][0]        # array([0, 1, 2])
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from rollout_reassembler.contract.errors import (
    DataPlaneError,
    DataPlaneUnavailable,
    PartitionNotRegistered,
    RowsMissing,
    SchemaViolation,
)
from rollout_reassembler.contract.messages import KVBatchMeta
from rollout_reassembler.data_plane.backends import Backend
from rollout_reassembler.data_plane.base import (
    Column,
    DataPlaneClient,
    FieldSpec,
    Reservation,
    SampleBatch,
    Schema,
    StoredSamples,
    Tags,
)
from rollout_reassembler.data_plane.columns import (
    CheckedColumn,
    checked_columns,
    checked_sample_ids,
    checked_schema,
    checked_tags,
    refuse_condemned,
    selected_fields,
)
from rollout_reassembler.data_plane.config import DataPlaneConfig, Deadlines
from rollout_reassembler.data_plane.gate import WriteGate
from rollout_reassembler.data_plane.memory_checkpoint import read_snapshot, write_snapshot

_QUIESCED_SECONDS = Deadlines().quiesced


@dataclass
class _Row:
    """One row: its number, its cells by column (bytes, read-only arrays, numpy scalars) and its tags.

    `stored` are cells that were not announced yet.
    """

    number: int
    cells: dict[str, Any] = field(default_factory=dict)
    tags: Tags = field(default_factory=dict)
    claimed_by: set[str] = field(default_factory=set)
    stored: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Partition:
    """The registered columns and the rows by key, oldest first."""

    schema: dict[str, FieldSpec]
    rows: dict[str, _Row] = field(default_factory=dict)


class MemoryDataPlane:
    """A `DataPlaneClient` whose plane is this object. Every method holds one lock from start to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gate = WriteGate()
        self._partitions: dict[str, _Partition] = {}
        self._is_closed = False
        self._epoch = uuid4().hex
        self._numbered = 0

    def register_partition(
        self,
        partition_id: str,
        fields: Schema,
        *,
        num_samples: int | None = None,
        consumer_tasks: Sequence[str] = (),
    ) -> None:
        schema = checked_schema(fields, partition_id)
        with self._lock:
            self._refuse_closed("register_partition", partition_id)
            existing = self._partitions.get(partition_id)
            if existing is None:
                self._partitions[partition_id] = _Partition(schema)
            elif existing.schema != schema:
                raise SchemaViolation(
                    f"already registered with other columns: {existing.schema}",
                    call="register_partition",
                    partition=partition_id,
                )

    def is_registered(self, partition_id: str) -> bool:
        with self._lock:
            self._refuse_closed("is_registered", partition_id)
            return partition_id in self._partitions

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Column] | None = None,
        tags: Sequence[Tags] | None = None,
    ) -> KVBatchMeta:
        keys = checked_sample_ids(sample_ids)
        new_tags = checked_tags(tags, len(keys))
        with self._gate.writing("put_samples", partition_id, keys, _QUIESCED_SECONDS), self._lock:
            partition = self._partition("put_samples", partition_id)
            columns = checked_columns(fields, partition.schema, len(keys), partition_id)
            if not columns and new_tags is None:
                raise ValueError("a put writes columns, tags, or both; got neither")
            if columns:
                found = [partition.rows.get(key) for key in keys]
                refuse_condemned(partition_id, keys, [row.tags if row else {} for row in found])
            frozen = {name: _frozen(column) for name, column in columns.items()}
            for index, key in enumerate(keys):
                row = self._row(partition, key)
                row.cells.update({name: column[index] for name, column in frozen.items()})
                if new_tags is not None:
                    row.tags.update(new_tags[index])
        return KVBatchMeta(partition_id=partition_id, sample_ids=keys, fields=list(columns) or None, tags=new_tags)

    def reserve_samples(
        self, sample_ids: Sequence[str], partition_id: str, *, look_up: tuple[str, str] | None = None
    ) -> Reservation:
        keys = checked_sample_ids(sample_ids)
        with self._gate.writing("reserve_samples", partition_id, keys, _QUIESCED_SECONDS), self._lock:
            partition = self._partition("reserve_samples", partition_id)
            companion = self._partition("reserve_samples", look_up[0]).rows if look_up else {}
            rows = [self._row(partition, key) for key in keys]
            found = companion.get(look_up[1]) if look_up else None
            return Reservation(
                partition_id=partition_id,
                sample_ids=tuple(keys),
                numbers=tuple(row.number for row in rows),
                tags=tuple(_copied(row.tags) for row in rows),
                is_readable=all(row.cells for row in rows),
                looked_up=_copied(found.tags) if found else None,
            )

    def store_samples(self, reservation: Reservation, fields: Mapping[str, Column]) -> StoredSamples:
        partition_id, keys = reservation.partition_id, reservation.sample_ids
        with self._gate.writing("store_samples", partition_id, keys, _QUIESCED_SECONDS), self._lock:
            partition = self._partition("store_samples", partition_id)
            columns = checked_columns(fields, partition.schema, len(keys), partition_id)
            frozen = {name: _frozen(column) for name, column in columns.items()}
            for index, row in self._reserved(reservation).items():
                cells = {name: column[index] for name, column in frozen.items()}
                (row.cells or row.stored).update(cells)
        return StoredSamples(reservation)

    def announce_samples(self, stored: StoredSamples, tags: Sequence[Tags] | None = None) -> None:
        partition_id, keys = stored.reservation.partition_id, stored.reservation.sample_ids
        new_tags = checked_tags(tags, len(keys))
        with self._gate.writing("announce_samples", partition_id, keys, _QUIESCED_SECONDS), self._lock:
            reserved = self._reserved(stored.reservation)
            if not all(row.cells or row.stored for row in reserved.values()):
                what = "nothing is stored for these rows: a checkpoint was loaded meanwhile"
                raise DataPlaneError(what, call="announce_samples", partition=partition_id, keys=keys)
            for index, row in reserved.items():
                row.cells.update(row.stored)
                row.stored = {}
                if new_tags is not None:
                    row.tags.update(new_tags[index])

    def release_samples(self, reservation: Reservation) -> None:
        partition_id, keys = reservation.partition_id, reservation.sample_ids
        with self._gate.writing("release_samples", partition_id, keys, _QUIESCED_SECONDS), self._lock:
            rows = self._partition("release_samples", partition_id).rows
            for index in self._reserved(reservation):
                del rows[keys[index]]

    def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        partial: bool = False,
    ) -> SampleBatch:
        with self._lock:
            partition = self._partition("get_samples", partition_id)
            names = selected_fields(select_fields, partition.schema, partition_id)
            held = {key: row.cells for key in sample_ids if (row := partition.rows.get(key)) and _holds(row, names)}
            found = [key for key in sample_ids if key in held]
            missing = list(dict.fromkeys(key for key in sample_ids if key not in held))
            if missing and not partial:
                raise RowsMissing(
                    f"rows or columns that are not there: {len(missing)} of {len(sample_ids)} rows",
                    call="get_samples",
                    partition=partition_id,
                    keys=missing,
                )
            columns = {name: [held[key][name] for key in found] for name in names}
            return SampleBatch(found, {n: _column(partition.schema[n], c) for n, c in columns.items()}, missing)

    def get_tags(self, sample_ids: Sequence[str], partition_id: str) -> list[Tags | None]:
        with self._lock:
            rows = self._partition("get_tags", partition_id).rows
            return [_copied(rows[key].tags) if key in rows else None for key in sample_ids]

    def list_samples(self, partition_id: str) -> dict[str, Tags]:
        with self._lock:
            rows = self._partition("list_samples", partition_id).rows
            return {key: _copied(row.tags) for key, row in rows.items()}

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        with self._gate.writing("clear_samples", partition_id, sample_ids or (), _QUIESCED_SECONDS), self._lock:
            rows = self._partition("clear_samples", partition_id).rows
            for key in list(rows) if sample_ids is None else sample_ids:
                rows.pop(key, None)

    def claim_meta(
        self, partition_id: str, task_name: str, required_fields: Sequence[str], batch_size: int
    ) -> KVBatchMeta:
        with self._gate.writing("claim_meta", partition_id, (), _QUIESCED_SECONDS), self._lock:
            partition = self._partition("claim_meta", partition_id)
            names = selected_fields(required_fields, partition.schema, partition_id)
            claimed: dict[str, _Row] = {}
            for key, row in partition.rows.items():
                if len(claimed) == batch_size:
                    break
                if task_name not in row.claimed_by and _holds(row, names):
                    claimed[key] = row
            for row in claimed.values():
                row.claimed_by.add(task_name)
            return KVBatchMeta(
                partition_id=partition_id,
                task_name=task_name,
                sample_ids=list(claimed),
                fields=names,
                tags=[_copied(row.tags) for row in claimed.values()],
            )

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> SampleBatch:
        return self.get_samples(meta.sample_ids, meta.partition_id, select_fields or meta.fields)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        with self._lock:
            rows = self._partition("check_consumption_status", partition_id).rows
            return all(row.claimed_by.issuperset(task_names) for row in rows.values())

    def now(self) -> float:
        return time.time()

    def epoch(self) -> str:
        with self._lock:
            self._refuse_closed("epoch", "")
            return self._epoch

    @contextmanager
    def quiesce(self, deadline_s: float) -> Iterator[list[str]]:
        """As in `base.py`; all writers are threads of this process."""
        self._refuse_closed("quiesce", "")
        with self._gate.closed(deadline_s):
            yield ["this process"]

    def save_checkpoint(self, directory: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        with self._lock:
            self._refuse_closed("save_checkpoint", directory)
            write_snapshot(Path(directory), self._snapshot(), dict(metadata or {}))

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        with self._lock:
            self._refuse_closed("load_checkpoint", directory)
            snapshot, metadata = read_snapshot(Path(directory))
            self._partitions = {name: _restored(partition) for name, partition in snapshot.items()}
            restored = [row.number for partition in self._partitions.values() for row in partition.rows.values()]
            self._numbered = max([self._numbered, *restored])
            self._epoch = uuid4().hex
            return metadata

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._partitions = {}

    def _refuse_closed(self, call: str, partition_id: str) -> None:
        if self._is_closed:
            raise DataPlaneUnavailable("this memory plane was closed", call=call, partition=partition_id)

    def _partition(self, call: str, partition_id: str) -> _Partition:
        self._refuse_closed(call, partition_id)
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise PartitionNotRegistered(
                "not registered; the driver calls register_partition once, before any row is written",
                call=call,
                partition=partition_id,
            )
        return partition

    def _row(self, partition: _Partition, key: str) -> _Row:
        """The key's row; a new one has a number that no row had before."""
        row = partition.rows.get(key)
        if row is None:
            self._numbered += 1
            row = partition.rows[key] = _Row(self._numbered)
        return row

    def _reserved(self, reservation: Reservation) -> dict[int, _Row]:
        """Those rows, by their place in the reservation, that still have the number they were given."""
        rows = self._partition("reserve_samples", reservation.partition_id).rows
        places = enumerate(zip(reservation.sample_ids, reservation.numbers, strict=True))
        return {at: row for at, (key, number) in places if (row := rows.get(key)) and row.number == number}

    def _snapshot(self) -> dict[str, Any]:
        return {
            name: {
                "schema": {column: [spec.dtype, spec.rank] for column, spec in partition.schema.items()},
                "rows": [
                    {
                        "key": key,
                        "number": row.number,
                        "tags": row.tags,
                        "claimed_by": sorted(row.claimed_by),
                        "cells": row.cells,
                    }
                    for key, row in partition.rows.items()
                ],
            }
            for name, partition in self._partitions.items()
        }


def _restored(snapshot: Mapping[str, Any]) -> _Partition:
    schema = {name: FieldSpec(dtype, rank) for name, (dtype, rank) in snapshot["schema"].items()}
    rows = {
        row["key"]: _Row(row["number"], row["cells"], row["tags"], set(row["claimed_by"])) for row in snapshot["rows"]
    }
    return _Partition(schema, rows)


def _frozen(column: CheckedColumn) -> CheckedColumn:
    """The plane's own copy of a checked column; arrays in it are read-only."""
    if isinstance(column, np.ndarray):
        return column.copy()
    if column and isinstance(column[0], bytes):
        return column
    copies = [np.array(cell, copy=True, order="C") for cell in column]
    for array in copies:
        array.flags.writeable = False
    return copies


def _holds(row: _Row, names: Sequence[str]) -> bool:
    return all(name in row.cells for name in names)


def _column(spec: FieldSpec, cells: list[Any]) -> Any:
    """Cells as a reader gets them: one dense array `[rows]` for scalars, else the list as it is."""
    if spec.dtype != "bytes" and spec.rank == 0:
        return np.array(cells, dtype=spec.dtype)
    return cells


def _copied(tags: Tags) -> Tags:
    """A deep copy: a reader that changes nested tags must not change the plane."""
    return copy.deepcopy(tags)


def _build(cfg: DataPlaneConfig, *, bootstrap: bool) -> DataPlaneClient:
    return MemoryDataPlane()


BACKEND = Backend(name="memory", build=_build, is_shared=False, cells=("bytes", "tensors"))
