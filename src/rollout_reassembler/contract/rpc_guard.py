"""Metadata only across RPC: what may be in a request or an answer, and how much of it.

An allow list, not a search for tensors: strings, numbers, booleans, `None`, tuples, lists,
string-keyed dicts and the messages of `messages.py` pass; every other type is refused by its name.
On top, names that hold tokens elsewhere in the system are refused whatever they hold, and the whole
must fit a byte budget, so that a list of a million integers does not pass as "metadata".

    try:
        assert_metadata_only({"receipts": [{"manifest": [{"token_ids": [1, 2]}]}]})
    except RpcPayloadError as error:
        assert error.path == "rpc['receipts'][0]['manifest'][0]['token_ids']"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sized
from typing import Any

import numpy as np
from pydantic import BaseModel

from rollout_reassembler.contract.errors import RpcPayloadError
from rollout_reassembler.contract.messages import (
    FinalizedGroup,
    KVBatchMeta,
    ReassemblyRequest,
    RolloutReassemblerActorConfig,
)

MAX_RPC_BYTES = 16 << 20
MAX_RPC_DEPTH = 32

_FORBIDDEN_RPC_KEYS = frozenset(
    {
        "attention_mask",
        "canonical_row",
        "extras",
        "generation_log_probs",
        "generation_log_probs_delta",
        "generation_logprobs",
        "generation_token_ids",
        "input_ids",
        "log_probs",
        "logprobs",
        "output_ids",
        "prompt_ids_for_adv",
        "prompt_token_ids",
        "required_prefix_token_ids",
        "routed_experts",
        "routed_experts_boundary",
        "token_ids",
        "token_ids_delta",
        "token_mask",
        "token_mask_delta",
    }
)

_MESSAGES = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in (FinalizedGroup, KVBatchMeta, ReassemblyRequest, RolloutReassemblerActorConfig)
}
_KEYED_BY_ID = frozenset({"rejections"})
"""Parts of messages whose keys are rollout ids: a rollout may have any name."""

_NUMBERS = frozenset({int, float, bool, type(None)})
_NUMBER_BYTES = 8
_FLAT = _NUMBERS | {str}
_MANY = 1 << 64


def assert_metadata_only(value: Any, *, path: str = "rpc", max_bytes: int = MAX_RPC_BYTES) -> int:
    """Refuse anything but metadata; returns its size in bytes (text as UTF-8, 8 a number or item).

    Raises `RpcPayloadError` with the path of the first offender, what was found and its size.
    """
    return _measure(value, path, max_bytes, [])


def _measure(value: Any, path: str, budget: int, above: list[int]) -> int:
    """Bytes of `value`, at most `budget`. `above` holds the ids of the containers around it."""
    size = _scalar_bytes(value)
    if size is None:
        return _measure_container(value, path, budget, above)
    if size > budget:
        raise _over_budget(path, f"{type(value).__name__} of {size} bytes")
    return size


def _scalar_bytes(value: Any) -> int | None:
    """The size of a text or a number; `None` for anything else."""
    kind = type(value)
    size: int
    if kind is str:
        # ASCII, which nearly all metadata is, is not encoded to find its size out.
        size = len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
        return size
    if kind is int:
        size = value.bit_length() // 8
        return max(_NUMBER_BYTES, size)
    return _NUMBER_BYTES if kind in _NUMBERS else None


def _flat_bytes(items: Collection[Any]) -> int | None:
    """The size of ASCII texts and numbers of 64 bits, all at once; `None` when there is anything else among them."""
    kinds = set(map(type, items))
    if not kinds <= _FLAT:
        return None
    texts = [item for item in items if item.__class__ is str]
    joined = "".join(texts)
    if not joined.isascii():
        return None
    if int in kinds:
        numbers = [item for item in items if item.__class__ is int]
        if max(numbers) >= _MANY or min(numbers) <= -_MANY:
            return None
    return len(joined) + _NUMBER_BYTES * (len(items) - len(texts))


def _measure_container(value: Any, path: str, budget: int, above: list[int]) -> int:
    if id(value) in above:
        raise RpcPayloadError(path, "a container that holds itself; metadata is a tree")
    if len(above) >= MAX_RPC_DEPTH:
        raise RpcPayloadError(path, f"nested deeper than {MAX_RPC_DEPTH}")
    above.append(id(value))
    kind = type(value)
    if kind is dict:
        size = _measure_dict(value, path, budget, above, _FORBIDDEN_RPC_KEYS)
    elif kind is list or kind is tuple:
        size = _measure_items(value, path, budget, above)
    elif kind in _MESSAGES:
        size = _measure_message(value, path, budget, above)
    else:
        raise RpcPayloadError(path, f"{_describe(value)} is not metadata; {_advice(value)}")
    above.pop()
    return size


# Nearly all dicts and lists are records and columns of texts and numbers. What is not is walked item by item,
# and a path is put together only for what is neither a text nor a number.


def _measure_dict(value: dict[Any, Any], path: str, budget: int, above: list[int], forbidden: frozenset[str]) -> int:
    if set(map(type, value)) == {str} and forbidden.isdisjoint(value):
        keys, flat = "".join(value), _flat_bytes(value.values())
        if keys.isascii() and flat is not None and len(keys) + flat <= budget:
            return len(keys) + flat
    size = 0
    for key, item in value.items():
        if type(key) is not str:
            raise RpcPayloadError(path, f"a dict key of type {type(key).__name__}; keys are strings")
        if key in forbidden:
            raise RpcPayloadError(f"{path}[{key!r}]", f"{_describe(item)} under a name that holds tokens or routes")
        size += _scalar_bytes(key) or 0
        scalar = _scalar_bytes(item)
        size += scalar if scalar is not None else _measure(item, f"{path}[{key!r}]", budget - size, above)
        if size > budget:
            raise _over_budget(f"{path}[{key!r}]", _describe(item))
    return size


def _measure_items(value: list[Any] | tuple[Any, ...], path: str, budget: int, above: list[int]) -> int:
    if len(value) * _NUMBER_BYTES > budget:
        raise _over_budget(path, _describe(value))
    flat = _flat_bytes(value)
    if flat is not None and flat + _NUMBER_BYTES * len(value) <= budget:
        return flat + _NUMBER_BYTES * len(value)
    size = 0
    for index, item in enumerate(value):
        scalar = _scalar_bytes(item)
        size += scalar if scalar is not None else _measure(item, f"{path}[{index}]", budget - size, above)
        size += _NUMBER_BYTES
        if size > budget:
            raise _over_budget(f"{path}[{index}]", _describe(item))
    return size


def _measure_message(value: Any, path: str, budget: int, above: list[int]) -> int:
    size = 0
    for name in _MESSAGES[type(value)]:
        part = getattr(value, name)
        if name in _KEYED_BY_ID and type(part) is dict:
            size += _measure_dict(part, f"{path}.{name}", budget - size, [*above, id(part)], frozenset())
        else:
            size += _measure(part, f"{path}.{name}", budget - size, above)
    return size


def _advice(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "pass its model_dump()"
    if isinstance(value, np.number | np.bool_):
        return "pass a Python number, its item()"
    return "rows travel through the data plane"


def _over_budget(path: str, found: str) -> RpcPayloadError:
    return RpcPayloadError(path, f"{found} goes over the byte budget of a call")


def _describe(value: Any) -> str:
    """A value by type and size, never by content."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    if not hasattr(kind, "shape"):
        return f"{name} of {len(value)} items" if isinstance(value, Sized) else name
    try:
        return f"{name} of shape {tuple(value.shape)}, {value.nbytes} bytes"
    except (AttributeError, RuntimeError, TypeError):  # a nested tensor has the attribute, but no shape to tell
        return name
