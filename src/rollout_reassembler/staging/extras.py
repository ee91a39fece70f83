"""A call's extras as bytes: the typed binary form that `extras_digest` hashes, and back.

The column `extras` of a staged row holds `encode_extras(mapping)`, or no bytes at all where the call
has none. `decode_extras` reads it and holds it against the digest that the receipt commits to, so
that whoever uses extras has proven them. There is one encoding of a mapping: any other is refused,
whatever its digest. Nothing else in the system reads this column.

    {"a": [1, True]}  ⇄  D 1  "a"  L 2  I 1  B 01
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from rollout_reassembler.contract.digests import MAX_EXTRAS_DEPTH, encoded_extras_digest
from rollout_reassembler.contract.errors import InvalidStagedCall

_U64 = struct.Struct(">Q")
_I64 = struct.Struct(">q")
_F64 = struct.Struct(">d")


def decode_extras(encoded: bytes, committed_digest: str) -> dict[str, Any]:
    """The extras mapping, proven against its digest. Raises `InvalidStagedCall`.

    `encoded` may be empty: no extras, which is proven too.
    """
    if encoded_extras_digest(encoded or b"N") != committed_digest:
        raise InvalidStagedCall("extras do not hash to the digest that commits to them", code="extras_digest_mismatch")
    if not encoded or encoded == b"N":
        return {}
    try:
        value, end = _decode(encoded, 0, depth=0)
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise InvalidStagedCall(f"garbled extras of {len(encoded)} bytes: {error!r}") from error
    if end != len(encoded) or type(value) is not dict:
        raise InvalidStagedCall(f"extras of {len(encoded)} bytes hold {type(value).__name__} in {end} bytes")
    return value


def open_extras(encoded: bytes, committed_digest: str) -> Mapping[str, Any]:
    """`decode_extras`, except that where all values are texts they are views of their bytes."""
    texts = _texts(encoded) if encoded_extras_digest(encoded) == committed_digest else None
    return texts if texts is not None else decode_extras(encoded, committed_digest)


def _texts(encoded: bytes) -> dict[str, memoryview] | None:
    """The extras as views of their texts, `None` where they are anything but a sound mapping of texts.

    A fragment is megabytes of text. `decode_extras` would copy it twice on the way to its string.
    """
    if not encoded.startswith(b"D"):
        return None
    view = memoryview(encoded)
    texts: dict[str, memoryview] = {}
    at, last = 1 + _U64.size, ""
    try:
        for _ in range(_U64.unpack_from(encoded, 1)[0]):
            key_at, key_end = _bounds(encoded, at)
            key = encoded[key_at:key_end].decode()
            if encoded[key_end : key_end + 1] != b"S" or (texts and key <= last):
                return None
            text_at, at = _bounds(encoded, key_end + 1)
            texts[key] = view[text_at:at]
            last = key
    except (struct.error, UnicodeDecodeError):
        return None
    return texts if at == len(encoded) else None


def _bounds(encoded: bytes, at: int) -> tuple[int, int]:
    """Where the text whose length stands at `at` begins and ends."""
    start = at + _U64.size
    end = start + int(_U64.unpack_from(encoded, at)[0])
    if end > len(encoded):
        raise struct.error(f"a text of {end - start} bytes in {len(encoded)}")
    return start, end


def _decode(data: bytes, at: int, *, depth: int) -> tuple[Any, int]:
    if depth > MAX_EXTRAS_DEPTH:
        raise InvalidStagedCall(f"extras are nested deeper than {MAX_EXTRAS_DEPTH}")
    kind, at = data[at : at + 1], at + 1
    if kind == b"L":
        count, at = _count(data, at)
        items = []
        for _ in range(count):
            item, at = _decode(data, at, depth=depth + 1)
            items.append(item)
        return items, at
    if kind == b"D":
        count, at = _count(data, at)
        mapping: dict[str, Any] = {}
        last = ""
        for _ in range(count):
            key, at = _text(data, at)
            # Code points and UTF-8 bytes sort alike.
            if mapping and key <= last:
                raise InvalidStagedCall(f"extras hold the key {key!r:.80} after {last!r:.80}; keys come once, in order")
            mapping[key], at = _decode(data, at, depth=depth + 1)
            last = key
        return mapping, at
    return _SCALARS[kind](data, at)


def _count(data: bytes, at: int) -> tuple[int, int]:
    """A length that the rest of the data can hold: each item takes a byte at least."""
    count = _U64.unpack_from(data, at)[0]
    if count > len(data) - at:
        raise InvalidStagedCall(f"extras claim {count} items in {len(data)} bytes")
    return count, at + 8


def _text(data: bytes, at: int) -> tuple[str, int]:
    length, start = _count(data, at)
    if start + length > len(data):
        raise InvalidStagedCall(f"extras claim a text of {length} bytes in {len(data)}")
    return data[start : start + length].decode(), start + length


def _float(data: bytes, at: int) -> tuple[float, int]:
    value = _F64.unpack_from(data, at)[0]
    if not math.isfinite(value):
        raise InvalidStagedCall(f"extras floats must be finite, found {value!r}")
    return value, at + 8


_BOOLS = {b"\x00": False, b"\x01": True}

_SCALARS: dict[bytes, Callable[[bytes, int], tuple[Any, int]]] = {
    b"N": lambda data, at: (None, at),
    b"B": lambda data, at: (_BOOLS[data[at : at + 1]], at + 1),
    b"I": lambda data, at: (_I64.unpack_from(data, at)[0], at + 8),
    b"F": _float,
    b"S": _text,
}
