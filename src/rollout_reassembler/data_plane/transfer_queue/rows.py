"""What one call does on the wire. Each step is a round trip, so each step is here for a reason.

    put    1 number the keys (creates them)   2 values to the store   3 tags   4 tell the controller
    get    1 number the keys                  2 values from the store
    clear  1 number the keys   2 hide them from readers   3 drop the values   4 drop the numbers
    tags   1 number the keys (their tags come along)

The controller numbers rows with *global indexes*, and hands an index out again once its row was
cleared. It answers a question about keys without saying which of them it does not know, and it
reports a column only if all rows asked for have it. So a healthy answer is one with as many rows as
keys and with every column; for any other one `read` finds out, with more questions, which rows are
missing.

Between two steps of one call another client may clear a row, and a third may get its index. So each
put also writes whose row this is, into a column of our own, and each read checks it: a row that
another one replaced is missing, never returned under the wrong key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.zmq_utils import ZMQRequestType

from rollout_reassembler.data_plane.base import Tags
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, Peer
from rollout_reassembler.data_plane.transfer_queue.checkpoint import load_queue, save_queue
from rollout_reassembler.data_plane.transfer_queue.queue_errors import translated
from rollout_reassembler.data_plane.transfer_queue.store import ValueStore
from rollout_reassembler.data_plane.transfer_queue.wire import QueueValues, field_schema

OWNER = "__owner__"
"""The column that says whose row it is: partition and key."""

_SET_ASIDE = "rollout_reassembler.set_aside"
_SET_ASIDE_AT_ONCE = 8192

_READ_ATTEMPTS = 5
"""How often a read starts over because rows were written or cleared while it ran."""


@dataclass(frozen=True)
class RowsRead:
    """Values by column, one for each of `keys`, and the keys that could not be read."""

    keys: list[str]
    columns: dict[str, list[Any]]
    missing: list[str] = field(default_factory=list)


class QueueRows:
    """The rows of one queue, over this process's sockets. Its coroutines run on the loop of `calls.py`, in a task each.

    `peers` are the processes that it talks to.
    """

    def __init__(self, queue: AsyncTransferQueueClient, store: ValueStore, peers: Sequence[Peer]) -> None:
        self.peers = tuple(peers)
        self._queue = queue
        self._store = store

    async def put(
        self,
        site: CallSite,
        partition: str,
        keys: list[str],
        columns: Mapping[str, QueueValues],
        tags: Sequence[Tags] | None,
    ) -> None:
        """Write columns, set tags, then make the columns readable: who can read or claim a row has its tags."""
        async with translated(site):
            meta = await self._numbered(partition, keys, with_values=bool(columns))
            if len(meta) != len(keys):
                raise site.failed(f"the controller numbered {len(meta)} of {len(keys)} rows")
            owned = {**columns, OWNER: _owners(partition, keys)} if columns else {}
            backend_meta = await self._store.put(meta, owned) if owned else {}
            if tags is not None:
                await self._set_tags(partition, meta, tags)
            if owned:
                await self._announce(site, partition, meta.global_indexes, owned, backend_meta)
                await self._store.forget(meta, backend_meta)

    async def read(
        self, site: CallSite, partition: str, keys: list[str], names: list[str], *, partial: bool
    ) -> RowsRead:
        """The columns of the keys that can be read (each named once), in their order.

        Without `partial` the answer to a read with missing rows holds no columns.
        """
        async with translated(site):
            wanted, suspects, owned = keys, set[str](), [*names, OWNER]
            for _ in range(_READ_ATTEMPTS):
                if not wanted or (len(wanted) < len(keys) and not partial):
                    return RowsRead([], {name: [] for name in names}, _without(keys, wanted))
                meta = await self._queue.async_kv_retrieve_meta(wanted, partition)
                if len(meta) < len(wanted) or not set(owned) <= set(meta.field_names):
                    wanted = await self._readable(partition, wanted, meta, owned)
                    continue
                try:
                    columns = await self._store.get(meta, owned)
                except KeyError:
                    wanted = await self._held(wanted, meta, owned)
                    continue
                owners = zip(wanted, columns.pop(OWNER), _owners(partition, wanted), strict=True)
                replaced = {key for key, owner, expected in owners if owner != expected}
                if not replaced:
                    return RowsRead(wanted, columns, _without(keys, wanted))
                # Most likely cleared a moment ago: the controller is asked anew, and believed once.
                wanted = [key for key in wanted if key not in replaced & suspects]
                suspects |= replaced
            raise site.failed("rows kept being written or cleared while they were read; read again")

    async def tags(self, site: CallSite, partition: str, keys: list[str]) -> dict[str, Tags]:
        """The tags of those keys (each named once) that are there."""
        async with translated(site):
            meta = await self._queue.async_kv_retrieve_meta(keys, partition)
            if len(meta) == len(keys):
                return dict(zip(keys, meta.custom_meta, strict=True))
            known = await self._keys_of(partition, meta)
            return {key: tags for key, tags in zip(known, meta.custom_meta, strict=True) if key is not None}

    async def list_all(self, site: CallSite, partition: str) -> dict[str, Tags]:
        """All keys of the partition with their tags."""
        async with translated(site):
            listed = await self._queue.async_kv_list(partition)
            tags: dict[str, Tags] = listed.get(partition, {})
            return tags

    async def clear(self, site: CallSite, partition: str, keys: list[str]) -> None:
        """Drop the rows of those keys that are there.

        When a storage unit does not answer, the numbers stay, so that the same clear can be tried
        again; the rows are hidden from readers by then.
        """
        async with translated(site):
            meta = await self._found(partition, keys)
            if len(meta) == 0:
                return
            await self._queue._mark_clearing_in_controller(meta)
            await self._store.clear(meta)
            await self._queue._clear_meta_in_controller(meta)

    async def claim(
        self, site: CallSite, partition: str, task: str, names: list[str], limit: int
    ) -> tuple[list[str], list[Tags]]:
        """Up to `limit` rows that hold these columns and that the task has not had, as keys and tags.

        Asking the controller for more rows than there are either fails or stops it for seconds,
        depending on who started it. So what is there is counted first.
        """
        async with translated(site):
            ready = await self._count_ready(partition, task, names)
            if ready == 0:
                return [], []
            meta = await self._queue.async_get_meta(names, min(limit, ready), partition, task_name=task)
            if len(meta) == 0:
                return [], []
            keys = await self._queue.async_kv_retrieve_keys(meta.global_indexes, partition)
            claimed = [(key, tags) for key, tags in zip(keys, meta.custom_meta, strict=True) if key is not None]
            return [key for key, _ in claimed], [tags for _, tags in claimed]

    async def is_consumed(self, site: CallSite, partition: str, task: str) -> bool:
        """Whether the task has claimed every row that is there; true when there is none."""
        async with translated(site):
            _, status = await self._queue.async_get_consumption_status(task, partition)
            return status is None or bool((status == 1).all())

    async def save(self, site: CallSite, directory: Path, metadata: Mapping[str, Any]) -> None:
        """Write a checkpoint of the whole queue."""
        async with translated(site):
            await save_queue(self._queue, directory, metadata)

    async def load(self, site: CallSite, directory: Path) -> dict[str, Any]:
        """Replace the whole queue with a checkpoint; its metadata."""
        async with translated(site):
            return await load_queue(site, self._queue, directory)

    async def set_numbers_aside(self, site: CallSite, count: int) -> None:
        """Have the controller hand out this many other numbers before one that is freed comes back.

        It gives freed numbers to new rows, the longest free ones first; of a new queue none is free. A call
        that numbered its rows and is then held up would meet other rows under them soon.
        """
        async with translated(site):
            for start in range(0, count, _SET_ASIDE_AT_ONCE):
                keys = [str(number) for number in range(start, min(start + _SET_ASIDE_AT_ONCE, count))]
                await self._queue.async_kv_retrieve_meta(keys, _SET_ASIDE, create=True)
            await self._queue._clear_partition_in_controller(_SET_ASIDE)

    def close(self) -> None:
        """Close this process's sockets. On the loop thread, which they belong to, once no call is under way."""
        self._queue.close()

    async def _numbered(self, partition: str, keys: list[str], *, with_values: bool) -> BatchMeta:
        """What a put is told of its rows, which are there from here on."""
        return await self._queue.async_kv_retrieve_meta(keys, partition, create=True)

    async def _found(self, partition: str, keys: list[str]) -> BatchMeta:
        """What a clear is told of those rows that are there."""
        return await self._queue.async_kv_retrieve_meta(keys, partition)

    async def _announce(
        self,
        site: CallSite,
        partition: str,
        global_indexes: list[int],
        columns: Mapping[str, QueueValues],
        backend_meta: Mapping[int, Any],
    ) -> None:
        """Tell the controller that the values are stored; rows are readable from here on.

        The queue's own client only logs when this fails, and its put then looks like a success.
        """
        schema = {name: field_schema(values, global_indexes) for name, values in columns.items()}
        answer = await self._ask(
            ZMQRequestType.NOTIFY_DATA_UPDATE,
            ZMQRequestType.NOTIFY_DATA_UPDATE_ACK,
            {
                "partition_id": partition,
                "global_indexes": global_indexes,
                "field_schema": schema,
                "custom_backend_meta": dict(backend_meta),
            },
        )
        if not answer["success"]:
            raise site.failed("the controller refused the columns: their types do not fit those of earlier rows")

    async def _set_tags(self, partition: str, meta: BatchMeta, tags: Sequence[Tags]) -> None:
        """Merge into the tags that came with `meta`. Two clients that tag one row at a time may lose a tag."""
        merged = {
            index: {**old, **new} for index, old, new in zip(meta.global_indexes, meta.custom_meta, tags, strict=True)
        }
        await self._ask(
            ZMQRequestType.SET_CUSTOM_META,
            ZMQRequestType.SET_CUSTOM_META_RESPONSE,
            {"partition_custom_meta": {partition: merged}},
        )

    async def _ask(self, request: ZMQRequestType, response: ZMQRequestType, body: dict[str, Any]) -> dict[str, Any]:
        """One round trip to the controller; the body of its answer."""
        async with self._queue.controller_rpc_pool.alease(self._queue._controller) as socket:
            message = await self._queue._request_controller(socket, request, response, body)
            answer: dict[str, Any] = message.body
            return answer

    async def _keys_of(self, partition: str, meta: BatchMeta) -> list[str | None]:
        """The key of each row of `meta`; `None` for one that was cleared meanwhile."""
        if len(meta) == 0:
            return []
        keys: list[str | None] = await self._queue.async_kv_retrieve_keys(meta.global_indexes, partition)
        return keys

    async def _readable(self, partition: str, wanted: list[str], meta: BatchMeta, names: list[str]) -> list[str]:
        """Those of `wanted` whose every column was announced: neither unknown, nor half written, nor being cleared."""
        keys = await self._keys_of(partition, meta)
        produced = await self._produced(partition, names)
        readable = {key for key, index in zip(keys, meta.global_indexes, strict=True) if index in produced}
        return [key for key in wanted if key in readable]

    async def _held(self, wanted: list[str], meta: BatchMeta, names: list[str]) -> list[str]:
        """Those of `wanted` that the store really holds, found row by row. For rows that it lost."""

        async def is_held(position: int) -> bool:
            try:
                await self._store.get(meta.select_samples([position]), names)
            except KeyError:
                return False
            return True

        held = await asyncio.gather(*(is_held(position) for position in range(len(wanted))))
        return [key for key, is_there in zip(wanted, held, strict=True) if is_there]

    async def _produced(self, partition: str, names: list[str]) -> set[int]:
        """The global indexes of all rows of the partition that hold these columns."""
        indexes, status = await self._queue.async_get_production_status(names, partition)
        if indexes is None or status is None:
            return set()
        return set(indexes[(status == 1).all(dim=1)].tolist())

    async def _count_ready(self, partition: str, task: str, names: list[str]) -> int:
        produced = await self._produced(partition, names)
        indexes, status = await self._queue.async_get_consumption_status(task, partition)
        if indexes is None or status is None:
            return 0
        return len(produced.difference(indexes[status == 1].tolist()))


def _owners(partition: str, keys: Sequence[str]) -> list[bytes]:
    return [f"{partition}\n{key}".encode() for key in keys]


def _without(keys: Sequence[str], found: Sequence[str]) -> list[str]:
    there = set(found)
    return [key for key in keys if key not in there]
