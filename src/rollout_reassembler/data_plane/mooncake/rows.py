"""What one call does on the wire where values are objects of a Mooncake store.

    put    1 what do these rows hold?   2 number the keys   3 write objects
           4 tags; then: where the objects are   5 remove the objects that were replaced
    get    1 number the keys (their cells come along)   2 read objects
    clear  1 number the keys   2 hide them from readers   3 remove objects   4 drop the numbers

The controller tells the cells of a column only when each row asked for has that column. Where rows
differ, a put or a clear therefore asks for those of the whole partition.

A row that the controller still lists, and whose objects the store does not have, is not a missing row:
a memory host died with it. That is a failure of the plane, and never looks like a row that was cleared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.zmq_utils import ZMQRequestType

from rollout_reassembler.data_plane.base import Tags
from rollout_reassembler.data_plane.mooncake.objects import RowIndex, StoredObject, referred
from rollout_reassembler.data_plane.mooncake.store import StoreFailure, as_data_plane_error
from rollout_reassembler.data_plane.mooncake.values import MooncakeValues
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, Peer
from rollout_reassembler.data_plane.transfer_queue.rows import OWNER, QueueRows, RowsRead
from rollout_reassembler.data_plane.transfer_queue.sockets import Call, QueueSockets
from rollout_reassembler.data_plane.transfer_queue.wire import QueueValues


class MooncakeRows(QueueRows):
    """The rows of one queue whose values are in a Mooncake store."""

    def __init__(self, sockets: QueueSockets, controller: Peer, values: MooncakeValues) -> None:
        super().__init__(sockets, controller, values)
        self._values = values

    def put(
        self,
        call: Call,
        partition: str,
        keys: list[str],
        columns: Mapping[str, QueueValues],
        tags: Sequence[Tags] | None,
    ) -> None:
        with _store_failures(call.site):
            super().put(call, partition, keys, columns, tags)

    def store(
        self, call: Call, partition: str, keys: list[str], numbers: list[int], columns: Mapping[str, QueueValues]
    ) -> dict[str, Any]:
        with _store_failures(call.site):
            return super().store(call, partition, keys, numbers, columns)

    def announce(self, call: Call, partition: str, news: dict[str, Any], tags: Mapping[int, Tags] | None) -> None:
        with _store_failures(call.site):
            super().announce(call, partition, news, tags)

    def release(self, call: Call, partition: str, keys: list[str], numbers: Collection[int]) -> None:
        with _store_failures(call.site):
            super().release(call, partition, keys, numbers)

    def read(self, call: Call, partition: str, keys: list[str], names: list[str], *, partial: bool) -> RowsRead:
        with _store_failures(call.site):
            return super().read(call, partition, keys, names, partial=partial)

    def clear(self, call: Call, partition: str, keys: list[str]) -> None:
        with _store_failures(call.site):
            super().clear(call, partition, keys)

    def stored(self, call: Call) -> dict[str, StoredObject]:
        """The objects, by name, of all rows that can be read."""
        found: dict[str, StoredObject] = {}
        for partition in self.partitions(call):
            produced = self._produced(call, partition, [OWNER])
            indexes = self._all_indexes(call, partition) if produced else {}
            for place in produced:
                found.update((stored.name, stored) for stored in RowIndex.of(indexes[place]).columns.values())
        return found

    def close(self, seconds: float) -> None:
        super().close(seconds)
        self._values.close()

    def _numbered(self, call: Call, partition: str, keys: list[str], *, with_values: bool) -> BatchMeta:
        before: dict[int, Any] = {}
        if with_values:
            before = self._indexes(call, partition, super()._found(call, partition, keys))
        return _with_indexes(super()._numbered(call, partition, keys, with_values=with_values), before)

    def _found(self, call: Call, partition: str, keys: list[str]) -> BatchMeta:
        meta = super()._found(call, partition, keys)
        return _with_indexes(meta, self._indexes(call, partition, meta))

    def _held(self, call: Call, wanted: list[str], meta: BatchMeta, names: list[str]) -> list[str]:
        """Those that the store holds, and those that were put anew meanwhile. Raises for a row that is lost."""
        held = set(super()._held(call, wanted, meta, names))
        partition = meta.partition_ids[0]
        unread = [key for key in wanted if key not in held]
        listed = self._listed(call, partition, unread, names)
        now = super()._found(call, partition, listed) if listed else BatchMeta.empty()
        if len(now) == len(listed):
            before = dict(zip(wanted, meta._custom_backend_meta, strict=True))
            for key, cells in zip(listed, now._custom_backend_meta, strict=True):
                if _parts(cells, names) == _parts(before[key], names):
                    what = f"row {key!r} is lost: the memory host that held it is gone; restore a checkpoint"
                    raise StoreFailure(what, is_gone=True)
        return [key for key in wanted if key in held or key in listed]

    def _listed(self, call: Call, partition: str, keys: list[str], names: list[str]) -> list[str]:
        """Those of `keys` that the controller lists as readable now."""
        if not keys:
            return []
        return self._readable(call, partition, keys, super()._found(call, partition, keys), names)

    def _indexes(self, call: Call, partition: str, meta: BatchMeta) -> dict[int, Any]:
        """The index cells of those rows of `meta` that have or had values, by global index."""
        if len(meta) == 0:
            return {}
        if OWNER in meta.field_names:
            cells = zip(meta.global_indexes, meta._custom_backend_meta, strict=True)
            return {index: row[OWNER] for index, row in cells}
        return self._all_indexes(call, partition)

    def _all_indexes(self, call: Call, partition: str) -> dict[int, Any]:
        """The index cells of the partition, also of rows that a clear has hidden and not removed."""
        request = ZMQRequestType.GET_PARTITION_META
        answer = self._ask(call, request, {"partition_id": partition})
        meta = answer["metadata"]
        if not meta:
            return {}
        cells = zip(meta.global_indexes, meta._custom_backend_meta, strict=True)
        return {index: row[OWNER] for index, row in cells if OWNER in row}


@contextmanager
def _store_failures(site: CallSite) -> Iterator[None]:
    """Failures of the store as errors that name the call."""
    try:
        yield
    except StoreFailure as failure:
        raise as_data_plane_error(failure, site.call, site.partition, site.keys) from failure


def _with_indexes(meta: BatchMeta, indexes: Mapping[int, Any]) -> BatchMeta:
    for index, row in zip(meta.global_indexes, meta._custom_backend_meta, strict=True):
        if index in indexes:
            row[OWNER] = indexes[index]
    return meta


def _parts(cells: Mapping[str, Any], names: Sequence[str]) -> list[StoredObject]:
    return referred(cells[name] for name in names if name in cells and name != OWNER)
