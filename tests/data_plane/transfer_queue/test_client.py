"""The TransferQueue plane on a real queue: the conformance suite in both kinds of cells, and the traps it avoids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import DataPlaneUnavailable, RowsMissing, SchemaViolation
from rollout_reassembler.data_plane.base import DataPlaneClient, FieldSpec
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.data_plane.gate import WriteGate
from tests.data_plane.conformance import SCHEMA, PlaneConformance, assert_same_row, columns_of, row
from tests.data_plane.plain_queue import hide, in_a_call

pytestmark = pytest.mark.ray


class TestBytesCells(PlaneConformance):
    @pytest.fixture
    def plane(self, queue_plane: DataPlaneClient) -> DataPlaneClient:
        return queue_plane


class TestTensorCells(PlaneConformance):
    @pytest.fixture
    def plane(self, queue_plane: DataPlaneClient, queue_config: DataPlaneConfig) -> Iterator[DataPlaneClient]:
        plane = build_data_plane_client(queue_config.model_copy(update={"cells": "tensors"}), bootstrap=False)
        yield plane
        plane.close()


@pytest.fixture
def plane(queue_plane: DataPlaneClient) -> Any:
    """The session's client, with its inside open to the test."""
    return queue_plane


@pytest.fixture
def partition(plane: DataPlaneClient, partition_name: str) -> str:
    plane.register_partition(partition_name, SCHEMA)
    return partition_name


@pytest.fixture
def alone(queue_plane: DataPlaneClient, queue_config: DataPlaneConfig) -> Iterator[Any]:
    """A client of its own, whose writes do not look at the gate of all processes."""
    plane: Any = build_data_plane_client(queue_config, bootstrap=False)
    gate, plane._gate = plane._gate, WriteGate()
    yield plane
    plane._gate = gate
    plane.close()


@pytest.fixture
def requests_sent(alone: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the requests that this client sends to the queue; each call tells and starts anew."""
    from rollout_reassembler.data_plane.transfer_queue.sockets import Call

    sent = 0
    send = Call.send

    def counting(self: Any, *args: Any) -> Any:
        nonlocal sent
        sent += self._sockets is alone._rows.sockets
        return send(self, *args)

    def since_last() -> int:
        nonlocal sent
        count, sent = sent, 0
        return count

    monkeypatch.setattr(Call, "send", counting)
    return since_last


def numbered(plane: Any, keys: list[str], partition: str, *, create: bool = False) -> Any:
    return in_a_call(plane, lambda call: plane._rows.controller.meta_of(call, partition, keys, create=create))


def write_values(plane: Any, meta: Any, columns: dict[str, list[Any]]) -> None:
    """The second step of a put that stops then."""
    in_a_call(plane, lambda call: plane._rows._store.put(call, meta, columns))


def lose_values(plane: Any, meta: Any) -> None:
    """What a storage unit that started anew has done."""
    in_a_call(plane, lambda call: plane._rows._store.clear(call, meta))


def test_a_healthy_call_costs_no_more_than_its_steps(
    alone: Any, partition: str, requests_sent: Callable[[], int]
) -> None:
    keys = [f"k{index}" for index in range(8)]
    rows = columns_of([row(index) for index in range(8)])
    costs = {}
    alone.get_tags([], partition)  # from here on it knows the columns
    requests_sent()
    alone.put_samples(keys, partition, rows, tags=[{"x": 1}] * 8)
    costs["put with tags"] = requests_sent()
    alone.put_samples(keys, partition, rows)
    costs["put"] = requests_sent()
    alone.put_samples(keys, partition, tags=[{"y": 1}] * 8)
    costs["put of tags"] = requests_sent()
    alone.get_samples(keys, partition)
    costs["get"] = requests_sent()
    alone.get_tags(keys, partition)
    costs["tags"] = requests_sent()
    alone.list_samples(partition)
    costs["list"] = requests_sent()
    alone.clear_samples(keys, partition)
    costs["clear"] = requests_sent()
    assert costs == {"put with tags": 4, "put": 3, "put of tags": 2, "get": 2, "tags": 1, "list": 1, "clear": 4}


def test_another_client_finds_what_this_one_registered(
    plane: Any, partition: str, queue_config: DataPlaneConfig
) -> None:
    other = build_data_plane_client(queue_config, bootstrap=False)
    assert other.is_registered(partition)
    plane.put_samples(["a"], partition, columns_of([row(1)]))
    assert_same_row(next(other.get_samples(["a"], partition).rows())[1], row(1))
    with pytest.raises(SchemaViolation):
        other.register_partition(partition, {"step": FieldSpec("int32")})
    other.close()
    with pytest.raises(DataPlaneUnavailable, match="closed"):
        other.get_tags(["a"], partition)
    assert plane.get_tags(["a"], partition) == [{}]


def test_a_second_bootstrap_connects_and_does_not_own(
    plane: Any, partition: str, queue_config: DataPlaneConfig
) -> None:
    second = build_data_plane_client(queue_config, bootstrap=True)
    second.put_samples(["a"], partition, {"step": [1]})
    second.close()
    assert plane.get_samples(["a"], partition, ["step"])["step"].tolist() == [1]


def test_a_row_numbered_but_never_written_is_missing(plane: Any, partition: str) -> None:
    """What a writer leaves that dies in the middle of its put."""
    plane.put_samples(["good"], partition, columns_of([row(1)]))
    numbered(plane, ["half"], partition, create=True)
    batch = plane.get_samples(["half", "good"], partition, partial=True)
    assert (batch.sample_ids, batch.missing) == (["good"], ["half"])
    with pytest.raises(RowsMissing) as raised:
        plane.get_samples(["half"], partition)
    assert raised.value.keys == ("half",)
    plane.put_samples(["half"], partition, columns_of([row(2)]))
    assert_same_row(next(plane.get_samples(["half"], partition).rows())[1], row(2))


def test_a_row_being_cleared_is_missing(plane: Any, partition: str) -> None:
    """A clear that stopped after its first step: the row is hidden, and the same clear again ends it."""
    plane.put_samples(["a", "b"], partition, columns_of([row(1), row(2)]))
    meta = numbered(plane, ["a"], partition)
    hide(plane, meta)
    assert plane.get_samples(["a", "b"], partition, partial=True).missing == ["a"]
    plane.clear_samples(["a"], partition)
    assert plane.list_samples(partition).keys() == {"b"}


@pytest.mark.parametrize("lost", [["b"], ["a", "b", "c"]])
def test_rows_whose_values_the_store_lost_are_missing(plane: Any, partition: str, lost: list[str]) -> None:
    plane.put_samples(["a", "b", "c"], partition, columns_of([row(1), row(2), row(3)]))
    meta = numbered(plane, lost, partition)
    lose_values(plane, meta)
    batch = plane.get_samples(["c", "b", "a"], partition, partial=True)
    assert batch.missing == [key for key in ["c", "b", "a"] if key in lost]
    with pytest.raises(RowsMissing) as raised:
        plane.get_samples(["a", "b", "c"], partition)
    assert list(raised.value.keys) == lost


def test_a_row_that_another_one_replaced_is_missing(plane: Any, partition: str) -> None:
    """A put that was slower than a clear and the next put wrote its values under a number that is not its own."""
    plane.put_samples(["a", "b", "c"], partition, columns_of([row(1), row(2), row(3)]))
    meta = numbered(plane, ["b"], partition)
    write_values(plane, meta, {"step": [9], "__owner__": [b"other\nb"]})
    batch = plane.get_samples(["a", "b", "c"], partition, partial=True)
    assert (batch.sample_ids, batch.missing) == (["a", "c"], ["b"])
    plane.put_samples(["b"], partition, columns_of([row(4)]))
    assert_same_row(list(plane.get_samples(["a", "b"], partition).rows())[1][1], row(4))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", b""),
        ("tokens", b"junk of some length"),
        ("tokens", 5),
        ("tokens", None),
        ("tokens", "text"),
        ("tokens", np.arange(3, dtype=np.int32)),
        ("tokens", np.zeros((2, 2), np.int64)),
        ("tokens", np.arange(3, dtype=">i8")),
        ("payload", np.zeros(3, np.uint8)),
        ("step", np.arange(1)),
        ("step", b"5"),
        ("step", 2**63),
        ("step", 1.0),
        ("is_valid", 1),
        ("reward", 1),
        ("payload", "text"),
        ("payload", None),
    ],
)
def test_a_stored_value_of_another_type_makes_its_row_missing(
    plane: Any, partition: str, column: str, value: Any
) -> None:
    """Another row's value, another writer's, or one from before: never cast, never passed on."""
    plane.put_samples(["a", "b", "c"], partition, columns_of([row(1), row(2), row(3)]))
    meta = numbered(plane, ["b"], partition)
    write_values(plane, meta, {column: [value]})
    batch = plane.get_samples(["c", "b", "a"], partition, partial=True)
    assert (batch.sample_ids, batch.missing) == (["c", "a"], ["b"])
    for (_, got), expected in zip(batch.rows(), (row(3), row(1)), strict=True):
        assert_same_row(got, expected)
    with pytest.raises(RowsMissing) as raised:
        plane.get_samples(["a", "b", "c"], partition)
    assert raised.value.keys == ("b",)


def test_a_cell_of_another_dtype_or_rank_makes_its_row_missing(plane: Any, partition: str) -> None:
    from rollout_reassembler.data_plane.cells import encode_cell

    plane.put_samples(["a", "b"], partition, columns_of([row(1), row(2)]))
    meta = numbered(plane, ["b"], partition)
    for array in (np.arange(3, dtype=np.int32), np.zeros((2, 2), np.int64)):
        write_values(plane, meta, {"tokens": [encode_cell(array)]})
        assert plane.get_samples(["a", "b"], partition, partial=True).missing == ["b"]


def test_tensor_cells_are_what_the_queues_own_client_expects(
    partition: str, queue_config: DataPlaneConfig, plane: Any
) -> None:
    import transfer_queue

    writer = build_data_plane_client(queue_config.model_copy(update={"cells": "tensors"}), bootstrap=False)
    rows = [row(index, 3 + index) for index in range(3)]
    writer.put_samples(["a", "b", "c"], partition, columns_of(rows))
    data = transfer_queue.kv_batch_get(["c", "a"], partition, ["tokens", "routes", "reward", "is_valid"])
    for position, expected in enumerate((rows[2], rows[0])):
        for name in ("tokens", "routes", "reward", "is_valid"):
            got = data[name].unbind()[position].numpy()
            assert got.dtype == expected[name].dtype
            np.testing.assert_array_equal(got, expected[name])
    for (_, got), expected in zip(plane.get_samples(["a", "b", "c"], partition).rows(), rows, strict=True):
        assert_same_row(got, expected)
    writer.close()


def test_a_checkpoint_left_half_replaced_is_found(plane: Any, partition: str, tmp_path: Any) -> None:
    """A crash between the two renames of a save leaves the last checkpoint under `.old`."""
    plane.put_samples(["a"], partition, {"step": [1]})
    plane.save_checkpoint(str(tmp_path / "ck"), metadata={"n": 1})
    (tmp_path / "ck").rename(tmp_path / "ck.old")
    assert plane.load_checkpoint(str(tmp_path / "ck")) == {"n": 1}
    assert plane.get_samples(["a"], partition, ["step"])["step"].tolist() == [1]


def test_many_rows_in_one_call(plane: Any, partition: str) -> None:
    keys = [f"k{index}" for index in range(2000)]
    plane.put_samples(keys, partition, {"step": np.arange(2000), "payload": [key.encode() for key in keys]})
    batch = plane.get_samples(keys[::-1], partition, ["step", "payload"])
    assert batch["step"].tolist() == list(range(2000))[::-1]
    assert batch["payload"] == [key.encode() for key in keys[::-1]]
    plane.clear_samples(None, partition)
    assert plane.list_samples(partition) == {}


def test_another_process_connects_works_and_leaves(plane: Any, partition: str, queue_config: DataPlaneConfig) -> None:
    """A Ray actor that only connects: it sees the rows, adds one, and its end is not the queue's."""
    import ray

    @ray.remote(num_cpus=0)
    class Worker:
        def work(self, cfg: DataPlaneConfig, partition: str) -> list[int]:
            import numpy as np

            from rollout_reassembler.data_plane.factory import build_data_plane_client

            plane = build_data_plane_client(cfg, bootstrap=False)
            steps: list[int] = plane.get_samples(["a", "b"], partition, ["step"])["step"].tolist()
            plane.put_samples(["c"], partition, {"tokens": [np.arange(5)]}, tags=[{"from": "worker"}])
            plane.close()
            return steps

    plane.put_samples(["a", "b"], partition, {"step": [1, 2]})
    worker = Worker.remote()
    assert ray.get(worker.work.remote(queue_config, partition), timeout=60) == [1, 2]
    ray.kill(worker)
    assert plane.get_samples(["c"], partition, ["tokens"])["tokens"][0].tolist() == [0, 1, 2, 3, 4]
    assert plane.get_tags(["c"], partition) == [{"from": "worker"}]
