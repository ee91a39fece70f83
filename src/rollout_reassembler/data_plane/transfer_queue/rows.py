"""What one call does on the wire. Each step is a round trip, so each step is here for a reason.

    put    1 number the keys (creates them)   2 values to the store   3 tags; then: the values are there
    get    1 number the keys                  2 values from the store
    clear  1 number the keys   2 hide them from readers   3 drop the values   4 drop the numbers
    tags   1 number the keys (their tags come along)

The two requests of a put's last step are on their way together: the controller serves what comes down one
socket in its order.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.zmq_utils import ZMQRequestType

from rollout_reassembler.data_plane.base import Tags
from rollout_reassembler.data_plane.transfer_queue.calls import Peer
from rollout_reassembler.data_plane.transfer_queue.checkpoint import load_queue, save_queue
from rollout_reassembler.data_plane.transfer_queue.epoch import is_mark, new_epoch, read_epoch, write_epoch
from rollout_reassembler.data_plane.transfer_queue.sockets import Call, QueueSockets, Reply, all_bodies
from rollout_reassembler.data_plane.transfer_queue.store import SimpleStore, ValueStore
from rollout_reassembler.data_plane.transfer_queue.wire import QueueValues, field_schema

OWNER = "__owner__"
"""The column that says whose row it is: partition and key."""

_OWN_PARTITIONS = "rollout_reassembler."
_SET_ASIDE = "rollout_reassembler.set_aside"
_SET_ASIDE_AT_ONCE = 8192

_READ_ATTEMPTS = 20
"""How often a read starts over because rows were written or cleared while it ran."""


@dataclass(frozen=True)
class RowsRead:
    """Values by column, one for each of `keys`, and the keys that could not be read."""

    keys: list[str]
    columns: dict[str, list[Any]]
    missing: list[str] = field(default_factory=list)


class QueueRows:
    """The rows of one queue, over this process's sockets. What it does, it does within a `Call` of theirs."""

    def __init__(self, sockets: QueueSockets, controller: Peer, store: ValueStore) -> None:
        self.sockets = sockets
        self.controller = controller
        self._store = store

    def put(
        self,
        call: Call,
        partition: str,
        keys: list[str],
        columns: Mapping[str, QueueValues],
        tags: Sequence[Tags] | None,
    ) -> None:
        """Write columns, set tags, then make the columns readable: who can read or claim a row has its tags."""
        meta = self._numbered(call, partition, keys, with_values=bool(columns))
        if len(meta) != len(keys):
            raise call.site.failed(f"the controller numbered {len(meta)} of {len(keys)} rows")
        owned = {**columns, OWNER: _owners(partition, keys)} if columns else {}
        backend_meta = self._store.put(call, meta, owned) if owned else {}
        news = [self._send_tags(call, partition, meta, tags)] if tags is not None else []
        if owned:
            news.append(self._announce(call, partition, meta.global_indexes, owned, backend_meta))
        answers = all_bodies(news)
        if owned:
            if not answers[-1]["success"]:
                what = "the controller refused the columns: their types do not fit those of earlier rows"
                raise call.site.failed(what)
            self._store.forget(call, meta, backend_meta)

    def read(self, call: Call, partition: str, keys: list[str], names: list[str], *, partial: bool) -> RowsRead:
        """The columns of the keys that can be read (each named once), in their order.

        Without `partial` the answer to a read with missing rows holds no columns.
        """
        wanted, suspects, owned = keys, set[str](), [*names, OWNER]
        for _ in range(_READ_ATTEMPTS):
            if not wanted or (len(wanted) < len(keys) and not partial):
                return RowsRead([], {name: [] for name in names}, _without(keys, wanted))
            meta = self._meta_of(call, partition, wanted)
            if len(meta) < len(wanted) or not set(owned) <= set(meta.field_names):
                wanted = self._readable(call, partition, wanted, meta, owned)
                continue
            try:
                columns = self._store.get(call, meta, owned)
            except KeyError:
                wanted = self._held(call, wanted, meta, owned)
                continue
            owners = zip(wanted, columns.pop(OWNER), _owners(partition, wanted), strict=True)
            replaced = {key for key, owner, expected in owners if owner != expected}
            if not replaced:
                return RowsRead(wanted, columns, _without(keys, wanted))
            # Most likely cleared a moment ago: the controller is asked anew, and believed once.
            wanted = [key for key in wanted if key not in replaced & suspects]
            suspects |= replaced
        raise call.site.failed("rows kept being written or cleared while they were read; read again")

    def tags(self, call: Call, partition: str, keys: list[str]) -> dict[str, Tags]:
        """The tags of those keys (each named once) that are there."""
        meta = self._meta_of(call, partition, keys)
        if len(meta) == len(keys):
            return dict(zip(keys, meta.custom_meta, strict=True))
        known = self._keys_of(call, partition, meta)
        return {key: tags for key, tags in zip(known, meta.custom_meta, strict=True) if key is not None}

    def list_all(self, call: Call, partition: str) -> dict[str, Tags]:
        """All keys of the partition with their tags."""
        answer = self._ask(call, ZMQRequestType.KV_LIST, {"partition_id": partition})
        tags: dict[str, Tags] = answer["partition_info"].get(partition, {})
        return tags

    def partitions(self, call: Call) -> list[str]:
        """The ids of all partitions. Any controller that is there answers this."""
        request = ZMQRequestType.GET_LIST_PARTITIONS
        ids: list[str] = self._ask(call, request, {})["partition_ids"]
        return ids

    def clear(self, call: Call, partition: str, keys: list[str]) -> None:
        """Drop the rows of those keys that are there.

        When a storage unit does not answer, the numbers stay, so that the same clear can be tried
        again; the rows are hidden from readers by then.
        """
        meta = self._found(call, partition, keys)
        if len(meta) == 0:
            return
        rows = {"global_indexes": meta.global_indexes, "partition_ids": meta.partition_ids}
        self._ask(call, ZMQRequestType.MARK_CLEARING, rows)
        self._store.clear(call, meta)
        self._ask(call, ZMQRequestType.CLEAR_META, rows)

    def claim(
        self, call: Call, partition: str, task: str, names: list[str], limit: int
    ) -> tuple[list[str], list[Tags]]:
        """Up to `limit` rows that hold these columns and that the task has not had, as keys and tags.

        Asking the controller for more rows than there are either fails or stops it for seconds,
        depending on who started it. So what is there is counted first.
        """
        ready = self._count_ready(call, partition, task, names)
        if ready == 0:
            return [], []
        question = {
            "data_fields": names,
            "batch_size": min(limit, ready),
            "partition_id": partition,
            "mode": "fetch",
            "task_name": task,
            "sampling_config": None,
        }
        answer = self._ask(call, ZMQRequestType.GET_META, question)
        meta: BatchMeta = answer["metadata"]
        keys = self._keys_of(call, partition, meta)
        claimed = [(key, tags) for key, tags in zip(keys, meta.custom_meta, strict=True) if key is not None]
        return [key for key, _ in claimed], [tags for _, tags in claimed]

    def is_consumed(self, call: Call, partition: str, task: str) -> bool:
        """Whether the task has claimed every row that is there; true when there is none."""
        _, status = self._consumption(call, partition, task)
        return status is None or bool((status == 1).all())

    def save(self, call: Call, directory: Path, metadata: Mapping[str, Any]) -> None:
        """Write a checkpoint of the whole queue."""
        save_queue(call, self.controller, self._units(), directory, metadata)

    def load(self, call: Call, directory: Path) -> dict[str, Any]:
        """Replace the whole queue with a checkpoint; its metadata."""
        names = (name for name in self.partitions(call) if not name.startswith(_OWN_PARTITIONS))
        holds_rows = any(self.list_all(call, name) for name in names)
        return load_queue(call, self.controller, self._units(), directory, holds_rows=holds_rows)

    def begin_epoch(self, call: Call) -> None:
        """Give a queue that was just started its epoch."""
        write_epoch(call, self.controller, new_epoch())

    def epoch(self, call: Call) -> tuple[str, bool]:
        """The queue's epoch, and whether it is not the mark of a save or a load."""
        found = read_epoch(call, self.controller)
        return found, not is_mark(found)

    def set_numbers_aside(self, call: Call, count: int) -> None:
        """Have the controller hand out this many other numbers before one that is freed comes back.

        It gives freed numbers to new rows, the longest free ones first; of a new queue none is free. A call
        that numbered its rows and is then held up would meet other rows under them soon.
        """
        for start in range(0, count, _SET_ASIDE_AT_ONCE):
            keys = [str(number) for number in range(start, min(start + _SET_ASIDE_AT_ONCE, count))]
            self._meta_of(call, _SET_ASIDE, keys, create=True)
        request = ZMQRequestType.CLEAR_PARTITION
        self._ask(call, request, {"partition_id": _SET_ASIDE})

    def close(self, seconds: float) -> None:
        """Close this process's sockets; calls that are under way end with an error."""
        self.sockets.close(seconds)

    def _numbered(self, call: Call, partition: str, keys: list[str], *, with_values: bool) -> BatchMeta:
        """What a put is told of its rows, which are there from here on."""
        return self._meta_of(call, partition, keys, create=True)

    def _found(self, call: Call, partition: str, keys: list[str]) -> BatchMeta:
        """What a clear is told of those rows that are there."""
        return self._meta_of(call, partition, keys)

    def _meta_of(self, call: Call, partition: str, keys: list[str], *, create: bool = False) -> BatchMeta:
        """Numbers, tags and common columns of those rows that are there, or of all once they are created."""
        question = {"keys": keys, "partition_id": partition, "create": create}
        request = ZMQRequestType.KV_RETRIEVE_META
        return self._ask(call, request, question)["metadata"]

    def _announce(
        self,
        call: Call,
        partition: str,
        global_indexes: list[int],
        columns: Mapping[str, QueueValues],
        backend_meta: Mapping[int, Any],
    ) -> Reply:
        """Tell the controller that the values are stored; rows are readable from here on.

        The queue's own client only logs when this fails, and its put then looks like a success.
        """
        schema = {name: field_schema(values, global_indexes) for name, values in columns.items()}
        news = {
            "partition_id": partition,
            "global_indexes": global_indexes,
            "field_schema": schema,
            "custom_backend_meta": dict(backend_meta),
        }
        return self._send(call, ZMQRequestType.NOTIFY_DATA_UPDATE, news)

    def _send_tags(self, call: Call, partition: str, meta: BatchMeta, tags: Sequence[Tags]) -> Reply:
        """Merge into the tags that came with `meta`. Two clients that tag one row at a time may lose a tag."""
        merged = {
            index: {**old, **new} for index, old, new in zip(meta.global_indexes, meta.custom_meta, tags, strict=True)
        }
        news = {"partition_custom_meta": {partition: merged}}
        return self._send(call, ZMQRequestType.SET_CUSTOM_META, news)

    def _send(self, call: Call, request: ZMQRequestType, body: dict[str, Any]) -> Reply:
        return call.send(self.controller, request, body)

    def _ask(self, call: Call, request: ZMQRequestType, body: dict[str, Any]) -> dict[str, Any]:
        """One round trip to the controller; the body of its answer."""
        return call.ask(self.controller, request, body)

    def _units(self) -> Sequence[Peer]:
        assert isinstance(self._store, SimpleStore), "other stores have checkpoints of their own"
        return self._store.units

    def _keys_of(self, call: Call, partition: str, meta: BatchMeta) -> list[str | None]:
        """The key of each row of `meta`; `None` for one that was cleared meanwhile."""
        if len(meta) == 0:
            return []
        question = {"global_indexes": meta.global_indexes, "partition_id": partition}
        answer = self._ask(call, ZMQRequestType.KV_RETRIEVE_KEYS, question)
        keys: list[str | None] = answer["keys"]
        return keys

    def _readable(self, call: Call, partition: str, wanted: list[str], meta: BatchMeta, names: list[str]) -> list[str]:
        """Those of `wanted` whose every column was announced: neither unknown, nor half written, nor being cleared."""
        keys = self._keys_of(call, partition, meta)
        produced = self._produced(call, partition, names)
        readable = {key for key, index in zip(keys, meta.global_indexes, strict=True) if index in produced}
        return [key for key in wanted if key in readable]

    def _held(self, call: Call, wanted: list[str], meta: BatchMeta, names: list[str]) -> list[str]:
        """Those of `wanted` that the store really holds, found by halves. For rows that it lost."""

        def held(positions: list[int]) -> list[int]:
            try:
                self._store.get(call, meta.select_samples(positions), names)
            except KeyError:
                middle = len(positions) // 2
                return [*held(positions[:middle]), *held(positions[middle:])] if middle else []
            return positions

        return [wanted[position] for position in held(list(range(len(wanted))))]

    def _produced(self, call: Call, partition: str, names: list[str]) -> set[int]:
        """The global indexes of all rows of the partition that hold these columns."""
        question = {"partition_id": partition, "data_fields": names}
        answer = self._ask(call, ZMQRequestType.GET_PRODUCTION, question)
        indexes, status = answer["global_index"], answer["production_status"]
        if indexes is None or status is None:
            return set()
        return set(indexes[(status == 1).all(dim=1)].tolist())

    def _count_ready(self, call: Call, partition: str, task: str, names: list[str]) -> int:
        produced = self._produced(call, partition, names)
        indexes, status = self._consumption(call, partition, task)
        if indexes is None or status is None:
            return 0
        return len(produced.difference(indexes[status == 1].tolist()))

    def _consumption(self, call: Call, partition: str, task: str) -> tuple[Any, Any]:
        """The global indexes of the partition's rows, and which of them the task has claimed (1)."""
        question = {"partition_id": partition, "task_name": task}
        answer = self._ask(call, ZMQRequestType.GET_CONSUMPTION, question)
        return answer["global_index"], answer["consumption_status"]


def _owners(partition: str, keys: Sequence[str]) -> list[bytes]:
    return [f"{partition}\n{key}".encode() for key in keys]


def _without(keys: Sequence[str], found: Sequence[str]) -> list[str]:
    there = set(found)
    return [key for key in keys if key not in there]
