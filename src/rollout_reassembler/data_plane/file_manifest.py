"""What files a checkpoint consists of: nothing of one is read before all of it is known to be whole.

    manifest.json    SHA-256 of the line below, then {format, files: {path within the folder: [size, SHA-256]}}

Written last, so a folder with a manifest is a whole checkpoint. Files that it does not name are nobody's and
are never read. Whoever can change both a file and the manifest is believed; who may is asked before
(`trusted_files.py`).

Errors of damaged files are `CheckpointDamaged` and name the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_reassembler.contract.errors import CheckpointDamaged, DataPlaneError
from rollout_reassembler.data_plane.durable import sync_directory

FILE_MANIFEST = "manifest.json"

_LOAD = "load_checkpoint"
_SAVE = "save_checkpoint"


def write_file_manifest(directory: Path, kind: str) -> None:
    """Name all files that are in the folder, and make them and the manifest durable."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    try:
        files = {path.relative_to(directory).as_posix(): [path.stat().st_size, _synced_digest(path)] for path in paths}
        body = json.dumps({"format": kind, "files": files}).encode()
        partial = directory / f"{FILE_MANIFEST}.partial"
        with partial.open("wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(directory / FILE_MANIFEST)
        for folder in {directory, *(path.parent for path in paths)}:
            sync_directory(folder)
    except OSError as error:
        raise DataPlaneError(f"{directory} can't be written: {error.strerror}", call=_SAVE) from error


def check_file_manifest(directory: Path, kind: str) -> None:
    """Raise unless every file of the checkpoint is there as it was written.

    `CheckpointDamaged` names the file that is cut, changed, missing or of another checkpoint.
    """
    for name, (size, digest) in _files(directory, kind).items():
        path = directory / name
        if not path.is_file():
            raise CheckpointDamaged(f"{path} is missing; the checkpoint is not whole", call=_LOAD)
        found = path.stat().st_size
        if found != size:
            raise CheckpointDamaged(f"{path} holds {found} bytes, the manifest says {size}", call=_LOAD)
        if _digest(path) != digest:
            raise CheckpointDamaged(f"{path} does not hash to what the manifest says", call=_LOAD)


def _files(directory: Path, kind: str) -> Mapping[str, tuple[int, str]]:
    path = directory / FILE_MANIFEST
    if not path.is_file():
        what = f"{directory} has no {FILE_MANIFEST}: what is in it cannot be checked, and is not loaded"
        raise CheckpointDamaged(what, call=_LOAD)
    line, _, body = path.read_bytes().partition(b"\n")
    if line.decode("ascii", "replace") != hashlib.sha256(body).hexdigest():
        raise CheckpointDamaged(f"{path} is damaged or cut short; use another checkpoint", call=_LOAD)
    content: dict[str, Any] = json.loads(body)
    if content["format"] != kind:
        raise CheckpointDamaged(f"{path} is of another format: {content['format']!r}, not {kind!r}", call=_LOAD)
    return {name: (size, digest) for name, (size, digest) in content["files"].items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _synced_digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
