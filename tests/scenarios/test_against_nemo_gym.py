"""The verifier of the `nemo-gym` 0.7.0 release and ours, on the same wire dicts: same verdict, same row.

A missing `nemo_gym` fails this file; it must never be skipped. Where the two are meant to differ, a
test of its own says so and why.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import nemo_gym.token_id_capture.staging as gym
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_reassembler.contract.bounds import parse_receipt
from rollout_reassembler.contract.errors import InvalidReceipt, InvalidStagedCall, VerificationError
from rollout_reassembler.contract.records import RolloutReceipt, StagedCall
from rollout_reassembler.reassembly.verify import LinearizedRow, verify_and_linearize
from rollout_reassembler.staging.codec import PackedCall, unpack_call
from tests.contract.strategies import (
    FINITE_FLOATS,
    SHARED_FIELDS,
    SIGNED_FIELDS,
    TOKEN_IDS,
    WireRollout,
    columns_of,
    few,
    gym_sealed,
    manifest_row,
    wire_rollout,
    wire_rollouts,
)
from tests.staging.unchecked import packed_unchecked, resigned

Verdict = tuple[Any, ...]

VERSIONS = ("schema_version", "digest_version", "extras_digest_version")
SOUND_FIELDS = {*SIGNED_FIELDS, "digest", "extras"}


def gym_verdict(rollout: WireRollout) -> Verdict:
    try:
        receipt = gym.RolloutReceipt.model_validate(rollout.receipt)
    except ValidationError:
        return ("receipt", "invalid_receipt")
    try:
        calls = [gym.StagedCallBaseSnapshot.model_validate(without_extras(staged)) for staged in rollout.staged]
    except ValidationError:
        return ("snapshot", "invalid_staging_row")
    try:
        return row_of(gym.verify_and_linearize(receipt, calls))
    except gym.ReceiptVerificationError as error:
        return ("verify", error.code)


def our_verdict(rollout: WireRollout) -> Verdict:
    try:
        receipt = parse_receipt(rollout.receipt)
    except InvalidReceipt as error:
        return ("receipt", error.code)
    try:
        calls = [StagedCall.model_validate(without_extras(staged)) for staged in rollout.staged]
    except ValidationError:
        return ("snapshot", "invalid_staging_row")
    try:
        return row_of(verify_and_linearize(receipt, calls))
    except VerificationError as error:
        return ("verify", error.code)


def our_packed_verdict(rollout: WireRollout) -> Verdict:
    """The same over packed values, which never pass through a record."""
    try:
        receipt = parse_receipt(rollout.receipt)
    except InvalidReceipt as error:
        return ("receipt", error.code)
    try:
        calls: list[PackedCall] = [unpack_call(packed_unchecked(staged)) for staged in rollout.staged]
    except InvalidStagedCall as error:
        return ("snapshot", error.code)
    try:
        return row_of(verify_and_linearize(receipt, calls))
    except VerificationError as error:
        return ("verify", error.code)


def without_extras(staged: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in staged.items() if name != "extras"}


def row_of(row: Any) -> Verdict:
    """A linearized row of either side in plain values; floats as the binary32 that the wire holds."""
    return (
        "row",
        row.rollout_id,
        [int(token) for token in row.token_ids],
        np.array(row.token_mask, np.float32).tolist(),
        np.array(row.logprobs, np.float32).tobytes(),
        list(row.model_call_ids),
        row.prompt_len,
        list(row.weight_versions),
        [(s.model_call_id, s.start, s.end, s.weight_version) for s in row.weight_version_spans],
        [tuple(span) for span in row.link_spans],
        [(c.model_call_id, c.extras_digest_version, c.extras_digest) for c in row.extras_commitments],
    )


def assert_same(rollout: WireRollout) -> Verdict:
    theirs = gym_verdict(rollout)
    assert our_verdict(rollout) == theirs
    if all(
        set(staged) == SOUND_FIELDS and [staged[name] for name in VERSIONS] == [2, 2, 1] for staged in rollout.staged
    ):
        assert our_packed_verdict(rollout) == theirs
    return theirs


# --- sound rollouts ---------------------------------------------------------------------------------


@few
@given(wire_rollouts())
def test_generated_chains_and_branches_get_the_releases_row(rollout):
    verdict = assert_same(rollout)
    assert verdict[0] == "row" or verdict == ("verify", "empty_generation")


@few
@given(wire_rollouts())
def test_extras_are_checked_where_they_come_along(rollout):
    for staged in rollout.staged:
        assert gym.StagedCallSnapshot.model_validate(staged)
        assert StagedCall.model_validate(staged).extras == staged["extras"]


# --- faults -----------------------------------------------------------------------------------------


def flip_bit_of_float(value: float, bit: int) -> float:
    bits = np.array([value], np.float32).view(np.uint32) ^ np.uint32(1 << bit)
    return float(bits.view(np.float32)[0])


def flip_bit_of_hex(digest: str, bit: int) -> str:
    flipped = bytearray(bytes.fromhex(digest))
    flipped[bit // 8] ^= 1 << bit % 8
    return flipped.hex()


@dataclass
class Fault:
    """One way in which a rollout is tampered with, in place."""

    name: str
    apply: Any


def a_row(draw: st.DrawFn, rollout: WireRollout) -> int:
    return draw(st.integers(0, len(rollout.staged) - 1))


def token_bit(draw: st.DrawFn, rollout: WireRollout) -> None:
    ids = rollout.staged[a_row(draw, rollout)]["token_ids_delta"]
    ids[draw(st.integers(0, len(ids) - 1))] ^= 1 << draw(st.integers(0, 62))


def mask_bit(draw: st.DrawFn, rollout: WireRollout) -> None:
    mask = rollout.staged[a_row(draw, rollout)]["token_mask_delta"]
    at = draw(st.integers(0, len(mask) - 1))
    mask[at] = flip_bit_of_float(mask[at], draw(st.integers(0, 31)))


def mask_value(draw: st.DrawFn, rollout: WireRollout) -> None:
    mask = rollout.staged[a_row(draw, rollout)]["token_mask_delta"]
    mask[draw(st.integers(0, len(mask) - 1))] = draw(st.sampled_from([0.0, 1.0, -0.0, 0.5, 2.0, -1.0]))


def logprob_bit(draw: st.DrawFn, rollout: WireRollout) -> None:
    log_probs = rollout.staged[a_row(draw, rollout)]["generation_log_probs_delta"]
    at = draw(st.integers(0, len(log_probs) - 1))
    log_probs[at] = flip_bit_of_float(log_probs[at], draw(st.integers(0, 31)))


def staged_hash_bit(draw: st.DrawFn, rollout: WireRollout) -> None:
    staged = rollout.staged[a_row(draw, rollout)]
    name = draw(st.sampled_from(["digest", "extras_digest", "chain_hash", "cumulative_hash"]))
    staged[name] = flip_bit_of_hex(staged[name], draw(st.integers(0, 255)))


def listed_hash_bit(draw: st.DrawFn, rollout: WireRollout) -> None:
    listed = rollout.receipt["manifest"][a_row(draw, rollout)]
    name = draw(st.sampled_from(["digest", "extras_digest", "chain_hash", "cumulative_hash"]))
    listed[name] = flip_bit_of_hex(listed[name], draw(st.integers(0, 255)))


def staged_number(draw: st.DrawFn, rollout: WireRollout) -> None:
    staged = rollout.staged[a_row(draw, rollout)]
    name = draw(st.sampled_from(["prev_len", "delta_len", "cum_len", "weight_version"]))
    staged[name] = draw(st.integers(0, 8))


def listed_number(draw: st.DrawFn, rollout: WireRollout) -> None:
    listed = rollout.receipt["manifest"][a_row(draw, rollout)]
    name = draw(st.sampled_from(["prev_len", "delta_len", "cum_len", "weight_version"]))
    listed[name] = draw(st.integers(0, 8))


def listed_lengths(draw: st.DrawFn, rollout: WireRollout) -> None:
    """Lengths that add up, of which the staged row knows nothing."""
    listed = rollout.receipt["manifest"][a_row(draw, rollout)]
    listed["delta_len"] += 1
    listed["cum_len"] += 1


def other_parent(draw: st.DrawFn, rollout: WireRollout) -> None:
    """Another parent, in the staged row and in its listing: cycles, absent parents and wrong lengths."""
    at = a_row(draw, rollout)
    known = st.sampled_from([staged["model_call_id"] for staged in rollout.staged])
    parent = draw(known | st.just("absent") | st.none())
    for row in (rollout.staged[at], rollout.receipt["manifest"][at]):
        row["parent_call_id"] = parent
        row["mode"] = "text" if parent is None else "token_in"


def other_start(draw: st.DrawFn, rollout: WireRollout) -> None:
    """Another place in the sequence, in the staged row and in its listing."""
    at = a_row(draw, rollout)
    prev_len = draw(st.integers(0, 8))
    for row in (rollout.staged[at], rollout.receipt["manifest"][at]):
        row["prev_len"] = prev_len
        row["cum_len"] = prev_len + row["delta_len"]


def rows_swapped(draw: st.DrawFn, rollout: WireRollout) -> None:
    rollout.staged[:] = draw(st.permutations(rollout.staged))


def rows_missing(draw: st.DrawFn, rollout: WireRollout) -> None:
    del rollout.staged[a_row(draw, rollout)]


def row_twice(draw: st.DrawFn, rollout: WireRollout) -> None:
    rollout.staged[a_row(draw, rollout)] = copy.deepcopy(rollout.staged[a_row(draw, rollout)])


def row_too_many(draw: st.DrawFn, rollout: WireRollout) -> None:
    rollout.staged.append(copy.deepcopy(rollout.staged[a_row(draw, rollout)]))


def listing_missing(draw: st.DrawFn, rollout: WireRollout) -> None:
    del rollout.receipt["manifest"][a_row(draw, rollout)]


def listing_twice(draw: st.DrawFn, rollout: WireRollout) -> None:
    rollout.receipt["manifest"].append(copy.deepcopy(rollout.receipt["manifest"][a_row(draw, rollout)]))


def same_key(draw: st.DrawFn, rollout: WireRollout) -> None:
    listed = rollout.receipt["manifest"]
    listed[a_row(draw, rollout)]["staging_key"] = listed[a_row(draw, rollout)]["staging_key"]


def other_rollout(draw: st.DrawFn, rollout: WireRollout) -> None:
    rollout.staged[a_row(draw, rollout)]["rollout_id"] += "x"


def other_call(draw: st.DrawFn, rollout: WireRollout) -> None:
    rollout.staged[a_row(draw, rollout)]["model_call_id"] += "x"


def other_terminal(draw: st.DrawFn, rollout: WireRollout) -> None:
    known = st.sampled_from([staged["model_call_id"] for staged in rollout.staged])
    rollout.receipt["terminal_model_call_id"] = draw(known | st.just("absent") | st.none())


def receipt_state(draw: st.DrawFn, rollout: WireRollout) -> None:
    rollout.receipt.update(
        capture_poisoned=draw(st.booleans()),
        failure_reason=draw(st.none() | st.text(max_size=3)),
        terminal_selection=draw(st.sampled_from([None, "declared", "heuristic", "guessed"])),
    )
    if draw(st.booleans()):
        rollout.receipt["terminal_model_call_id"] = None
    if draw(st.booleans()):
        rollout.receipt["manifest"] = []


def version(draw: st.DrawFn, rollout: WireRollout) -> None:
    at = a_row(draw, rollout)
    where = draw(st.sampled_from([rollout.receipt, rollout.receipt["manifest"][at], rollout.staged[at]]))
    where[draw(st.sampled_from(VERSIONS))] = draw(st.sampled_from([0, 1, 2, 3, "2", None, 2.0, True]))


def unknown_field(draw: st.DrawFn, rollout: WireRollout) -> None:
    at = a_row(draw, rollout)
    where = draw(st.sampled_from([rollout.receipt, rollout.receipt["manifest"][at], rollout.staged[at]]))
    where["token_ids"] = []


FAULTS = [
    token_bit,
    mask_bit,
    mask_value,
    logprob_bit,
    staged_hash_bit,
    listed_hash_bit,
    staged_number,
    listed_number,
    listed_lengths,
    other_parent,
    other_start,
    rows_swapped,
    rows_missing,
    row_twice,
    row_too_many,
    listing_missing,
    listing_twice,
    same_key,
    other_rollout,
    other_call,
    other_terminal,
    receipt_state,
    version,
    unknown_field,
]


def resign(draw: st.DrawFn, rollout: WireRollout) -> None:
    """Someone who may write rows signs what they hold now; who may write receipts too lists that digest."""
    if draw(st.booleans()):
        return
    in_receipt = draw(st.booleans())
    listed = {row["model_call_id"]: row for row in rollout.receipt["manifest"]}
    for at, staged in enumerate(rollout.staged):
        rollout.staged[at] = resigned(staged)
        if in_receipt and staged["model_call_id"] in listed:
            listed[staged["model_call_id"]]["digest"] = rollout.staged[at]["digest"]


@st.composite
def tampered_rollouts(draw: st.DrawFn, faults: list[Any], *, at_most: int = 2) -> WireRollout:
    rollout = copy.deepcopy(draw(wire_rollouts()))
    for fault in draw(st.lists(st.sampled_from(faults), min_size=1, max_size=at_most)):
        if rollout.staged and rollout.receipt["manifest"] and len(rollout.staged) == len(rollout.receipt["manifest"]):
            fault(draw, rollout)
    resign(draw, rollout)
    return rollout


VERDICTS: Counter[Verdict] = Counter()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_fault_gets_the_releases_verdict(fault, data):
    verdict = assert_same(data.draw(tampered_rollouts([fault], at_most=1)))
    VERDICTS[verdict[:2] if verdict[0] != "row" else ("row",)] += 1


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(tampered_rollouts(FAULTS, at_most=3))
def test_faults_upon_faults_get_the_releases_verdict(rollout):
    verdict = assert_same(rollout)
    VERDICTS[verdict[:2] if verdict[0] != "row" else ("row",)] += 1


# --- each code of the verifier, by its smallest rollout ---------------------------------------------


def two_turns(*, generated: int = 1) -> WireRollout:
    """`[1, 2]|[3]`, then `[4]|[5]`."""
    first = gym_sealed("r", "a", columns_of([1, 2], [3], [-0.5]), weight_version=1, extras=None)
    second = gym_sealed(
        "r", "b", columns_of([4], [5], [-0.5]), weight_version=2, extras=None, parent=first, prefix=[1, 2, 3]
    )
    return wire_rollout("r", [first, second], "b")


def rewritten(rollout: WireRollout, at: int, **changes: Any) -> WireRollout:
    """The row and its listing changed alike and signed again: only what ties rows together can be wrong."""
    staged = resigned({**rollout.staged[at], **changes})
    rollout.staged[at] = staged
    listed = rollout.receipt["manifest"][at]
    listed.update({name: staged[name] for name in SHARED_FIELDS})
    return rollout


def listed_as(rollout: WireRollout, at: int, **changes: Any) -> WireRollout:
    rollout.receipt["manifest"][at].update(changes)
    return rollout


def received_as(rollout: WireRollout, **changes: Any) -> WireRollout:
    rollout.receipt.update(changes)
    return rollout


def staged_as(rollout: WireRollout, staged: list[dict[str, Any]]) -> WireRollout:
    return WireRollout(rollout.receipt, staged)


def cycle_of_two() -> WireRollout:
    """`a` starts where `b` ends, and the other way round it cannot be: the walk from `a` meets the cycle first."""
    rollout = rewritten(two_turns(), 1, parent_call_id="a", prev_len=3, cum_len=5)
    return rewritten(rollout, 0, parent_call_id="b", mode="token_in", prev_len=5, cum_len=8)


OTHER = "f" * 64

CODES = {
    "rollout_failed": lambda: received_as(two_turns(), capture_poisoned=True, failure_reason="engine"),
    "capture_poisoned": lambda: received_as(two_turns(), capture_poisoned=True),
    "duplicate_staging_key": lambda: listed_as(two_turns(), 1, staging_key="r/a"),
    "row_count_mismatch": lambda: staged_as(two_turns(), two_turns().staged[:1]),
    "duplicate_snapshot": lambda: staged_as(two_turns(), two_turns().staged[:1] * 2),
    "snapshot_identity_mismatch": lambda: staged_as(
        two_turns(), [two_turns().staged[0], resigned({**two_turns().staged[1], "model_call_id": "x"})]
    ),
    "snapshot_order_mismatch": lambda: staged_as(two_turns(), two_turns().staged[::-1]),
    "wrong_rollout": lambda: staged_as(
        two_turns(), [two_turns().staged[0], resigned({**two_turns().staged[1], "rollout_id": "s"})]
    ),
    "wrong_parent_call_id": lambda: listed_as(two_turns(), 1, parent_call_id="b"),
    "wrong_prev_len": lambda: listed_as(two_turns(), 1, prev_len=4, cum_len=6),
    "wrong_delta_len": lambda: listed_as(two_turns(), 1, delta_len=3, cum_len=6),
    "wrong_weight_version": lambda: listed_as(two_turns(), 1, weight_version=9),
    "wrong_digest": lambda: listed_as(two_turns(), 1, digest=OTHER),
    "wrong_extras_digest": lambda: listed_as(two_turns(), 1, extras_digest=OTHER),
    "wrong_chain_hash": lambda: listed_as(two_turns(), 1, chain_hash=OTHER),
    "wrong_cumulative_hash": lambda: listed_as(two_turns(), 1, cumulative_hash=OTHER),
    "missing_parent": lambda: rewritten(two_turns(), 1, parent_call_id="x"),
    "parent_length_mismatch": lambda: rewritten(two_turns(), 1, prev_len=4, cum_len=6),
    "lineage_cycle": cycle_of_two,
    "chain_hash_mismatch": lambda: rewritten(two_turns(), 1, token_ids_delta=[9, 5]),
    "invalid_mask_order": lambda: rewritten(
        two_turns(), 1, token_mask_delta=[1.0, 0.0], generation_log_probs_delta=[-0.5, 0.0]
    ),
    "empty_generation": lambda: rewritten(
        two_turns(), 1, token_mask_delta=[0.0, 0.0], generation_log_probs_delta=[0.0, 0.0]
    ),
    "cumulative_hash_mismatch": lambda: rewritten(two_turns(), 1, cumulative_hash=OTHER),
}


@pytest.mark.parametrize("code", CODES)
def test_each_code_has_its_smallest_rollout(code):
    assert assert_same(CODES[code]()) == ("verify", code)


def test_an_empty_manifest_cannot_even_be_a_receipt():
    """A receipt that is not poisoned names its terminal, and a terminal is in the manifest."""
    assert assert_same(received_as(two_turns(), manifest=[])) == ("receipt", "invalid_receipt")


def test_a_self_parent_is_a_wrong_length():
    looped = rewritten(two_turns(), 1, parent_call_id="b")
    assert assert_same(looped) == ("verify", "parent_length_mismatch")


def test_a_cycle_is_reported_only_when_an_earlier_call_leads_into_it():
    reversed_listing = cycle_of_two()
    reversed_listing.receipt["manifest"].reverse()
    reversed_listing.staged.reverse()
    assert assert_same(reversed_listing) == ("verify", "parent_length_mismatch")


def test_records_that_were_never_validated_are_proven_again():
    """`model_construct` and `model_copy(update=…)` validate nothing; the verifier does."""
    rollout = two_turns()
    receipt = gym.RolloutReceipt.model_validate(rollout.receipt)
    calls = [gym.StagedCallBaseSnapshot.model_validate(without_extras(staged)) for staged in rollout.staged]
    calls[1].token_ids_delta[0] = 9
    with pytest.raises(gym.ReceiptVerificationError) as theirs:
        gym.verify_and_linearize(receipt, calls)
    ours = [StagedCall.model_validate(staged) for staged in rollout.staged]
    ours[1] = ours[1].model_copy(update={"token_ids_delta": np.array([9, 5])})
    with pytest.raises(VerificationError) as caught:
        verify_and_linearize(parse_receipt(rollout.receipt), ours)
    assert caught.value.code == theirs.value.code == "corrupt_digest"


# --- one field of any type --------------------------------------------------------------------------

ODD_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-1, 3)
    | st.sampled_from([2**63, 2**64 - 1, 1.0, 0.5, -0.0, float("nan"), float("inf"), "", "1", "text", "0" * 64])
    | st.lists(st.sampled_from([0, 1, 0.0, 1.0, True, None, "1", -1, float("nan")]), max_size=3)
    | st.just({})
    | st.just({"a": 1})
    | st.just((1, 2))
)


def accepted(model: Any, value: Any) -> bool:
    try:
        model.model_validate(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("name", sorted({*two_turns().staged[1]} | {"surprise"}))
@few
@given(value=ODD_VALUES, resign=st.booleans())
def test_a_staged_field_of_any_type_is_taken_or_refused_as_by_the_release(name, value, resign):
    staged = {**two_turns().staged[1], name: value}
    if resign and name in ("weight_version", "token_ids_delta", "token_mask_delta", "generation_log_probs_delta"):
        try:
            staged = resigned(staged)
        except (ValueError, TypeError, OverflowError):
            return
    assert accepted(StagedCall, staged) == accepted(gym.StagedCallSnapshot, staged)


@pytest.mark.parametrize("name", sorted({*two_turns().receipt["manifest"][1]} | {"admitted_at", "output_fingerprint"}))
@few
@given(value=ODD_VALUES)
def test_a_listed_field_of_any_type_is_taken_or_refused_as_by_the_release(name, value):
    rollout = listed_as(two_turns(), 1, **{name: value})
    assert accepted(RolloutReceipt, rollout.receipt) == accepted(gym.RolloutReceipt, rollout.receipt)


@pytest.mark.parametrize("name", sorted(RolloutReceipt.model_fields))
@few
@given(value=ODD_VALUES)
def test_a_receipt_field_of_any_type_is_taken_or_refused_as_by_the_release(name, value):
    rollout = received_as(two_turns(), **{name: value})
    assert accepted(RolloutReceipt, rollout.receipt) == accepted(gym.RolloutReceipt, rollout.receipt)


@given(st.lists(TOKEN_IDS, min_size=1, max_size=3), st.lists(FINITE_FLOATS, min_size=1, max_size=3))
def test_columns_of_any_lengths_are_taken_or_refused_as_by_the_release(ids, log_probs):
    changes = {"token_ids_delta": ids, "generation_log_probs_delta": log_probs}
    staged = resigned({**two_turns().staged[1], **changes, "token_mask_delta": [1.0] * 2})
    assert accepted(StagedCall, staged) == accepted(gym.StagedCallSnapshot, staged)


# --- where the two are meant to differ --------------------------------------------------------------


def test_counts_beyond_64_bits_are_refused_at_once():
    """The release lists them, and then finds no row that could match: digests hold 64 bits."""
    rollout = listed_as(two_turns(), 1, weight_version=2**64)
    assert gym_verdict(rollout) == ("verify", "wrong_weight_version")
    assert our_verdict(rollout) == ("receipt", "invalid_receipt")


def test_token_ids_beyond_63_bits_are_refused():
    """Columns are int64 from the wire to the tensor; the release's are Python integers."""
    staged = resigned({**two_turns().staged[1], "token_ids_delta": [2**63, 5]})
    assert accepted(gym.StagedCallSnapshot, staged)
    assert not accepted(StagedCall, staged)
    with pytest.raises(InvalidStagedCall, match="64-bit"):
        unpack_call(packed_unchecked(staged))


@pytest.mark.parametrize("changes", [{"generation_log_probs_delta": [1e-50, -0.5]}, {"token_mask_delta": [1e-50, 1.0]}])
def test_a_value_that_vanishes_in_binary32_is_zero(changes):
    """The release looks at the 64 bits that JSON brought, its digest and our columns at 32: there it is 0.0."""
    staged = resigned({**two_turns().staged[1], **changes})
    assert staged["digest"] == two_turns().staged[1]["digest"]
    assert not accepted(gym.StagedCallSnapshot, staged)
    assert StagedCall.model_validate(staged) == StagedCall.model_validate(two_turns().staged[1])


@pytest.mark.parametrize("name", ["failure_reason", "terminal_attribution_reason"])
@pytest.mark.parametrize("reason", [b"bytes", "\ud800"])
def test_a_reason_is_text_that_utf8_can_hold(name, reason):
    """The release takes bytes for text, and surrogates that no JSON encoder of the wire can write."""
    rollout = received_as(two_turns(), capture_poisoned=True, **{name: reason})
    assert accepted(gym.RolloutReceipt, rollout.receipt)
    assert our_verdict(rollout) == ("receipt", "invalid_receipt")


@pytest.mark.parametrize("kind", [deque, iter, set], ids=lambda kind: kind.__name__)
def test_a_column_is_a_list_or_an_array(kind):
    """Pydantic takes any iterable for a list; an iterator may have no end, and a set no order."""
    staged = {**two_turns().staged[1]}
    staged["token_ids_delta"] = kind(staged["token_ids_delta"])
    if kind is not set:
        assert accepted(gym.StagedCallSnapshot, staged)
    staged["token_ids_delta"] = kind(two_turns().staged[1]["token_ids_delta"])
    assert not accepted(StagedCall, staged)


@pytest.mark.parametrize("kind", [deque, iter], ids=lambda kind: kind.__name__)
def test_a_manifest_is_a_list_or_a_tuple(kind):
    listed = two_turns().receipt["manifest"]
    assert accepted(gym.RolloutReceipt, {**two_turns().receipt, "manifest": kind(listed)})
    with pytest.raises(InvalidReceipt, match="list of calls"):
        parse_receipt({**two_turns().receipt, "manifest": kind(listed)})


def test_absent_extras_are_no_fault_of_the_tokens():
    """One record serves as the release's base snapshot (extras never looked at) and as its full record."""
    staged = gym_sealed("r", "a", columns_of([1], [2], [-1.0]), weight_version=0, extras={"note": "x"})
    assert accepted(gym.StagedCallBaseSnapshot, without_extras(staged))
    assert not accepted(gym.StagedCallSnapshot, without_extras(staged))
    assert accepted(StagedCall, without_extras(staged))
    assert accepted(StagedCall, {**staged, "extras": None})


def test_the_row_is_made_of_arrays():
    row = verify_and_linearize(
        parse_receipt(two_turns().receipt), [StagedCall.model_validate(staged) for staged in two_turns().staged]
    )
    assert isinstance(row, LinearizedRow)
    assert (row.token_ids.dtype, row.token_mask.dtype, row.logprobs.dtype) == (np.int64, np.float32, np.float32)


def test_the_faults_above_reached_the_verdicts_that_they_were_made_for():
    """Runs last: a strategy that only ever broke digests would prove little."""
    codes = {verdict[-1] for verdict in VERDICTS}
    if not VERDICTS:
        pytest.fail("run the whole file: this test counts what the ones before it met")
    print(f"\n{sum(VERDICTS.values())} tampered rollouts: {VERDICTS.most_common()}")
    assert len(codes) >= 12, codes
    assert manifest_row(two_turns().staged[0])["staging_key"] == "r/a"
