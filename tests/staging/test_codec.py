"""One packed value: what goes in comes out, without a copy; anything else is `InvalidStagedCall`."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.contract.errors import InvalidStagedCall
from rollout_reassembler.contract.records import CallRecord, StagedCall
from rollout_reassembler.staging.codec import NO_ROUTES, PackedCall, RouteShape, pack_call, unpack_call, unpack_listed
from tests.captures import MadeRollout, chain
from tests.contract.strategies import few, wire_rollouts
from tests.staging.unchecked import HEADER_BYTES, packed_unchecked, preimage_of, resigned, signed

TEXTS_AT = HEADER_BYTES + len(b"nemo-gym-staging-call-v2") + 3
TAIL_BYTES = 32 + 1 + 32 + 1 + 32


def child() -> StagedCall:
    """`[.., ..]|[.., .., ..]` behind a parent: call `c1` of rollout `r`."""
    return chain("r", 2).calls[1]


def fields(**changes: Any) -> dict[str, Any]:
    return {**child().model_dump(), **changes}


# --- there and back ---------------------------------------------------------------------------------


@few
@given(wire_rollouts())
def test_a_call_survives_packing(rollout):
    for staged in rollout.staged:
        call = StagedCall.model_validate({**staged, "extras": None})
        packed = unpack_call(pack_call(call))
        assert packed.to_call() == call
        for name in set(StagedCall.model_fields) - {"extras"}:
            if name.endswith("_delta"):
                assert getattr(packed, name).tolist() == getattr(call, name).tolist()
            elif not name.endswith("_version") or name == "weight_version":
                assert getattr(packed, name) == getattr(call, name)


@few
@given(wire_rollouts(), st.sampled_from([NO_ROUTES, RouteShape(5, 48, 8), RouteShape(2, 3, 1, boundary=True)]))
def test_listed_calls_are_those_that_unpacking_gives(rollout, routes):
    calls = [StagedCall.model_validate({**staged, "extras": None}) for staged in rollout.staged]
    values = [pack_call(call, routes) for call in calls]
    records = [CallRecord.of(call, response_id="chatcmpl") for call in calls]
    assert unpack_listed(values, calls[0].rollout_id, records) == [unpack_call(value) for value in values]


@pytest.mark.parametrize(
    "change",
    [
        *({name: 7} for name in ("weight_version", "prev_len", "delta_len", "cum_len")),
        *({name: "ab" * 32} for name in ("digest", "extras_digest", "chain_hash", "cumulative_hash")),
        *({"model_call_id": "c9"}, {"parent_call_id": "c9"}, {"parent_call_id": None}),
    ],
    ids=str,
)
def test_a_value_that_is_not_what_its_record_says_is_not_listed(change):
    call = child()
    record = CallRecord.of(call, response_id="chatcmpl").model_copy(update=change)
    assert unpack_listed([pack_call(call)], "r", [record]) == [None]


def test_a_call_of_another_rollout_is_not_listed():
    assert unpack_listed([pack_call(child())], "r2", [CallRecord.of(child(), response_id="chatcmpl")]) == [None]


def test_a_length_that_no_value_can_have_is_not_listed():
    record = CallRecord.of(child(), response_id="chatcmpl")
    for length in (1 << 60, 1 << 61, 1 << 63):
        longer = record.model_copy(update={"delta_len": length, "cum_len": record.prev_len + length})
        assert unpack_listed([pack_call(child())], "r", [longer]) == [None]


@pytest.mark.parametrize("more", [b"\x00" * 4, b"\x00" * 16])
def test_signed_columns_of_another_length_are_not_listed(more):
    """Its head, its tail and its digest are what the record says; only its columns are not."""
    body = pack_call(child())[HEADER_BYTES:]
    value = signed(body[:-TAIL_BYTES] + more + body[-TAIL_BYTES:])
    record = CallRecord.of(child(), response_id="chatcmpl").model_copy(update={"digest": value[24:56].hex()})
    assert unpack_listed([value], "r", [record]) == [None]


def test_a_value_that_is_not_listed_leaves_the_others():
    calls = chain("r", 3).calls
    values, records = [pack_call(c) for c in calls], [CallRecord.of(c, response_id="chatcmpl") for c in calls]
    first, _, last = unpack_listed(values, "r", records)
    assert unpack_listed([values[0], values[0], values[2]], "r", records) == [first, None, last]
    assert unpack_listed([values[0], None, values[2]], "r", records) == [first, None, last]
    for broken in (b"", values[1][:40], values[1] + b"x", b"X" + values[1][1:], values[1][:-1]):
        assert unpack_listed([values[0], broken, values[2]], "r", records) == [first, None, last]


@few
@given(wire_rollouts())
def test_the_carry_of_a_call_in_order_is_known_without_its_columns(rollout):
    for staged in rollout.staged:
        packed = unpack_call(packed_unchecked(staged))
        assert packed.carry_len == staged["token_mask_delta"].count(0.0)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=8))
def test_the_carry_of_any_mask_is_its_leading_zeros_or_nothing(mask):
    size = len(mask)
    staged = resigned(
        fields(
            delta_len=size,
            cum_len=8 + size,
            token_ids_delta=[1] * size,
            token_mask_delta=mask,
            generation_log_probs_delta=[-0.5 * abs(bit) for bit in mask],
        )
    )
    carry = next((at for at, bit in enumerate(mask) if bit), size)
    in_order = all(mask[carry:])
    assert unpack_call(packed_unchecked(staged)).carry_len == (carry if in_order else None)


@few
@given(wire_rollouts(max_calls=2))
def test_packing_is_canonical(rollout):
    for staged in rollout.staged:
        call = StagedCall.model_validate({**staged, "extras": None})
        assert pack_call(call) == packed_unchecked(staged) == pack_call(unpack_call(pack_call(call)).to_call())


def test_columns_are_views_into_the_value():
    value = pack_call(child())
    packed = unpack_call(value)
    raw = np.frombuffer(value, np.uint8)
    for column in (packed.token_ids_delta, packed.token_mask_delta, packed.generation_log_probs_delta):
        assert column.base is value
        assert np.shares_memory(column, raw)
        assert not column.flags.writeable
    assert np.shares_memory(np.frombuffer(packed.encoded_token_ids, np.uint8), raw)
    assert packed.value is value


def test_encoded_tokens_are_the_count_and_the_tokens():
    packed = unpack_call(pack_call(child()))
    expected = struct.pack(">6Q", 5, *child().token_ids_delta.tolist())
    assert bytes(packed.encoded_token_ids) == expected


def test_the_header_is_as_documented():
    call = child()
    value = pack_call(call, RouteShape(5, 48, 8, boundary=True))
    assert value[:16] == b"RRSC" + bytes([2, 1, 0, 0]) + struct.pack(">IHH", 5, 48, 8)
    assert value[16:24] == hashlib.sha256(value[:16] + value[24:56]).digest()[:8]
    assert value[24:56] == bytes.fromhex(call.digest)
    assert value[56:] == call.preimage == preimage_of(call.model_dump())


@pytest.mark.parametrize(
    "routes", [NO_ROUTES, RouteShape(5, 48, 8), RouteShape(2**32 - 1, 2**16 - 1, 1, boundary=True)]
)
def test_a_route_shape_comes_back(routes):
    assert unpack_call(pack_call(child(), routes)).routes == routes


def test_extras_are_not_in_the_value():
    made = MadeRollout("r")
    bare, rich = made.call([1], [2]), made.call([1], [2], extras={"note": "x" * 10_000})
    assert len(pack_call(rich)) == len(pack_call(bare))


def test_a_single_token_call_packs():
    made = MadeRollout("r")
    packed = unpack_call(pack_call(made.call([], [7], logprobs=[-0.25])))
    assert (packed.carry_len, packed.delta_len) == (0, 1)
    assert packed.token_ids_delta.tolist() == [7]


@pytest.mark.parametrize(
    ("rollout_id", "call_id"), [("группа/0", "é/☃"), ("a/b", "c"), ("\x00", "\n"), ("😀" * 300, "c")]
)
def test_ids_of_any_unicode_pack(rollout_id, call_id):
    made = MadeRollout(rollout_id)
    call = made.call([1], [2], call_id=call_id)
    assert unpack_call(pack_call(call)).to_call() == call


# --- malformed --------------------------------------------------------------------------------------


def refused(value: Any, reason: str | None = None) -> None:
    with pytest.raises(InvalidStagedCall, match=reason) as caught:
        unpack_call(value)
    assert caught.value.code == "invalid_staging_row"


@pytest.mark.parametrize("cut", range(len(pack_call(child()))))
def test_a_value_truncated_anywhere_is_refused(cut):
    refused(pack_call(child())[:cut])


@pytest.mark.parametrize("cut", range(len(pack_call(child())) - HEADER_BYTES))
def test_a_value_truncated_anywhere_and_signed_again_is_refused(cut):
    refused(signed(pack_call(child())[HEADER_BYTES : HEADER_BYTES + cut]))


@pytest.mark.parametrize("more", [b"\x00", b"x" * 98, pack_call(child())])
def test_trailing_bytes_are_refused(more):
    refused(pack_call(child()) + more)
    refused(signed(pack_call(child())[HEADER_BYTES:] + more), "not three columns of delta_len 5")


@pytest.mark.parametrize("value", [None, "RRSC", bytearray(pack_call(child())), memoryview(pack_call(child())), 5, []])
def test_what_is_not_bytes_is_refused(value):
    refused(value, f"got {type(value).__name__}")


def test_every_flipped_bit_is_noticed():
    """Also in the route shape, which is under no digest of the wire: the header proves itself."""
    value, record = pack_call(child(), RouteShape(5, 2, 2)), CallRecord.of(child(), response_id="chatcmpl")
    for byte in range(len(value)):
        for bit in range(8):
            flipped = bytearray(value)
            flipped[byte] ^= 1 << bit
            refused(bytes(flipped))
            assert unpack_listed([bytes(flipped)], "r", [record]) == [None]


@pytest.mark.parametrize(
    ("at", "byte"),
    [
        (0, b"S"),
        (3, b"c"),
        (4, b"\x00"),
        (4, b"\x01"),
        (4, b"\x03"),
        (5, b"\x02"),
        (5, b"\x80"),
        (6, b"\x01"),
        (7, b"\x01"),
    ],
)
def test_another_magic_version_or_flag_is_refused(at, byte):
    value = bytearray(pack_call(child()))
    value[at : at + 1] = byte
    refused(bytes(value), "not a packed call of version 2")


@pytest.mark.parametrize("version_at", [0, 1, 2])
def test_another_schema_or_digest_version_is_refused(version_at):
    body = bytearray(pack_call(child())[HEADER_BYTES:])
    body[len(b"nemo-gym-staging-call-v2") + version_at] += 1
    refused(signed(bytes(body)), "unsupported")


def test_another_domain_is_refused():
    refused(signed(pack_call(child())[HEADER_BYTES:].replace(b"call-v2", b"call-v3")), "unsupported")


LENGTH_PREFIXES = {
    "rollout_id": TEXTS_AT,
    "model_call_id": TEXTS_AT + 8 + 1,
    "parent_call_id": TEXTS_AT + 8 + 1 + 8 + 2 + 1,
    "mode": TEXTS_AT + 8 + 1 + 8 + 2 + 1 + 8 + 2,
    "prev_len": TEXTS_AT + 8 + 1 + 8 + 2 + 1 + 8 + 2 + 8 + 8,
}
LENGTH_PREFIXES |= {
    "delta_len": LENGTH_PREFIXES["prev_len"] + 8,
    "cum_len": LENGTH_PREFIXES["prev_len"] + 16,
    "token_bytes": LENGTH_PREFIXES["prev_len"] + 32,
    "token_count": LENGTH_PREFIXES["prev_len"] + 40,
    "mask_bytes": LENGTH_PREFIXES["prev_len"] + 48 + 40,
    "mask_count": LENGTH_PREFIXES["prev_len"] + 48 + 40 + 8,
    "log_prob_bytes": LENGTH_PREFIXES["prev_len"] + 48 + 40 + 16 + 20,
    "log_prob_count": LENGTH_PREFIXES["prev_len"] + 48 + 40 + 16 + 20 + 8,
}


@pytest.mark.parametrize("name", LENGTH_PREFIXES)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 6, 2**31, 2**32, 2**60, 2**63, 2**64 - 1])
def test_an_absurd_length_is_refused(name, length):
    body = bytearray(pack_call(child())[HEADER_BYTES:])
    at = LENGTH_PREFIXES[name] - HEADER_BYTES
    is_true_length = struct.unpack_from(">Q", body, at)[0] == length
    struct.pack_into(">Q", body, at, length + is_true_length)
    refused(signed(bytes(body)))


def test_the_offsets_above_are_right():
    """The lengths that the test above replaces are where it thinks they are."""
    value = pack_call(child())
    read = {name: struct.unpack_from(">Q", value, at)[0] for name, at in LENGTH_PREFIXES.items()}
    assert read == {
        "rollout_id": 1,
        "model_call_id": 2,
        "parent_call_id": 2,
        "mode": 8,
        "prev_len": 8,
        "delta_len": 5,
        "cum_len": 13,
        "token_bytes": 48,
        "token_count": 5,
        "mask_bytes": 28,
        "mask_count": 5,
        "log_prob_bytes": 28,
        "log_prob_count": 5,
    }


@pytest.mark.parametrize("marker", [0, 2, 255])
def test_a_parent_is_marked_by_one_value_only(marker):
    body = bytearray(pack_call(child())[HEADER_BYTES:])
    body[LENGTH_PREFIXES["parent_call_id"] - HEADER_BYTES - 1] = marker
    refused(signed(bytes(body)))


@pytest.mark.parametrize("from_end", [66, 33])
@pytest.mark.parametrize("marker", [0, 2])
def test_both_hashes_are_marked_as_present(from_end, marker):
    body = bytearray(pack_call(child())[HEADER_BYTES:])
    assert body[-from_end] == 1
    body[-from_end] = marker
    refused(signed(bytes(body)), "marked as present")


@pytest.mark.parametrize("name", ["rollout_id", "model_call_id", "parent_call_id", "mode"])
def test_text_that_is_not_utf8_is_refused(name):
    body = bytearray(pack_call(child())[HEADER_BYTES:])
    body[LENGTH_PREFIXES[name] - HEADER_BYTES + 8] = 0xFF
    refused(signed(bytes(body)), "mode token_in" if name == "mode" else "garbled")


MALFORMED = {
    "a mask of 0.5": {"token_mask_delta": [0.0, 0.0, 0.5, 1.0, 1.0]},
    "a mask of 2": {"token_mask_delta": [0.0, 0.0, 2.0, 1.0, 1.0]},
    "a mask of -1": {"token_mask_delta": [0.0, 0.0, -1.0, 1.0, 1.0]},
    "a mask of NaN": {"token_mask_delta": [0.0, 0.0, float("nan"), 1.0, 1.0]},
    "a mask below 1": {"token_mask_delta": [0.0, 0.0, np.nextafter(np.float32(1), np.float32(0)), 1.0, 1.0]},
    "a tiny mask": {"token_mask_delta": [0.0, 1e-45, 1.0, 1.0, 1.0]},
    "a negative id": {"token_ids_delta": [1, 2, 2**64 - 1, 4, 5]},
    "the most negative id": {"token_ids_delta": [2**63, 2, 3, 4, 5]},
    "a NaN log probability": {"generation_log_probs_delta": [0.0, 0.0, -1.0, float("nan"), -1.0]},
    "an infinite log probability": {"generation_log_probs_delta": [0.0, 0.0, -1.0, float("inf"), -1.0]},
    "a log probability of minus infinity": {"generation_log_probs_delta": [0.0, 0.0, -1.0, -1.0, float("-inf")]},
    "a log probability of a carried token": {"generation_log_probs_delta": [0.0, -0.5, -1.0, -1.0, -1.0]},
    "a tiny log probability of a carried token": {"generation_log_probs_delta": [1e-45, 0.0, -1.0, -1.0, -1.0]},
    "a NaN log probability of a carried token": {"generation_log_probs_delta": [float("nan"), 0.0, -1.0, -1.0, -1.0]},
    "one log probability too few": {"generation_log_probs_delta": [0.0, 0.0, -1.0, -1.0]},
    "one log probability too many": {"generation_log_probs_delta": [0.0, 0.0, -1.0, -1.0, -1.0, -1.0]},
    "one mask too few": {"token_mask_delta": [0.0, 0.0, 1.0, 1.0]},
    "one token too few": {"token_ids_delta": [1, 2, 3, 4]},
    "a token too few and a log probability too many": {
        "token_ids_delta": [1, 2, 3, 4],
        "generation_log_probs_delta": [0.0, 0.0, -1.0, -1.0, -1.0, 0.0, 0.0],
    },
    "an empty delta": {
        "delta_len": 0,
        "cum_len": 8,
        "token_ids_delta": [],
        "token_mask_delta": [],
        "generation_log_probs_delta": [],
    },
    "a delta_len that is not the columns'": {"delta_len": 6, "cum_len": 14},
    "a cum_len that does not add up": {"cum_len": 14},
    "no rollout id": {"rollout_id": ""},
    "no call id": {"model_call_id": ""},
    "an empty parent id": {"parent_call_id": ""},
    "no parent behind a prefix": {"parent_call_id": None, "mode": "text"},
    "a root in token_in mode": {"parent_call_id": None, "prev_len": 0, "cum_len": 5},
    "a parent before position 0": {"prev_len": 0, "cum_len": 5},
    "a child in text mode": {"mode": "text"},
    "an unknown mode": {"mode": "audio"},
    "an empty mode": {"mode": ""},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED)
def test_contents_that_cannot_be_a_call_are_refused_under_a_right_digest(changes):
    refused(packed_unchecked(resigned(fields(**changes))))


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED)
def test_contents_that_cannot_be_a_call_are_refused_out_of_order_too(changes):
    """A mask in another order takes the exact way through the columns; it must refuse the same."""
    shuffled = {name: column[::-1] if name.endswith("_delta") else column for name, column in fields(**changes).items()}
    refused(packed_unchecked(resigned(shuffled)))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6), st.data())
def test_columns_of_any_bits_are_judged_as_numpy_judges_them(ids, data):
    """The fast test on raw bytes and the exact one must agree for every bit pattern."""
    size = len(ids)
    bits = st.sampled_from([0, 1 << 31, 0x3F800000, 0x3F800001, 0x7F800000, 0x7F000000, 0xFF7FFFFF, 0xFFC00000, 1])
    words = st.lists(bits | st.integers(0, 2**32 - 1), min_size=size, max_size=size)
    mask = np.array(
        data.draw(st.lists(st.sampled_from([0, 0x3F800000]), min_size=size, max_size=size) | words), np.uint32
    )
    log_probs = np.array(data.draw(words), np.uint32).view(np.float32)
    if data.draw(st.booleans()):
        log_probs = np.where(mask == 0, np.float32(0), log_probs)
    staged = fields(
        delta_len=size,
        cum_len=8 + size,
        token_ids_delta=ids,
        token_mask_delta=mask.view(np.float32),
        generation_log_probs_delta=log_probs,
    )
    sound = (
        max(ids) < 2**63
        and np.isin(mask.view(np.float32), [0.0, 1.0]).all()
        and np.isfinite(log_probs).all()
        and not log_probs[mask.view(np.float32) == 0].any()
    )
    value = packed_unchecked(resigned(staged))
    if sound:
        packed = unpack_call(value)
        assert packed.generation_log_probs_delta.astype(np.float32).tobytes() == log_probs.tobytes()
    else:
        refused(value)


def test_a_large_finite_log_probability_is_taken():
    """Its first byte is that of infinity and NaN; only the exact look tells."""
    made = MadeRollout("r")
    call = made.call([1], [2, 3], logprobs=[-3.4e38, -2.0e38])
    assert unpack_call(pack_call(call)).to_call() == call


def test_a_packed_call_is_what_a_record_of_it_would_be():
    packed = unpack_call(pack_call(child()))
    assert isinstance(packed, PackedCall)
    assert StagedCall.model_validate(child().model_dump()) == packed.to_call()
