"""A sweep finds what nobody will come for, and takes nothing else."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rollout_reassembler.contract.errors import DataPlaneTimeout, RequestError
from rollout_reassembler.data_plane.base import Tags
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.sweep import sweep_staging
from rollout_reassembler.staging.codec import pack_call
from rollout_reassembler.staging.places import place_of
from tests.captures import STAGING, MadeRollout, chain, memory_plane, registered, stage, staged_places
from tests.reassembly.crash_plane import CrashPlane


def keys_of(*rollouts: MadeRollout) -> set[str]:
    return {place_of(call) for made in rollouts for call in made.calls}


def staged_at(plane: MemoryDataPlane, made: MadeRollout, seconds_ago: float) -> None:
    stage(plane, made)
    keys = [place_of(call) for call in made.calls]
    plane.put_samples(keys, STAGING, tags=[{"staged_at": time.time() - seconds_ago}] * len(keys))


def test_a_dry_run_finds_and_clears_nothing():
    plane = memory_plane()
    stage(plane, chain("a"), chain("b"))
    report = sweep_staging(plane, STAGING, rollout_ids=["a"])
    assert report.found == {"a": list(map(place_of, chain("a").calls))}
    assert report.keys == report.found["a"]
    assert (report.spared, report.cleared) == (3, False)
    assert staged_places(plane) == keys_of(chain("a"), chain("b"))


def test_a_sweep_by_rollout_clears_exactly_its_rows():
    plane = memory_plane()
    others = [chain("a/c0"), chain("ab"), chain("b")]
    stage(plane, chain("a"), *others)
    report = sweep_staging(plane, STAGING, rollout_ids=["a", "unknown"], dry_run=False)
    assert report.cleared
    assert staged_places(plane) == keys_of(*others)


def test_a_sweep_by_age_spares_the_young_and_the_living():
    plane = memory_plane()
    for rollout_id, seconds_ago in (("old", 100), ("young", 1), ("living", 100)):
        staged_at(plane, chain(rollout_id), seconds_ago)
    report = sweep_staging(plane, STAGING, older_than_s=50, live_rollouts=["living"], dry_run=False)
    assert set(report.found) == {"old"}
    assert report.spared == 6
    assert staged_places(plane) == keys_of(chain("young"), chain("living"))


def test_rows_without_an_age_are_never_old():
    plane = memory_plane()
    plane.put_samples(["a/c0"], STAGING, {"call": [b"x"], "extras": [b""]}, [{"rollout_id": "a"}])
    assert sweep_staging(plane, STAGING, older_than_s=0).keys == []


def test_rows_without_tags_are_left_alone_unless_asked_for():
    plane = memory_plane()
    plane.put_samples(["a/c0"], STAGING, {"call": [pack_call(chain("a").calls[0])]})
    assert sweep_staging(plane, STAGING, rollout_ids=["a"], older_than_s=0, dry_run=False).keys == []
    report = sweep_staging(plane, STAGING, untagged_after_s=0.0, dry_run=False)
    assert report.untagged == ["a/c0"]
    assert staged_places(plane) == set()


def test_a_put_that_is_going_on_is_not_swept():
    class Slow(MemoryDataPlane):
        """Its staging put comes to its tags between the two looks of the sweep."""

        looks = 0

        def list_samples(self, partition_id: str) -> dict[str, Tags]:
            Slow.looks += 1
            if Slow.looks == 2:
                self.put_samples(["a/c0"], STAGING, tags=[{"rollout_id": "a"}])
            return super().list_samples(partition_id)

    plane = Slow()
    registered(plane).put_samples(["a/c0"], STAGING, {"call": [b"x"]})
    assert sweep_staging(plane, STAGING, untagged_after_s=0.0, dry_run=False).keys == []


@pytest.mark.parametrize("arguments", [{}, {"live_rollouts": ["a"]}, {"dry_run": False}])
def test_a_sweep_of_everything_must_be_asked_for(arguments):
    with pytest.raises(RequestError, match="a sweep needs"):
        sweep_staging(memory_plane(), STAGING, **arguments)


def test_a_rollout_cannot_be_swept_and_spared():
    with pytest.raises(RequestError, match="'a'"):
        sweep_staging(memory_plane(), STAGING, rollout_ids=["a", "b"], live_rollouts=["a", "c"])


@pytest.mark.parametrize("arguments", [{"rollout_ids": "ab"}, {"older_than_s": 0, "live_rollouts": "ab"}])
def test_one_name_is_not_a_list_of_names(arguments):
    """`"a" in "ab"`: a bare string would sweep, or spare, rollouts that nobody named."""
    plane = memory_plane()
    stage(plane, chain("a"))
    with pytest.raises(RequestError, match="list of rollout ids"):
        sweep_staging(plane, STAGING, **arguments, dry_run=False)
    assert staged_places(plane) == keys_of(chain("a"))


@pytest.mark.parametrize("call", ["list_samples", "clear_samples"])
@pytest.mark.parametrize("where", ["before", "during", "after"])
def test_a_sweep_that_failed_may_be_repeated(call: str, where: Any):
    inner = memory_plane()
    stage(inner, chain("a"), chain("b"))
    plane = CrashPlane(inner)
    plane.fail(call, where=where)
    with pytest.raises(DataPlaneTimeout):
        sweep_staging(plane, STAGING, rollout_ids=["a"], dry_run=False)
    sweep_staging(plane, STAGING, rollout_ids=["a"], dry_run=False)
    assert staged_places(inner) == keys_of(chain("b"))


def test_an_empty_list_sweeps_nothing():
    plane = memory_plane()
    stage(plane, chain("a"))
    assert sweep_staging(plane, STAGING, rollout_ids=[], dry_run=False).keys == []
    assert len(staged_places(plane)) == 3
