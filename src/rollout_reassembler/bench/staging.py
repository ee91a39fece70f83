"""Rows a second through a sink: `stage` calls one after another, or many at a time from as many threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median

from rollout_reassembler.bench.arm import Arm
from rollout_reassembler.bench.shapes import MadeGroup, Shape, make_group
from rollout_reassembler.contract.records import StagedCall

CONCURRENCY = (1, 64)
_ROWS_A_CALLER = 4
_MOST_ROWS = 256
_ROUNDS = 3


def staging_group(shape: Shape, seed: int) -> MadeGroup:
    """A group with rows enough for the busiest round, their sizes those of the shape's calls."""
    rollouts = -(-_MOST_ROWS // shape.calls)
    return make_group(replace(shape, rollouts=rollouts), seed=seed, prefix="stage")


def staging_rates(arm: Arm, calls: list[StagedCall]) -> dict[str, float]:
    """Median rows a second by number of concurrent callers, each of which waits for its row to be durable."""
    return {str(callers): median(_rate(arm, calls, callers) for _ in range(_ROUNDS)) for callers in CONCURRENCY}


def _rate(arm: Arm, calls: list[StagedCall], callers: int) -> float:
    some = calls[: min(_MOST_ROWS, max(16, _ROWS_A_CALLER * callers))]
    with ThreadPoolExecutor(callers) as threads:
        list(threads.map(lambda _: time.sleep(0.01), range(callers)))  # start them all before the clock
        start = time.perf_counter()
        list(threads.map(arm.stage_one, some))
        seconds = time.perf_counter() - start
    arm.clear_staged(some)
    return len(some) / seconds
