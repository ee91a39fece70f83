"""The queue dies under a finalizer, at any of its requests; another one takes its place, empty or from a checkpoint.

Whoever sends the same request to it is told that rows are lost, or gets the right rows; never placeholders that
nobody asked for. The processes are real and get SIGKILL.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_reassembler.contract.errors import DataPlaneError, PartitionNotRegistered, PlaneLost
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest
from rollout_reassembler.data_plane.barrier import GATE_PARTITION
from rollout_reassembler.data_plane.base import DataPlaneClient
from tests.captures import CANONICAL, PAD, STAGING, reassembler, registered
from tests.captures import stage as stage_calls
from tests.data_plane.plain_queue import PlainQueue, QueueHost
from tests.reassembly.contents import RECORDS
from tests.scenarios.faults.groups import HEALTHY, KINDS, SIZE, Group, count
from tests.scenarios.faults.victims import DEADLINES

pytestmark = pytest.mark.slow

GROUPS = 48


class Watch:
    """Counts the requests of one plane's client, and kills its queue in place of one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from rollout_reassembler.data_plane.transfer_queue.sockets import Call

        self.sent = 0
        self.begin(None)
        send = Call.send

        def watched(call: Any, peer: Any, request: Any, body: Any) -> Any:
            if self._plane is not None and call._sockets is self._plane._rows.sockets:
                self.sent += call.site.partition != GATE_PARTITION
                if self._queue is not None and self.sent == self._at:
                    self._queue.stop()
            return send(call, peer, request, body)

        monkeypatch.setattr(Call, "send", watched)

    def begin(self, plane: Any, queue: PlainQueue | None = None, at: int = 0) -> None:
        self._plane, self._queue, self._at, self.sent = plane, queue, at, 0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@contextmanager
def started(queue_host: QueueHost, checkpoint: Path | None = None) -> Iterator[tuple[PlainQueue, DataPlaneClient]]:
    """A queue of its own that knows the three partitions of a run, or all that a checkpoint knows."""
    queue = queue_host.start_queue()
    plane = queue.connect(DEADLINES)
    registered(plane).register_partition(RECORDS, {})
    if checkpoint is not None:
        plane.load_checkpoint(str(checkpoint))
    yield queue, plane
    plane.close()
    queue.stop()


def ask(plane: DataPlaneClient, group: Group, request: ReassemblyRequest) -> FinalizedGroup:
    return dataclasses.replace(reassembler(plane, **group.options).finalize(request), timings={})


def is_masked(plane: DataPlaneClient, group: Group) -> bool:
    """Whether all rows of the group are there and none carries a token."""
    batch = plane.get_samples(group.sample_ids, CANONICAL, ["input_ids"], partial=True)
    return len(batch) == SIZE and all(row.tolist() == [PAD] for row in batch["input_ids"])


def steps_of(queue_host: QueueHost, watch: Watch, group: Group) -> int:
    """How many requests an undisturbed finalization takes."""
    with started(queue_host) as (_, plane):
        group.stage(plane)
        watch.begin(plane)
        ask(plane, group, group.request)
        return watch.sent


def test_a_plane_that_dies_at_any_step_and_another_in_its_place(
    queue_host: QueueHost, watch: Watch, tmp_path: Path
) -> None:
    steps = {kind: steps_of(queue_host, watch, Group(kind, 0)) for kind in KINDS}
    seen: Counter[str] = Counter()
    a_kind = GROUPS // len(KINDS)
    for number in range(GROUPS):
        group = Group(KINDS[number % len(KINDS)], number)
        at = 1 + (number // len(KINDS)) * (steps[group.kind] - 1) // (a_kind - 1)
        checkpoint, whole = tmp_path / str(number), bool(number // len(KINDS) % 2)
        with started(queue_host) as (queue, plane):
            request = dataclasses.replace(group.request, staged_on=plane.epoch())
            if not whole:
                stage_calls(plane, group.rollouts[-1])
                plane.save_checkpoint(str(checkpoint))
            group.stage(plane)
            if whole:
                plane.save_checkpoint(str(checkpoint))
            watch.begin(plane, queue, at)
            try:
                seen["answered before" if ask(plane, group, request).cleanup_pending else "died too late"] += 1
            except DataPlaneError:
                seen["died before the answer"] += 1
            watch.begin(None)
        lists_rows = group.kind != "nothing valid"
        with started(queue_host) as (_, plane):
            outcome = told_or_right(plane, group, request)
            seen[f"empty: {outcome}"] += 1
            assert outcome == ("PlaneLost" if lists_rows else "right")
            if lists_rows:
                given_up = ask(plane, group, dataclasses.replace(request, accept_lost=True))
                assert given_up.valid_row_count == 0
                assert is_masked(plane, group)
                assert ask(plane, group, request) == given_up
                seen["empty: given up"] += 1
                group.stage(plane)
                answers = {group.group_id: ask(plane, group, request)}
                figures = count(plane, [group], answers, kills=0)
                assert figures.is_clean, figures
                seen["empty: right once staged again"] += 1
        with started(queue_host, checkpoint) as (_, plane):
            outcome = told_or_right(plane, group, request)
            seen[f"checkpoint: {outcome}"] += 1
            assert outcome == ("right" if whole or not lists_rows else "PlaneLost")
            if outcome == "PlaneLost":
                group.stage(plane)
                assert told_or_right(plane, group, request) == "right"
                seen["checkpoint: right once staged again"] += 1
    print(f"\n{GROUPS} groups, one death each, steps {steps}: {dict(sorted(seen.items()))}")
    assert seen["died before the answer"] > GROUPS // 2
    assert seen["died too late"] == 0


def told_or_right(plane: DataPlaneClient, group: Group, request: ReassemblyRequest) -> str:
    """What the same request comes to on this plane; anything but an error or the right rows fails."""
    staged = plane.list_samples(STAGING)
    try:
        answer = ask(plane, group, request)
    except PlaneLost as error:
        lost = str(error)
    else:
        lost = ""
    if lost:
        assert f"group {group.group_id!r}" in lost
        assert plane.list_samples(CANONICAL) == plane.list_samples(RECORDS) == {}
        assert plane.list_samples(STAGING) == staged
        return "PlaneLost"
    assert group.kind == "nothing valid" or not is_masked(plane, group)
    figures = count(plane, [group], {group.group_id: answer}, kills=0)
    assert figures.is_clean, figures
    return "right"


def test_a_plane_whose_partitions_are_not_registered_yet_raises(queue_host: QueueHost) -> None:
    """What an actor meets that connects anew before the driver has registered anything."""
    group = Group(HEALTHY, 0)
    queue = queue_host.start_queue()
    plane = queue.connect(DEADLINES)
    request = dataclasses.replace(group.request, staged_on="another")
    for accept_lost in (False, True):
        with pytest.raises(PartitionNotRegistered, match="group 'g0' was not finalized"):
            ask(plane, group, dataclasses.replace(request, accept_lost=accept_lost))
    nothing = dataclasses.replace(request, receipts=(None,) * SIZE)
    with pytest.raises(PartitionNotRegistered, match="group 'g0' was not finalized"):
        ask(plane, group, nothing)
    registered(plane)
    with pytest.raises(PlaneLost):
        ask(plane, group, request)
    plane.close()
    queue.stop()


def test_a_state_that_was_saved_never_shows_a_living_epoch(queue_host: QueueHost, tmp_path: Path) -> None:
    """Also when whoever loads it dies before it has written the new epoch."""
    from transfer_queue.utils.zmq_utils import ZMQRequestType

    from rollout_reassembler.data_plane.transfer_queue.epoch import is_mark, read_epoch
    from tests.data_plane.plain_queue import in_a_call

    with started(queue_host) as (_, plane):
        client: Any = plane
        epoch = plane.epoch()
        plane.save_checkpoint(str(tmp_path / "saved"))
        assert plane.epoch() == epoch
        load = {"path": str(tmp_path / "saved" / "controller_state.pkl")}
        controller = client._rows.controller.peer
        in_a_call(client, lambda call: call.ask(controller, ZMQRequestType.LOAD_CONTROLLER_CHECKPOINT, load))
        shown = in_a_call(client, lambda call: read_epoch(call, controller))
        assert is_mark(shown)
        assert shown != epoch
        assert plane.epoch() == shown, "a mark that stays is an epoch as good as any other"
        plane.save_checkpoint(str(tmp_path / "saved"))
        assert plane.epoch() not in {epoch, shown}, "whoever saves next ends it"


def test_every_client_sees_the_same_epoch(queue_host: QueueHost) -> None:
    with started(queue_host) as (queue, plane):
        other = queue.connect(DEADLINES)
        assert plane.epoch() == other.epoch()
        other.close()
    with started(queue_host) as (_, next_plane):
        assert next_plane.epoch() != plane_epoch_of(queue)


def plane_epoch_of(queue: PlainQueue) -> str:
    """A queue that nobody of this package started goes by its controller's id."""
    return str(queue.controller.address["id"])
