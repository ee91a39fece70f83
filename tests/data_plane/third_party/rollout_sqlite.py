"""A data plane of another distribution: the adapter between `TablePlane` and `rollout_sqlite_storage.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict
from rollout_sqlite_storage import Storage

from rollout_reassembler import DataPlaneConfig, DataPlaneError, DataPlaneUnavailable, FieldSpec
from rollout_reassembler.data_plane.backends import Backend
from rollout_reassembler.data_plane.tables import Row, Table, TablePlane

_FILE = "plane.sqlite"


class SqliteConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str


class SqliteRows(MutableMapping[str, Row]):
    """The rows of one partition, each written whole."""

    def __init__(self, storage: Storage, partition: str) -> None:
        self._storage, self._partition = storage, partition

    def __getitem__(self, key: str) -> Row:
        packed = self._storage.get(self._partition, key)
        if packed is None:
            raise KeyError(key)
        number, cells, tags, claimed_by, stored = msgpack.unpackb(packed)
        return Row(number, _unpacked(cells), json.loads(tags), set(claimed_by), _unpacked(stored))

    def __setitem__(self, key: str, row: Row) -> None:
        fields = row.number, _packed(row.cells), json.dumps(row.tags), sorted(row.claimed_by), _packed(row.stored)
        self._storage.put(self._partition, key, msgpack.packb(fields))

    def __delitem__(self, key: str) -> None:
        self._storage.delete(self._partition, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._storage.keys(self._partition))

    def __len__(self) -> int:
        return len(self._storage.keys(self._partition))


class SqliteTables(Storage):
    def table(self, partition_id: str) -> Table | None:
        schema = self.fact(partition_id, "partitions")
        columns = {name: FieldSpec(*spec) for name, spec in json.loads(schema or "{}").items()}
        return None if schema is None else Table(columns, SqliteRows(self, partition_id))

    def create(self, partition_id: str, schema: dict[str, FieldSpec]) -> None:
        columns = {name: [spec.dtype, spec.rank] for name, spec in schema.items()}
        self.set_fact(partition_id, json.dumps(columns), "partitions")

    def next_number(self) -> int:
        number = int(self.fact("numbered") or 0) + 1
        self.set_fact("numbered", str(number))
        return number

    def epoch(self) -> str:
        # It goes with the file, as the rows do: who opens it again finds all that was staged.
        found = self.fact("epoch")
        if found is None:
            self.set_fact("epoch", found := uuid4().hex)
        return found

    def save(self, directory: Path, metadata: dict[str, Any]) -> None:
        with self.transaction():
            self.set_fact("metadata", json.dumps(metadata))
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / f"{_FILE}.partial"
        self.copy_to(partial)
        os.replace(partial, directory / _FILE)

    def load(self, directory: Path) -> dict[str, Any]:
        if not (directory / _FILE).is_file():
            raise DataPlaneError(f"no checkpoint of a SQLite plane in {directory}", call="load_checkpoint")
        with self.transaction():
            numbered = self.next_number()
        self.copy_from(directory / _FILE)
        with self.transaction():
            self.set_fact("numbered", str(max(numbered, self.next_number())))
            self.set_fact("epoch", uuid4().hex)
            metadata: dict[str, Any] = json.loads(self.fact("metadata") or "{}")
        return metadata


def _packed(cells: dict[str, Any]) -> dict[str, Any]:
    return {
        name: cell if isinstance(cell, bytes) else [cell.dtype.name, cell.shape, cell.tobytes()]
        for name, cell in cells.items()
    }


def _unpacked(cells: dict[str, Any]) -> dict[str, Any]:
    return {
        name: cell if isinstance(cell, bytes) else np.frombuffer(cell[2], cell[0]).reshape(cell[1])[()]
        for name, cell in cells.items()
    }


def _build(cfg: DataPlaneConfig, *, bootstrap: bool) -> TablePlane:
    path = cfg.block.path
    if not bootstrap and not Path(path).is_file():
        raise DataPlaneUnavailable(f"no SQLite plane at {path}; the driver must bootstrap it first", call="connect")
    return TablePlane(SqliteTables(path))


BACKEND = Backend(
    name="sqlite", build=_build, config=SqliteConfig, on_this_machine={"path": ":memory:"}, is_shared=False
)
