"""Where the columns of a row lie: the part of the adapter that another backend replaces.

A store writes and reads the values of rows that the controller has already numbered. It knows no
keys, tags or schemas; `rows.py` does the rest. `SimpleStore` speaks to TransferQueue's own storage
units over their sockets, below the queue's public calls: those wrap every value in a tensor
container (half of the time of a call), and swallow the error of a clear.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from rollout_reassembler.data_plane.transfer_queue.calls import Peer
from rollout_reassembler.data_plane.transfer_queue.wire import QueueValues

BackendMeta = dict[int, dict[str, Any]]
"""What a store wants kept with each row, by global index and column; empty for storage units."""


_NO_SUCH_FIELD = "not found. Available"
"""In the answer of a unit that never held the column; for a row it lacks there is a `KeyError`."""


class ValueStore(Protocol):
    """Values by global index. `meta` is the queue's `BatchMeta` of the rows, in the caller's order."""

    async def put(self, meta: Any, columns: Mapping[str, QueueValues]) -> BackendMeta:
        """Write the columns of these rows; returns when they are stored."""

    async def forget(self, meta: Any, written: BackendMeta) -> None:
        """Drop what the rows held before, now that readers know the new values. Never fails the put."""

    async def get(self, meta: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        """One list of values a column, in the order of `meta`. Raises `KeyError` when any row lacks one."""

    async def clear(self, meta: Any) -> None:
        """Drop all columns of these rows; raises when a part of the store does not answer."""

    def peers(self) -> list[Peer]:
        """The processes that hold the values, for the watch on calls that wait."""


class SimpleStore:
    """Values in TransferQueue's storage units, each row in the unit `global index % units`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def put(self, meta: Any, columns: Mapping[str, QueueValues]) -> BackendMeta:
        requests = []
        for unit, group in self._manager._group_by_hash(meta.global_indexes).items():
            part = {name: _picked(values, group.batch_positions) for name, values in columns.items()}
            send = partial(
                self._manager._put_to_single_storage_unit, group.global_indexes, part, target_storage_unit=unit
            )
            requests.append(self._manager._request_with_retry("put", unit, f"{len(meta)} rows", send))
        await _all_of(requests)
        return {}

    async def forget(self, meta: Any, written: BackendMeta) -> None:
        """Nothing: a unit overwrites in place."""

    async def get(self, meta: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        groups = self._manager._group_by_hash(meta.global_indexes)
        requests = []
        for unit, group in groups.items():
            ask = partial(
                self._manager._get_from_single_storage_unit, group.global_indexes, names, target_storage_unit=unit
            )
            requests.append(self._manager._request_with_retry("get", unit, f"{len(meta)} rows", ask))
        try:
            answers = await _all_of(requests)
        except RuntimeError as error:
            if _NO_SUCH_FIELD in str(error):
                raise KeyError(str(error)) from error
            raise
        columns: dict[str, list[Any]] = {name: [None] * len(meta) for name in names}
        for group, (_, values) in zip(groups.values(), answers, strict=True):
            for name in names:
                for position, value in zip(group.batch_positions, values[name], strict=True):
                    columns[name][position] = value
        return columns

    async def clear(self, meta: Any) -> None:
        groups = self._manager._group_by_hash(meta.global_indexes)
        clear = self._manager._clear_single_storage_unit
        await _all_of([clear(group.global_indexes, target_storage_unit=unit) for unit, group in groups.items()])

    def peers(self) -> list[Peer]:
        units = self._manager.storage_unit_infos.values()
        return [Peer("a storage unit", unit.ip, unit.ports["put_get_socket"]) for unit in units]


async def _all_of(requests: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All answers, or the first error once every request has ended: none may take effect behind the call's back."""
    answers = await asyncio.gather(*requests, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _picked(values: QueueValues, positions: Sequence[int]) -> QueueValues:
    if len(positions) == len(values):
        return values
    return [values[position] for position in positions]
