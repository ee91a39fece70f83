"""Which life of a queue this is: what `DataPlaneClient.epoch` answers, kept in the queue as the tag of one row.

    bootstrap        a fresh epoch
    save             a mark · the controller's state is written · the epoch again
    load             a mark · units and controller take the saved state · a fresh epoch

A saved state holds a mark, so a restored one never shows the epoch of a queue that goes on: neither before
its new epoch is written, nor when whoever loaded it died first. A mark is an epoch that nobody stages on for
long; one that stays, since its writer died, is as good as any other. A queue that somebody else
started has no row, and goes by its controller's own id.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from transfer_queue.utils.zmq_utils import ZMQRequestType

from rollout_reassembler.data_plane.transfer_queue.calls import Peer
from rollout_reassembler.data_plane.transfer_queue.sockets import Call, Refusal

EPOCH_PARTITION = "rollout_reassembler.epoch"

_KEY = "epoch"
_TAG = "epoch"
_MARK = "mark/"


def new_epoch() -> str:
    return uuid4().hex


def is_mark(epoch: str) -> bool:
    """Whether the queue is being saved or loaded, or somebody died while it was."""
    return epoch.startswith(_MARK)


def read_epoch(call: Call, controller: Peer) -> str:
    """The queue's epoch, or a mark."""
    question = {"keys": [_KEY], "partition_id": EPOCH_PARTITION, "create": False}
    meta = call.ask(controller, ZMQRequestType.KV_RETRIEVE_META, question)["metadata"]
    found = meta.custom_meta[0].get(_TAG) if len(meta) else None
    return str(found or controller.id)


def write_epoch(call: Call, controller: Peer, epoch: str) -> None:
    """Let the queue show this epoch."""
    question = {"keys": [_KEY], "partition_id": EPOCH_PARTITION, "create": True}
    meta = call.ask(controller, ZMQRequestType.KV_RETRIEVE_META, question)["metadata"]
    tags = {EPOCH_PARTITION: {meta.global_indexes[0]: {_TAG: epoch}}}
    call.ask(controller, ZMQRequestType.SET_CUSTOM_META, {"partition_custom_meta": tags})


def write_mark(call: Call, controller: Peer) -> None:
    """Let the queue show that what it holds is about to be saved or replaced."""
    write_epoch(call, controller, f"{_MARK}{new_epoch()}")


@contextmanager
def marked_while_saved(call: Call, controller: Peer) -> Iterator[None]:
    """A block that writes the controller's state, with a mark in it."""
    before = read_epoch(call, controller)
    write_mark(call, controller)
    try:
        yield
    finally:
        write_epoch(call, controller, new_epoch() if is_mark(before) else before)


@contextmanager
def renewed_by_load(call: Call, controller: Peer) -> Iterator[None]:
    """A block that replaces the controller's state; a fresh epoch behind it.

    Where the controller refuses, its state is what it was, and so is the epoch.
    """
    before = read_epoch(call, controller)
    write_mark(call, controller)
    try:
        yield
    except Refusal:
        write_epoch(call, controller, before)
        raise
    write_epoch(call, controller, new_epoch())
