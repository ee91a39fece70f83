"""Rows that no receipt names: a group marks their rollouts, a collection finds and clears them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rollout_reassembler.contract.errors import DataPlaneTimeout
from rollout_reassembler.reassembly.collector import BackgroundCollector, Collected
from rollout_reassembler.reassembly.sweep import sweep_staging
from rollout_reassembler.staging.places import place_of
from tests.captures import STAGING, MadeRollout, chain, finalize, memory_plane, reassembler, stage, staged_places
from tests.reassembly.contents import LOST
from tests.reassembly.crash_plane import CrashPlane

LOST_ROLLOUTS = [chain("lost"), chain("garbled")]
OTHERS = [chain("stranger"), chain("los")]


def places_of(*rollouts: MadeRollout) -> set[str]:
    return {place_of(call) for made in rollouts for call in made.calls}


def group_with_lost_rows(plane: Any) -> Any:
    """A group of three of which two have no receipt that could be read, and others' rows beside it."""
    good = chain("good")
    stage(plane, good, *LOST_ROLLOUTS, *OTHERS)
    return finalize(plane, [good, *LOST_ROLLOUTS], receipts=[good.receipt(), None, "unreadable"])


def test_a_group_marks_what_it_lost_and_looks_through_nothing() -> None:
    plane = CrashPlane(memory_plane())
    answer = group_with_lost_rows(plane)
    assert "list_samples" not in plane.calls
    assert (answer.to_collect, answer.cleanup_pending) == (("garbled", "lost"), ())
    assert staged_places(plane) == places_of(*LOST_ROLLOUTS, *OTHERS)


def test_one_look_clears_the_rows_of_all_groups() -> None:
    inner = memory_plane()
    group_with_lost_rows(inner)
    stage(inner, chain("another"))
    finalize(inner, [chain("another")], group_id="g2", receipts=[None])
    plane = CrashPlane(inner)
    found = reassembler(plane).collect_lost()
    assert found == Collected(9, ("another", "garbled", "lost"))
    assert plane.calls.count("list_samples") == 2, "the marks, and the staged rows once"
    assert staged_places(inner) == places_of(*OTHERS)
    assert reassembler(inner).collect_lost() == Collected()


def test_what_another_attempt_stages_later_stays() -> None:
    plane, now = memory_plane(), [100.0]
    plane.now = lambda: now[0]  # type: ignore[method-assign]
    group_with_lost_rows(plane)
    now[0] = 101.0
    again = chain("lost", 2, seed=9)
    stage(plane, again)
    assert reassembler(plane).collect_lost() == Collected(6, ("garbled", "lost"))
    assert staged_places(plane) == places_of(*OTHERS, again)


def test_rows_that_were_given_up_and_staged_again_are_not_collected() -> None:
    """The mark of the first answer is older than the rows that replace its placeholders."""
    plane, now = memory_plane(), [100.0]
    plane.now = lambda: now[0]  # type: ignore[method-assign]
    made = [chain("a"), chain("b")]
    stage(plane, made[1])
    asked: dict[str, Any] = {"staged_on": "another epoch", "accept_lost": True}
    assert finalize(plane, made, **asked).to_collect == ("a",)
    now[0] = 101.0
    stage(plane, *made)
    reassembler(plane).collect_lost()
    answer = finalize(plane, made, **asked)
    assert (answer.valid_row_count, answer.to_collect) == (2, ())


def test_a_receipt_that_names_anothers_rows_has_nothing_collected() -> None:
    plane, liar = memory_plane(), chain("liar")
    stage(plane, liar)
    receipt = liar.receipt()
    receipt["manifest"][0]["staging_key"] = "stranger/c0"
    assert finalize(plane, [liar], receipts=[receipt]).to_collect == ()
    assert plane.list_samples(LOST) == {}


@pytest.mark.parametrize("where", ["before", "during", "after"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_collection_that_dies_is_done_again_by_the_next(count: int, where: Any) -> None:
    inner = memory_plane()
    group_with_lost_rows(inner)
    plane = CrashPlane(inner)
    plane.fail_at(count, where=where, for_good=True)
    with pytest.raises(DataPlaneTimeout):
        reassembler(plane).collect_lost()
    assert places_of(*OTHERS) <= staged_places(inner)
    assert staged_places(inner) == places_of(*OTHERS) or inner.list_samples(LOST), "rows nobody will come for"
    plane.recover()
    reassembler(plane).collect_lost()
    assert staged_places(inner) == places_of(*OTHERS)
    assert inner.list_samples(LOST) == {}


def test_a_sweep_collects_as_well_and_spares_the_living() -> None:
    plane = memory_plane()
    group_with_lost_rows(plane)
    assert set(sweep_staging(plane, STAGING, rollout_ids=[]).found) == {"lost", "garbled"}
    sweep_staging(plane, STAGING, rollout_ids=[], live_rollouts=["lost"], dry_run=False)
    assert staged_places(plane) == places_of(*OTHERS, chain("lost"))
    assert set(plane.list_samples(LOST)) == {"lost"}


def test_a_background_collection_is_made_once_for_many_groups_and_goes_on_after_a_failure() -> None:
    outcomes: list[Exception | None] = [DataPlaneTimeout("no answer", call="list_samples", partition="", seconds=1.0)]
    collections = threading.Semaphore(0)

    def collect() -> None:
        outcome = outcomes.pop() if outcomes else None
        collections.release()
        if outcome:
            raise outcome

    collector = BackgroundCollector(collect, every_s=0.05)
    for _ in range(100):
        collector.ask()
    assert collections.acquire(timeout=10)
    collector.ask()
    assert collections.acquire(timeout=10)
    assert not collections.acquire(timeout=0.5)
