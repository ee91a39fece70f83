"""Rule 3 at its root: an allow list of types, a byte budget, forbidden names; the error says where and what."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, UserDict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.contract.errors import RpcPayloadError
from rollout_reassembler.contract.messages import (
    FinalizedGroup,
    KVBatchMeta,
    ReassemblyRequest,
    RolloutReassemblerActorConfig,
)
from rollout_reassembler.contract.rpc_guard import (
    _FORBIDDEN_RPC_KEYS,
    MAX_RPC_BYTES,
    MAX_RPC_DEPTH,
    assert_metadata_only,
)
from tests.captures import chain

REQUEST = ReassemblyRequest(
    group_id="g",
    rollout_ids=("a", "b", "c", "d"),
    canonical_sample_ids=None,
    receipts=(chain("a").receipt(), None, chain("c").receipt(), chain("d").receipt()),
    rewards=(1.0, None, 0.0, -1.5),
    fallback_weight_version=3,
    prompt_idx=7,
    mask_sample=(True, False, False, False),
)
ANSWER = FinalizedGroup(
    meta=KVBatchMeta("train", sample_ids=["g_g0"], fields=["total_reward"], sequence_lengths=[3], tags=[{"n": 1}]),
    group_min_wv=0,
    group_max_wv=0,
    staging_keys=("a/c0",),
    canonical_output_tokens=3,
    metrics={"finalize/invalid_row_rate": 0.0},
)
CONFIG = RolloutReassemblerActorConfig("train", "staging", 0)


class Text(str):
    __slots__ = ()


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Unknown:
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Request(ReassemblyRequest):
    """A subclass may hold anything."""


Pair = namedtuple("Pair", "a b")

REFUSED = {
    "torch.Tensor of shape (2, 3), 24 bytes": torch.zeros(2, 3),
    "torch.Tensor is not": torch._nested_tensor_from_tensor_list([torch.zeros(2), torch.zeros(3)]),
    "torch.nn.parameter.Parameter of shape (1,), 4 bytes": torch.nn.Parameter(torch.zeros(1)),
    "numpy.ndarray of shape (3,), 24 bytes": np.zeros(3, np.int64),
    "numpy.ndarray of shape (), 8 bytes": np.array(1),
    "numpy.float64 of shape (), 8 bytes": np.float64(1),
    "numpy.int64 of shape (), 8 bytes": np.int64(1),
    "numpy.bool of shape (), 1 bytes": np.bool_(True),
    "numpy.str_ of shape (), 4 bytes": np.str_("x"),
    "bytes of 3 items": b"abc",
    "bytearray of 3 items": bytearray(b"abc"),
    "memoryview of shape (3,), 3 bytes": memoryview(b"abc"),
    "set of 2 items": {1, 2},
    "frozenset of 1 items": frozenset({1}),
    "collections.deque of 1 items": deque([1]),
    "collections.OrderedDict of 1 items": OrderedDict(a=1),
    "collections.UserDict of 1 items": UserDict(a=1),
    "mappingproxy of 1 items": MappingProxyType({"a": 1}),
    "range of 4 items": range(4),
    "generator": (i for i in ()),
    "complex": 1j,
    "object": object(),
    "Unknown": Unknown(),
    "Request": Request("g", (), None, (), (), 0, 0),
    "Pair": Pair(1, 2),
    "Colour": Colour.RED,
    "Text": Text("x"),
    "type": dict,
    "type is": np.ndarray,
    "function": lambda: None,
    "module": np,
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_other_kind_is_refused_by_name(name):
    with pytest.raises(RpcPayloadError) as caught:
        assert_metadata_only({"receipts": [None, {"x": (REFUSED[name],)}]})
    assert caught.value.path == "rpc['receipts'][1]['x'][0]"
    assert name in caught.value.found


@pytest.mark.parametrize("message", [REQUEST, ANSWER, CONFIG, ANSWER.meta])
def test_the_messages_pass(message):
    assert 0 < assert_metadata_only(message) < 20_000


METADATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5).filter(lambda key: key not in _FORBIDDEN_RPC_KEYS), inner, max_size=4)
    ),
)


@given(METADATA)
def test_plain_values_pass_and_their_size_is_their_budget(value):
    size = assert_metadata_only(value)
    assert assert_metadata_only(value, max_bytes=max(size, 8)) == size


def places_of(message: Any) -> list[tuple[str, str]]:
    return [(type(message).__name__, field.name) for field in dataclasses.fields(message)]


@pytest.mark.parametrize(("kind", "name"), places_of(REQUEST) + places_of(ANSWER))
@pytest.mark.parametrize(
    "hidden", [np.zeros(3), torch.zeros(3), b"abc", {1}, Unknown()], ids=lambda x: type(x).__name__
)
def test_nothing_hides_in_any_field_of_a_message(kind, name, hidden):
    message = {type(m).__name__: m for m in (REQUEST, ANSWER)}[kind]
    for value, where in ((hidden, ""), ([hidden], "[0]"), ({"k": (1, hidden)}, "['k'][1]")):
        with pytest.raises(RpcPayloadError) as caught:
            assert_metadata_only(dataclasses.replace(message, **{name: value}))
        assert caught.value.path == f"rpc.{name}{where}"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KVBatchMeta)])
def test_nothing_hides_in_the_meta_of_an_answer(name):
    meta = dataclasses.replace(ANSWER.meta, **{name: [np.zeros(3)]})
    with pytest.raises(RpcPayloadError) as caught:
        assert_metadata_only(dataclasses.replace(ANSWER, meta=meta))
    assert caught.value.path == f"rpc.meta.{name}[0]"


@pytest.mark.parametrize("name", sorted(_FORBIDDEN_RPC_KEYS))
@pytest.mark.parametrize("held", [[1, 2], None, "", 0], ids=repr)
def test_a_name_that_holds_tokens_is_refused_whatever_it_holds(name, held):
    receipts = list(REQUEST.receipts)
    receipts[3] = {**receipts[3], "manifest": [{**receipts[3]["manifest"][0], name: held}]}
    with pytest.raises(RpcPayloadError) as caught:
        assert_metadata_only(dataclasses.replace(REQUEST, receipts=tuple(receipts)))
    assert caught.value.path == f"rpc.receipts[3]['manifest'][0]['{name}']"
    assert type(held).__name__ in caught.value.found


@pytest.mark.parametrize("key", [1, 1.0, None, True, b"k", ("a",), Text("k"), np.str_("k")], ids=repr)
def test_a_key_that_is_no_string_is_refused(key):
    with pytest.raises(RpcPayloadError, match="keys are strings") as caught:
        assert_metadata_only({"a": [{key: 1}]})
    assert caught.value.path == "rpc['a'][0]"
    assert type(key).__name__ in caught.value.found


def cycles() -> list[tuple[Any, str]]:
    listed: list[Any] = [1]
    listed.append(listed)
    mapped: dict[str, Any] = {"a": {}}
    mapped["a"]["b"] = (mapped,)
    held = dataclasses.replace(ANSWER, metrics={})
    held.metrics["self"] = held  # type: ignore[assignment]
    return [(listed, "rpc[1]"), (mapped, "rpc['a']['b'][0]"), (held, "rpc.metrics['self']")]


@pytest.mark.parametrize(("value", "path"), cycles(), ids=["list", "dict", "message"])
def test_a_cycle_is_refused_where_it_closes(value, path):
    with pytest.raises(RpcPayloadError, match="holds itself") as caught:
        assert_metadata_only(value)
    assert caught.value.path == path


def test_the_same_value_twice_is_no_cycle():
    shared = {"n": 1}
    assert assert_metadata_only([shared, shared, (shared,)])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_bounded():
    assert assert_metadata_only(nested(MAX_RPC_DEPTH))
    with pytest.raises(RpcPayloadError, match=f"deeper than {MAX_RPC_DEPTH}") as caught:
        assert_metadata_only(nested(100_000))
    assert caught.value.path == "rpc" + "[0]" * MAX_RPC_DEPTH


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("é", 2),
        ("☃", 3),
        ("😀", 4),
        ("\ud800", 3),
        (None, 8),
        (True, 8),
        (1.5, 8),
        (1 << 8000, 1000),
        ([], 0),
        ([[], []], 16),
        ((1, 2), 32),
        ({"ab": "cd"}, 4),
        ({"é": "é"}, 4),
        ({"ab": 1}, 10),
    ],
)
def test_a_value_costs_its_bytes(value, size):
    assert assert_metadata_only(value) == size


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("x" * 101, "rpc"),
        ({"a": "x" * 60, "b": "x" * 60}, "rpc['b']"),
        ({"a": ["x" * 60, "x" * 60]}, "rpc['a'][1]"),
        ({"k" * 101: None}, f"rpc['{'k' * 101}']"),
        ([1] * 7, "rpc[6]"),
        ([1] * 13, "rpc"),
        ({"a": (1,) * 13}, "rpc['a']"),
        ([1 << 8000], "rpc[0]"),
        ([[[]] * 8] * 2, "rpc[1]"),
        ({"a": "é" * 51}, "rpc['a']"),
    ],
)
def test_the_budget_names_the_place_where_it_ran_out(value, path):
    with pytest.raises(RpcPayloadError, match="byte budget") as caught:
        assert_metadata_only(value, max_bytes=100)
    assert caught.value.path == path


def test_a_list_of_millions_is_refused_before_it_is_walked():
    with pytest.raises(RpcPayloadError, match="list of 3000000 items goes over the byte budget"):
        assert_metadata_only({"ids": [object()] * 3_000_000})


def test_a_large_group_fits_the_default_budget():
    receipts = tuple(chain(f"r{i}", 30).receipt() for i in range(16))
    request = dataclasses.replace(REQUEST, rollout_ids=tuple(f"r{i}" for i in range(16)), receipts=receipts)
    assert assert_metadata_only(request) < MAX_RPC_BYTES / 20


def test_the_path_starts_where_the_caller_says():
    with pytest.raises(RpcPayloadError, match=r"^answer\[0\]: bytes of 0 items is not metadata"):
        assert_metadata_only([b""], path="answer")


def test_an_error_never_shows_the_contents():
    with pytest.raises(RpcPayloadError) as caught:
        assert_metadata_only({"token_ids": ["secret"]})
    assert "secret" not in str(caught.value)


def test_a_rejected_rollout_may_have_any_name() -> None:
    group = FinalizedGroup(KVBatchMeta("p"), 0, 0, (), 0, {}, rejections={"input_ids": "missing_receipt"})
    assert assert_metadata_only(group) > 0
    with pytest.raises(RpcPayloadError, match=r"rpc\.rejections\['r'\]: bytes"):
        assert_metadata_only(dataclasses.replace(group, rejections={"r": b"raw"}))
