"""Each kind of call ends in the deadline that the config gives to its kind, and says what it was about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout, DataPlaneUnavailable
from rollout_reassembler.data_plane.base import DataPlaneClient, FieldSpec
from rollout_reassembler.data_plane.config import Deadlines
from tests.data_plane.plain_queue import PlainQueue

pytestmark = pytest.mark.slow

DEADLINES = Deadlines(read=1.0, write=1.25, clear=1.5, metadata=1.75, connect=2.0, checkpoint=2.25, quiesced=60.0)
LATE = 2.0
"""How much later than its deadline a call may end on a busy machine."""

KEYS = ["a", "b", "c", "d", "e"]
SOME_KEYS = "keys 'a', 'b', 'c', … 5 in all"

Call = Callable[[DataPlaneClient, Path], object]

CALLS: dict[str, tuple[Call, float, str]] = {
    "get_samples": (lambda plane, _: plane.get_samples(KEYS, "p"), DEADLINES.read, SOME_KEYS),
    "put_samples": (lambda plane, _: plane.put_samples(KEYS, "p", {"step": [7] * 5}), DEADLINES.write, SOME_KEYS),
    "clear_samples": (lambda plane, _: plane.clear_samples(KEYS, "p"), DEADLINES.clear, SOME_KEYS),
    "get_tags": (lambda plane, _: plane.get_tags(KEYS, "p"), DEADLINES.metadata, SOME_KEYS),
    "list_samples": (lambda plane, _: plane.list_samples("p"), DEADLINES.metadata, ""),
    "claim_meta": (lambda plane, _: plane.claim_meta("p", "train", ["step"], 5), DEADLINES.metadata, ""),
    "check_consumption_status": (
        lambda plane, _: plane.check_consumption_status("p", ["train"]),
        DEADLINES.metadata,
        "",
    ),
    "is_registered": (lambda plane, _: plane.is_registered("q"), DEADLINES.metadata, ""),
    "register_partition": (
        lambda plane, _: plane.register_partition("q", {"x": FieldSpec("bytes")}),
        DEADLINES.metadata,
        "",
    ),
    "save_checkpoint": (lambda plane, path: plane.save_checkpoint(str(path)), DEADLINES.checkpoint, ""),
    "load_checkpoint": (lambda plane, path: plane.load_checkpoint(str(path)), DEADLINES.checkpoint, ""),
}


@pytest.fixture
def plane(queue: PlainQueue) -> Iterator[DataPlaneClient]:
    plane = queue.connect(DEADLINES)
    plane.register_partition("p", {"step": FieldSpec("int64"), "tokens": FieldSpec("int64", 1)})
    plane.put_samples(KEYS, "p", {"step": range(5), "tokens": [np.arange(3)] * 5}, tags=[{"x": 1}] * 5)
    yield plane
    plane.close()


def outcomes(plane: DataPlaneClient, names: list[str], path: Path) -> dict[str, tuple[DataPlaneError | None, float]]:
    """What each call raised and after how many seconds; all at the same time, as a busy worker makes them."""
    found: dict[str, tuple[DataPlaneError | None, float]] = {}

    def run(name: str) -> None:
        started = time.monotonic()
        error: DataPlaneError | None = None
        try:
            CALLS[name][0](plane, path)
        except DataPlaneError as raised:
            error = raised
        found[name] = (error, time.monotonic() - started)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found.keys() == set(names)
    return found


def assert_in_its_deadline(name: str, error: DataPlaneError | None, seconds: float, path: Path) -> None:
    _, deadline, keys = CALLS[name]
    assert isinstance(error, DataPlaneTimeout), (name, error)
    partition = {"is_registered": "q", "register_partition": "q"}.get(name, str(path) if "checkpoint" in name else "p")
    assert (error.call, error.partition, error.seconds) == (name, partition, deadline)
    assert f"{name}({partition!r})" in str(error)
    assert keys in str(error)
    assert f"after {deadline:.1f} s" in str(error)
    assert deadline - 0.1 < seconds < deadline + LATE, name


def test_a_stalled_controller(queue: PlainQueue, plane: DataPlaneClient, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    plane.save_checkpoint(str(path))
    queue.controller.stall()
    for name, (error, seconds) in outcomes(plane, list(CALLS), path).items():
        assert_in_its_deadline(name, error, seconds, path)
    queue.controller.resume()
    assert plane.get_samples(KEYS, "p", ["tokens"])["tokens"][4].tolist() == [0, 1, 2]


def test_a_stalled_storage_unit(queue: PlainQueue, plane: DataPlaneClient, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    queue.unit.stall()
    names = ["get_samples", "put_samples", "clear_samples", "save_checkpoint"]
    for name, (error, seconds) in outcomes(plane, names, path).items():
        assert_in_its_deadline(name, error, seconds, path)
    assert not path.exists()
    queue.unit.resume()
    plane.put_samples(KEYS, "p", {"step": [8] * 5, "tokens": [np.arange(2)] * 5})
    assert plane.get_samples(KEYS, "p")["step"].tolist() == [8] * 5


def test_connecting_to_a_stalled_controller(queue: PlainQueue) -> None:
    queue.controller.stall()
    started = time.monotonic()
    with pytest.raises(DataPlaneUnavailable, match=r"connect.*the queue's controller at .* does not answer.*2\.0 s"):
        queue.connect(DEADLINES)
    assert time.monotonic() - started < DEADLINES.connect + LATE


def test_a_write_that_cannot_ask_whether_the_plane_is_quiesced(queue: PlainQueue, plane: DataPlaneClient) -> None:
    """One that has not looked for five seconds looks first, which has the metadata deadline, not that of a pause."""
    queue.controller.stall()
    time.sleep(6)
    started = time.monotonic()
    with pytest.raises(DataPlaneTimeout) as raised:
        plane.put_samples(KEYS, "p", {"step": [7] * 5})
    assert time.monotonic() - started < DEADLINES.metadata + DEADLINES.write + LATE
    assert raised.value.call == "put_samples"
    assert SOME_KEYS in str(raised.value)


def test_closing_a_client_of_a_stalled_controller(queue: PlainQueue, plane: DataPlaneClient) -> None:
    queue.controller.stall()
    started = time.monotonic()
    plane.close()
    assert time.monotonic() - started < 5
    with pytest.raises(DataPlaneUnavailable, match="closed"):
        plane.get_tags(KEYS, "p")


def test_a_clear_whose_answer_does_not_come_is_not_a_success(queue: PlainQueue, plane: Any) -> None:
    """The rows keep their numbers then: given to others, the clear that the unit does in the end would take
    those along."""
    queue.unit.stall()
    with pytest.raises(DataPlaneTimeout, match=r"clear_samples\('p'\): no answer from a storage unit.*5 in all"):
        plane.clear_samples(KEYS, "p")
    queue.unit.resume()
    assert plane.list_samples("p").keys() == set(KEYS)
    plane.clear_samples(KEYS, "p")
    assert plane.list_samples("p") == {}
    plane.put_samples(["new"], "p", {"step": [1], "tokens": [np.arange(1)]})
    assert plane.get_samples(["new"], "p")["step"].tolist() == [1]
