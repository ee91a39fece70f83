"""A reassembler as a CPU Ray actor: requests of metadata in, answers of metadata out.

    actors = create_rollout_reassembler_actors(dp_config, config, num_workers=4)
    group = ray.get(actors[0].finalize.remote(request))

The actor owns one data-plane connection and one reassembler, in its own process. It bootstraps
nothing: whoever drives the run starts the data plane and registers the partitions. Rows never pass
through it to its caller; the answer names them. Request and answer are both held to
`assert_metadata_only`, a receipt at a time: one that may not cross costs its own rollout.

Ray restarts an actor that dies and runs its request again (`max_restarts`, `max_task_retries`);
that is safe because finalizing twice equals finalizing once. What the actor raises arrives typed:
`DataPlaneError`, `GroupConflict`, `RequestError`, `RpcPayloadError`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout_reassembler.actors.cluster import cpus_told, require_cpus
from rollout_reassembler.actors.metrics import GroupMetrics
from rollout_reassembler.contract.errors import (
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    PartitionNotRegistered,
    RequestError,
)
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest, RolloutReassemblerActorConfig
from rollout_reassembler.contract.requests import plain_request
from rollout_reassembler.contract.rpc_guard import _FORBIDDEN_RPC_KEYS, assert_metadata_only, guarded_request
from rollout_reassembler.data_plane.base import DataPlaneClient, MemoryOwner
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.reassembly.collector import BackgroundCollector, LostRollouts
from rollout_reassembler.reassembly.reassembler import RolloutReassembler

__all__ = [
    "_FORBIDDEN_RPC_KEYS",
    "FinalizedGroup",
    "ReassemblyRequest",
    "RolloutReassemblerActor",
    "RolloutReassemblerActorConfig",
    "assert_metadata_only",
    "create_rollout_reassembler_actors",
]

MAX_TASK_RETRIES = 3
COLLECT_EVERY_S = 10.0
"""An actor looks through the staging partition for the rows of lost rollouts at most this often."""

_ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": MAX_TASK_RETRIES}
_DEPENDENCIES = ("numpy", "pydantic", "ray", "tensordict", "torch", "TransferQueue")


@dataclass(frozen=True)
class _Connection:
    """A client of the plane, and the reassembler over it."""

    client: DataPlaneClient
    reassembler: RolloutReassembler


class _ReassemblerProcess:
    """What runs in an actor: one data-plane connection and one reassembler.

    It connects when it is first used, so that a data plane that can't be reached is the typed error
    of a call rather than the death of an actor; and anew after a plane was lost, since one that comes
    back listens elsewhere.
    """

    def __init__(self, dp_config: DataPlaneConfig | Mapping[str, Any], config: RolloutReassemblerActorConfig) -> None:
        self._dp_config = DataPlaneConfig.model_validate(dp_config)
        self._config = config
        self._connection: _Connection | None = None
        self._collector = BackgroundCollector(self._collect_lost, every_s=COLLECT_EVERY_S)

    def finalize(self, request: ReassemblyRequest) -> FinalizedGroup:
        """Publish the request's group. See `RolloutReassembler.finalize_group` for what it raises.

        A connection from before may be one to a plane that is gone; then it is tried once more with a new one.
        """
        budget = self._config.bounds.max_rpc_bytes
        request = guarded_request(plain_request(request), max_bytes=budget)
        was_connected = self._connection is not None
        try:
            group = self._finalize(request)
        except DataPlaneUnavailable:
            if not was_connected:
                raise
            group = self._finalize(request)
        assert_metadata_only(group, max_bytes=budget)
        self._metrics.observe(group)
        if group.to_collect:
            self._collector.ask()
        return group

    def check_dependencies(self) -> dict[str, str]:
        """Import and reach all that a finalize will need; returns the versions found.

        Raises `DataPlaneUnavailable`, or `PartitionNotRegistered` naming the partition.
        """
        client = self._connected().client
        for partition in (self._config.partition_id, self._config.staging_partition):
            if not client.is_registered(partition):
                raise PartitionNotRegistered(
                    "not registered; the driver registers it once, before it starts actors",
                    call="check_dependencies",
                    partition=partition,
                )
        importlib.import_module("rollout_reassembler.reassembly.routes")
        return {name: version(name) for name in _DEPENDENCIES}

    def mooncake_checkpoint(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Run an owner-local checkpoint command; answers with metadata, never payloads.

        `None` when this process gives no memory to its Mooncake store (`client_segment_size` is 0). Raises
        `RequestError` for a command that is refused, and where the plane is not on Mooncake at all.
        """
        assert_metadata_only(body)
        backend = self._dp_config.chosen
        if backend.has_owners:
            return cast(MemoryOwner, self._connected().client).checkpoint_command(body)
        raise RequestError(
            f"this actor owns no part of a Mooncake store (backend {backend.name!r}), so it has nothing to "
            "checkpoint; save the plane with its client's save_checkpoint(directory)"
        )

    def _finalize(self, request: ReassemblyRequest) -> FinalizedGroup:
        try:
            connection = self._connected()
        except DataPlaneError as error:
            raise error.for_group(request.group_id) from error
        try:
            return connection.reassembler.finalize(request)
        except (DataPlaneTimeout, DataPlaneUnavailable):
            # The next call makes another connection.
            self._connection = None
            connection.client.close()
            raise

    def _connected(self) -> _Connection:
        if self._connection is None:
            client = self._connect()
            self._connection = _Connection(client, RolloutReassembler.from_config(client, self._config))
            # What an actor that died has left.
            self._collector.ask()
        return self._connection

    def _connect(self) -> DataPlaneClient:
        backend = self._dp_config.chosen
        if not backend.is_shared:
            raise DataPlaneUnavailable(
                f"a {backend.name} plane lives in one process and an actor is another; use impl='transfer_queue', or "
                "RolloutReassembler in the process that holds the plane",
                call="connect",
            )
        return build_data_plane_client(self._dp_config, bootstrap=False)

    def _collect_lost(self) -> None:
        # Over a connection of its own: that of the requests may be replaced in the middle.
        client = build_data_plane_client(self._dp_config, bootstrap=False)
        try:
            LostRollouts(client, staging_partition=self._config.staging_partition).collect()
        finally:
            client.close()

    @cached_property
    def _metrics(self) -> GroupMetrics:
        return GroupMetrics(self._config.partition_id)


class RolloutReassemblerActor(_ReassemblerProcess):
    """A reassembler that `RolloutReassemblerActor.remote(dp_config, config)` starts as a Ray actor.

    Called as a plain class it does the same work in this process.
    """

    @classmethod
    def options(cls, **options: Any) -> Any:
        """The Ray actor class with these options over the defaults (1 CPU, no GPU, restarts and retries)."""
        # Ray would complain of a class that has methods by the names of its own.
        return ray.remote(**{**_ACTOR_OPTIONS, **options})(_ReassemblerProcess)

    @classmethod
    def remote(cls, dp_config: DataPlaneConfig | Mapping[str, Any], config: RolloutReassemblerActorConfig) -> Any:
        """Start this as a Ray actor; returns its handle."""
        return cls.options().remote(dp_config, config)


def create_rollout_reassembler_actors(
    dp_config: DataPlaneConfig | Mapping[str, Any],
    config: RolloutReassemblerActorConfig,
    *,
    num_workers: int,
    deadline_s: float = 120.0,
    node_ids: Sequence[str] | None = None,
) -> list[ray.actor.ActorHandle[Any]]:
    """Start `num_workers` actors and have each prove that it can work, within `deadline_s` seconds.

    They spread over the cluster's nodes, or go round `node_ids` where given (softly: a node that is
    gone is replaced by another). Either all actors are usable or none is left: on failure all are
    killed and the first cause is raised. Raises `RequestError` for a count or CPUs that can't be had
    (at once, saying who holds them), `DataPlaneUnavailable`, `PartitionNotRegistered`, or `TimeoutError`.
    """
    if num_workers <= 0:
        raise RequestError(f"num_workers must be at least 1, got {num_workers}")
    require_cpus(num_workers)
    with _AllOrNone() as actors:
        for index in range(num_workers):
            strategy = (
                NodeAffinitySchedulingStrategy(node_ids[index % len(node_ids)], soft=True) if node_ids else "SPREAD"
            )
            actors.append(RolloutReassemblerActor.options(scheduling_strategy=strategy).remote(dp_config, config))
        try:
            ray.get([actor.check_dependencies.remote() for actor in actors], timeout=deadline_s)
        except RayTaskError as error:
            raise error.cause from error
        except GetTimeoutError as error:
            raise TimeoutError(
                f"{num_workers} reassembler actors were not ready after {deadline_s:g} s; they need a CPU each, and "
                f"{cpus_told()}"
            ) from error
    return actors


class _AllOrNone:
    """A list of actors, none of which survives when the block that starts them fails."""

    def __init__(self) -> None:
        self._actors: list[ray.actor.ActorHandle[Any]] = []

    def __enter__(self) -> list[ray.actor.ActorHandle[Any]]:
        return self._actors

    def __exit__(self, kind: type[BaseException] | None, cause: BaseException | None, trace: object) -> None:
        if cause is None:
            return
        for actor in self._actors:
            try:
                ray.kill(actor)
            except ray.exceptions.RayError as error:
                # The first cause is what the caller needs to see.
                cause.add_note(f"while cleaning up, an actor could not be killed: {error}")
