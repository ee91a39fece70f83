"""What the tests of the command share: a small archive, and the command as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rollout_reassembler import ReassemblyRequest
from rollout_reassembler.cli.archive import write_archive
from rollout_reassembler.contract.digests import encode_extras
from rollout_reassembler.staging.codec import pack_call
from tests.captures import chain

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def reassemble() -> Run:
    """Run the command in a process of its own; `without` names modules that are not installed there."""

    def run(
        *arguments: object, without: Sequence[str] = (), before: str = "", **options: object
    ) -> subprocess.CompletedProcess[str]:
        hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in without)
        program = f"import sys\n{hidden}{before}\nfrom rollout_reassembler.cli import main\nmain()"
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)

    return run


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Two groups of three rollouts, one of them without its receipt."""
    requests, staged = [], {}
    for group in range(2):
        made = [chain(f"g{group}/r{index}", seed=group) for index in range(3)]
        staged |= {
            call.staging_key: (call.rollout_id, pack_call(call), encode_extras(call.extras) if call.extras else b"")
            for rollout in made
            for call in rollout.calls
        }
        receipts = [rollout.receipt() for rollout in made]
        requests.append(
            ReassemblyRequest(
                group_id=f"g{group}",
                rollout_ids=tuple(rollout.rollout_id for rollout in made),
                canonical_sample_ids=None,
                receipts=(receipts[0], None, receipts[2]),
                rewards=(1.0, 0.5, 0.0),
                fallback_weight_version=4,
                prompt_idx=group,
                mask_sample=(False, False, True),
            )
        )
    folder = tmp_path / "archive"
    write_archive(folder, requests, staged, pad_token_id=9)
    return folder
