"""A plane that fades away costs a caller one deadline, not one a record; and no part of a call outlives it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout
from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.data_plane.transfer_queue.client import queue_plane
from rollout_reassembler.staging.sink import StagingSink
from tests.captures import STAGING, chain, registered
from tests.data_plane.plain_queue import QueueHost, keys_of, server_info


class FadingPlane(MemoryDataPlane):
    """It refuses a batch, takes one record of it, and is silent from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[int] = []

    def put_samples(self, sample_ids: Sequence[str], partition_id: str, *args: Any, **kwargs: Any) -> Any:
        self.puts.append(len(sample_ids))
        if len(sample_ids) > 1:
            raise DataPlaneError("refused", call="put_samples", partition=partition_id)
        if len(self.puts) > 2:
            raise DataPlaneTimeout("no answer", call="put_samples", partition=partition_id, seconds=60)
        return super().put_samples(sample_ids, partition_id, *args, **kwargs)


def test_a_batch_that_is_tried_one_by_one_ends_when_the_plane_is_silent() -> None:
    plane = FadingPlane()
    registered(plane)
    results = StagingSink(plane, staging_partition=STAGING).stage_all(chain("r", 20).calls)
    assert plane.puts == [20, 1, 1]
    assert [result.ok for result in results] == [True] + [False] * 19
    assert all("no answer" in result.error for result in results[1:] if result.error)


def test_a_call_that_failed_at_one_unit_has_ended_at_the_other(queue_host: QueueHost) -> None:
    """A put that is still going on there could write over a row that has got its number since."""
    from rollout_reassembler.data_plane.transfer_queue.connection import connect_sockets

    full, other = queue_host.start_queue(capacity=0), queue_host.start_queue()
    units = {name: server_info(queue.unit.address) for name, queue in (("full", full), ("other", other))}
    connected = connect_sockets(server_info(full.controller.address), units, 5.0, keys_of(full.controller.address))
    plane = queue_plane(connected, DataPlaneConfig(impl="transfer_queue"))
    plane.register_partition("p", {"step": FieldSpec("int64")})
    other.unit.stall()
    stalled_s, started = 0.7, time.monotonic()
    threading.Timer(stalled_s, other.unit.resume).start()
    with pytest.raises(DataPlaneError, match="full"):
        plane.put_samples(["a", "b"], "p", {"step": [1, 2]})
    assert time.monotonic() - started >= stalled_s
    plane.close()
    full.stop()
    other.stop()
