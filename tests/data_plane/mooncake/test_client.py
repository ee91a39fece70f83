"""The Mooncake plane on a real master: the conformance suite, and the traps it avoids."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout, DataPlaneUnavailable, RequestError
from rollout_reassembler.data_plane.base import DataPlaneClient, FieldSpec
from rollout_reassembler.data_plane.config import DataPlaneConfig, MooncakeCpuBackendConfig
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite
from tests.data_plane.conformance import SCHEMA, PlaneConformance, assert_same_row, columns_of, row
from tests.data_plane.plain_queue import QueueHost, hide, in_a_call
from tests.mooncake_site import MooncakeSite, start_hosts

pytestmark = pytest.mark.mooncake

SIZES = (0, 1, 127, 128, 129, 5_000, 65_535, 65_536, 300_000)
"""Around the limits of what is no object, and of what shares one."""


@pytest.fixture(scope="module")
def site(queues: QueueHost) -> Iterator[MooncakeSite]:
    site = MooncakeSite(queues, hosts=2)
    yield site
    site.close()


@pytest.fixture(scope="module")
def mooncake_plane(site: MooncakeSite) -> Iterator[Any]:
    plane = site.connect()
    site.set_numbers_aside(plane)
    yield plane
    plane.close()


class TestMooncake(PlaneConformance):
    @pytest.fixture
    def plane(self, mooncake_plane: DataPlaneClient) -> DataPlaneClient:
        return mooncake_plane


@pytest.fixture
def plane(mooncake_plane: Any) -> Any:
    """The module's client, with its inside open to the test."""
    return mooncake_plane


@pytest.fixture
def partition(plane: Any, partition_name: str) -> str:
    plane.register_partition(partition_name, SCHEMA)
    return partition_name


def bytes_of(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def test_values_of_every_size_come_back(plane: Any, partition: str) -> None:
    keys = [f"{size}" for size in SIZES]
    values = [bytes_of(size) for size in SIZES]
    plane.put_samples(keys, partition, {"payload": values, "tokens": [np.arange(size // 8) for size in SIZES]})
    batch = plane.get_samples(keys[::-1], partition, ["payload", "tokens"])
    assert batch["payload"] == values[::-1]
    for array, size in zip(batch["tokens"], SIZES[::-1], strict=True):
        np.testing.assert_array_equal(array, np.arange(size // 8))


def test_more_than_the_buffer_at_a_time_is_cut_and_a_value_beyond_it_is_an_error(plane: Any, partition: str) -> None:
    keys = [f"k{index}" for index in range(12)]
    values = [bytes([index]) * (11 << 20) for index in range(12)]
    plane.put_samples(keys, partition, {"payload": values})
    assert plane.get_samples(keys, partition, ["payload"])["payload"] == values
    plane.clear_samples(None, partition)
    with pytest.raises(DataPlaneError, match="raise local_buffer_size to"):
        plane.put_samples(["huge"], partition, {"payload": [bytes(40 << 20)]})


def test_threads_share_the_buffer(plane: Any, partition: str) -> None:
    def work(thread: int) -> None:
        keys = [f"{thread}/{index}" for index in range(2)]
        values = [bytes([thread]) * (9 << 20)] * 2
        for _ in range(3):
            plane.put_samples(keys, partition, {"payload": values})
            assert plane.get_samples(keys, partition, ["payload"])["payload"] == values
            plane.clear_samples(keys, partition)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_nothing_is_left_in_the_store_of_rows_that_are_cleared_or_replaced(queues: QueueHost) -> None:
    site = MooncakeSite(queues)
    plane = site.connect()
    plane.register_partition("p", SCHEMA)
    store = plane._checkpoints.connected.store
    large = {"payload": [bytes_of(100_000)], "tokens": [np.arange(200)]}
    plane.put_samples(["a"], "p", large)
    plane.put_samples(["tags"], "p", tags=[{"x": 1}])
    for _ in range(3):
        plane.put_samples(["a", "b", "tags"], "p", columns_of([row(1, 700), row(2, 700), row(3, 700)]), [{}] * 3)
        plane.put_samples(["a"], "p", {"tokens": [np.arange(900)], "logprobs": [np.zeros(3, np.float32)]})
        plane.put_samples(["c"], "p", large)
        plane.put_samples(["record"], "p", tags=[{"x": 1}])
        plane.clear_samples(["c", "record", "b"], "p")
    assert_same_row(
        next(plane.get_samples(["a"], "p").rows())[1],
        {**row(1, 700), "tokens": np.arange(900), "logprobs": np.zeros(3, np.float32)},
    )
    plane.clear_samples(None, "p")
    assert store.remove_session() == 0
    plane.close()
    site.close()


def test_a_full_store_says_so_and_works_again_once_rows_are_cleared(queues: QueueHost) -> None:
    site = MooncakeSite(queues, segment_size=64 << 20)
    plane = site.connect()
    plane.register_partition("p", {"payload": FieldSpec("bytes")})
    kept = [bytes([index]) * (8 << 20) for index in range(6)]
    plane.put_samples([f"k{index}" for index in range(6)], "p", {"payload": kept})
    with pytest.raises(DataPlaneError, match="no room in the store") as raised:
        plane.put_samples(["x", "y"], "p", {"payload": [b"x" * (14 << 20), b"y" * (14 << 20)]})
    assert not isinstance(raised.value, DataPlaneUnavailable)
    assert raised.value.keys == ("x", "y")
    assert plane.get_samples(["x", "y"], "p", partial=True).missing == ["x", "y"]
    assert plane.get_samples([f"k{index}" for index in range(6)], "p")["payload"] == kept
    plane.clear_samples(["k0", "k1", "k2", "k3"], "p")
    plane.put_samples(["x", "y"], "p", {"payload": [b"x" * (14 << 20), b"y" * (14 << 20)]})
    assert plane.get_samples(["k5", "x", "y"], "p")["payload"] == [kept[5], b"x" * (14 << 20), b"y" * (14 << 20)]
    plane.close()
    site.close()


def test_a_clear_that_did_not_come_to_its_end_is_finished_by_the_next(plane: Any, partition: str) -> None:
    plane.put_samples(["a", "b"], partition, columns_of([row(1, 700), row(2, 700)]))
    rows = plane._rows
    meta = in_a_call(plane, lambda call: rows._found(call, partition, ["a"]))
    hide(plane, meta)
    objects = rows._store.store.places(sorted(_names(meta)))
    assert objects
    assert plane.get_samples(["a", "b"], partition, partial=True).missing == ["a"]
    plane.clear_samples(["a", "b"], partition)
    assert rows._store.store.places(list(objects)) == {}
    assert plane.list_samples(partition) == {}


def _names(meta: Any) -> set[str]:
    from rollout_reassembler.data_plane.mooncake.objects import RowIndex

    return {name for cells in meta._custom_backend_meta for name in RowIndex.of(cells["__owner__"]).names()}


def test_a_reader_among_clears_and_puts_never_gets_another_row(plane: Any, partition: str, site: MooncakeSite) -> None:
    other = f"{partition}/other"
    plane.register_partition(other, SCHEMA)
    reader = site.connect(owners=False)
    keys = [f"k{index}" for index in range(4)]
    until = time.monotonic() + 2.0

    def churn(name: str, value: int) -> None:
        while time.monotonic() < until:
            plane.put_samples(keys, name, {"step": [value] * 4, "payload": [name.encode() * 20] * 4})
            plane.clear_samples(keys, name)

    def read(name: str, value: int) -> int:
        seen = 0
        while time.monotonic() < until:
            batch = reader.get_samples(keys, name, ["step", "payload"], partial=True)
            assert batch["step"].tolist() == [value] * len(batch)
            assert batch["payload"] == [name.encode() * 20] * len(batch)
            seen += len(batch)
        return seen

    with ThreadPoolExecutor(4) as pool:
        churns = [pool.submit(churn, name, value) for value, name in enumerate((partition, other))]
        reads = [pool.submit(read, name, value) for value, name in enumerate((partition, other))]
        assert all(future.result() > 0 for future in reads)
        assert all(future.result() is None for future in churns)
    reader.close()


def test_a_reader_of_a_row_that_is_overwritten_gets_the_old_or_the_new_one(
    plane: Any, partition: str, site: MooncakeSite
) -> None:
    reader = site.connect(owners=False)
    values = [bytes([index]) * 90_000 for index in range(2)]
    plane.put_samples(["a"], partition, {"payload": [values[0]], "step": [0]})
    until = time.monotonic() + 2.0

    def write() -> int:
        turns = 0
        while time.monotonic() < until:
            turns += 1
            plane.put_samples(["a"], partition, {"payload": [values[turns % 2]], "step": [turns % 2]})
        return turns

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            batch = reader.get_samples(["a"], partition, ["payload", "step"])
            assert batch["payload"][0] == values[batch["step"][0]]
        assert writing.result() > 5
    reader.close()


WRITER = """
import os, signal, sys
from tests.data_plane.plain_queue import keys_of, server_info
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.mooncake.client import mooncake_plane
from rollout_reassembler.data_plane.mooncake.connection import connect
cfg = DataPlaneConfig.model_validate_json(sys.argv[1])
address = eval(sys.argv[2])
connected = connect(cfg, cfg.mooncake_cpu, server_info(address), keys_of(address))
plane = mooncake_plane(connected, cfg)
plane.put_samples([f"k{i}" for i in range(20)], sys.argv[3], {"payload": [bytes([i]) * 50_000 for i in range(20)]})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_takes_no_row_along(plane: Any, partition: str, site: MooncakeSite) -> None:
    command = [sys.executable, "-c", WRITER, site.config().model_dump_json(), repr(site.controller.address), partition]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr
    batch = plane.get_samples([f"k{index}" for index in range(20)], partition, ["payload"])
    assert batch["payload"] == [bytes([index]) * 50_000 for index in range(20)]


def test_what_had_not_begun_when_its_call_ended_is_not_done(plane: Any) -> None:
    """The store's threads are taken: a put that waits for one of them would write objects that nobody refers to."""
    values, release, done = plane._checkpoints.connected.values, threading.Event(), []
    blockers = [values._threads.submit(release.wait, 20) for _ in range(4)]
    with pytest.raises(DataPlaneTimeout), plane._rows.sockets.call(CallSite("test"), 0.3) as call:
        values._run(call, lambda: done.append("late"))
    release.set()
    assert all(blocker.result() for blocker in blockers)
    assert values._threads.submit(lambda: "next").result(10) == "next"
    assert done == []


def test_a_call_of_the_store_that_takes_longer_than_a_look_at_its_peers_comes_to_its_end(plane: Any) -> None:
    """The master is no part of the queue: to ask it for a handshake with the plane's keys only makes it hang up."""
    with plane._rows.sockets.call(CallSite("test"), 20) as call:
        assert plane._checkpoints.connected.values._run(call, lambda: time.sleep(2.5) or "done") == "done"


def test_a_memory_host_may_join_later(plane: Any, partition: str, site: MooncakeSite) -> None:
    (late,) = start_hosts(site.master.address, 1)
    plane.add_owner(late.owner)
    keys = [f"k{index}" for index in range(40)]
    plane.put_samples(keys, partition, {"payload": [bytes_of(70_000)] * 40})
    store = plane._checkpoints.connected.store
    rows = in_a_call(plane, plane._checkpoints.connected.values.stored)
    assert len(set(store.places(list(rows)).values())) == 3
    plane.clear_samples(None, partition)
    plane._checkpoints.owners.pop()
    late.kill()


def test_whoever_started_the_plane_takes_its_rows_out_of_hosts_that_go_on(queues: QueueHost) -> None:
    site = MooncakeSite(queues)
    owner, other = site.connect(started=ExitStack()), site.connect(owners=False)
    owner.register_partition("p", SCHEMA)
    owner.put_samples(["a"], "p", columns_of([row(1, 900)]))
    other.close()
    third = site.connect(owners=False)
    assert_same_row(next(third.get_samples(["a"], "p").rows())[1], row(1, 900))
    names = list(in_a_call(third, third._checkpoints.connected.values.stored))
    assert all(third._checkpoints.connected.store.are_there(names))
    owner.close()
    assert not any(third._checkpoints.connected.store.are_there(names))
    third.close()
    site.close()


def test_rdma_is_had_or_refused() -> None:
    from rollout_reassembler.data_plane.mooncake.store import MooncakeStore

    with pytest.raises(ValueError, match="needs device_name"):
        MooncakeCpuBackendConfig(protocol="rdma")
    cfg = MooncakeCpuBackendConfig(protocol="rdma", device_name="mlx5_0,mlx5_77")
    with pytest.raises(DataPlaneUnavailable, match="mlx5_77"):
        MooncakeStore(cfg, session="s")


def test_rdma_is_refused_where_the_environment_forces_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_reassembler.data_plane.mooncake.environment import require_protocol

    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(DataPlaneUnavailable, match="MC_FORCE_TCP"):
        require_protocol(MooncakeCpuBackendConfig(protocol="rdma", device_name="mlx5_0"))
    require_protocol(MooncakeCpuBackendConfig())


def test_only_bytes_cells_are_held() -> None:
    with pytest.raises(ValueError, match="cells='bytes'"):
        DataPlaneConfig(impl="transfer_queue", backend="mooncake_cpu", cells="tensors")


def test_an_owner_of_another_session_is_refused_until_it_is_taken_over(queues: QueueHost) -> None:
    site = MooncakeSite(queues)
    first = site.connect()
    first.register_partition("p", SCHEMA)
    first.put_samples(["a"], "p", columns_of([row(1, 900)]))
    first.close()
    site.controller.kill()
    site.controller = queues.start_controller()
    second = site.connect(owners=False)
    with pytest.raises(RequestError, match=f"serves session '{first.session}'"):
        second.add_owner(site.hosts[0].owner)
    assert first._checkpoints.connected.store.session != second.session
    second.add_owner(site.hosts[0].owner, take_over=True)
    second.register_partition("p", SCHEMA)
    second.put_samples(["a"], "p", columns_of([row(2, 900)]))
    assert_same_row(next(second.get_samples(["a"], "p").rows())[1], row(2, 900))
    second.close()
    site.close()
