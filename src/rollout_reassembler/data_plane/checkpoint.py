"""Checkpoint files of a store whose objects belong to several owners, each of whom writes its own.

    <directory>/shard-0-0.rows    objects of one owner, end to end, behind a line that says whose they are
    <directory>/controller.pkl    keys, tags and claims, as the queue's controller writes them
    <directory>/manifest.json     what there must be, with size and SHA-256 an object; written last

A shard is written under a partial name, synced, and renamed. So a directory with a manifest is a whole
checkpoint, and each of its files names the checkpoint and the session that it belongs to: files of
two checkpoints do not mix. Everything here is plain files; no store, no Ray, no torch.

Errors of damaged files are `CheckpointDamaged` and name the file and the object. A `RequestError` says
that somebody asked for a file that must not be touched.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from rollout_reassembler.contract.errors import CheckpointDamaged, DataPlaneError, RequestError
from rollout_reassembler.data_plane.durable import sync_directory

MANIFEST = "manifest.json"
CONTROLLER = "controller.pkl"

_SHARD_FORMAT = "rollout-reassembler shard 1"
_MANIFEST_FORMAT = "rollout-reassembler checkpoint 1"
_MAX_HEADER = 4096
_SAVE = "save_checkpoint"
_LOAD = "load_checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """Which checkpoint a file belongs to: its own id, and the controller's session that it was taken of."""

    id: str
    session: str


@dataclass(frozen=True)
class SavedObject:
    """One object in a shard: where it lies and what it must hash to."""

    name: str
    shard: str
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint must hold. `shards` are file sizes, `metadata` is the caller's."""

    checkpoint: Checkpoint
    controller_sha256: str
    shards: Mapping[str, int]
    objects: tuple[SavedObject, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


# --- the manifest -------------------------------------------------------------------------------------


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, behind a digest of its own, and make it durable."""
    files = list(manifest.shards)
    places = {name: index for index, name in enumerate(files)}
    body = json.dumps(
        {
            "format": _MANIFEST_FORMAT,
            "checkpoint": manifest.checkpoint.id,
            "session": manifest.checkpoint.session,
            "metadata": dict(manifest.metadata),
            "controller_sha256": manifest.controller_sha256,
            "shards": [[name, size] for name, size in manifest.shards.items()],
            "objects": [[o.name, places[o.shard], o.offset, o.size, o.sha256] for o in manifest.objects],
        }
    ).encode()
    path = directory / MANIFEST
    partial = path.with_suffix(".partial")
    with _writing(path), partial.open("wb") as file:
        file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_directory(directory)


def read_manifest(directory: Path) -> Manifest:
    """Raises `DataPlaneError` when there is none, `CheckpointDamaged` when it is not as it was written."""
    path = directory / MANIFEST
    if not path.is_file():
        raise DataPlaneError(f"no checkpoint at {directory}: it has no {MANIFEST}", call=_LOAD)
    digest, _, body = path.read_bytes().partition(b"\n")
    if digest.decode("ascii", "replace") != hashlib.sha256(body).hexdigest():
        raise CheckpointDamaged(f"{path} is damaged or cut short; use another checkpoint", call=_LOAD)
    content = json.loads(body)
    if content["format"] != _MANIFEST_FORMAT:
        raise CheckpointDamaged(f"{path} is of another format: {content['format']!r}", call=_LOAD)
    files = [name for name, _ in content["shards"]]
    return Manifest(
        Checkpoint(content["checkpoint"], content["session"]),
        content["controller_sha256"],
        dict(content["shards"]),
        tuple(
            SavedObject(name, files[shard], offset, size, sha256)
            for name, shard, offset, size, sha256 in content["objects"]
        ),
        content["metadata"],
    )


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise `CheckpointDamaged` unless each shard and the controller's state are there, whole and its own."""
    for name, size in manifest.shards.items():
        path = shard_path(str(directory), name)
        if not path.is_file():
            raise CheckpointDamaged(f"{path} is missing; the checkpoint is not whole", call=_LOAD)
        if path.stat().st_size != size:
            found = path.stat().st_size
            raise CheckpointDamaged(f"{path} holds {found} bytes, the manifest says {size}", call=_LOAD)
        with path.open("rb") as file:
            check_shard(file, path, manifest.checkpoint)
    path = directory / CONTROLLER
    if not path.is_file():
        raise CheckpointDamaged(f"{path} is missing; the checkpoint is not whole", call=_LOAD)
    if sha256_of(path) != manifest.controller_sha256:
        raise CheckpointDamaged(f"{path} does not hash to what the manifest says", call=_LOAD)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- shards -------------------------------------------------------------------------------------------


def shard_path(directory: str, shard: str) -> Path:
    """The file of a shard. Raises `RequestError` unless it lies in `directory`, which is an absolute path."""
    folder = Path(directory)
    if not folder.is_absolute():
        raise RequestError(f"{directory!r} is a relative path; a checkpoint's folder is an absolute one")
    path = folder / shard
    if Path(shard).name != shard or path.resolve().parent != folder.resolve():
        raise RequestError(f"shard {shard!r} does not lie in {directory}")
    return path


class ShardWriter:
    """Writes one shard, which is there under its name once the `with` block has ended well.

    Raises `RequestError` when there is one of that name already, and `DataPlaneError` naming file and
    object when the disk refuses; then nothing is left of it.
    """

    def __init__(self, directory: str, shard: str, checkpoint: Checkpoint) -> None:
        self._path = shard_path(directory, shard)
        self._partial = self._path.with_name(f"{shard}.partial")
        self._checkpoint = checkpoint
        self._offset = 0

    def __enter__(self) -> Self:
        if self._path.exists():
            raise RequestError(f"{self._path} exists already; a shard is never overwritten")
        header = {
            "format": _SHARD_FORMAT,
            "checkpoint": self._checkpoint.id,
            "session": self._checkpoint.session,
            "shard": self._path.name,
        }
        with _writing(self._path):
            self._file = self._partial.open("wb", buffering=0)
            self._append(json.dumps(header).encode() + b"\n")
        return self

    def add(self, name: str, data: bytes) -> SavedObject:
        """Append one object."""
        offset = self._offset
        with _writing(self._path, name):
            self._append(data)
        return SavedObject(name, self._path.name, offset, len(data), hashlib.sha256(data).hexdigest())

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._offset

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with _writing(self._path):
                    os.fsync(self._file.fileno())
                    self._partial.rename(self._path)
                    sync_directory(self._path.parent)
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = self._file.write(view)
            self._offset += written
            view = view[written:]


def check_shard(file: BinaryIO, path: Path, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointDamaged` unless an open shard says that it is the one of this name in this checkpoint."""
    file.seek(0)
    try:
        header = json.loads(file.readline(_MAX_HEADER))
        found = (header["format"], header["shard"], header["session"], header["checkpoint"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{path} is no shard: its first line is damaged", call=_LOAD) from error
    expected = (_SHARD_FORMAT, path.name, checkpoint.session, checkpoint.id)
    if found != expected:
        what = f"{path} belongs to checkpoint {found[3]!r} of session {found[2]!r} as {found[1]!r}"
        raise CheckpointDamaged(
            f"{what}, the manifest is that of {checkpoint.id!r} of {checkpoint.session!r}", call=_LOAD
        )


def read_object(file: BinaryIO, path: Path, saved: SavedObject) -> bytes:
    """One object of an open shard. Raises `CheckpointDamaged` unless it hashes to what the manifest says."""
    file.seek(saved.offset)
    data = file.read(saved.size)
    if len(data) != saved.size:
        raise CheckpointDamaged(f"{path} ends within object {saved.name!r}", call=_LOAD)
    if hashlib.sha256(data).hexdigest() != saved.sha256:
        raise CheckpointDamaged(f"{path}: object {saved.name!r} does not hash to what the manifest says", call=_LOAD)
    return data


@contextmanager
def _writing(path: Path, name: str = "") -> Iterator[None]:
    """Errors of the file system as ours, which name the file and the object."""
    try:
        yield
    except OSError as error:
        where = f" at object {name!r}" if name else ""
        raise DataPlaneError(f"{path} can't be written{where}: {error.strerror}", call=_SAVE) from error
