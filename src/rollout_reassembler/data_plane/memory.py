"""The data plane in one process: rows in dicts, behind one lock.

For tests, for notebooks and for `--plane memory`: no torch, no Ray, no server. Rows are stored as
read-only copies, so that neither the writer nor a reader can change what is in the plane. All
threads of a process share one instance; another process cannot reach it.

    import numpy as np

    plane = MemoryDataPlane()
    plane.register_partition("calls", {"tokens": FieldSpec("int64", 1)})
    plane.put_samples(["r1/0"], "calls", {"tokens": [np.arange(3)]}, tags=[{"rollout": "r1"}])
    plane.get_samples(["r1/0"], "calls")["tokens"][0]        # array([0, 1, 2])
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollout_reassembler.data_plane.backends import Backend
from rollout_reassembler.data_plane.base import DataPlaneClient, FieldSpec
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.memory_checkpoint import read_snapshot, write_snapshot
from rollout_reassembler.data_plane.tables import Row, Table, TablePlane


class MemoryTables:
    """The `Tables` of a plane in memory."""

    def __init__(self) -> None:
        self.partitions: dict[str, Table] = {}
        self.numbered = 0
        self.life = uuid4().hex
        self._lock = threading.Lock()

    def transaction(self) -> AbstractContextManager[Any]:
        return self._lock

    def table(self, partition_id: str) -> Table | None:
        return self.partitions.get(partition_id)

    def create(self, partition_id: str, schema: dict[str, FieldSpec]) -> None:
        self.partitions[partition_id] = Table(schema)

    def next_number(self) -> int:
        self.numbered += 1
        return self.numbered

    def epoch(self) -> str:
        return self.life

    def save(self, directory: Path, metadata: dict[str, Any]) -> None:
        with self._lock:
            write_snapshot(directory, {name: _saved(table) for name, table in self.partitions.items()}, metadata)

    def load(self, directory: Path) -> dict[str, Any]:
        with self._lock:
            snapshot, metadata = read_snapshot(directory)
            self.partitions = {name: _restored(partition) for name, partition in snapshot.items()}
            restored = [row.number for table in self.partitions.values() for row in table.rows.values()]
            self.numbered = max([self.numbered, *restored])
            self.life = uuid4().hex
            return metadata

    def close(self) -> None:
        with self._lock:
            self.partitions = {}


class MemoryDataPlane(TablePlane):
    """A `DataPlaneClient` whose plane is this object."""

    tables: MemoryTables

    def __init__(self) -> None:
        super().__init__(MemoryTables())


def _saved(table: Table) -> dict[str, Any]:
    return {
        "schema": {column: [spec.dtype, spec.rank] for column, spec in table.schema.items()},
        "rows": [
            {
                "key": key,
                "number": row.number,
                "tags": row.tags,
                "claimed_by": sorted(row.claimed_by),
                "cells": row.cells,
            }
            for key, row in table.rows.items()
        ],
    }


def _restored(snapshot: Mapping[str, Any]) -> Table:
    schema = {name: FieldSpec(dtype, rank) for name, (dtype, rank) in snapshot["schema"].items()}
    rows = {
        row["key"]: Row(row["number"], row["cells"], row["tags"], set(row["claimed_by"])) for row in snapshot["rows"]
    }
    return Table(schema, rows)


def _build(cfg: DataPlaneConfig, *, bootstrap: bool) -> DataPlaneClient:
    return MemoryDataPlane()


BACKEND = Backend(name="memory", build=_build, is_shared=False, cells=("bytes", "tensors"))
