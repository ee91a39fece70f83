"""A plane that is gone is an error that names the group, never a rollout that was not staged."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_reassembler.contract.errors import DataPlaneError, GroupConflict, PlaneLost, RequestError
from rollout_reassembler.contract.messages import ReassemblyRequest
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from tests.captures import (
    CANONICAL,
    PAD,
    STAGING,
    chain,
    finalize,
    memory_plane,
    reassembler,
    registered,
    stage,
    staged_keys,
)
from tests.reassembly.contents import RECORDS, published, whole_plane
from tests.reassembly.crash_plane import CrashPlane
from tests.route_captures import Turn
from tests.route_captures import made as routed
from tests.route_captures import stage as stage_rollouts

ROLLOUTS = [chain("g/r0", 2), chain("g/r1", 1)]
WANTED = [made.tokens() for made in ROLLOUTS]


def tokens_of(plane: Any, answer: Any) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in published(plane, answer.meta.sample_ids)]


def restarted() -> tuple[MemoryDataPlane, str]:
    """A plane that took over from one on which the group was staged, and that one's epoch."""
    first = memory_plane()
    epoch = first.epoch()
    stage(first, *ROLLOUTS)
    return memory_plane(), epoch


def untouched(plane: MemoryDataPlane) -> bool:
    contents = whole_plane(plane)
    return contents[CANONICAL] == contents[RECORDS] == {}


@pytest.mark.parametrize("still_there", [0, 1])
def test_rows_of_another_plane_are_lost_and_nothing_is_published(still_there: int) -> None:
    plane, epoch = restarted()
    stage(plane, *ROLLOUTS[:still_there])
    staged = staged_keys(plane)
    with pytest.raises(PlaneLost) as raised:
        finalize(plane, ROLLOUTS, staged_on=epoch)
    missing = 3 - len(staged)
    assert f"group 'g' was not finalized and its staged rows are as they were: {missing} of its 3" in str(raised.value)
    assert f"(epoch {epoch}, now {plane.epoch()})" in str(raised.value)
    assert "stage its rollouts again and send the same request, or give them up with accept_lost=True" in str(
        raised.value
    )
    assert len(raised.value.keys) == missing
    assert isinstance(raised.value, DataPlaneError)
    assert untouched(plane)
    assert staged_keys(plane) == staged


def test_rows_staged_again_publish_under_the_same_request() -> None:
    plane, epoch = restarted()
    with pytest.raises(PlaneLost):
        finalize(plane, ROLLOUTS, staged_on=epoch)
    stage(plane, *ROLLOUTS)
    assert tokens_of(plane, finalize(plane, ROLLOUTS, staged_on=epoch)) == WANTED
    assert staged_keys(plane) == set()


def test_a_row_that_was_never_staged_costs_its_rollout_alone() -> None:
    plane = memory_plane()
    epoch = plane.epoch()
    stage(plane, ROLLOUTS[0])
    answer = finalize(plane, ROLLOUTS, staged_on=epoch)
    assert answer.rejections == {"g/r1": "missing_staging_row"}


def test_a_group_of_which_nothing_was_staged_on_this_plane_is_placeholders() -> None:
    plane = memory_plane()
    answer = finalize(plane, ROLLOUTS, staged_on=plane.epoch())
    assert set(answer.rejections.values()) == {"missing_staging_row"}


def test_without_an_epoch_a_group_of_which_every_row_is_missing_is_lost() -> None:
    plane, _ = restarted()
    with pytest.raises(PlaneLost, match="all of its staged rows are missing"):
        finalize(plane, ROLLOUTS)
    with pytest.raises(PlaneLost, match="all of its staged rows are missing"):
        finalize(plane, ROLLOUTS, receipts=[None, ROLLOUTS[1].receipt()])
    assert untouched(plane)


def test_without_an_epoch_one_row_that_is_there_speaks_for_the_plane() -> None:
    plane, _ = restarted()
    stage(plane, ROLLOUTS[1])
    assert finalize(plane, ROLLOUTS).rejections == {"g/r0": "missing_staging_row"}


def test_a_group_without_a_readable_receipt_lost_no_row() -> None:
    plane, epoch = restarted()
    answer = finalize(plane, ROLLOUTS, receipts=[None, {}], staged_on=epoch)
    assert set(answer.rejections.values()) == {"missing_receipt", "invalid_receipt"}


def test_routes_that_went_with_their_plane_are_lost_too() -> None:
    """The plane is replaced between the read of the calls and that of their routes."""

    class Fading(MemoryDataPlane):
        def get_samples(self, sample_ids: Any, *args: Any, **kwargs: Any) -> Any:
            batch = super().get_samples(sample_ids, *args, **kwargs)
            self.clear_samples(sample_ids, STAGING)
            return batch

    made = routed("g/r0", [Turn(2, 2)])
    plane = registered(Fading(), with_routes=True)
    stage_rollouts(plane, made)
    with pytest.raises(PlaneLost, match="staged routes are missing"):
        finalize(plane, [made], staged_on="another", options={"router_replay_enabled": True})


@pytest.mark.parametrize("epoch", [None, "another"])
def test_rows_that_are_given_up_become_placeholders(epoch: str | None) -> None:
    plane = memory_plane()
    answer = finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=True)
    assert set(answer.rejections.values()) == {"missing_staging_row"}
    assert tokens_of(plane, answer) == [[PAD], [PAD]]
    assert finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=True) == answer
    assert finalize(plane, ROLLOUTS, staged_on=epoch) == answer, "what is on record is an answer"


@pytest.mark.parametrize("accept_lost", [True, False])
def test_what_was_given_up_is_published_once_it_is_staged_again(accept_lost: bool) -> None:
    plane, epoch = restarted()
    stage(plane, ROLLOUTS[0])
    given_up = finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=True)
    assert given_up.rejections == {"g/r1": "missing_staging_row"}
    plane.claim_meta(CANONICAL, "trainer", ["input_ids"], 10)
    stage(plane, *ROLLOUTS)
    answer = finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=accept_lost)
    assert answer.rejections == {}
    assert tokens_of(plane, answer) == WANTED
    assert sorted(plane.claim_meta(CANONICAL, "trainer", ["input_ids"], 10).sample_ids) == ["g_g0", "g_g1"]
    assert staged_keys(plane) == set()
    assert finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=True) == answer


def test_a_part_that_is_staged_again_replaces_nothing() -> None:
    plane, epoch = restarted()
    given_up = finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=True)
    stage(plane, ROLLOUTS[0])
    assert finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=True) == given_up


def test_placeholders_that_nobody_gave_up_stay() -> None:
    plane = memory_plane()
    answer = finalize(plane, ROLLOUTS, staged_on=plane.epoch())
    stage(plane, *ROLLOUTS)
    assert finalize(plane, ROLLOUTS, staged_on=plane.epoch()) == answer


def test_good_rows_are_never_replaced() -> None:
    plane, epoch = restarted()
    stage(plane, *ROLLOUTS)
    answer = finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=True)
    rows = whole_plane(plane)
    assert finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=True) == answer
    stage(plane, *ROLLOUTS)
    assert finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=True) == answer
    assert whole_plane(plane) == rows


def test_another_request_does_not_replace_what_was_given_up() -> None:
    plane, epoch = restarted()
    finalize(plane, ROLLOUTS, staged_on=epoch, accept_lost=True)
    stage(plane, *ROLLOUTS)
    with pytest.raises(GroupConflict):
        finalize(plane, ROLLOUTS, staged_on=epoch, rewards=[0.25, 0.5])


def test_every_crash_point_of_a_replacement() -> None:
    """Whatever fails while given-up rows are replaced, the same request publishes them, once."""

    def given_up() -> MemoryDataPlane:
        plane = memory_plane()
        finalize(plane, ROLLOUTS, staged_on="another", accept_lost=True)
        stage(plane, *ROLLOUTS)
        return plane

    undisturbed = given_up()
    steps = CrashPlane(undisturbed)
    answer = finalize(steps, ROLLOUTS, staged_on="another")
    contents = whole_plane(undisturbed)
    for count in range(1, len(steps.calls) + 1):
        for where in ("before", "during", "after"):
            inner = given_up()
            plane = CrashPlane(inner)
            plane.fail_at(count, where=where)
            try:
                found = finalize(plane, ROLLOUTS, staged_on="another")
            except DataPlaneError:
                found = finalize(plane, ROLLOUTS, staged_on="another")
            if found.cleanup_pending:
                found = finalize(plane, ROLLOUTS, staged_on="another")
            assert found == answer
            assert tokens_of(inner, found) == WANTED
            assert whole_plane(inner) == contents


def test_a_replacement_ends_where_released_numbers_come_back_at_once() -> None:
    class Reusing(MemoryDataPlane):
        def release_samples(self, reservation: Any) -> None:
            super().release_samples(reservation)
            self.tables.numbered = min(reservation.numbers) - 1

    plane = Reusing()
    registered(plane)
    finalize(plane, ROLLOUTS, staged_on="another", accept_lost=True)
    stage(plane, *ROLLOUTS)
    plane.tables.numbered = max(plane.reserve_samples(["g_g0", "g_g1"], CANONICAL).numbers)
    assert tokens_of(plane, finalize(plane, ROLLOUTS, staged_on="another")) == WANTED


def test_a_healthy_group_asks_for_no_epoch() -> None:
    inner = memory_plane()
    stage(inner, *ROLLOUTS)
    plane = CrashPlane(inner)
    finalize(plane, ROLLOUTS, staged_on="another")
    assert "epoch" not in plane.calls


def test_the_epoch_is_read_after_the_rows_and_the_record() -> None:
    plane = CrashPlane(memory_plane())
    with pytest.raises(PlaneLost):
        finalize(plane, ROLLOUTS, staged_on="another")
    assert plane.calls == ["get_samples", "get_samples", "get_tags", "epoch"]


def test_where_rows_were_staged_is_no_part_of_what_was_asked() -> None:
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    answer = finalize(plane, ROLLOUTS, staged_on=plane.epoch())
    assert finalize(plane, ROLLOUTS, staged_on="another", accept_lost=True) == answer
    assert finalize(plane, ROLLOUTS) == answer


@pytest.mark.parametrize(("name", "value"), [("staged_on", ""), ("staged_on", 3), ("accept_lost", "no")])
def test_an_epoch_that_is_none_is_refused_before_any_work(name: str, value: Any) -> None:
    plane = CrashPlane(memory_plane())
    with pytest.raises(RequestError, match=name):
        finalize(plane, ROLLOUTS, **{name: value})
    assert plane.calls == []


def test_a_request_carries_its_epoch_to_the_reassembler() -> None:
    plane, epoch = restarted()
    request = ReassemblyRequest(
        group_id="g",
        rollout_ids=tuple(made.rollout_id for made in ROLLOUTS),
        canonical_sample_ids=None,
        receipts=tuple(made.receipt() for made in ROLLOUTS),
        rewards=(1.0, 1.0),
        fallback_weight_version=0,
        prompt_idx=0,
        staged_on=epoch,
    )
    stage(plane, ROLLOUTS[0])
    with pytest.raises(PlaneLost, match="1 of its 3 staged rows"):
        reassembler(plane).finalize(request)


def test_a_checkpoint_that_is_loaded_begins_another_epoch(tmp_path: Any) -> None:
    plane = memory_plane()
    stage(plane, ROLLOUTS[0])
    plane.save_checkpoint(str(tmp_path))
    epoch = plane.epoch()
    stage(plane, ROLLOUTS[1])
    plane.load_checkpoint(str(tmp_path))
    with pytest.raises(PlaneLost, match="1 of its 3 staged rows"):
        finalize(plane, ROLLOUTS, staged_on=epoch)
    assert tokens_of(plane, finalize(plane, ROLLOUTS[:1], staged_on=epoch, group_id="h")) == WANTED[:1]
