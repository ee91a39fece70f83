"""A driver with a plane and two staged rows, one of which an hour is too old; ends when its standard input does.

Prints the address of its Ray cluster, and at the end how many rows are left.
"""

from __future__ import annotations

import sys

import ray

from rollout_reassembler import DataPlaneConfig, build_data_plane_client
from tests.captures import STAGING, chain, registered, stage

client = build_data_plane_client(DataPlaneConfig(impl="transfer_queue"))
registered(client)
stage(client, chain("old", turns=1), chain("new", turns=1))
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
print(*(tags["rollout_id"] for tags in client.list_samples(STAGING).values()), flush=True)
client.close()
ray.shutdown()
