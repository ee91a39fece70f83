"""The driver's side of a checkpoint: it commands those who own memory, and moves no object itself.

    save   who owns which segment?   which objects do rows refer to?   where do they lie?
           each owner: SAVE_SHARD of its own   the controller: its state   the manifest, last
    load   manifest and files checked   each owner: LOAD_OBJECTS, balanced by size over those there are now
           all there? then the controller: the saved state, and what only the old state referred to is removed

Until the controller has the saved state nobody refers to a loaded object, and objects never change:
so a load that fails removes those that it has brought, and the plane is as it was.
"""

from __future__ import annotations

import heapq
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from rollout_reassembler.contract.errors import ReassemblerError
from rollout_reassembler.data_plane.checkpoint import (
    CONTROLLER,
    Checkpoint,
    Manifest,
    SavedObject,
    check_files,
    read_manifest,
    sha256_of,
    write_manifest,
)
from rollout_reassembler.data_plane.durable import complete_replacement, new_directory, put_in_place
from rollout_reassembler.data_plane.mooncake.connection import Connection
from rollout_reassembler.data_plane.mooncake.objects import StoredObject
from rollout_reassembler.data_plane.mooncake.owners import Owner
from rollout_reassembler.data_plane.mooncake.store import StoreFailure, as_data_plane_error
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite
from rollout_reassembler.data_plane.transfer_queue.checkpoint import load_controller, save_controller
from rollout_reassembler.data_plane.trusted_files import require_trusted

T = TypeVar("T")

_OBJECTS_A_COMMAND = 16_384
"""Keeps commands and answers far below the budget of metadata."""


@dataclass(frozen=True)
class _Segment:
    """An owner, and the memory that it gives."""

    owner: Owner
    endpoint: str
    size: int


class CheckpointDriver:
    """Saves and loads the state of one plane."""

    def __init__(self, connected: Connection, owners: Sequence[Owner], seconds: float):
        self._rows = connected.rows
        self._values = connected.values
        self._store = connected.store
        self._owners = owners
        self._until = time.monotonic() + seconds

    def save(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        """Write a checkpoint in place of the one that is there. Raises `DataPlaneError`; that one stays then."""
        site = CallSite("save_checkpoint", str(directory))
        segments = self._describe()
        objects = self._stored(site)
        by_segment = self._by_segment(site, segments, objects)
        try:
            partial = new_directory(directory)
        except OSError as error:
            raise site.failed(f"{directory} can't be written: {error.strerror}") from error
        try:
            self._save_into(site, partial, by_segment, metadata)
            if self._stored(site) != objects:
                raise site.failed("rows were written or cleared while they were saved; quiesce first")
            put_in_place(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def load(self, directory: Path) -> dict[str, Any]:
        """Replace the plane's state by a checkpoint's; its metadata. Raises `DataPlaneError`."""
        site = CallSite("load_checkpoint", str(directory))
        complete_replacement(directory)
        if directory.is_dir():
            require_trusted(directory, site.call)
        manifest = read_manifest(directory)
        check_files(directory, manifest)
        segments = self._describe()
        before = self._stored(site)
        names = [saved.name for saved in manifest.objects]
        there = self._on_store(site, lambda: self._store.are_there(names))
        new = [saved for saved, is_there in zip(manifest.objects, there, strict=True) if not is_there]
        old = [saved for saved, is_there in zip(manifest.objects, there, strict=True) if is_there]
        try:
            self._load_objects(site, directory, manifest, _balanced(site, segments, before, new), old)
            with self._rows.sockets.call(site, self._left()) as call:
                load_controller(call, self._rows.controller.peer, directory / CONTROLLER)
        except ReassemblerError as error:
            self._undo([saved.name for saved in new], error)
            raise
        replaced = sorted(before.keys() - set(names))
        self._on_store(site, lambda: self._store.remove(replaced))
        return dict(manifest.metadata)

    def _save_into(
        self,
        site: CallSite,
        partial: Path,
        by_segment: Mapping[_Segment, list[StoredObject]],
        metadata: Mapping[str, Any],
    ) -> None:
        checkpoint = Checkpoint(uuid4().hex, self._store.session)
        orders: list[tuple[Owner, list[dict[str, Any]]]] = []
        for number, (segment, objects) in enumerate(by_segment.items()):
            bodies = [
                {
                    "operation": "SAVE_SHARD",
                    "session": checkpoint.session,
                    "checkpoint": checkpoint.id,
                    "directory": str(partial),
                    "shard": f"shard-{number}-{part}.rows",
                    "objects": [list(stored) for stored in some],
                }
                for part, some in enumerate(_parts(objects))
            ]
            orders.append((segment.owner, bodies))
        answers = self._command_all(orders)
        saved = tuple(
            SavedObject(name, answer["shard"], offset, size, sha256)
            for answer in answers
            for name, offset, size, sha256 in answer["objects"]
        )
        with self._rows.sockets.call(site, self._left()) as call:
            save_controller(call, self._rows.controller.peer, partial / CONTROLLER)
        shards = {answer["shard"]: answer["size"] for answer in answers}
        write_manifest(partial, Manifest(checkpoint, sha256_of(partial / CONTROLLER), shards, saved, metadata))

    def _load_objects(
        self,
        site: CallSite,
        directory: Path,
        manifest: Manifest,
        new: Mapping[_Segment, list[SavedObject]],
        old: Sequence[SavedObject],
    ) -> None:
        """Have all objects in the store: those that are missing brought by owners, those that are there compared."""
        orders: list[tuple[Owner, list[dict[str, Any]]]] = []
        for number, (segment, objects) in enumerate(new.items()):
            compared = list(old)[number :: len(new)]
            bodies = [
                {
                    "operation": "LOAD_OBJECTS",
                    "session": self._store.session,
                    "checkpoint": manifest.checkpoint.id,
                    "saved_session": manifest.checkpoint.session,
                    "directory": str(directory),
                    "objects": [[o.name, o.shard, o.offset, o.size, o.sha256] for o in some],
                }
                for some in _parts([*objects, *compared])
            ]
            orders.append((segment.owner, bodies))
        counts = self._command_all(orders)
        found = sum(count["loaded"] + count["kept"] for count in counts)
        names = [saved.name for saved in manifest.objects]
        there = self._on_store(site, lambda: self._store.are_there(names))
        missing = [name for name, is_there in zip(names, there, strict=True) if not is_there]
        if missing or found != len(names):
            what = f"{len(names) - len(missing)} of the {len(names)} objects of the manifest are in the store"
            raise site.failed(f"{what} after loading{f', not {missing[0]!r}' if missing else ''}")

    def _describe(self) -> list[_Segment]:
        """The memory of all owners. Raises what an owner that cannot be asked raises."""
        body = {"operation": "DESCRIBE", "session": self._store.session}
        answers = [owner.command(dict(body), self._left()) for owner in self._owners]
        return [
            _Segment(owner, answer["endpoint"], answer["size"])
            for owner, answer in zip(self._owners, answers, strict=True)
            if answer is not None
        ]

    def _stored(self, site: CallSite) -> dict[str, StoredObject]:
        with self._rows.sockets.call(site, self._left()) as call:
            return self._values.stored(call)

    def _by_segment(
        self, site: CallSite, segments: Sequence[_Segment], objects: Mapping[str, StoredObject]
    ) -> dict[_Segment, list[StoredObject]]:
        """Whose each object is. Raises `DataPlaneError` for one that is lost or that no owner known here holds."""
        places = self._on_store(site, lambda: self._store.places(list(objects)))
        lost = objects.keys() - places.keys()
        if lost:
            raise site.unavailable(f"{len(lost)} objects are lost, first {min(lost)!r}: a memory host is gone")
        known = {segment.endpoint: segment for segment in segments}
        by_segment: dict[_Segment, list[StoredObject]] = {}
        for name, endpoint in places.items():
            if endpoint not in known:
                what = f"object {name!r} lies in the memory of {endpoint}, which no owner known here gives"
                raise site.failed(f"{what}; pass its handle to add_owner")
            by_segment.setdefault(known[endpoint], []).append(objects[name])
        return by_segment

    def _command_all(self, orders: Sequence[tuple[Owner, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
        """All answers; the owners work at the same time, each through its commands in turn. Raises the first error."""
        if not orders:
            return []

        def obey(order: tuple[Owner, list[dict[str, Any]]]) -> list[dict[str, Any]]:
            owner, bodies = order
            answers = [owner.command(body, self._left()) for body in bodies]
            return [answer for answer in answers if answer is not None]

        with ThreadPoolExecutor(len(orders), thread_name_prefix="mooncake-checkpoint") as pool:
            return [answer for answers in list(pool.map(obey, orders)) for answer in answers]

    def _undo(self, names: Sequence[str], error: BaseException) -> None:
        try:
            self._store.remove(names)
        except StoreFailure as failure:
            error.add_note(f"objects that were loaded may stay in the store, where nobody refers to them: {failure}")

    def _on_store(self, site: CallSite, work: Callable[[], T]) -> T:
        try:
            return work()
        except StoreFailure as failure:
            raise as_data_plane_error(failure, site.call, site.partition) from failure

    def _left(self) -> float:
        return max(self._until - time.monotonic(), 0.1)


def _parts(objects: Sequence[T]) -> list[Sequence[T]]:
    return [objects[start : start + _OBJECTS_A_COMMAND] for start in range(0, len(objects), _OBJECTS_A_COMMAND)]


def _balanced(
    site: CallSite, segments: Sequence[_Segment], before: Mapping[str, StoredObject], objects: Sequence[SavedObject]
) -> dict[_Segment, list[SavedObject]]:
    """Each object to the owner with the least bytes so far, the largest objects first.

    Raises `DataPlaneError` when they cannot fit beside what is in the store now.
    """
    room = sum(segment.size for segment in segments) - sum(stored.size for stored in before.values())
    needed = sum(saved.size for saved in objects)
    if needed > room:
        what = f"the checkpoint needs {needed} bytes more, and {len(segments)} owners have room for {max(room, 0)}"
        raise site.failed(f"{what}; add memory hosts")
    shares: dict[_Segment, list[SavedObject]] = {segment: [] for segment in segments}
    heap = [(0, number) for number in range(len(segments))]
    for saved in sorted(objects, key=lambda saved: -saved.size):
        load, number = heapq.heappop(heap)
        shares[segments[number]].append(saved)
        heapq.heappush(heap, (load + saved.size, number))
    return shares
