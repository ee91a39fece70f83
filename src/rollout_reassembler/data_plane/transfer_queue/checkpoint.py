"""A queue's state on disk, in the queue's own layout, so that its tools read it too.

    metadata.json           that the values are here, and the caller's metadata
    controller_state.pkl    keys, tags, which columns each row holds, who claimed it
    simple_storage/         one pickle a storage unit, and which unit is which
    manifest.json           size and SHA-256 of all of these, written last

The processes write their parts themselves. The directory takes its final name only when all of them
have: a crash leaves the last checkpoint, under its name or under `<name>.old`.

Loading is all or nothing. Every file is checked before any process reads one. The parts replace each
other's state one after another; so a queue that holds rows first writes what it holds to
`<name>.before`, and gets it back when a part fails.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transfer_queue.utils.zmq_utils import ZMQRequestType

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.data_plane.durable import complete_replacement, new_directory, put_in_place
from rollout_reassembler.data_plane.file_manifest import FILE_MANIFEST, check_file_manifest, write_file_manifest
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, Peer
from rollout_reassembler.data_plane.transfer_queue.epoch import (
    marked_while_saved,
    new_epoch,
    read_epoch,
    renewed_by_load,
    write_epoch,
    write_mark,
)
from rollout_reassembler.data_plane.transfer_queue.rows import QueueRows
from rollout_reassembler.data_plane.transfer_queue.sockets import Call, Refusal, all_bodies
from rollout_reassembler.data_plane.trusted_files import require_trusted

_FORMAT = "rollout-reassembler queue 1"
_METADATA = "metadata.json"
_CONTROLLER = "controller_state.pkl"
_UNITS = "simple_storage"
_WHICH_UNIT = "storage_unit_info.json"
_OWN_PARTITIONS = "rollout_reassembler."


class QueueCheckpoints:
    """Saves and loads the state of a queue whose values are in its own storage units."""

    def __init__(self, rows: QueueRows, units: Sequence[Peer], seconds: float) -> None:
        self._rows = rows
        self._units = units
        self._seconds = seconds

    def save(self, directory: str, metadata: Mapping[str, Any]) -> None:
        """Write the controller's and the storage units' state, in the queue's own layout.

        Quiesce first: the parts are written one after another. On several nodes the directory
        must be on a file system that all of them share.
        """
        site, path = CallSite("save_checkpoint", directory), Path(directory).absolute()
        with self._rows.sockets.call(site, self._seconds) as call:
            save_queue(call, self._rows.controller.peer, self._units, path, metadata)

    def load(self, directory: str) -> dict[str, Any]:
        """Replace what is in the queue; the metadata. The files are pickles: load none that you did not write."""
        site, path = CallSite("load_checkpoint", directory), Path(directory).absolute()
        controller = self._rows.controller
        with self._rows.sockets.call(site, self._seconds) as call:
            names = (name for name in controller.partitions(call) if not name.startswith(_OWN_PARTITIONS))
            holds_rows = any(controller.list_all(call, name) for name in names)
            return load_queue(call, controller.peer, self._units, path, holds_rows=holds_rows)


def save_queue(
    call: Call, controller: Peer, units: Sequence[Peer], directory: Path, metadata: Mapping[str, Any]
) -> None:
    """Write a checkpoint, in place of the one that is there."""
    try:
        partial = new_directory(directory)
    except OSError as error:
        raise call.site.failed(f"{directory} can't be written: {error.strerror}") from error
    try:
        _save_parts(call, controller, units, partial, metadata)
        put_in_place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _save_parts(
    call: Call, controller: Peer, units: Sequence[Peer], partial: Path, metadata: Mapping[str, Any]
) -> None:
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
    write_file_manifest(partial, _FORMAT)


def load_queue(
    call: Call, controller: Peer, units: Sequence[Peer], directory: Path, *, holds_rows: bool
) -> dict[str, Any]:
    """Replace the queue's state with a checkpoint's; its metadata. A queue that holds rows gets them back on failure.

    Raises `CheckpointDamaged` for a file that is not as it was written, `DataPlaneError` when there is no checkpoint,
    it does not fit the queue, or a part of the queue cannot load it. The queue is as it was then, unless the error
    says otherwise.
    """
    complete_replacement(directory)
    if directory.is_dir():
        require_trusted(directory, call.site.call)
    if not (directory / _METADATA).is_file() and not (directory / FILE_MANIFEST).is_file():
        raise call.site.failed(f"no checkpoint of a queue at {directory}")
    check_file_manifest(directory, _FORMAT)
    content = json.loads((directory / _METADATA).read_text())
    which = json.loads((directory / _UNITS / _WHICH_UNIT).read_text())
    if len(which) != len(units):
        raise call.site.failed(f"the checkpoint is of {len(which)} storage units, the queue has {len(units)}")
    if holds_rows:
        _load_over(call, controller, units, directory)
    else:
        _load_into_empty(call, controller, units, directory)
    metadata: dict[str, Any] = content["user_metadata"]
    return metadata


def _load_into_empty(call: Call, controller: Peer, units: Sequence[Peer], directory: Path) -> None:
    write_mark(call, controller)
    try:
        _load_parts(call, controller, units, directory)
    except (DataPlaneError, Refusal):
        with call.again() as second_call:
            write_epoch(second_call, controller, new_epoch())
        raise


def _load_over(call: Call, controller: Peer, units: Sequence[Peer], directory: Path) -> None:
    """Load into a queue whose state must not be lost when that fails."""
    before = directory.with_name(f"{directory.name}.before")
    try:
        shutil.rmtree(before, ignore_errors=True)
        before.mkdir(mode=0o700)
    except OSError as error:
        what = f"the queue holds rows, which are kept in {before} while it loads; that can't be written"
        raise call.site.failed(f"{what}: {error.strerror}") from error
    is_lost = False
    try:
        _save_parts(call, controller, units, before, {})
        epoch = read_epoch(call, controller)
        # From the first unit on, rows that were staged before may be gone.
        write_mark(call, controller)
        try:
            _load_parts(call, controller, units, directory)
        except (DataPlaneError, Refusal) as error:
            try:
                with call.again() as second_call:
                    _load_parts(second_call, controller, units, before)
                    write_epoch(second_call, controller, epoch)
            except (DataPlaneError, Refusal) as second:
                is_lost = True
                what = f"the queue is partly loaded, and could not be set back ({second}); restart it. What it held"
                raise call.site.failed(f"{what} is in {before}. It failed because: {error}") from error
            raise
    finally:
        if not is_lost:
            shutil.rmtree(before, ignore_errors=True)


def _load_parts(call: Call, controller: Peer, units: Sequence[Peer], directory: Path) -> None:
    which = json.loads((directory / _UNITS / _WHICH_UNIT).read_text())
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
