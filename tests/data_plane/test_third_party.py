"""A backend of another distribution: found by its entry point, it passes the conformance suite and finalizes groups.

`third_party/` is that distribution as an installer would leave it: modules, and a `.dist-info` with the entry point.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout_reassembler.cli.doctor import examine
from rollout_reassembler.contract.errors import DataPlaneUnavailable
from rollout_reassembler.data_plane import backends
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from tests.captures import chain, finalize, registered, stage
from tests.conftest import Run
from tests.data_plane.conformance import PlaneConformance

SITE = Path(__file__).parent / "third_party"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution is where Python finds distributions and modules."""
    monkeypatch.syspath_prepend(SITE)


class TestSqlite(PlaneConformance):
    @pytest.fixture
    def plane(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlaneClient]:
        path = tmp_path_factory.mktemp("sqlite") / "plane"
        plane = build_data_plane_client({"impl": "sqlite", "sqlite": {"path": str(path)}})
        yield plane
        plane.close()


def test_its_adapter_is_under_a_hundred_lines() -> None:
    lines = (SITE / "rollout_sqlite.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 100


def test_it_is_named_after_our_own() -> None:
    assert backends.names() == [*backends.OWN, "sqlite"]
    assert backends.require("sqlite").impl == "sqlite"


def test_its_block_is_checked_by_its_own_model() -> None:
    cfg = DataPlaneConfig.model_validate({"impl": "sqlite", "sqlite": {"path": "p"}})
    assert cfg.block == backends.require("sqlite").config(path="p")  # type: ignore[misc]
    assert DataPlaneConfig.model_validate(cfg.model_dump()) == cfg
    for given, where, what in (
        ({"impl": "sqlite"}, ("sqlite", "path"), "Field required"),
        ({"impl": "sqlite", "sqlite": {"path": "p", "size": 1}}, ("sqlite", "size"), "Extra inputs"),
        ({"impl": "sqlite", "sqlite": {"path": "p"}, "cells": "tensors"}, (), "'sqlite' holds cells='bytes' only"),
        ({"impl": "redis"}, (), "impl 'transfer_queue' with backend 'mooncake_cpu', impl 'sqlite'"),
    ):
        with pytest.raises(ValidationError) as raised:
            DataPlaneConfig.model_validate(given)
        (error,) = raised.value.errors()
        assert error["loc"] == where
        assert what in error["msg"]


def test_its_rows_and_groups_outlive_its_process(tmp_path: Path) -> None:
    cfg = {"impl": "sqlite", "sqlite": {"path": str(tmp_path / "plane")}}
    with pytest.raises(DataPlaneUnavailable, match="no SQLite plane"):
        build_data_plane_client(cfg, bootstrap=False)
    made = [chain(f"g/r{index}", 3) for index in range(2)]
    plane = registered(build_data_plane_client(cfg))
    epoch = plane.epoch()
    stage(plane, *made)
    plane.close()
    again = build_data_plane_client(cfg, bootstrap=False)
    assert again.epoch() == epoch
    answer = finalize(again, made)
    assert (answer.valid_row_count, answer.cleanup_pending) == (2, ())
    assert again.get_data(answer.meta)["input_ids"][0].tolist() == made[0].tokens()
    again.close()


def test_the_command_runs_an_archive_on_it(reassemble: Run, archive: Path, tmp_path: Path) -> None:
    on_it = reassemble(
        "run", archive, "--out", tmp_path / "it", "--plane", "sqlite", before=f"sys.path.insert(0, {str(SITE)!r})\n"
    )
    assert on_it.returncode == 0, on_it.stderr
    assert reassemble("run", archive, "--out", tmp_path / "memory").returncode == 0
    assert (tmp_path / "it" / "rows.parquet").read_bytes() == (tmp_path / "memory" / "rows.parquet").read_bytes()
    assert json.loads((tmp_path / "it" / "summary.json").read_text())["valid_rows"] == 4


def test_where_it_is_not_installed_the_command_says_what_is(reassemble: Run, archive: Path, tmp_path: Path) -> None:
    done = reassemble("run", archive, "--out", tmp_path / "out", "--plane", "sqlite")
    assert done.returncode == 2
    assert "'sqlite' is not one of 'memory', 'simple', 'mooncake_cpu'" in " ".join(done.stderr.replace("│", "").split())


@pytest.mark.parametrize("points_to", ["no_such_module:BACKEND", "json:loads"])
def test_one_that_is_broken_is_a_line_of_doctor_and_costs_the_others_nothing(tmp_path: Path, points_to: str) -> None:
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{backends.GROUP}]\nbroken = {points_to}\n")
    sys.path.insert(0, str(tmp_path))
    try:
        (finding,) = [finding for finding in examine() if finding.name == "broken"]
    finally:
        sys.path.remove(str(tmp_path))
    assert not finding.ok
    assert finding.optional
    assert DataPlaneConfig(impl="memory").chosen.name == "memory"
