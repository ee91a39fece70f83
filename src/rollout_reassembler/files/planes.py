"""A running plane with something that finalizes groups on it, for the commands that need both.

    with open_plane("simple", settings, workers=2) as plane:
        StagingSink(plane.client, staging_partition=STAGING).stage(call)
        for group in plane.finalize_all(requests): ...

A plane of one process, as `memory` is, finalizes here. For any other a local Ray is started and all of the
plane on it, and that many reassembler actors finalize.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rollout_reassembler.contract.features import feature
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest, RolloutReassemblerActorConfig
from rollout_reassembler.contract.settings import RouteMode
from rollout_reassembler.data_plane import backends
from rollout_reassembler.data_plane.backends import Backend
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.reassembly.collector import LostRollouts
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from rollout_reassembler.reassembly.rows import register_canonical_partition
from rollout_reassembler.staging.schema import register_staging_partition

CANONICAL = "canonical"
STAGING = "staging"


@dataclass(frozen=True)
class OpenPlane:
    """A client of the plane, and `finalize_all`, which yields answers in the order of the requests."""

    client: DataPlaneClient
    finalize_all: Callable[[Iterable[ReassemblyRequest]], Iterator[FinalizedGroup]]


@contextmanager
def open_plane(name: str, config: RolloutReassemblerActorConfig, *, workers: int) -> Iterator[OpenPlane]:
    """Start the plane of that backend, register both partitions, and end all of it when the block ends.

    Raises `ValueError` for a name that no installed backend has.
    """
    backend = backends.require(name)
    if backend.is_shared:
        with _open_on_ray(backend, config, workers) as plane:
            yield plane
        return
    client = build_data_plane_client(_config_of(backend))
    _register(client, config)
    yield OpenPlane(client, lambda requests: _finalize_here(client, config, requests))
    client.close()


def _config_of(backend: Backend) -> DataPlaneConfig:
    """The config by which all of the plane starts on this machine."""
    block = {backend.name: backend.on_this_machine} if backend.config else {}
    return DataPlaneConfig.model_validate({"impl": backend.impl, "backend": backend.name, **block})


def _register(client: DataPlaneClient, config: RolloutReassemblerActorConfig) -> None:
    register_staging_partition(client, config.staging_partition)
    with_routes = config.route_mode is RouteMode.DIRECT
    register_canonical_partition(client, config.partition_id, with_routes=with_routes)


def _finalize_here(
    client: DataPlaneClient, config: RolloutReassemblerActorConfig, requests: Iterable[ReassemblyRequest]
) -> Iterator[FinalizedGroup]:
    reassembler = RolloutReassembler.from_config(client, config)
    for request in requests:
        yield reassembler.finalize(request)
    reassembler.collect_lost()


def _then_collect(
    answers: Iterator[FinalizedGroup], client: DataPlaneClient, config: RolloutReassemblerActorConfig
) -> Iterator[FinalizedGroup]:
    """The answers, and behind the last one what rejected rollouts leave, for which actors come a while later."""
    yield from answers
    LostRollouts(client, staging_partition=config.staging_partition).collect()


@contextmanager
def _open_on_ray(backend: Backend, config: RolloutReassemblerActorConfig, workers: int) -> Iterator[OpenPlane]:
    with feature(f"the {backend.name} plane", extra=backend.extra or "ray"):
        from rollout_reassembler.actors.pool import ReassemblerPool
        from rollout_reassembler.actors.rollout_reassembler_actor import create_rollout_reassembler_actors

    dp_config = _config_of(backend)
    from rollout_reassembler.data_plane.transfer_queue.cluster import local_ray

    with local_ray(num_cpus=workers + 4):
        client = build_data_plane_client(dp_config, bootstrap=True)
        try:
            _register(client, config)
            actors = create_rollout_reassembler_actors(dp_config, config, num_workers=workers)
            with ReassemblerPool(actors) as pool:
                yield OpenPlane(client, lambda requests: _then_collect(pool.finalize_all(requests), client, config))
        finally:
            client.close()
