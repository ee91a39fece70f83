"""What the tests of data planes share: one process that forks plain queues, for tests that kill them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.data_plane.plain_queue import QueueHost

# So that a failing assertion in it explains itself as one in a test file does.
pytest.register_assert_rewrite("tests.data_plane.conformance")


@pytest.fixture(scope="session")
def queues() -> Iterator[QueueHost]:
    """Imports TransferQueue once, which takes seconds; a queue of it then takes half a second."""
    importlib.import_module("transfer_queue")
    from tests.data_plane.plain_queue import QueueHost

    queues = QueueHost()
    yield queues
    queues.close()
