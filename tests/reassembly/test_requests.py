"""A request whose own shape is wrong is its caller's fault: it raises, names the part, touches nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import RequestError
from tests.captures import chain, memory_plane, reassembler, stage
from tests.reassembly.contents import published, whole_plane

ROLLOUTS = [chain("a"), chain("b")]


def request(**changes: Any) -> dict[str, Any]:
    return {
        "group_id": "g",
        "rollout_ids": ["a", "b"],
        "receipts": [made.receipt() for made in ROLLOUTS],
        "rewards": [1.0, 0.0],
        "mask_sample": None,
        "fallback_weight_version": 0,
        "prompt_idx": 0,
        **changes,
    }


def finalized(**changes: Any) -> Any:
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    answer = reassembler(plane).finalize_group(**request(**changes))
    return published(plane, answer.meta.sample_ids)


PARTS = ["receipts", "rewards", "mask_sample", "canonical_sample_ids", "truncated"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("size", [1, 3])
def test_a_part_that_does_not_align_is_named(part, size):
    with pytest.raises(RequestError, match=f"group 'g': {size} {part} for 2 rollout_ids"):
        finalized(**{part: ["x"] * size})


@pytest.mark.parametrize("part", ["receipts", "rewards"])
@pytest.mark.parametrize("value", [None, 5])
def test_a_part_that_is_no_sequence_is_named(part, value):
    with pytest.raises(RequestError, match=f"{type(value).__name__} {part} for 2 rollout_ids"):
        finalized(**{part: value})


def test_an_empty_group_is_refused():
    with pytest.raises(RequestError, match=r"group 'g': rollout_ids must name a rollout or more, got \[\]"):
        finalized(rollout_ids=[], receipts=[], rewards=[])


@pytest.mark.parametrize("rollout_ids", ["ab", None, 5])
def test_rollout_ids_are_a_list(rollout_ids):
    with pytest.raises(RequestError, match=f"rollout_ids must name a rollout or more, got {rollout_ids!r}"):
        finalized(rollout_ids=rollout_ids)


@pytest.mark.parametrize("group_id", ["", None, 7, b"g", ["g"]], ids=repr)
def test_a_group_has_an_id(group_id):
    with pytest.raises(RequestError, match="group_id must be a non-empty str, got"):
        finalized(group_id=group_id)


@pytest.mark.parametrize("part", ["rollout_ids", "canonical_sample_ids"])
@pytest.mark.parametrize("ids", [["a", "a"], ["a", ""], ["a", None], ["a", 1], [["a"], ["b"]]], ids=repr)
def test_ids_are_distinct_non_empty_strings(part, ids):
    with pytest.raises(RequestError, match=f"{part} must be distinct non-empty strings"):
        finalized(**{part: ids})


@pytest.mark.parametrize("loss_multiplier", [float("nan"), float("inf"), 1e39, None, "1", True], ids=repr)
def test_a_loss_multiplier_is_a_finite_number(loss_multiplier):
    """One that is not would be published as the weight of every row."""
    with pytest.raises(RequestError, match="loss_multiplier"):
        finalized(loss_multiplier=loss_multiplier)


@pytest.mark.parametrize("setting", [{"max_seq_len": 0}, {"max_seq_len": "32k"}, {"pad_token_id": "0"}], ids=str)
def test_settings_that_cannot_be_are_refused_at_the_start(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name} must be .* got {setting[name]!r}"):
        reassembler(memory_plane(), **setting)


@pytest.mark.parametrize("name", ["prompt_idx", "fallback_weight_version"])
@pytest.mark.parametrize("value", [1.5, "1", None], ids=repr)
def test_an_index_that_is_no_integer_raises_before_anything_happens(name, value):
    with pytest.raises(RequestError, match=f"group 'g': {name} must be an int, got {value!r}"):
        finalized(**{name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"group_id": ""},
        {"rewards": [1.0]},
        {"rollout_ids": ["a", "a"]},
        {"loss_multiplier": float("nan")},
        {"prompt_idx": None},
    ],
    ids=str,
)
def test_a_request_that_is_refused_touches_nothing(changes):
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    before = whole_plane(plane)
    with pytest.raises(RequestError):
        reassembler(plane).finalize_group(**request(**changes))
    assert whole_plane(plane) == before


def test_numpy_values_are_taken_as_the_numbers_they_are():
    """A trainer's own arrays: not one of them may cost a rollout its row."""
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    answer = reassembler(plane).finalize_group(
        **request(
            rewards=np.array([0.5, 1.0], np.float32),
            mask_sample=np.array([False, True]),
            truncated=np.array([True, False]),
            prompt_idx=np.int64(3),
            fallback_weight_version=np.int32(1),
            loss_multiplier=np.float32(0.5),
        )
    )
    assert answer.rejections == {}
    rows = published(plane, answer.meta.sample_ids)
    assert [float(row["total_reward"]) for row in rows] == [0.5, 1.0]
    assert [bool(row["mask_sample"]) for row in rows] == [False, True]
    assert [bool(row["truncated"]) for row in rows] == [True, False]
    plain = request(
        rewards=[0.5, 1.0],
        mask_sample=[False, True],
        truncated=[True, False],
        prompt_idx=3,
        fallback_weight_version=1,
        loss_multiplier=0.5,
    )
    assert reassembler(plane).finalize_group(**plain) == answer


def test_tuples_and_lists_are_one_request():
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    first = reassembler(plane).finalize_group(**request())
    again = request(rollout_ids=("a", "b"), rewards=(1.0, 0.0), mask_sample=(False, False))
    assert reassembler(plane).finalize_group(**{**again, "receipts": tuple(again["receipts"])}) == first


def test_a_receipt_as_a_record_and_as_a_dict_are_one_request():
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    first = reassembler(plane).finalize_group(**request())
    sparse = [{name: value for name, value in made.receipt().items() if value is not None} for made in ROLLOUTS]
    assert reassembler(plane).finalize_group(**request(receipts=sparse)) == first
