"""The Mooncake plane on a real master: the conformance suite, and the traps it avoids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rollout_reassembler.data_plane.base import DataPlaneClient
from tests.data_plane.conformance import PlaneConformance
from tests.data_plane.plain_queue import QueueHost

pytest.importorskip("mooncake.store")
pytest.importorskip("transfer_queue")

from tests.mooncake_site import MooncakeSite

pytestmark = pytest.mark.mooncake


@pytest.fixture(scope="module")
def site() -> Iterator[MooncakeSite]:
    queues = QueueHost()
    site = MooncakeSite(queues, hosts=2)
    yield site
    site.close()
    queues.close()


@pytest.fixture(scope="module")
def mooncake_plane(site: MooncakeSite) -> Iterator[Any]:
    plane = site.connect()
    yield plane
    plane.close()


class TestMooncake(PlaneConformance):
    @pytest.fixture
    def plane(self, mooncake_plane: DataPlaneClient) -> DataPlaneClient:
        return mooncake_plane
