"""A put beside a sweep of the key that it writes: acknowledged means there, wherever either of them stands still."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollout_reassembler.contract.records import StageResult
from rollout_reassembler.data_plane.base import CONDEMNED_TAG
from rollout_reassembler.data_plane.config import Deadlines
from rollout_reassembler.reassembly.sweep import sweep_staging
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.schema import register_staging_partition, rollout_of
from rollout_reassembler.staging.sink import StagingSink
from tests.captures import STAGING, chain
from tests.data_plane.plain_queue import PlainQueue, QueueHost
from tests.data_plane.stoppable import Stoppable

WRITE_DEADLINE = 1.0
DEADLINES = Deadlines(read=10, write=WRITE_DEADLINE, clear=10, metadata=10, connect=20)
LONGER = 1.5 * WRITE_DEADLINE
CALL = chain("r", 1).calls[0]
PLACE = place_of(CALL)
_TAGGED = 3
"""A put numbers the row, stores the value and tags it; from here on no sweep takes it for one that failed."""


@pytest.fixture(scope="module")
def queue(queues: QueueHost) -> Iterator[PlainQueue]:
    queue = queues.start_queue()
    yield queue
    queue.stop()


@pytest.fixture
def planes(queue: PlainQueue) -> Iterator[list[Any]]:
    """A sweeper's and a worker's; of an earlier put of the worker's call nothing is there but its key."""
    planes = [queue.connect(DEADLINES) for _ in range(2)]
    for plane in planes:
        register_staging_partition(plane, STAGING)
        plane.now()
    planes[0].clear_samples(None, STAGING)
    planes[0].put_samples([PLACE], STAGING, tags=[{}])
    yield planes
    for plane in planes:
        plane.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def stage(plane: Any) -> StageResult:
    return StagingSink(plane, staging_partition=STAGING).stage(CALL)


def sweep(plane: Any) -> list[str]:
    return sweep_staging(plane, STAGING, untagged_after_s=LONGER, dry_run=False).keys


def wait_until_condemned(plane: Any) -> None:
    until = time.monotonic() + 10
    while not (plane.get_tags([PLACE], STAGING)[0] or {}).get(CONDEMNED_TAG):
        assert time.monotonic() < until
        time.sleep(0.01)


def assert_there(plane: Any) -> None:
    assert plane.get_samples([PLACE], STAGING, ["call"]).sample_ids == [PLACE]
    (tags,) = plane.get_tags([PLACE], STAGING)
    assert rollout_of(tags) == "r"


@pytest.mark.parametrize("step", range(_TAGGED))
def test_a_put_that_wakes_behind_the_sweep_is_not_acknowledged(
    planes: list[Any], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Neither the retry that was in flight nor anybody else is told that a swept row is there."""
    writer = Stoppable(planes[1], monkeypatch)
    writer.stop_at(step)
    staging = pool.submit(stage, planes[1])
    assert writer.is_stopped.wait(10)
    swept = sweep(planes[0])
    writer.resume()
    result = staging.result(20)
    assert not result.ok
    assert "within the deadline" in result.error
    assert swept == [PLACE]
    assert stage(planes[1]).ok
    assert_there(planes[0])


@pytest.mark.parametrize("step", range(1, _TAGGED))
def test_a_put_that_wakes_while_the_sweep_waits_is_spared(
    planes: list[Any], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    writer = Stoppable(planes[1], monkeypatch)
    writer.stop_at(step)
    staging = pool.submit(stage, planes[1])
    assert writer.is_stopped.wait(10)
    sweeping = pool.submit(sweep, planes[0])
    wait_until_condemned(planes[0])
    writer.resume()
    result = staging.result(20)
    swept = sweeping.result(20)
    assert result.ok == (swept == [])
    if result.ok:
        assert_there(planes[0])
        assert stage(planes[1]).ok, "a spared row may be written again"


@pytest.mark.parametrize("step", ["list_samples", "put_samples", "get_tags", "get_samples", "clear_samples"])
def test_a_put_between_two_steps_of_a_sweep_is_refused_or_there(
    planes: list[Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The worker's retry comes and goes just before this call of the sweep."""
    results: list[StageResult] = []
    call = getattr(planes[0], step)

    def behind_a_put(*args: Any, **kwargs: Any) -> Any:
        if not results and STAGING in args:
            results.append(stage(planes[1]))
        return call(*args, **kwargs)

    monkeypatch.setattr(planes[0], step, behind_a_put)
    swept = sweep_staging(planes[0], STAGING, untagged_after_s=0, dry_run=False).keys
    (result,) = results
    assert result.ok == (swept == [])
    if result.ok:
        assert_there(planes[1])


def test_a_put_that_begins_behind_the_sentence_is_refused_until_the_sweep_is_done(
    planes: list[Any], pool: ThreadPoolExecutor
) -> None:
    sweeping = pool.submit(sweep, planes[0])
    wait_until_condemned(planes[0])
    result = stage(planes[1])
    assert not result.ok
    assert "a sweep is about to clear these rows; put them again when it has" in result.error
    assert sweeping.result(20) == [PLACE]
    assert stage(planes[1]).ok
    assert_there(planes[0])


def test_what_a_sweep_that_died_has_condemned_is_cleared_by_the_next(planes: list[Any]) -> None:
    planes[0].put_samples([PLACE], STAGING, tags=[{CONDEMNED_TAG: 1.0}])
    assert not stage(planes[1]).ok
    assert sweep(planes[0]) == [PLACE]
    assert stage(planes[1]).ok
    assert_there(planes[0])


def test_a_row_whose_tags_were_lost_gets_them_back_from_its_bytes(planes: list[Any]) -> None:
    """Two clients that tag one row at a time may lose a tag; the row was acknowledged all the same."""
    assert stage(planes[1]).ok
    planes[0].put_samples([PLACE], STAGING, tags=[{"rollout_id": None, "staged_at": None}])
    assert sweep(planes[0]) == []
    assert_there(planes[0])


def test_a_writer_whose_clock_is_three_hours_behind_is_not_swept_by_age(
    planes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        real = time.time
        patch.setattr(time, "time", lambda: real() - 3 * 3600)
        assert stage(planes[1]).ok
    assert sweep_staging(planes[0], STAGING, older_than_s=3600).keys == []
    assert sweep_staging(planes[0], STAGING, older_than_s=0).keys == [PLACE]
