"""An append-only file of JSON lines that many threads and processes write at once.

One appended line is one write, under an exclusive lock, and on disk once `sync` has returned. Writers that wait for the
disk at once wait for it together: `sync` is for all bytes of the file. A writer that
dies in its write leaves a *torn* line. A torn line is never read as a row, never repaired and never
glued to the next one: whoever appends behind it starts a new line first.

    {"kind": "admitted", …}\\n
    {"kind": "recor              <- torn: reported by its offset
    {"kind": "recorded", …}\\n

A line is a row exactly when it is a whole JSON object, so a reader that saw a torn line before the
next append and one that sees it afterwards agree.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20
_NEWLINE = b"\n"


@dataclass(frozen=True)
class Tail:
    """What a journal holds behind an offset: its rows, the offsets of its torn lines, and where it ends."""

    rows: list[dict[str, Any]]
    torn: list[int]
    end: int


@contextmanager
def locked(path: Path, *, write: bool) -> Iterator[int]:
    """A descriptor of the journal, held exclusively to write (it is created if need be), shared to read.

    Raises `FileNotFoundError` when there is nothing to read.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if write else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
        yield descriptor
    finally:
        os.close(descriptor)


def read_from(descriptor: int, offset: int) -> Tail:
    """All whole lines behind `offset`, which is 0 or the `end` of an earlier read."""
    data = _bytes_from(descriptor, offset)
    rows: list[dict[str, Any]] = []
    torn: list[int] = []
    at = offset
    for line in data.split(_NEWLINE):
        if line:
            row = _parsed(line)
            if row is None:
                torn.append(at)
            else:
                rows.append(row)
        at += len(line) + 1
    return Tail(rows, torn, offset + len(data))


def append(descriptor: int, row: str) -> int:
    """Write one row, a JSON object without newlines; how many bytes the file grew by. Raises `OSError`."""
    size = os.fstat(descriptor).st_size
    opening = b"" if size == 0 or os.pread(descriptor, 1, size - 1) == _NEWLINE else _NEWLINE
    line = opening + row.encode() + _NEWLINE
    written = os.write(descriptor, line)
    if written != len(line):
        raise OSError(f"wrote {written} of {len(line)} bytes of a ledger row; is the disk full?")
    return written


def sync(path: Path) -> None:
    """Wait until the disk has all that was appended. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_from(descriptor: int, offset: int) -> bytes:
    chunks = []
    while chunk := os.pread(descriptor, _CHUNK, offset):
        chunks.append(chunk)
        offset += len(chunk)
    return b"".join(chunks)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
