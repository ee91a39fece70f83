"""The `DataPlaneClient` on Mooncake: that of the queue, over rows whose values are in a store, with its checkpoints.

    open_mooncake(cfg, bootstrap=True)       the driver: master, controller and memory hosts, as cfg says
    open_mooncake(cfg, bootstrap=False)      actors and staging workers

What to know beyond `transfer_queue/client.py`:

- Rows live in memory hosts, so they outlive their writer. A row whose host died is an error
  (`DataPlaneUnavailable`), not a missing row: restore a checkpoint, or clear it.
- A put that replaces a row writes beside the old one and removes it afterwards; the store needs room for both.
- Checkpoints are written by the memory hosts, into a directory that all of them and the controller share.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_reassembler.contract.errors import RequestError
from rollout_reassembler.contract.rpc_guard import assert_metadata_only
from rollout_reassembler.data_plane.config import DataPlaneConfig, Deadlines
from rollout_reassembler.data_plane.mooncake import environment
from rollout_reassembler.data_plane.mooncake.store import MooncakeStore, StoreFailure
from rollout_reassembler.data_plane.transfer_queue.client import QueueDataPlane, begin, lifetime_of
from rollout_reassembler.data_plane.transfer_queue.environment import check_version, prepare_environment

if TYPE_CHECKING:
    from rollout_reassembler.data_plane.mooncake.checkpoint import CheckpointDriver
    from rollout_reassembler.data_plane.mooncake.connection import Connection
    from rollout_reassembler.data_plane.mooncake.owners import Owner
    from rollout_reassembler.data_plane.mooncake.participant import Participant

logger = logging.getLogger(__name__)


def open_mooncake(cfg: DataPlaneConfig, *, bootstrap: bool) -> MooncakeDataPlane:
    """Connect to the plane of this Ray cluster; with `bootstrap` start what `cfg` says if there is none."""
    check_version()
    prepare_environment()
    # Before the queue is imported, which imports Mooncake: how much that logs is settled then.
    environment.prepare_environment(cfg.deadlines)
    from rollout_reassembler.data_plane.mooncake import connection

    with ExitStack() as lifetime:
        started = connection.start(cfg) if bootstrap else None
        if started is not None:
            lifetime.enter_context(started)
        connected = connection.attach(cfg)
        if started is not None:
            begin(connected.rows, cfg.deadlines)
        return mooncake_plane(connected, cfg, lifetime if started is not None else None)


def mooncake_plane(connected: Connection, cfg: DataPlaneConfig, started: ExitStack | None = None) -> MooncakeDataPlane:
    """A client over a connection that is open already. It takes over and ends what this process has `started`."""
    checkpoints = MooncakeCheckpoints(connected, cfg.deadlines)
    lifetime = lifetime_of(connected.rows, started)
    if started is not None:
        lifetime.callback(_remove_rows, connected.store)
    return MooncakeDataPlane(connected.rows, checkpoints, lifetime, cfg)


class MooncakeCheckpoints:
    """Saves and loads the state of a plane by commands to those who own its memory; this process may be one."""

    def __init__(self, connected: Connection, deadlines: Deadlines) -> None:
        from rollout_reassembler.data_plane.mooncake.owners import LocalOwner, as_owner
        from rollout_reassembler.data_plane.mooncake.participant import Participant

        self.connected = connected
        self.owners: list[Owner] = [as_owner(host) for host in connected.hosts]
        self._participant: Participant | None = None
        self._deadlines = deadlines
        if connected.store.segment_size:
            self._participant = Participant(connected.store)
            self.owners.append(LocalOwner(self._participant))

    def save(self, directory: str, metadata: Mapping[str, Any]) -> None:
        """Have each owner of memory write its own objects, and the controller its state.

        Quiesce first; a row that is written or cleared meanwhile is an error. The directory must be on a
        file system that all owners and the controller share.
        """
        self._driver().save(_absolute(directory), metadata)

    def load(self, directory: str) -> dict[str, Any]:
        """Replace what is in the plane, over the owners that there are now; the metadata."""
        return self._driver().load(_absolute(directory))

    def add_owner(self, handle: Any, *, take_over: bool) -> None:
        """Command this one too, if it gives memory."""
        from rollout_reassembler.data_plane.mooncake.owners import as_owner

        owner = as_owner(handle)
        body = {"operation": "DESCRIBE", "session": self.connected.store.session, "take_over": take_over}
        if owner.command(body, self._deadlines.metadata) is not None:
            self.owners.append(owner)

    def run(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """A command about this process's own memory; `None` if it gives none."""
        assert_metadata_only(body)
        if self._participant is None:
            return None
        answer = self._participant.run(body)
        assert_metadata_only(answer)
        return answer

    def _driver(self) -> CheckpointDriver:
        from rollout_reassembler.data_plane.mooncake.checkpoint import CheckpointDriver

        return CheckpointDriver(self.connected, self.owners, self._deadlines.checkpoint)


class MooncakeDataPlane(QueueDataPlane):
    """A connection to a queue whose values are in a Mooncake store, and what there is to say to who owns its memory."""

    _checkpoints: MooncakeCheckpoints

    @property
    def session(self) -> str:
        """The controller's session, which checkpoint commands are bound to."""
        return self._checkpoints.connected.store.session

    def add_owner(self, handle: Any, *, take_over: bool = False) -> None:
        """Make an owner of memory known: a Ray actor's handle with `mooncake_checkpoint`, or a `PipeOwner`.

        Memory hosts that the plane's own bootstrap started are known already. Raises `RequestError` when
        it serves another session; `take_over` ends that one, and removes its objects.
        """
        self._checkpoints.add_owner(handle, take_over=take_over)

    def checkpoint_command(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Run a checkpoint command about this process's own memory; `None` if it gives none."""
        return self._checkpoints.run(body)


def _remove_rows(store: MooncakeStore) -> None:
    """Take the plane's rows out of memory hosts that go on."""
    try:
        store.remove_session()
    except StoreFailure as failure:
        logger.warning("objects of session %s stay in the store: %s", store.session, failure)


def _absolute(directory: str) -> Path:
    path = Path(directory)
    if not path.is_absolute():
        raise RequestError(f"{directory!r} is a relative path; owners on other nodes would look elsewhere")
    return path
