"""The command: what it prints, what it refuses in one line, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rollout_reassembler.cli.app import app
from rollout_reassembler.files.archive import RECEIPTS_FILE, STAGED_FILE, read_archive
from tests.captures import chain


def _invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_an_archive_becomes_rows(archive: Path, tmp_path: Path) -> None:
    code, out, _ = _invoke("run", archive, "--out", tmp_path / "out")
    assert code == 0
    assert "missing_receipt" in out
    rows = pq.read_table(tmp_path / "out" / "rows.parquet").to_pydict()
    assert rows["sample_id"] == [f"g{group}_g{index}" for group in range(2) for index in range(3)]
    assert rows["input_ids"][0] == chain("g0/r0").tokens()
    assert rows["input_ids"][1] == [9]
    assert rows["sample_mask"] == [1.0, 0.0, 1.0] * 2
    assert rows["mask_sample"] == [False, True, True] * 2
    assert rows["total_reward"] == [1.0, 0.5, 0.0] * 2
    assert rows["group_id"] == ["g0"] * 3 + ["g1"] * 3
    answers = [json.loads(line) for line in (tmp_path / "out" / "groups.jsonl").read_text().splitlines()]
    assert [answer["rejections"] for answer in answers] == [{f"g{group}/r1": "missing_receipt"} for group in range(2)]


def test_what_is_written_reads_back_the_same(archive: Path) -> None:
    again = read_archive(archive)
    assert [request.group_id for request in again.requests] == ["g0", "g1"]
    assert again.requests[0].mask_sample == (False, False, True)
    assert again.requests[0].receipts[1] is None
    assert again.pad_token_id == 9
    assert again.staged_rows == 18


def test_a_bare_receipt_is_a_group_of_its_own(archive: Path, tmp_path: Path) -> None:
    receipt = {**read_archive(archive).requests[0].receipts[0], "reward": 0.25}
    (archive / RECEIPTS_FILE).write_text(json.dumps(receipt) + "\n")
    assert _invoke("run", archive, "--out", tmp_path / "out", "--uncounted")[0] == 0
    rows = pq.read_table(tmp_path / "out" / "rows.parquet").to_pydict()
    assert rows["total_reward"] == [0.25]
    assert rows["group_id"] == ["g0/r0"]


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda folder: (folder / RECEIPTS_FILE).unlink(), f"has no {RECEIPTS_FILE}"),
        (lambda folder: (folder / STAGED_FILE).unlink(), f"has no {STAGED_FILE}"),
        (lambda folder: (folder / RECEIPTS_FILE).write_text(""), "is empty"),
        (lambda folder: (folder / RECEIPTS_FILE).write_text("\n \n"), "is empty"),
        (lambda folder: _append(folder, '{"group_id": "g9"'), ":8: is not JSON"),
        (lambda folder: _append(folder, "[1]"), ":8: expected a JSON object, got list"),
        (lambda folder: _append(folder, "[" * 100_000), ":8: is not JSON"),
        (
            lambda folder: _append(folder, '{"rollout_id": "r", "receipt": null}'),
            ":8: 'group_id' is missing",
        ),
        (lambda folder: _append(folder, '{"group_id": "g9", "rollout_id": "r"}'), ":8: expected a 'receipt'"),
        (lambda folder: _append(folder, '{"group_id": "g0", "rollout_id": "r", "receipt": null}'), "is in two pieces"),
        (
            lambda folder: _append(folder, '{"group_id": "g9", "rollout_id": "r", "receipt": null, "prompt_idx": "x"}'),
            ":8: 'prompt_idx': Input should be a valid integer, got 'x'",
        ),
        (lambda folder: (folder / RECEIPTS_FILE).write_bytes(b"\xff\xfe{}"), "is not UTF-8 text"),
        (lambda folder: (folder / STAGED_FILE).write_bytes(b"PAR1"), "is not a whole Parquet file"),
    ],
)
def test_a_broken_archive_is_one_line_and_exit_code_2(archive: Path, tmp_path: Path, break_it, complaint: str) -> None:
    break_it(archive)
    code, _, err = _invoke("run", archive, "--out", tmp_path / "out")
    assert code == 2
    assert complaint in err
    assert len(err.strip().splitlines()) == 1


def test_a_bad_path_is_one_line_and_exit_code_2(tmp_path: Path, archive: Path) -> None:
    code, _, err = _invoke("run", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "no such folder" in err
    (tmp_path / "file").write_text("")
    code, _, err = _invoke("run", archive, "--out", tmp_path / "file")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert "is a file, not a folder" in err


def test_doctor_finds_this_machine_fit() -> None:
    code, out, _ = _invoke("doctor")
    assert code == 0
    for name in ("Python", "CPUs", "torch", "Ray", "TransferQueue", "Mooncake"):
        assert name in out


def test_sweep_without_a_cluster_is_one_line_and_exit_code_2() -> None:
    code, _, err = _invoke("sweep", "--address", "127.0.0.1:1", "--older-than", 1)
    assert code == 2
    assert err.startswith("reassemble: no Ray cluster answers at 127.0.0.1:1")
    assert len(err.strip().splitlines()) == 1


@pytest.mark.ray
@pytest.mark.slow
def test_memory_and_actors_write_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    assert _invoke("run", archive, "--out", tmp_path / "memory")[0] == 0
    command = [sys.executable, "-m", "rollout_reassembler", "run", str(archive), "--out", str(tmp_path / "actors")]
    done = subprocess.run([*command, "--plane", "simple"], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("rows.parquet", "groups.jsonl"):
        assert (tmp_path / "memory" / name).read_bytes() == (tmp_path / "actors" / name).read_bytes()


def _append(folder: Path, line: str) -> None:
    with open(folder / RECEIPTS_FILE, "a", encoding="utf-8") as file:
        file.write(line + "\n")
