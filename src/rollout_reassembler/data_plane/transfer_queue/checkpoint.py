"""A queue's state on disk, in the queue's own layout, so that its tools read it too.

    metadata.json           that the values are here, and the caller's metadata
    controller_state.pkl    keys, tags, which columns each row holds, who claimed it
    simple_storage/         one pickle a storage unit, and which unit is which

The processes write their parts themselves. The directory takes its final name only when all of them
have: a crash leaves the last checkpoint, under its name or under `<name>.old`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transfer_queue.client import AsyncTransferQueueClient

from rollout_reassembler.data_plane.durable import mend, new_directory, put_in_place
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite

_METADATA = "metadata.json"
_CONTROLLER = "controller_state.pkl"


async def save_queue(queue: AsyncTransferQueueClient, directory: Path, metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint, in place of the one that is there."""
    partial = new_directory(directory)
    await queue.async_save_controller_checkpoint(str(partial / _CONTROLLER))
    await queue.async_save_storage_checkpoint(str(partial))
    (partial / _METADATA).write_text(json.dumps({"storage_saved": True, "user_metadata": dict(metadata)}))
    put_in_place(partial, directory)


async def load_queue(site: CallSite, queue: AsyncTransferQueueClient, directory: Path) -> dict[str, Any]:
    """Replace the queue's state with a checkpoint's; its metadata. Raises `DataPlaneError` when there is none."""
    mend(directory)
    if not (directory / _METADATA).is_file():
        raise site.failed(f"no checkpoint of a queue at {directory}")
    content = json.loads((directory / _METADATA).read_text())
    if not content["storage_saved"]:
        raise site.failed(f"the checkpoint at {directory} holds no values, only the controller's state")
    await queue.async_load_storage_checkpoint(str(directory))
    await queue.async_load_controller_checkpoint(str(directory / _CONTROLLER))
    metadata: dict[str, Any] = content["user_metadata"]
    return metadata
