"""A memory host: a process that gives memory to the store and does nothing else but keep it.

As a Ray actor, which `memory_hosts` in the config starts, or as `reassemble mooncake-host` on any
machine that reaches the master. It serves checkpoint commands about the objects in its memory; as a
process on its own it reads them from its standard input, one JSON object a line:

    > {"operation": "DESCRIBE", "session": "…"}
    < {"answer": {"session": "…", "segment": "…", "endpoint": "…", "size": 1073741824}}
    < {"error": "RequestError", "fields": {"what": "…"}}

Its memory is gone when it ends. Ray does not start it anew: an empty host in its place would only hide that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TextIO

from rollout_reassembler.contract.errors import DataPlaneError, ReassemblerError
from rollout_reassembler.contract.rpc_guard import assert_metadata_only
from rollout_reassembler.data_plane.config import Deadlines, MooncakeCpuBackendConfig
from rollout_reassembler.data_plane.mooncake.environment import on_this_node, prepare_environment
from rollout_reassembler.data_plane.mooncake.participant import Participant
from rollout_reassembler.data_plane.mooncake.store import MooncakeStore


class MemoryHost:
    """Owns a segment of `global_segment_size` bytes. Raises `DataPlaneUnavailable` when the master is not there."""

    def __init__(
        self,
        cfg: MooncakeCpuBackendConfig | Mapping[str, Any],
        *,
        session: str = "",
        deadlines: Deadlines | Mapping[str, Any] | None = None,
    ) -> None:
        config = MooncakeCpuBackendConfig.model_validate(cfg)
        prepare_environment(Deadlines.model_validate(deadlines or {}))
        self._store = MooncakeStore(on_this_node(config), session=session, segment_size=config.global_segment_size)
        self._participant = Participant(self._store)

    @property
    def segment(self) -> str:
        """The segment's name, as the master lists it."""
        return self._store.segment_name

    def mooncake_checkpoint(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Run a checkpoint command about this host's memory; metadata in, metadata out."""
        assert_metadata_only(body)
        answer = self._participant.run(body)
        assert_metadata_only(answer)
        return answer

    def close(self) -> None:
        """Take the memory out of the store."""
        self._store.close()


def serve_commands(host: MemoryHost, commands: TextIO, answers: TextIO) -> None:
    """Run commands, one a line, until their stream ends."""
    for line in commands:
        print(json.dumps(_answered(host, line)), file=answers, flush=True)


def _answered(host: MemoryHost, line: str) -> dict[str, Any]:
    try:
        return {"answer": host.mooncake_checkpoint(json.loads(line))}
    except DataPlaneError as error:
        fields = {"what": error.what, "call": error.call, "keys": list(error.keys)}
        return {"error": type(error).__name__, "fields": fields}
    except (ReassemblerError, ValueError) as error:
        return {"error": "RequestError", "fields": {"what": str(error)}}
