"""Actors in clusters of their own: several nodes, and a cluster without a data plane."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def _run(scenario: str, timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", f"tests.actors.scenarios.{scenario}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def test_actors_spread_over_two_nodes_and_come_back_when_one_is_gone() -> None:
    report = _run("two_nodes", 280)
    assert report == {"nodes_before": 2, "nodes_after": 1, "moved": 1, "valid_rows": 96, "staged_left": 0}


def test_a_cluster_without_a_controller_is_a_clear_error_in_seconds() -> None:
    report = _run("no_controller", 120)
    assert report["error"] == "DataPlaneUnavailable"
    assert "bootstrap" in report["text"]


def test_a_pool_whose_ray_was_shut_down_says_so_and_closes() -> None:
    """What an actor had in hand, what waited for it, what comes after, and what comes once Ray is there again."""
    report = _run("shut_down", 180)
    assert report["in_hand"].startswith(("PoolClosed: group 'in hand'", "RequestCrashedActor: group 'in hand'"))
    for outcome in (report[name] for name in ("waiting", "after", "anew")):
        assert outcome.startswith("PoolClosed: group '")
        assert "Ray was shut down since this pool was made" in outcome
