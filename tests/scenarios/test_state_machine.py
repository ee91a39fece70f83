"""Any order of staging, finalizing, crashing, retrying and sweeping: DESIGN's rules hold after each step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from rollout_reassembler.contract.errors import DataPlaneError, GroupConflict
from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.contract.rpc_guard import assert_metadata_only
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.group_record import GroupRecords
from rollout_reassembler.reassembly.sweep import sweep_staging
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.sink import StagingSink
from tests.captures import CANONICAL, PAD, STAGING, MadeRollout, collect, finalize, memory_plane, staged_places
from tests.reassembly.contents import LOST, RECORDS, contents_of
from tests.reassembly.crash_plane import CrashPlane

pytestmark = pytest.mark.exhaustive

FAULTS = (
    "none",
    "none",
    "lost receipt",
    "unreadable",
    "poisoned",
    "stolen key",
    "garbled row",
    "missing row",
    "no reward",
)


@dataclass
class Rollout:
    """A rollout as the test knows it. `durable` are the keys that its sink acknowledged."""

    made: MadeRollout
    durable: set[str] = field(default_factory=set)
    fault: str = "none"
    group: str | None = None

    @property
    def keys(self) -> set[str]:
        return {place_of(call) for call in self.made.calls}


@dataclass
class Group:
    """A request, and what has been heard of it."""

    group_id: str
    rollouts: list[Rollout]
    receipts: list[Any]
    rewards: list[Any]
    answer: FinalizedGroup | None = None
    rows: dict[str, Any] | None = None

    @property
    def sample_ids(self) -> list[str]:
        return [f"{self.group_id}_g{index}" for index in range(len(self.rollouts))]


def receipt_of(rollout: Rollout) -> Any:
    receipt = rollout.made.receipt()
    match rollout.fault:
        case "lost receipt":
            return None
        case "unreadable":
            return {"rollout_id": rollout.made.rollout_id, "manifest": "c0"}
        case "poisoned":
            return {**receipt, "capture_poisoned": True}
        case "stolen key":
            return {
                **receipt,
                "manifest": [{**row, "staging_key": "stranger/c0"} for row in receipt["manifest"][:1]],
            } | {"terminal_model_call_id": "c0"}
    return receipt


class LifeOfGroups(RuleBasedStateMachine):
    """Workers stage, agents hand over receipts, finalizers come and die, and someone sweeps."""

    rollouts = Bundle("rollouts")
    groups = Bundle("groups")

    @initialize()
    def start(self) -> None:
        self.inner: MemoryDataPlane = memory_plane()
        self.plane = CrashPlane(self.inner)
        self.sink = StagingSink(self.plane, staging_partition=STAGING)
        self.records = GroupRecords(self.inner, partition_id=CANONICAL)
        self.all_rollouts: list[Rollout] = []
        self.all_groups: list[Group] = []
        self.lost: set[str] = set()
        stranger = MadeRollout("stranger")
        stranger.call([1], [2])
        StagingSink(self.inner, staging_partition=STAGING).stage_all(stranger.calls)
        self.stranger = contents_of(self.inner, STAGING)

    # --- the world ----------------------------------------------------------------------------------

    @rule(target=rollouts, turns=st.integers(1, 3), branch=st.booleans(), weight_version=st.integers(0, 9))
    def run_an_agent(self, turns: int, branch: bool, weight_version: int) -> Rollout:
        """A worker stages each call once; where the plane fails, the call is not acknowledged."""
        number = len(self.all_rollouts)
        made = MadeRollout(f"r/{number}")
        parent = None
        for turn in range(turns):
            if branch and turn:
                made.call([7], [8], parent=parent, weight_version=weight_version + 5, call_id=f"abandoned{turn}")
            parent = made.call(
                [100 * number + turn], [turn, turn], parent=parent, weight_version=weight_version, call_id=f"c{turn}"
            )
        rollout = Rollout(made)
        for call in made.calls:
            if self.sink.stage(call).ok:
                rollout.durable.add(place_of(call))
        self.all_rollouts.append(rollout)
        return rollout

    @rule(rollout=rollouts)
    def stage_again_what_was_not_acknowledged(self, rollout: Rollout) -> None:
        if rollout.group is None:
            for call in rollout.made.calls:
                if place_of(call) not in rollout.durable and self.sink.stage(call).ok:
                    rollout.durable.add(place_of(call))

    @rule(target=groups, size=st.integers(1, 3), data=st.data())
    def ask_for_a_group(self, size: int, data: st.DataObject) -> Any:
        rollouts = [rollout for rollout in self.all_rollouts if rollout.group is None][:size]
        if not rollouts:
            return multiple()
        group_id = f"g{len(self.all_groups)}"
        for rollout in rollouts:
            rollout.group = group_id
            is_there = rollout.keys <= staged_places(self.inner)
            rollout.fault = data.draw(st.sampled_from(FAULTS)) if is_there else "missing row"
            if rollout is rollouts[-1] and len(rollouts) > 1 and all(r.fault == "no reward" for r in rollouts):
                rollout.fault = "none"  # what becomes of a group that says nothing is test_requests.py's
            first = place_of(rollout.made.calls[0])
            if rollout.fault == "garbled row":
                self.inner.put_samples([first], STAGING, {"call": [b"garbage"]})
            elif rollout.fault == "missing row" and is_there:
                self.inner.clear_samples([first], STAGING)
                self.lost.add(first)
        rewards = [None if rollout.fault == "no reward" else 0.5 for rollout in rollouts]
        group = Group(group_id, rollouts, [receipt_of(rollout) for rollout in rollouts], rewards)
        self.all_groups.append(group)
        return group

    @rule(
        count=st.integers(1, 8),
        where=st.sampled_from(["before", "during", "after"]),
        for_good=st.booleans(),
    )
    def the_plane_will_fail(self, count: int, where: Any, for_good: bool) -> None:
        self.plane.fail_at(count, where=where, for_good=for_good)

    @rule()
    def the_plane_recovers(self) -> None:
        self.plane.recover()

    # --- finalizers and sweepers --------------------------------------------------------------------

    def _finalize(self, group: Group, plane: Any) -> FinalizedGroup:
        answer = finalize(
            plane,
            [rollout.made for rollout in group.rollouts],
            group_id=group.group_id,
            receipts=group.receipts,
            rewards=group.rewards,
            staged_on=self.inner.epoch(),
        )
        assert_metadata_only(answer)
        bare = replace(answer, timings={}, cleanup_pending=())
        assert group.answer in (None, bare), "the same request gave another answer"
        group.answer = bare
        rows = contents_of(self.inner, CANONICAL)
        rows = {sample_id: rows[sample_id] for sample_id in group.sample_ids}
        assert group.rows in (None, rows), "the same request gave other rows"
        group.rows = rows
        self._check_answer(group, bare)
        return answer

    @rule(group=groups)
    def finalize_a_group(self, group: Group) -> None:
        with suppress(DataPlaneError):
            self._finalize(group, self.plane)

    @rule(group=groups)
    def finalize_until_it_is_clean(self, group: Group) -> None:
        self.plane.recover()
        answer = self._finalize(group, self.plane)
        assert answer.cleanup_pending == ()
        collect(self.plane)
        kept: set[str] = set()
        for rollout in group.rollouts:
            if rollout.fault == "stolen key":
                kept |= rollout.keys
        untagged = {key for key, tags in self.inner.list_samples(STAGING).items() if not tags}
        assert (
            staged_places(self.inner) & {key for rollout in group.rollouts for key in rollout.keys} <= kept | untagged
        )

    @rule(group=groups)
    def ask_for_something_else_under_the_same_id(self, group: Group) -> None:
        before = contents_of(self.inner, CANONICAL), contents_of(self.inner, STAGING), contents_of(self.inner, RECORDS)
        if group.group_id not in before[2]:
            return
        self.plane.recover()
        rewards = [-1.0] * len(group.rollouts)
        try:
            finalize(
                self.plane,
                [rollout.made for rollout in group.rollouts],
                group_id=group.group_id,
                receipts=group.receipts,
                rewards=rewards,
                staged_on=self.inner.epoch(),
            )
        except GroupConflict:
            pass
        else:
            raise AssertionError("another request was answered")
        after = contents_of(self.inner, CANONICAL), contents_of(self.inner, STAGING), contents_of(self.inner, RECORDS)
        assert after == before

    @rule(group=groups, dry_run=st.booleans())
    def sweep_what_a_finished_group_left(self, group: Group, dry_run: bool) -> None:
        if not self._is_readable(group):
            return
        before = staged_places(self.inner)
        marked = contents_of(self.inner, LOST)
        with suppress(DataPlaneError):
            ids = [rollout.made.rollout_id for rollout in group.rollouts]
            sweep_staging(self.plane, STAGING, rollout_ids=ids, dry_run=dry_run)
        gone = before - staged_places(self.inner)
        assert not (dry_run and gone)
        swept = [r for r in self.all_rollouts if r in group.rollouts or r.made.rollout_id in marked]
        assert gone <= {key for rollout in swept for key in rollout.keys}

    def _is_readable(self, group: Group) -> bool:
        return not self.inner.get_samples(group.sample_ids, CANONICAL, partial=True).missing

    # --- what must hold -----------------------------------------------------------------------------

    def _check_answer(self, group: Group, answer: FinalizedGroup) -> None:
        """N rows under their ids: what is valid holds the tokens that were sampled, all others nothing."""
        assert answer.meta.sample_ids == group.sample_ids
        assert answer.total_row_count == len(group.rollouts)
        batch = self.inner.get_samples(group.sample_ids, CANONICAL)
        for rollout, (_, row) in zip(group.rollouts, batch.rows(), strict=True):
            is_valid = rollout.made.rollout_id not in answer.rejections
            assert is_valid == (rollout.fault == "none")
            if is_valid:
                assert row["input_ids"].tolist() == rollout.made.tokens()
                assert row["sample_mask"] == 1
                assert row["total_reward"] == np.float32(0.5)
            else:
                assert row["input_ids"].tolist() == [PAD]
                assert row["sample_mask"] == 0
                assert not row["token_mask"].any()

    @invariant()
    def what_was_acknowledged_is_durable_until_its_group_can_be_read(self) -> None:
        there = staged_places(self.inner)
        done = {group.group_id for group in self.all_groups if self._is_readable(group)}
        for rollout in self.all_rollouts:
            if rollout.group not in done:
                assert rollout.durable - there <= self.lost

    @invariant()
    def rows_can_be_read_all_or_none_and_behind_their_record(self) -> None:
        for group in self.all_groups:
            found = self.inner.get_samples(group.sample_ids, CANONICAL, partial=True).sample_ids
            assert found in ([], group.sample_ids)
            if found:
                assert self.records.lookup(group.group_id) is not None
                assert all(self.inner.get_tags(group.sample_ids, CANONICAL))

    @invariant()
    def a_published_row_is_never_replaced(self) -> None:
        rows = contents_of(self.inner, CANONICAL)
        for group in self.all_groups:
            if group.rows is not None:
                assert {sample_id: rows[sample_id] for sample_id in group.sample_ids} == group.rows

    @invariant()
    def a_strangers_row_stays(self) -> None:
        staged = contents_of(self.inner, STAGING)
        assert {key: staged[key] for key in self.stranger} == self.stranger

    @invariant()
    def nobody_wrote_a_row_that_was_not_asked_for(self) -> None:
        asked = {sample_id for group in self.all_groups for sample_id in group.sample_ids}
        assert set(contents_of(self.inner, CANONICAL)) <= asked

    def teardown(self) -> None:
        """At last the plane works: every group gets its answer, and staging holds nothing of them."""
        if not hasattr(self, "plane"):
            return
        self.plane.recover()
        for group in self.all_groups:
            assert self._finalize(group, self.plane).cleanup_pending == ()
        finished = [rollout.made.rollout_id for group in self.all_groups for rollout in group.rollouts]
        sweep_staging(self.inner, STAGING, rollout_ids=finished, untagged_after_s=0.0, dry_run=False)
        waiting = {key for rollout in self.all_rollouts if rollout.group is None for key in rollout.keys}
        assert staged_places(self.inner) <= waiting | self.stranger.keys()
        assert all(
            rollout.durable <= staged_places(self.inner) for rollout in self.all_rollouts if rollout.group is None
        )


TestLifeOfGroups = LifeOfGroups.TestCase
TestLifeOfGroups.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
