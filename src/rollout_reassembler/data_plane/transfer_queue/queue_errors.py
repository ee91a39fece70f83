"""TransferQueue's errors as ours. It raises `RuntimeError` for nearly all of them, with the cause inside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
from transfer_queue.storage.managers.simple_storage_manager import StorageUnitTimeout
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite

_FULL = "capacity exceeded"


@asynccontextmanager
async def translated(site: CallSite) -> AsyncIterator[None]:
    """A lost peer is `DataPlaneUnavailable`; what a peer refuses is a `DataPlaneError` with its words."""
    try:
        yield
    except DataPlaneError:
        raise
    except (StorageUnitTimeout, zmq.ZMQError) as error:
        raise site.unavailable(f"a storage unit does not answer: {error}") from error
    except (RuntimeError, StorageKeyNotFoundError) as error:
        if isinstance(error.__cause__, zmq.ZMQError):
            raise site.unavailable(f"the connection failed: {error}") from error
        if _FULL in str(error):
            raise site.failed(f"the queue is full; clear rows or raise total_storage_size: {error}") from error
        raise site.failed(str(error)) from error
