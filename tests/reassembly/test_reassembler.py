"""What a finalized group is: its rows column by column, its tags, its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.bounds import ReceiptBounds
from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.rows import CANONICAL_SCHEMA
from rollout_reassembler.staging.codec import pack_call
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.source import StagingSource
from tests.captures import (
    CANONICAL,
    PAD,
    STAGING,
    MadeRollout,
    at_places,
    chain,
    finalize,
    memory_plane,
    place_in,
    reassembler,
    stage,
    staged_keys,
)
from tests.reassembly.contents import published


def two_turns(rollout_id: str = "r") -> MadeRollout:
    """`[1, 2]|[3]` at version 4, then `[4]|[5, 6]` at version 5, and an abandoned try at version 3."""
    made = MadeRollout(rollout_id)
    first = made.call([1, 2], [3], logprobs=[-0.25], weight_version=4)
    made.call([4], [7], parent=first, call_id="abandoned", weight_version=3)
    made.call([4], [5, 6], parent=first, logprobs=[-0.5, -0.75], weight_version=5)
    return made


def finalized(*rollouts: MadeRollout, **request: Any) -> tuple[FinalizedGroup, list[dict[str, Any]], MemoryDataPlane]:
    plane = memory_plane()
    stage(plane, *rollouts)
    answer = finalize(plane, rollouts, **request)
    return answer, published(plane, answer.meta.sample_ids), plane


# --- rows -------------------------------------------------------------------------------------------


def test_a_valid_row_column_by_column():
    _, (row,), _ = finalized(two_turns(), rewards=[0.5], loss_multiplier=0.25)
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert row["input_lengths"] == 6
    assert row["token_mask"].tolist() == [0, 0, 1, 0, 1, 1]
    assert row["generation_logprobs"].tolist() == [0, 0, -0.25, 0, -0.5, -0.75]
    assert row["sample_mask"] == 0.25
    assert row["prompt_ids_for_adv"].tolist() == [1, 2]
    assert row["total_reward"] == 0.5
    assert not row["mask_sample"]
    assert not row["truncated"]
    assert set(row) == set(CANONICAL_SCHEMA)


def test_a_placeholder_column_by_column():
    receipts = [two_turns("good").receipt(), None]
    _, (_, row), _ = finalized(two_turns("good"), two_turns("lost"), receipts=receipts, rewards=[0.5, 0.75])
    assert row["input_ids"].tolist() == [PAD]
    assert row["input_lengths"] == 1
    assert row["token_mask"].tolist() == [0]
    assert row["generation_logprobs"].tolist() == [0]
    assert row["sample_mask"] == 0
    assert row["prompt_ids_for_adv"].tolist() == [1, 2]
    assert row["total_reward"] == 0.75
    assert row["mask_sample"]
    assert not row["truncated"]


def test_columns_have_the_dtypes_of_the_wire():
    _, (row, placeholder), _ = finalized(two_turns("a"), two_turns("b"), receipts=[two_turns("a").receipt(), None])
    for name, spec in CANONICAL_SCHEMA.items():
        for found in (row[name], placeholder[name]):
            if spec.dtype == "bytes":
                assert type(found) is bytes
                continue
            assert found.dtype == np.dtype(spec.dtype)
            assert found.ndim == spec.rank


def test_another_pad_token_fills_placeholders():
    answer, (row,), _ = finalized(two_turns(), receipts=[None], options={"pad_token_id": 99})
    assert row["input_ids"].tolist() == row["prompt_ids_for_adv"].tolist() == [99]
    assert answer.meta.sequence_lengths == [1]


def test_placeholders_take_the_prompt_of_the_first_valid_sibling():
    rollouts = [MadeRollout(name) for name in "abcd"]
    for prompt, made in enumerate(rollouts, start=10):
        made.call([prompt, prompt], [1])
    receipts = [None, rollouts[1].receipt(), rollouts[2].receipt(), "x"]
    _, rows, _ = finalized(*rollouts, receipts=receipts)
    assert [row["prompt_ids_for_adv"].tolist() for row in rows] == [[11, 11], [11, 11], [12, 12], [11, 11]]


def test_a_masked_sibling_still_lends_its_prompt():
    _, rows, _ = finalized(
        two_turns("a"), two_turns("b"), receipts=[two_turns("a").receipt(), None], mask_sample=(True, False)
    )
    assert rows[1]["prompt_ids_for_adv"].tolist() == [1, 2]


def test_a_prompt_may_be_empty():
    """A root without carry: everything was sampled."""
    made = MadeRollout("r")
    made.call([], [5, 6])
    _, (row,), _ = finalized(made)
    assert row["prompt_ids_for_adv"].tolist() == []
    assert row["token_mask"].tolist() == [1, 1]


def test_token_ids_keep_all_their_bits():
    made = MadeRollout("r")
    made.call([2**63 - 1], [2**62, 0])
    _, (row,), _ = finalized(made)
    assert row["input_ids"].tolist() == [2**63 - 1, 2**62, 0]


def test_log_probabilities_keep_their_bits():
    logprobs = np.array([-1e-45, -0.1, -3.4028234663852886e38, -0.0], np.float32)
    made = MadeRollout("r")
    made.call([1], [2, 3, 4, 5], logprobs=logprobs.tolist())
    _, (row,), _ = finalized(made)
    assert row["generation_logprobs"][1:].tobytes() == logprobs.tobytes()


@pytest.mark.parametrize(
    ("said", "expected"), [(None, [False, False]), (True, [True, True]), ((False, True), [False, True])], ids=str
)
def test_mask_sample_may_be_one_word_for_all_or_one_a_rollout(said, expected):
    _, rows, _ = finalized(two_turns("a"), two_turns("b"), mask_sample=said)
    assert [bool(row["mask_sample"]) for row in rows] == expected


def test_a_rejected_rollout_is_masked_whatever_the_request_says():
    _, rows, _ = finalized(two_turns("a"), two_turns("b"), receipts=[None, None], mask_sample=(False, False))
    assert all(row["mask_sample"] for row in rows)


@pytest.mark.parametrize(
    ("max_seq_len", "truncated", "expected"),
    [
        (None, None, False),
        (7, None, False),
        (6, None, True),
        (6, [False], False),
        (7, [True], True),
        (None, [True], True),
    ],
)
def test_truncated_is_what_the_request_says_else_a_full_row(max_seq_len, truncated, expected):
    _, (row,), _ = finalized(two_turns(), truncated=truncated, options={"max_seq_len": max_seq_len})
    assert bool(row["truncated"]) is expected


def test_truncated_may_be_said_of_some_rollouts_only():
    _, rows, _ = finalized(two_turns("a"), two_turns("b"), truncated=[None, False], options={"max_seq_len": 6})
    assert [bool(row["truncated"]) for row in rows] == [True, False]


def test_a_placeholder_is_truncated_only_where_the_request_says_so():
    _, rows, _ = finalized(two_turns("a"), two_turns("b"), receipts=[None] * 2, options={"max_seq_len": 1})
    assert [bool(row["truncated"]) for row in rows] == [False, False]
    _, rows, _ = finalized(two_turns("a"), two_turns("b"), receipts=[None] * 2, truncated=[True, False])
    assert [bool(row["truncated"]) for row in rows] == [True, False]


def test_a_row_longer_than_max_seq_len_is_rejected_and_its_staging_cleared():
    answer, rows, plane = finalized(two_turns("a"), chain("b", 1), rewards=[0.5, 1.0], options={"max_seq_len": 5})
    assert answer.rejections["a"] == "exceeds_max_seq_len"
    assert rows[0]["input_ids"].tolist() == [PAD]
    assert rows[0]["total_reward"] == 0.5
    assert staged_keys(plane) == set()


# --- tags and weight versions -----------------------------------------------------------------------


def test_every_row_carries_the_groups_tags():
    _, _, plane = finalized(two_turns("a"), two_turns("b"), receipts=[None, two_turns("b").receipt()], prompt_idx=7)
    expected = {"weight_version": 4, "prompt_idx": 7, "group_id": "g"}
    assert plane.list_samples(CANONICAL) == {"g_g0": expected, "g_g1": expected}


def test_weight_versions_span_the_trained_calls_of_valid_rows_only():
    """The abandoned call at version 3 and the whole rejected rollout at 1 and 9 have no say."""
    rejected = MadeRollout("x")
    first = rejected.call([1], [2], weight_version=1)
    rejected.call([1], [2], parent=first, weight_version=9)
    answer, _, _ = finalized(two_turns(), rejected, receipts=[two_turns().receipt(), None], fallback_weight_version=8)
    assert (answer.group_min_wv, answer.group_max_wv) == (4, 5)


def test_weight_versions_span_all_valid_rollouts():
    rollouts = [chain("a", 1, weight_version=5), chain("b", 1, weight_version=3), chain("c", 1, weight_version=7)]
    answer, _, plane = finalized(*rollouts)
    assert (answer.group_min_wv, answer.group_max_wv) == (3, 7)
    assert {tags["weight_version"] for tags in plane.list_samples(CANONICAL).values()} == {3}


def test_the_fallback_stands_in_where_nothing_is_valid():
    answer, _, plane = finalized(two_turns(), receipts=[None], fallback_weight_version=8)
    assert (answer.group_min_wv, answer.group_max_wv) == (8, 8)
    assert plane.list_samples(CANONICAL)["g_g0"]["weight_version"] == 8


def test_a_weight_version_of_63_bits_survives_and_a_larger_one_is_rejected():
    made = MadeRollout("r")
    made.call([1], [2], weight_version=2**63 - 1)
    answer, _, plane = finalized(made)
    assert answer.group_min_wv == plane.list_samples(CANONICAL)["g_g0"]["weight_version"] == 2**63 - 1
    made = MadeRollout("r")
    made.call([1], [2], weight_version=2**63)
    answer, _, _ = finalized(made)
    assert answer.rejections == {"r": "invalid_receipt"}


# --- the answer -------------------------------------------------------------------------------------


def test_the_answer_names_the_rows():
    answer, _, _ = finalized(two_turns("a"), two_turns("b"), receipts=[None, two_turns("b").receipt()])
    assert answer.meta.partition_id == CANONICAL
    assert answer.meta.sample_ids == ["g_g0", "g_g1"]
    assert answer.meta.sequence_lengths == [1, 6]
    assert answer.meta.fields == list(CANONICAL_SCHEMA)
    assert [tags["group_id"] for tags in answer.meta.tags] == ["g", "g"]
    assert (answer.valid_row_count, answer.total_row_count) == (1, 2)
    assert answer.canonical_output_tokens == 3
    assert answer.staging_keys == at_places("b/c0", "b/abandoned", "b/c2")
    assert answer.rejections == {"a": "missing_receipt"}
    assert (answer.dropped, answer.drop_reason, answer.cleanup_pending) == (False, None, ())


def test_the_answer_says_how_long_each_phase_took():
    answer, _, _ = finalized(two_turns())
    assert set(answer.timings) >= {f"row_assembly/{phase}_ms" for phase in ("fetch", "verify", "publish", "clear")}
    assert all(ms >= 0 for ms in answer.timings.values())


def test_the_rows_of_an_answer_can_be_read_by_it():
    answer, rows, plane = finalized(two_turns("a"), two_turns("b"))
    batch = plane.get_data(answer.meta)
    assert batch.sample_ids == answer.meta.sample_ids
    assert [ids.tolist() for ids in batch["input_ids"]] == [row["input_ids"].tolist() for row in rows]


def test_canonical_sample_ids_are_the_requests():
    answer, _, plane = finalized(two_turns("a"), two_turns("b"), canonical_sample_ids=("x/1", "é"))
    assert answer.meta.sample_ids == ["x/1", "é"]
    assert list(plane.list_samples(CANONICAL)) == ["x/1", "é"]


def test_the_log_says_what_was_wrong_with_a_rollout(caplog: pytest.LogCaptureFixture):
    made = chain("r")
    finalized(made, receipts=[{**made.receipt(), "foo": 1}])
    assert "rollout r rejected: invalid_receipt: foo: Extra inputs are not permitted" in caplog.text


# --- metrics ----------------------------------------------------------------------------------------


def test_the_metrics_of_a_healthy_group():
    answer, _, _ = finalized(two_turns("a"), chain("b", 1))
    reported = {name: value for name, value in answer.metrics.items() if "rout" not in name or "rollout" in name}
    assert reported == {
        "finalize/invalid_row_rate": 0.0,
        "finalize/calls_per_rollout": 2.0,
        "finalize/calls_off_chain_count": 1.0,
        "finalize/token_in_rate": 0.5,
        "finalize/capture_poisoned_rollouts": 0.0,
        "finalize/terminal_selection_declared_count": 2.0,
        "finalize/terminal_selection_declared_fraction": 1.0,
    }


def test_the_metrics_count_each_reason_by_its_name():
    rollouts = [chain(f"r{index}") for index in range(8)]
    receipts: list[Any] = [made.receipt() for made in rollouts]
    receipts[0] = None
    receipts[1] = None
    receipts[2] = "x"
    receipts[3] = rollouts[3].receipt(capture_poisoned=True)
    receipts[4] = rollouts[4].receipt(capture_poisoned=True, failure_reason="engine")
    receipts[5]["manifest"][0]["chain_hash"] = "0" * 64
    answer, _, _ = finalized(*rollouts, receipts=receipts)
    reasons = {name: value for name, value in answer.metrics.items() if "capture_failure_reason" in name}
    assert reasons == {
        "finalize/capture_failure_reason_missing_receipt_count": 2.0,
        "finalize/capture_failure_reason_invalid_receipt_count": 1.0,
        "finalize/capture_failure_reason_capture_poisoned_count": 1.0,
        "finalize/capture_failure_reason_rollout_failed_count": 1.0,
        "finalize/capture_failure_reason_rebuild_failed_count": 1.0,
        "finalize/capture_failure_reason_rebuild_failed_wrong_chain_hash_count": 1.0,
    }
    assert answer.metrics["finalize/invalid_row_rate"] == 0.75
    assert answer.metrics["finalize/capture_poisoned_rollouts"] == 2.0


def test_terminal_selection_is_counted_by_method():
    rollouts = [chain(f"r{index}", 1) for index in range(4)]
    methods = ["declared", "heuristic", "heuristic", "content"]
    receipts = [made.receipt(terminal_selection=method) for made, method in zip(rollouts, methods, strict=True)]
    answer, _, _ = finalized(*rollouts, receipts=receipts)
    assert answer.metrics["finalize/terminal_selection_heuristic_count"] == 2.0
    assert answer.metrics["finalize/terminal_selection_heuristic_fraction"] == 0.5
    assert answer.metrics["finalize/terminal_selection_content_fraction"] == 0.25
    assert "finalize/terminal_selection_response_id_count" not in answer.metrics


def test_the_metrics_of_a_group_without_receipts_are_numbers():
    answer, _, _ = finalized(chain("a"), receipts=[None])
    assert answer.metrics["finalize/calls_per_rollout"] == 0.0
    assert answer.metrics["finalize/token_in_rate"] == 0.0
    assert answer.metrics["finalize/invalid_row_rate"] == 1.0
    assert all(type(value) is float for value in answer.metrics.values())


# --- one rollout ------------------------------------------------------------------------------------


def test_one_rollout_can_be_proven_without_publishing_anything():
    plane = memory_plane()
    stage(plane, two_turns())
    rollout = reassembler(plane).finalize_rollout("r", two_turns().receipt(), reward=0.5)
    assert rollout.valid
    assert rollout.rejection_reason is None
    assert rollout.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert rollout.token_mask.tolist() == [0, 0, 1, 0, 1, 1]
    assert rollout.logprobs.tolist() == [0, 0, -0.25, 0, -0.5, -0.75]
    assert (rollout.prompt_len, rollout.reward) == (2, 0.5)
    assert (rollout.min_wv, rollout.max_wv) == (4, 5)
    assert (rollout.calls, rollout.generated_tokens) == (2, 3)
    assert rollout.staging_keys == at_places("r/c0", "r/abandoned", "r/c2")
    assert plane.list_samples(CANONICAL) == {}
    assert len(staged_keys(plane)) == 3


@pytest.mark.parametrize(
    ("reward", "max_seq_len", "reason"), [(None, None, "invalid_reward"), (1.0, 5, "exceeds_max_seq_len")]
)
def test_a_rollout_that_was_proven_and_still_rejected_owns_its_rows(reward, max_seq_len, reason):
    """Proof of ownership does not hang on tags: rows whose put died before its tags are cleared too."""
    made = two_turns()
    plane = memory_plane()
    for call in made.calls:
        plane.put_samples([place_of(call)], STAGING, {"call": [pack_call(call)], "extras": [b""]})
    rollout = reassembler(plane, max_seq_len=max_seq_len).finalize_rollout("r", made.receipt(), reward=reward)
    assert rollout.rejection_reason == reason
    assert rollout.staging_keys == at_places("r/c0", "r/abandoned", "r/c2")
    finalize(plane, [made], rewards=[reward], options={"max_seq_len": max_seq_len})
    assert staged_keys(plane) == set()


@pytest.mark.parametrize(
    ("receipt", "reason"),
    [
        (None, "missing_receipt"),
        ({}, "invalid_receipt"),
        (two_turns("s").receipt(), "identity_mismatch"),
        (two_turns().receipt(capture_poisoned=True), "capture_poisoned"),
        (two_turns().receipt(capture_poisoned=True, failure_reason="engine"), "rollout_failed"),
        (two_turns().receipt(manifest=two_turns().receipt()["manifest"] * 2), "invalid_receipt"),
    ],
)
def test_a_rollout_that_cannot_be_proven_says_why(receipt, reason):
    plane = memory_plane()
    stage(plane, two_turns())
    rollout = reassembler(plane).finalize_rollout("r", receipt, reward=0.5)
    assert not rollout.valid
    assert rollout.rejection_reason == reason
    assert rollout.rejection_detail
    assert rollout.staging_keys == ()
    assert len(rollout.token_ids) == len(rollout.token_mask) == len(rollout.logprobs) == 0
    assert (rollout.min_wv, rollout.max_wv) == (None, None)


def test_a_staging_key_listed_twice_is_named():
    receipt = two_turns().receipt()
    receipt["manifest"][1]["staging_key"] = "r/c0"
    rollout = reassembler(memory_plane()).finalize_rollout("r", receipt, reward=1.0)
    assert rollout.rejection_reason == "duplicate_staging_key"


def test_a_receipt_beyond_the_bounds_is_named():
    rollout = reassembler(memory_plane(), bounds=ReceiptBounds(max_calls=2)).finalize_rollout(
        "r", two_turns().receipt(), reward=1.0
    )
    assert rollout.rejection_reason == "invalid_receipt"
    assert "max_calls=2" in rollout.rejection_detail


def test_missing_rows_are_counted_and_the_first_is_named():
    plane = memory_plane()
    stage(plane, two_turns())
    plane.clear_samples([place_in(plane, "r/abandoned"), place_in(plane, "r/c2")], STAGING)
    rollout = reassembler(plane).finalize_rollout("r", two_turns().receipt(), reward=1.0)
    assert rollout.rejection_reason == "missing_staging_row"
    assert rollout.rejection_detail == f"2 of 3 staged rows are missing, first {place_of(two_turns().calls[1])!r}"
    assert len(StagingSource(plane, staging_partition=STAGING).read_values([place_in(plane, "r/c0")])[0]) == 1


def test_a_rollout_of_many_calls_is_one_row():
    made = MadeRollout("r")
    parent = None
    for turn in range(512):
        parent = made.call([turn], [turn], parent=parent)
    plane = memory_plane()
    stage(plane, made)
    rollout = reassembler(plane).finalize_rollout("r", made.receipt(), reward=1.0)
    assert rollout.valid
    assert rollout.calls == 512
    assert rollout.token_ids.tolist() == made.tokens()


def test_a_large_group_is_proven_like_a_small_one():
    """Enough bytes for proofs to run side by side: rows and rejections stay with their rollouts."""
    rollouts = []
    for number in range(6):
        made = MadeRollout(f"r{number}")
        made.call([number], np.arange(60_000 + number).tolist())
        rollouts.append(made)
    plane = memory_plane()
    stage(plane, *rollouts)
    plane.put_samples([place_in(plane, "r3/c0")], STAGING, {"call": [pack_call(rollouts[2].calls[0])]})
    answer = finalize(plane, rollouts)
    assert answer.rejections == {"r3": "staging_key_mismatch"}
    rows = published(plane, answer.meta.sample_ids)
    for number, (made, row) in enumerate(zip(rollouts, rows, strict=True)):
        assert row["input_ids"].tolist() == ([PAD] if number == 3 else made.tokens())
