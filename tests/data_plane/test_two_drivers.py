"""Two drivers that start the queue of one Ray cluster at the same time."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_driver_that_gives_up_leaves_the_queue_alone_that_another_one_starts() -> None:
    command = [sys.executable, "-m", "tests.data_plane.scenarios.another_driver"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["lives"]
    assert "deadline" in report["told"] or "still starting" in report["told"]
