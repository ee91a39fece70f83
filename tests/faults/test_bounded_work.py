"""A plane that fades away costs a caller one deadline, not one a record; and no part of a call outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.staging.sink import StagingSink
from tests.captures import STAGING, chain, registered

pytest.importorskip("transfer_queue")


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


class Part(NamedTuple):
    global_indexes: list[int]
    batch_positions: list[int]


class TwoUnits:
    """What `SimpleStore` uses of the queue's storage manager: two units, the first of which refuses at once."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def _group_by_hash(self, global_indexes: Sequence[int]) -> dict[str, Part]:
        return {"first": Part([0], [0]), "second": Part([1], [1])}

    async def _request_with_retry(
        self, operation: str, unit: str, context: str, send: Callable[[], Awaitable[Any]]
    ) -> Any:
        return await send()

    async def _answer(self, unit: str) -> None:
        if unit == "first":
            raise RuntimeError("the first unit refuses")
        await asyncio.sleep(0.05)
        self.done.append(unit)

    async def _put_to_single_storage_unit(
        self, indexes: list[int], part: Mapping[str, Any], *, target_storage_unit: str
    ) -> None:
        await self._answer(target_storage_unit)

    async def _clear_single_storage_unit(self, indexes: list[int], *, target_storage_unit: str) -> None:
        await self._answer(target_storage_unit)


class Rows(NamedTuple):
    global_indexes: list[int]

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("call", ["put", "clear"])
def test_a_call_that_failed_at_one_unit_has_ended_at_the_other(call: str) -> None:
    """A put that is still going on there could write over a row that has got its number since."""
    from rollout_reassembler.data_plane.transfer_queue.store import SimpleStore

    units = TwoUnits()
    store = SimpleStore(units)
    send = store.put(Rows([0, 1]), {"step": [1, 2]}) if call == "put" else store.clear(Rows([0, 1]))
    with pytest.raises(RuntimeError, match="the first unit refuses"):
        asyncio.run(send)
    assert units.done == ["second"]
