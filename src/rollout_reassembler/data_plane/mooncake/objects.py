"""A row's values as objects of a store, and where each value is found again.

An object is written once, under a name that nobody used before, and never changed: whoever overwrites
a column writes a new object, and the old one is removed when nobody refers to it any more. So a
reader gets what it was told of, or nothing, never half of two writes; and an object of a checkpoint can
be brought back beside those that are there.

    put of a row          object            cell, kept by the queue's controller with the row
    reward   1.0                            1.0
    extras   b""                            b""                        small values are no objects at all
    mask     300 bytes    a7-1: both        [a7-1, 700, crc,   0, 300]
    logprobs 400 bytes                      [a7-1, 700, crc, 300, 400] the row's middling values share one
    tokens   1 MB         a7-2              [a7-2, 1 M, crc,   0, 1 M]

Size and CRC-32 of the object in each cell are how a reader knows that it has the bytes that were
written: a store answers for a dead host with none, and memory may have been given to another one.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

INLINE_BYTES = 128
SHARED_BYTES = 64 << 10

Cell = Any
"""A small value itself, or `[name, size, crc, offset, length]`: a part of an object."""


class StoredObject(NamedTuple):
    """An object as the controller knows it: its name, its size and the CRC-32 of its bytes."""

    name: str
    size: int
    crc: int


@dataclass(frozen=True)
class PackedRow:
    """A row's values, packed: the objects to write, and each column's cell."""

    objects: list[tuple[StoredObject, bytes]]
    cells: dict[str, Cell]


@dataclass
class RowIndex:
    """Which object holds each column of a row, as far as columns are objects. Kept in the cell of the owner column."""

    owner: bytes
    columns: dict[str, StoredObject] = field(default_factory=dict)

    @classmethod
    def of(cls, cell: Sequence[Any]) -> RowIndex:
        owner, columns = cell
        return cls(bytes(owner), {column: StoredObject(*stored) for column, stored in columns.items()})

    def to_cell(self) -> list[Any]:
        return [self.owner, {column: list(stored) for column, stored in self.columns.items()}]

    def overwritten(self, owner: bytes, cells: Mapping[str, Cell]) -> RowIndex:
        """The index once these cells were put."""
        columns = {column: stored for column, stored in self.columns.items() if column not in cells}
        columns |= {column: StoredObject(*cell[:3]) for column, cell in cells.items() if is_part(cell)}
        return RowIndex(owner, columns)

    def names(self) -> set[str]:
        """The names of the row's objects."""
        return {stored.name for stored in self.columns.values()}


class Names:
    """Names for objects, none of which was used before in any process."""

    def __init__(self) -> None:
        self._writer = uuid4().hex[:16]
        self._numbers = itertools.count()

    def new(self) -> str:
        return f"{self._writer}-{next(self._numbers):x}"


def is_part(cell: Cell) -> bool:
    """Whether a cell refers to an object."""
    return isinstance(cell, list | tuple)


def pack_row(values: Mapping[str, Any], names: Names) -> PackedRow:
    """A row's values by column (bytes or numbers) as few objects: what is large stands alone, the rest share one."""
    cells: dict[str, Cell] = {}
    shared: dict[str, bytes] = {}
    objects: list[tuple[StoredObject, bytes]] = []
    for column, value in values.items():
        if not isinstance(value, bytes) or len(value) <= INLINE_BYTES:
            cells[column] = value
        elif len(value) < SHARED_BYTES:
            shared[column] = value
        else:
            stored = _stored(value, names)
            objects.append((stored, value))
            cells[column] = [*stored, 0, len(value)]
    if shared:
        content = b"".join(shared.values())
        stored = _stored(content, names)
        objects.append((stored, content))
        offset = 0
        for column, value in shared.items():
            cells[column] = [*stored, offset, len(value)]
            offset += len(value)
    return PackedRow(objects, cells)


def referred(cells: Iterable[Cell]) -> list[StoredObject]:
    """The objects that these cells are parts of, each once."""
    return list(dict.fromkeys(StoredObject(*cell[:3]) for cell in cells if is_part(cell)))


def unpack(cell: Cell, contents: Mapping[str, bytes]) -> Any:
    """The value of a cell, from the contents of objects by name."""
    if not is_part(cell):
        return cell
    name, size, _, offset, length = cell
    content = contents[name]
    return content if length == size else content[offset : offset + length]


def is_intact(stored: StoredObject, content: bytes) -> bool:
    """Whether these are the bytes that were written."""
    return len(content) == stored.size and zlib.crc32(content) == stored.crc


def _stored(content: bytes, names: Names) -> StoredObject:
    return StoredObject(names.new(), len(content), zlib.crc32(content))
