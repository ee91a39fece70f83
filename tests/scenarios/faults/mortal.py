"""A reassembler that dies as it is told to, in an actor that Ray starts again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout_reassembler.actors.rollout_reassembler_actor import _ReassemblerProcess
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest
from rollout_reassembler.data_plane.base import DataPlaneClient
from tests.scenarios.faults.requests import Death, Requests


class Mortal(_ReassemblerProcess):
    """`deaths` says by group how its first attempts end; a file a group in `attempts` counts them, since no attempt
    remembers the last one.
    """

    def __init__(self, dp_config: Any, config: Any, deaths: dict[str, list[Death]], attempts: Path) -> None:
        super().__init__(dp_config, config)
        self._deaths = deaths
        self._attempts = attempts
        self._death: Death | None = None
        self._requests: Requests | None = None

    def finalize(self, request: ReassemblyRequest) -> FinalizedGroup:
        planned = self._deaths.get(request.group_id, [])
        with (self._attempts / request.group_id).open("a") as file:
            attempt = file.tell()
            file.write("x")
        self._death = planned[attempt] if attempt < len(planned) else None
        if self._requests is not None:
            self._requests.die_at(self._death)
        return super().finalize(request)

    def _connect(self) -> DataPlaneClient:
        client = super()._connect()
        self._requests = Requests(client)
        self._requests.die_at(self._death)
        return client
