"""The ledger's files: durable, shared, and honest about what a dying writer left."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_reassembler.capture import CaptureAdmission, CaptureLedger, CommitCoords, LedgerConflict
from rollout_reassembler.contract.digests import EMPTY_EXTRAS_DIGEST
from rollout_reassembler.contract.errors import RequestError
from rollout_reassembler.contract.records import seal_call
from tests.capture.world import World, assistant, user


def _coords(admission: CaptureAdmission, token: int = 3) -> CommitCoords:
    """The coordinates of a root `[1, 2]|[token]`, without a worker."""
    staged = seal_call(
        rollout_id=admission.rollout_id,
        model_call_id=admission.model_call_id,
        token_ids_delta=[1, 2, token],  # type: ignore[arg-type]
        token_mask_delta=[0.0, 0.0, 1.0],  # type: ignore[arg-type]
        generation_log_probs_delta=[0.0, 0.0, -0.5],  # type: ignore[arg-type]
        weight_version=7,
    )
    return CommitCoords.of(staged, generation_len=1, key=staged.staging_key)


def _one_call(ledger: CaptureLedger, rollout_id: str, question: str, **settings: Any) -> str:
    admission = ledger.admit(rollout_id, [user(question)], **settings)
    response = f"resp-{admission.model_call_id}"
    ledger.record(admission, _coords(admission), response_id=response, output=assistant(f"re: {question}"))
    return admission.model_call_id


def _write_calls(directory: str, rollout_id: str, writer: int, calls: int) -> None:
    ledger = CaptureLedger(directory)
    for call in range(calls):
        _one_call(ledger, rollout_id, f"{writer}.{call}")


def _tear(path: Path, line: bytes = b'{"kind":"recorded","reco') -> None:
    """What a writer leaves that dies in its write."""
    with path.open("ab") as file:
        file.write(line)


IDS = [
    "r",
    "a/b",
    "../../etc/passwd",
    ".",
    "ünïcode/ロールアウト",
    "with space%2F",
    "A",
    "a",
    "x" * 3_000,
    "nul\0",
    "n\nl",
]


@pytest.mark.parametrize("rollout_id", IDS)
def test_unicode_slashes_and_long_ids_have_a_file_of_their_own(tmp_path: Path, rollout_id: str) -> None:
    ledger = CaptureLedger(tmp_path / "ledger")
    call_id = _one_call(ledger, rollout_id, "q", model_call_id="ca/ll ü")
    receipt = CaptureLedger(tmp_path / "ledger").receipt(rollout_id)
    assert (receipt.rollout_id, receipt.terminal_model_call_id) == (rollout_id, call_id)
    assert receipt.manifest[0].staging_key == f"{rollout_id}/ca/ll ü"
    assert [path.parent for path in tmp_path.rglob("*.jsonl")] == [tmp_path / "ledger"]


def test_no_two_ids_share_a_file_even_where_case_does_not_count(tmp_path: Path) -> None:
    names = {CaptureLedger(tmp_path).path_of(rollout_id).name.lower() for rollout_id in IDS}
    assert len(names) == len(IDS)
    assert max(len(name.encode()) for name in names) < 255


@pytest.mark.parametrize("rollout_id", ["", "\ud800", None, 7])
def test_what_cannot_be_an_id_is_refused_before_anything_is_written(tmp_path: Path, rollout_id: Any) -> None:
    with pytest.raises(RequestError):
        CaptureLedger(tmp_path).admit(rollout_id, [user("q")])
    assert list(tmp_path.iterdir()) == []


def test_the_ledger_holds_no_token(world: World) -> None:
    a = world.call([user("q")], "a", carry=[123456], generated=[234567])
    world.call([*a.messages, user("t")], "b", carry=[345678], generated=[456789], prompt=[1, 2, 3])
    text = world.ledger.path_of("r").read_text()
    assert not any(token in text for token in ("123456", "234567", "345678", "456789"))


def test_every_row_is_on_disk_before_it_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = CaptureLedger(tmp_path)
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", fsync)
    admission = ledger.admit("r", [user("q")])
    assert synced == []  # nothing depends on it yet
    path, said = str(ledger.path_of("r")), {"response_id": "x", "output": assistant("a")}
    ledger.record(admission, _coords(admission), **said)
    assert synced == [path, str(tmp_path)]
    other = CaptureLedger(tmp_path)
    other.record(admission, _coords(admission), **said)  # the writer may have died before its disk had it
    assert synced == [path, str(tmp_path)] * 2
    ledger.fail("r", "boom")
    ledger.begin_attempt("r")
    assert synced == [*[path, str(tmp_path)] * 2, path, path]


def test_writers_of_one_rollout_wait_for_the_disk_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, calls, fsync = CaptureLedger(tmp_path), 32, os.fsync
    synced: list[int] = []
    admissions = [ledger.admit("r", [user(str(call))]) for call in range(calls)]
    first, gone_on = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        first.set()
        assert gone_on.wait(30)
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    with ThreadPoolExecutor(calls) as pool:
        recorded = [
            pool.submit(ledger.record, admission, _coords(admission), response_id="x", output=assistant("a"))
            for admission in admissions
        ]
        assert first.wait(30)
        while len(ledger.read("r").records) < calls:
            pass
        gone_on.set()
        assert all(row.result() is not None for row in recorded)
    whole = ledger.path_of("r").stat().st_size
    assert synced.count(whole) >= 1
    assert len(synced) <= 3  # the first writer's, with the folder's, and one for all who came meanwhile


def test_two_ledgers_of_one_directory_see_each_others_calls(tmp_path: Path) -> None:
    here, there = CaptureLedger(tmp_path), CaptureLedger(tmp_path)
    call_id = _one_call(here, "r", "q")
    child = there.admit("r", [user("q"), assistant("re: q"), user("t")])
    assert child.parent_call_id == call_id
    assert here.read("r").pending == (child.model_call_id,)


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path)
    _one_call(ledger, "r", "q")
    ledger.path_of("r").unlink()
    assert ledger.read("r").records == ()
    call_id = _one_call(ledger, "r", "q again")
    assert [record.model_call_id for record in ledger.read("r").records] == [call_id]


def test_rollouts_beyond_those_kept_open_are_read_again(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path, max_open_rollouts=2)
    ids = {f"r{n}": _one_call(ledger, f"r{n}", "q") for n in range(5)}
    assert {name: ledger.receipt(name).terminal_model_call_id for name in ids} == ids


def test_threads_write_one_rollout_at_once(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda n: _one_call(ledger, "r", str(n)), range(64)))
    view = ledger.read("r")
    assert sorted(record.model_call_id for record in view.records) == sorted(written)
    assert (view.pending, view.failures, view.torn) == ((), (), ())


def test_processes_write_one_rollout_at_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write_calls, args=(str(tmp_path), "r/ü", n, 20)) for n in range(3)]
    for writer in writers:
        writer.start()
    with ThreadPoolExecutor(4) as pool:
        ledger = CaptureLedger(tmp_path)
        list(pool.map(lambda n: _one_call(ledger, "r/ü", f"here.{n}"), range(20)))
    for writer in writers:
        writer.join(timeout=60)
        assert writer.exitcode == 0
    view = ledger.read("r/ü")
    assert len({record.model_call_id for record in view.records}) == len(view.records) == 80
    assert (view.pending, view.failures, view.torn) == ((), (), ())
    times = [row["admitted_at"] for row in _rows(ledger.path_of("r/ü")) if row["kind"] == "admitted"]
    assert times == sorted(set(times))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def _eager_thread_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_eager_thread_switches")
def test_threads_that_read_a_rollout_for_the_first_time_read_each_row_once(tmp_path: Path) -> None:
    writer = CaptureLedger(tmp_path)
    for n in range(30):
        writer.fail("r", str(n))
    for _ in range(10):
        reader, start = CaptureLedger(tmp_path), threading.Barrier(8)

        def read(_: int, reader: CaptureLedger = reader, start: threading.Barrier = start) -> int:
            start.wait()
            return len(reader.read("r").failures)

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(read, range(8))) == {30}


def test_admission_times_of_a_rollout_rise_although_the_clock_stands_still(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path, clock=lambda: 100.0)
    times = [ledger.admit("r", [user("q")]).admitted_at or 0.0 for _ in range(3)]
    assert times == sorted(set(times))
    assert times[0] == 100.0


def test_racing_admissions_of_one_id_admit_it_once(tmp_path: Path) -> None:
    ledgers = [CaptureLedger(tmp_path) for _ in range(8)]
    start = threading.Barrier(8)

    def admit(ledger: CaptureLedger) -> bool:
        start.wait()
        try:
            ledger.admit("r", [user("q")], model_call_id="c")
        except LedgerConflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(admit, ledgers)) == 1


def test_a_torn_last_line_is_ignored_and_reported(tmp_path: Path) -> None:
    first = CaptureLedger(tmp_path)
    call_id = _one_call(first, "r", "q")
    path = first.path_of("r")
    size = path.stat().st_size
    _tear(path)
    for ledger in (first, CaptureLedger(tmp_path)):
        view = ledger.read("r")
        assert view.torn == (size,)
        assert [record.model_call_id for record in view.records] == [call_id]
        assert not ledger.receipt("r").capture_poisoned


def test_the_next_append_does_not_glue_onto_a_torn_line(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path)
    first = _one_call(ledger, "r", "q")
    path = ledger.path_of("r")
    torn_at = path.stat().st_size
    _tear(path)
    second = _one_call(ledger, "r", "q2")
    for reader in (ledger, CaptureLedger(tmp_path)):
        view = reader.read("r")
        assert [record.model_call_id for record in view.records] == [first, second]
        assert view.torn == (torn_at,)


def test_a_whole_line_that_only_lacks_its_end_is_a_row(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path)
    _one_call(ledger, "r", "q")
    path = ledger.path_of("r")
    _tear(path, b'{"kind":"failed","reason":"seen"}')
    assert [failure.reason for failure in ledger.read("r").failures] == ["seen"]
    ledger.fail("r", "behind it")
    for reader in (ledger, CaptureLedger(tmp_path)):
        assert [failure.reason for failure in reader.read("r").failures] == ["seen", "behind it"]


def test_a_full_disk_raises_and_the_next_append_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = CaptureLedger(tmp_path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
    with pytest.raises(OSError, match="wrote 20 of"):
        ledger.admit("r", [user("q")], model_call_id="c")
    monkeypatch.undo()
    assert ledger.admit("r", [user("q")], model_call_id="c").resolution == "root"
    assert ledger.read("r").torn == (0,)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 5_000), more=st.integers(0, 2))
def test_a_file_cut_anywhere_keeps_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int, more: int
) -> None:
    directory = tmp_path_factory.mktemp("ledger")
    ledger = CaptureLedger(directory)
    for n in range(3):
        _one_call(ledger, "r", str(n), model_call_id=str(n))
    path = ledger.path_of("r")
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    whole = [json.loads(line) for line in data.splitlines() if line.endswith(b"}") and _is_json(line)]
    for n in range(more):
        _one_call(CaptureLedger(directory), "r", f"more {n}")
    view = CaptureLedger(directory).read("r")
    assert len(view.records) == sum(row["kind"] == "recorded" for row in whole) + more
    assert len(view.torn) <= 1


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_recording_twice_changes_nothing_and_recording_otherwise_is_a_conflict(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path)
    admission = ledger.admit("r", [user("q")])
    said = {"response_id": "x", "output": assistant("a")}
    first = ledger.record(admission, _coords(admission), **said)
    size = ledger.path_of("r").stat().st_size
    assert ledger.record(admission, _coords(admission).model_dump(mode="json"), **said) == first
    assert ledger.path_of("r").stat().st_size == size
    with pytest.raises(LedgerConflict, match="other contents"):
        ledger.record(admission, _coords(admission, token=4), **said)


def test_a_call_that_failed_is_told_once(strict: World) -> None:
    world = strict
    a = world.call([user("q")], "a", logprobs=[])
    unresolved = world.call([user("q"), assistant("edited"), user("t")], "b")
    for exchange in (a, unresolved):
        world.ledger.record(exchange.admission, exchange.coords, response_id="x", output=assistant("again"))
    assert [failure.model_call_id for failure in world.ledger.read("r").failures] == [a.id, unresolved.id]


def test_a_call_that_was_never_admitted_here_is_a_conflict(tmp_path: Path) -> None:
    stranger = CaptureAdmission(rollout_id="r", model_call_id="c", resolution="root")
    with pytest.raises(LedgerConflict, match="not admitted"):
        CaptureLedger(tmp_path).record(stranger, None, response_id="x", output=assistant("a"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "worker_response_missing_commit_coordinates"),
        ({"rollout_id": "other", "staging_key": "other/c"}, "invalid_worker_commit_coordinates: rollout_id"),
        ({"model_call_id": "d", "staging_key": "r/d"}, "invalid_worker_commit_coordinates: model_call_id"),
        ({"prev_len": 1, "cum_len": 4, "parent_call_id": "p"}, "invalid_worker_commit_coordinates: parent_call_id"),
        ({"staging_key": "other/c"}, "invalid_worker_commit_coordinates"),
        ({"digest": None}, "invalid_worker_commit_coordinates"),
        ({"digest": "short"}, "invalid_worker_commit_coordinates"),
        ({"cum_len": 99}, "invalid_worker_commit_coordinates"),
        ({"surprise": 1}, "invalid_worker_commit_coordinates"),
    ],
    ids=[
        "missing",
        "other rollout",
        "other call",
        "other parent",
        "foreign key",
        "no digest",
        "bad",
        "sums",
        "unknown",
    ],
)
def test_what_a_worker_says_wrongly_poisons_and_raises_nothing(
    tmp_path: Path, change: dict[str, Any] | None, reason: str
) -> None:
    ledger = CaptureLedger(tmp_path)
    admission = ledger.admit("r", [user("q")], model_call_id="c")
    coords = None if change is None else {**_coords(admission).model_dump(mode="json"), **change}
    assert ledger.record(admission, coords, response_id="x", output=assistant("a")) is None
    receipt = ledger.receipt("r")
    assert receipt.capture_poisoned
    assert f"call c: {reason}" in (receipt.failure_reason or "")


def test_coordinates_of_the_reference_worker_are_understood(tmp_path: Path) -> None:
    from nemo_gym.token_id_capture.staging.records import CommitCoords as ReferenceCoords

    ledger = CaptureLedger(tmp_path)
    admission = ledger.admit("r", [user("q")])
    ours = _coords(admission).model_dump(exclude={"generation_len", "failure_reason"})
    theirs = ReferenceCoords.model_validate(ours).model_dump(mode="json")
    record = ledger.record(admission, theirs, response_id="x", output=assistant("a"))
    assert record is not None
    assert record.extras_digest == EMPTY_EXTRAS_DIGEST
    assert ledger.admit("r", [user("q"), assistant("a"), user("t")]).parent_call_id == admission.model_call_id


def test_an_answer_without_a_response_id_poisons(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path)
    admission = ledger.admit("r", [user("q")])
    assert ledger.record(admission, _coords(admission), response_id="", output=assistant("a")) is None
    assert "ledger_row_missing_response_id" in (ledger.receipt("r").failure_reason or "")


def test_an_answer_that_cannot_be_read_is_recorded_and_continued_by_nobody(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path)
    admission = ledger.admit("r", [user("q")])
    record = ledger.record(admission, _coords(admission), response_id="x", output={"content": b"?"})
    assert record is not None
    assert (record.output_fingerprint, record.fingerprint_version) == (None, 0)
    assert ledger.receipt("r", response_id="x").terminal_selection == "response_id"
    behind = ledger.admit("r", [user("q"), assistant("?"), user("t")])
    assert (behind.resolution, (behind.new_root_reason or "").partition(":")[0]) == ("root", "foreign_turn")


def test_a_failure_is_kept_as_one_line_of_bounded_length(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path)
    ledger.fail("r", "boom\n" + "x" * 100_000 + "\ud800", model_call_id="c")
    (failure,) = ledger.read("r").failures
    assert failure.reason.startswith("boom x")
    assert len(failure.reason) == 500
