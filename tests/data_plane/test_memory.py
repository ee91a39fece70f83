"""The memory plane: the conformance suite, and what is its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneUnavailable
from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from tests.data_plane.conformance import PlaneConformance


class TestMemoryDataPlane(PlaneConformance):
    @pytest.fixture
    def plane(self) -> MemoryDataPlane:
        return MemoryDataPlane()


def test_it_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from rollout_reassembler.data_plane.factory import *; "
        "build_data_plane_client(DataPlaneConfig()); assert not {'torch', 'ray', 'transfer_queue'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_factory_makes_one() -> None:
    assert isinstance(build_data_plane_client(DataPlaneConfig()), MemoryDataPlane)


def test_a_closed_plane_says_so() -> None:
    plane = MemoryDataPlane()
    plane.register_partition("p", {"step": FieldSpec("int64")})
    plane.close()
    plane.close()
    with pytest.raises(DataPlaneUnavailable, match="closed"):
        plane.get_tags(["a"], "p")


@pytest.mark.parametrize("damage", ["cut", "flip", "magic"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path, damage: str) -> None:
    plane = MemoryDataPlane()
    plane.register_partition("p", {"tokens": FieldSpec("int64", 1)})
    plane.put_samples(["a"], "p", {"tokens": [np.arange(100)]})
    plane.save_checkpoint(str(tmp_path))
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "cut":
        del content[-5:]
    else:
        content[0 if damage == "magic" else -300] ^= 1
    file.write_bytes(content)
    plane.put_samples(["b"], "p", {"tokens": [np.arange(2)]})
    with pytest.raises(DataPlaneError, match="damaged"):
        plane.load_checkpoint(str(tmp_path))
    assert plane.list_samples("p").keys() == {"a", "b"}
