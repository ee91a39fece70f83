"""A pool whose Ray is shut down under it, and then started again: prints what became of each request, as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import ray

from rollout_reassembler import ReassemblerPool, ReassemblyRequest
from rollout_reassembler.data_plane.transfer_queue.cluster import start_local_ray

DEADLINE_S = 60.0


@ray.remote(num_cpus=0)
class NeverAnswers:
    def finalize(self, request: ReassemblyRequest) -> None:
        time.sleep(10 * DEADLINE_S)


def request(group_id: str) -> ReassemblyRequest:
    return ReassemblyRequest(group_id, ("r",), None, (None,), (1.0,), 0, 0)


def outcome(of: Callable[[], Any]) -> str:
    try:
        return f"answered {of()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    start_local_ray(1)
    pool = ReassemblerPool([NeverAnswers.remote()], deadline_s=DEADLINE_S)
    in_hand, waiting = pool.submit(request("in hand")), pool.submit(request("waiting"))
    time.sleep(1)
    ray.shutdown()
    told = {"in_hand": outcome(in_hand.result), "waiting": outcome(waiting.result)}
    told["after"] = outcome(lambda: pool.submit(request("after")).result())
    start_local_ray(1)
    told["anew"] = outcome(lambda: pool.submit(request("anew")).result())
    pool.close()
    print(json.dumps(told))
    ray.shutdown()


if __name__ == "__main__":
    main()
