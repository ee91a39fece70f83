"""Where a staged call lies on the plane: its *place*, the key of its row in the staging partition.

    place(staging key "r1/c0", digest "9f2c…")  →  "r1/c0#9f2c…"      the digest's first 32 characters

A place is told by its content. Whoever stages other bytes under one staging key (another worker that
answered the same admission, another attempt, another rollout whose id and call id join to the same
text) writes another row, and whoever stages the same bytes again writes the same one. A manifest row
names both parts, so its reader knows the place without asking; receipts and staging keys do not hold it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from rollout_reassembler.contract.errors import RequestError

_DIGEST_CHARS = 32
_PLACE = re.compile(rf".+#[0-9a-f]{{{_DIGEST_CHARS}}}", re.DOTALL)


class Staged(Protocol):
    """Whatever names a staged call: a `StagedCall`, its `CallRecord`, a `StagedReference`."""

    @property
    def staging_key(self) -> str: ...
    @property
    def digest(self) -> str: ...


def place(staging_key: str, digest: str) -> str:
    """The place of the call with this key and digest (64 hex characters)."""
    return f"{staging_key}#{digest[:_DIGEST_CHARS]}"


def place_of(staged: Staged) -> str:
    """The place of a staged call."""
    return place(staged.staging_key, staged.digest)


def is_place(key: str) -> bool:
    """Whether a key could be a place. A staging key that ends like one is taken for one."""
    return _PLACE.fullmatch(key) is not None


def as_places(staged: Iterable[str | Staged]) -> list[str]:
    """The places of what a caller names, each a place already or a staged call.

    Raises `RequestError` for a bare staging key: it does not say which bytes are meant.
    """
    places = [item if isinstance(item, str) else place_of(item) for item in staged]
    for key in places:
        if not is_place(key):
            raise RequestError(
                f"{key!r:.200} is not the place of a staged call; give the call, its manifest row, or "
                "place(staging_key, digest)"
            )
    return places
