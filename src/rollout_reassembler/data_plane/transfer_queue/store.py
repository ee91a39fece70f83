"""Where the columns of a row lie: the part of the adapter that another backend replaces.

A store writes and reads the values of rows that the controller has already numbered. It knows no
keys, tags or schemas; `rows.py` does the rest. `SimpleStore` speaks to TransferQueue's own storage
units over their sockets, below the queue's public calls: those wrap every value in a tensor
container (half of the time of a call), and swallow the error of a clear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transfer_queue.storage.simple_storage import KEY_NOT_FOUND_MARKER
from transfer_queue.utils.zmq_utils import ZMQRequestType

from rollout_reassembler.data_plane.transfer_queue.calls import Peer
from rollout_reassembler.data_plane.transfer_queue.sockets import Call, Refusal, all_bodies
from rollout_reassembler.data_plane.transfer_queue.wire import QueueValues

BackendMeta = dict[int, dict[str, Any]]
"""What a store wants kept with each row, by global index and column; empty for storage units."""

OWNER = "__owner__"
"""The column that says whose row it is: partition and key."""

_NOT_THERE = (KEY_NOT_FOUND_MARKER, "not found. Available")
"""In the refusal of a unit that lacks the row, and of one that never held the column."""


class ValueStore(Protocol):
    """Values by global index. `meta` is the queue's `BatchMeta` of the rows, in the caller's order.

    It holds what was kept with each column of a row where the controller has told it, and for the owner column
    what `before_put` and `before_clear` have answered. Each call raises `DataPlaneError`.
    """

    def before_put(self, call: Call, partition: str, keys: list[str]) -> Mapping[int, Any]:
        """Before these rows are numbered: what is kept with the owner column of those that are there, by index."""

    def before_clear(self, call: Call, partition: str, meta: Any) -> Mapping[int, Any]:
        """The same of rows that are about to be dropped."""

    def put(self, call: Call, meta: Any, columns: Mapping[str, QueueValues]) -> BackendMeta:
        """Write the columns of these rows; returns when they are stored."""

    def forget(self, call: Call, meta: Any, written: BackendMeta) -> None:
        """Drop what the rows held before, now that readers know the new values. Fails the put only by its deadline."""

    def get(self, call: Call, meta: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        """One list of values a column, in the order of `meta`. Raises `KeyError` when any row lacks one."""

    def rewritten(self, call: Call, keys: list[str], meta: Any, names: Sequence[str]) -> list[str]:
        """Those of these rows, which were listed and not found, that were written anew meanwhile.

        Raises where it is the store that has lost them; a store of which that cannot be told has no such rows.
        """

    def clear(self, call: Call, meta: Any) -> None:
        """Drop all columns of these rows; raises when a part of the store does not answer."""

    def close(self) -> None:
        """Drop this process's connection."""


class SimpleStore:
    """Values in TransferQueue's storage units, each row in the unit `global index % units`."""

    def __init__(self, units: Sequence[Peer]) -> None:
        self.units = tuple(units)

    def before_put(self, call: Call, partition: str, keys: list[str]) -> Mapping[int, Any]:
        return {}

    def before_clear(self, call: Call, partition: str, meta: Any) -> Mapping[int, Any]:
        return {}

    def put(self, call: Call, meta: Any, columns: Mapping[str, QueueValues]) -> BackendMeta:
        replies = []
        for unit, indexes, positions in self._by_unit(meta):
            part = {name: _picked(values, positions) for name, values in columns.items()}
            body = {"global_indexes": indexes, "data": part, "data_parser": None}
            replies.append(call.send(unit, ZMQRequestType.PUT_DATA, body))
        all_bodies(replies)
        return {}

    def forget(self, call: Call, meta: Any, written: BackendMeta) -> None:
        """Nothing: a unit overwrites in place."""

    def get(self, call: Call, meta: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        parts = self._by_unit(meta)
        replies = [
            call.send(
                unit,
                ZMQRequestType.GET_DATA,
                {"global_indexes": indexes, "fields": list(names)},
            )
            for unit, indexes, _ in parts
        ]
        try:
            bodies = all_bodies(replies)
        except Refusal as refusal:
            if any(sign in str(refusal) for sign in _NOT_THERE):
                raise KeyError(str(refusal)) from refusal
            raise
        if len(parts) == 1:
            return dict(bodies[0]["data"])
        columns: dict[str, list[Any]] = {name: [None] * len(meta) for name in names}
        for (_, _, positions), body in zip(parts, bodies, strict=True):
            for name in names:
                for position, value in zip(positions, body["data"][name], strict=True):
                    columns[name][position] = value
        return columns

    def rewritten(self, call: Call, keys: list[str], meta: Any, names: Sequence[str]) -> list[str]:
        """None: a unit that was started anew looks like one whose rows were cleared."""
        return []

    def close(self) -> None:
        """Nothing: the sockets are the client's."""

    def clear(self, call: Call, meta: Any) -> None:
        request = ZMQRequestType.CLEAR_DATA
        all_bodies([call.send(unit, request, {"global_indexes": rows}) for unit, rows, _ in self._by_unit(meta)])

    def _by_unit(self, meta: Any) -> list[tuple[Peer, list[int], list[int]]]:
        """The units that hold these rows, each with their global indexes and their positions in `meta`."""
        indexes: dict[Peer, list[int]] = defaultdict(list)
        positions: dict[Peer, list[int]] = defaultdict(list)
        for position, index in enumerate(meta.global_indexes):
            unit = self.units[index % len(self.units)]
            indexes[unit].append(index)
            positions[unit].append(position)
        return [(unit, indexes[unit], positions[unit]) for unit in indexes]


def _picked(values: QueueValues, positions: Sequence[int]) -> QueueValues:
    if len(positions) == len(values):
        return values
    return [values[position] for position in positions]
