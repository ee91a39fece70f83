"""The `DataPlaneClient` on Mooncake: the TransferQueue one over another store, with checkpoints of its own.

    MooncakeDataPlane(cfg, bootstrap=True)       the driver: master, controller and memory hosts, as cfg says
    MooncakeDataPlane(cfg, bootstrap=False)      actors and staging workers

What to know beyond `transfer_queue/client.py`:

- Rows live in memory hosts, so they outlive their writer. A row whose host died is an error
  (`DataPlaneUnavailable`), not a missing row: restore a checkpoint, or clear it.
- A put that replaces a row writes beside the old one and removes it afterwards; the store needs room for both.
- Checkpoints are written by the memory hosts, into a directory that all of them and the controller share.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_reassembler.contract.errors import DataPlaneError, RequestError
from rollout_reassembler.contract.rpc_guard import assert_metadata_only
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.mooncake import environment
from rollout_reassembler.data_plane.mooncake.store import StoreFailure
from rollout_reassembler.data_plane.transfer_queue.client import TransferQueueDataPlane
from rollout_reassembler.data_plane.transfer_queue.environment import check_version, prepare_environment

if TYPE_CHECKING:
    from rollout_reassembler.data_plane.mooncake.checkpoint import CheckpointDriver
    from rollout_reassembler.data_plane.mooncake.connection import Connection
    from rollout_reassembler.data_plane.mooncake.owners import Owner
    from rollout_reassembler.data_plane.mooncake.participant import Participant

logger = logging.getLogger(__name__)


class MooncakeDataPlane(TransferQueueDataPlane):
    """A connection to the queue of this Ray cluster, whose values are in a Mooncake store."""

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool) -> None:
        check_version()
        prepare_environment()
        # Before the queue is imported, which imports Mooncake: how much that logs is settled then.
        environment.prepare_environment(cfg.deadlines)
        from rollout_reassembler.data_plane.mooncake import connection

        self._started = connection.start(cfg) if bootstrap else None
        try:
            self._connect(connection.attach(cfg), cfg)
        except DataPlaneError:
            if self._started is not None:
                self._started.close()
            raise

    @classmethod
    def over_connection(cls, connected: Connection, cfg: DataPlaneConfig) -> MooncakeDataPlane:
        """A client over a connection that is open already, of a plane that somebody else started."""
        plane = cls.__new__(cls)
        plane._started = None
        plane._connect(connected, cfg)
        return plane

    def _connect(self, connected: Connection, cfg: DataPlaneConfig) -> None:
        from rollout_reassembler.data_plane.mooncake.owners import LocalOwner, as_owner
        from rollout_reassembler.data_plane.mooncake.participant import Participant

        self._use(connected.rows, cfg)
        self._mooncake = connected
        self._owners: list[Owner] = [as_owner(host) for host in connected.hosts]
        self._participant: Participant | None = None
        if connected.store.segment_size:
            self._participant = Participant(connected.store)
            self._owners.append(LocalOwner(self._participant))

    @property
    def session(self) -> str:
        """The controller's session, which checkpoint commands are bound to."""
        return self._mooncake.store.session

    def add_owner(self, handle: Any, *, take_over: bool = False) -> None:
        """Make an owner of memory known: a Ray actor's handle with `mooncake_checkpoint`, or a `PipeOwner`.

        Memory hosts that the plane's own bootstrap started are known already. Raises `RequestError` when
        it serves another session; `take_over` ends that one, and removes its objects.
        """
        from rollout_reassembler.data_plane.mooncake.owners import as_owner

        owner = as_owner(handle)
        body = {"operation": "DESCRIBE", "session": self.session, "take_over": take_over}
        if owner.command(body, self._deadlines.metadata) is not None:
            self._owners.append(owner)

    def checkpoint_command(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Run a checkpoint command about this process's own memory; `None` if it gives none."""
        assert_metadata_only(body)
        if self._participant is None:
            return None
        answer = self._participant.run(body)
        assert_metadata_only(answer)
        return answer

    def save_checkpoint(self, directory: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Have each owner of memory write its own objects, and the controller its state.

        Quiesce first; a row that is written or cleared meanwhile is an error. The directory must be on a
        file system that all owners and the controller share.
        """
        self._driver().save(_absolute(directory), metadata or {})

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        """Replace what is in the plane, over the owners that there are now; other clients should reconnect.

        The controller's part is a pickle: load none that you did not write.
        """
        metadata = self._driver().load(_absolute(directory))
        self._schemas.clear()
        self._gate.forget_restored()
        return metadata

    def close(self) -> None:
        """Disconnect; the client that started the plane also ends it, and removes its rows from hosts that go on."""
        if self._started is not None:
            try:
                self._mooncake.store.remove_session()
            except StoreFailure as failure:
                logger.warning("objects of session %s stay in the store: %s", self.session, failure)
        super().close()

    def _driver(self) -> CheckpointDriver:
        from rollout_reassembler.data_plane.mooncake.checkpoint import CheckpointDriver

        seconds = self._deadlines.checkpoint
        return CheckpointDriver(self._mooncake.rows, self._mooncake.store, self._owners, seconds)


def _absolute(directory: str) -> Path:
    path = Path(directory)
    if not path.is_absolute():
        raise RequestError(f"{directory!r} is a relative path; owners on other nodes would look elsewhere")
    return path
