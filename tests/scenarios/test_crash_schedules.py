"""Exactly once through every crash: whatever fails, wherever, in whatever order two finalizers run.

After the last try the plane holds, bit by bit, what an undisturbed run leaves, and every answer is the
undisturbed one. In between, at every single step: rows can be read only behind the group's record, and staged
rows go only behind all of its rows. And no row can be claimed twice, however long a finalizer is paused
while a trainer claims and clears.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rollout_reassembler.contract.call_info import CALL_KEY, CallInfo
from rollout_reassembler.contract.digests import encode_extras
from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.staging.codec import pack_call
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.routes import route_shape
from rollout_reassembler.staging.schema import ROLLOUT_TAG
from tests.captures import (
    CANONICAL,
    STAGING,
    MadeRollout,
    chain,
    collect,
    finalize,
    memory_plane,
    place_in,
    staged_keys,
)
from tests.reassembly.contents import LOST, RECORDS, Contents, whole_plane
from tests.reassembly.crash_plane import CrashPlane
from tests.reassembly.schedules import NOW, Explorer, all_thread_schedules
from tests.route_captures import Turn
from tests.route_captures import made as routed

pytestmark = pytest.mark.exhaustive


@dataclass
class Group:
    """A group with one thing wrong, or nothing. `spoil` changes what is staged."""

    rollouts: list[MadeRollout]
    receipts: list[Any]
    rewards: list[Any]
    spoil: Callable[[MemoryDataPlane], None] = lambda plane: None
    stays: set[str] = field(default_factory=set)
    options: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)

    def make_plane(self) -> MemoryDataPlane:
        """A fresh plane with the group staged, and beside it a stranger's rollout and finished row."""
        plane = memory_plane(with_routes=self.options == DIRECT)
        plane.tables.life = EPOCH
        plane.register_partition(RECORDS, {})
        plane.register_partition(LOST, {})
        plane.now = lambda: NOW  # type: ignore[method-assign]
        calls = [call for made in [*self.rollouts, STRANGER] for call in made.calls]
        plane.put_samples(
            [place_of(call) for call in calls],
            STAGING,
            {
                "call": [pack_call(call, route_shape(call)) for call in calls],
                "extras": [encode_extras(call.extras) if call.extras else b"" for call in calls],
            },
            [{ROLLOUT_TAG: call.rollout_id, "staged_at": 0.0} for call in calls],
        )
        self.spoil(plane)
        return plane

    def finalize(self, plane: Any) -> FinalizedGroup:
        return finalize(
            plane,
            self.rollouts,
            receipts=self.receipts,
            rewards=self.rewards,
            options=dict(self.options),
            **self.asked,
        )

    def undisturbed(self) -> tuple[dict[str, Contents], FinalizedGroup]:
        plane = self.make_plane()
        answer = self.finalize(plane)
        contents = whole_plane(plane)
        collect(plane)
        assert staged_keys(plane) == {call.staging_key for call in STRANGER.calls} | self.stays
        return contents, replace(answer, timings={})


EPOCH = "the plane's epoch, the same in each of its copies"
STRANGER = chain("stranger", 1)
DIRECT = {"router_replay_enabled": True}
DEFERRED = {"router_replay_enabled": True, "defer_routed_experts_to_policy": True}


def routed_group(**changes: Any) -> Group:
    rollouts = [routed("a", [Turn(2, 2), Turn(1, 2)]), routed("b", [Turn(1, 1)]), chain("c", 1)]
    return Group(rollouts, [*(made.receipt() for made in rollouts[:2]), None], [1.0, 0.5, 0.25], **changes)


def a_group(**changes: Any) -> Group:
    rollouts = [chain("a", 2), chain("b", 1), chain("c", 1)]
    receipts = [made.receipt() for made in rollouts]
    return Group(**{"rollouts": rollouts, "receipts": receipts, "rewards": [1.0, 0.5, 0.25], **changes})


def forest_group(**changes: Any) -> Group:
    """A rollout that hands work to a sub-agent and compacts its history, a chain, and one without a receipt."""
    forest, plain, lost = MadeRollout("a"), chain("b", 2), chain("c", 1)
    first = forest.call([1, 2], [3], call_id="first")
    forest.call([9], [8, 7], call_id="tool")
    forest.call([4], [5], parent=first, call_id="second")
    forest.call([1, 6], [7], call_id="after")
    receipts = [forest.receipt(), plain.receipt(), None]
    return Group([forest, plain, lost], receipts, [1.0, 0.5, 0.25], asked={"branches": "all"}, **changes)


def telling_group(**changes: Any) -> Group:
    """Calls that say how they ended, beside one that says nothing."""
    rollouts = [MadeRollout("a"), MadeRollout("b"), chain("c", 1)]
    for made in rollouts[:2]:
        info = CallInfo(finish_reason="length", weight_versions=((0, 1), (1, 2)))
        made.call([1, 2], [3, 4], extras={CALL_KEY: info.encode()})
    return Group(rollouts, [made.receipt() for made in rollouts], [1.0, 0.5, 0.25], **changes)


def with_receipt(at: int, receipt: Any, **changes: Any) -> Group:
    group = a_group(**changes)
    group.receipts[at] = receipt
    return group


def with_value(key: str, value: bytes) -> Group:
    return a_group(spoil=lambda plane: plane.put_samples([place_in(plane, key)], STAGING, {"call": [value]}) and None)


def foreign() -> dict[str, Any]:
    receipt = chain("b", 1).receipt()
    receipt["manifest"][0]["staging_key"] = "stranger/c0"
    return receipt


GROUPS = {
    "healthy": a_group(),
    "a lost receipt": with_receipt(1, None),
    "an unreadable receipt": with_receipt(1, "unreadable"),
    "a poisoned capture": with_receipt(1, chain("b", 1).receipt(capture_poisoned=True)),
    "a garbled row": with_value("b/c0", b"garbage"),
    "another's row": with_value("b/c0", pack_call(STRANGER.calls[0])),
    "a missing row": a_group(spoil=lambda plane: plane.clear_samples([place_in(plane, "a/c1")], STAGING)),
    "a missing row of a known epoch": a_group(
        spoil=lambda plane: plane.clear_samples([place_in(plane, "a/c1")], STAGING), asked={"staged_on": EPOCH}
    ),
    "rows given up for lost": a_group(
        spoil=lambda plane: plane.clear_samples([place_in(plane, "a/c1"), place_in(plane, "b/c0")], STAGING),
        asked={"staged_on": "another epoch", "accept_lost": True},
    ),
    "no reward": a_group(rewards=[1.0, None, 0.5]),
    "a stolen key": with_receipt(1, foreign(), stays={"b/c0"}),
    "nothing valid": a_group(receipts=[None, "x", {}]),
    "routes put together": routed_group(options=DIRECT),
    "routes that are garbled": routed_group(
        options=DIRECT,
        spoil=lambda plane: plane.put_samples([place_in(plane, "a/c1")], STAGING, {"extras": [b"garbage"]}) and None,
    ),
    "routes left to the trainer": routed_group(options=DEFERRED, stays={"a/c0", "a/c1", "b/c0"}),
    "all branches": forest_group(),
    "all branches, one of them garbled": forest_group(
        spoil=lambda plane: plane.put_samples([place_in(plane, "a/tool")], STAGING, {"call": [b"garbage"]}) and None
    ),
    "all branches, the terminal garbled": forest_group(
        spoil=lambda plane: plane.put_samples([place_in(plane, "a/after")], STAGING, {"call": [b"garbage"]}) and None
    ),
    "what calls say of themselves": telling_group(),
    "what a call says of itself, garbled": telling_group(
        spoil=lambda plane: plane.put_samples([place_in(plane, "a/c0")], STAGING, {"extras": [b"garbage"]}) and None
    ),
    "several faults": Group(
        [chain("a", 1), chain("b", 1), chain("c", 1)],
        [None, chain("b", 1).receipt(), chain("c", 1).receipt()],
        [1.0, 1.0, None],
        spoil=lambda plane: plane.put_samples([place_in(plane, "b/c0")], STAGING, {"call": [b"garbage"]}) and None,
    ),
}

by_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)


def steps_of(group: Group) -> list[str]:
    """The data-plane calls of one undisturbed finalization."""
    plane = CrashPlane(group.make_plane())
    group.finalize(plane)
    return plane.calls


def test_a_healthy_group_takes_six_calls():
    """One read, a publication in four steps, one clear; the look-up comes with the numbers."""
    assert steps_of(GROUPS["healthy"]) == [
        "get_samples",
        "reserve_samples",
        "store_samples",
        "put_samples",
        "announce_samples",
        "clear_samples",
    ]
    assert len(steps_of(GROUPS["a lost receipt"])) == 7
    assert len(steps_of(GROUPS["a garbled row"])) == 8
    assert len(steps_of(GROUPS["routes put together"])) == 8
    assert len(steps_of(GROUPS["what calls say of themselves"])) == 7


# --- one finalizer ----------------------------------------------------------------------------------


def retried(group: Group, plane: Any, *, recover_after: int = 0, tries: int = 6) -> FinalizedGroup:
    """Finalize until there is an answer with nothing pending, as a caller that never gives up."""
    for attempt in range(tries):
        if attempt == recover_after:
            plane.recover()
        with suppress(DataPlaneError):
            answer = group.finalize(plane)
            if not answer.cleanup_pending:
                return replace(answer, timings={})
    raise AssertionError("no answer")


@by_group
def test_every_crash_point_of_one_finalizer(group):
    contents, answer = group.undisturbed()
    schedules = 0
    for count in range(1, len(steps_of(group)) + 1):
        for where in ("before", "during", "after"):
            for for_good, tries_without in ((False, 0), (True, 1), (True, 3)):
                inner = group.make_plane()
                plane = CrashPlane(inner)
                plane.fail_at(count, where=where, for_good=for_good)
                assert retried(group, plane, recover_after=tries_without or 99) == answer
                assert whole_plane(inner) == contents, (count, where, for_good)
                schedules += 1
    print(f"\n{schedules} crash points of one finalizer")


# --- finalizers at the same time --------------------------------------------------------------------


class Invariants:
    """What must hold in every content that the plane ever has, in any schedule."""

    def __init__(self, group: Group, *, trainer: bool = False) -> None:
        self._cleared = trainer
        self._before = whole_plane(group.make_plane())
        self._after, self._answer = group.undisturbed()
        self.seen = 0

    def __call__(self, contents: dict[str, Contents]) -> None:
        self.seen += 1
        staged, rows, records = contents[STAGING], contents[CANONICAL], contents[RECORDS]
        assert all(self._before[STAGING][key] == row for key, row in staged.items()), "a staged row changed"
        assert all(place_of(call) in staged for call in STRANGER.calls), "a stranger's row was cleared"
        if staged.keys() != self._before[STAGING].keys():
            assert "g" in records, "staged rows were cleared before the group was on record"
        if "g" in records:
            assert records == self._after[RECORDS], "the record is not that of an undisturbed run"
            assert json.loads(records["g"][1])["answer"]
        final = self._after[CANONICAL]
        whole = [key for key, row in rows.items() if row == final.get(key)]
        unread = [key for key, row in rows.items() if key in final and not row[0]]
        assert len(whole) + len(unread) == len(rows), "a wrong row"
        assert not whole or "g" in records, "rows can be read and the group is not on record"
        assert not whole or not unread or self._cleared, "some rows can be read and others not"
        if staged.keys() != self._before[STAGING].keys():
            assert whole == list(final) or self._cleared, "staged rows were cleared before the rows could be read"


def explored(group: Group, **options: Any) -> str:
    invariants = Invariants(group, trainer=bool(options.get("trainer")))
    contents, answer = group.undisturbed()
    found = Explorer(group.make_plane, group.finalize, check=invariants, **options).explore()
    assert found.ends, "no schedule came to an end"
    for end in found.ends:
        assert end.answers == [answer] * len(end.answers)
        if options.get("trainer"):
            assert end.claimed == tuple(answer.meta.sample_ids), "each row was claimed once"
            assert end.contents | {CANONICAL: {}} == contents | {CANONICAL: {}}
            # Who finds a record of lost rows leaves the keys it has numbered: somebody may be about to replace it.
            left = end.contents[CANONICAL].values()
            assert all(group.asked.get("accept_lost") and row == ((), "{}") for row in left)
        else:
            assert end.contents == contents
    return f"{found.schedules} schedules, {found.states} states, {invariants.seen} contents of the plane"


@by_group
def test_every_three_crashes_of_one_finalizer_and_its_retries(group):
    print(f"\n{explored(group, finalizers=1, failures=3)}")


@by_group
def test_every_interleaving_of_two_finalizers(group):
    print(f"\n{explored(group)}")


@by_group
def test_every_interleaving_of_two_finalizers_with_a_crash(group):
    print(f"\n{explored(group, failures=1)}")


@by_group
def test_every_interleaving_of_two_finalizers_with_two_crashes(group):
    print(f"\n{explored(group, failures=2)}")


@by_group
def test_every_pause_of_two_finalizers_beside_a_trainer(group):
    """One stands still between any two of its calls, for as long as the other and the trainer like."""
    print(f"\n{explored(group, trainer=True)}")


@by_group
def test_every_pause_of_two_finalizers_beside_a_trainer_with_a_crash(group):
    print(f"\n{explored(group, trainer=True, failures=1)}")


@pytest.mark.parametrize("name", ["healthy", "a lost receipt", "a garbled row"])
def test_every_interleaving_of_three_finalizers_with_a_crash(name):
    print(f"\n{explored(GROUPS[name], finalizers=3, failures=1)}")


@pytest.mark.parametrize("name", ["healthy", "a lost receipt"])
def test_every_interleaving_of_two_threads(name):
    """The same on real threads, without the explorer's picture of a finalizer: each schedule really runs."""
    group = GROUPS[name]
    contents, answer = group.undisturbed()
    schedules = 0
    for plane, answers in all_thread_schedules(group.make_plane, group.finalize):
        assert [replace(found, timings={}) for found in answers] == [answer] * 2
        assert whole_plane(plane) == contents
        schedules += 1
    counted = Explorer(group.make_plane, group.finalize).explore().schedules
    assert schedules == counted
    print(f"\n{schedules} schedules on real threads, as many as the explorer counts")


@by_group
def test_many_threads_at_once(group):
    contents, answer = group.undisturbed()
    for _ in range(5):
        plane = group.make_plane()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(group.finalize, [plane] * 8))
        assert [replace(found, timings={}) for found in answers] == [answer] * 8
        assert whole_plane(plane) == contents
