"""Queues without Ray and processes to kill, which take the seconds of an import once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout_reassembler.data_plane.base import DataPlaneClient
from tests.captures import registered
from tests.data_plane.plain_queue import PlainQueue, QueueHost
from tests.reassembly.contents import RECORDS
from tests.scenarios.faults.victims import DEADLINES, VictimHost


@pytest.fixture(scope="session")
def queue_host() -> Iterator[QueueHost]:
    host = QueueHost()
    yield host
    host.close()


@pytest.fixture(scope="session")
def victims(queue_host: QueueHost) -> Iterator[VictimHost]:
    """Started behind the queues' host without waiting for it, so that both import at the same time."""
    host = VictimHost()
    yield host
    host.close()


@pytest.fixture
def queue(victims: VictimHost, queue_host: QueueHost) -> Iterator[PlainQueue]:
    queue = queue_host.start_queue()
    yield queue
    queue.stop()


@pytest.fixture
def plane(queue: PlainQueue) -> Iterator[DataPlaneClient]:
    """A client of a queue that knows the three partitions of a run."""
    plane = queue.connect(DEADLINES)
    registered(plane).register_partition(RECORDS, {})
    yield plane
    plane.close()
