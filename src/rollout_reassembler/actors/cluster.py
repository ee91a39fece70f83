"""Whether the cluster has the CPUs that actors need, and who holds those that it lacks.

Ray queues an actor that does not fit, for as long as it takes, and says nothing. So it is asked first, and an error
tells what a person needs to free some: CPUs by node, actors by class, placement groups by what they reserve.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import ray
from ray._private import state
from ray.util import placement_group_table

from rollout_reassembler.contract.errors import RequestError

_RELEASE_SECONDS = 2.0
"""CPUs of an actor that was just ended come back a moment later."""

_SHOWN = 8


def require_cpus(count: int) -> None:
    """Raise `RequestError` unless `count` CPUs are free, or are so within a moment."""
    total = _cpus(ray.cluster_resources())  # type: ignore[no-untyped-call]
    if total < count:
        raise RequestError(f"{count} actors need a CPU each; the cluster has {total:g} in all")
    deadline = time.monotonic() + _RELEASE_SECONDS
    while _cpus(ray.available_resources()) < count:  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise RequestError(f"{count} actors need a CPU each, and {cpus_told()}; end some of these, or ask for less")
        time.sleep(0.1)


def cpus_told() -> str:
    """How many CPUs are free on which node, and what is alive or reserved there."""
    free: dict[str, dict[str, float]] = state.available_resources_per_node()  # type: ignore[no-untyped-call]
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    total = sum(_cpus(node["Resources"]) for node in alive)
    at_hand = sum(_cpus(free.get(node["NodeID"], {})) for node in alive)
    nodes = [_node_told(node, free.get(node["NodeID"], {})) for node in alive]
    return "; ".join([f"{at_hand:g} of {total:g} are free now", *_cut(nodes), *_placement_groups_told()])


def _node_told(node: dict[str, Any], free: dict[str, float]) -> str:
    held = Counter(
        actor["ActorClassName"]
        for actor in state.actors().values()
        if actor["State"] == "ALIVE" and actor["Address"]["NodeID"] == node["NodeID"]
    )
    actors = ", ".join(_cut([f"{count} x {name}" for name, count in held.most_common()])) or "no actors"
    cpus = f"{_cpus(free):g} of {_cpus(node['Resources']):g} CPUs free"
    return f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]}): {cpus}, alive there: {actors}"


def _placement_groups_told() -> Iterator[str]:
    for group_id, group in placement_group_table().items():
        reserved = sum(bundle.get("CPU", 0.0) for bundle in group["bundles"].values())
        if group["state"] == "CREATED" and reserved:
            yield f"placement group {group['name'] or group_id[:8]} reserves {reserved:g}"


def _cpus(resources: dict[str, float]) -> float:
    return resources.get("CPU", 0.0)


def _cut(told: list[str]) -> list[str]:
    return told if len(told) <= _SHOWN else [*told[:_SHOWN], f"{len(told) - _SHOWN} more"]
