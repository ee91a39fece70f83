"""One process's connection to a Mooncake store: objects by name, and errors that say what happened.

What is odd about the store ends here:

- It answers a read with no bytes at all, for an object that is not there as for one whose host is
  dead; so each read is checked against the size and CRC that it must have, and asked about if it fails.
- Bytes are copied through the client's own buffer. Registering others may fail half way, and then stays.
- Objects are pinned: without that it drops the oldest ones when it fills up.
- A removal is forced: without that it is refused for ten seconds after a read.
- What one client moves at a time must fit its buffer, or is refused like a value that cannot be read;
  so calls are cut into parts, and wait for one another.

All calls block, and end by themselves (`environment.py`). They may come from several threads.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import uuid4

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneUnavailable
from rollout_reassembler.data_plane.config import MooncakeCpuBackendConfig
from rollout_reassembler.data_plane.mooncake.environment import import_store, require_protocol
from rollout_reassembler.data_plane.mooncake.objects import StoredObject, is_intact
from rollout_reassembler.data_plane.ports import why_unreachable

T = TypeVar("T")

_NO_ROOM = -200
_NOT_FOUND = -704
_TRANSFER_FAILED = -800
_RPC_FAILED = (-900, -901)
_BATCH = 4096
_KNOCK_SECONDS = 5.0
_SHARE = 2
"""A call is cut into parts of at most one in so many of the usable buffer, so that several run at a time."""


class StoreFailure(Exception):
    """The store did not do what it was asked to. `is_gone`: a part of it cannot be reached."""

    def __init__(self, what: str, *, is_gone: bool) -> None:
        self.what = what
        self.is_gone = is_gone
        super().__init__(what)


class MooncakeStore:
    """The objects of one session of the controller; those of other sessions are out of reach."""

    session: str
    """May be changed while no call is under way."""

    def __init__(self, cfg: MooncakeCpuBackendConfig, *, session: str, segment_size: int = 0) -> None:
        """Connect, and give `segment_size` bytes of this process's memory to the store.

        Raises `DataPlaneUnavailable` when the master cannot be reached or the protocol cannot be had.
        """
        require_protocol(cfg)
        self._module = import_store()
        _knock(cfg.master_server_address)
        self.address = cfg.master_server_address
        self._buffer = _Buffer(cfg.local_buffer_size // 2)
        self.session = session
        self._client = self._module.MooncakeDistributedStore()
        code = self._client.setup(
            cfg.local_hostname,
            cfg.metadata_server,
            segment_size,
            cfg.local_buffer_size,
            cfg.protocol,
            cfg.device_name,
            cfg.master_server_address,
        )
        if code != 0:
            what = f"no connection to the Mooncake master at {self.address} over {cfg.protocol} (code {code})"
            raise DataPlaneUnavailable(what, call="connect")
        self.segment_size = segment_size
        self.segment_name: str = self._client.get_hostname()

    def put(self, objects: Sequence[tuple[StoredObject, bytes]], *, here: bool = False) -> None:
        """Write new objects, in this process's own segment as far as there is room if `here`.

        Raises `StoreFailure`; some of the objects may have been written then.
        """
        config = self._module.ReplicateConfig()
        config.with_hard_pin = True
        if here:
            config.preferred_segment = self.segment_name
        for part, size in self._buffer.cut(objects, [stored.size for stored, _ in objects]):
            keys = [self._prefix + stored.name for stored, _ in part]
            with self._buffer.taken(size):
                code = self._client.put_batch(keys, [content for _, content in part], config)
            self._check(code)

    def get(self, objects: Sequence[StoredObject]) -> dict[str, bytes]:
        """The contents, by name, of those objects that are there.

        Raises `StoreFailure` when one that is there cannot be read.
        """
        contents: dict[str, bytes] = {}
        for part, size in self._buffer.cut(objects, [stored.size for stored in objects]):
            with self._buffer.taken(size):
                read = self._client.get_batch([self._prefix + stored.name for stored in part])
            for stored, content in zip(part, read, strict=True):
                if is_intact(stored, content):
                    contents[stored.name] = content
        unread = [stored.name for stored in objects if stored.name not in contents]
        unreadable = [name for name, is_there in zip(unread, self.are_there(unread), strict=True) if is_there]
        if unreadable:
            what = f"{len(unreadable)} values are listed and cannot be read: a memory host is gone or does not answer"
            raise StoreFailure(f"{what} (object {unreadable[0]!r})", is_gone=True)
        return contents

    def are_there(self, names: Sequence[str]) -> list[bool]:
        """Whether the master lists each object. Raises `StoreFailure`."""
        found: list[bool] = []
        for start in range(0, len(names), _BATCH):
            codes = self._client.batch_is_exist([self._prefix + name for name in names[start : start + _BATCH]])
            for code in codes:
                self._check(min(code, 0))
            found += [code == 1 for code in codes]
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there count as removed. Raises `StoreFailure`."""
        for start in range(0, len(names), _BATCH):
            codes = self._client.batch_remove([self._prefix + name for name in names[start : start + _BATCH]], True)
            for code in codes:
                self._check(0 if code == _NOT_FOUND else code)

    def remove_session(self) -> int:
        """Remove all objects of the session; how many there were."""
        count: int = self._client.remove_by_regex(f"^{re.escape(self._prefix)}", True)
        self._check(min(count, 0))
        return count

    def places(self, names: Sequence[str]) -> dict[str, str]:
        """The endpoint of the segment that holds each object, for those that are there."""
        places: dict[str, str] = {}
        for start in range(0, len(names), _BATCH):
            keys = [self._prefix + name for name in names[start : start + _BATCH]]
            for key, replicas in self._client.batch_get_replica_desc(keys).items():
                if replicas:
                    descriptor = replicas[0].get_memory_descriptor().buffer_descriptor
                    places[key.removeprefix(self._prefix)] = descriptor.transport_endpoint
        return places

    def endpoint(self) -> str:
        """The endpoint of this process's own segment. To be asked while the segment has room."""
        stored, content = StoredObject(f"probe-{uuid4().hex}", 1, 0), b"\0"
        self.put([(stored, content)], here=True)
        endpoint = self.places([stored.name])[stored.name]
        self.remove([stored.name])
        return endpoint

    @property
    def _prefix(self) -> str:
        return f"rr/{self.session}/"

    def close(self) -> None:
        """Disconnect; a segment that this process gave goes with it."""
        self._client.close()

    def _check(self, code: int) -> None:
        if code == 0:
            return
        if code in _RPC_FAILED:
            raise StoreFailure(f"the Mooncake master at {self.address} does not answer (code {code})", is_gone=True)
        if code == _TRANSFER_FAILED:
            raise StoreFailure("a memory host is gone or does not answer", is_gone=True)
        if code == _NO_ROOM:
            raise StoreFailure("no room in the store: clear rows, or add memory hosts", is_gone=False)
        raise StoreFailure(f"the Mooncake store refused (code {code})", is_gone=False)


def _knock(address: str) -> None:
    """Raise `DataPlaneUnavailable` when nothing listens there; the store's own attempts take long to say so."""
    host, _, port = address.rpartition(":")
    if error := why_unreachable(host, int(port), _KNOCK_SECONDS):
        raise DataPlaneUnavailable(f"no Mooncake master listens at {address}: {error}", call="connect") from error


class _Buffer:
    """The part of a client's buffer that may be in use at a time. The other half is for fragments."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = size
        self._changed = threading.Condition()

    def cut(self, items: Sequence[T], sizes: Sequence[int]) -> Iterator[tuple[list[T], int]]:
        """The items in parts that are small enough for one call, with the size of each part."""
        part: list[T] = []
        total = 0
        for item, size in zip(items, sizes, strict=True):
            if size > self._size:
                what = f"a value of {size} bytes does not fit a client's buffer; raise local_buffer_size"
                raise StoreFailure(f"{what} to {2 * size} at least", is_gone=False)
            if part and (total + size > self._size // _SHARE or len(part) == _BATCH):
                yield part, total
                part, total = [], 0
            part.append(item)
            total += size
        if part:
            yield part, total

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Hold so many bytes for one call."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def as_data_plane_error(
    failure: StoreFailure, call: str, partition: str = "", keys: Sequence[str] = ()
) -> DataPlaneError:
    """The failure as callers of a data plane meet it."""
    kind: Any = DataPlaneUnavailable if failure.is_gone else DataPlaneError
    error: DataPlaneError = kind(failure.what, call=call, partition=partition, keys=keys)
    return error
