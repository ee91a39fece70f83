"""Text from agents and callers, fit for one line of a log or of an error.

What comes in may hold anything: newlines that forge log lines, escape sequences, bidirectional controls that turn
what follows around, lone surrogates that no stream can encode, megabytes. What goes out is printable and short.
"""

from __future__ import annotations

from typing import Any

_SHOWN = 500


def one_line(text: str, limit: int = _SHOWN) -> str:
    """The text with all that is not printable escaped, `limit` characters of it and a word on the rest."""
    head = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    if len(head) > limit or len(text) > limit:
        return f"{head[:limit]}… ({len(text)} characters)"
    return head


def described(value: Any, limit: int = 80) -> str:
    """A value by type and, where that is short and plain, by what it is: `str '1.0'`, `dict of 3 items`."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"{name} {one_line(repr(value[:limit]), limit)}"
    if isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() <= 256):
        return f"{name} {value!r}"
    if hasattr(value, "shape"):
        return f"{name} of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple | dict | set | frozenset | bytes):
        return f"{name} of {len(value)} items"
    return name
