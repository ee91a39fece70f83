"""Checkpoint commands, run by a process that owns memory of a Mooncake store.

    {"operation": "DESCRIBE", "session": s}                    -> which segment it owns, and how large it is
    {"operation": "SAVE_SHARD", "session": s, "checkpoint": id, "directory": d, "shard": name,
     "objects": [[name, size, crc], …]}                        -> the shard's size, and each object's place and SHA-256
    {"operation": "LOAD_OBJECTS", "session": s, "checkpoint": id, "saved_session": t, "directory": d,
     "objects": [[name, shard, offset, size, sha256], …]}      -> how many were loaded, and how many were there

Commands and answers are metadata; objects go between memory and file within this process. A command
of another session than the one that the owner serves is refused, like one that names a file outside
of the checkpoint's folder (`RequestError`). Damaged files are `CheckpointDamaged`, lost objects are a `DataPlaneError`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from rollout_reassembler.contract.errors import DataPlaneError, RequestError
from rollout_reassembler.data_plane.checkpoint import (
    Checkpoint,
    SavedObject,
    ShardWriter,
    check_shard,
    read_object,
    shard_path,
)
from rollout_reassembler.data_plane.mooncake.objects import StoredObject
from rollout_reassembler.data_plane.mooncake.store import MooncakeStore, StoreFailure, as_data_plane_error

T = TypeVar("T")

_BATCH_BYTES = 32 << 20
_ERRORS_SHOWN = 3


class _Command(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    session: str = Field(min_length=1)


class Describe(_Command):
    """Say which memory you own. `take_over` ends an earlier session, whose objects are removed."""

    operation: Literal["DESCRIBE"]
    take_over: bool = False


class SaveShard(_Command):
    """Write these objects to a new shard."""

    operation: Literal["SAVE_SHARD"]
    checkpoint: str
    directory: str
    shard: str
    objects: list[tuple[str, NonNegativeInt, NonNegativeInt]]


class LoadObjects(_Command):
    """Bring these objects from shards into your memory. `saved_session` is the one that they were saved of."""

    operation: Literal["LOAD_OBJECTS"]
    checkpoint: str
    saved_session: str
    directory: str
    objects: list[tuple[str, str, NonNegativeInt, NonNegativeInt, str]]


Command = Annotated[Describe | SaveShard | LoadObjects, Field(discriminator="operation")]
_COMMAND: TypeAdapter[Describe | SaveShard | LoadObjects] = TypeAdapter(Command)


class Participant:
    """Runs commands over this process's own connection to the store.

    Without a session it serves that of the first command that it gets.
    """

    def __init__(self, store: MooncakeStore) -> None:
        self._store = store
        self._endpoint = store.endpoint()

    def run(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Run one command; its answer."""
        command = _parsed(body)
        self._serve(command)
        try:
            if isinstance(command, Describe):
                return self._describe()
            if isinstance(command, SaveShard):
                return self._save(command)
            return self._load(command)
        except StoreFailure as failure:
            raise as_data_plane_error(failure, command.operation) from failure

    def _serve(self, command: Describe | SaveShard | LoadObjects) -> None:
        serves = self._store.session
        if serves and serves != command.session:
            if not isinstance(command, Describe) or not command.take_over:
                raise RequestError(f"this owner serves session {serves!r}, the command is of {command.session!r}")
            self._store.remove_session()
        self._store.session = command.session

    def _describe(self) -> dict[str, Any]:
        return {
            "session": self._store.session,
            "segment": self._store.segment_name,
            "endpoint": self._endpoint,
            "size": self._store.segment_size,
        }

    def _save(self, command: SaveShard) -> dict[str, Any]:
        checkpoint = Checkpoint(command.checkpoint, command.session)
        objects = [StoredObject(*fields) for fields in command.objects]
        saved: list[SavedObject] = []
        with ShardWriter(command.directory, command.shard, checkpoint) as shard:
            for batch in _batches(objects, [stored.size for stored in objects]):
                contents = self._store.get(batch)
                for stored in batch:
                    if stored.name not in contents:
                        what = f"object {stored.name!r} is not in the store any more; quiesce before saving"
                        raise DataPlaneError(what, call=command.operation)
                    saved.append(shard.add(stored.name, contents[stored.name]))
        return {
            "shard": command.shard,
            "size": shard.size,
            "objects": [[o.name, o.offset, o.size, o.sha256] for o in saved],
        }

    def _load(self, command: LoadObjects) -> dict[str, Any]:
        checkpoint = Checkpoint(command.checkpoint, command.saved_session)
        objects = [SavedObject(*fields) for fields in command.objects]
        objects.sort(key=lambda saved: (saved.shard, saved.offset))
        loaded = kept = 0
        with ExitStack() as stack:
            shards: dict[str, BinaryIO] = {}
            for batch in _batches(objects, [saved.size for saved in objects]):
                contents = [
                    (saved.name, _content(command.directory, saved, checkpoint, shards, stack)) for saved in batch
                ]
                there = self._store.are_there([name for name, _ in contents])
                new = [_stored(*entry) for entry, is_there in zip(contents, there, strict=True) if not is_there]
                old = [_stored(*entry)[0] for entry, is_there in zip(contents, there, strict=True) if is_there]
                self._store.put(new, here=True)
                self._store.get(old)
                loaded += len(new)
                kept += len(old)
        return {"loaded": loaded, "kept": kept}


def _parsed(body: Mapping[str, Any]) -> Describe | SaveShard | LoadObjects:
    try:
        return _COMMAND.validate_python(dict(body))
    except ValidationError as error:
        shown = [f"{'.'.join(map(str, e['loc'])) or 'operation'}: {e['msg']}" for e in error.errors()[:_ERRORS_SHOWN]]
        raise RequestError(f"not a checkpoint command: {'; '.join(shown)}") from None


def _content(
    directory: str, saved: SavedObject, checkpoint: Checkpoint, shards: dict[str, BinaryIO], stack: ExitStack
) -> bytes:
    """An object's bytes, from a shard that is opened and checked when it is first met."""
    path = shard_path(directory, saved.shard)
    if saved.shard not in shards:
        try:
            shards[saved.shard] = stack.enter_context(path.open("rb"))
        except OSError as error:
            what = f"{path} can't be read at object {saved.name!r}: {error.strerror}"
            raise DataPlaneError(what, call="LOAD_OBJECTS") from error
        check_shard(shards[saved.shard], path, checkpoint)
    return read_object(shards[saved.shard], path, saved)


def _stored(name: str, content: bytes) -> tuple[StoredObject, bytes]:
    return StoredObject(name, len(content), zlib.crc32(content)), content


def _batches(items: Sequence[T], sizes: Sequence[int]) -> Iterator[list[T]]:
    """As many at a time as should be in memory at once."""
    batch: list[T] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and total + size > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
