"""The four digests, value by value against the release, and what they refuse."""

from __future__ import annotations

import math
import struct
from typing import Any

import nemo_gym.token_id_capture.staging as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.contract import digests
from rollout_reassembler.contract.errors import InvalidStagedCall
from tests.contract.strategies import EXTRAS, FINITE_FLOATS, IDENTIFIERS, TOKEN_IDS, few, wire_rollouts

HEX = st.binary(min_size=32, max_size=32).map(bytes.hex)


def answer(function: Any, *args: Any, **kwargs: Any) -> str | None:
    """The digest, `None` where the side refuses."""
    try:
        return function(*args, **kwargs)
    except (ValueError, TypeError, OverflowError):
        return None


@given(st.lists(TOKEN_IDS, max_size=20))
def test_the_cumulative_hash_is_the_releases(ids):
    expected = gym.hash_token_ids(ids)
    assert digests.cumulative_hash(ids) == expected
    assert digests.cumulative_hash(np.array(ids, np.int64)) == expected
    assert digests.cumulative_hash(np.array(ids, np.uint64)) == expected


@given(st.none() | HEX, st.lists(TOKEN_IDS, max_size=20))
def test_the_chain_hash_is_the_releases(parent, ids):
    assert digests.chain_hash(parent, ids) == gym.compute_chain_hash(parent, ids)


@few
@given(EXTRAS)
def test_the_extras_digest_is_the_releases(extras):
    assert digests.extras_digest(extras) == gym.compute_extras_digest(extras)


@few
@given(wire_rollouts())
def test_the_call_digest_is_the_releases(rollout):
    for staged in rollout.staged:
        fields = {name: value for name, value in staged.items() if name not in ("digest", "extras")}
        for name in ("schema_version", "digest_version", "extras_digest_version"):
            del fields[name]
        assert digests.staging_digest(**fields) == staged["digest"]


ODD_FLOATS = [0.0, -0.0, 1e-46, 5e-324, 3.4028234663852886e38, 3.4028235677973366e38, 3.4028235677973362e38, 1e300]


@pytest.mark.parametrize("value", [*ODD_FLOATS, -1e300, math.nan, math.inf, -math.inf, 1, True, None, "1"])
def test_a_float_is_taken_or_refused_as_by_the_release(value):
    fields = {
        "rollout_id": "r",
        "model_call_id": "c",
        "parent_call_id": None,
        "mode": "text",
        "prev_len": 0,
        "delta_len": 1,
        "cum_len": 1,
        "weight_version": 0,
        "token_ids_delta": [1],
        "token_mask_delta": [1.0],
        "extras_digest": gym.EMPTY_EXTRAS_DIGEST,
        "chain_hash": "0" * 64,
        "cumulative_hash": "0" * 64,
    }
    versions = {"schema_version": 2, "digest_version": 2, "extras_digest_version": 1}
    ours = answer(digests.staging_digest, **fields, generation_log_probs_delta=[value])
    # Deliberate: JSON writes 1.0 as 1. The release's record takes an int for a float, its digest does not.
    stood_for = float(value) if type(value) is int else value
    theirs = answer(gym.compute_staging_digest, **fields, **versions, generation_log_probs_delta=[stood_for])
    assert ours == theirs


def test_the_digests_of_the_published_vectors():
    vectors = gym.load_golden_vectors()
    staged = {name: value for name, value in vectors["staged_call"].items() if not name.endswith("_version")}
    weight_version = vectors["staged_call"]["weight_version"]
    assert digests.extras_digest(vectors["extras"]) == vectors["extras_digest"]
    assert digests.staging_digest(**staged, weight_version=weight_version) == vectors["staged_call_digest"]
    assert digests.EMPTY_EXTRAS_DIGEST == gym.EMPTY_EXTRAS_DIGEST


@pytest.mark.parametrize(
    "ids",
    [
        [True],
        [1.0],
        ["1"],
        [None],
        [np.int64(1)],
        [-1],
        [2**64],
        np.array([[1]]),
        np.array(1),
        np.array([1.0]),
        np.array([True]),
        np.array([1], object),
        np.array([-1]),
        np.array(["1"]),
        "12",
        b"12",
        {1},
        None,
        7,
        iter([1]),
    ],
    ids=lambda ids: f"{type(ids).__name__}-{ids!r}"[:30],
)
def test_what_is_not_a_list_of_token_ids_is_refused(ids):
    with pytest.raises(InvalidStagedCall, match="token ids"):
        digests.cumulative_hash(ids)


@pytest.mark.parametrize("ids", [[2**63], np.array([2**63], np.uint64)])
def test_a_token_id_above_int64_is_refused_although_the_release_takes_it(ids):
    """Deliberate: columns are int64 from the wire to the tensor, and no vocabulary needs the 64th bit."""
    assert gym.hash_token_ids([int(ids[0])])
    with pytest.raises(InvalidStagedCall, match="64"):
        digests.cumulative_hash(ids)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint32, np.uint64, ">i8"])
def test_any_integer_array_hashes_as_its_values(dtype):
    assert digests.cumulative_hash(np.array([1, 2, 3], dtype)) == gym.hash_token_ids([1, 2, 3])


def test_a_strided_array_hashes_as_its_values():
    assert digests.cumulative_hash(np.arange(10)[::3]) == gym.hash_token_ids([0, 3, 6, 9])


@pytest.mark.parametrize(
    "floats",
    [
        *([True], ["0"], [None], [1j], [math.nan], [math.inf], [1e39], [10**400], "0.5", None, 0.5),
        *(np.array([1]), np.array([True]), np.array([[0.5]]), np.array([0.5], object), np.array([math.nan])),
        np.array([1e39]),
    ],
    ids=lambda floats: f"{type(floats).__name__}-{floats!r}"[:30],
)
def test_what_is_not_a_list_of_finite_floats_is_refused(floats):
    with pytest.raises(InvalidStagedCall, match="log probabilities"):
        digests.as_floats(floats, "log probabilities")


@given(st.lists(FINITE_FLOATS, max_size=10))
def test_floats_round_to_binary32_as_struct_does(values):
    expected = struct.pack(f">{len(values)}f", *values)
    assert digests.encode_floats(digests.as_floats(values, "floats"))[8:] == expected


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "extras",
    [
        {"a": math.nan},
        {"a": math.inf},
        {"a": 2**63},
        {"a": -(2**63) - 1},
        {"a": (1,)},
        {"a": {1}},
        {"a": b"x"},
        {"a": np.int64(1)},
        {"a": np.float64(1)},
        {"a": np.zeros(1)},
        {"a": Text("x")},
        {"a": object()},
        {"a": {1: 2}},
        {1: 2},
        {"a": [{"b": (1,)}]},
        [1],
        "a",
        1,
    ],
    ids=repr,
)
def test_extras_that_the_release_refuses_are_refused(extras):
    assert answer(gym.compute_extras_digest, extras) is None
    with pytest.raises(InvalidStagedCall, match="extras"):
        digests.extras_digest(extras)


@pytest.mark.parametrize("extras", [{"\ud800": 1}, {"a": "\udfff"}])
def test_text_that_utf8_cannot_hold_is_refused(extras):
    assert answer(gym.compute_extras_digest, extras) is None
    with pytest.raises(InvalidStagedCall, match="unicode"):
        digests.extras_digest(extras)


def nested(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return {"a": value}


def test_extras_may_be_nested_just_as_deep_as_the_bound():
    deepest = digests.MAX_EXTRAS_DEPTH - 1
    assert digests.extras_digest(nested(deepest)) == gym.compute_extras_digest(nested(deepest))


def test_extras_beyond_the_depth_are_refused_although_the_release_takes_them():
    """Deliberate: the release recurses as deep as Python lets it, and a cycle ends it with a `RecursionError`."""
    assert gym.compute_extras_digest(nested(digests.MAX_EXTRAS_DEPTH))
    with pytest.raises(InvalidStagedCall, match=f"deeper than {digests.MAX_EXTRAS_DEPTH}"):
        digests.extras_digest(nested(digests.MAX_EXTRAS_DEPTH))


def test_extras_that_hold_themselves_are_refused():
    extras: dict[str, Any] = {}
    extras["a"] = [extras]
    with pytest.raises(InvalidStagedCall, match="deeper"):
        digests.extras_digest(extras)


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n", 0, None, b"0" * 64])
def test_what_is_not_a_hex_digest_is_refused(digest):
    with pytest.raises(InvalidStagedCall, match="hex digest"):
        digests.raw_digest(digest)


@pytest.mark.parametrize("value", [-1, 2**64, True, 1.0, "1", None, np.int64(1)])
def test_what_is_not_a_u64_is_refused(value):
    with pytest.raises(InvalidStagedCall, match="unsigned 64-bit"):
        digests.u64(value)


@given(st.none() | IDENTIFIERS)
def test_an_absent_text_differs_from_every_text(value):
    encoded = digests.optional_text(value)
    assert encoded == (b"\x00" if value is None else b"\x01" + struct.pack(">Q", len(value.encode())) + value.encode())


def test_encoded_tokens_are_hashed_from_views_without_a_copy():
    encoded = digests.encode_token_ids(np.arange(5))
    assert digests.encoded_chain_hash(None, memoryview(encoded)) == gym.compute_chain_hash(None, [*range(5)])
