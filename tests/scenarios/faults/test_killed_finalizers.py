"""SIGKILL to a finalizing process at every request it makes: the next attempt leaves what an undisturbed one leaves.

The queue's controller and storage unit are real, each in its process; the victims are forked, so that
a death costs a tenth of a second and all of them can be tried. Ray's part is in `test_ray_plane.py`.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.data_plane.base import DataPlaneClient
from tests.captures import CANONICAL
from tests.data_plane.plain_queue import PlainQueue, in_a_call
from tests.scenarios.faults.groups import HEALTHY, KINDS, Group, count
from tests.scenarios.faults.requests import Death
from tests.scenarios.faults.victims import DEADLINES, Finalize, VictimHost

pytestmark = pytest.mark.slow

PAIRS = 48
TWICE = 150


class Claims:
    """A trainer that takes rows as soon as it can, not waiting for answers."""

    def __init__(self, plane: DataPlaneClient) -> None:
        self._plane = plane
        self.sample_ids: list[str] = []

    def take(self) -> None:
        while (claimed := self._plane.claim_meta(CANONICAL, "trainer", ["input_ids"], 100)).sample_ids:
            for sample_id, tags in zip(claimed.sample_ids, claimed.tags or [], strict=True):
                assert sample_id.startswith(f"{tags['group_id']}_"), "a row that can be claimed has its tags"
            self.sample_ids += claimed.sample_ids


def set_numbers_aside(plane: Any) -> None:
    """What whoever starts a queue does."""
    in_a_call(plane, lambda call: plane._rows.controller.set_numbers_aside(call, 8192))


def deaths_of(steps: list[str]) -> list[Death]:
    """Every moment between two requests, and the one behind the last."""
    return [*((number, "before") for number in range(1, len(steps) + 1)), (len(steps), "after")]


def test_a_finalizer_killed_at_any_request(queue: PlainQueue, plane: DataPlaneClient, victims: VictimHost) -> None:
    claims, groups, answers, kills = Claims(plane), [], {}, 0
    for kind in KINDS:
        deaths: list[Death | None] = [None]
        while deaths:
            group = Group(kind, len(groups))
            groups.append(group)
            group.stage(plane)
            death = deaths.pop()
            end = victims.run(Finalize(queue, group, die_at=death))
            claims.take()
            if death is None:
                ((_, steps),) = end.said
                deaths = [*deaths_of(steps)]
            else:
                assert end.was_killed, end
                kills += 1
            answers[group.group_id] = group.finalize(plane)
    claims.take()
    figures = count(plane, groups, answers, kills=kills)
    print(f"\none death a group: {figures}")
    assert figures.is_clean
    assert sorted(claims.sample_ids) == sorted(sample_id for group in groups for sample_id in group.sample_ids)
    assert kills > 80


def test_finalizers_killed_one_after_the_other(queue: PlainQueue, plane: DataPlaneClient, victims: VictimHost) -> None:
    """The second attempt dies as well, somewhere else; a sample of all pairs."""
    draw = random.Random(5)
    groups, answers, kills = [], {}, 0
    for number in range(PAIRS):
        group = Group(KINDS[number % len(KINDS)], number)
        groups.append(group)
        group.stage(plane)
        for _ in range(2):
            kills += victims.run(Finalize(queue, group, die_at=(draw.randint(1, 17), "before"))).was_killed
        answers[group.group_id] = group.finalize(plane)
    figures = count(plane, groups, answers, kills=kills)
    print(f"\ntwo deaths a group: {figures}")
    assert figures.is_clean
    assert kills > PAIRS


def test_two_finalizers_of_each_group_while_others_stage(queue: PlainQueue, plane: DataPlaneClient) -> None:
    """Both clear the same rows at the same time, and the rows staged meanwhile get the numbers that are free."""
    set_numbers_aside(plane)
    groups = [Group(HEALTHY, number) for number in range(TWICE)]
    staged = [threading.Event() for _ in groups]
    together = threading.Barrier(2)
    planes = [queue.connect(DEADLINES) for _ in range(2)]

    def finalize_all(plane: DataPlaneClient) -> dict[str, FinalizedGroup]:
        answers = {}
        for group, is_staged in zip(groups, staged, strict=True):
            assert is_staged.wait(60)
            together.wait(60)
            answers[group.group_id] = group.finalize(plane)
        return answers

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(finalize_all, plane) for plane in planes]
        for group, is_staged in zip(groups, staged, strict=True):
            group.stage(plane)
            is_staged.set()
        first, second = (future.result(120) for future in futures)
    figures = count(plane, groups, first, kills=0)
    print(f"\ntwo finalizers at a time: {figures}")
    assert figures.is_clean
    assert first == second
    for plane in planes:
        plane.close()


def test_one_of_two_finalizers_killed(queue: PlainQueue, plane: DataPlaneClient, victims: VictimHost) -> None:
    set_numbers_aside(plane)
    draw = random.Random(6)
    groups, answers, kills = [], {}, 0
    with ThreadPoolExecutor(1) as pool:
        for number in range(PAIRS):
            group = Group(KINDS[number % len(KINDS)], number)
            groups.append(group)
            group.stage(plane)
            death = (draw.randint(4, 17), "before")
            end = pool.submit(victims.run, Finalize(queue, group, die_at=death))
            time.sleep(draw.uniform(0.0, 0.08))
            answers[group.group_id] = group.finalize(plane)
            kills += end.result(60).was_killed
            answers[group.group_id] = group.finalize(plane)
    figures = count(plane, groups, answers, kills=kills)
    print(f"\none of two dies: {figures}")
    assert figures.is_clean
    assert kills > PAIRS // 4
