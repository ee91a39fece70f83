"""The memory plane on disk: one file, written whole or not at all.

    magic | SHA-256 of all that follows | length of the index (uint64) | index (JSON) | cells, end to end

The index is the snapshot with each cell replaced by where its bytes lie: `["bytes", nbytes]` or
`[dtype, nbytes, *shape]`, in the order of the file. Nothing in it is executable: a checkpoint from
elsewhere can be wrong, not harmful.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollout_reassembler.contract.errors import CheckpointDamaged, DataPlaneError
from rollout_reassembler.data_plane.durable import sync_directory

_FILE = "memory_plane.rows"
_MAGIC = b"RRMEM\x00\x00\x01"
_PREFIX = len(_MAGIC) + 32


def write_snapshot(directory: Path, snapshot: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Write the snapshot under its final name only once it is on disk: a crash leaves the old one."""
    cells: list[bytes] = []
    partitions = {
        name: {**partition, "rows": [_indexed(row, cells) for row in partition["rows"]]}
        for name, partition in snapshot.items()
    }
    index = json.dumps({"metadata": metadata, "partitions": partitions}).encode()
    head = len(index).to_bytes(8, "little") + index
    digest = hashlib.sha256(head)
    for cell in cells:
        digest.update(cell)
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{_FILE}.partial"
    with partial.open("wb") as file:
        file.write(_MAGIC + digest.digest() + head)
        file.writelines(cells)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(directory / _FILE)
    sync_directory(directory)


def read_snapshot(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The snapshot and its metadata.

    Raises `DataPlaneError` when there is none, `CheckpointDamaged` when it is cut or changed.
    """
    path = directory / _FILE
    if not path.is_file():
        raise DataPlaneError(f"no checkpoint of a memory plane at {path}", call="load_checkpoint")
    content = path.read_bytes()
    body = memoryview(content)[_PREFIX:]
    if content[:_PREFIX] != _MAGIC + hashlib.sha256(body).digest():
        raise CheckpointDamaged(f"{path} is damaged or cut short; use another checkpoint", call="load_checkpoint")
    offset = 8 + int.from_bytes(body[:8], "little")
    index = json.loads(bytes(body[8:offset]))
    for partition in index["partitions"].values():
        for row in partition["rows"]:
            for name, where in row["cells"].items():
                row["cells"][name] = _cell(body[offset : offset + where[1]], where)
                offset += where[1]
    return index["partitions"], index["metadata"]


def _indexed(row: Mapping[str, Any], cells: list[bytes]) -> dict[str, Any]:
    """The row with its cells' places; their bytes are appended to `cells`."""
    places: dict[str, list[Any]] = {}
    for name, cell in row["cells"].items():
        data = cell if isinstance(cell, bytes) else cell.tobytes()
        kind = ["bytes", len(data)] if isinstance(cell, bytes) else [cell.dtype.name, len(data), *cell.shape]
        places[name] = kind
        cells.append(data)
    return {**row, "cells": places}


def _cell(data: memoryview, where: list[Any]) -> Any:
    """One cell back: bytes, a read-only array, or a numpy scalar."""
    if where[0] == "bytes":
        return bytes(data)
    array = np.frombuffer(bytes(data), dtype=where[0]).reshape(where[2:])
    return array if array.ndim else array[()]
