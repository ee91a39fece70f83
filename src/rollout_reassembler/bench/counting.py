"""A data-plane client that counts: which calls a group makes, and how many bytes of values they move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from rollout_reassembler.bench.figures import Traffic
from rollout_reassembler.contract.messages import KVBatchMeta
from rollout_reassembler.data_plane.base import Column, DataPlaneClient, Reservation, SampleBatch, StoredSamples, Tags
from rollout_reassembler.staging.schema import EXTRAS_FIELD

BASE_READ, ROUTE_READ, PUBLISH, RECORD, CLEAR = "base_read", "route_read", "publish", "record", "clear"
_PUBLISHING = ("put_samples", "store_samples", "announce_samples")


class CallCounter:
    """Calls by kind, and bytes. A kind is one of the five above, or the method and partition of any other call.

    A reservation counts as one of the record, which it looks up.
    """

    def __init__(self, *, staging_partition: str, partition_id: str) -> None:
        self._staging = staging_partition
        self._canonical = partition_id
        self.reset()

    def reset(self) -> None:
        """Start anew, for instance after whatever a client is asked for only once."""
        self._calls: Counter[str] = Counter()
        self._read = 0
        self._written = 0

    def traffic(self) -> Traffic:
        """What was counted so far."""
        return Traffic(dict(self._calls), self._read, self._written)

    def count(self, method: str, partition: str, fields: Sequence[str] = ()) -> None:
        self._calls[self._kind(method, partition, fields)] += 1

    def count_read(self, columns: Mapping[str, Column]) -> None:
        self._read += sum(map(_column_bytes, columns.values()))

    def count_written(self, columns: Mapping[str, Column]) -> None:
        self._written += sum(map(_column_bytes, columns.values()))

    def _kind(self, method: str, partition: str, fields: Sequence[str]) -> str:
        if partition == self._staging and method == "get_samples":
            return ROUTE_READ if EXTRAS_FIELD in fields else BASE_READ
        if partition == self._staging and method == "clear_samples":
            return CLEAR
        if partition == self._canonical and method in _PUBLISHING:
            return PUBLISH
        if partition == self._canonical and method == "reserve_samples":
            return RECORD
        if partition.startswith(f"{self._canonical}."):
            return RECORD
        return f"{method}:{partition}"


class CountingPlane:
    """Passes every call on to `inner` and counts the ones that move rows, tags or keys."""

    def __init__(self, inner: DataPlaneClient, counter: CallCounter) -> None:
        self._inner = inner
        self._counter = counter

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Column] | None = None,
        tags: Sequence[Tags] | None = None,
    ) -> KVBatchMeta:
        self._counter.count("put_samples", partition_id)
        self._counter.count_written(fields or {})
        return self._inner.put_samples(sample_ids, partition_id, fields, tags)

    def reserve_samples(
        self, sample_ids: Sequence[str], partition_id: str, *, look_up: tuple[str, str] | None = None
    ) -> Reservation:
        self._counter.count("reserve_samples", partition_id)
        return self._inner.reserve_samples(sample_ids, partition_id, look_up=look_up)

    def store_samples(self, reservation: Reservation, fields: Mapping[str, Column]) -> StoredSamples:
        self._counter.count("store_samples", reservation.partition_id)
        self._counter.count_written(fields)
        return self._inner.store_samples(reservation, fields)

    def announce_samples(self, stored: StoredSamples, tags: Sequence[Tags] | None = None) -> None:
        self._counter.count("announce_samples", stored.reservation.partition_id)
        self._inner.announce_samples(stored, tags)

    def release_samples(self, reservation: Reservation) -> None:
        self._counter.count("release_samples", reservation.partition_id)
        self._inner.release_samples(reservation)

    def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        partial: bool = False,
    ) -> SampleBatch:
        self._counter.count("get_samples", partition_id, select_fields or ())
        batch = self._inner.get_samples(sample_ids, partition_id, select_fields, partial=partial)
        self._counter.count_read(batch.columns)
        return batch

    def get_tags(self, sample_ids: Sequence[str], partition_id: str) -> list[Tags | None]:
        self._counter.count("get_tags", partition_id)
        return self._inner.get_tags(sample_ids, partition_id)

    def list_samples(self, partition_id: str) -> dict[str, Tags]:
        self._counter.count("list_samples", partition_id)
        return self._inner.list_samples(partition_id)

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        self._counter.count("clear_samples", partition_id)
        self._inner.clear_samples(sample_ids, partition_id)

    def register_partition(self, partition_id: str, *args: Any, **options: Any) -> None:
        self._counter.count("register_partition", partition_id)
        self._inner.register_partition(partition_id, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def counted(
    client: DataPlaneClient, *, staging_partition: str, partition_id: str
) -> tuple[DataPlaneClient, CallCounter]:
    """The client with a counter in front of it."""
    counter = CallCounter(staging_partition=staging_partition, partition_id=partition_id)
    return cast(DataPlaneClient, CountingPlane(client, counter)), counter


def _column_bytes(column: Column) -> int:
    if isinstance(column, np.ndarray):
        return column.nbytes
    return sum(len(cell) if isinstance(cell, bytes) else np.asarray(cell).nbytes for cell in column)
