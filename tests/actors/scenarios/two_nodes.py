"""Two Ray nodes on this machine, one of which goes away while groups are in flight. Prints what happened as JSON.

A script of its own: a process can be in one Ray cluster only, and the test session is in another.
"""

from __future__ import annotations

import json
import os
import time

# Where a cluster is not started by `ray.init`, Ray leaves tokens to the environment.
os.environ["RAY_AUTH_MODE"] = "token"

import ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray.cluster_utils import Cluster

from rollout_reassembler import (
    DataPlaneConfig,
    ReassemblerPool,
    RolloutReassemblerActorConfig,
    build_data_plane_client,
    create_rollout_reassembler_actors,
    register_canonical_partition,
    register_staging_partition,
)
from tests.actors.groups import assert_rows_proven, request_of, stage_group

HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
GROUPS = range(24)


def node_of(actor) -> str:
    return ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=120)


def main() -> None:
    ensure_token_if_auth_enabled()
    head = {"num_cpus": 4, "include_dashboard": False, "_system_config": HEALTH_CHECKS}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    dp_config = DataPlaneConfig(impl="transfer_queue")
    plane = build_data_plane_client(dp_config)
    second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    config = RolloutReassemblerActorConfig(
        partition_id="canonical", staging_partition="staging", pad_token_id=0, max_seq_len=None
    )
    register_staging_partition(plane, "staging")
    register_canonical_partition(plane, "canonical")
    for group in GROUPS:
        stage_group(plane, "staging", group)
    actors = create_rollout_reassembler_actors(dp_config, config, num_workers=2)
    before = [node_of(actor) for actor in actors]
    pool = ReassemblerPool(actors)
    futures = [pool.submit(request_of(group)) for group in GROUPS]
    futures[2].result(60)
    cluster.remove_node(second, allow_graceful=False)
    answers = [future.result(180) for future in futures]
    # The groups may be done before the cluster has noticed: until then the lost node's actor may still answer.
    until = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) > 1 and time.monotonic() < until:
        time.sleep(0.1)
    after = [node_of(actor) for actor in actors]
    assert_rows_proven(plane, "canonical", GROUPS)
    report = {
        "nodes_before": len(set(before)),
        "nodes_after": len(set(after)),
        "moved": sum(was != now for was, now in zip(before, after, strict=True)),
        "valid_rows": sum(answer.valid_row_count for answer in answers),
        "staged_left": len(plane.list_samples("staging")),
    }
    pool.close()
    plane.close()
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
