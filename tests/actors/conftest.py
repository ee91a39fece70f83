"""Partitions of their own on the session's queue, and reassembler actors over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray

from rollout_reassembler import (
    DataPlaneClient,
    DataPlaneConfig,
    ReassemblerPool,
    RolloutReassemblerActorConfig,
    create_rollout_reassembler_actors,
    register_canonical_partition,
    register_staging_partition,
)


@dataclass(frozen=True)
class Site:
    """One canonical and one staging partition, registered, and how actors reach them."""

    plane: DataPlaneClient
    dp_config: DataPlaneConfig
    config: RolloutReassemblerActorConfig


@pytest.fixture(scope="session")
def site(queue_plane: DataPlaneClient, queue_config: DataPlaneConfig) -> Site:
    """One for all actor tests; each test uses groups of its own."""
    config = RolloutReassemblerActorConfig(
        partition_id="actors-canonical", staging_partition="actors-staging", pad_token_id=0, max_seq_len=None
    )
    register_staging_partition(queue_plane, config.staging_partition)
    register_canonical_partition(queue_plane, config.partition_id)
    return Site(queue_plane, queue_config, config)


@pytest.fixture(scope="session")
def actors(site: Site) -> Iterator[list[Any]]:
    """Two actors that no test may end."""
    started = create_rollout_reassembler_actors(site.dp_config, site.config, num_workers=2)
    yield started
    for actor in started:
        ray.kill(actor)


@pytest.fixture
def pool(actors: list[Any]) -> Iterator[ReassemblerPool]:
    with ReassemblerPool(actors, owns_actors=False) as pool:
        yield pool
