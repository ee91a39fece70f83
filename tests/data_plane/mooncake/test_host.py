"""A run on Ray and Mooncake that is killed at its checkpoint, and goes on in another cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.mooncake, pytest.mark.ray, pytest.mark.slow]


def _run_scenario(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.data_plane.scenarios.mooncake_cluster", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-4000:]
    return done.returncode, json.loads(lines[-1])


def test_a_run_killed_at_its_checkpoint_goes_on_in_another_cluster(tmp_path: Path) -> None:
    """Saved by two memory hosts and an actor that gives memory, after a stager was killed; brought back by one host."""
    code, saved = _run_scenario("save", str(tmp_path))
    assert code == -9
    assert saved == {
        "stager_died": True,
        "owners": 3,
        "actor_answers": ["endpoint", "segment", "session", "size"],
        "staged": 36,
    }
    code, restored = _run_scenario("restore", str(tmp_path))
    assert code == 0
    assert restored == {
        "metadata": {"step": 3},
        "identical": True,
        "same_answers": True,
        "nothing_finalized_twice": True,
        "valid_rows_of_groups_in_flight": 8,
        "swept_rollouts": [f"g5/r{index}" for index in range(4)],
        "staged_left": 0,
        "recorded": [f"g{index}" for index in range(5)],
        "owned_here": None,
    }
