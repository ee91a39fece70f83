"""A plane of one process over tables of rows: the contract of `base.py`, for whoever can keep rows by key.

`TablePlane` checks what comes in, numbers rows, merges tags, claims, fences and waits at the gate. What an
adapter gives it is `Tables`: partitions, each a schema and a mutable mapping of rows by key. The memory plane's
are dicts (`memory.py`); another one's may be files or a database.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollout_reassembler.contract.errors import (
    DataPlaneError,
    DataPlaneUnavailable,
    PartitionNotRegistered,
    RowsMissing,
    SchemaViolation,
)
from rollout_reassembler.contract.messages import KVBatchMeta
from rollout_reassembler.data_plane.base import (
    Column,
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
from rollout_reassembler.data_plane.config import Deadlines
from rollout_reassembler.data_plane.gate import WriteGate

_QUIESCED_SECONDS = Deadlines().quiesced


@dataclass
class Row:
    """One row: its number, its cells by column (bytes, read-only arrays, numpy scalars) and its tags.

    `claimed_by` are the tasks that have had it. `stored` are cells that were not announced yet.
    """

    number: int
    cells: dict[str, Any] = field(default_factory=dict)
    tags: Tags = field(default_factory=dict)
    claimed_by: set[str] = field(default_factory=set)
    stored: dict[str, Any] = field(default_factory=dict)


@dataclass
class Table:
    """The registered columns and the rows by key, oldest first. A row that was changed is set again."""

    schema: dict[str, FieldSpec]
    rows: MutableMapping[str, Row] = field(default_factory=dict)


class Tables(Protocol):
    """Where a `TablePlane` keeps its rows. All but `save`, `load` and `close` is asked within a transaction."""

    def transaction(self) -> AbstractContextManager[None]:
        """One call of the plane, one at a time: what it wrote is durable when the block ends."""

    def table(self, partition_id: str) -> Table | None:
        """The partition, `None` where nobody has registered it."""

    def create(self, partition_id: str, schema: dict[str, FieldSpec]) -> None:
        """Register a partition that is not there."""

    def next_number(self) -> int:
        """A number that no row had before, also after a load."""

    def epoch(self) -> str:
        """Another one after each `load`."""

    def save(self, directory: Path, metadata: dict[str, Any]) -> None:
        """Write all of it there, whole or not at all, in place of what is there."""

    def load(self, directory: Path) -> dict[str, Any]:
        """Replace all of it by what was saved; its metadata. Raises `DataPlaneError` where there is no checkpoint."""

    def close(self) -> None: ...


class TablePlane:
    """A `DataPlaneClient` whose plane is this object. Every method is one transaction from start to end."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._gate = WriteGate()
        self._is_closed = False

    def register_partition(self, partition_id: str, fields: Schema) -> None:
        schema = checked_schema(fields, partition_id)
        with self.tables.transaction():
            self._refuse_closed("register_partition", partition_id)
            existing = self.tables.table(partition_id)
            if existing is None:
                self.tables.create(partition_id, schema)
            elif existing.schema != schema:
                raise SchemaViolation(
                    f"already registered with other columns: {existing.schema}",
                    call="register_partition",
                    partition=partition_id,
                )

    def is_registered(self, partition_id: str) -> bool:
        with self.tables.transaction():
            self._refuse_closed("is_registered", partition_id)
            return self.tables.table(partition_id) is not None

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Column] | None = None,
        tags: Sequence[Tags] | None = None,
    ) -> KVBatchMeta:
        keys = checked_sample_ids(sample_ids)
        new_tags = checked_tags(tags, len(keys))
        with self._writing("put_samples", partition_id, keys):
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
                partition.rows[key] = row
        return KVBatchMeta(partition_id=partition_id, sample_ids=keys, fields=list(columns) or None, tags=new_tags)

    def reserve_samples(
        self, sample_ids: Sequence[str], partition_id: str, *, look_up: tuple[str, str] | None = None
    ) -> Reservation:
        keys = checked_sample_ids(sample_ids)
        with self._writing("reserve_samples", partition_id, keys):
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
        with self._writing("store_samples", partition_id, keys):
            partition = self._partition("store_samples", partition_id)
            columns = checked_columns(fields, partition.schema, len(keys), partition_id)
            frozen = {name: _frozen(column) for name, column in columns.items()}
            for index, row in self._reserved(reservation).items():
                cells = {name: column[index] for name, column in frozen.items()}
                (row.cells or row.stored).update(cells)
                partition.rows[keys[index]] = row
        return StoredSamples(reservation)

    def announce_samples(self, stored: StoredSamples, tags: Sequence[Tags] | None = None) -> None:
        partition_id, keys = stored.reservation.partition_id, stored.reservation.sample_ids
        new_tags = checked_tags(tags, len(keys))
        with self._writing("announce_samples", partition_id, keys):
            rows = self._partition("announce_samples", partition_id).rows
            reserved = self._reserved(stored.reservation)
            if not all(row.cells or row.stored for row in reserved.values()):
                what = "nothing is stored for these rows: a checkpoint was loaded meanwhile"
                raise DataPlaneError(what, call="announce_samples", partition=partition_id, keys=keys)
            for index, row in reserved.items():
                row.cells.update(row.stored)
                row.stored = {}
                if new_tags is not None:
                    row.tags.update(new_tags[index])
                rows[keys[index]] = row

    def release_samples(self, reservation: Reservation) -> None:
        partition_id, keys = reservation.partition_id, reservation.sample_ids
        with self._writing("release_samples", partition_id, keys):
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
        with self.tables.transaction():
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
        with self.tables.transaction():
            rows = self._partition("get_tags", partition_id).rows
            return [_copied(rows[key].tags) if key in rows else None for key in sample_ids]

    def list_samples(self, partition_id: str) -> dict[str, Tags]:
        with self.tables.transaction():
            rows = self._partition("list_samples", partition_id).rows
            return {key: _copied(row.tags) for key, row in rows.items()}

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        with self._writing("clear_samples", partition_id, sample_ids or ()):
            rows = self._partition("clear_samples", partition_id).rows
            for key in list(rows) if sample_ids is None else sample_ids:
                rows.pop(key, None)

    def claim_meta(
        self, partition_id: str, task_name: str, required_fields: Sequence[str], batch_size: int
    ) -> KVBatchMeta:
        with self._writing("claim_meta", partition_id):
            partition = self._partition("claim_meta", partition_id)
            names = selected_fields(required_fields, partition.schema, partition_id)
            claimed: dict[str, Row] = {}
            for key, row in partition.rows.items():
                if len(claimed) == batch_size:
                    break
                if task_name not in row.claimed_by and _holds(row, names):
                    claimed[key] = row
            for key, row in claimed.items():
                row.claimed_by.add(task_name)
                partition.rows[key] = row
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
        with self.tables.transaction():
            rows = self._partition("check_consumption_status", partition_id).rows
            return all(row.claimed_by.issuperset(task_names) for row in rows.values())

    def now(self) -> float:
        return time.time()

    def epoch(self) -> str:
        with self.tables.transaction():
            self._refuse_closed("epoch", "")
            return self.tables.epoch()

    @contextmanager
    def quiesce(self, deadline_s: float) -> Iterator[list[str]]:
        """As in `base.py`; all writers are threads of this process."""
        self._refuse_closed("quiesce", "")
        with self._gate.closed(deadline_s):
            yield ["this process"]

    def save_checkpoint(self, directory: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        self._refuse_closed("save_checkpoint", directory)
        self.tables.save(Path(directory), dict(metadata or {}))

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        self._refuse_closed("load_checkpoint", directory)
        return self.tables.load(Path(directory))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.tables.close()

    @contextmanager
    def _writing(self, call: str, partition_id: str, keys: Sequence[str] = ()) -> Iterator[None]:
        """One call that writes; it waits before while the plane is quiesced."""
        with self._gate.writing(call, partition_id, keys, _QUIESCED_SECONDS), self.tables.transaction():
            yield

    def _refuse_closed(self, call: str, partition_id: str) -> None:
        if self._is_closed:
            raise DataPlaneUnavailable("this plane was closed", call=call, partition=partition_id)

    def _partition(self, call: str, partition_id: str) -> Table:
        self._refuse_closed(call, partition_id)
        partition = self.tables.table(partition_id)
        if partition is None:
            raise PartitionNotRegistered(
                "not registered; the driver calls register_partition once, before any row is written",
                call=call,
                partition=partition_id,
            )
        return partition

    def _row(self, partition: Table, key: str) -> Row:
        """The key's row; a new one has a number that no row had before."""
        row = partition.rows.get(key)
        if row is None:
            row = partition.rows[key] = Row(self.tables.next_number())
        return row

    def _reserved(self, reservation: Reservation) -> dict[int, Row]:
        """Those rows, by their place in the reservation, that still have the number they were given."""
        rows = self._partition("reserve_samples", reservation.partition_id).rows
        places = enumerate(zip(reservation.sample_ids, reservation.numbers, strict=True))
        return {at: row for at, (key, number) in places if (row := rows.get(key)) and row.number == number}


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


def _holds(row: Row, names: Sequence[str]) -> bool:
    return all(name in row.cells for name in names)


def _column(spec: FieldSpec, cells: list[Any]) -> Any:
    """Cells as a reader gets them: one dense array `[rows]` for scalars, else the list as it is."""
    if spec.dtype != "bytes" and spec.rank == 0:
        return np.array(cells, dtype=spec.dtype)
    return cells


def _copied(tags: Tags) -> Tags:
    """A deep copy: a reader that changes nested tags must not change the plane."""
    return copy.deepcopy(tags)
