"""How the time of a group grows: one curve a dimension, all others held.

calls       calls of a rollout            4 rollouts, 400 tokens a call
tokens      tokens of a call              4 rollouts × 8 calls
rollouts    rollouts of a group           8 calls of 400 tokens
in_flight   groups at a time, one process 8 rollouts × 8 calls of 400 tokens; ms of wall time a group
actors      reassembler actors            agentic groups through a pool; ms of wall time a group
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from rollout_reassembler.bench.arm import CANONICAL, PAD_TOKEN_ID, STAGING
from rollout_reassembler.bench.figures import Spread
from rollout_reassembler.bench.ours import OursArm
from rollout_reassembler.bench.run import BenchPlane, open_client
from rollout_reassembler.bench.shapes import SHAPES, MadeGroup, Shape, make_group
from rollout_reassembler.contract.messages import RolloutReassemblerActorConfig
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.files.planes import open_plane

Progress = Callable[[str], None]

_CALL = 400
_BASE = Shape("growth", rollouts=4, calls=8, prompt=_CALL // 2, tool=_CALL // 2, generated=_CALL // 2)
_IN_FLIGHT_GROUPS = 16
_ACTOR_GROUPS = 8


@dataclass(frozen=True)
class Point:
    """Milliseconds a group at `x`, and how many tokens such a group has."""

    x: int
    tokens: int
    ms: Spread


@dataclass(frozen=True)
class Curve:
    """One dimension. `exponent` is the slope of log ms over log x in the upper half: 1 is linear, 0 is flat.

    On a `concurrent` curve ms are wall time over groups, of many groups at once.
    """

    name: str
    x_label: str
    held: str
    points: list[Point]
    exponent: float
    concurrent: bool = False


@dataclass(frozen=True)
class Growth:
    """All curves of one run, and how busy the machine was before it."""

    plane: str
    repeat: int
    load_average: list[float]
    curves: list[Curve]


def measure_growth(plane: BenchPlane, *, repeat: int, most: int, progress: Progress) -> Growth:
    """All curves; a dimension stops at the last of its steps that is not above `most`. Actors only on a queue."""
    load = [round(value, 2) for value in os.getloadavg()]
    with open_client(plane) as client:
        curves = list(_size_curves(client, repeat, most, progress))
        curves.append(_in_flight_curve(client, repeat, most, progress))
    if plane != "memory":
        curves.append(_actors_curve(repeat, progress))
    return Growth(plane, repeat, load, curves)


def _size_curves(client: DataPlaneClient, repeat: int, most: int, progress: Progress) -> Iterator[Curve]:
    arm = OursArm(client)

    def curve(name: str, x_label: str, held: str, steps: Sequence[int], shape_at: Callable[[int], Shape]) -> Curve:
        points = []
        for x in _up_to(steps, most):
            progress(f"{name}: {x}")
            shape = shape_at(x)
            points.append(Point(x, shape.tokens, _group_ms(arm, make_group(shape), repeat)))
        return Curve(name, x_label, held, points, growth_exponent(points))

    yield curve(
        "calls",
        "calls a rollout",
        f"{_BASE.rollouts} rollouts, {_CALL} tokens a call",
        (1, 4, 16, 64, 256),
        lambda calls: replace(_BASE, calls=calls),
    )
    yield curve(
        "tokens",
        "tokens a call",
        f"{_BASE.rollouts} rollouts × {_BASE.calls} calls",
        (64, 256, 1024, 4096, 16384),
        lambda tokens: replace(_BASE, prompt=tokens // 2, tool=tokens // 2, generated=tokens // 2),
    )
    yield curve(
        "rollouts",
        "rollouts a group",
        f"{_BASE.calls} calls of {_CALL} tokens a rollout",
        (1, 4, 16, 64, 128),
        lambda rollouts: replace(_BASE, rollouts=rollouts),
    )


def _in_flight_curve(client: DataPlaneClient, repeat: int, most: int, progress: Progress) -> Curve:
    arm = OursArm(client)
    shape = replace(_BASE, rollouts=8)
    groups = [make_group(shape, seed=seed, prefix=f"flight-{seed}") for seed in range(_IN_FLIGHT_GROUPS)]
    points = []
    for at_once in _up_to((1, 2, 4, 8, 16), most):
        progress(f"groups in flight: {at_once}")
        points.append(Point(at_once, shape.tokens, Spread.of(list(_in_flight_ms(arm, groups, at_once, repeat)))))
    held = f"{shape.rollouts} rollouts × {shape.calls} calls of {_CALL} tokens, one process"
    return Curve("in_flight", "groups in flight", held, points, growth_exponent(points), concurrent=True)


def _in_flight_ms(arm: OursArm, groups: list[MadeGroup], at_once: int, repeat: int) -> Iterator[float]:
    """Wall milliseconds a group, once a repetition; the first repetition warms up."""
    with ThreadPoolExecutor(at_once) as threads:
        for round_number in range(repeat + 1):
            ids = [f"flight-{at_once}-{round_number}-{index}" for index in range(len(groups))]
            for group in groups:
                arm.stage(group)
            start = time.perf_counter()
            list(threads.map(arm.finalize, groups, ids))
            ms = (time.perf_counter() - start) * 1e3 / len(groups)
            for group, group_id in zip(groups, ids, strict=True):
                arm.forget(group, group_id)
            if round_number:
                yield ms


def _actors_curve(repeat: int, progress: Progress) -> Curve:
    shape = SHAPES["agentic"]
    groups = [make_group(shape, seed=seed, prefix=f"actor-{seed}") for seed in range(_ACTOR_GROUPS)]
    points = []
    for actors in (1, 2):
        progress(f"actors: {actors}")
        points.append(Point(actors, shape.tokens, Spread.of(list(_actors_ms(groups, actors, repeat)))))
    held = f"{_ACTOR_GROUPS} {shape.name} groups"
    return Curve("actors", "actors", held, points, growth_exponent(points), concurrent=True)


def _actors_ms(groups: list[MadeGroup], actors: int, repeat: int) -> Iterator[float]:
    """Wall milliseconds a group through a pool of so many actors, once a repetition; the first warms up."""
    config = RolloutReassemblerActorConfig(CANONICAL, STAGING, PAD_TOKEN_ID)
    with open_plane("simple", config, workers=actors) as plane:
        arm = OursArm(plane.client)
        for round_number in range(repeat + 1):
            for group in groups:
                arm.stage(group)
            ids = [f"actors-{round_number}-{index}" for index in range(len(groups))]
            requests = [group.request(group_id) for group, group_id in zip(groups, ids, strict=True)]
            start = time.perf_counter()
            answers = list(plane.finalize_all(requests))
            ms = (time.perf_counter() - start) * 1e3 / len(groups)
            if any(answer.rejections for answer in answers):
                raise RuntimeError("a sound group was rejected; see the answers' rejections")
            for group, group_id in zip(groups, ids, strict=True):
                arm.forget(group, group_id)
            if round_number:
                yield ms


def _group_ms(arm: OursArm, group: MadeGroup, repeat: int) -> Spread:
    """Milliseconds to finalize the group; the first one warms up."""
    measured = []
    for _ in range(repeat + 1):
        group_id = f"growth-{next(_numbers)}"
        arm.stage(group)
        start = time.perf_counter()
        arm.finalize(group, group_id)
        measured.append((time.perf_counter() - start) * 1e3)
        arm.forget(group, group_id)
    return Spread.of(measured[1:])


_numbers = itertools.count()
"""Numbers for group ids: an id that was finalized before is answered from its record."""


def growth_exponent(points: Sequence[Point]) -> float:
    """The slope of log ms over log x through the upper half of the points, three of them at least."""
    upper = list(points)[-max(3, len(points) // 2) :]
    if len(upper) < 2:
        return 0.0
    slope, _ = np.polyfit(np.log([point.x for point in upper]), np.log([point.ms.median for point in upper]), 1)
    return float(slope)


def _up_to(steps: Sequence[int], most: int) -> list[int]:
    return [step for step in steps if step <= most] or [steps[0]]
