"""A running plane with something that finalizes groups on it, for the commands that need both.

    with open_plane("simple", settings, workers=2) as plane:
        StagingSink(plane.client, staging_partition=STAGING).stage(call)
        for group in plane.finalize_all(requests): ...

`memory` finalizes in this process. `simple` and `mooncake_cpu` start a local Ray and a TransferQueue,
the latter with a Mooncake master and a memory host, and finalize in that many reassembler actors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rollout_reassembler.contract.features import feature
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest, RolloutReassemblerActorConfig
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.config import DataPlaneConfig, MooncakeCpuBackendConfig, SimpleBackendConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from rollout_reassembler.reassembly.rows import register_canonical_partition
from rollout_reassembler.staging.schema import register_staging_partition

PlaneName = Literal["memory", "simple", "mooncake_cpu"]
CANONICAL = "canonical"
STAGING = "staging"


@dataclass(frozen=True)
class OpenPlane:
    """A client of the plane, and `finalize_all`, which yields answers in the order of the requests."""

    client: DataPlaneClient
    finalize_all: Callable[[Iterable[ReassemblyRequest]], Iterator[FinalizedGroup]]


@contextmanager
def open_plane(name: PlaneName, config: RolloutReassemblerActorConfig, *, workers: int) -> Iterator[OpenPlane]:
    """Start the plane, register both partitions, and end all of it when the block ends."""
    if name == "memory":
        client = build_data_plane_client(DataPlaneConfig(impl="memory"))
        _register(client, config)
        yield OpenPlane(client, lambda requests: _finalize_here(client, config, requests))
        client.close()
        return
    with _open_queue(name, config, workers) as plane:
        yield plane


def _register(client: DataPlaneClient, config: RolloutReassemblerActorConfig) -> None:
    register_staging_partition(client, config.staging_partition)
    direct = config.router_replay_enabled and not config.defer_routed_experts_to_policy
    register_canonical_partition(client, config.partition_id, with_routes=direct)


def _finalize_here(
    client: DataPlaneClient, config: RolloutReassemblerActorConfig, requests: Iterable[ReassemblyRequest]
) -> Iterator[FinalizedGroup]:
    reassembler = RolloutReassembler(client, **vars(config))
    for request in requests:
        yield reassembler.finalize(request)
    reassembler.collect_lost()


@contextmanager
def _open_queue(name: PlaneName, config: RolloutReassemblerActorConfig, workers: int) -> Iterator[OpenPlane]:
    with feature(f"the {name} plane", extra="ray,mooncake" if name == "mooncake_cpu" else "ray"):
        from rollout_reassembler.actors.pool import ReassemblerPool
        from rollout_reassembler.actors.rollout_reassembler_actor import create_rollout_reassembler_actors

    dp_config = DataPlaneConfig(
        impl="transfer_queue",
        backend="mooncake_cpu" if name == "mooncake_cpu" else "simple",
        simple=SimpleBackendConfig(num_storage_units=1),
        mooncake_cpu=MooncakeCpuBackendConfig(master_server_address="127.0.0.1:0", start_master=True, memory_hosts=1),
    )
    from rollout_reassembler.data_plane.transfer_queue.cluster import local_ray

    with local_ray(num_cpus=workers + 4):
        client = build_data_plane_client(dp_config, bootstrap=True)
        try:
            _register(client, config)
            actors = create_rollout_reassembler_actors(dp_config, config, num_workers=workers)
            with ReassemblerPool(actors) as pool:
                yield OpenPlane(client, pool.finalize_all)
        finally:
            client.close()
