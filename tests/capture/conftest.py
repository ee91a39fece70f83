from pathlib import Path

import pytest

from tests.capture.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "ledger")


@pytest.fixture
def strict(tmp_path: Path) -> World:
    """A world in which a request that continues nothing poisons its rollout."""
    return World(tmp_path / "strict", on_unresolved="reject")
