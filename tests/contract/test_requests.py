"""A request whose own shape is wrong is its caller's fault: it raises, names the part, touches nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout_reassembler.contract.errors import GroupConflict, RequestError
from rollout_reassembler.contract.messages import RolloutReassemblerActorConfig
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from tests.captures import chain, collect, finalize, memory_plane, reassembler, stage, staged_keys
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
    with pytest.raises(RequestError, match=f"group 'g': {part} must be a sequence with an entry a rollout, got"):
        finalized(**{part: value})


def test_an_empty_group_is_refused():
    with pytest.raises(RequestError, match=r"group 'g': rollout_ids must name a rollout or more, got list of 0 items"):
        finalized(rollout_ids=[], receipts=[], rewards=[])


@pytest.mark.parametrize("rollout_ids", ["ab", None, 5])
def test_rollout_ids_are_a_list(rollout_ids):
    with pytest.raises(RequestError, match=f"rollout_ids must be a sequence .*, got .*{rollout_ids!r}"):
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


@pytest.mark.parametrize("loss_multiplier", [float("nan"), float("inf"), 1e39, None, "1", [1.0]], ids=repr)
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
    with pytest.raises(RequestError, match=f"group 'g': {name} must be an int, got .*{value!r}"):
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


def test_torch_values_are_taken_as_the_numbers_they_are():
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    answer = reassembler(plane).finalize_group(
        **request(
            rewards=torch.tensor([0.5, 1.0], dtype=torch.bfloat16, requires_grad=True),
            mask_sample=torch.tensor([False, True]),
            truncated=[torch.tensor(1), None],
            prompt_idx=torch.tensor(3),
            loss_multiplier=torch.tensor(0.5),
        )
    )
    assert answer.rejections == {}
    rows = published(plane, answer.meta.sample_ids)
    assert [float(row["total_reward"]) for row in rows] == [0.5, 1.0]
    assert [bool(row["mask_sample"]) for row in rows] == [False, True]
    assert [bool(row["truncated"]) for row in rows] == [True, False]
    assert [float(row["sample_mask"]) for row in rows] == [0.5, 0.5]


@pytest.mark.parametrize(
    "rewards",
    [[True, False], [np.bool_(True), np.bool_(False)], np.array([True, False]), torch.tensor([1, 0])],
    ids=str,
)
def test_a_grade_of_true_is_a_reward_of_one(rewards):
    assert [float(row["total_reward"]) for row in finalized(rewards=rewards)] == [1.0, 0.0]


SLIPS = {
    "text as a reward": ({"rewards": ["1.0", 0.0]}, r"rewards\[0\] must be a number or None, got str '1.0'"),
    "a list as a reward": ({"rewards": [0.0, [1.0]]}, r"rewards\[1\] must be a number or None, got list of 1 items"),
    "a complex reward": ({"rewards": [1j, 0.0]}, r"rewards\[0\] must be a number or None, got complex"),
    "a tensor as a reward": ({"rewards": [torch.ones(2), 0.0]}, r"rewards\[0\] must be .*Tensor of shape \(2,\)"),
    "rewards by rollout": ({"rewards": {"a": 1.0, "b": 0.0}}, "rewards must be a sequence .*, got dict of 2 items"),
    "rewards of two dimensions": ({"rewards": np.zeros((2, 1))}, r"rewards must be a sequence .* of shape \(2, 1\)"),
    "text as a mask": ({"mask_sample": ["False", "True"]}, r"mask_sample\[0\] must be a bool, got str 'False'"),
    "a mask of 2": ({"mask_sample": [0, 2]}, r"mask_sample\[1\] must be a bool, got int 2"),
    "no mask for one": ({"mask_sample": [True, None]}, r"mask_sample\[1\] must be a bool, got None"),
    "a word as a mask": ({"mask_sample": "no"}, "mask_sample must be a sequence .* got str 'no'"),
    "text as truncated": ({"truncated": ["no", "no"]}, r"truncated\[0\] must be a bool or None, got str 'no'"),
    "receipts by rollout": ({"receipts": {"a": {}, "b": {}}}, "receipts must be a sequence .*, got dict of 2 items"),
    "receipts as one text": ({"receipts": "[{}, {}]"}, "receipts must be a sequence .*, got str"),
    "receipts as JSON text": (
        {"receipts": ['{"rollout_id": "a"}', None]},
        r"JSON text; pass the parsed dicts: .*loads",
    ),
    "no sample ids": ({"canonical_sample_ids": ()}, "0 canonical_sample_ids for 2 rollout_ids"),
    "a surrogate in the group": (
        {"group_id": "\ud800"},
        r"group_id must be .* a lone surrogate, U\+D800 at character 0",
    ),
    "a surrogate in a rollout": ({"rollout_ids": ["a", "b\udfff"]}, r"U\+DFFF at character 1 in \[1\]"),
    "a surrogate in a sample": ({"canonical_sample_ids": ["\ud800", "b"]}, "canonical_sample_ids must be .* surrogate"),
    "no version": ({"fallback_weight_version": None}, "fallback_weight_version must be an int, got None"),
    "a negative version": (
        {"fallback_weight_version": -1},
        r"fallback_weight_version must be an int from 0 to 2\*\*63",
    ),
    "a version of 64 bits": ({"fallback_weight_version": 2**63}, "fallback_weight_version must be .* beyond int64"),
    "an index of 64 bits": ({"prompt_idx": 2**63}, "prompt_idx must be .* beyond int64"),
    "a word to accept": ({"accept_lost": "no"}, "accept_lost must be a bool, got str 'no'"),
}


@pytest.mark.parametrize(("changes", "message"), SLIPS.values(), ids=SLIPS)
def test_a_slip_of_the_caller_is_named_and_costs_nothing(changes, message):
    """Before any work: the request as it was meant gives its rows, under the same id."""
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    before = whole_plane(plane)
    with pytest.raises(RequestError, match=message) as caught:
        reassembler(plane).finalize_group(**request(**changes))
    assert whole_plane(plane) == before
    assert len(str(caught.value)) < 300
    assert reassembler(plane).finalize_group(**request()).valid_row_count == 2


UNREAD = {
    "no grades": {"rewards": [None, None]},
    "grades that are no numbers": {"rewards": [float("nan"), float("inf")]},
    "an error as each receipt": {"receipts": ["internal server error", 500]},
    "some of each": {"receipts": ["internal server error", ROLLOUTS[1].receipt()], "rewards": [1.0, None]},
}


@pytest.mark.parametrize("changes", UNREAD.values(), ids=UNREAD)
def test_a_group_of_which_nothing_could_be_read_is_no_reason_to_destroy(changes):
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    staged = staged_keys(plane)
    answer = reassembler(plane).finalize_group(**request(**changes))
    assert (answer.valid_row_count, answer.total_row_count) == (0, 2)
    assert answer.cleanup_pending == ("a/*", "b/*")
    assert reassembler(plane).finalize_group(**request(**changes)) == answer
    assert staged_keys(plane) == staged
    right = reassembler(plane).finalize_group(**request())
    assert (right.valid_row_count, right.cleanup_pending) == (2, ())
    assert [row["input_ids"].tolist() for row in published(plane, right.meta.sample_ids)] == [
        made.tokens() for made in ROLLOUTS
    ]
    assert staged_keys(plane) == set()
    with pytest.raises(GroupConflict):
        reassembler(plane).finalize_group(**request(**changes))


def test_one_garbled_receipt_of_two_still_costs_its_rollout_alone():
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    answer = reassembler(plane).finalize_group(**request(receipts=["{}", ROLLOUTS[1].receipt()]))
    assert (answer.rejections, answer.cleanup_pending) == ({"a": "invalid_receipt"}, ())
    collect(plane)
    assert staged_keys(plane) == set()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"options": {"max_seq_len": 4096}}, "max_seq_len was None and is 4096 here"),
        ({"options": {"pad_token_id": 7}}, "pad_token_id was 0 and is 7 here"),
        ({"options": {"router_replay_enabled": True}}, "router_replay_enabled was False and is True here"),
        ({"rewards": [0.5, 0.5]}, "differs in rewards"),
        ({"prompt_idx": 5, "mask_sample": True}, "differs in mask_sample, prompt_idx"),
    ],
    ids=str,
)
def test_a_conflict_says_in_what_the_requests_differ(changes, told):
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    finalize(plane, ROLLOUTS)
    with pytest.raises(GroupConflict, match=f"'g' was finalized before, by a request that .*{told}; give this one"):
        finalize(plane, ROLLOUTS, **changes)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"pad_token_id": 2**63}, "pad_token_id must be an int from 0 to"),
        ({"pad_token_id": -1}, "pad_token_id must be an int from 0 to"),
        ({"pad_token_id": None}, "pad_token_id must be an int from 0 to"),
        ({"max_seq_len": 0}, "max_seq_len must be a positive int of tokens"),
        ({"max_seq_len": 1.5}, "max_seq_len must be a positive int of tokens"),
        ({"defer_routed_experts_to_policy": True}, "needs router_replay_enabled=True"),
        ({"bounds": {"max_calls": 5}}, "bounds must be a ReceiptBounds, got dict"),
        ({"partition_id": ""}, "partition_id must be a non-empty str"),
        ({"staging_partition": "train"}, "must differ"),
    ],
    ids=str,
)
def test_an_actors_settings_that_cannot_be_are_refused_at_construction(setting, told):
    fields = {"partition_id": "train", "staging_partition": "staging", "pad_token_id": 0}
    with pytest.raises(ValueError, match=told):
        RolloutReassemblerActorConfig(**{**fields, **setting})
    with pytest.raises(ValueError, match=told):
        RolloutReassembler(memory_plane(), **{**fields, "max_seq_len": None, **setting})


def test_an_answer_names_the_task_that_trains_on_it():
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    assert finalize(plane, ROLLOUTS).meta.task_name == "train"


def test_rates_are_over_all_rollouts_of_the_group():
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    metrics = finalize(plane, ROLLOUTS, receipts=[None, ROLLOUTS[1].receipt()]).metrics
    assert metrics["finalize/calls_per_rollout"] == 1.5
    assert metrics["finalize/terminal_selection_declared_fraction"] == 0.5


def test_rows_that_a_finalized_group_cleared_are_not_told_as_never_staged():
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    finalize(plane, ROLLOUTS)
    rollout = reassembler(plane).finalize_rollout("a", ROLLOUTS[0].receipt(), reward=1.0)
    assert rollout.rejection_reason == "missing_staging_row"
    assert rollout.rejection_detail.endswith("its answer's rejections say what became of the rollout")


def test_a_log_line_of_an_agents_text_is_one_line_and_short(caplog):
    plane = memory_plane()
    stage(plane, *ROLLOUTS)
    said = "first\nERROR forged\x1b[31m \u202e" + "x" * 10_000
    receipt = ROLLOUTS[0].receipt(capture_poisoned=True, failure_reason=said)
    finalize(plane, ROLLOUTS, receipts=[receipt, ROLLOUTS[1].receipt()])
    (line,) = caplog.messages
    assert r"first\nERROR forged\x1b[31m \u202e" in line
    assert line.isprintable()
    assert len(line) < 700


@pytest.mark.parametrize(
    ("holder", "other"),
    [
        (("x", None), ("y", ["x_g0"])),
        (("g", ["g_g0_g0"]), ("g_g0", None)),
        (("x", ["same"]), ("y", ["same"])),
        (("y", ["x_g0"]), ("x", None)),
    ],
    ids=str,
)
def test_a_sample_id_belongs_to_one_group(holder, other):
    """Before anything is overwritten, also where the ids of one of the two are the defaults."""
    plane, first, second = memory_plane(), *ROLLOUTS
    stage(plane, first, second)
    finalize(plane, [first], group_id=holder[0], canonical_sample_ids=holder[1])
    before = whole_plane(plane)
    with pytest.raises(
        GroupConflict, match=f"group '{other[0]}': its canonical sample id .* row of group '{holder[0]}'"
    ):
        finalize(plane, [second], group_id=other[0], canonical_sample_ids=other[1])
    assert whole_plane(plane) == before
    assert finalize(plane, [second], group_id=other[0], canonical_sample_ids=["of its own"]).valid_row_count == 1


def test_a_sample_id_is_free_again_once_its_row_was_consumed():
    plane, first, second = memory_plane(), *ROLLOUTS
    stage(plane, first, second)
    plane.clear_samples(finalize(plane, [first], group_id="x").meta.sample_ids, "canonical")
    assert finalize(plane, [second], group_id="y", canonical_sample_ids=["x_g0"]).valid_row_count == 1
