"""A driver with a queue that runs: prints which ports its processes listen on, then waits for its input to end.

python -m tests.data_plane.scenarios.listening_plane SECURITY
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import psutil
import ray

from rollout_reassembler import DataPlaneConfig, FieldSpec, build_data_plane_client
from rollout_reassembler.data_plane.transfer_queue.cluster import start_local_ray


def listening() -> list[tuple[str, str, int]]:
    """`(process, address, port)` of each TCP port that this process and those it started listen on."""
    driver = psutil.Process()
    ports = [
        (process.name(), *connection.laddr)
        for process in (driver, *driver.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    return sorted(set(ports))


def main() -> None:
    start_local_ray(4)
    security: Any = sys.argv[1]
    plane = build_data_plane_client(DataPlaneConfig(impl="transfer_queue", security=security), bootstrap=True)
    plane.register_partition("p", {"values": FieldSpec("int64", 1)})
    plane.put_samples(["a"], "p", {"values": [np.arange(3)]})
    print(json.dumps(listening()), flush=True)
    sys.stdin.read()
    values = plane.get_samples(["a"], "p")["values"][0].tolist()
    print(json.dumps(values), flush=True)
    plane.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
