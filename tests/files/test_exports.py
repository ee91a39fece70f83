"""Canonical rows as a table and a file: what is in it, that no size breaks its offsets, that it is written whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_reassembler import KVBatchMeta, RowsMissing
from rollout_reassembler.files.exports import _offsets, export_rows, rows_table
from tests.captures import CANONICAL, chain, finalize, memory_plane, stage
from tests.route_captures import truth
from tests.trainer.test_rows import put_row


def test_offsets_pass_2_to_the_31_without_a_value_in_memory() -> None:
    offsets = _offsets([1_550_000_000, 0, 1_550_000_000])
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [0, 1_550_000_000, 1_550_000_000, 3_100_000_000]


def test_every_jagged_column_has_64_bit_offsets() -> None:
    plane = memory_plane(with_routes=True)
    put_row(plane, "a", [5, 6, 7], routed_experts=truth(3))
    put_row(plane, "b", [8], routed_experts=truth(1))
    batch = plane.get_samples(["a", "b"], CANONICAL)
    table = rows_table(batch, [{}, {}])
    lists = {field.name: field.type for field in table.schema if pa.types.is_nested(field.type)}
    assert lists == {
        "input_ids": pa.large_list(pa.int64()),
        "token_mask": pa.large_list(pa.float32()),
        "generation_logprobs": pa.large_list(pa.float32()),
        "prompt_ids_for_adv": pa.large_list(pa.int64()),
        "routed_experts": pa.large_list(pa.int16()),
        "routed_experts_shape": pa.large_list(pa.int64()),
    }
    assert table["input_ids"].to_pylist() == [[5, 6, 7], [8]]
    flat, shapes = table["routed_experts"].to_pylist(), table["routed_experts_shape"].to_pylist()
    assert np.array_equal(np.reshape(flat[0], shapes[0]), truth(3))


def test_an_exported_file_reads_back_as_the_rows(tmp_path: Path) -> None:
    plane, rollouts = memory_plane(), [chain("r0"), chain("r1", turns=1)]
    stage(plane, *rollouts)
    group = finalize(plane, rollouts)
    assert export_rows(plane, [group.meta], tmp_path / "rows.parquet") == 2
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table["sample_id"].to_pylist() == group.meta.sample_ids
    assert table["input_ids"].to_pylist() == [rollout.tokens() for rollout in rollouts]
    assert table["spans"].to_pylist() == list(plane.get_data(group.meta)["spans"])


def test_groups_with_and_without_route_plans_make_one_file(tmp_path: Path) -> None:
    plane, metas = memory_plane(), []
    for name in ("a", "b"):
        made = [chain(f"{name}/r0")]
        stage(plane, *made)
        metas.append(finalize(plane, made, group_id=name).meta)
    plane.put_samples(["b_g0"], CANONICAL, tags=[{"route_plan": "a plan"}])
    assert export_rows(plane, metas, tmp_path / "rows.parquet") == 2
    assert pq.read_table(tmp_path / "rows.parquet").to_pydict()["route_plan"] == [None, "a plan"]


def test_a_row_that_is_missing_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    plane, made = memory_plane(), [chain("g/r0")]
    stage(plane, *made)
    good = finalize(plane, made).meta
    (tmp_path / "rows.parquet").write_text("old")
    with pytest.raises(RowsMissing, match="gone"):
        export_rows(plane, [good, KVBatchMeta(CANONICAL, sample_ids=["gone"])], tmp_path / "rows.parquet")
    assert (tmp_path / "rows.parquet").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def test_no_group_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no group to export"):
        export_rows(memory_plane(), [], tmp_path / "rows.parquet")
