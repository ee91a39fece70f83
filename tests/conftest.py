"""What the whole session shares: one Ray cluster and one TransferQueue, started when a test first asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from hypothesis import settings

from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client

# A test is not wrong because the machine is busy.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


_STARTS_A_QUEUE = {"host", "queue_host", "queues", "ray_cluster"}
"""Fixtures that start a queue; a test that asks for one, however far down, has the marker `queue`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _STARTS_A_QUEUE.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.queue)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with CPUs for the queue (2) and for the actors of the tests."""
    from rollout_reassembler.data_plane.transfer_queue.cluster import local_ray

    with local_ray(num_cpus=10):
        yield


@pytest.fixture(scope="session")
def queue_config() -> DataPlaneConfig:
    """The config of the session's queue, for tests that connect from elsewhere."""
    return DataPlaneConfig(impl="transfer_queue", backend="simple")


@pytest.fixture(scope="session")
def queue_plane(ray_cluster: None, queue_config: DataPlaneConfig) -> Iterator[DataPlaneClient]:
    """The client that owns the session's queue: one controller, one storage unit. Never close it in a test."""
    plane = build_data_plane_client(queue_config, bootstrap=True)
    yield plane
    plane.close()


@pytest.fixture
def partition_name(request: pytest.FixtureRequest) -> str:
    """A partition id that no other test uses."""
    return f"{request.node.name}/{uuid4().hex[:8]}"
