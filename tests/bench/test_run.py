"""The bench end to end on groups of a few tokens: what it measures is what it says it measures."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rollout_reassembler.bench import run as bench_run
from rollout_reassembler.bench import staging
from rollout_reassembler.bench.arm import CANONICAL, STAGING
from rollout_reassembler.bench.counting import BASE_READ, CLEAR, PUBLISH, RECORD, ROUTE_READ, counted
from rollout_reassembler.bench.machine import measure_hash_limit, peak_growth_bytes
from rollout_reassembler.bench.ours import OursArm
from rollout_reassembler.bench.run import BenchSettings, CannotMeasure, first_difference, run_bench
from rollout_reassembler.bench.shapes import SHAPES, Shape, make_group
from rollout_reassembler.cli.app import app
from rollout_reassembler.contract.errors import DataPlaneUnavailable
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.staging.places import place_of
from tests.captures import chain, memory_plane, registered, stage

TINY = Shape("small", rollouts=3, calls=2, prompt=5, tool=3, generated=4)


@pytest.fixture(scope="module", autouse=True)
def one_short_round_of_staging():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_ROUNDS", 1)
        patch.setattr(staging, "_ROWS_A_CALLER", 1)
        yield


@pytest.fixture(scope="module")
def report(one_short_round_of_staging) -> bench_run.BenchReport:
    importlib.import_module("nemo_gym.token_id_capture.staging")
    return run_bench(BenchSettings(TINY, "memory", repeat=2))


def test_shapes_have_the_sizes_that_they_are_known_by():
    assert {name: shape.tokens for name, shape in SHAPES.items()} == {
        "small": 12_000,
        "agentic": 180_800,
        "long": 1_312_000,
    }


def test_a_made_group_is_as_large_as_its_shape_says_and_the_same_for_the_same_seed():
    group = make_group(TINY)
    assert sum(len(call.token_ids_delta) for call in group.all_calls) == TINY.tokens
    assert [len(calls) for calls in group.calls] == [TINY.calls] * TINY.rollouts
    again, other = make_group(TINY), make_group(TINY, seed=1)
    assert [call.digest for call in group.all_calls] == [call.digest for call in again.all_calls]
    assert group.all_calls[0].digest != other.all_calls[0].digest


def test_a_healthy_group_makes_one_read_one_publication_in_two_calls_one_clear_and_two_record_calls():
    arm, group = OursArm(MemoryDataPlane()), make_group(TINY)
    arm.stage(group)
    arm.finalize(group, "g")
    traffic = arm.traffic()
    assert traffic.calls == {BASE_READ: 1, PUBLISH: 2, CLEAR: 1, RECORD: 2}
    assert traffic.bytes_read >= 16 * TINY.tokens
    assert traffic.bytes_written >= 16 * TINY.tokens


def test_the_counter_tells_routes_from_tokens_and_names_what_it_does_not_expect():
    plane = memory_plane()
    made = chain("r")
    stage(plane, made)
    client, counter = counted(plane, staging_partition="staging", partition_id="canonical")
    keys = [place_of(call) for call in made.calls]
    client.get_samples(keys, "staging", ["extras"])
    client.get_samples(keys, "staging", ["call"])
    client.list_samples("staging")
    assert counter.traffic().calls == {ROUTE_READ: 1, BASE_READ: 1, "list_samples:staging": 1}
    counter.reset()
    assert counter.traffic().calls == {}
    assert client.is_registered("staging")


def test_both_arms_publish_the_same_rows():
    importlib.import_module("nemo_gym.token_id_capture.staging")
    from rollout_reassembler.bench.reference import ReferenceArm
    from rollout_reassembler.bench.reference_rows import HeldRows

    group = make_group(TINY)
    rows = []
    for arm in (OursArm(MemoryDataPlane()), ReferenceArm(HeldRows()), ReferenceArm(HeldRows(), tuned=True)):
        arm.stage(group)
        arm.finalize(group, "g")
        rows.append(arm.published(group, "g"))
        arm.forget(group, "g")
    assert len(rows[0]) == TINY.rollouts
    assert first_difference(rows[0], rows[1]) == first_difference(rows[0], rows[2]) == ""
    rows = rows[:2]
    rows[1][1]["token_mask"] = rows[1][1]["token_mask"] + 1
    assert first_difference(*rows) == "row 1 differs in token_mask"
    assert first_difference(rows[0], rows[1][:2]) == "2 rows, not 3"


def test_an_arm_that_publishes_other_rows_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    class WrongArm(OursArm):
        def published(self, group, group_id):
            return [{**row, "total_reward": 9.0} for row in super().published(group, group_id)]

    monkeypatch.setattr(bench_run, "_reference_arm", lambda plane, tuned: WrongArm(MemoryDataPlane()))
    with pytest.raises(CannotMeasure, match="reference arm published other rows than ours: row 0 differs in total_rew"):
        run_bench(BenchSettings(TINY, "memory", repeat=1))


def test_a_report_holds_every_figure_of_both_arms(report: bench_run.BenchReport):
    assert report.ratio == report.reference.ms.median / report.ours.ms.median
    assert report.ratio_tuned == report.reference_tuned.ms.median / report.ours.ms.median
    for arm in (report.ours, report.reference, report.reference_tuned):
        assert len(arm.runs_ms) == 2
        assert arm.ms.median <= arm.ms.p99
        assert arm.tokens_per_s == pytest.approx(TINY.tokens / arm.ms.median * 1e3)
        assert sum(spread.median for spread in arm.phases_ms.values()) == pytest.approx(arm.ms.median, rel=0.5)
        assert set(arm.staging_rows_per_s) == {"1", "64"}
        assert min(arm.staging_rows_per_s.values()) > 0
    assert set(report.ours.phases_ms) >= {
        *("guard", "admit", "fetch", "decode", "verify", "assemble", "record", "publish", "clear", "metrics"),
    }
    assert report.ours.calls == {BASE_READ: 1, PUBLISH: 2, CLEAR: 1, RECORD: 2}
    assert report.reference.calls == {BASE_READ: TINY.rollouts, PUBLISH: 1, CLEAR: 1}
    assert "no queue" in report.reference_note


def test_a_report_is_json_and_its_numbers_are_finite(report: bench_run.BenchReport):
    content = json.loads(json.dumps(dataclasses.asdict(report), allow_nan=False))
    assert {"shape", "plane", "ours", "reference", "ratio"} <= set(content)
    assert (content["shape"], content["plane"]) == ("small", "memory")
    assert content["workload"]["tokens"] == TINY.tokens
    assert content["machine"]["sha256_gb_s"] > 0
    assert len(content["machine"]["load_average"]) == 3


def test_the_hash_limit_counts_thirty_two_bytes_a_token():
    limit = measure_hash_limit(make_group(TINY))
    assert limit.sha256_tokens_per_s == pytest.approx(limit.sha256_gb_per_s * 1e9 / 32)
    assert 0 < limit.fraction < 1
    assert limit.fraction == pytest.approx(limit.tokens_per_s / limit.sha256_tokens_per_s, rel=0.5)


def test_the_peak_is_what_the_work_held_at_once():
    size = 64 << 20
    peak = peak_growth_bytes(lambda: np.ones(size // 8).sum())
    if peak is None:
        pytest.skip("this system does not tell its high-water mark")
    assert 0.9 * size < peak < 1.5 * size


def test_a_group_that_is_rejected_stops_the_bench():
    plane = registered(MemoryDataPlane())
    arm, group = OursArm(plane), make_group(TINY)
    arm.stage(group)
    plane.clear_samples([place_of(group.all_calls[0])], STAGING)
    with pytest.raises(RuntimeError, match="missing_staging_row"):
        arm.finalize(group, "g")


def test_forgetting_a_group_leaves_nothing_but_its_record():
    plane = MemoryDataPlane()
    arm, group = OursArm(plane), make_group(TINY)
    arm.stage(group)
    arm.finalize(group, "g")
    arm.forget(group, "g")
    assert not plane.list_samples(STAGING)
    assert not plane.list_samples(CANONICAL)


def test_the_command_prints_the_figures_and_writes_them(tmp_path, monkeypatch: pytest.MonkeyPatch):
    importlib.import_module("nemo_gym.token_id_capture.staging")
    monkeypatch.setitem(SHAPES, "small", TINY)
    file = tmp_path / "deep" / "bench.json"
    result = CliRunner().invoke(
        app, ["bench", "--shape", "small", "--plane", "memory", "--repeat", "1", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    assert "ratio" in result.output
    assert json.loads(file.read_text())["ratio"] > 0


def test_without_the_reference_there_is_no_ratio(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SHAPES, "small", TINY)
    monkeypatch.setattr(bench_run, "_require_reference", lambda: pytest.fail("not asked for"))
    file = tmp_path / "bench.json"
    command = ["bench", "--shape", "small", "--plane", "memory", "--repeat", "1", "--no-reference", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    assert content["reference"] is None
    assert content["ratio"] is None


def test_a_missing_reference_verifier_is_said_in_one_line_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(bench_run.importlib, "import_module", refuse)
    monkeypatch.setattr(bench_run, "open_client", lambda plane: pytest.fail("nothing must be started"))
    result = CliRunner().invoke(app, ["bench", "--shape", "small", "--plane", "memory"])
    assert result.exit_code == 2
    assert "--no-reference" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_plane_that_cannot_be_started_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_, **__):
        raise DataPlaneUnavailable("the queue needs 2 free CPUs in Ray, 1 are free", call="bootstrap")

    monkeypatch.setattr(bench_run, "build_data_plane_client", refuse)
    result = CliRunner().invoke(app, ["bench", "--shape", "small", "--plane", "simple", "--no-reference"])
    assert result.exit_code == 2
    assert "needs 2 free CPUs" in result.stderr


def test_a_file_that_cannot_be_written_is_said_in_one_line(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SHAPES, "small", TINY)
    command = ["bench", "--shape", "small", "--plane", "memory", "--repeat", "1", "--no-reference"]
    result = CliRunner().invoke(app, [*command, "--json", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr == f"reassemble: {tmp_path}: is a folder, not a file\n"


@pytest.mark.ray
@pytest.mark.slow
def test_on_a_real_queue_both_arms_share_it(tmp_path):
    importlib.import_module("nemo_gym.token_id_capture.staging")
    file = tmp_path / "bench.json"
    options = ["--shape", "small", "--plane", "simple", "--repeat", "1", "--json", str(file)]
    # In a process of its own, since it starts and ends a Ray of its own.
    subprocess.run([sys.executable, "-m", "rollout_reassembler", "bench", *options], check=True, timeout=240)
    content = json.loads(file.read_text())
    assert content["ours"]["calls"] == {BASE_READ: 1, PUBLISH: 2, CLEAR: 1, RECORD: 2}
    assert content["reference"]["calls"] == {BASE_READ: 8, PUBLISH: 1, CLEAR: 1}
    assert content["ratio"] > 1
    assert "on the queue that ours ran on" in content["reference_note"]


def test_the_growth_script_writes_a_plot_a_curve(tmp_path):
    importlib.import_module("matplotlib")
    script = Path(__file__).parents[2] / "benchmarks" / "growth.py"
    options = ["--plane", "memory", "--repeat", "1", "--most", "4", "--out", str(tmp_path)]
    subprocess.run([sys.executable, str(script), *options], check=True, timeout=120)
    content = json.loads((tmp_path / "growth.json").read_text())
    assert [curve["name"] for curve in content["curves"]] == ["calls", "tokens", "rollouts", "in_flight"]
    assert [point["x"] for point in content["curves"][0]["points"]] == [1, 4]
    assert {path.name for path in tmp_path.glob("*.png")} == {f"growth-{c['name']}.png" for c in content["curves"]}


def test_the_page_shows_the_figures_of_its_json_and_no_others(tmp_path):
    """Refreshing the tables from the JSON beside the page changes nothing: none of them was written by hand."""
    importlib.import_module("matplotlib")
    root = Path(__file__).parents[2]
    page = tmp_path / "performance.md"
    shutil.copy(root / "docs" / "performance.md", page)
    for file in (root / "docs" / "img").glob("*.json"):
        shutil.copy(file, tmp_path)
    script = root / "benchmarks" / "performance_doc.py"
    command = [sys.executable, str(script), "--tables-only", "--page", str(page), "--data", str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    assert page.read_text() == (root / "docs" / "performance.md").read_text()
    assert "<!-- begin ratios -->\n| shape |" in page.read_text()
