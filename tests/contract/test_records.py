"""The records of the wire: what validates, what a validated record promises, what it costs."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from pydantic import ValidationError

from rollout_reassembler.contract.errors import InvalidStagedCall
from rollout_reassembler.contract.records import (
    CallRecord,
    RolloutReceipt,
    StagedCall,
    StageResult,
    seal_call,
    staging_key,
)
from rollout_reassembler.staging.codec import pack_call, unpack_call
from tests.captures import MadeRollout, chain
from tests.contract.strategies import few, wire_rollouts
from tests.staging.unchecked import resigned


def made_call(**changes: Any) -> dict[str, Any]:
    """A sound child call as a plain dict, with `changes` that its digest does not know of."""
    return {**chain("r", 2).calls[1].model_dump(), **changes}


# --- staged calls -----------------------------------------------------------------------------------


@few
@given(wire_rollouts())
def test_a_staged_call_round_trips_through_a_plain_dict(rollout):
    for staged in rollout.staged:
        call = StagedCall.model_validate(staged)
        assert StagedCall.model_validate(call.model_dump()) == call
        assert StagedCall.model_validate_json(call.model_dump_json()) == call


def test_columns_come_from_lists_or_arrays_alike():
    staged = made_call()
    arrays = {
        "token_ids_delta": np.array(staged["token_ids_delta"], np.int32),
        "token_mask_delta": np.array(staged["token_mask_delta"], np.float64),
        "generation_log_probs_delta": np.array(staged["generation_log_probs_delta"], np.float16),
    }
    assert StagedCall.model_validate({**staged, **arrays}) == StagedCall.model_validate(staged)


def test_columns_have_the_dtypes_of_the_wire():
    call = StagedCall.model_validate(made_call())
    assert call.token_ids_delta.dtype == np.int64
    assert call.token_mask_delta.dtype == np.float32
    assert call.generation_log_probs_delta.dtype == np.float32


COLUMNS = ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta")


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    "value",
    [
        [True, False, True, False, True],
        np.array([True] * 5),
        np.ones((5, 1)),
        np.ones((5, 1), np.int64),
        np.array([1, 0, 1, 0, 1], object),
        ["1", "0", "1", "0", "1"],
        [None] * 5,
        [[1]] * 5,
        "11111",
        None,
        5,
    ],
    ids=[
        "bools",
        "bool-array",
        "2d-floats",
        "2d-ints",
        "object-array",
        "texts",
        "nones",
        "nested",
        "text",
        "none",
        "int",
    ],
)
def test_a_column_that_is_not_one_is_refused(column, value):
    with pytest.raises(ValidationError, match=column):
        StagedCall.model_validate(made_call(**{column: value}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids_delta": [1, 2, -3, 4, 5]}, "non-negative"),
        ({"token_ids_delta": [1, 2, 2**63, 4, 5]}, "64 bits"),
        ({"token_ids_delta": np.array([1, 2, 2**63, 4, 5], np.uint64)}, "64-bit"),
        ({"token_ids_delta": [1, 2, 3, 4]}, "lengths"),
        ({"token_mask_delta": [0.0, 0.0, 1.0, 1.0]}, "lengths"),
        ({"generation_log_probs_delta": [0.0, 0.0, -1.0, -1.0]}, "lengths"),
        ({"token_mask_delta": [0.0, 0.0, 0.5, 1.0, 1.0]}, "0.0 and 1.0"),
        ({"token_mask_delta": [0.0, 0.0, 2.0, 1.0, 1.0]}, "0.0 and 1.0"),
        ({"token_mask_delta": [0.0, 0.0, float("nan"), 1.0, 1.0]}, "finite"),
        ({"generation_log_probs_delta": [0.0, -0.5, -1.0, -1.0, -1.0]}, "mask 0"),
        ({"generation_log_probs_delta": [0.0, 0.0, float("nan"), -1.0, -1.0]}, "finite"),
        ({"generation_log_probs_delta": [0.0, 0.0, -1e39, -1.0, -1.0]}, "finite in binary32"),
        ({"delta_len": 4}, "lengths|cum_len"),
        ({"cum_len": 12}, "cum_len"),
        ({"prev_len": 0, "cum_len": 5}, "prev_len"),
        ({"parent_call_id": None}, "mode"),
        ({"mode": "text"}, "mode"),
        ({"mode": "audio"}, "mode"),
        ({"rollout_id": ""}, "rollout_id"),
        ({"model_call_id": ""}, "model_call_id"),
        ({"parent_call_id": ""}, "parent_call_id"),
        ({"weight_version": -1}, "weight_version"),
        ({"weight_version": 2**64}, "weight_version"),
        ({"weight_version": True}, "weight_version"),
        ({"weight_version": 1.0}, "weight_version"),
        ({"digest": "0" * 64}, "digest does not match"),
        ({"digest": "A" * 64}, "digest"),
        ({"schema_version": 1}, "schema_version"),
        ({"digest_version": 1}, "digest_version"),
        ({"extras": {"a": 1}}, "extras_digest"),
        ({"extras": {"a": {1}}}, "extras"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_staged_call_that_contradicts_itself_is_refused(changes, reason):
    with pytest.raises(ValidationError, match=reason):
        StagedCall.model_validate(made_call(**changes))


def test_an_empty_delta_is_refused():
    empty = made_call(**{column: [] for column in COLUMNS}, delta_len=0, cum_len=8)
    with pytest.raises(ValidationError, match="at least one token"):
        StagedCall.model_validate(resigned(empty))


@few
@given(wire_rollouts(max_calls=2))
def test_any_change_of_a_field_breaks_the_digest(rollout):
    staged = rollout.staged[0]
    for name, other in {
        "rollout_id": staged["rollout_id"] + "x",
        "model_call_id": staged["model_call_id"] + "x",
        "weight_version": staged["weight_version"] ^ 1,
        "token_ids_delta": [staged["token_ids_delta"][0] ^ 1, *staged["token_ids_delta"][1:]],
        "extras_digest": staged["chain_hash"],
        "chain_hash": staged["cumulative_hash"],
        "cumulative_hash": staged["chain_hash"],
    }.items():
        with pytest.raises(ValidationError, match="digest does not match"):
            StagedCall.model_validate({**staged, name: other, "extras": None})


def test_extras_may_be_absent_although_the_digest_commits_to_some():
    made = MadeRollout("r")
    call = made.call([1], [2], extras={"note": "x"})
    bare = StagedCall.model_validate({**call.model_dump(), "extras": None})
    assert bare.extras_digest == call.extras_digest
    assert bare != call


def test_minus_zero_is_a_carry_mask_and_a_carry_log_probability_as_in_the_release():
    """-0.0 equals 0.0 on both sides, and its sign is covered by the digest."""
    staged = resigned(made_call(token_mask_delta=[-0.0, 0.0, 1.0, 1.0, 1.0]))
    staged = resigned({**staged, "generation_log_probs_delta": [-0.0, 0.0, -0.5, -0.5, -0.5]})
    call = StagedCall.model_validate(staged)
    assert unpack_call(pack_call(call)).carry_len == 2
    with pytest.raises(ValidationError, match="digest does not match"):
        StagedCall.model_validate({**staged, "token_mask_delta": [0.0, 0.0, 1.0, 1.0, 1.0]})


def test_records_are_frozen():
    made = chain("r", 2)
    call, record = made.calls[1], CallRecord.of(made.calls[1], response_id="x")
    receipt = RolloutReceipt.model_validate(made.receipt())
    result = StageResult(ok=True, staging_key="k")
    for frozen, name in ((call, "weight_version"), (record, "cum_len"), (receipt, "rollout_id"), (result, "ok")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(frozen, name, 1)


@pytest.mark.parametrize("column", COLUMNS)
def test_columns_of_a_record_cannot_be_written(column):
    call = StagedCall.model_validate(made_call())
    with pytest.raises(ValueError, match="read-only"):
        getattr(call, column)[0] = 1


def test_the_callers_array_stays_writable():
    ids = np.array([1, 2], np.int64)
    call = seal_call(
        rollout_id="r",
        model_call_id="c",
        token_ids_delta=ids,
        token_mask_delta=np.array([0, 1], np.float32),
        generation_log_probs_delta=np.array([0, -1], np.float32),
        weight_version=0,
    )
    packed = pack_call(call)
    ids[0] = 99
    assert pack_call(call) == packed


def test_a_copy_with_an_update_is_packed_as_what_it_holds():
    """Pydantic does not validate `update`; the copy must at least not pass as the call it was made from."""
    copied = chain("r").calls[0].model_copy(update={"weight_version": 9})
    with pytest.raises(InvalidStagedCall, match="do not hash"):
        unpack_call(pack_call(copied))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda call: pickle.loads(pickle.dumps(call))])
def test_a_plain_copy_of_a_call_is_the_call(again):
    call = chain("r").calls[0]
    assert again(call) == call
    assert pack_call(again(call)) == pack_call(call)
    assert len({again(call), call}) == 1


def test_a_call_equals_no_other_kind_of_thing():
    call = chain("r").calls[0]
    assert call != call.model_dump()
    assert call != chain("r").calls[1]


def call_of(tokens: int) -> dict[str, Any]:
    ids = np.arange(tokens)
    mask = np.ones(tokens, np.float32)
    sealed = seal_call(
        rollout_id="r",
        model_call_id="c",
        token_ids_delta=ids,
        token_mask_delta=mask,
        generation_log_probs_delta=-mask,
        weight_version=0,
    )
    return {name: getattr(sealed, name) for name in StagedCall.model_fields}


def lines_run(work: Any) -> int:
    """How many lines of Python the work runs; a loop over tokens, written out or in a generator, runs one a token."""
    lines = 0

    def trace(_frame: Any, event: str, _arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def test_a_million_tokens_run_no_more_lines_of_python_than_ten():
    million, ten = call_of(1_000_000), call_of(10)
    few = lines_run(lambda: StagedCall.model_validate(ten))
    assert lines_run(lambda: StagedCall.model_validate(million)) == few > 10
    packed, packed_ten = (pack_call(StagedCall.model_validate(fields)) for fields in (million, ten))
    assert lines_run(lambda: unpack_call(packed)) == lines_run(lambda: unpack_call(packed_ten))


def test_a_list_of_a_million_tokens_is_not_walked_by_python_code():
    million, ten = call_of(1_000_000), call_of(10)
    lists, few = ({**fields, **{name: fields[name].tolist() for name in COLUMNS}} for fields in (million, ten))
    assert lines_run(lambda: StagedCall.model_validate(lists)) == lines_run(lambda: StagedCall.model_validate(few))


# --- sealing ----------------------------------------------------------------------------------------


def seal(**changes: Any) -> StagedCall:
    fields: dict[str, Any] = {
        "rollout_id": "r",
        "model_call_id": "c",
        "token_ids_delta": [1, 2, 3],
        "token_mask_delta": [0.0, 1.0, 1.0],
        "generation_log_probs_delta": [0.0, -1.0, -2.0],
        "weight_version": 0,
    }
    return seal_call(**{**fields, **changes})


def test_logprobs_one_short_cannot_be_sealed():
    with pytest.raises(InvalidStagedCall, match=r"lengths \(3, 3, 2\)"):
        seal(generation_log_probs_delta=[0.0, -1.0])


def test_a_completion_of_length_zero_cannot_be_sealed_alone():
    with pytest.raises(InvalidStagedCall, match="at least one token"):
        seal(token_ids_delta=[], token_mask_delta=[], generation_log_probs_delta=[])


def test_a_child_is_sealed_behind_its_parents_whole_sequence():
    parent = seal()
    with pytest.raises(InvalidStagedCall, match="the parent's sequence has 3 tokens, the prefix given 2"):
        seal(model_call_id="d", parent=parent, prefix_token_ids=[1, 2])
    child = seal(model_call_id="d", parent=parent, prefix_token_ids=[1, 2, 3])
    assert (child.mode, child.prev_len, child.cum_len, child.parent_call_id) == ("token_in", 3, 6, "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_version": "3"}, "expected an unsigned 64-bit integer, got '3'"),
        ({"generation_log_probs_delta": [0.5, -0.1]}, "a token with mask 0 must have log probability 0.0"),
        ({"parent": "c0"}, "parent must be the parent's StagedCall or CallRecord, got 'c0'"),
        ({"token_ids_delta": [1.5, 2]}, "token ids must be whole numbers, found 1.5 at 0"),
        ({"token_ids_delta": [[1, 2]]}, "token ids must be numbers, found list at 0"),
        ({"rollout_id": ""}, "rollout_id: String should have at least 1 character"),
    ],
    ids=str,
)
def test_what_cannot_be_sealed_names_its_call(change, message):
    call = {
        "rollout_id": "r",
        "model_call_id": "c1",
        "token_ids_delta": [1, 2],
        "token_mask_delta": [0.0, 1.0],
        "generation_log_probs_delta": [0.0, -0.1],
        "weight_version": 3,
        **change,
    }
    with pytest.raises(InvalidStagedCall) as raised:
        seal_call(**call)
    assert f"call 'c1' of rollout {call['rollout_id']!r}: " in str(raised.value)
    assert message in str(raised.value)


def test_a_child_may_be_sealed_behind_its_parents_record():
    parent = seal()
    record = CallRecord.of(parent, response_id="x")
    prefix = [1, 2, 3]
    assert seal(model_call_id="d", parent=record, prefix_token_ids=prefix) == seal(
        model_call_id="d", parent=parent, prefix_token_ids=prefix
    )


def test_a_root_has_no_prefix():
    with pytest.raises(InvalidStagedCall, match="prefix"):
        seal(prefix_token_ids=[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_version": -1},
        {"rollout_id": ""},
        {"rollout_id": 5},
        {"rollout_id": "\ud800"},
        {"extras": {"a": {1}}},
        {"extras": [1]},
        {"token_ids_delta": "abc"},
    ],
)
def test_what_cannot_be_a_call_is_refused_with_one_type_of_error(changes):
    with pytest.raises(InvalidStagedCall):
        seal(**changes)


def test_unicode_and_slashes_in_ids_make_the_key():
    call = seal(rollout_id="группа/0", model_call_id="é/☃")
    assert call.staging_key == "группа/0/é/☃" == staging_key("группа/0", "é/☃")


# --- receipts ---------------------------------------------------------------------------------------


def receipt(**changes: Any) -> dict[str, Any]:
    return chain("r", 2).receipt(**changes)


@few
@given(wire_rollouts())
def test_a_receipt_round_trips_through_a_plain_dict(rollout):
    parsed = RolloutReceipt.model_validate(rollout.receipt)
    assert RolloutReceipt.model_validate(parsed.model_dump()) == parsed
    assert RolloutReceipt.model_validate_json(parsed.model_dump_json()) == parsed


@pytest.mark.parametrize(
    "changes",
    [
        {"capture_poisoned": True},
        {"capture_poisoned": True, "failure_reason": "engine"},
        {
            "capture_poisoned": True,
            "failure_reason": "no manifest",
            "terminal_selection": None,
            "terminal_model_call_id": None,
            "manifest": [],
        },
        {"reward": 0.5},
        {"terminal_attribution_reason": "declared"},
    ],
)
def test_each_state_of_a_receipt_is_taken(changes):
    assert RolloutReceipt.model_validate(receipt(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failure_reason": "engine"}, "failure_reason"),
        ({"terminal_model_call_id": None}, "terminal"),
        ({"terminal_selection": None}, "terminal"),
        ({"terminal_selection": "guessed"}, "terminal_selection"),
        ({"terminal_model_call_id": "c9"}, "not in the manifest"),
        ({"capture_poisoned": True, "terminal_selection": None}, "method"),
        ({"capture_poisoned": True, "terminal_selection": None, "terminal_model_call_id": None}, "failure_reason"),
        ({"manifest": chain("r", 1).receipt()["manifest"] * 2, "terminal_model_call_id": "c0"}, "twice"),
        ({"manifest": "c0,c1"}, "manifest"),
        ({"reward": float("nan")}, "reward"),
        ({"schema_version": 3}, "schema_version"),
        ({"token_ids": [1]}, "token_ids"),
        ({"terminal_attribution_reason": "\ud800"}, "unicode"),
        ({"capture_poisoned": True, "failure_reason": "\ud800"}, "unicode"),
    ],
)
def test_a_receipt_that_contradicts_itself_is_refused(changes, reason):
    with pytest.raises(ValidationError, match=reason):
        RolloutReceipt.model_validate(receipt(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"response_id": None}, "response_id"),
        ({"response_id": ""}, "response_id"),
        ({"staging_key": ""}, "staging_key"),
        ({"mode": "text"}, "mode"),
        ({"parent_call_id": None}, "mode"),
        ({"prev_len": 0, "cum_len": 5}, "prev_len"),
        ({"delta_len": 0, "cum_len": 8}, "at least one token"),
        ({"cum_len": 1}, "cum_len"),
        ({"admitted_at": "now"}, "admitted_at"),
        ({"admitted_at": float("inf")}, "admitted_at"),
        ({"output_fingerprint": "x"}, "output_fingerprint"),
        ({"fingerprint_version": -1}, "fingerprint_version"),
        ({"token_ids_delta": [1]}, "token_ids_delta"),
    ],
)
def test_a_manifest_row_that_contradicts_itself_is_refused(changes, reason):
    row = {**receipt()["manifest"][1], **changes}
    with pytest.raises(ValidationError, match=reason):
        CallRecord.model_validate(row)


def test_a_manifest_row_is_its_call_without_the_tokens():
    call = chain("r", 2).calls[1]
    record = CallRecord.of(call, response_id="resp", admitted_at=1.5, fingerprint_version=1)
    assert record.staging_key == call.staging_key
    assert record.admitted_at == 1.5
    assert not set(COLUMNS) & set(record.model_dump())


@pytest.mark.parametrize("fields", [{"ok": True}, {"ok": False}, {"ok": 1, "staging_key": "k"}])
def test_a_stage_result_says_where_or_why(fields):
    with pytest.raises(ValidationError):
        StageResult(**fields)
