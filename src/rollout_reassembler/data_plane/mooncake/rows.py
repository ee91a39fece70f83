"""What one call does on the wire where values are objects of a Mooncake store.

    put    1 what do these rows hold?   2 number the keys   3 write objects   4 tags
           5 tell the controller where   6 remove the objects that were replaced
    get    1 number the keys (their cells come along)   2 read objects
    clear  1 number the keys   2 hide them from readers   3 remove objects   4 drop the numbers

The controller tells the cells of a column only when each row asked for has that column. Where rows
differ, a put or a clear therefore asks for those of the whole partition.

A row that the controller still lists, and whose objects the store does not have, is not a missing row:
a memory host died with it. That is a failure of the plane, and never looks like a row that was cleared.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.metadata import BatchMeta

from rollout_reassembler.data_plane.base import Tags
from rollout_reassembler.data_plane.mooncake.objects import RowIndex, StoredObject, referred
from rollout_reassembler.data_plane.mooncake.store import StoreFailure, as_data_plane_error
from rollout_reassembler.data_plane.mooncake.values import MooncakeValues
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, Peer
from rollout_reassembler.data_plane.transfer_queue.queue_errors import translated
from rollout_reassembler.data_plane.transfer_queue.rows import OWNER, QueueRows, RowsRead
from rollout_reassembler.data_plane.transfer_queue.wire import QueueValues


class MooncakeRows(QueueRows):
    """The rows of one queue whose values are in a Mooncake store."""

    def __init__(self, queue: AsyncTransferQueueClient, values: MooncakeValues, controller: Peer) -> None:
        super().__init__(queue, values, (controller, *values.peers()))
        self._values = values

    async def put(
        self,
        site: CallSite,
        partition: str,
        keys: list[str],
        columns: Mapping[str, QueueValues],
        tags: Sequence[Tags] | None,
    ) -> None:
        async with _store_failures(site):
            await super().put(site, partition, keys, columns, tags)

    async def read(
        self, site: CallSite, partition: str, keys: list[str], names: list[str], *, partial: bool
    ) -> RowsRead:
        async with _store_failures(site):
            return await super().read(site, partition, keys, names, partial=partial)

    async def clear(self, site: CallSite, partition: str, keys: list[str]) -> None:
        async with _store_failures(site):
            await super().clear(site, partition, keys)

    async def stored(self, site: CallSite) -> dict[str, StoredObject]:
        """The objects, by name, of all rows that can be read."""
        async with translated(site):
            found: dict[str, StoredObject] = {}
            for partition in await self._queue.async_get_partition_list():
                produced = await self._produced(partition, [OWNER])
                indexes = await self._all_indexes(partition) if produced else {}
                for place in produced:
                    found.update((stored.name, stored) for stored in RowIndex.of(indexes[place]).columns.values())
            return found

    async def save_controller(self, site: CallSite, path: Path) -> None:
        async with translated(site):
            await self._queue.async_save_controller_checkpoint(str(path))

    async def load_controller(self, site: CallSite, path: Path) -> None:
        async with translated(site):
            await self._queue.async_load_controller_checkpoint(str(path))

    def close(self) -> None:
        super().close()
        self._values.close()

    async def _numbered(self, partition: str, keys: list[str], *, with_values: bool) -> BatchMeta:
        before = await self._indexes(partition, await super()._found(partition, keys)) if with_values else {}
        meta = await super()._numbered(partition, keys, with_values=with_values)
        return _with_indexes(meta, before)

    async def _found(self, partition: str, keys: list[str]) -> BatchMeta:
        meta = await super()._found(partition, keys)
        return _with_indexes(meta, await self._indexes(partition, meta))

    async def _held(self, wanted: list[str], meta: BatchMeta, names: list[str]) -> list[str]:
        """Those that the store holds, and those that were put anew meanwhile. Raises for a row that is lost."""
        held = set(await super()._held(wanted, meta, names))
        partition = meta.partition_ids[0]
        unread = [key for key in wanted if key not in held]
        listed = await self._listed(partition, unread, names)
        now = await super()._found(partition, listed) if listed else BatchMeta.empty()
        if len(now) == len(listed):
            before = dict(zip(wanted, meta._custom_backend_meta, strict=True))
            for key, cells in zip(listed, now._custom_backend_meta, strict=True):
                if _parts(cells, names) == _parts(before[key], names):
                    what = f"row {key!r} is lost: the memory host that held it is gone; restore a checkpoint"
                    raise StoreFailure(what, is_gone=True)
        return [key for key in wanted if key in held or key in listed]

    async def _listed(self, partition: str, keys: list[str], names: list[str]) -> list[str]:
        """Those of `keys` that the controller lists as readable now."""
        if not keys:
            return []
        return await self._readable(partition, keys, await super()._found(partition, keys), names)

    async def _indexes(self, partition: str, meta: BatchMeta) -> dict[int, Any]:
        """The index cells of those rows of `meta` that have or had values, by global index."""
        if len(meta) == 0:
            return {}
        if OWNER in meta.field_names:
            cells = zip(meta.global_indexes, meta._custom_backend_meta, strict=True)
            return {index: row[OWNER] for index, row in cells}
        return await self._all_indexes(partition)

    async def _all_indexes(self, partition: str) -> dict[int, Any]:
        """The index cells of the partition, also of rows that a clear has hidden and not removed."""
        meta = await self._queue._get_partition_meta(partition)
        if not meta:
            return {}
        cells = zip(meta.global_indexes, meta._custom_backend_meta, strict=True)
        return {index: row[OWNER] for index, row in cells if OWNER in row}


@asynccontextmanager
async def _store_failures(site: CallSite) -> AsyncIterator[None]:
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
