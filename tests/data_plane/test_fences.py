"""A process that stands still within a write while the plane is quiesced, stopped at each step in turn.

Stopped means: neither the write nor the process's watcher of the gate sends anything. The queue, the quiescer and
what they send each other are real.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout, WriteFenced
from rollout_reassembler.data_plane import barrier
from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.config import Deadlines
from tests.data_plane.plain_queue import PlainQueue, QueueHost, in_a_call
from tests.data_plane.stoppable import Stoppable

DEADLINES = Deadlines(read=10, write=20, clear=20, metadata=10, connect=20, checkpoint=20, quiesced=20)

STEPS = {
    "put": (lambda plane: plane.put_samples(["a"], "p", {"step": [2]}, [{"n": 2}]), 4),
    "clear": (lambda plane: plane.clear_samples(["a"], "p"), 4),
    "claim": (lambda plane: plane.claim_meta("p", "train", ["step"], 1), 3),
}
"""What is written, and how many messages that takes at least."""

EVERY_STEP = [(kind, step) for kind, (_, count) in STEPS.items() for step in range(count)]

WITH_THE_ONE_BEFORE = ("put", 3)
"""What is announced goes out without waiting for the answer to the tags, which may be late then."""


@pytest.fixture(scope="module")
def queue(queues: QueueHost) -> Iterator[PlainQueue]:
    queue = queues.start_queue()
    yield queue
    queue.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "BEAT", 0.1)
    monkeypatch.setattr(barrier, "LEASE", 0.6)
    monkeypatch.setattr(barrier, "SILENT", 1.0)


@pytest.fixture
def planes(queue: PlainQueue) -> Iterator[list[Any]]:
    planes = [queue.connect(DEADLINES) for _ in range(2)]
    planes[0].register_partition("p", {"step": FieldSpec("int64")})
    yield planes
    for plane in planes:
        plane.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def state_of(plane: Any) -> Any:
    """All that a checkpoint of the partition would hold."""
    produced = in_a_call(plane, lambda call: plane._rows.controller.produced(call, "p", ["step"]))
    rows = plane.get_samples(["a", "b"], "p", partial=True)
    return plane.list_samples("p"), rows.sample_ids, rows["step"].tolist(), produced


def stopped_in(writer: Stoppable, pool: ThreadPoolExecutor, kind: str, step: int, **how: Any) -> Future[Any]:
    """A write that has stopped at this step, over rows that are there, and that nobody has claimed."""
    writer.plane.clear_samples(["a", "b"], "p")
    writer.plane.put_samples(["a", "b"], "p", {"step": [1, 1]}, [{"n": 1}, {"n": 1}])
    writer.stop_at(step, **how)
    write = pool.submit(STEPS[kind][0], writer.plane)
    assert writer.is_stopped.wait(10)
    return write


def declared_dead(plane: Any) -> Any:
    """A block of the plane that has taken all other writers for dead."""
    writers = {key for key in plane._gate._rows.list() if key.startswith("writer/")}
    plane._gate._watched.is_silent = lambda key, sign: key in writers
    return plane.quiesce(5)


@pytest.mark.parametrize(("kind", "step"), [at for at in EVERY_STEP if at != WITH_THE_ONE_BEFORE])
def test_what_a_stopped_writer_had_begun_does_not_go_on_in_the_block(
    planes: list[Any], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, kind: str, step: int
) -> None:
    writer = Stoppable(planes[1], monkeypatch)
    write = stopped_in(writer, pool, kind, step)
    with planes[0].quiesce(10):
        before = state_of(planes[0])
        writer.resume()
        with pytest.raises(WriteFenced, match=r"stood still .* Repeat the call") as raised:
            write.result(10)
        assert raised.value.partition == "p"
        assert state_of(planes[0]) == before
    STEPS[kind][0](planes[1])
    left = state_of(planes[0])
    assert left[2] == {"put": [2, 1], "clear": [1], "claim": [1, 1]}[kind]


@pytest.mark.parametrize("step", range(4))
def test_a_writer_that_wakes_after_the_block_is_told_as_well(
    planes: list[Any], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Its numbers may be those of another time: a checkpoint may have been loaded."""
    writer = Stoppable(planes[1], monkeypatch)
    write = stopped_in(writer, pool, "put", step)
    with planes[0].quiesce(10):
        pass
    before = state_of(planes[0])
    writer.resume()
    with pytest.raises(WriteFenced):
        write.result(10)
    assert state_of(planes[0]) == before


@pytest.mark.parametrize(
    ("kind", "step", "behind_look"), [*((kind, step, True) for kind, step in EVERY_STEP), (*WITH_THE_ONE_BEFORE, False)]
)
def test_a_message_that_slips_out_in_the_block_is_told_to_both(
    planes: list[Any],
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    step: int,
    behind_look: bool,
) -> None:
    """Stopped behind the look at the clock, before the message is sent."""
    writer = Stoppable(planes[1], monkeypatch)
    write = stopped_in(writer, pool, kind, step, behind_look=behind_look)

    def wake_it() -> None:
        writer.resume()
        with pytest.raises(WriteFenced, match="part of the write may have arrived"):
            write.result(10)

    with (
        pytest.raises(DataPlaneError, match=r"not quiesced to the end: writers that had stood still .*\('p'\)"),
        planes[0].quiesce(10),
    ):
        wake_it()
    with planes[0].quiesce(10):
        pass


@pytest.mark.parametrize("step", range(4))
def test_a_write_goes_on_where_nobody_quiesced_meanwhile(
    planes: list[Any], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    writer = Stoppable(planes[1], monkeypatch)
    write = stopped_in(writer, pool, "put", step)
    time.sleep(1.5)
    writer.resume()
    write.result(10)
    assert state_of(planes[0])[2] == [2, 1]


def test_a_writer_whose_clock_stood_still_too_tells_the_quiescer(planes: list[Any]) -> None:
    """A paused machine: to its own clock no time has passed, but its row is gone when it looks."""
    gate = planes[1]._gate
    planes[1].put_samples(["a", "b"], "p", {"step": [1, 1]}, [{"n": 1}, {"n": 1}])
    with (
        pytest.raises(DataPlaneError, match="writers that had stood still may have written within the block"),
        gate.writing("put_samples", "p", ["a"], 5),
        declared_dead(planes[0]),
    ):
        time.sleep(1.0)


def test_short_attempts_succeed_after_a_writer_died(planes: list[Any]) -> None:
    """Each has less time than it takes to know that the writer is dead; what was seen is remembered."""
    planes[0]._gate._rows.put("writer/dead", {"name": "dead", "beat": 7, "stopped": ""})
    errors = []
    for _ in range(20):
        try:
            with planes[0].quiesce(0.3):
                break
        except DataPlaneTimeout as error:
            errors.append(str(error))
    else:
        pytest.fail(f"never quiesced: {errors}")
    assert errors
    pattern = r"dead \(silent for 0\.\d s; taken for dead in 0\.\d s, try again then\)"
    assert any(re.search(pattern, error) for error in errors), errors


def test_short_attempts_succeed_after_a_quiescer_died(planes: list[Any]) -> None:
    planes[0]._gate._rows.put("gate", {"id": "x", "name": "a dead driver", "beat": 3, "open": False})
    with (
        pytest.raises(DataPlaneTimeout, match="a dead driver seems to keep the plane quiesced"),
        planes[0].quiesce(0.3),
    ):
        pytest.fail("the block must not run")
    for _ in range(20):
        with contextlib.suppress(DataPlaneTimeout), planes[0].quiesce(0.3):
            return
    pytest.fail("never quiesced")


def test_a_quiescer_that_stood_still_in_its_block_is_told(planes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    quiescer = Stoppable(planes[0], monkeypatch)

    def stand_still() -> None:
        quiescer.stop()
        time.sleep(1.5)
        quiescer.resume()

    with pytest.raises(DataPlaneError, match="could not be kept closed for"), planes[0].quiesce(10):
        stand_still()
