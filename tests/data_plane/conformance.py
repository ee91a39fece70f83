"""What `data_plane/base.py` promises, as tests that every adapter passes.

An adapter's test file subclasses `PlaneConformance` and gives it a `plane` fixture:

    class TestMemory(PlaneConformance):
        @pytest.fixture
        def plane(self): ...
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import (
    DataPlaneError,
    PartitionNotRegistered,
    RowsCondemned,
    RowsMissing,
    SchemaViolation,
)
from rollout_reassembler.data_plane.base import CONDEMNED_TAG, DataPlaneClient, FieldSpec

SCHEMA = {
    "tokens": FieldSpec("int64", 1),
    "logprobs": FieldSpec("float32", 1),
    "mask": FieldSpec("bool", 1),
    "routes": FieldSpec("int16", 3),
    "grid": FieldSpec("int32", 2),
    "reward": FieldSpec("float32"),
    "step": FieldSpec("int64"),
    "is_valid": FieldSpec("bool"),
    "payload": FieldSpec("bytes"),
}


def row(index: int, length: int = 5) -> dict[str, Any]:
    """One row's value in each column, made of its index: `tokens [T]`, `routes [T, 2, 3]`, `grid [T, 4]`."""
    rng = np.random.default_rng(index)
    return {
        "tokens": rng.integers(-(2**62), 2**62, length),
        "logprobs": rng.standard_normal(length).astype(np.float32),
        "mask": rng.integers(0, 2, length).astype(bool),
        "routes": rng.integers(-1, 2**15 - 1, (length, 2, 3)).astype(np.int16),
        "grid": rng.integers(0, 100, (length, 4)).astype(np.int32),
        "reward": np.float32(rng.standard_normal()),
        "step": np.int64(2**53 + 1 + index),
        "is_valid": np.bool_(index % 2),
        "payload": rng.bytes(length),
    }


def columns_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows as the columns of a put."""
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    for name in columns.keys() & {"reward", "step", "is_valid"}:
        columns[name] = np.array(columns[name])
    return columns


def assert_same_row(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal in every column: type, dtype, shape and each bit."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, bytes):
            assert type(got[name]) is bytes, name
            assert got[name] == value, name
        else:
            assert got[name].dtype == value.dtype, name
            assert got[name].shape == value.shape, name
            assert got[name].tobytes() == value.tobytes(), name


class PlaneConformance:
    """Each test gets a plane and a registered, empty partition of its own."""

    @pytest.fixture
    def partition(self, plane: DataPlaneClient, partition_name: str) -> str:
        plane.register_partition(partition_name, SCHEMA)
        return partition_name

    # --- what is written is what is read ----------------------------------------------------------

    def test_large_cells_come_back_beside_small_ones(self, plane: DataPlaneClient, partition: str) -> None:
        rows = [row(1, 3), row(2, 100_000), row(3, 0), row(4, 9_000)]
        keys = ["small", "large", "empty", "between"]
        for written in (rows, rows[::-1]):
            plane.put_samples(keys, partition, columns_of(written))
            batch = plane.get_samples(keys, partition)
            for (_, got), expected in zip(batch.rows(), written, strict=True):
                assert_same_row(got, expected)
            assert not any(cell.flags.writeable for name in ("tokens", "mask", "routes") for cell in batch[name])

    def test_a_plane_is_a_data_plane_client(self, plane: DataPlaneClient) -> None:
        assert isinstance(plane, DataPlaneClient)

    def test_every_column_comes_back_bit_by_bit(self, plane: DataPlaneClient, partition: str) -> None:
        rows = [row(index, length) for index, length in enumerate((5, 1, 700))]
        plane.put_samples(["a", "b", "c"], partition, columns_of(rows))
        batch = plane.get_samples(["a", "b", "c"], partition)
        assert batch.sample_ids == ["a", "b", "c"]
        for (_, got), expected in zip(batch.rows(), rows, strict=True):
            assert_same_row(got, expected)

    def test_a_single_row_comes_back_bit_by_bit(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a"], partition, columns_of([row(7)]))
        batch = plane.get_samples(["a"], partition)
        assert batch["step"].shape == (1,)
        assert_same_row(next(batch.rows())[1], row(7))

    def test_rows_of_one_length_stay_rows(self, plane: DataPlaneClient, partition: str) -> None:
        rows = [row(index, 6) for index in range(4)]
        plane.put_samples(list("abcd"), partition, columns_of(rows))
        batch = plane.get_samples(list("abcd"), partition, ["tokens", "routes"])
        assert [value.shape for value in batch["tokens"]] == [(6,)] * 4
        assert [value.shape for value in batch["routes"]] == [(6, 2, 3)] * 4

    def test_rows_come_in_the_order_asked(self, plane: DataPlaneClient, partition: str) -> None:
        keys = [f"k{index}" for index in range(20)]
        plane.put_samples(keys, partition, {"step": np.arange(20), "payload": [key.encode() for key in keys]})
        asked = [keys[index] for index in np.random.default_rng(0).permutation(20)]
        batch = plane.get_samples(asked, partition, ["step", "payload"])
        assert batch.sample_ids == asked
        assert [f"k{step}" for step in batch["step"]] == asked
        assert [value.decode() for value in batch["payload"]] == asked

    def test_a_key_asked_for_twice_comes_twice(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a", "b"], partition, {"step": np.arange(2), "tokens": [np.arange(1), np.arange(2)]})
        batch = plane.get_samples(["b", "a", "b"], partition, ["step", "tokens"])
        assert batch.sample_ids == ["b", "a", "b"]
        assert batch["step"].tolist() == [1, 0, 1]
        assert [len(value) for value in batch["tokens"]] == [2, 1, 2]

    def test_empty_arrays_and_empty_bytes_are_values(self, plane: DataPlaneClient, partition: str) -> None:
        empty = {**row(1, 0), "grid": np.zeros((0, 0), np.int32), "routes": np.zeros((0, 2, 3), np.int16)}
        plane.put_samples(["empty", "full"], partition, columns_of([empty, row(2)]))
        batch = dict(plane.get_samples(["full", "empty"], partition).rows())
        assert_same_row(batch["empty"], empty)
        assert_same_row(batch["full"], row(2))

    def test_extremes_of_each_dtype_survive(self, plane: DataPlaneClient, partition_name: str) -> None:
        names = ["bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"]
        plane.register_partition(
            partition_name,
            {f"{name}_{rank}": FieldSpec(name, rank) for name in names for rank in (0, 1)},
        )
        extremes = {}
        for name in names:
            dtype = np.dtype(name)
            if dtype.kind == "f":
                info = np.finfo(dtype)
                values = np.array([info.min, info.max, info.smallest_subnormal, -0.0, np.inf, np.nan], dtype)
            elif dtype.kind == "b":
                values = np.array([True, False] * 3)
            else:
                limits = np.iinfo(dtype)
                values = np.array([limits.min, limits.max, 0, 1, limits.max - 1, limits.min + 1], dtype)
            extremes[name] = values
        keys = [f"k{index}" for index in range(6)]
        columns: dict[str, Any] = {f"{name}_0": values for name, values in extremes.items()}
        columns |= {f"{name}_1": [values] * 6 for name, values in extremes.items()}
        plane.put_samples(keys, partition_name, columns)
        batch = plane.get_samples(keys, partition_name)
        for name, values in extremes.items():
            assert batch[f"{name}_0"].dtype == values.dtype
            assert batch[f"{name}_0"].tobytes() == values.tobytes(), name
            assert all(value.dtype == values.dtype for value in batch[f"{name}_1"])
            assert all(value.tobytes() == values.tobytes() for value in batch[f"{name}_1"]), name

    def test_python_numbers_take_the_dtype_of_their_column(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a", "b"], partition, {"step": [1, 2**62], "reward": [0.5, -1.0], "is_valid": [True, False]})
        batch = plane.get_samples(["a", "b"], partition, ["step", "reward", "is_valid"])
        assert (batch["step"].dtype, batch["step"].tolist()) == (np.int64, [1, 2**62])
        assert (batch["reward"].dtype, batch["reward"].tolist()) == (np.float32, [0.5, -1.0])
        assert (batch["is_valid"].dtype, batch["is_valid"].tolist()) == (np.bool_, [True, False])

    def test_a_strided_array_is_stored_as_what_it_shows(self, plane: DataPlaneClient, partition: str) -> None:
        tokens = np.arange(20)[::-2]
        routes = np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1)
        plane.put_samples(["a"], partition, {"tokens": [tokens], "routes": [routes]})
        batch = plane.get_samples(["a"], partition, ["tokens", "routes"])
        np.testing.assert_array_equal(batch["tokens"][0], tokens)
        np.testing.assert_array_equal(batch["routes"][0], routes)

    def test_cells_of_several_megabytes(self, plane: DataPlaneClient, partition: str) -> None:
        tokens = np.random.default_rng(0).integers(0, 2**60, 1_000_000)
        payload = tokens.tobytes()[:3_000_001]
        plane.put_samples(["big"], partition, {"tokens": [tokens], "payload": [payload]})
        batch = plane.get_samples(["big"], partition, ["tokens", "payload"])
        np.testing.assert_array_equal(batch["tokens"][0], tokens)
        assert batch["payload"] == [payload]

    def test_keys_are_any_text(self, plane: DataPlaneClient, partition_name: str) -> None:
        partition = f"{partition_name}/日本/…"
        plane.register_partition(partition, {"step": FieldSpec("int64")})
        keys = ["r/1/0", "ünïcode-😀", "with space", "a\nb", "../..", "k" * 500, "0", "ａ", "a"]
        plane.put_samples(keys, partition, {"step": np.arange(len(keys))})
        assert plane.get_samples(keys[::-1], partition)["step"].tolist() == list(range(len(keys)))[::-1]
        assert plane.list_samples(partition).keys() == set(keys)

    def test_a_caller_that_changes_its_array_does_not_change_the_row(
        self, plane: DataPlaneClient, partition: str
    ) -> None:
        tokens, step, tags = np.arange(4), np.arange(1), {"list": [1]}
        plane.put_samples(["a"], partition, {"tokens": [tokens], "step": step}, tags=[tags])
        tokens[:], step[:] = 9, 9
        tags["list"].append(2)
        batch = plane.get_samples(["a"], partition, ["tokens", "step"])
        assert batch["tokens"][0].tolist() == [0, 1, 2, 3]
        assert batch["step"].tolist() == [0]
        assert plane.get_tags(["a"], partition) == [{"list": [1]}]

    def test_a_reader_cannot_change_the_row(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a"], partition, {"tokens": [np.arange(4)]}, tags=[{"list": [1]}])
        array = plane.get_samples(["a"], partition, ["tokens"])["tokens"][0]
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
        tags = plane.get_tags(["a"], partition)[0]
        assert tags is not None
        tags["list"].append(2)
        assert plane.get_tags(["a"], partition) == [{"list": [1]}]

    # --- overwriting ------------------------------------------------------------------------------

    def test_a_put_overwrites_only_the_columns_it_names(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a", "b"], partition, columns_of([row(1), row(2)]))
        plane.put_samples(["b"], partition, {"tokens": [np.arange(9)], "reward": [3.5]})
        batch = dict(plane.get_samples(["a", "b"], partition).rows())
        assert_same_row(batch["a"], row(1))
        assert_same_row(batch["b"], {**row(2), "tokens": np.arange(9), "reward": np.float32(3.5)})

    def test_columns_may_come_in_several_puts(self, plane: DataPlaneClient, partition: str) -> None:
        values = columns_of([row(3)])
        for name in SCHEMA:
            with pytest.raises(RowsMissing):
                plane.get_samples(["a"], partition)
            plane.put_samples(["a"], partition, {name: values[name]})
        assert_same_row(next(plane.get_samples(["a"], partition).rows())[1], row(3))

    def test_the_same_put_again_changes_nothing(self, plane: DataPlaneClient, partition: str) -> None:
        for _ in range(3):
            plane.put_samples(["a", "b"], partition, columns_of([row(1), row(2)]), tags=[{"x": 1}, {}])
        batch = plane.get_samples(["a", "b"], partition)
        assert len(batch) == 2
        assert plane.list_samples(partition) == {"a": {"x": 1}, "b": {}}

    # --- missing rows -----------------------------------------------------------------------------

    def test_missing_rows_are_named_exactly(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a", "c"], partition, columns_of([row(1), row(3)]))
        with pytest.raises(RowsMissing) as raised:
            plane.get_samples(["a", "b", "c", "d"], partition)
        assert raised.value.keys == ("b", "d")
        assert raised.value.call == "get_samples"
        assert raised.value.partition == partition

    def test_partial_reads_what_is_there(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a", "c"], partition, columns_of([row(1), row(3)]))
        batch = plane.get_samples(["d", "c", "b", "a"], partition, partial=True)
        assert batch.sample_ids == ["c", "a"]
        assert batch.missing == ["d", "b"]
        for (_, got), expected in zip(batch.rows(), (row(3), row(1)), strict=True):
            assert_same_row(got, expected)

    def test_a_row_that_lacks_a_selected_column_is_missing(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["full", "other"], partition, columns_of([row(1), row(2)]))
        plane.put_samples(["half"], partition, {"tokens": [np.arange(3)], "step": [5]})
        with pytest.raises(RowsMissing) as raised:
            plane.get_samples(["full", "half", "other"], partition, ["tokens", "reward"])
        assert raised.value.keys == ("half",)
        batch = plane.get_samples(["full", "half", "other"], partition, ["tokens", "reward"], partial=True)
        assert (batch.sample_ids, batch.missing) == (["full", "other"], ["half"])
        assert plane.get_samples(["full", "half"], partition, ["tokens", "step"])["step"].tolist() == [
            row(1)["step"],
            5,
        ]

    def test_a_column_nobody_wrote_is_missing_everywhere(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a", "b"], partition, {"step": [1, 2]})
        batch = plane.get_samples(["a", "b"], partition, ["step", "tokens"], partial=True)
        assert (batch.sample_ids, batch.missing) == ([], ["a", "b"])

    def test_all_rows_missing(self, plane: DataPlaneClient, partition: str) -> None:
        for written in (False, True):
            batch = plane.get_samples(["x", "y", "x"], partition, partial=True)
            assert (batch.sample_ids, batch.missing, len(batch)) == ([], ["x", "y"], 0)
            with pytest.raises(RowsMissing):
                plane.get_samples(["x"], partition)
            if not written:
                plane.put_samples(["a"], partition, columns_of([row(1)]))

    def test_reading_no_rows_gives_no_rows(self, plane: DataPlaneClient, partition: str) -> None:
        batch = plane.get_samples([], partition, ["tokens", "reward"])
        assert (batch.sample_ids, batch.missing, len(batch)) == ([], [], 0)
        assert len(batch["tokens"]) == 0
        assert batch["reward"].dtype == np.float32
        assert plane.get_tags([], partition) == []

    # --- refused before anything is written -------------------------------------------------------

    @pytest.mark.parametrize(
        ("keys", "columns"),
        [
            ([], {}),
            (["a", "a"], {"step": [1, 2]}),
            (["a", ""], {"step": [1, 2]}),
            (["a", "b"], {"step": [1]}),
            (["a", "b"], {"step": [1, 2], "tokens": [np.arange(3)]}),
            (["a"], {}),
        ],
        ids=["no keys", "repeated", "empty key", "short", "one short", "nothing to write"],
    )
    def test_a_misused_put_writes_nothing(
        self, plane: DataPlaneClient, partition: str, keys: list[str], columns: dict[str, Any]
    ) -> None:
        with pytest.raises(ValueError, match=r"sample id|each row once|values for \d rows|got neither"):
            plane.put_samples(keys, partition, columns)
        assert plane.list_samples(partition) == {}

    @pytest.mark.parametrize(
        "tags", [[{}], [{"x": 1}, {"x": object()}], [{"x": np.arange(2)}, {}], [{1: 2}, {}], ["ab", {}]]
    )
    def test_tags_that_are_not_metadata_are_refused(self, plane: DataPlaneClient, partition: str, tags: Any) -> None:
        with pytest.raises(ValueError, match="tags"):
            plane.put_samples(["a", "b"], partition, {"step": [1, 2]}, tags=tags)
        assert plane.list_samples(partition) == {}

    @pytest.mark.parametrize(
        "columns",
        [
            {"unknown": [1, 2]},
            {"tokens": [np.arange(2), np.arange(2, dtype=np.int32)]},
            {"tokens": [np.arange(2), np.zeros((1, 2), np.int64)]},
            {"tokens": [np.arange(2), [1, 2]]},
            {"tokens": [np.arange(2).astype(">i8"), np.arange(2)]},
            {"tokens": [np.arange(2), None]},
            {"tokens": [b"ab", b"cd"]},
            {"routes": [np.zeros((1, 2), np.int16)] * 2},
            {"reward": np.zeros(2)},
            {"reward": [1, 2]},
            {"reward": [1.0, True]},
            {"reward": [1.0, 1e300]},
            {"reward": np.zeros((2, 1), np.float32)},
            {"step": [1, 2.0]},
            {"step": [1, 2**63]},
            {"step": [True, 2]},
            {"step": np.arange(2, dtype=np.int32)},
            {"is_valid": [0, 1]},
            {"payload": [b"", "text"]},
            {"payload": [b"", bytearray(b"x")]},
            {"step": np.arange(2), "payload": [b"x", None]},
        ],
    )
    def test_what_does_not_fit_the_schema_is_refused(
        self, plane: DataPlaneClient, partition: str, columns: dict[str, Any]
    ) -> None:
        with pytest.raises(SchemaViolation) as raised:
            plane.put_samples(["a", "b"], partition, columns, tags=[{}, {}])
        assert raised.value.partition == partition
        assert plane.list_samples(partition) == {}

    def test_unknown_columns_are_refused_in_reads(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a"], partition, columns_of([row(1)]))
        with pytest.raises(SchemaViolation, match="no_such"):
            plane.get_samples(["a"], partition, ["tokens", "no_such"])
        with pytest.raises(ValueError, match="no column"):
            plane.get_samples(["a"], partition, [])

    # --- partitions -------------------------------------------------------------------------------

    def test_every_call_on_an_unregistered_partition_says_so(
        self, plane: DataPlaneClient, partition_name: str, tmp_path: Path
    ) -> None:
        assert not plane.is_registered(partition_name)
        calls = [
            lambda: plane.put_samples(["a"], partition_name, {"step": [1]}),
            lambda: plane.put_samples(["a"], partition_name, tags=[{}]),
            lambda: plane.get_samples(["a"], partition_name),
            lambda: plane.get_samples([], partition_name),
            lambda: plane.get_tags(["a"], partition_name),
            lambda: plane.list_samples(partition_name),
            lambda: plane.clear_samples(["a"], partition_name),
            lambda: plane.clear_samples([], partition_name),
            lambda: plane.clear_samples(None, partition_name),
            lambda: plane.claim_meta(partition_name, "task", ["step"], 1),
            lambda: plane.check_consumption_status(partition_name, ["task"]),
        ]
        for call in calls:
            with pytest.raises(PartitionNotRegistered) as raised:
                call()
            assert raised.value.partition == partition_name

    def test_registering_again_is_nothing_and_with_other_columns_an_error(
        self, plane: DataPlaneClient, partition: str
    ) -> None:
        plane.put_samples(["a"], partition, columns_of([row(1)]), tags=[{"x": 1}])
        plane.register_partition(partition, dict(reversed(SCHEMA.items())))
        assert plane.is_registered(partition)
        for other in (
            {**SCHEMA, "step": FieldSpec("int32")},
            {**SCHEMA, "step": FieldSpec("int64", 1)},
            {**SCHEMA, "more": FieldSpec("int64")},
            {"step": FieldSpec("int64")},
        ):
            with pytest.raises(SchemaViolation):
                plane.register_partition(partition, other)
        assert_same_row(next(plane.get_samples(["a"], partition).rows())[1], row(1))

    def test_dtypes_and_names_that_no_plane_holds_are_refused(
        self, plane: DataPlaneClient, partition_name: str
    ) -> None:
        for dtype in ("complex64", "datetime64[s]", "object", "U8", "uint64"):
            with pytest.raises(SchemaViolation):
                plane.register_partition(partition_name, {"x": FieldSpec(dtype)})
        for name in ("", "__owner__"):
            with pytest.raises(SchemaViolation):
                plane.register_partition(partition_name, {name: FieldSpec("bytes")})
        assert not plane.is_registered(partition_name)

    def test_partitions_do_not_see_each_other(self, plane: DataPlaneClient, partition: str) -> None:
        other = f"{partition}/other"
        plane.register_partition(other, {"step": FieldSpec("int64"), "tokens": FieldSpec("float32", 1)})
        plane.put_samples(["a"], partition, {"step": [1], "tokens": [np.arange(2)]}, tags=[{"of": "one"}])
        plane.put_samples(["a", "b"], other, {"step": [2, 3], "tokens": [np.zeros(1, np.float32)] * 2})
        plane.clear_samples(["b", "c"], partition)
        assert plane.get_samples(["a"], partition, ["step"])["step"].tolist() == [1]
        assert plane.get_samples(["a", "b"], other)["step"].tolist() == [2, 3]
        plane.clear_samples(None, other)
        assert plane.list_samples(partition) == {"a": {"of": "one"}}
        assert plane.list_samples(other) == {}

    # --- tags -------------------------------------------------------------------------------------

    def test_tags_merge(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a", "b"], partition, {"step": [1, 2]}, tags=[{"x": 1, "y": {"z": [1, None]}}, {}])
        plane.put_samples(["b", "a"], partition, tags=[{"n": 1.5}, {"x": "new", "t": True}])
        assert plane.get_tags(["a", "b"], partition) == [{"x": "new", "y": {"z": [1, None]}, "t": True}, {"n": 1.5}]
        plane.put_samples(["a"], partition, {"step": [9]})
        assert plane.get_tags(["a"], partition) == [{"x": "new", "y": {"z": [1, None]}, "t": True}]
        assert plane.get_samples(["a", "b"], partition, ["step"])["step"].tolist() == [9, 2]

    def test_a_row_may_be_tags_alone(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["record"], partition, tags=[{"answer": "…", "n": 3}])
        assert plane.get_tags(["record", "none"], partition) == [{"answer": "…", "n": 3}, None]
        assert plane.list_samples(partition) == {"record": {"answer": "…", "n": 3}}
        assert plane.get_samples(["record"], partition, partial=True).missing == ["record"]
        plane.clear_samples(["record"], partition)
        assert plane.get_tags(["record"], partition) == [None]

    def test_a_partition_may_be_of_tags_alone(self, plane: DataPlaneClient, partition_name: str) -> None:
        plane.register_partition(partition_name, {})
        plane.register_partition(partition_name, {})
        plane.put_samples(["a", "b"], partition_name, tags=[{"x": 1}, {"x": 2}])
        assert plane.get_tags(["b", "c", "a", "b"], partition_name) == [{"x": 2}, None, {"x": 1}, {"x": 2}]
        with pytest.raises(SchemaViolation):
            plane.put_samples(["a"], partition_name, {"step": [1]})
        with pytest.raises(ValueError, match="no column"):
            plane.get_samples(["a"], partition_name)

    def test_tags_are_json_and_come_back_as_json_does(self, plane: DataPlaneClient, partition: str) -> None:
        tags = {
            "text": "日本 😀",
            "int": 2**70,
            "float": 0.1,
            "none": None,
            "tuple": (1, 2),
            "deep": {"a": [{"b": {}}]},
        }
        plane.put_samples(["a"], partition, tags=[tags])
        assert plane.get_tags(["a"], partition) == [{**tags, "tuple": [1, 2]}]

    def test_a_put_says_what_it_wrote(self, plane: DataPlaneClient, partition: str) -> None:
        meta = plane.put_samples(["a", "b"], partition, {"step": [1, 2]}, tags=[{"x": 1}, {}])
        assert (meta.partition_id, meta.sample_ids, meta.fields) == (partition, ["a", "b"], ["step"])
        assert plane.get_data(meta)["step"].tolist() == [1, 2]

    # --- clearing ---------------------------------------------------------------------------------

    def test_clear_removes_rows_and_their_tags(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["a", "b", "c"], partition, columns_of([row(1), row(2), row(3)]), tags=[{"x": 1}] * 3)
        plane.clear_samples(["a", "c", "never there", "a"], partition)
        assert plane.list_samples(partition) == {"b": {"x": 1}}
        assert plane.get_tags(["a", "b"], partition) == [None, {"x": 1}]
        assert plane.get_samples(["a", "b", "c"], partition, partial=True).missing == ["a", "c"]
        plane.put_samples(["a"], partition, {"step": [1]})
        assert plane.get_tags(["a"], partition) == [{}]
        assert plane.get_samples(["a"], partition, partial=True).missing == ["a"]

    def test_clearing_nothing_is_nothing(self, plane: DataPlaneClient, partition: str) -> None:
        plane.clear_samples(None, partition)
        plane.clear_samples(["x"], partition)
        plane.put_samples(["a"], partition, {"step": [1]})
        plane.clear_samples([], partition)
        plane.clear_samples(["x", "y"], partition)
        assert plane.list_samples(partition) == {"a": {}}

    def test_a_partition_is_usable_after_all_of_it_was_cleared(self, plane: DataPlaneClient, partition: str) -> None:
        for turn in range(3):
            rows = [row(10 * turn + index, 3 + index) for index in range(4)]
            plane.put_samples(list("abcd"), partition, columns_of(rows))
            for (_, got), expected in zip(plane.get_samples(list("abcd"), partition).rows(), rows, strict=True):
                assert_same_row(got, expected)
            plane.clear_samples(None, partition)
            assert plane.list_samples(partition) == {}
            assert plane.is_registered(partition)

    # --- consuming --------------------------------------------------------------------------------

    def test_each_task_claims_each_row_once(self, plane: DataPlaneClient, partition: str) -> None:
        keys = [f"k{index}" for index in range(5)]
        plane.put_samples(keys, partition, {"step": np.arange(5)}, tags=[{"n": index} for index in range(5)])
        claims = [plane.claim_meta(partition, "train", ["step"], 2) for _ in range(4)]
        assert [len(claim.sample_ids) for claim in claims] == [2, 2, 1, 0]
        assert sorted(key for claim in claims for key in claim.sample_ids) == keys
        for claim in claims:
            assert claim.task_name == "train"
            assert [{"n": int(key[1:])} for key in claim.sample_ids] == claim.tags
            assert plane.get_data(claim)["step"].tolist() == [int(key[1:]) for key in claim.sample_ids]
        assert sorted(plane.claim_meta(partition, "other", ["step"], 10).sample_ids) == keys

    def test_only_rows_with_the_required_columns_are_claimed(self, plane: DataPlaneClient, partition: str) -> None:
        assert plane.claim_meta(partition, "train", ["step"], 3).sample_ids == []
        plane.put_samples(["a", "b"], partition, {"step": [1, 2]})
        plane.put_samples(["b"], partition, {"tokens": [np.arange(2)]})
        plane.put_samples(["record"], partition, tags=[{"x": 1}])
        assert plane.claim_meta(partition, "train", ["step", "tokens"], 3).sample_ids == ["b"]
        plane.put_samples(["a"], partition, {"tokens": [np.arange(2)]})
        assert plane.claim_meta(partition, "train", ["tokens"], 3).sample_ids == ["a"]

    def test_consumption_is_complete_when_every_task_has_every_row(
        self, plane: DataPlaneClient, partition: str
    ) -> None:
        plane.put_samples(["a", "b"], partition, {"step": [1, 2]})
        assert not plane.check_consumption_status(partition, ["train"])
        plane.claim_meta(partition, "train", ["step"], 1)
        assert not plane.check_consumption_status(partition, ["train"])
        plane.claim_meta(partition, "train", ["step"], 1)
        assert plane.check_consumption_status(partition, ["train"])
        assert not plane.check_consumption_status(partition, ["train", "other"])
        plane.put_samples(["c"], partition, {"step": [3]})
        assert not plane.check_consumption_status(partition, ["train"])
        plane.clear_samples(["c"], partition)
        assert plane.check_consumption_status(partition, ["train"])

    def test_an_empty_partition_is_consumed(self, plane: DataPlaneClient, partition: str) -> None:
        assert plane.check_consumption_status(partition, ["train"])
        plane.put_samples(["a"], partition, {"step": [1]})
        plane.clear_samples(None, partition)
        assert plane.check_consumption_status(partition, ["train"])

    def test_a_row_cleared_and_written_again_is_claimed_again(self, plane: DataPlaneClient, partition: str) -> None:
        for value in (1, 2):
            plane.put_samples(["a"], partition, {"step": [value]})
            claim = plane.claim_meta(partition, "train", ["step"], 4)
            assert plane.get_data(claim, ["step"])["step"].tolist() == [value]
            plane.clear_samples(["a"], partition)

    # --- threads ----------------------------------------------------------------------------------

    def test_many_threads_at_once(self, plane: DataPlaneClient, partition: str) -> None:
        def work(thread: int) -> None:
            for turn in range(6):
                keys = [f"{thread}/{turn}/{index}" for index in range(3)]
                rows = [row(100 * thread + 10 * turn + index, index) for index in range(3)]
                plane.put_samples(keys, partition, columns_of(rows), tags=[{"thread": thread}] * 3)
                batch = plane.get_samples(keys, partition)
                for (key, got), expected_key, expected in zip(batch.rows(), keys, rows, strict=True):
                    assert key == expected_key
                    assert_same_row(got, expected)
                assert plane.get_tags(keys, partition) == [{"thread": thread}] * 3
                plane.clear_samples(keys[:2], partition)

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(work, range(12)))
        left = plane.list_samples(partition)
        assert left == {f"{thread}/{turn}/2": {"thread": thread} for thread in range(12) for turn in range(6)}

    def test_threads_claim_no_row_twice(self, plane: DataPlaneClient, partition: str) -> None:
        keys = [f"k{index}" for index in range(40)]
        plane.put_samples(keys, partition, {"step": np.arange(40)})
        with ThreadPoolExecutor(8) as pool:
            claims = pool.map(lambda _: plane.claim_meta(partition, "train", ["step"], 3).sample_ids, range(30))
        claimed = [key for claim in claims for key in claim]
        assert len(claimed) == len(set(claimed))
        claimed += plane.claim_meta(partition, "train", ["step"], 40).sample_ids
        assert sorted(claimed) == sorted(keys)

    # --- standing still ---------------------------------------------------------------------------

    def test_writes_wait_while_the_plane_is_quiesced_and_reads_do_not(
        self, plane: DataPlaneClient, partition: str
    ) -> None:
        plane.put_samples(["a"], partition, {"step": [1]})
        with ThreadPoolExecutor(3) as pool:
            with plane.quiesce(20):
                writes = [
                    pool.submit(plane.put_samples, ["b"], partition, {"step": [2]}),
                    pool.submit(plane.clear_samples, ["a"], partition),
                    pool.submit(plane.claim_meta, partition, "train", ["step"], 1),
                ]
                assert plane.get_samples(["a"], partition, ["step"])["step"].tolist() == [1]
                time.sleep(0.5)
                assert plane.list_samples(partition).keys() == {"a"}
                assert not any(write.done() for write in writes)
            for write in writes:
                write.result(30)
        assert plane.list_samples(partition).keys() == {"b"}

    def test_a_quiesced_plane_is_quiesced_for_the_block_alone(self, plane: DataPlaneClient, partition: str) -> None:
        for turn in range(2):
            with pytest.raises(RuntimeError, match="block"), plane.quiesce(20):
                raise RuntimeError("block")
            plane.put_samples([f"k{turn}"], partition, {"step": [turn]})
        assert plane.list_samples(partition).keys() == {"k0", "k1"}

    # --- a put in three steps ---------------------------------------------------------------------

    def test_stored_rows_are_nobodys_until_they_are_announced(self, plane: DataPlaneClient, partition: str) -> None:
        rows = [row(1), row(2, 100_000)]
        reserved = plane.reserve_samples(["a", "b"], partition)
        assert (reserved.partition_id, reserved.sample_ids, reserved.tags) == (partition, ("a", "b"), ({}, {}))
        assert not reserved.is_readable
        stored = plane.store_samples(reserved, columns_of(rows))
        assert plane.get_samples(["a", "b"], partition, partial=True).missing == ["a", "b"]
        assert plane.claim_meta(partition, "train", ["step"], 5).sample_ids == []
        plane.announce_samples(stored, [{"x": 1}, {"x": 2}])
        assert plane.list_samples(partition) == {"a": {"x": 1}, "b": {"x": 2}}
        for (_, got), expected in zip(plane.get_samples(["a", "b"], partition).rows(), rows, strict=True):
            assert_same_row(got, expected)
        assert sorted(plane.claim_meta(partition, "train", ["step"], 5).sample_ids) == ["a", "b"]

    def test_a_row_keeps_its_number_until_it_is_cleared(self, plane: DataPlaneClient, partition: str) -> None:
        plane.put_samples(["b"], partition, columns_of([row(2)]), tags=[{"x": 1}])
        first = plane.reserve_samples(["a", "b"], partition)
        assert first.tags == ({}, {"x": 1})
        assert not first.is_readable
        plane.announce_samples(plane.store_samples(first, columns_of([row(1), row(2)])), [{}, {"y": 2}])
        again = plane.reserve_samples(["a", "b"], partition)
        assert (again.numbers, again.is_readable, again.tags) == (first.numbers, True, ({}, {"x": 1, "y": 2}))
        plane.clear_samples(["a"], partition)
        later = plane.reserve_samples(["a", "b"], partition)
        assert later.numbers[0] != first.numbers[0]
        assert later.numbers[1] == first.numbers[1]
        assert not later.is_readable

    def test_a_reservation_looks_one_key_up_once_its_rows_are_numbered(
        self, plane: DataPlaneClient, partition: str
    ) -> None:
        records = f"{partition}.groups"
        with pytest.raises(PartitionNotRegistered):
            plane.reserve_samples(["a"], partition, look_up=(records, "g"))
        plane.register_partition(records, {})
        assert plane.reserve_samples(["a"], partition, look_up=(records, "g")).looked_up is None
        plane.put_samples(["g"], records, tags=[{"answer": 1}])
        assert plane.reserve_samples(["a"], partition, look_up=(records, "g")).looked_up == {"answer": 1}

    def test_the_same_rows_stored_and_announced_twice_are_there_once(
        self, plane: DataPlaneClient, partition: str
    ) -> None:
        two = [plane.reserve_samples(["a", "b"], partition) for _ in range(2)]
        assert two[0].numbers == two[1].numbers
        stored = [plane.store_samples(reserved, columns_of([row(1), row(2)])) for reserved in two]
        for one in stored:
            plane.announce_samples(one, [{"x": 1}, {"x": 2}])
        for (_, got), expected in zip(plane.get_samples(["a", "b"], partition).rows(), [row(1), row(2)], strict=True):
            assert_same_row(got, expected)
        assert sorted(plane.claim_meta(partition, "train", ["step"], 5).sample_ids) == ["a", "b"]
        plane.announce_samples(stored[0], [{"x": 1}, {"x": 2}])
        assert plane.claim_meta(partition, "train", ["step"], 5).sample_ids == []

    @pytest.mark.parametrize("paused_before", ["store", "announce"])
    def test_whoever_wakes_when_the_rows_were_cleared_brings_none_back(
        self, plane: DataPlaneClient, partition: str, paused_before: str
    ) -> None:
        """The rows go on without it, also where their keys were written anew."""
        late = plane.reserve_samples(["a", "b", "c"], partition)
        values = columns_of([row(1), row(2), row(3)])
        stored = plane.store_samples(late, values) if paused_before == "announce" else None
        plane.announce_samples(plane.store_samples(late, values), [{"x": 1}] * 3)
        assert len(plane.claim_meta(partition, "train", ["step"], 5).sample_ids) == 3
        plane.clear_samples(["a", "b"], partition)
        plane.put_samples(["b"], partition, columns_of([row(9)]), tags=[{"new": True}])
        plane.announce_samples(stored or plane.store_samples(late, values), [{"x": 1}] * 3)
        assert plane.list_samples(partition) == {"b": {"new": True}, "c": {"x": 1}}
        batch = plane.get_samples(["a", "b", "c"], partition, partial=True)
        assert batch.missing == ["a"]
        assert_same_row(dict(batch.rows())["b"], row(9))
        assert plane.claim_meta(partition, "train", ["step"], 5).sample_ids == ["b"]
        assert plane.check_consumption_status(partition, ["train"])
        plane.put_samples(["a"], partition, columns_of([row(7)]))
        assert_same_row(next(plane.get_samples(["a"], partition).rows())[1], row(7))

    def test_a_release_removes_the_rows_that_were_reserved_and_no_others(
        self, plane: DataPlaneClient, partition: str
    ) -> None:
        old = plane.reserve_samples(["a", "b", "never written"], partition)
        plane.announce_samples(plane.store_samples(old, columns_of([row(1), row(2), row(3)])))
        plane.clear_samples(["a"], partition)
        plane.put_samples(["a"], partition, columns_of([row(4)]))
        for _ in range(2):
            plane.release_samples(old)
            assert plane.list_samples(partition) == {"a": {}}
        assert_same_row(next(plane.get_samples(["a"], partition).rows())[1], row(4))
        plane.release_samples(plane.reserve_samples(["empty"], partition))
        assert plane.list_samples(partition) == {"a": {}}

    def test_what_does_not_fit_is_refused_before_it_is_stored(self, plane: DataPlaneClient, partition: str) -> None:
        reserved = plane.reserve_samples(["a"], partition)
        for fields in ({"step": ["x"]}, {"unknown": [1]}):
            with pytest.raises(SchemaViolation):
                plane.store_samples(reserved, fields)
        with pytest.raises(ValueError, match="a"):
            plane.reserve_samples(["a", "a"], partition)

    # --- the plane's clock, and condemned rows ------------------------------------------------------

    def test_the_planes_clock_goes_forward_in_seconds(self, plane: DataPlaneClient) -> None:
        before = plane.now()
        time.sleep(0.05)
        assert 0.04 < plane.now() - before < 5
        assert abs(plane.now() - time.time()) < 5

    def test_a_condemned_row_takes_no_columns_until_that_is_taken_back(
        self, plane: DataPlaneClient, partition: str
    ) -> None:
        plane.put_samples(["a"], partition, {"step": [1]}, [{"n": 1}])
        plane.put_samples(["a", "b"], partition, tags=[{CONDEMNED_TAG: 1.0}] * 2)
        for keys in (["a"], ["b"], ["c", "a"]):
            with pytest.raises(RowsCondemned, match="a sweep is about to clear these rows"):
                plane.put_samples(keys, partition, {"step": [2] * len(keys)}, [{"n": 2}] * len(keys))
        assert plane.get_samples(["a", "b", "c"], partition, ["step"], partial=True)["step"].tolist() == [1]
        plane.put_samples(["a", "b"], partition, tags=[{CONDEMNED_TAG: None}] * 2)
        plane.put_samples(["a", "b"], partition, {"step": [3, 3]}, [{"n": 3}] * 2)
        assert plane.get_samples(["a", "b"], partition, ["step"])["step"].tolist() == [3, 3]

    # --- epochs -----------------------------------------------------------------------------------

    def test_an_epoch_lasts_until_a_checkpoint_is_loaded(
        self, plane: DataPlaneClient, partition: str, tmp_path: Path
    ) -> None:
        epoch = plane.epoch()
        assert epoch
        plane.put_samples(["a"], partition, {"step": [1]})
        directory = str(tmp_path / "saved")
        for _ in range(2):
            plane.save_checkpoint(directory)
            assert plane.epoch() == epoch
        epochs = {epoch}
        for _ in range(2):
            plane.load_checkpoint(directory)
            assert plane.epoch() == plane.epoch()
            assert plane.epoch() not in epochs
            epochs.add(plane.epoch())
        plane.save_checkpoint(directory)
        assert plane.epoch() in epochs

    def test_a_load_that_finds_nothing_leaves_the_epoch(self, plane: DataPlaneClient, tmp_path: Path) -> None:
        epoch = plane.epoch()
        with pytest.raises(DataPlaneError, match="no checkpoint"):
            plane.load_checkpoint(str(tmp_path / "nothing"))
        assert plane.epoch() == epoch

    # --- checkpoints ------------------------------------------------------------------------------

    def test_a_checkpoint_brings_everything_back(self, plane: DataPlaneClient, partition: str, tmp_path: Path) -> None:
        rows = [row(1), row(2, 0)]
        plane.put_samples(["a", "b"], partition, columns_of(rows), tags=[{"x": [1]}, {}])
        plane.put_samples(["record"], partition, tags=[{"y": 2}])
        claimed = plane.claim_meta(partition, "train", ["step"], 1).sample_ids
        directory = str(tmp_path / "step 7")
        for step in (6, 7):
            plane.save_checkpoint(directory, metadata={"step": step})
        plane.put_samples(["a"], partition, {"step": [0]}, tags=[{"x": 0}])
        plane.clear_samples(["b", "record"], partition)
        plane.put_samples(["later"], partition, columns_of([row(3)]))
        assert plane.load_checkpoint(directory) == {"step": 7}
        assert plane.list_samples(partition) == {"a": {"x": [1]}, "b": {}, "record": {"y": 2}}
        for (_, got), expected in zip(plane.get_samples(["a", "b"], partition).rows(), rows, strict=True):
            assert_same_row(got, expected)
        again = plane.claim_meta(partition, "train", ["step"], 5).sample_ids
        assert sorted(claimed + again) == ["a", "b"]
        assert [path.name for path in tmp_path.iterdir()] == ["step 7"]

    def test_loading_what_is_no_checkpoint_is_an_error(self, plane: DataPlaneClient, tmp_path: Path) -> None:
        with pytest.raises(DataPlaneError, match="no checkpoint"):
            plane.load_checkpoint(str(tmp_path / "nothing"))
