"""The sink says of each call whether it is durable, whatever happens to its neighbours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollout_reassembler.contract.digests import extras_digest
from rollout_reassembler.contract.errors import (
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    InvalidRoutes,
    RequestError,
    SchemaViolation,
)
from rollout_reassembler.contract.records import StagedCall, StageResult
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.staging.codec import RouteShape, unpack_call
from rollout_reassembler.staging.extras import decode_extras
from rollout_reassembler.staging.places import place, place_of
from rollout_reassembler.staging.schema import register_staging_partition
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.staging.source import StagingSource
from tests.captures import STAGING, MadeRollout, chain, memory_plane, staged_keys, staged_places, staging_key_of


class WatchedPlane:
    """The real memory plane, with a word in every put: it counts them, and may stop them."""

    def __init__(self, before_put: Callable[[Sequence[str]], None] = lambda keys: None) -> None:
        self.plane = memory_plane()
        self.puts: list[list[str]] = []
        self._before_put = before_put

    def put_samples(self, sample_ids: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        self.puts.append(list(sample_ids))
        self._before_put(sample_ids)
        return self.plane.put_samples(sample_ids, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plane, name)


def sink_on(plane: Any, **options: Any) -> StagingSink:
    return StagingSink(plane, staging_partition=STAGING, **options)


def calls(count: int, *, tokens: int = 3) -> list[StagedCall]:
    made = MadeRollout("r")
    return [made.call([1], [2] * tokens, call_id=f"c{index}") for index in range(count)]


def stage_at_once(sink: StagingSink, records: Sequence[StagedCall]) -> list[StageResult | BaseException]:
    """Each record from a thread of its own, all let go at the same moment."""
    barrier = threading.Barrier(len(records))

    def work(record: StagedCall) -> StageResult | BaseException:
        barrier.wait()
        try:
            return sink.stage(record)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(records)) as pool:
        return list(pool.map(work, records))


def staged_calls(plane: Any, records: Sequence[StagedCall]) -> list[StagedCall]:
    return StagingSource(plane, staging_partition=STAGING).fetch(records)


# --- what is staged ---------------------------------------------------------------------------------


def test_an_acknowledged_call_is_durable_under_its_key():
    plane = memory_plane()
    (record,) = calls(1)
    assert sink_on(plane).stage(record) == StageResult(ok=True, staging_key="r/c0")
    assert staged_calls(plane, [record]) == [record]


def test_a_row_says_in_its_tags_whose_it_is_and_since_when():
    plane = memory_plane()
    made = MadeRollout("группа/0")
    sink_on(plane).stage(made.call([1], [2], call_id="a/b"))
    ((key, tags),) = plane.list_samples(STAGING).items()
    assert key == f"группа/0/a/b#{made.calls[0].digest[:32]}"
    assert tags["rollout_id"] == "группа/0"
    assert 1.7e9 < tags["staged_at"] < 1e10


def test_extras_are_staged_beside_the_call_as_their_digest_hashes_them():
    plane = memory_plane()
    made = MadeRollout("r")
    records = [made.call([1], [2], extras={"note": "x"}), made.call([1], [2], extras={}), made.call([1], [2])]
    sink_on(plane).stage_all(records)
    encoded, missing = StagingSource(plane, staging_partition=STAGING).fetch_extras(list(map(place_of, records)))
    assert not missing
    assert encoded[place_of(records[2])] == b""
    assert [decode_extras(encoded[place_of(r)], r.extras_digest) for r in records] == [{"note": "x"}, {}, {}]
    assert records[0].extras_digest == extras_digest({"note": "x"})


def test_the_route_shape_goes_into_the_header():
    plane = memory_plane()
    (record,) = calls(1)
    sink_on(plane, route_shape=lambda call: RouteShape(call.delta_len, 48, 8)).stage(record)
    value = plane.get_samples([place_of(record)], STAGING, ["call"])["call"][0]
    assert unpack_call(value).routes == RouteShape(4, 48, 8)


def test_staging_a_call_again_leaves_one_row():
    plane = memory_plane()
    (record,) = calls(1)
    sink = sink_on(plane)
    assert sink.stage(record).ok
    assert sink.stage(record).ok
    assert staged_keys(plane) == {"r/c0"}


def test_clear_removes_just_those_rows():
    plane = WatchedPlane()
    sink = sink_on(plane)
    records = calls(3)
    sink.stage_all(records)
    sink.clear([records[0], place_of(records[2]), place("r/unknown", records[0].digest)])
    sink.clear([])
    assert staged_keys(plane) == {"r/c1"}


# --- sharing puts -----------------------------------------------------------------------------------


def test_calls_staged_at_once_share_puts():
    gate = threading.Event()
    plane = WatchedPlane(before_put=lambda keys: gate.wait(5) if len(plane.puts) == 1 else None)
    sink = sink_on(plane)
    records = calls(64)
    opener = threading.Timer(0.5, gate.set)
    opener.start()
    results = stage_at_once(sink, records)
    assert [result.staging_key for result in results] == [record.staging_key for record in records]
    assert staged_calls(plane, records) == records
    assert len(plane.puts) <= 8
    assert sorted(key for put in plane.puts for key in put) == sorted(map(place_of, records))


def test_a_call_alone_is_written_at_once():
    plane = WatchedPlane()
    sink = sink_on(plane)
    for record in calls(3):
        assert sink.stage(record).ok
    assert [len(put) for put in plane.puts] == [1, 1, 1]


def test_a_window_gathers_company():
    plane = WatchedPlane()
    results = stage_at_once(sink_on(plane, window_s=0.2), calls(16))
    assert all(result.ok for result in results)
    assert len(plane.puts) <= 4


def test_stage_all_shares_one_put():
    plane = WatchedPlane()
    assert all(result.ok for result in sink_on(plane).stage_all(calls(20)))
    assert len(plane.puts) == 1


def test_stage_all_of_nothing_asks_nothing_of_the_plane():
    plane = WatchedPlane()
    assert sink_on(plane).stage_all([]) == []
    assert plane.puts == []


def test_a_put_is_bounded_in_bytes_but_never_empty():
    plane = WatchedPlane()
    records = calls(10, tokens=100)
    results = sink_on(plane, max_batch_bytes=5000).stage_all(records)
    assert all(result.ok for result in results)
    assert [len(put) for put in plane.puts] == [2] * 5
    assert all(result.ok for result in sink_on(plane, max_batch_bytes=1).stage_all(records))
    assert [len(put) for put in plane.puts[5:]] == [1] * 10


def test_one_key_twice_in_other_bytes_keeps_both():
    plane = WatchedPlane()
    made = MadeRollout("r")
    first, second = made.call([1], [2], call_id="c"), made.call([1], [3], call_id="c")
    results = sink_on(plane).stage_all([first, *calls(1), second])
    assert [result.staging_key for result in results] == ["r/c", "r/c0", "r/c"]
    assert len(plane.puts) == 1
    assert staged_calls(plane, [first, second]) == [first, second]


def test_two_rollouts_whose_ids_join_to_one_key_keep_both_their_calls():
    plane = memory_plane()
    short, long = MadeRollout("g/r"), MadeRollout("g/r/sub")
    calls = [short.call([1], [2], call_id="sub/0"), long.call([1], [2], call_id="0")]
    assert [result.staging_key for result in sink_on(plane).stage_all(calls)] == ["g/r/sub/0"] * 2
    assert [call.rollout_id for call in staged_calls(plane, calls)] == ["g/r", "g/r/sub"]


def test_one_call_twice_goes_into_two_puts_and_is_one_row():
    plane = WatchedPlane()
    (record,) = calls(1)
    assert all(result.ok for result in sink_on(plane).stage_all([record, record]))
    assert plane.puts == [[place_of(record)]] * 2
    assert staged_places(plane) == {place_of(record)}


def test_a_bare_staging_key_says_too_little_to_clear():
    plane = memory_plane()
    (record,) = calls(1)
    sink = sink_on(plane)
    assert sink.stage(record).ok
    with pytest.raises(RequestError, match="'r/c0' is not the place of a staged call; give the call, its"):
        sink.clear(["r/c0"])
    assert staged_calls(plane, [record]) == [record]


# --- faults -----------------------------------------------------------------------------------------


def refuse(*names: str) -> Callable[[Sequence[str]], None]:
    """The plane refuses every put that holds one of these keys."""

    def before_put(keys: Sequence[str]) -> None:
        if set(names) & set(map(staging_key_of, keys)):
            raise SchemaViolation("does not fit", call="put_samples", partition=STAGING)

    return before_put


@pytest.mark.parametrize("together", [stage_at_once, lambda sink, records: sink.stage_all(records)])
def test_one_bad_record_never_fails_its_mates(together):
    plane = WatchedPlane(before_put=refuse("r/c3", "r/c7"))
    records = calls(10)
    results = together(sink_on(plane, window_s=0.1), records)
    assert [result.ok for result in results] == [index not in (3, 7) for index in range(10)]
    assert "does not fit" in results[3].error
    assert staged_keys(plane) == {record.staging_key for record in records} - {"r/c3", "r/c7"}


@pytest.mark.parametrize("together", [stage_at_once, lambda sink, records: sink.stage_all(records)])
@pytest.mark.parametrize("kind", [DataPlaneTimeout, DataPlaneUnavailable])
def test_a_plane_that_is_gone_fails_every_call_with_the_reason(together, kind):
    def gone(keys: Sequence[str]) -> None:
        raise kind("no answer", call="put_samples", partition=STAGING, keys=keys, seconds=60.0)

    plane = WatchedPlane(before_put=gone)
    results = together(sink_on(plane, window_s=0.3), calls(8))
    assert not any(result.ok for result in results)
    assert all("no answer" in result.error and "after 60.0 s" in result.error for result in results)
    assert staged_keys(plane) == set()
    assert len(plane.puts) <= 3, "a plane that is gone is not asked for each call alone"


def test_a_sink_recovers_with_its_plane():
    down = threading.Event()

    def sometimes(keys: Sequence[str]) -> None:
        if down.is_set():
            raise DataPlaneUnavailable("down")

    plane = WatchedPlane(before_put=sometimes)
    sink = sink_on(plane)
    (record,) = calls(1)
    down.set()
    assert not sink.stage(record).ok
    down.clear()
    assert sink.stage(record).ok
    assert staged_keys(plane) == {"r/c0"}


def test_an_unregistered_partition_fails_the_call_and_says_so():
    result = sink_on(MemoryDataPlane()).stage(calls(1)[0])
    assert not result.ok
    assert "register_partition" in result.error


def test_a_call_whose_bytes_cannot_be_made_fails_alone():
    def routes_of(call: StagedCall) -> RouteShape:
        if call.model_call_id == "c1":
            raise InvalidRoutes("not [L, K]")
        return RouteShape()

    plane = WatchedPlane()
    results = sink_on(plane, route_shape=routes_of).stage_all(calls(3))
    assert [result.ok for result in results] == [True, False, True]
    assert "not [L, K]" in results[1].error
    assert staged_keys(plane) == {"r/c0", "r/c2"}


def test_an_interrupt_in_a_put_acknowledges_nobody():
    """The thread that was writing sees the interrupt; its mates hear that their calls are not durable."""

    def broken(keys: Sequence[str]) -> None:
        raise KeyboardInterrupt

    plane = WatchedPlane(before_put=broken)
    results = stage_at_once(sink_on(plane, window_s=0.2), calls(8))
    raised = [result for result in results if isinstance(result, KeyboardInterrupt)]
    answered = [result for result in results if isinstance(result, StageResult)]
    assert len(raised) == len(plane.puts) >= 1
    assert len(raised) + len(answered) == 8
    assert all(not result.ok and "interrupted" in result.error for result in answered)
    assert staged_keys(plane) == set()


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError])
def test_a_bug_of_the_client_is_an_answer_and_a_traceback(kind, caplog):
    def broken(keys: Sequence[str]) -> None:
        raise kind("a bug")

    result = sink_on(WatchedPlane(before_put=broken)).stage(calls(1)[0])
    assert not result.ok
    assert result.error == f"{kind.__name__}: {kind('a bug')}"
    assert caplog.records[-1].exc_info[0] is kind


def test_a_bug_that_one_call_meets_costs_no_mate_of_its_batch():
    def broken(keys: Sequence[str]) -> None:
        if any("/c3#" in key for key in keys):
            raise IndexError("a bug")

    plane = WatchedPlane(before_put=broken)
    results = stage_at_once(sink_on(plane, window_s=0.2), calls(8))
    assert [result.ok for result in results] == [index != 3 for index in range(8)]
    assert "IndexError: a bug" in results[3].error
    assert staged_calls(plane, calls(8)[:3]) == calls(8)[:3]


def test_a_bug_of_what_tells_the_routes_fails_its_call_alone(caplog):
    def routes_of(call: StagedCall) -> RouteShape:
        if call.model_call_id == "c1":
            raise AttributeError("a bug")
        return RouteShape()

    results = sink_on(WatchedPlane(), route_shape=routes_of).stage_all(calls(3))
    assert [result.ok for result in results] == [True, False, True]
    assert results[1].error == "AttributeError: a bug"
    assert caplog.records[-1].exc_info[0] is AttributeError


def test_a_sink_works_on_after_an_interrupt():
    first = threading.Event()

    def broken_once(keys: Sequence[str]) -> None:
        if not first.is_set():
            first.set()
            raise KeyboardInterrupt

    plane = WatchedPlane(before_put=broken_once)
    sink = sink_on(plane)
    with pytest.raises(KeyboardInterrupt):
        sink.stage(calls(1)[0])
    assert sink.stage(calls(1)[0]).ok


def test_nothing_is_acknowledged_that_is_not_durable_while_puts_fail_at_random():
    """64 threads, a plane that fails every third put before it and every fifth after it."""

    class Flaky(WatchedPlane):
        def put_samples(self, sample_ids: Sequence[str], *args: Any, **kwargs: Any) -> Any:
            self.puts.append(list(sample_ids))
            count = len(self.puts)
            if count % 3 == 0:
                raise DataPlaneTimeout("before")
            answer = self.plane.put_samples(sample_ids, *args, **kwargs)
            if count % 5 == 0:
                raise DataPlaneTimeout("after")
            return answer

    plane = Flaky()
    sink = sink_on(plane, max_batch_bytes=2000)
    records = calls(64)
    results = stage_at_once(sink, records)
    durable = staged_keys(plane)
    assert all(record.staging_key in durable for record, result in zip(records, results, strict=True) if result.ok)
    assert any(result.ok for result in results)
    assert not all(result.ok for result in results)
    while not all(result.ok for result in results):
        results = [r if r.ok else sink.stage(record) for record, r in zip(records, results, strict=True)]
    assert staged_calls(plane, records) == records


def test_clear_raises_when_the_plane_fails():
    plane = MemoryDataPlane()
    register_staging_partition(plane, STAGING)
    sink = sink_on(plane)
    plane.close()
    with pytest.raises(DataPlaneError):
        sink.clear(calls(1))


def test_registering_the_partition_again_changes_nothing():
    plane = memory_plane()
    sink_on(plane).stage_all(chain("r").calls)
    register_staging_partition(plane, STAGING)
    assert len(staged_keys(plane)) == 3
