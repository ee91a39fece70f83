"""Canonical rows as a Parquet file, for looking at, for archives and for trainers that read files.

One row a rollout: `sample_id`, the columns of `reassembly.rows`, and the row's tags as columns of
their own. Jagged columns are Arrow large lists. Routes `[T, L, K]` are stored flat, with their shape beside them.
The file depends on the rows alone: the same rows give the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_reassembler.contract.messages import KVBatchMeta
from rollout_reassembler.data_plane.base import DataPlaneClient, SampleBatch
from rollout_reassembler.reassembly.rows import ROUTES_FIELD, SPANS_FIELD

_TAG_TYPES = {
    "group_id": pa.string(),
    "prompt_idx": pa.int64(),
    "weight_version": pa.int64(),
    "route_plan": pa.string(),
}


def export_rows(dp_client: DataPlaneClient, metas: Sequence[KVBatchMeta], path: Path) -> int:
    """Read the rows that `metas` name and write them to `path`, group by group; returns how many.

    Raises `RowsMissing` when some are not there. The file appears whole or not at all.
    """
    partial = path.with_name(f".{path.name}.partial")
    rows = 0
    writer: pq.ParquetWriter | None = None
    try:
        for meta in metas:
            batch = dp_client.get_data(meta)
            tags = dp_client.get_tags(meta.sample_ids, meta.partition_id)
            table = rows_table(batch, [tag or {} for tag in tags])
            if writer is None:
                writer = pq.ParquetWriter(partial, table.schema)
            writer.write_table(table)
            rows += len(batch)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ValueError("no group to export")
    os.replace(partial, path)
    return rows


def rows_table(batch: SampleBatch, tags: Sequence[dict[str, Any]]) -> pa.Table:
    """The rows of one batch as an Arrow table."""
    columns: dict[str, pa.Array] = {"sample_id": pa.array(batch.sample_ids, pa.string())}
    for name, column in batch.columns.items():
        if name == ROUTES_FIELD:
            columns[name] = _list_array([routes.reshape(-1) for routes in column])
            columns[f"{name}_shape"] = _list_array([np.array(routes.shape, np.int64) for routes in column])
        elif isinstance(column, np.ndarray):
            columns[name] = pa.array(column)
        elif name == SPANS_FIELD:
            columns[name] = pa.array(column, pa.large_binary())
        else:
            columns[name] = _list_array(column)
    for name, kind in _TAG_TYPES.items():
        if name != "route_plan" or any(name in tag for tag in tags):
            columns[name] = pa.array([tag.get(name) for tag in tags], kind)
    return pa.table(columns)


def _list_array(cells: Sequence[np.ndarray[Any, Any]]) -> pa.LargeListArray:
    """Jagged cells `[T_i]` as one Arrow list array, without a Python number in between."""
    return pa.LargeListArray.from_arrays(pa.array(_offsets(list(map(len, cells)))), pa.array(np.concatenate(cells)))


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where each cell begins, and where the last one ends: int64 `[N + 1]`; routes of a group may pass 2**31 values."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
