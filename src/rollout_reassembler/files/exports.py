"""Canonical rows as a Parquet file, for looking at, for archives and for trainers that read files.

One row a rollout: `sample_id`, the columns of `reassembly.rows`, and the row's tags as columns of
their own. Jagged columns are Arrow large lists. Routes `[T, L, K]` are stored flat, with their shape beside them.
The file depends on the rows alone: the same rows give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_reassembler.contract.messages import KVBatchMeta
from rollout_reassembler.data_plane.base import DataPlaneClient, SampleBatch
from rollout_reassembler.data_plane.durable import replacing_file
from rollout_reassembler.reassembly.rows import ROUTES_FIELD, SPANS_FIELD

_TAG_TYPES = {
    "group_id": pa.string(),
    "prompt_idx": pa.int64(),
    "weight_version": pa.int64(),
    "route_plan": pa.string(),
}


def export_rows(dp_client: DataPlaneClient, metas: Sequence[KVBatchMeta], path: Path) -> int:
    """Read the rows that `metas` name and write them to `path`, group by group; returns how many.

    Raises `RowsMissing` when some are not there, `ValueError` when `metas` is empty, and `OSError` when the disk
    refuses. The file appears whole or not at all; one that was there before is replaced, or not touched.
    """
    if not metas:
        raise ValueError("no group to export")
    all_tags = [[tag or {} for tag in dp_client.get_tags(meta.sample_ids, meta.partition_id)] for meta in metas]
    with_plans = any("route_plan" in tag for tags in all_tags for tag in tags)
    rows = 0
    with replacing_file(path) as partial, ExitStack() as closing:
        writer: pq.ParquetWriter | None = None
        for meta, tags in zip(metas, all_tags, strict=True):
            batch = dp_client.get_data(meta)
            table = rows_table(batch, tags, with_plans=with_plans)
            if writer is None:
                writer = closing.enter_context(pq.ParquetWriter(partial, table.schema))
            writer.write_table(table)
            rows += len(batch)
    return rows


def rows_table(batch: SampleBatch, tags: Sequence[dict[str, Any]], *, with_plans: bool = False) -> pa.Table:
    """The rows of one batch as an Arrow table, `with_plans` with their route plans."""
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
        if name != "route_plan" or with_plans:
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
