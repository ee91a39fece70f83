"""What one call does on the wire. Each step is a round trip, so each step is here for a reason.

    put    1 number the keys (creates them)   2 values to the store   3 tags; then: the values are there
           or the same in three calls, 1 reserve (a look-up comes along)   2 store   3 announce
    get    1 number the keys                  2 values from the store
    clear  1 number the keys   2 hide them from readers   3 drop the values   4 drop the numbers
    tags   1 number the keys (their tags come along)

The two requests of a put's last step are on their way together: the controller serves what comes down one
socket in its order. So it does a reservation's numbering and look-up, and an announcement with the
question behind it whose its numbers are now: those of rows that were cleared meanwhile are nobody's, no key
leads to them, and what was written for them is taken back.

The controller does not say which keys it does not know, nor which rows lack a column (`controller.py`). So a
healthy answer is one with as many rows as keys and with every column; for any other one `read` finds
out, with more questions, which rows are missing.

Between two steps of one call another client may clear a row, and a third may get its index. So each
put also writes whose row this is, into a column of our own, and each read checks it: a row that
another one replaced is missing, never returned under the wrong key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.zmq_utils import ZMQRequestType

from rollout_reassembler.data_plane.base import Reservation, Tags
from rollout_reassembler.data_plane.columns import refuse_condemned
from rollout_reassembler.data_plane.transfer_queue.controller import QueueController
from rollout_reassembler.data_plane.transfer_queue.epoch import is_mark, new_epoch, read_epoch, write_epoch
from rollout_reassembler.data_plane.transfer_queue.sockets import Call, QueueSockets, Refusal, Reply, all_bodies
from rollout_reassembler.data_plane.transfer_queue.store import OWNER, ValueStore
from rollout_reassembler.data_plane.transfer_queue.wire import QueueValues, field_schema

_REFUSED = "the controller refused the columns: their types do not fit those of earlier rows"

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

    def __init__(self, sockets: QueueSockets, controller: QueueController, store: ValueStore) -> None:
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
        before = self._store.before_put(call, partition, keys) if columns else {}
        meta = _with_cells(self.controller.meta_of(call, partition, keys, create=True), before)
        if len(meta) != len(keys):
            raise call.site.failed(f"the controller numbered {len(meta)} of {len(keys)} rows")
        if columns:
            refuse_condemned(partition, keys, meta.custom_meta)
        owned = {**columns, OWNER: _owners(partition, keys)} if columns else {}
        backend_meta = self._store.put(call, meta, owned) if owned else {}
        news = [self._send_tags(call, partition, meta, tags)] if tags is not None else []
        if owned:
            news.append(self._announce(call, partition, meta.global_indexes, owned, backend_meta))
        answers = all_bodies(news)
        if owned:
            if not answers[-1]["success"]:
                raise call.site.failed(_REFUSED)
            self._store.forget(call, meta, backend_meta)
        call.require_time()

    def reserve(self, call: Call, partition: str, keys: list[str], look_up: tuple[str, str] | None) -> Reservation:
        """Number the keys, then look up one more; both in one round trip, in this order."""
        numbering = self.controller.send_numbering(call, partition, keys, create=True)
        looking = self.controller.send_numbering(call, look_up[0], [look_up[1]], create=False) if look_up else None
        meta: BatchMeta = numbering.body()["metadata"]
        found: BatchMeta | None = looking.body()["metadata"] if looking else None
        if len(meta) != len(keys):
            raise call.site.failed(f"the controller numbered {len(meta)} of {len(keys)} rows")
        return Reservation(
            partition_id=partition,
            sample_ids=tuple(keys),
            numbers=tuple(meta.global_indexes),
            tags=tuple(dict(tags) for tags in meta.custom_meta),
            is_readable=OWNER in meta.field_names,
            looked_up=dict(found.custom_meta[0]) if found is not None and len(found) else None,
        )

    def store(
        self, call: Call, partition: str, keys: list[str], numbers: list[int], columns: Mapping[str, QueueValues]
    ) -> dict[str, Any]:
        """Write the columns of numbered rows; returns what the controller is to be told of them."""
        owned = {**columns, OWNER: _owners(partition, keys)}
        backend_meta = self._store.put(call, BatchMeta(numbers, [partition] * len(numbers)), owned)
        return self._news(partition, numbers, owned, backend_meta)

    def announce(self, call: Call, partition: str, news: dict[str, Any], tags: Mapping[int, Tags] | None) -> None:
        """Set tags by number, then tell of the stored columns; take back what concerns rows that were cleared."""
        tagged = []
        if tags:
            body = {"partition_custom_meta": {partition: dict(tags)}}
            tagged.append(self.controller.send(call, ZMQRequestType.SET_CUSTOM_META, body))
        told = self.controller.send(call, ZMQRequestType.NOTIFY_DATA_UPDATE, news)
        numbers = news["global_indexes"]
        question = {"global_indexes": numbers, "partition_id": partition}
        asked = self.controller.send(call, ZMQRequestType.KV_RETRIEVE_KEYS, question)
        *_, announced, answer = all_bodies([*tagged, told, asked])
        if not announced["success"]:
            raise call.site.failed(_REFUSED)
        owners = answer["keys"] or [None] * len(numbers)
        gone = [number for number, owner in zip(numbers, owners, strict=True) if owner is None]
        if gone:
            self._take_back(call, partition, gone, news["custom_backend_meta"])

    def release(self, call: Call, partition: str, keys: list[str], numbers: Collection[int]) -> None:
        """Drop the rows of those keys that have these numbers."""
        meta = self._found(call, partition, keys)
        positions = [position for position, number in enumerate(meta.global_indexes) if number in numbers]
        if positions:
            self._drop(call, meta.select_samples(positions))

    def read(self, call: Call, partition: str, keys: list[str], names: list[str], *, partial: bool) -> RowsRead:
        """The columns of the keys that can be read (each named once), in their order.

        Without `partial` the answer to a read with missing rows holds no columns.
        """
        wanted, suspects, owned = keys, set[str](), [*names, OWNER]
        for _ in range(_READ_ATTEMPTS):
            if not wanted or (len(wanted) < len(keys) and not partial):
                return RowsRead([], {name: [] for name in names}, _without(keys, wanted))
            meta = self.controller.meta_of(call, partition, wanted)
            if len(meta) < len(wanted) or not set(owned) <= set(meta.field_names):
                wanted = self.controller.readable(call, partition, wanted, meta, owned)
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
        meta = self.controller.meta_of(call, partition, keys)
        if len(meta) == len(keys):
            return dict(zip(keys, meta.custom_meta, strict=True))
        known = self.controller.keys_of(call, partition, meta)
        return {key: tags for key, tags in zip(known, meta.custom_meta, strict=True) if key is not None}

    def clear(self, call: Call, partition: str, keys: list[str]) -> None:
        """Drop the rows of those keys that are there.

        When a storage unit does not answer, the numbers stay, so that the same clear can be tried
        again; the rows are hidden from readers by then.
        """
        meta = self._found(call, partition, keys)
        if len(meta) > 0:
            self._drop(call, meta)

    def _drop(self, call: Call, meta: BatchMeta) -> None:
        rows = {"global_indexes": meta.global_indexes, "partition_ids": meta.partition_ids}
        self.controller.ask(call, ZMQRequestType.MARK_CLEARING, rows)
        self._store.clear(call, meta)
        self.controller.ask(call, ZMQRequestType.CLEAR_META, rows)

    def claim(
        self, call: Call, partition: str, task: str, names: list[str], limit: int
    ) -> tuple[list[str], list[Tags]]:
        """Up to `limit` rows that hold these columns and that the task has not had, as keys and tags.

        Asking the controller for more rows than there are either fails or stops it for seconds,
        depending on who started it. So what is there is counted first.
        """
        ready = self.controller.count_ready(call, partition, task, names)
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
        answer = self.controller.ask(call, ZMQRequestType.GET_META, question)
        meta: BatchMeta = answer["metadata"]
        keys = self.controller.keys_of(call, partition, meta)
        claimed = [(key, tags) for key, tags in zip(keys, meta.custom_meta, strict=True) if key is not None]
        return [key for key, _ in claimed], [tags for _, tags in claimed]

    def is_consumed(self, call: Call, partition: str, task: str) -> bool:
        """Whether the task has claimed every row that is there; true when there is none."""
        _, status = self.controller.consumption(call, partition, task)
        return status is None or bool((status == 1).all())

    def clock(self) -> float | None:
        """How far the controller's clock, in unix seconds, is ahead of `time.monotonic()`, if it has answered yet."""
        return self.sockets.clocks.get(self.controller.peer)

    def first_clock(self, call: Call) -> float:
        """The same, after an answer for that alone."""
        read_epoch(call, self.controller.peer)
        return self.sockets.clocks[self.controller.peer]

    def begin_epoch(self, call: Call) -> None:
        """Give a queue that was just started its epoch."""
        write_epoch(call, self.controller.peer, new_epoch())

    def epoch(self, call: Call) -> tuple[str, bool]:
        """The queue's epoch, and whether it is not the mark of a save or a load."""
        found = read_epoch(call, self.controller.peer)
        return found, not is_mark(found)

    def close(self, seconds: float) -> None:
        """Close this process's sockets and its store; calls that are under way end with an error."""
        self.sockets.close(seconds)
        self._store.close()

    def _found(self, call: Call, partition: str, keys: list[str]) -> BatchMeta:
        """What a clear is told of those rows that are there."""
        meta = self.controller.meta_of(call, partition, keys)
        return _with_cells(meta, self._store.before_clear(call, partition, meta))

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
        news = self._news(partition, global_indexes, columns, backend_meta)
        return self.controller.send(call, ZMQRequestType.NOTIFY_DATA_UPDATE, news)

    def _news(
        self,
        partition: str,
        global_indexes: list[int],
        columns: Mapping[str, QueueValues],
        backend_meta: Mapping[int, Any],
    ) -> dict[str, Any]:
        """What the controller is told of values that are stored."""
        return {
            "partition_id": partition,
            "global_indexes": global_indexes,
            "field_schema": {name: field_schema(values, global_indexes) for name, values in columns.items()},
            "custom_backend_meta": dict(backend_meta),
        }

    def _take_back(self, call: Call, partition: str, numbers: list[int], cells: Mapping[int, Any]) -> None:
        """Drop values and traces of numbers that belong to no key any more, as long as no other row has them."""
        partitions = [partition] * len(numbers)
        stray = BatchMeta(numbers, partitions, _custom_backend_meta=[cells.get(number, {}) for number in numbers])
        self._store.clear(call, stray)
        # Refused once all else is done, where it is to free numbers that are free.
        with suppress(Refusal):
            self.controller.ask(
                call, ZMQRequestType.CLEAR_META, {"global_indexes": numbers, "partition_ids": partitions}
            )

    def _send_tags(self, call: Call, partition: str, meta: BatchMeta, tags: Sequence[Tags]) -> Reply:
        """Merge into the tags that came with `meta`. Two clients that tag one row at a time may lose a tag."""
        merged = {
            index: {**old, **new} for index, old, new in zip(meta.global_indexes, meta.custom_meta, tags, strict=True)
        }
        news = {"partition_custom_meta": {partition: merged}}
        return self.controller.send(call, ZMQRequestType.SET_CUSTOM_META, news)

    def _held(self, call: Call, wanted: list[str], meta: BatchMeta, names: list[str]) -> list[str]:
        """Those of `wanted` that the store holds, found by halves, or that were written since."""

        def held(positions: list[int]) -> list[int]:
            try:
                self._store.get(call, meta.select_samples(positions), names)
            except KeyError:
                middle = len(positions) // 2
                return [*held(positions[:middle]), *held(positions[middle:])] if middle else []
            return positions

        positions = held(list(range(len(wanted))))
        lost = sorted(set(range(len(wanted))) - set(positions))
        again = (
            self._store.rewritten(call, [wanted[at] for at in lost], meta.select_samples(lost), names) if lost else []
        )
        kept = {*again, *(wanted[at] for at in positions)}
        return [key for key in wanted if key in kept]


def _owners(partition: str, keys: Sequence[str]) -> list[bytes]:
    return [f"{partition}\n{key}".encode() for key in keys]


def _without(keys: Sequence[str], found: Sequence[str]) -> list[str]:
    there = set(found)
    return [key for key in keys if key not in there]


def _with_cells(meta: BatchMeta, cells: Mapping[int, Any]) -> BatchMeta:
    """The rows with what the store wants to be told of them."""
    for index, row in zip(meta.global_indexes, meta._custom_backend_meta, strict=True):
        if index in cells:
            row[OWNER] = cells[index]
    return meta
