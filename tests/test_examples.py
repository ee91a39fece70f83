"""The scripts of `examples/`: each runs as a user runs it, and prints what its page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed(name: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120, check=False, cwd=EXAMPLES
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_loop_of_ones_own_trains_every_sampled_token_and_leaves_nothing_behind():
    said = printed("own_loop.py")
    rewards = [float(reward) for reward in re.findall(r"mean reward ([\d.]+)", said)]
    assert rewards[-1] > rewards[0] + 0.2
    assert said.count("8 of 8 rows valid, 96 tokens trained") == 2
    assert said.endswith("left in the plane: 0 staged, 0 rows\n")


def test_a_staging_worker_makes_a_receipt_whose_row_holds_the_answer_that_was_kept():
    assert printed("staging_worker.py").splitlines() == [
        "call-0 is a root: 6 tokens added, staged",
        "call-1 continues call-0: 3 tokens added, staged",
        "call-2 continues call-0: 3 tokens added, staged",
        "terminal call-2, chosen by content",
        "the row, sampled tokens in brackets: <user> what is the weather [answer-1] <tool> sunny [answer-3]",
    ]


def test_each_broken_rollout_says_why_it_was_rejected():
    said = printed("why_rejected.py")
    for line in (
        "sound: valid",
        "lost: missing_receipt (the request holds no receipt for this rollout)",
        "never-staged: missing_staging_row (1 of 1 staged rows are missing, first 'never-staged/call-0#",
        "swapped: identity_mismatch (the receipt is that of rollout 'sound')",
        "1 of 4 rows valid",
        "weights of the rows: [1.0, 0.0, 0.0, 0.0]",
        "finalize/capture_failure_reason_missing_receipt_count",
    ):
        assert line in said


def test_rows_are_read_and_trained_in_torch():
    assert printed("rows_in_torch.py").splitlines() == [
        "padded: [4, 7] lengths [5, 7, 4, 1]",
        "packed: [17] cu_seqlens [0, 5, 12, 16, 17]",
        "trained tokens: 10",
        "the loss falls: True",
    ]


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_an_example_is_on_its_page_and_has_a_test(script):
    assert f"]({script.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert f'printed("{script.name}")' in Path(__file__).read_text(encoding="utf-8")
