"""The `DataPlaneClient` on TransferQueue: deadlines, schemas and errors around the steps of `rows.py`.

The driver bootstraps and owns the queue, every other process of the Ray cluster only connects:

    plane = open_queue(cfg, bootstrap=True)      # driver; closing this one ends the queue
    plane = open_queue(cfg, bootstrap=False)     # actors and staging workers

What to know beyond `base.py`:

- Partitions are registered in the queue itself, in a partition of its own: its keys are partition
  ids, its tags their columns. So any client finds what another one registered.
- The queue gives the number of a cleared row to a later one, and a call acts on the numbers that it was
  told first. So whoever starts a queue has it set many numbers aside: two clients may then write or clear
  one key at the same time, and no other row suffers, unless one of them is held up for as long as it
  takes to write that many rows. Two clients that tag one row at the same time may lose a tag.
- A call runs in its caller's thread, with sockets of its own (`sockets.py`); any number run at a time.
- Connect after a fork, not before: a client does not work in a forked child, and says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rollout_reassembler.contract.errors import (
    PartitionNotRegistered,
    RowsMissing,
    SchemaViolation,
)
from rollout_reassembler.contract.messages import KVBatchMeta
from rollout_reassembler.data_plane.barrier import GATE_PARTITION, SharedGate
from rollout_reassembler.data_plane.base import (
    Column,
    FieldSpec,
    Reservation,
    SampleBatch,
    Schema,
    StoredSamples,
    Tags,
)
from rollout_reassembler.data_plane.columns import (
    checked_columns,
    checked_sample_ids,
    checked_schema,
    checked_tags,
    selected_fields,
)
from rollout_reassembler.data_plane.config import DataPlaneConfig, Deadlines
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite
from rollout_reassembler.data_plane.transfer_queue.environment import check_version, prepare_environment
from rollout_reassembler.data_plane.transfer_queue.wire import from_queue, to_queue

if TYPE_CHECKING:
    from rollout_reassembler.data_plane.transfer_queue.connection import Connection
    from rollout_reassembler.data_plane.transfer_queue.rows import QueueRows
    from rollout_reassembler.data_plane.transfer_queue.sockets import Call

_REGISTRY = "rollout_reassembler.partitions"
_SCHEMA_TAG = "schema"
_CLOSE_SECONDS = 20.0
_EPOCH_SETTLES = 5.0
_EPOCH_WATCH = 0.05

NUMBERS_SET_ASIDE = 1 << 16
"""So many rows are written, less those that live, before a new row gets the number of one that was cleared."""


class Checkpoints(Protocol):
    """How the state of a plane gets to disk and back. Raises `DataPlaneError`."""

    def save(self, directory: str, metadata: Mapping[str, Any]) -> None: ...

    def load(self, directory: str) -> dict[str, Any]: ...


def open_queue(cfg: DataPlaneConfig, *, bootstrap: bool) -> QueueDataPlane:
    """Connect to the TransferQueue of this Ray cluster; with `bootstrap` start one if there is none."""
    check_version()
    prepare_environment()
    # Only now: the queue reads its environment when it is imported.
    from rollout_reassembler.data_plane.transfer_queue import connection

    with ExitStack() as lifetime:
        started = connection.start_queue(cfg) if bootstrap else None
        if started is not None:
            lifetime.enter_context(started)
        connected = connection.attach(cfg)
        if started is not None:
            begin(connected.rows, cfg.deadlines)
        return queue_plane(connected, cfg, lifetime)


def queue_plane(connected: Connection, cfg: DataPlaneConfig, started: ExitStack | None = None) -> QueueDataPlane:
    """A client over a connection that is open already. It takes over and ends what this process has `started`."""
    from rollout_reassembler.data_plane.transfer_queue.checkpoint import QueueCheckpoints

    checkpoints = QueueCheckpoints(connected.rows, connected.units, cfg.deadlines.checkpoint)
    return QueueDataPlane(connected.rows, checkpoints, lifetime_of(connected.rows, started), cfg)


def lifetime_of(rows: QueueRows, started: ExitStack | None) -> ExitStack:
    """What ends with a client: its sockets and its store, then what was started."""
    lifetime = started.pop_all() if started is not None else ExitStack()
    lifetime.callback(rows.close, _CLOSE_SECONDS)
    return lifetime


def begin(rows: QueueRows, deadlines: Deadlines) -> None:
    """What whoever started a queue does before anybody writes to it."""
    with rows.sockets.call(CallSite("bootstrap"), deadlines.bootstrap) as call:
        rows.controller.set_numbers_aside(call, NUMBERS_SET_ASIDE)
        rows.begin_epoch(call)


class QueueDataPlane:
    """A connection to a plane of which TransferQueue's controller knows the rows. Safe to share between threads.

    `rows` is where they are, `checkpoints` how all of it is saved, `lifetime` what ends with this client.
    A call takes as long as its deadline at most; the first one on a partition also looks up its
    columns, which has the metadata deadline.
    """

    def __init__(self, rows: QueueRows, checkpoints: Checkpoints, lifetime: ExitStack, cfg: DataPlaneConfig) -> None:
        self._rows = rows
        self._checkpoints = checkpoints
        self._lifetime = lifetime
        self._cells = cfg.cells
        self._deadlines = cfg.deadlines
        self._gate = SharedGate(_GateRows(rows, cfg.deadlines.metadata))
        self._schemas: dict[str, dict[str, FieldSpec]] = {}

    def register_partition(self, partition_id: str, fields: Schema) -> None:
        """As in `base.py`."""
        schema = checked_schema(fields, partition_id)
        site = CallSite("register_partition", partition_id)
        if self._registered(site) is None:
            tags = [{_SCHEMA_TAG: _schema_to_json(schema)}]
            with self._writing(site, self._deadlines.metadata) as call:
                self._rows.put(call, _REGISTRY, [partition_id], {}, tags)
        # Read back, since another process may have registered it at the same time: all must agree with what stayed.
        existing = self._registered(site)
        if existing != schema:
            what = f"already registered with other columns: {existing}"
            raise SchemaViolation(what, call=site.call, partition=partition_id)
        self._schemas[partition_id] = schema

    def is_registered(self, partition_id: str) -> bool:
        return self._schemas.get(partition_id) is not None or (
            self._registered(CallSite("is_registered", partition_id)) is not None
        )

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Column] | None = None,
        tags: Sequence[Tags] | None = None,
    ) -> KVBatchMeta:
        keys = checked_sample_ids(sample_ids)
        new_tags = checked_tags(tags, len(keys))
        site = CallSite("put_samples", partition_id, keys)
        columns = checked_columns(fields, self._schema(site), len(keys), partition_id)
        if not columns and new_tags is None:
            raise ValueError("a put writes columns, tags, or both; got neither")
        values = {name: to_queue(column, self._cells) for name, column in columns.items()}
        with self._writing(site, self._deadlines.write) as call:
            self._rows.put(call, partition_id, keys, values, new_tags)
        return KVBatchMeta(partition_id=partition_id, sample_ids=keys, fields=list(columns) or None, tags=new_tags)

    def reserve_samples(
        self, sample_ids: Sequence[str], partition_id: str, *, look_up: tuple[str, str] | None = None
    ) -> Reservation:
        """As in `base.py`. One round trip."""
        keys = checked_sample_ids(sample_ids)
        site = CallSite("reserve_samples", partition_id, keys)
        self._schema(site)
        if look_up is not None:
            self._schema(CallSite("reserve_samples", *look_up))
        with self._writing(site, self._deadlines.metadata) as call:
            return self._rows.reserve(call, partition_id, keys, look_up)

    def store_samples(self, reservation: Reservation, fields: Mapping[str, Column]) -> StoredSamples:
        """As in `base.py`. One round trip."""
        keys, numbers = list(reservation.sample_ids), list(reservation.numbers)
        site = CallSite("store_samples", reservation.partition_id, keys)
        columns = checked_columns(fields, self._schema(site), len(keys), site.partition)
        values = {name: to_queue(column, self._cells) for name, column in columns.items()}
        with self._writing(site, self._deadlines.write) as call:
            return StoredSamples(reservation, self._rows.store(call, site.partition, keys, numbers, values))

    def announce_samples(self, stored: StoredSamples, tags: Sequence[Tags] | None = None) -> None:
        """As in `base.py`. One round trip; three more where rows were cleared meanwhile."""
        reserved = stored.reservation
        keys = list(reserved.sample_ids)
        new_tags = checked_tags(tags, len(keys))
        merged = None
        if new_tags is not None:
            rows = zip(reserved.numbers, reserved.tags, new_tags, strict=True)
            merged = {number: {**old, **new} for number, old, new in rows}
        site = CallSite("announce_samples", reserved.partition_id, keys)
        with self._writing(site, self._deadlines.write) as call:
            self._rows.announce(call, site.partition, stored.news, merged)

    def release_samples(self, reservation: Reservation) -> None:
        keys = list(reservation.sample_ids)
        site = CallSite("release_samples", reservation.partition_id, keys)
        with self._writing(site, self._deadlines.clear) as call:
            self._rows.release(call, site.partition, keys, frozenset(reservation.numbers))

    def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        partial: bool = False,
    ) -> SampleBatch:
        """As in `base.py`. Two round trips when all rows are there; a stored value that is not what the
        schema says makes its row a missing one."""
        asked = list(sample_ids)
        keys = list(dict.fromkeys(asked))
        site = CallSite("get_samples", partition_id, keys)
        schema = self._schema(site)
        names = selected_fields(select_fields, schema, partition_id)
        if not keys:
            return SampleBatch([], {name: from_queue([], schema[name])[0] for name in names})
        with self._call(site, self._deadlines.read) as call:
            read = self._rows.read(call, partition_id, keys, names, partial=partial)
        columns: dict[str, Any] = {}
        unreadable: set[int] = set()
        for name in names:
            columns[name], malformed = from_queue(read.columns[name], schema[name])
            unreadable |= malformed
        missing = {*read.missing, *(read.keys[index] for index in unreadable)}
        if missing and not partial:
            raise RowsMissing(
                f"rows or columns that are not there: {len(missing)} of {len(keys)} rows",
                call=site.call,
                partition=partition_id,
                keys=[key for key in keys if key in missing],
            )
        place = {key: index for index, key in enumerate(read.keys) if index not in unreadable}
        found = [key for key in asked if key in place]
        if found != read.keys:
            columns = {name: _picked(column, [place[key] for key in found]) for name, column in columns.items()}
        return SampleBatch(found, columns, [key for key in keys if key in missing])

    def get_tags(self, sample_ids: Sequence[str], partition_id: str) -> list[Tags | None]:
        keys = list(dict.fromkeys(sample_ids))
        site = CallSite("get_tags", partition_id, keys)
        self._schema(site)
        if not keys:
            return []
        with self._call(site, self._deadlines.metadata) as call:
            tags = self._rows.tags(call, partition_id, keys)
        return [dict(tags[key]) if key in tags else None for key in sample_ids]

    def list_samples(self, partition_id: str) -> dict[str, Tags]:
        site = CallSite("list_samples", partition_id)
        self._schema(site)
        with self._call(site, self._deadlines.metadata) as call:
            return self._rows.controller.list_all(call, partition_id)

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """As in `base.py`. `None` clears the rows that are there when the call begins."""
        keys = list(self.list_samples(partition_id)) if sample_ids is None else list(dict.fromkeys(sample_ids))
        site = CallSite("clear_samples", partition_id, keys)
        self._schema(site)
        if keys:
            with self._writing(site, self._deadlines.clear) as call:
                self._rows.clear(call, partition_id, keys)

    def claim_meta(
        self, partition_id: str, task_name: str, required_fields: Sequence[str], batch_size: int
    ) -> KVBatchMeta:
        site = CallSite("claim_meta", partition_id)
        names = selected_fields(required_fields, self._schema(site), partition_id)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        with self._writing(site, self._deadlines.metadata) as call:
            keys, tags = self._rows.claim(call, partition_id, task_name, names, batch_size)
        return KVBatchMeta(partition_id=partition_id, task_name=task_name, sample_ids=keys, fields=names, tags=tags)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> SampleBatch:
        return self.get_samples(meta.sample_ids, meta.partition_id, select_fields or meta.fields)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        site = CallSite("check_consumption_status", partition_id)
        self._schema(site)
        with self._call(site, self._deadlines.metadata) as call:
            return all(self._rows.is_consumed(call, partition_id, task) for task in task_names)

    def epoch(self) -> str:
        """As in `base.py`. One round trip; a while longer during a save or a load."""
        until = time.monotonic() + _EPOCH_SETTLES
        while True:
            with self._call(CallSite("epoch"), self._deadlines.metadata) as call:
                epoch, is_settled = self._rows.epoch(call)
            if is_settled or time.monotonic() > until:
                return epoch
            time.sleep(_EPOCH_WATCH)

    def now(self) -> float:
        """As in `base.py`, late by the fastest answer that the controller gave so far. Asks only before the first."""
        clock = self._rows.clock()
        if clock is None:
            with self._call(CallSite("now"), self._deadlines.metadata) as call:
                clock = self._rows.first_clock(call)
        return clock + time.monotonic()

    def quiesce(self, deadline_s: float) -> AbstractContextManager[list[str]]:
        return self._gate.quiesced(deadline_s)

    def save_checkpoint(self, directory: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        """As in `base.py`. The directory must be on a file system that all parts of the plane share."""
        self._checkpoints.save(directory, metadata or {})

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        """Replace what is in the plane. Part of it are pickles: load none that you did not write.

        Clients that know partitions from before keep their columns: let them reconnect.
        """
        metadata = self._checkpoints.load(directory)
        self._schemas.clear()
        self._gate.forget_restored()
        return metadata

    def close(self) -> None:
        """Drop this process's sockets; the client that started the queue also ends it, with all rows."""
        self._gate.close()
        self._lifetime.close()

    def _call(self, site: CallSite, seconds: float) -> AbstractContextManager[Call]:
        return self._rows.sockets.call(site, seconds)

    @contextmanager
    def _writing(self, site: CallSite, seconds: float) -> Iterator[Call]:
        """A call that writes, for at most `seconds` once it has begun; waits before while the plane is quiesced."""
        entered = self._gate.writing(site.call, site.partition, site.keys, self._deadlines.quiesced)
        with entered as lease, self._call(site, seconds) as call:
            call.lease = lease
            yield call

    def _schema(self, site: CallSite) -> dict[str, FieldSpec]:
        """The partition's columns; asked for once, they never change."""
        known = self._schemas.get(site.partition)
        if known is not None:
            return known
        schema = self._registered(site)
        if schema is None:
            what = "not registered; the driver calls register_partition once, before any row is written"
            raise PartitionNotRegistered(what, call=site.call, partition=site.partition)
        self._schemas[site.partition] = schema
        return schema

    def _registered(self, site: CallSite) -> dict[str, FieldSpec] | None:
        """What the queue says about the partition now."""
        key = site.partition
        with self._call(site, self._deadlines.metadata) as call:
            tags = self._rows.tags(call, _REGISTRY, [key])
        encoded = tags.get(key, {}).get(_SCHEMA_TAG)
        return None if encoded is None else _schema_from_json(encoded)


class _GateRows:
    """The rows behind the gate, by calls that do not pass it."""

    def __init__(self, rows: QueueRows, seconds: float) -> None:
        self._rows = rows
        self._seconds = seconds

    def put(self, key: str, tags: Tags) -> None:
        with self._call() as call:
            self._rows.put(call, GATE_PARTITION, [key], {}, [tags])

    def get(self, keys: Sequence[str]) -> dict[str, Tags]:
        with self._call() as call:
            return self._rows.tags(call, GATE_PARTITION, list(keys))

    def list(self) -> dict[str, Tags]:
        with self._call() as call:
            return self._rows.controller.list_all(call, GATE_PARTITION)

    def clear(self, keys: Sequence[str]) -> None:
        with self._call() as call:
            self._rows.clear(call, GATE_PARTITION, list(keys))

    def _call(self) -> AbstractContextManager[Call]:
        return self._rows.sockets.call(CallSite("quiesce", GATE_PARTITION), self._seconds)


def _schema_to_json(schema: Schema) -> str:
    return json.dumps({name: [spec.dtype, spec.rank] for name, spec in schema.items()})


def _schema_from_json(encoded: str) -> dict[str, FieldSpec]:
    return {name: FieldSpec(dtype, rank) for name, (dtype, rank) in json.loads(encoded).items()}


def _picked(column: Any, positions: Sequence[int]) -> Any:
    """The values at these positions, of a list or of a dense array `[rows]`."""
    if isinstance(column, np.ndarray):
        return column[list(positions)]
    return [column[position] for position in positions]
