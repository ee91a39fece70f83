"""A queue's state on disk, in the queue's own layout, so that its tools read it too.

    metadata.json           that the values are here, and the caller's metadata
    controller_state.pkl    keys, tags, which columns each row holds, who claimed it
    simple_storage/         one pickle a storage unit, and which unit is which

The processes write their parts themselves. The directory takes its final name only when all of them
have: a crash leaves the last checkpoint, under its name or under `<name>.old`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transfer_queue.utils.zmq_utils import ZMQRequestType

from rollout_reassembler.data_plane.durable import mend, new_directory, put_in_place
from rollout_reassembler.data_plane.transfer_queue.calls import Peer
from rollout_reassembler.data_plane.transfer_queue.epoch import marked_while_saved, renewed_by_load, write_mark
from rollout_reassembler.data_plane.transfer_queue.sockets import Call, all_bodies

_METADATA = "metadata.json"
_CONTROLLER = "controller_state.pkl"
_UNITS = "simple_storage"
_WHICH_UNIT = "storage_unit_info.json"


def save_queue(
    call: Call, controller: Peer, units: Sequence[Peer], directory: Path, metadata: Mapping[str, Any]
) -> None:
    """Write a checkpoint, in place of the one that is there."""
    partial = new_directory(directory)
    save_controller(call, controller, partial / _CONTROLLER)
    (partial / _UNITS).mkdir()
    saved = [
        call.send(
            unit,
            ZMQRequestType.SAVE_STORAGE_CHECKPOINT,
            {"path": str(partial / _UNITS / _unit_file(position, unit.id))},
        )
        for position, unit in enumerate(units)
    ]
    _require_success(call, all_bodies(saved))
    which = [{"position": position, "storage_unit_id": unit.id} for position, unit in enumerate(units)]
    (partial / _UNITS / _WHICH_UNIT).write_text(json.dumps(which))
    (partial / _METADATA).write_text(json.dumps({"storage_saved": True, "user_metadata": dict(metadata)}))
    put_in_place(partial, directory)


def load_queue(call: Call, controller: Peer, units: Sequence[Peer], directory: Path) -> dict[str, Any]:
    """Replace the queue's state with a checkpoint's; its metadata. Raises `DataPlaneError` when there is none."""
    mend(directory)
    if not (directory / _METADATA).is_file():
        raise call.site.failed(f"no checkpoint of a queue at {directory}")
    content = json.loads((directory / _METADATA).read_text())
    if not content["storage_saved"]:
        raise call.site.failed(f"the checkpoint at {directory} holds no values, only the controller's state")
    which = json.loads((directory / _UNITS / _WHICH_UNIT).read_text())
    if len(which) != len(units):
        raise call.site.failed(f"the checkpoint is of {len(which)} storage units, the queue has {len(units)}")
    # From the first unit on, rows that were staged before may be gone.
    write_mark(call, controller)
    loaded = [
        call.send(
            units[saved["position"]],
            ZMQRequestType.LOAD_STORAGE_CHECKPOINT,
            {"path": str(directory / _UNITS / _unit_file(saved["position"], saved["storage_unit_id"]))},
        )
        for saved in which
    ]
    _require_success(call, all_bodies(loaded))
    load_controller(call, controller, directory / _CONTROLLER)
    metadata: dict[str, Any] = content["user_metadata"]
    return metadata


def save_controller(call: Call, controller: Peer, path: Path) -> None:
    """Have the controller write its state to a file, which says that it is a saved one (`epoch.py`)."""
    request = ZMQRequestType.SAVE_CONTROLLER_CHECKPOINT
    with marked_while_saved(call, controller):
        answer = call.ask(controller, request, {"path": str(path)})
    _require_success(call, [answer])


def load_controller(call: Call, controller: Peer, path: Path) -> None:
    """Have the controller replace its state by that of a file; the queue has another epoch from here on."""
    request = ZMQRequestType.LOAD_CONTROLLER_CHECKPOINT
    with renewed_by_load(call, controller):
        answer = call.ask(controller, request, {"path": str(path)})
    _require_success(call, [answer])


def _unit_file(position: int, unit_id: str) -> str:
    return f"su_{position}_{unit_id}.pkl"


def _require_success(call: Call, answers: Sequence[Mapping[str, Any]]) -> None:
    for answer in answers:
        if not answer["success"]:
            raise call.site.failed(f"the queue could not do it: {answer.get('message', 'it does not say why')}")
