"""The demo from end to end on the memory plane, small: it proves its rows, and notices when they are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rollout_reassembler import FinalizedGroup, RolloutReassemblerActorConfig
from rollout_reassembler.demo.policy import DemoPolicy
from rollout_reassembler.demo.proof import Proof, prove_rows
from rollout_reassembler.demo.run import DemoSettings, find_faults, run_demo
from rollout_reassembler.files.archive import Archive, read_archive
from rollout_reassembler.files.planes import CANONICAL, STAGING, OpenPlane, open_plane
from rollout_reassembler.reassembly import proofs
from rollout_reassembler.reassembly.verify import LinearizedRow, ProvenForest

SETTINGS = DemoSettings(plane="memory", groups=1, rollouts=6, calls=3)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one demo run that kept its archive."""
    folder = tmp_path_factory.mktemp("demo")
    settings = DemoSettings(**{**vars(SETTINGS), "out": folder})
    assert run_demo(settings, seed=0, keep=True, console=QUIET)
    return folder


@pytest.fixture
def archive(out: Path) -> Archive:
    return read_archive(out / "archive")


@pytest.fixture
def plane(archive: Archive) -> Iterator[OpenPlane]:
    config = RolloutReassemblerActorConfig(CANONICAL, STAGING, archive.pad_token_id, True, False, None)
    with open_plane("memory", config, workers=1) as opened:
        archive.stage(opened.client, STAGING)
        yield opened


def _judge(plane: OpenPlane, groups: Sequence[FinalizedGroup]) -> tuple[Proof, list[str]]:
    proof = prove_rows(plane.client, groups, DemoPolicy(0))
    return proof, find_faults(SETTINGS, groups, proof, len(plane.client.list_samples(STAGING)))


def test_the_demo_writes_what_it_proved(out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    assert summary["groups"] == 1
    assert summary["rejections"] == {"invalid_staging_row": 1}
    assert summary["rows_by_rollout"] == {"g0/r0": 1, "g0/r1": 2, "g0/r3": 2, "g0/r4": 3, "g0/r5": 1}
    assert (summary["rows"], summary["valid_rows"], summary["valid_rollouts"]) == (10, 9, 5)
    assert 0.8 < summary["trained_tokens"] / summary["sampled_tokens"] < 1  # a call was sent again, one not captured
    assert summary["tokens_checked"] > 50
    assert summary["max_abs_logprob_error"] < 1e-4
    assert summary["routes_checked"] == summary["routes_equal"] > 50
    assert summary["valid_rows"] <= summary["routes_missing"] <= summary["valid_rows"] + 1
    assert 0 < summary["retokenized_rollouts"] <= 5
    assert summary["staged_rows_left"] == 0
    assert summary["wall_s"] > 0


def test_the_kept_archive_gives_the_same_proof(plane: OpenPlane, archive: Archive) -> None:
    proof, faults = _judge(plane, list(plane.finalize_all(archive.requests)))
    assert not faults
    assert proof.valid_rows == 9


@pytest.mark.parametrize("damage", ["tokens", "logprobs", "shift"])
def test_the_proof_fails_when_a_published_row_is_wrong(
    plane: OpenPlane, archive: Archive, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    prove = proofs.prove_forest

    def damaged(row: LinearizedRow) -> LinearizedRow:
        if damage == "tokens":
            return row._replace(token_ids=row.token_ids ^ (row.token_mask == 1.0))
        if damage == "logprobs":
            return row._replace(logprobs=row.logprobs * np.float32(1.001))
        return row._replace(logprobs=np.roll(row.logprobs, 1))

    def wrong(*args: Any, **settings: Any) -> ProvenForest:
        forest = prove(*args, **settings)
        return forest._replace(rows=tuple(map(damaged, forest.rows)))

    monkeypatch.setattr(proofs, "prove_forest", wrong)
    proof, faults = _judge(plane, list(plane.finalize_all(archive.requests)))
    assert proof.max_abs_logprob_error > 1e-4
    assert faults


def test_rejections_other_than_the_sabotaged_ones_are_a_fault(plane: OpenPlane, archive: Archive) -> None:
    groups = list(plane.finalize_all(archive.requests))
    proof = prove_rows(plane.client, groups, DemoPolicy(0))
    more = {**groups[0].rejections, "g0/r3": "invalid_staging_row"}
    fewer: dict[str, str] = {}
    for rejections in (more, fewer):
        changed = [FinalizedGroup(**{**vars(groups[0]), "rejections": rejections})]
        assert find_faults(SETTINGS, changed, proof, 0)


def test_staged_rows_left_behind_are_a_fault(plane: OpenPlane, archive: Archive) -> None:
    groups = list(plane.finalize_all(archive.requests))
    archive.stage(plane.client, STAGING)
    _, faults = _judge(plane, groups)
    assert any("left behind" in fault for fault in faults)
