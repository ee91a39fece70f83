"""The gate before the writes of several clients of one queue: who stops, who is late, and who died."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout
from rollout_reassembler.data_plane import barrier
from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.config import Deadlines
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from tests.data_plane.plain_queue import PlainQueue, QueueHost

DEADLINES = Deadlines(read=10, write=10, clear=10, metadata=10, connect=20, checkpoint=20, quiesced=1.5)


@pytest.fixture(scope="module")
def queue(queues: QueueHost) -> Iterator[PlainQueue]:
    queue = queues.start_queue()
    yield queue
    queue.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "BEAT", 0.2)
    monkeypatch.setattr(barrier, "LEASE", 1.0)
    monkeypatch.setattr(barrier, "SILENT", 1.6)


@pytest.fixture
def planes(queue: PlainQueue) -> Iterator[list[Any]]:
    """Three clients, as in three processes."""
    planes = [queue.connect(DEADLINES) for _ in range(3)]
    planes[0].register_partition("p", {"step": FieldSpec("int64")})
    for index, plane in enumerate(planes):
        plane.put_samples([f"first/{index}"], "p", {"step": [index]})
    yield planes
    for plane in planes:
        plane.close()


def writers_of(plane: Any) -> dict[str, Any]:
    return {key: tags for key, tags in plane._gate._rows.list().items() if key.startswith("writer/")}


def test_no_write_of_any_client_ends_within_the_block(planes: list[Any]) -> None:
    stop = threading.Event()
    ended: list[float] = []

    def write(index: int) -> None:
        number = 0
        while not stop.is_set():
            planes[index].put_samples([f"{index}/{number % 5}"], "p", {"step": [number]})
            ended.append(time.monotonic())
            number += 1

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(write, index) for index in range(3)]
        time.sleep(0.5)
        for _ in range(2):
            with planes[0].quiesce(10) as writers:
                began = time.monotonic()
                assert len(writers) == 3
                before = planes[0].get_samples([f"{index}/0" for index in range(3)], "p")["step"].tolist()
                time.sleep(0.7)
                assert planes[0].get_samples([f"{index}/0" for index in range(3)], "p")["step"].tolist() == before
                over = time.monotonic()
            time.sleep(0.5)
            assert not [moment for moment in ended if began < moment < over]
            assert [moment for moment in ended if moment > over]
        stop.set()
        for future in futures:
            future.result(10)


def test_a_writer_that_does_not_stop_is_named_and_all_go_on(planes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes[1]._gate, "_name", "the slow one")
    planes[1]._gate.close()
    planes[1]._gate._closing.clear()
    planes[1].put_samples(["x"], "p", {"step": [1]})
    with planes[1]._gate.writing("put_samples", "p", ["y"], 5):
        with (
            pytest.raises(DataPlaneTimeout, match=r"did not stop: the slow one \(alive, within a write\);"),
            planes[0].quiesce(3.0),
        ):
            pytest.fail("the block must not run")
        planes[2].put_samples(["z"], "p", {"step": [1]})
    with planes[0].quiesce(5):
        pass


def test_a_write_waits_no_longer_than_its_deadline(planes: list[Any]) -> None:
    with planes[0].quiesce(5):
        started = time.monotonic()
        with pytest.raises(DataPlaneTimeout, match=r"quiesced by .*nothing was written") as raised:
            planes[1].put_samples(["late"], "p", {"step": [1]})
        assert 1.4 < time.monotonic() - started < 3
        assert (raised.value.call, raised.value.partition, raised.value.keys) == ("put_samples", "p", ("late",))
    assert planes[0].get_tags(["late"], "p") == [None]


def test_a_dead_writer_is_not_waited_for_for_ever(planes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row stays and does not beat any more: what a SIGKILL leaves."""
    planes[0]._gate._rows.put("writer/dead", {"name": "dead", "beat": 7, "stopped": ""})
    started = time.monotonic()
    with planes[0].quiesce(5) as writers:
        assert "dead" not in writers
    assert 1.5 < time.monotonic() - started < 4
    assert "writer/dead" not in writers_of(planes[0])


def test_a_gate_whose_holder_died_opens(planes: list[Any]) -> None:
    planes[0]._gate._rows.put("gate", {"id": "x", "name": "a dead driver", "beat": 3})
    time.sleep(0.6)
    started = time.monotonic()
    planes[1]._deadlines = DEADLINES.model_copy(update={"quiesced": 10.0})
    planes[1].put_samples(["a"], "p", {"step": [1]})
    assert time.monotonic() - started < 4
    with planes[2].quiesce(5):
        pass
    assert planes[0]._gate._rows.get(["gate"])["gate"]["open"]


def test_a_row_whose_put_is_under_way_stops_nobody(planes: list[Any]) -> None:
    """Rows are numbered before they are tagged: for a moment they are there without tags."""
    for key in ("gate", "writer/joining"):
        planes[0]._gate._rows.put(key, {})
    planes[1].put_samples(["a"], "p", {"step": [1]})
    with planes[2].quiesce(5) as writers:
        assert len(writers) >= 1
    planes[0]._gate._rows.clear(["writer/joining"])


def test_two_do_not_quiesce_at_once(planes: list[Any]) -> None:
    with planes[0].quiesce(5), pytest.raises(DataPlaneError, match="keeps the plane quiesced"), planes[1].quiesce(5):
        pytest.fail("the block must not run")
    with planes[1].quiesce(5):
        pass


def test_who_does_not_write_costs_nothing(planes: list[Any]) -> None:
    assert len(writers_of(planes[0])) == 3
    time.sleep(2.0)
    assert writers_of(planes[0]) == {}
    with planes[0].quiesce(5) as writers:
        assert writers == []
    planes[2].put_samples(["a"], "p", {"step": [1]})
    assert len(writers_of(planes[0])) == 1


def test_a_checkpoint_taken_while_quiesced_does_not_come_back_quiesced(planes: list[Any], tmp_path: Any) -> None:
    with planes[0].quiesce(5):
        planes[0].save_checkpoint(str(tmp_path / "ck"), metadata={"n": 1})
    planes[1].clear_samples(None, "p")
    assert planes[2].load_checkpoint(str(tmp_path / "ck")) == {"n": 1}
    planes[0].put_samples(["after"], "p", {"step": [1]})
    with planes[0].quiesce(5):
        assert planes[0].load_checkpoint(str(tmp_path / "ck")) == {"n": 1}
        assert not planes[0]._gate._rows.get(["gate"])["gate"]["open"]
    planes[1].put_samples(["after"], "p", {"step": [2]})
    assert planes[0].get_samples(["first/0", "after"], "p")["step"].tolist() == [0, 2]


def test_a_gate_that_was_lost_is_told_at_the_end(planes: list[Any]) -> None:
    def take_it() -> None:
        for beat in range(5):
            planes[1]._gate._rows.put("gate", {"id": "other", "name": "other", "beat": beat})
            time.sleep(0.15)

    with pytest.raises(DataPlaneError, match="not quiesced to the end"), planes[0].quiesce(5):
        take_it()
    planes[1]._gate._rows.clear(["gate"])


def test_memory_writers_that_do_not_stop_are_counted() -> None:
    plane = MemoryDataPlane()
    with (
        plane._gate.writing("put_samples", "p", ["a"], 1),
        pytest.raises(DataPlaneTimeout, match="1 writes of this process"),
        plane.quiesce(0.2),
    ):
        pytest.fail("the block must not run")
    with plane.quiesce(1), pytest.raises(DataPlaneTimeout, match="somebody else"), plane.quiesce(0.2):
        pytest.fail("the block must not run")
