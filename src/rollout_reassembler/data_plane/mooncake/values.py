"""Columns of rows in a Mooncake store: the `ValueStore` of this backend.

The rows come as the queue's `BatchMeta`, whose backend metadata holds a cell for each column
(`objects.py`), and in that of the owner column the index of the row's objects, for rows that had values.
The store's calls block for as long as they like, so they run on a few threads of their own.

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

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from rollout_reassembler.data_plane.cells import encode_cell
from rollout_reassembler.data_plane.mooncake.objects import Names, RowIndex, StoredObject, pack_row, referred, unpack
from rollout_reassembler.data_plane.mooncake.store import MooncakeStore, StoreFailure, as_data_plane_error
from rollout_reassembler.data_plane.transfer_queue.calls import Peer
from rollout_reassembler.data_plane.transfer_queue.controller import QueueController
from rollout_reassembler.data_plane.transfer_queue.sockets import Call
from rollout_reassembler.data_plane.transfer_queue.store import OWNER, BackendMeta
from rollout_reassembler.data_plane.transfer_queue.wire import QueueValues

logger = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 4


class MooncakeValues:
    """Values by cell. Raises `DataPlaneError`, and `KeyError` for a value whose object is not there."""

    def __init__(self, store: MooncakeStore, controller: QueueController) -> None:
        self.store = store
        self._controller = controller
        host, _, port = store.address.rpartition(":")
        # Looked up once: a name server may take longer than a call has. Memory hosts come and go, and are no
        # peers: a read that one does not answer says so itself.
        address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][4][0]
        self._master = Peer("the Mooncake master", str(address), int(port))
        self._names = Names()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mooncake")
        self._running = 0
        self._counting = threading.Lock()

    def before_put(self, call: Call, partition: str, keys: list[str]) -> Mapping[int, Any]:
        return self._indexes(call, partition, self._controller.meta_of(call, partition, keys))

    def before_clear(self, call: Call, partition: str, meta: Any) -> Mapping[int, Any]:
        return self._indexes(call, partition, meta)

    def put(self, call: Call, meta: Any, columns: Mapping[str, QueueValues]) -> BackendMeta:
        """Write new objects beside those that the rows have; leaves none behind when the store fails."""
        values = {name: column for name, column in columns.items() if name != OWNER}
        packed = [
            pack_row({name: _cell(values[name][row]) for name in values}, self._names) for row in range(len(meta))
        ]
        objects = [stored for row in packed for stored in row.objects]
        if objects:
            with _told(call):
                try:
                    self._run(call, lambda: self.store.put(objects))
                except StoreFailure:
                    self._remove_unused(call, [stored.name for stored, _ in objects])
                    raise
        written: BackendMeta = {}
        for index, old, owner, row in zip(
            meta.global_indexes, meta._custom_backend_meta, columns[OWNER], packed, strict=True
        ):
            before = RowIndex.of(old[OWNER]) if OWNER in old else RowIndex(owner)
            written[index] = {**row.cells, OWNER: before.overwritten(owner, row.cells).to_cell()}
        return written

    def forget(self, call: Call, meta: Any, written: BackendMeta) -> None:
        """Remove the objects that the put has replaced."""
        unused: set[str] = set()
        for index, old in zip(meta.global_indexes, meta._custom_backend_meta, strict=True):
            if OWNER in old:
                unused |= RowIndex.of(old[OWNER]).names() - RowIndex.of(written[index][OWNER]).names()
        self._remove_unused(call, sorted(unused))

    def get(self, call: Call, meta: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        """One list of values a column; those of the owner column are in its cells."""
        cells = {name: [row[name] for row in meta._custom_backend_meta] for name in names}
        owner_cells = cells.pop(OWNER, None)
        parts = referred(cell for column in cells.values() for cell in column)
        with _told(call):
            contents = self._run(call, lambda: self.store.get(parts)) if parts else {}
        columns = {name: [unpack(cell, contents) for cell in column] for name, column in cells.items()}
        if owner_cells is not None:
            columns[OWNER] = [RowIndex.of(cell).owner for cell in owner_cells]
        return columns

    def clear(self, call: Call, meta: Any) -> None:
        """Remove all objects of these rows."""
        names = {name for row in meta._custom_backend_meta if OWNER in row for name in RowIndex.of(row[OWNER]).names()}
        if names:
            with _told(call):
                self._run(call, lambda: self.store.remove(sorted(names)))

    def rewritten(self, call: Call, keys: list[str], meta: Any, names: Sequence[str]) -> list[str]:
        """Those that were put anew meanwhile. A row that is listed as it was, without its objects, is lost: raises."""
        partition = meta.partition_ids[0]
        known = self._controller.meta_of(call, partition, keys)
        listed = self._controller.readable(call, partition, keys, known, list(names))
        if not listed:
            return []
        now = self._controller.meta_of(call, partition, listed)
        if len(now) == len(listed):
            before = dict(zip(keys, meta._custom_backend_meta, strict=True))
            for key, cells in zip(listed, now._custom_backend_meta, strict=True):
                if _parts(cells, names) == _parts(before[key], names):
                    what = f"row {key!r} is lost: the memory host that held it is gone; restore a checkpoint"
                    raise call.site.unavailable(what)
        return listed

    def stored(self, call: Call) -> dict[str, StoredObject]:
        """The objects, by name, of all rows that can be read."""
        found: dict[str, StoredObject] = {}
        for partition in self._controller.partitions(call):
            produced = self._controller.produced(call, partition, [OWNER])
            indexes = self._controller.cells(call, partition, OWNER) if produced else {}
            for place in produced:
                found.update((stored.name, stored) for stored in RowIndex.of(indexes[place]).columns.values())
        return found

    def close(self) -> None:
        """Disconnect, unless a call is still under way: then the end of the process does it."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._counting:
            if self._running == 0:
                self.store.close()

    def _indexes(self, call: Call, partition: str, meta: Any) -> dict[int, Any]:
        """The index cells of those rows of `meta` that have or had values, by global index."""
        if len(meta) == 0:
            return {}
        if OWNER in meta.field_names:
            cells = zip(meta.global_indexes, meta._custom_backend_meta, strict=True)
            return {index: row[OWNER] for index, row in cells}
        return self._controller.cells(call, partition, OWNER)

    def _remove_unused(self, call: Call, names: Sequence[str]) -> None:
        """Remove objects that nobody refers to. Where that fails they stay until the session ends."""
        if not names:
            return
        try:
            self._run(call, lambda: self.store.remove(names))
        except StoreFailure as failure:
            logger.warning("%d objects that nobody refers to stay in the store: %s", len(names), failure)

    def _run(self, call: Call, work: Callable[[], T]) -> T:
        def counted() -> T:
            with self._counting:
                self._running += 1
            try:
                return work()
            finally:
                with self._counting:
                    self._running -= 1

        call.require_lease()
        done = self._threads.submit(counted)
        try:
            result = call.wait_for(done, self._master)
            call.answered()
            return result
        finally:
            # What has not begun when its call ends must not be done behind it.
            done.cancel()


def _cell(value: Any) -> Any:
    return encode_cell(value) if isinstance(value, np.ndarray) else value


def _parts(cells: Mapping[str, Any], names: Sequence[str]) -> list[StoredObject]:
    return referred(cells[name] for name in names if name in cells and name != OWNER)


@contextmanager
def _told(call: Call) -> Iterator[None]:
    """Failures of the store as errors that name the call."""
    try:
        yield
    except StoreFailure as failure:
        raise as_data_plane_error(failure, call.site.call, call.site.partition, call.site.keys) from failure
