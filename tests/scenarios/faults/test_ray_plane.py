"""SIGKILL on Ray and TransferQueue: to reassembler actors at each step, to a storage unit, to the controller."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NOTICED_S = 4.0
"""A process that is dead refuses connections, which is noticed long before the deadlines of the scenario (5 s)."""

COUNTS = ("kills", "groups", "rows")
FAULTS = ("rows_lost", "rows_doubled", "rows_wrong", "answers_wrong", "records_wrong", "staging_left")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenario saw; one cluster for all tests of this module."""
    directory = tmp_path_factory.mktemp("ray-plane")
    command = [sys.executable, "-m", "tests.scenarios.faults.programs.ray_plane", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    ended_at = time.time()
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**report, "seconds to exit": ended_at - report["ended_at"]}


def assert_nothing_lost(part: dict[str, Any], *, kills: int) -> None:
    print(f"\n{ {name: part[name] for name in (*COUNTS, *FAULTS)} }")
    assert part["kills"] == kills
    assert part["rows"] == part["sample_ids"]
    assert {name: part[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)


def assert_noticed(calls: dict[str, dict[str, Any]], what: str) -> None:
    for name, outcome in calls.items():
        assert (outcome["error"], outcome["call"]) == ("DataPlaneUnavailable", name)
        assert what in outcome["text"]
        assert outcome["seconds"] < NOTICED_S
    for name in ("put_samples", "get_samples", "clear_samples"):
        assert f"{name}('p')" in calls[name]["text"]
        assert "keys 'k0', 'k1', 'k2', … 6 in all; after" in calls[name]["text"]


def test_actors_killed_at_each_step_of_a_finalize(report: dict[str, Any]) -> None:
    assert_nothing_lost(report["actors"], kills=6)


def test_a_killed_storage_unit(report: dict[str, Any]) -> None:
    """An error in time for every call, no placeholder, nothing cleared; all is there again from the checkpoint."""
    unit = report["unit"]
    assert_noticed(unit["calls"], "a storage unit at")
    assert unit["finalize"]["errors"] == ["DataPlaneUnavailable"]
    assert unit["finalize"]["named"]
    assert unit["finalize"]["seconds"] < 2 * NOTICED_S
    assert unit["known answer"], "a group on record is answered without its rows"
    assert (unit["placeholders"], unit["cleared"]) == (0, 0)
    assert_nothing_lost(unit, kills=7)


def test_a_killed_controller(report: dict[str, Any]) -> None:
    """No call hangs, nor does connecting or closing; the same actors go on with the plane that comes back."""
    controller = report["controller"]
    assert_noticed(controller["calls"], "the queue's controller at")
    assert controller["connect"]["error"] == "DataPlaneUnavailable"
    assert controller["connect"]["seconds"] < NOTICED_S
    assert controller["finalize"]["errors"] == ["DataPlaneUnavailable"]
    assert controller["finalize"]["named"]
    assert controller["restart"]["close"] < 25
    assert (controller["empty"]["errors"], controller["empty"]["named"]) == (["PlaneLost"], True)
    assert controller["published on an empty plane"] == 0
    assert_nothing_lost(controller, kills=8)


def test_a_process_can_end_without_its_plane(report: dict[str, Any]) -> None:
    assert report["last call"]["error"] == "DataPlaneUnavailable"
    assert report["seconds to exit"] < 20


def test_a_start_that_takes_too_long_is_given_up_and_not_in_the_way_of_the_next(report: dict[str, Any]) -> None:
    bootstrap = report["bootstrap"]
    assert (bootstrap["error"], bootstrap["call"]) == ("DataPlaneTimeout", "bootstrap")
    assert "after 0.5 s" in bootstrap["text"]
