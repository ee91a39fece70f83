"""Features that need more than the plain install, and the error that says which extra brings them.

    with feature("ReassemblerPool", extra="ray"):
        from rollout_reassembler.actors.pool import ReassemblerPool

An import that fails inside the block because a distribution is not installed becomes `MissingExtra`.
Any other failure (a broken library, a bug of ours) passes as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollout_reassembler.contract.errors import MissingExtra

_DISTRIBUTION = "rollout-reassembler"
_PACKAGE = "rollout_reassembler"


@contextmanager
def feature(name: str, *, extra: str) -> Iterator[None]:
    """What the block imports is there, or `MissingExtra` says how `name` is had."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", _PACKAGE):
            raise
        raise MissingExtra(
            f"{name} needs {missing!r}, which is not installed: pip install '{_DISTRIBUTION}[{extra}]'"
        ) from error
