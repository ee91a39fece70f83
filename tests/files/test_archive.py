"""An archive is read whole or refused, and what is written from it appears whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_reassembler import BadArchive
from rollout_reassembler.cli.run import run_archive
from rollout_reassembler.data_plane import durable
from rollout_reassembler.data_plane.durable import replacing_file, replacing_folder
from rollout_reassembler.files.archive import RECEIPTS_FILE, STAGED_FILE, read_archive, write_archive
from tests.captures import MadeRollout, chain
from tests.conftest import Run
from tests.hostile_receipts import HOSTILE, is_json

OUTPUTS = {"rows.parquet", "groups.jsonl", "summary.json"}


def run(archive: Path, out: Path, **options: Any) -> list[Any]:
    from rich.console import Console

    settings: dict[str, Any] = {
        "plane": "memory",
        "workers": 1,
        "pad_token_id": None,
        "max_seq_len": None,
        "branches": None,
    }
    return run_archive(archive, out, console=Console(quiet=True), uncounted=False, **{**settings, **options})


def rejections(out: Path) -> dict[str, str]:
    answers = [json.loads(line) for line in (out / "groups.jsonl").read_text().splitlines()]
    return {rollout: reason for answer in answers for rollout, reason in answer["rejections"].items()}


def edit_staged(archive: Path, edit: Any) -> None:
    """Replace the staged rows by what `edit` makes of them."""
    table = pq.read_table(archive / STAGED_FILE)
    rows = edit(table.to_pylist())
    pq.write_table(pa.Table.from_pylist(rows, table.schema), archive / STAGED_FILE)


class TestCuts:
    def test_a_file_cut_at_any_line_is_refused(self, archive: Path, tmp_path: Path) -> None:
        lines = (archive / RECEIPTS_FILE).read_bytes().splitlines(keepends=True)
        for kept in range(len(lines)):
            (archive / RECEIPTS_FILE).write_bytes(b"".join(lines[:kept]))
            with pytest.raises(BadArchive):
                run(archive, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["archive"]

    def test_a_file_without_any_one_of_its_lines_is_refused(self, archive: Path) -> None:
        lines = (archive / RECEIPTS_FILE).read_bytes().splitlines(keepends=True)
        for gone in range(len(lines)):
            (archive / RECEIPTS_FILE).write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
            with pytest.raises(BadArchive):
                read_archive(archive)

    def test_files_cut_at_random_bytes_are_refused_and_leave_nothing(self, archive: Path, tmp_path: Path) -> None:
        dice = random.Random(20)
        for name in (RECEIPTS_FILE, STAGED_FILE):
            whole = (archive / name).read_bytes()
            for _ in range(100):
                # Without its last newline a file of lines is still whole.
                (archive / name).write_bytes(whole[: dice.randrange(len(whole) - 1)])
                with pytest.raises(BadArchive):
                    run(archive, tmp_path / "out")
            (archive / name).write_bytes(whole)
        assert [path.name for path in tmp_path.iterdir()] == ["archive"]
        assert len(run(archive, tmp_path / "out")) == 2

    def test_damaged_pages_never_lose_a_row_silently(self, archive: Path, tmp_path: Path) -> None:
        dice = random.Random(21)
        whole = (archive / STAGED_FILE).read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            at = dice.randrange(len(whole))
            damaged[at : at + 8] = dice.randbytes(len(damaged[at : at + 8]))
            (archive / STAGED_FILE).write_bytes(damaged)
            try:
                groups = run(archive, tmp_path / "out")
            except BadArchive:
                continue
            assert [group.total_row_count for group in groups] == [3, 3]
            assert all(group.valid_row_count + len(group.rejections) == 3 for group in groups)

    def test_a_staged_file_of_another_archive_with_fewer_rows_is_refused(self, archive: Path) -> None:
        edit_staged(archive, lambda rows: rows[:-1])
        with pytest.raises(BadArchive, match=r"holds 17 rows, receipts.jsonl says 18"):
            read_archive(archive)

    def test_without_counts_it_is_read_only_if_that_is_said(self, archive: Path) -> None:
        lines = (archive / RECEIPTS_FILE).read_text().splitlines(keepends=True)
        (archive / RECEIPTS_FILE).write_text("".join(lines[1:]))
        with pytest.raises(BadArchive, match="6 rollouts in 2 groups is all, say so with --uncounted") as refusal:
            read_archive(archive)
        taken = read_archive(archive, uncounted=True)
        assert (taken.rollouts, taken.counted) == (6, False)
        # The line that the message offers makes it a counted one.
        (archive / RECEIPTS_FILE).write_text(
            str(refusal.value).rpartition("begin it with ")[2] + "\n" + "".join(lines[1:])
        )
        assert read_archive(archive).counted

    def test_a_newer_format_is_refused(self, archive: Path) -> None:
        text = (archive / RECEIPTS_FILE).read_text()
        (archive / RECEIPTS_FILE).write_text(text.replace('"archive": 1', '"archive": 2', 1))
        with pytest.raises(BadArchive, match="is of format 2, this version reads 1"):
            read_archive(archive)


class TestLines:
    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"rollout_id": "g0/r0"}, "rollout 'g0/r0' is in line 2 already"),
            ({"mask_sample": "False"}, "'mask_sample': Input should be a valid boolean, got 'False'"),
            ({"truncated": "no"}, "'truncated': Input should be a valid boolean, got 'no'"),
            ({"reward": "1.0"}, "'reward'"),
            ({"prompt_idx": 2**63}, "'prompt_idx': Input should be less than 9223372036854775808"),
            ({"fallback_weight_version": 2**63}, "'fallback_weight_version': Input should be less than"),
            ({"prompt_idx": 7}, "group 'g1': lines differ in prompt_idx: [1, 7]"),
            ({"sample_id": "mine"}, "group 'g1': 1 of 3 lines have a sample_id"),
            ({"mask_samples": True}, "'mask_samples': Extra inputs are not permitted"),
        ],
    )
    def test_a_line_that_says_something_odd_is_refused_by_number_and_name(
        self, archive: Path, change: dict[str, Any], complaint: str
    ) -> None:
        lines = (archive / RECEIPTS_FILE).read_text().splitlines()
        lines[-1] = json.dumps({**json.loads(lines[-1]), **change})
        (archive / RECEIPTS_FILE).write_text("\n".join(lines))
        with pytest.raises(BadArchive) as refusal:
            read_archive(archive)
        assert complaint in str(refusal.value)
        assert f"{RECEIPTS_FILE}:" in str(refusal.value)

    def test_one_sample_id_in_two_groups_is_refused(self, archive: Path) -> None:
        lines = [json.loads(line) for line in (archive / RECEIPTS_FILE).read_text().splitlines()]
        for index, line in enumerate(lines[4:]):
            line["sample_id"] = f"g0_g{index}"
        (archive / RECEIPTS_FILE).write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(BadArchive, match="sample id 'g0_g0' is in groups 'g0' and 'g1'"):
            read_archive(archive)


class TestBadRows:
    """What is wrong with one rollout costs that rollout."""

    @pytest.mark.parametrize("column", ["key", "rollout_id", "call", "extras"])
    def test_a_null_in_a_staged_row(self, archive: Path, tmp_path: Path, column: str) -> None:
        edit_staged(archive, lambda rows: [{**rows[0], column: None}, *rows[1:]])
        run(archive, tmp_path / "out")
        assert rejections(tmp_path / "out") == {
            "g0/r0": "missing_staging_row",
            "g0/r1": "missing_receipt",
            "g1/r1": "missing_receipt",
        }

    def test_a_staged_row_twice_is_staged_once(self, archive: Path, tmp_path: Path) -> None:
        edit_staged(archive, lambda rows: [*rows, rows[0]])
        run(archive, tmp_path / "out")
        assert set(rejections(tmp_path / "out")) == {"g0/r1", "g1/r1"}

    @pytest.mark.parametrize("first", [False, True])
    def test_of_two_calls_under_one_staging_key_the_recorded_one_is_found(
        self, archive: Path, tmp_path: Path, first: bool
    ) -> None:
        def double(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            other = {**rows[0], "call": rows[3]["call"]}
            return [other, *rows] if first else [*rows, other]

        edit_staged(archive, double)
        run(archive, tmp_path / "out")
        assert set(rejections(tmp_path / "out")) == {"g0/r1", "g1/r1"}

    @pytest.mark.parametrize("call", [b"", b"\x00", b"garbled" * 40])
    def test_a_garbled_call(self, archive: Path, tmp_path: Path, call: bytes) -> None:
        edit_staged(archive, lambda rows: [{**rows[0], "call": call}, *rows[1:]])
        run(archive, tmp_path / "out")
        assert set(rejections(tmp_path / "out")) == {"g0/r0", "g0/r1", "g1/r1"}

    @pytest.mark.parametrize("name", [name for name in HOSTILE if is_json(HOSTILE[name](chain("r").receipt()))])
    def test_a_hostile_receipt(self, archive: Path, tmp_path: Path, name: str) -> None:
        lines = (archive / RECEIPTS_FILE).read_text().splitlines()
        line = json.loads(lines[1])
        lines[1] = json.dumps({**line, "receipt": HOSTILE[name](line["receipt"])})
        (archive / RECEIPTS_FILE).write_text("\n".join(lines))
        run(archive, tmp_path / "out")
        assert rejections(tmp_path / "out")["g0/r0"] == "invalid_receipt"
        assert set(rejections(tmp_path / "out")) == {"g0/r0", "g0/r1", "g1/r1"}

    @pytest.mark.parametrize("version", [2**63, 2**64 - 1, 10**400])
    def test_a_weight_version_beyond_int64(self, tmp_path: Path, version: int) -> None:
        from rollout_reassembler import ReassemblyRequest
        from rollout_reassembler.staging.codec import pack_call

        good = chain("g/r0")
        # What a call can hold at most is 64 bits without a sign; a receipt is text.
        bad = chain("g/r1", weight_version=min(version, 2**64 - 1))
        receipt = bad.receipt()
        for record in receipt["manifest"]:
            record["weight_version"] = version
        request = ReassemblyRequest("g", ("g/r0", "g/r1"), None, (good.receipt(), receipt), (1.0, 0.0), 0, 0)
        staged = {c.staging_key: (c.rollout_id, pack_call(c), b"") for made in (good, bad) for c in made.calls}
        write_archive(tmp_path / "archive", [request], staged, pad_token_id=0)
        (group,) = run(tmp_path / "archive", tmp_path / "out")
        assert group.rejections == {"g/r1": "invalid_receipt"}
        assert pq.read_table(tmp_path / "out" / "rows.parquet").to_pydict()["weight_version"] == [1, 1]


class TestOutputs:
    def test_the_three_files_and_nothing_else(self, archive: Path, tmp_path: Path) -> None:
        run(archive, tmp_path / "out")
        assert {path.name for path in (tmp_path / "out").iterdir()} == OUTPUTS
        assert {path.name for path in tmp_path.iterdir()} == {"archive", "out"}
        assert json.loads((tmp_path / "out" / "summary.json").read_text()) == {
            "groups": 2,
            "rows": 6,
            "valid_rows": 4,
            "rejections": {"missing_receipt": 2},
            "archive_was_counted": True,
        }

    def test_an_output_that_was_there_is_replaced_whole(self, archive: Path, tmp_path: Path) -> None:
        run(archive, tmp_path / "out")
        (tmp_path / "out" / "rows.parquet").write_text("old")
        run(archive, tmp_path / "out")
        assert pq.read_table(tmp_path / "out" / "rows.parquet").num_rows == 6
        assert {path.name for path in tmp_path.iterdir()} == {"archive", "out"}

    def test_a_folder_that_holds_other_files_is_refused_before_any_work(self, archive: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("mine")
        with pytest.raises(FileExistsError, match=r"holds 'thesis.tex', which would be lost"):
            run(archive, tmp_path / "out")
        assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"

    def test_a_link_is_not_followed(self, archive: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(NotADirectoryError, match="is a symbolic link"):
            run(archive, tmp_path / "out")
        assert not list((tmp_path / "elsewhere").iterdir())

    @pytest.mark.parametrize("step", ["export_rows", "write_answers", "write_summary"])
    def test_a_failure_at_any_step_leaves_what_was_there(
        self, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        from rollout_reassembler.cli import run as run_module

        run(archive, tmp_path / "out")
        before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        done = getattr(run_module, step)

        def fail_behind(*arguments: Any) -> None:
            done(*arguments)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(run_module, step, fail_behind)
        for out in (tmp_path / "out", tmp_path / "new"):
            with pytest.raises(OSError, match="No space"):
                run(archive, out)
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
        assert {path.name for path in tmp_path.iterdir()} == {"archive", "out"}

    def test_an_archive_is_written_whole_or_not_at_all(self, archive: Path) -> None:
        before = {path.name: path.read_bytes() for path in archive.iterdir()}
        read = read_archive(archive)
        bad = dataclasses.replace(read.requests[1], receipts=(None, {"no JSON": object()}, None))
        with pytest.raises(TypeError):
            write_archive(archive, [read.requests[0], bad], {}, pad_token_id=0)
        assert {path.name: path.read_bytes() for path in archive.iterdir()} == before
        assert {path.name for path in archive.parent.iterdir()} == {"archive"}


def test_all_branches_of_an_archive_become_rows(tmp_path: Path) -> None:
    from rollout_reassembler import ReassemblyRequest
    from rollout_reassembler.staging.codec import pack_call

    made = MadeRollout("r")
    first = made.call([1], [2])
    made.call([3], [4], parent=first)
    made.call([1, 9], [5])
    request = ReassemblyRequest("g", ("r",), None, (made.receipt(),), (1.0,), 0, 0)
    staged = {call.staging_key: ("r", pack_call(call), b"") for call in made.calls}
    for said, asked, rows_of in (("all", None, 2), (None, "all", 2), (None, None, 1), ("all", "terminal", 1)):
        write_archive(tmp_path / "archive", [dataclasses.replace(request, branches=said)], staged, pad_token_id=0)
        (group,) = run(tmp_path / "archive", tmp_path / "out", branches=asked)
        assert group.rows_by_rollout == (rows_of,)
        rows = pq.read_table(tmp_path / "out" / "rows.parquet").to_pydict()
        assert rows["input_ids"] == [[1, 2, 3, 4], [1, 9, 5]][-rows_of:]


class TestReplacing:
    def test_what_is_being_written_lies_where_nobody_else_looks(self, tmp_path: Path) -> None:
        names = set()
        for _ in range(2):
            with replacing_folder(tmp_path / "out", only=()) as fresh:
                private = fresh.parent
                assert private.parent == tmp_path
                assert stat.S_IMODE(private.stat().st_mode) == 0o700
                names.add(private.name)
        assert len(names) == 2
        assert {path.name for path in tmp_path.iterdir()} == {"out"}

    def test_the_finished_folder_has_the_mode_of_any_other(self, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        with replacing_folder(tmp_path / "out", only=()):
            pass
        assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode

    @pytest.mark.parametrize("number", [None, *durable._NO_EXCHANGE])
    def test_where_folders_cannot_be_swapped_in_one_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
    ) -> None:
        class Library:
            def __init__(self, *_: Any, **__: Any) -> None:
                if number is not None:
                    self.renameat2 = lambda *_: -1

        monkeypatch.setattr(durable.ctypes, "CDLL", Library)
        monkeypatch.setattr(durable.ctypes, "get_errno", lambda: number)
        for text in ("old", "new"):
            with replacing_folder(tmp_path / "out", only=["file"]) as fresh:
                (fresh / "file").write_text(text)
        assert (tmp_path / "out" / "file").read_text() == "new"
        assert {path.name for path in tmp_path.iterdir()} == {"out"}

    def test_a_file_takes_the_place_of_a_link_and_leaves_its_target(self, tmp_path: Path) -> None:
        (tmp_path / "target").write_text("mine")
        (tmp_path / "file").symlink_to("target")
        with replacing_file(tmp_path / "file") as fresh:
            fresh.write_text("new")
        assert (tmp_path / "target").read_text() == "mine"
        assert (tmp_path / "file").read_text() == "new"
        assert not (tmp_path / "file").is_symlink()

    def test_a_file_that_fails_leaves_the_old_one(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("old")
        with suppress(InterruptedError), replacing_file(tmp_path / "file") as fresh:
            fresh.write_text("half")
            raise InterruptedError
        assert (tmp_path / "file").read_text() == "old"
        assert {path.name for path in tmp_path.iterdir()} == {"file"}

    @pytest.mark.parametrize("parent", ["file", "file/deeper"])
    def test_where_nothing_can_be_made_it_names_what_was_asked_for(self, tmp_path: Path, parent: str) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file") as refusal, replacing_file(tmp_path / parent / "rows"):
            pass
        assert str(refusal.value) == f"{tmp_path / 'file'}: is a file, not a folder"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield path
    subprocess.run(["umount", path], check=True)


class TestFullDisk:
    @pytest.mark.parametrize("left", [0, 12 << 10])
    def test_a_run_on_a_full_disk_leaves_what_was_there(
        self, archive: Path, small_disk: Path, reassemble: Run, left: int
    ) -> None:
        run(archive, small_disk / "out")
        before = {path.name: path.read_bytes() for path in (small_disk / "out").iterdir()}
        disk = os.statvfs(small_disk)
        (small_disk / "ballast").write_bytes(bytes(disk.f_bavail * disk.f_bsize - left))
        for out in ("out", "new"):
            done = reassemble("run", archive, "--out", small_disk / out)
            if done.returncode == 0:
                assert {path.name for path in (small_disk / out).iterdir()} == OUTPUTS
                shutil.rmtree(small_disk / "new", ignore_errors=True)
                continue
            assert done.returncode == 1
            assert done.stderr.splitlines()[-1] == f"reassemble: {small_disk / out}: No space left on device"
            assert "Traceback" not in done.stderr
        assert {path.name: path.read_bytes() for path in (small_disk / "out").iterdir()} == before
        assert {path.name for path in small_disk.iterdir()} == {"out", "ballast"}
