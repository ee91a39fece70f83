"""The contract of a data plane: rows by key, in partitions, with columns and tags.

A *partition* holds rows. A *row* has a key, a few named *columns* (an array or raw bytes each) and
*tags* (a small string-keyed dict, metadata only); a partition may have rows of tags alone. What every
adapter promises, and what the conformance suite holds it to:

- `put_samples` returns when the rows are durable. It overwrites just the columns it is given; tags
  merge into those that are there. A new row can be read and claimed only when its tags are there. A
  put that raises may have written any part; the same put again repairs it.
- `get_samples` returns rows in the order asked. A key that is not there, or lacks a selected
  column, raises `RowsMissing` with exactly those keys; with `partial=True` it is listed in
  `SampleBatch.missing` instead. A get never silently returns fewer rows.
- `clear_samples` of unknown keys does nothing.
- Columns come back with the dtype they were registered with, as read-only arrays. Nothing is cast: a
  write that does not fit the registered `FieldSpec` is refused with `SchemaViolation` before anything
  is written. So is a column nobody registered, in a read too; names with `__` in front are reserved.
- Tags are JSON values: a tuple comes back as a list.
- A put is acknowledged within its deadline or not at all. One that writes columns into a row which is
  *condemned* (its tag `CONDEMNED_TAG` is set) is refused with `RowsCondemned` before anything is written.
- No call waits for ever: `DataPlaneTimeout` and `DataPlaneUnavailable` name call, partition, keys
  and seconds. After a timeout, whether the call took effect is unknown; repeating it is safe.
- The partition must be registered (`PartitionNotRegistered`), once, by anyone.

A client does all of that. Who uses one names the part that it needs: `RowStore`, `ClaimQueue` or `Checkpointable`.

Values inside a row prove themselves (see `staging/`); the plane is not trusted to return the bytes
that were put under a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rollout_reassembler.contract.messages import KVBatchMeta

Cell = bytes | npt.NDArray[Any]
"""One row's value in one column: raw bytes, or an array of the column's dtype and rank."""

Column = Sequence[Any] | npt.NDArray[Any]
"""One value a row. Rank 0 columns may be one dense array `[rows]`."""

Tags = dict[str, Any]

CONDEMNED_TAG = "condemned_at"
"""Set by a sweep on rows that nobody may write any more, since it is about to clear them; `None` takes that back."""


@dataclass(frozen=True)
class FieldSpec:
    """What one column holds: a numpy dtype name and the rank of a row's value, or raw bytes.

    `FieldSpec("int64", 1)` is a jagged column of int64 vectors, `FieldSpec("float32", 0)` a column of
    scalars, `FieldSpec("bytes")` one bytes value a row.
    """

    dtype: str
    rank: int = 0

    def __post_init__(self) -> None:
        if self.dtype != "bytes":
            np.dtype(self.dtype)
        if self.rank < 0 or (self.dtype == "bytes" and self.rank):
            raise ValueError(f"a field of {self.dtype} cannot have rank {self.rank}")


Schema = Mapping[str, FieldSpec]


@dataclass(frozen=True)
class SampleBatch:
    """Rows as they were read, in the order asked, without those listed in `missing`.

    `columns[name]` has one entry for each of `sample_ids`: a list of bytes or of arrays `[...]`, or
    one dense array `[rows]` for a column of scalars.
    """

    sample_ids: list[str]
    columns: dict[str, Any]
    missing: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        if name not in self.columns:
            raise KeyError(f"no column {name!r} was read; there are: {', '.join(self.columns)}")
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row as `(sample_id, {column: value})`."""
        for index, sample_id in enumerate(self.sample_ids):
            yield sample_id, {name: column[index] for name, column in self.columns.items()}


@dataclass(frozen=True)
class Reservation:
    """Rows that have their numbers, and perhaps no values yet.

    `numbers[i]` is the plane's own name of row `i` for as long as the row lives: a row that is written under
    the same key after it was cleared has another one. `tags[i]` are those that the row had (`{}` for a new
    one). `is_readable` tells that all rows hold values. `looked_up` are the tags of the key that was looked up
    with them, `None` where it is unknown.
    """

    partition_id: str
    sample_ids: tuple[str, ...]
    numbers: tuple[int, ...]
    tags: tuple[Tags, ...]
    is_readable: bool
    looked_up: Tags | None = None


@dataclass(frozen=True)
class StoredSamples:
    """Values that are stored under their rows' numbers; `news` is what the adapter needs to announce them."""

    reservation: Reservation
    news: Any = None


@runtime_checkable
class RowStore(Protocol):
    """Rows by key: all that staging, finalizing and training call."""

    def register_partition(self, partition_id: str, fields: Schema) -> None:
        """Create the partition and fix its columns; the same registration again does nothing.

        Raises `SchemaViolation` if it exists with other columns.
        """

    def is_registered(self, partition_id: str) -> bool:
        """Whether anyone has registered the partition."""

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Column] | None = None,
        tags: Sequence[Tags] | None = None,
    ) -> KVBatchMeta:
        """Write columns, tags, or both, for these keys; returns when they are durable.

        Raises `ValueError` for an empty or repeated key or columns of another length, and before
        anything is written.
        """

    def reserve_samples(
        self, sample_ids: Sequence[str], partition_id: str, *, look_up: tuple[str, str] | None = None
    ) -> Reservation:
        """Number these rows, creating those that are not there, then look up the tags of one more key.

        The first step of a put in three, whose caller may be held up for as long as it likes between two:

            reserved = client.reserve_samples(ids, "train", look_up=("train.groups", "g0"))
            stored = client.store_samples(reserved, columns)      # nobody can read or claim them
            client.announce_samples(stored, tags)                 # from here on all can

        Rows that somebody cleared meanwhile stay cleared, however late the values come: the number is the
        token that fences them. `look_up` is a partition and a key of it, looked up after the rows were
        numbered: who finds nothing there has the same numbers as everybody else who does.
        Rows may be cleared only once they were announced.
        """

    def store_samples(self, reservation: Reservation, fields: Mapping[str, Column]) -> StoredSamples:
        """Store values of reserved rows; nobody reads or claims them until they are announced.

        Raises `SchemaViolation` before anything is written. A row that is readable already may be
        overwritten in place.
        """

    def announce_samples(self, stored: StoredSamples, tags: Sequence[Tags] | None = None) -> None:
        """Set the tags of stored rows and make their values readable, all of them or none.

        Rows that have another number by now, or none, are left as they are, and what was stored for them goes.
        """

    def release_samples(self, reservation: Reservation) -> None:
        """Remove those of the rows that still have the number that was reserved."""

    def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        partial: bool = False,
    ) -> SampleBatch:
        """Read the selected columns (all registered ones when none are named) of these keys."""

    def get_tags(self, sample_ids: Sequence[str], partition_id: str) -> list[Tags | None]:
        """The tags of each key, `None` where the key is unknown. Moves no column."""

    def list_samples(self, partition_id: str) -> dict[str, Tags]:
        """All keys of the partition with their tags. Costs time in proportion to the partition."""

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Remove these rows with their tags, or all rows of the partition for `None`."""

    def now(self) -> float:
        """Unix seconds by the plane's clock, which is one for all clients, whatever their own clocks say."""

    def epoch(self) -> str:
        """Which life of the plane this is: another one after each start and after each `load_checkpoint`.

        Rows that were staged under one epoch and are missing under the same one were never there, or somebody
        cleared them; under another one they may have gone with the plane. So a driver reads it before it
        has anything staged (`ReassemblyRequest.staged_on`).
        """


@runtime_checkable
class ClaimQueue(Protocol):
    """Rows by task: each task gets each row once, by whichever of its workers asks first."""

    def claim_meta(
        self, partition_id: str, task_name: str, required_fields: Sequence[str], batch_size: int
    ) -> KVBatchMeta:
        """Claim up to `batch_size` rows that hold these columns and that `task_name` has not had yet."""

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> SampleBatch:
        """Read the rows that a `KVBatchMeta` names."""

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Whether each of the tasks has claimed every row that is in the partition now."""


@runtime_checkable
class Checkpointable(Protocol):
    """The whole plane on disk and back, with its writers stopped meanwhile."""

    def quiesce(self, deadline_s: float) -> AbstractContextManager[list[str]]:
        """Stop all writers of the plane, in every process, for the time of a `with` block.

            with client.quiesce(30.0) as writers:        # their names
                client.save_checkpoint(directory)

        The block runs once every put, clear and claim that had begun has ended; none begins until the
        block ends. Sinks and finalizers then stand between two calls, which is safe for both. Their
        writes, and those of the caller itself, wait meanwhile, for `Deadlines.quiesced` seconds at most;
        reads go on. Raises `DataPlaneTimeout` naming the writers that did not stop within `deadline_s`
        seconds, and lets all go on; a writer that died is not waited for longer than some ten seconds.
        """

    def save_checkpoint(self, directory: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Write all partitions, rows and tags under `directory`. Quiesce first when anyone may write."""

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        """Bring back what `save_checkpoint` wrote; returns its metadata."""


@runtime_checkable
class DataPlaneClient(RowStore, ClaimQueue, Checkpointable, Protocol):
    """A connection to a data plane. Safe to share between threads of one process."""

    def close(self) -> None:
        """Drop this connection. Only the client that started the plane also ends it."""


class MemoryOwner(Protocol):
    """A client that may own memory of its plane, and then saves and loads what lies there itself."""

    def checkpoint_command(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Run a checkpoint command about this process's own memory; `None` if it gives none. Metadata, both ways."""
