"""Actors asked for where nobody started a data plane: prints the error and how long it took, as JSON."""

from __future__ import annotations

import json
import time

import ray

from rollout_reassembler import (
    DataPlaneConfig,
    RolloutReassemblerActorConfig,
    create_rollout_reassembler_actors,
)
from rollout_reassembler.data_plane.transfer_queue.cluster import start_local_ray


def main() -> None:
    start_local_ray(2)
    config = RolloutReassemblerActorConfig("canonical", "staging", 0, False, False, None)
    start = time.monotonic()
    try:
        create_rollout_reassembler_actors(DataPlaneConfig(impl="transfer_queue"), config, num_workers=1)
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}))
    ray.shutdown()


if __name__ == "__main__":
    main()
