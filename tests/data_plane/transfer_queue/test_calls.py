"""A queue that dies, stalls or is full, and one that is not there: a typed error in time, and nothing lost."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout, DataPlaneUnavailable
from rollout_reassembler.data_plane.base import DataPlaneClient, FieldSpec
from rollout_reassembler.data_plane.config import Deadlines
from tests.data_plane.plain_queue import PlainQueue, QueueHost, Server, in_a_call

SECONDS = 3.0
DEADLINES = Deadlines(read=SECONDS, write=SECONDS, clear=SECONDS, metadata=SECONDS, connect=20, checkpoint=SECONDS)
IN_TIME = SECONDS + 1.5
"""A dead process is noticed within some two seconds; a stalled one at the deadline."""


@pytest.fixture(scope="module")
def host() -> Iterator[QueueHost]:
    host = QueueHost()
    yield host
    host.close()


@pytest.fixture
def queue(host: QueueHost) -> Iterator[PlainQueue]:
    queue = host.start_queue()
    yield queue
    queue.stop()


@pytest.fixture
def plane(queue: PlainQueue) -> Iterator[DataPlaneClient]:
    plane = queue.connect(DEADLINES)
    plane.register_partition("p", {"step": FieldSpec("int64"), "tokens": FieldSpec("int64", 1)})
    plane.put_samples(["a", "b"], "p", {"step": [1, 2], "tokens": [np.arange(3), np.arange(4)]}, tags=[{"x": 1}, {}])
    yield plane
    plane.close()


def calls_on(plane: DataPlaneClient, directory: Path) -> dict[str, Callable[[], object]]:
    """Every call that asks the queue something."""
    return {
        "put_samples": lambda: plane.put_samples(["c"], "p", {"step": [3]}),
        "get_samples": lambda: plane.get_samples(["a", "b"], "p"),
        "get_tags": lambda: plane.get_tags(["a"], "p"),
        "list_samples": lambda: plane.list_samples("p"),
        "clear_samples": lambda: plane.clear_samples(["a"], "p"),
        "claim_meta": lambda: plane.claim_meta("p", "train", ["step"], 1),
        "check_consumption_status": lambda: plane.check_consumption_status("p", ["train"]),
        "is_registered": lambda: plane.is_registered("other"),
        "register_partition": lambda: plane.register_partition("other", {"x": FieldSpec("bytes")}),
        "save_checkpoint": lambda: plane.save_checkpoint(str(directory / "ck")),
    }


def run_all(calls: dict[str, Callable[[], object]]) -> dict[str, tuple[BaseException | None, float]]:
    """What each call raised and after how many seconds; all of them at the same time."""
    outcomes: dict[str, tuple[BaseException | None, float]] = {}

    def run(name: str, call: Callable[[], object]) -> None:
        started = time.monotonic()
        error: BaseException | None = None
        try:
            call()
        except DataPlaneError as raised:
            error = raised
        outcomes[name] = (error, time.monotonic() - started)

    threads = [threading.Thread(target=run, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes.keys() == calls.keys()
    return outcomes


def test_a_dead_controller_is_an_error_in_time_for_every_call(
    queue: PlainQueue, plane: DataPlaneClient, tmp_path: Path
) -> None:
    queue.controller.kill()
    for name, (error, seconds) in run_all(calls_on(plane, tmp_path)).items():
        assert isinstance(error, DataPlaneUnavailable), name
        assert error.call == name
        assert "controller" in str(error)
        assert seconds < IN_TIME, name


def test_a_controller_that_dies_during_a_call_ends_it(
    queue: PlainQueue, plane: DataPlaneClient, tmp_path: Path
) -> None:
    queue.controller.stall()
    killer = threading.Timer(0.5, queue.controller.kill)
    killer.start()
    calls = calls_on(plane, tmp_path)
    outcomes = run_all({name: calls[name] for name in ("put_samples", "get_samples", "clear_samples")})
    for error, seconds in outcomes.values():
        assert isinstance(error, DataPlaneUnavailable)
        assert seconds < SECONDS
    killer.join()


def test_a_stalled_controller_is_a_timeout_and_nothing_is_lost(
    queue: PlainQueue, plane: DataPlaneClient, tmp_path: Path
) -> None:
    calls = calls_on(plane, tmp_path)
    queue.controller.stall()
    asked = {name: calls[name] for name in ("get_samples", "get_tags", "list_samples", "put_samples")}
    for name, (error, seconds) in run_all(asked).items():
        assert isinstance(error, DataPlaneTimeout), name
        assert (error.call, error.partition, error.seconds) == (name, "p", SECONDS)
        assert SECONDS - 0.1 < seconds < IN_TIME
    queue.controller.resume()
    assert plane.get_samples(["b", "a"], "p", ["step"])["step"].tolist() == [2, 1]
    plane.put_samples(["c"], "p", {"step": [3], "tokens": [np.arange(1)]})
    assert plane.get_samples(["c"], "p", ["step"])["step"].tolist() == [3]
    plane.clear_samples(None, "p")
    assert plane.list_samples("p") == {}


def test_a_dead_storage_unit_is_an_error_in_time_and_a_clear_on_it_is_not_a_success(
    queue: PlainQueue, plane: DataPlaneClient, tmp_path: Path
) -> None:
    queue.unit.kill()
    calls = calls_on(plane, tmp_path)
    asked = {name: calls[name] for name in ("put_samples", "get_samples", "clear_samples", "save_checkpoint")}
    for name, (error, seconds) in run_all(asked).items():
        assert isinstance(error, DataPlaneUnavailable), name
        assert "storage unit" in str(error)
        assert seconds < IN_TIME, name
    assert plane.get_tags(["a"], "p") == [{"x": 1}]
    assert plane.list_samples("p").keys() >= {"a", "b"}


def test_a_stalled_storage_unit_is_an_error_in_time_and_the_next_attempt_succeeds(
    queue: PlainQueue, plane: DataPlaneClient, tmp_path: Path
) -> None:
    calls = calls_on(plane, tmp_path)
    queue.unit.stall()
    asked = {name: calls[name] for name in ("put_samples", "clear_samples")}
    for name, (error, seconds) in run_all(asked).items():
        assert isinstance(error, DataPlaneTimeout | DataPlaneUnavailable), name
        assert seconds < IN_TIME, name
    queue.unit.resume()
    plane.put_samples(["c"], "p", {"step": [3]})
    plane.clear_samples(["a"], "p")
    assert plane.get_samples(["c", "b", "a"], "p", ["step"], partial=True).missing == ["a"]
    assert plane.list_samples("p").keys() == {"b", "c"}


def test_a_full_queue_says_so_and_works_again_once_rows_are_cleared(host: QueueHost) -> None:
    queue = host.start_queue(capacity=3)
    plane = queue.connect(DEADLINES)
    plane.register_partition("p", {"step": FieldSpec("int64")})
    plane.put_samples(["a", "b"], "p", {"step": [1, 2]})
    with pytest.raises(DataPlaneError, match="full") as raised:
        plane.put_samples(["c", "d"], "p", {"step": [3, 4]}, tags=[{}, {}])
    assert raised.value.keys == ("c", "d")
    assert plane.get_samples(["a", "b"], "p")["step"].tolist() == [1, 2]
    assert plane.get_samples(["c", "d"], "p", partial=True).missing == ["c", "d"]
    plane.clear_samples(["a"], "p")
    plane.put_samples(["c", "d"], "p", {"step": [3, 4]})
    assert plane.get_samples(["b", "c", "d"], "p")["step"].tolist() == [2, 3, 4]
    plane.close()
    queue.stop()


class InterruptedStore:
    """A store in front of which other clients do something, once, between the two steps of a read."""

    def __init__(self, store: Any, interrupt: Callable[[], None]) -> None:
        self._store = store
        self._interrupt: Callable[[], None] | None = interrupt

    def get(self, call: Any, meta: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        if self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            interrupt()
        values: dict[str, list[Any]] = self._store.get(call, meta, names)
        return values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize(
    ("then_put", "expected"),
    [
        ([], None),
        ([("p", "c")], None),
        ([("other", "a")], None),
        ([("p", "a")], 8),
        ([("p", "c"), ("p", "a")], 8),
        ([("other", "a"), ("p", "a")], 8),
    ],
    ids=["cleared", "another key", "another partition", "same key", "another key first", "another partition first"],
)
def test_a_row_replaced_between_the_steps_of_a_read_is_never_another_row(
    queue: PlainQueue, plane: Any, then_put: list[tuple[str, str]], expected: int | None
) -> None:
    """The queue gives the number of a cleared row to the next new one, and a read has the number already."""
    plane.register_partition("other", {"step": FieldSpec("int64"), "tokens": FieldSpec("int64", 1)})
    others = queue.connect(DEADLINES)
    read_numbers, put_numbers = [], []

    def numbers(partition: str, key: str) -> list[int]:
        rows: Any = others._rows
        indexes: list[int] = in_a_call(
            others, lambda call: rows.controller.meta_of(call, partition, [key])
        ).global_indexes
        return indexes

    def interrupt() -> None:
        read_numbers.extend(numbers("p", "a"))
        others.clear_samples(["a"], "p")
        for partition, key in then_put:
            others.put_samples([key], partition, {"step": [8], "tokens": [np.arange(8)]})
            put_numbers.extend(numbers(partition, key))

    plane._rows._store = InterruptedStore(plane._rows._store, interrupt)
    batch = plane.get_samples(["b", "a"], "p", ["step"], partial=True)
    if then_put:
        assert read_numbers[0] in put_numbers, "the queue did not reuse the number, so this shows nothing"
    assert batch["step"].tolist() == [2, *([] if expected is None else [expected])]
    assert batch.missing == (["a"] if expected is None else [])
    others.close()


class CuttingProxy:
    """Passes a connection on to a server, and cuts it in place of a message that says `cut_at`, once."""

    def __init__(self, host: str, port: int) -> None:
        self.cut_at = b""
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._server)
            for source, sink, is_up in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass_on, args=(source, sink, is_up), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_up and self.cut_at and self.cut_at in data:
                    self.cut_at = b""
                    sink.shutdown(socket.SHUT_RDWR)
                    source.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(data)


@pytest.mark.parametrize("cut_at", [b"KV_RETRIEVE_META", b"SET_CUSTOM_META", b"NOTIFY_DATA_UPDATE"])
def test_a_connection_lost_in_a_put_leaves_no_row_without_its_tags(
    queue: PlainQueue, plane: DataPlaneClient, cut_at: bytes
) -> None:
    """ZeroMQ connects anew by itself: what follows a lost request must not arrive without it."""
    address = queue.controller.address
    proxy = CuttingProxy(address["ip"], address["ports"]["request_handle_socket"])
    behind = {**address, "ip": "127.0.0.1", "ports": {**address["ports"], "request_handle_socket": proxy.port}}
    cut = PlainQueue(Server(queue.controller.pid, behind), queue.unit).connect(DEADLINES)
    cut.put_samples(["before"], "p", {"step": [1]}, tags=[{"x": 1}])
    proxy.cut_at = cut_at
    keys = [f"k{index}" for index in range(2000)]
    with pytest.raises(DataPlaneUnavailable, match=r"the queue's controller .* the connection was lost"):
        cut.put_samples(keys, "p", {"step": range(2000)}, tags=[{"x": 2}] * 2000)
    # What is still on its way would arrive now.
    time.sleep(0.3)
    readable = plane.get_samples(keys, "p", ["step"], partial=True).sample_ids
    assert readable == []
    cut.put_samples(keys, "p", {"step": range(2000)}, tags=[{"x": 2}] * 2000)
    assert plane.get_samples(keys, "p", ["step"])["step"].tolist() == list(range(2000))
    assert plane.get_tags(keys[-1:], "p") == [{"x": 2}]
    cut.close()


def test_closing_ends_the_calls_that_wait(queue: PlainQueue, plane: DataPlaneClient, tmp_path: Path) -> None:
    queue.controller.stall()
    closer = threading.Timer(0.5, plane.close)
    closer.start()
    error, seconds = run_all({"get_samples": calls_on(plane, tmp_path)["get_samples"]})["get_samples"]
    assert isinstance(error, DataPlaneUnavailable)
    assert seconds < SECONDS
    closer.join()


def test_connecting_to_a_dead_controller_is_an_error_in_seconds(queue: PlainQueue) -> None:
    queue.controller.kill()
    started = time.monotonic()
    with pytest.raises(DataPlaneUnavailable, match="is gone: it refuses connections"):
        queue.connect(DEADLINES)
    assert time.monotonic() - started < 10


NO_QUEUE = """
import time
from rollout_reassembler.contract.errors import DataPlaneUnavailable
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.data_plane.transfer_queue.cluster import start_local_ray

def error_of(cfg, bootstrap):
    started = time.monotonic()
    try:
        build_data_plane_client(cfg, bootstrap=bootstrap)
    except DataPlaneUnavailable as error:
        assert time.monotonic() - started < 30, "it took too long"
        return str(error)
    raise AssertionError("no error")

import transfer_queue  # takes seconds, which are not to be counted

cfg = DataPlaneConfig(impl="transfer_queue", simple={"num_storage_units": 3})
assert "ray.init" in error_of(cfg, False)
start_local_ray(2)
assert "no queue is running" in error_of(cfg, False)
message = error_of(cfg, True)
assert "4 free CPUs" in message and "2 are free" in message and "num_cpus" in message, message
assert "no queue is running" in error_of(cfg, False)
print("all as expected")
"""


@pytest.mark.ray
@pytest.mark.slow
def test_without_ray_without_a_queue_and_without_cpus_there_is_an_error_in_seconds() -> None:
    """In a process of its own: this session's Ray has a queue."""
    done = subprocess.run([sys.executable, "-c", NO_QUEUE], capture_output=True, text=True, timeout=150, check=False)
    assert "all as expected" in done.stdout, done.stderr
