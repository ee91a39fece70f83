"""Writing to a queue as any TransferQueue client may: with no schema, no checks, and none of our columns."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from rollout_reassembler.data_plane.transfer_queue.calls import CallSite
from tests.captures import STAGING

_SECONDS = 10.0


def raw_put(
    plane: Any, key: str, fields: dict[str, Any] | None = None, tags: dict[str, Any] | None = None, *, to: str = STAGING
) -> None:
    """What `transfer_queue.kv_put` does, over the sockets of a connected plane."""
    queue = plane._rows._queue

    async def put() -> None:
        meta = await queue.async_kv_retrieve_meta([key], to, create=True)
        if tags is not None:
            meta.update_custom_meta([tags])
        if fields is not None:
            meta = await queue.async_put(TensorDict(fields, batch_size=1), meta)
        if tags is not None:
            await queue.async_set_custom_meta(meta)

    plane._calls.run(CallSite("raw put"), put, _SECONDS)
