"""Extras as bytes: one encoding a mapping, proven against the digest that commits to it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.contract.digests import (
    EMPTY_EXTRAS_DIGEST,
    MAX_EXTRAS_DEPTH,
    encode_extras,
    encoded_extras_digest,
    extras_digest,
)
from rollout_reassembler.contract.errors import ContractError, InvalidStagedCall
from rollout_reassembler.staging.extras import decode_extras
from tests.contract.strategies import EXTRAS, few


def counted(kind: bytes, count: int, *items: bytes) -> bytes:
    return kind + struct.pack(">Q", count) + b"".join(items)


def text(value: bytes) -> bytes:
    return struct.pack(">Q", len(value)) + value


def a_is(value: bytes) -> bytes:
    """The mapping `{"a": value}`."""
    return counted(b"D", 1, text(b"a"), value)


def decoded(encoded: bytes) -> dict[str, Any]:
    """Decoded under the digest that these very bytes have."""
    return decode_extras(encoded, encoded_extras_digest(encoded))


@few
@given(EXTRAS)
def test_extras_survive_encoding(extras):
    encoded = encode_extras(extras)
    again = decode_extras(encoded, extras_digest(extras))
    assert again == (extras or {})
    assert encode_extras(again) == encoded or extras is None


@pytest.mark.parametrize(
    "value", [-0.0, 0.0, 5e-324, 1.7976931348623157e308, 2**63 - 1, -(2**63), True, 1, 1.0, "1", []]
)
def test_a_value_keeps_its_exact_type(value):
    again = decode_extras(encode_extras({"a": value}), extras_digest({"a": value}))["a"]
    assert repr(again) == repr(value)


@pytest.mark.parametrize("encoded", [b"", b"N"])
def test_no_extras_are_proven_too(encoded):
    assert decode_extras(encoded, EMPTY_EXTRAS_DIGEST) == {}
    with pytest.raises(InvalidStagedCall) as caught:
        decode_extras(encoded, extras_digest({}))
    assert caught.value.code == "extras_digest_mismatch"


def test_an_empty_mapping_is_not_no_extras():
    assert decode_extras(encode_extras({}), extras_digest({})) == {}
    with pytest.raises(InvalidStagedCall, match="do not hash"):
        decode_extras(encode_extras({}), EMPTY_EXTRAS_DIGEST)


def test_every_flipped_bit_is_noticed():
    extras = {"note": ["x", 1, 2.5, None, True], "z": {}}
    encoded, digest = encode_extras(extras), extras_digest(extras)
    for byte in range(len(encoded)):
        for bit in range(8):
            flipped = bytearray(encoded)
            flipped[byte] ^= 1 << bit
            with pytest.raises(InvalidStagedCall, match="extras_digest_mismatch"):
                decode_extras(bytes(flipped), digest)


MALFORMED = {
    "a top that is no mapping": counted(b"L", 0),
    "a top that is a text": b"S" + text(b"x"),
    "trailing bytes": encode_extras({"a": 1}) + b"N",
    "none and more": b"NN",
    "an unknown kind": a_is(b"Z"),
    "no kind": a_is(b""),
    "an integer cut short": a_is(b"I" + b"\x00" * 7),
    "a float cut short": a_is(b"F" + b"\x00" * 7),
    "a boolean cut short": a_is(b"B"),
    "a boolean of 2": a_is(b"B\x02"),
    "a boolean of 255": a_is(b"B\xff"),
    "a NaN": a_is(b"F" + struct.pack(">d", float("nan"))),
    "an infinity": a_is(b"F" + struct.pack(">d", float("inf"))),
    "a text cut short": a_is(b"S" + struct.pack(">Q", 5) + b"abc"),
    "a text of 2**64-1 bytes": a_is(b"S" + b"\xff" * 8 + b"abc"),
    "a text that is not UTF-8": a_is(b"S" + text(b"\xff")),
    "a surrogate": a_is(b"S" + text(b"\xed\xa0\x80")),
    "a list of 2**60 items": a_is(counted(b"L", 2**60)),
    "a list of one item more than there are": a_is(counted(b"L", 3, b"N", b"N")),
    "a mapping of 2**64-1 keys": counted(b"D", 2**64 - 1),
    "a key that is not UTF-8": counted(b"D", 1, text(b"\xff"), b"N"),
    "a key twice": counted(b"D", 2, text(b"a"), b"N", text(b"a"), b"N"),
    "keys out of order": counted(b"D", 2, text(b"b"), b"N", text(b"a"), b"N"),
    "an empty key in second place": counted(b"D", 2, text(b"a"), b"N", text(b""), b"N"),
    "keys in UTF-16's order": counted(b"D", 2, text("\U00010000".encode()), b"N", text("\uffff".encode()), b"N"),
    "lists nested too deep": a_is(counted(b"L", 1) * (MAX_EXTRAS_DEPTH + 1) + b"N"),
    "lists nested 100,000 deep": a_is(counted(b"L", 1) * 100_000 + b"N"),
    "mappings nested too deep": counted(b"D", 1, text(b"")) * (MAX_EXTRAS_DEPTH + 2) + b"N",
}


@pytest.mark.parametrize("encoded", MALFORMED.values(), ids=MALFORMED)
def test_malformed_extras_are_refused_under_a_right_digest(encoded):
    with pytest.raises(InvalidStagedCall):
        decoded(encoded)


@pytest.mark.parametrize("cut", range(1, len(encode_extras({"a": [1, "x", {"b": 2.5}], "c": True}))))
def test_extras_truncated_anywhere_are_refused(cut):
    encoded = encode_extras({"a": [1, "x", {"b": 2.5}], "c": True})
    with pytest.raises(InvalidStagedCall):
        decoded(encoded[:cut])


def test_the_deepest_extras_come_back():
    value: Any = None
    for _ in range(MAX_EXTRAS_DEPTH - 1):
        value = [value]
    assert decoded(encode_extras({"a": value})) == {"a": value}


@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda tail: b"D" + tail))
def test_bytes_that_decode_are_the_encoding_of_what_they_decode_to(encoded):
    try:
        extras = decoded(encoded)
    except InvalidStagedCall:
        return
    assert encode_extras(extras) == encoded or encoded in (b"", b"N")


def test_mutated_extras_give_typed_errors_and_stay_canonical():
    """10,000 mutations under a right digest: a stager may sign anything."""
    rng = np.random.default_rng(5)
    sound = [
        encode_extras(extras)
        for extras in ({"a": [1, -1, 2.5, None, True, False], "b": {"é": "☃" * 5}}, {"routed": "x" * 200}, {}, {"": {}})
    ]
    refused = taken = 0
    for round_ in range(10_000):
        value = bytearray(sound[round_ % len(sound)])
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(len(value)))
            match rng.integers(5):
                case 0:
                    value[at] ^= 1 << int(rng.integers(8))
                case 1:
                    value[at] = int(rng.choice(list(b"NBIFSLD")))
                case 2:
                    value[at:] = b""
                case 3:
                    value[at:at] = value[: int(rng.integers(20))]
                case _:
                    value[at : at + 8] = struct.pack(">Q", int(rng.choice([0, 1, 2, 255, 2**31, 2**63 - 1])))
            value = value or bytearray(b"N")
        try:
            extras = decoded(bytes(value))
        except ContractError:
            refused += 1
        else:
            taken += 1
            assert encode_extras(extras) == bytes(value) or bytes(value) == b"N"
    print(f"\n10,000 mutated extras: {refused} refused, {taken} sound")
    assert refused > 5000
