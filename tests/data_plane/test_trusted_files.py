"""A directory is loaded from only if nobody else could have written what is in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.data_plane.durable import new_directory
from rollout_reassembler.data_plane.trusted_files import require_trusted


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "above" / "checkpoint"
    (directory / "units").mkdir(parents=True)
    (directory / "units" / "unit.pkl").touch()
    for path in (directory, directory / "units"):
        path.chmod(0o755)
    (directory / "units" / "unit.pkl").chmod(0o644)
    return directory


def test_a_directory_of_ones_own_is_trusted(checkpoint: Path) -> None:
    require_trusted(checkpoint, "load_checkpoint")


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("", 0o775),
        ("", 0o757),
        ("units", 0o777),
        ("units/unit.pkl", 0o664),
        ("units/unit.pkl", 0o646),
        ("..", 0o777),
    ],
)
def test_what_others_can_write_is_refused_by_name(checkpoint: Path, path: str, mode: int) -> None:
    (checkpoint / path).resolve().chmod(mode)
    with pytest.raises(DataPlaneError, match="can write to it") as raised:
        require_trusted(checkpoint, "load_checkpoint")
    assert str((checkpoint / path).resolve()) in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("path", ["", "units", "units/unit.pkl"])
def test_what_belongs_to_somebody_else_is_refused(checkpoint: Path, path: str) -> None:
    os.chown(checkpoint / path, 12345, 12345)
    with pytest.raises(DataPlaneError, match="it belongs to user 12345"):
        require_trusted(checkpoint, "load_checkpoint")


def test_files_that_nobody_else_reaches_are_trusted(checkpoint: Path) -> None:
    (checkpoint / "units" / "unit.pkl").chmod(0o666)
    checkpoint.chmod(0o700)
    require_trusted(checkpoint, "load_checkpoint")


def test_a_new_checkpoints_directory_is_its_owners_alone(tmp_path: Path) -> None:
    assert new_directory(tmp_path / "checkpoint").stat().st_mode & 0o777 == 0o700


def test_a_sticky_directory_above_is_no_reason(checkpoint: Path) -> None:
    checkpoint.parent.chmod(0o1777)
    require_trusted(checkpoint, "load_checkpoint")
