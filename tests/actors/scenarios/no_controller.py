"""Actors asked for where nobody started a data plane: prints the error and how long it took, as JSON."""

from __future__ import annotations

import json
import os
import time

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray

from rollout_reassembler import (
    DataPlaneConfig,
    RolloutReassemblerActorConfig,
    create_rollout_reassembler_actors,
)


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    config = RolloutReassemblerActorConfig("canonical", "staging", 0, False, False, None)
    start = time.monotonic()
    try:
        create_rollout_reassembler_actors(DataPlaneConfig(impl="transfer_queue"), config, num_workers=1)
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}))
    ray.shutdown()


if __name__ == "__main__":
    main()
