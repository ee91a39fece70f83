"""What all tests share: one Ray cluster and one TransferQueue, started when a test first asks for them; the command
as a process of its own, and a small archive."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import settings

from rollout_reassembler import ReassemblyRequest
from rollout_reassembler.contract.digests import encode_extras
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.staging.codec import pack_call
from tests.captures import chain

Run = Callable[..., "subprocess.CompletedProcess[str]"]

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
    from rollout_reassembler.files.archive import write_archive

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
