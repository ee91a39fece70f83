"""A finalizer stands still at each of its requests to a real queue, while another one finishes and a trainer clears.

When it wakes it gives the answer that the other one gave, and brings back no row: none is claimed twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rollout_reassembler.data_plane.barrier import GATE_PARTITION
from rollout_reassembler.data_plane.base import DataPlaneClient
from tests.captures import CANONICAL, STAGING
from tests.data_plane.plain_queue import PlainQueue
from tests.scenarios.faults.groups import KINDS, Group
from tests.scenarios.faults.test_killed_finalizers import set_numbers_aside
from tests.scenarios.faults.victims import DEADLINES

pytest.importorskip("transfer_queue")

pytestmark = pytest.mark.slow


class Pause:
    """Stops whoever uses a plane in front of one of its requests, until it is told to go on."""

    def __init__(self, plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from rollout_reassembler.data_plane.transfer_queue.sockets import Call

        self._at = 0
        self.has_stopped, self.goes_on = threading.Event(), threading.Event()
        send = Call.send

        def watched(call: Any, peer: Any, request: Any, body: Any) -> Any:
            if call._sockets is plane._rows.sockets and call.site.partition != GATE_PARTITION:
                self._at -= 1
                if self._at == 0:
                    time.sleep(0.05)  # what was sent before takes effect
                    self.has_stopped.set()
                    assert self.goes_on.wait(15)
            return send(call, peer, request, body)

        monkeypatch.setattr(Call, "send", watched)

    def at(self, request: int) -> None:
        """In front of the so-many-eth request from now."""
        self.has_stopped.clear()
        self.goes_on.clear()
        self._at = request

    def stops(self, work: Future[Any]) -> bool:
        """Whether the work was stopped; false when it ended first."""
        while not self.has_stopped.wait(0.01):
            if work.done():
                return False
        return True


@pytest.fixture
def slow_plane(queue: PlainQueue) -> Iterator[Any]:
    plane = queue.connect(DEADLINES)
    yield plane
    plane.close()


def train(plane: DataPlaneClient) -> list[str]:
    """Claim all that can be claimed, and clear it."""
    claimed = plane.claim_meta(CANONICAL, "trainer", ["input_ids"], 100).sample_ids
    if claimed:
        plane.clear_samples(claimed, CANONICAL)
    return claimed


def test_a_finalizer_paused_at_any_request_while_a_trainer_claims_and_clears(
    plane: DataPlaneClient, slow_plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_numbers_aside(plane)
    pause = Pause(slow_plane, monkeypatch)
    pauses, groups = 0, 0
    claimed: list[str] = []
    expected: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        for kind in KINDS:
            at, was_stopped = 0, True
            while was_stopped:
                at += 1
                group = Group(kind, groups)
                groups += 1
                expected += group.sample_ids
                group.stage(plane)
                pause.at(at)
                late = threads.submit(group.finalize, slow_plane)
                was_stopped = pause.stops(late)
                pauses += was_stopped
                answer = group.finalize(plane)
                claimed += train(plane)
                pause.goes_on.set()
                assert late.result(30) == answer
                claimed += train(plane)
                assert plane.list_samples(CANONICAL) == {}
                assert plane.check_consumption_status(CANONICAL, ["trainer"])
    twice = len(claimed) - len(set(claimed))
    never = len(set(expected) - set(claimed))
    print(f"\n{pauses} pauses in {groups} groups: {twice} rows claimed twice, {never} never")
    assert sorted(claimed) == sorted(expected)
    assert pauses > 60
    plane.clear_samples(None, STAGING)
