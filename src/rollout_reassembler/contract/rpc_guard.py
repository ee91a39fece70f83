"""Metadata only across RPC: what may be in a request or an answer, and how much of it.

An allow list, not a search for tensors: strings, numbers, booleans, `None`, tuples, lists,
string-keyed dicts and the messages of `messages.py` pass; every other type is refused by its name.
On top, names that hold tokens elsewhere in the system are refused whatever they hold, and the whole
must fit a byte budget, so that a list of a million integers does not pass as "metadata".

    try:
        assert_metadata_only({"receipts": [{"manifest": [{"token_ids": [1, 2]}]}]})
    except RpcPayloadError as error:
        assert error.path == "rpc['receipts'][0]['manifest'][0]['token_ids']"

Receipts are the agents', and one that may not cross costs its own rollout: `guarded_request` puts a small
`RefusedReceipt` in its place, on whichever side of the RPC it is met first. What may not cross for the caller's
reasons is an error that names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence, Sized
from typing import Any

import numpy as np
from pydantic import BaseModel

from rollout_reassembler.contract.bounds import DEFAULT_BOUNDS, ReceiptBounds, how_to_raise
from rollout_reassembler.contract.errors import RpcPayloadError
from rollout_reassembler.contract.messages import (
    FinalizedGroup,
    KVBatchMeta,
    ReassemblyRequest,
    RefusedReceipt,
    RolloutReassemblerActorConfig,
)
from rollout_reassembler.contract.text import one_line

MAX_RPC_BYTES = DEFAULT_BOUNDS.max_rpc_bytes
MAX_RPC_DEPTH = 32

_FORBIDDEN_RPC_KEYS = frozenset(
    {
        "advantages",
        "attention_mask",
        "canonical_row",
        "completion_ids",
        "completion_mask",
        "env_mask",
        "extras",
        "generation_log_probs",
        "generation_log_probs_delta",
        "generation_logprobs",
        "generation_logprobs_delta",
        "generation_token_ids",
        "generation_topk_ids",
        "generation_topk_logprobs",
        "input_ids",
        "log_probs",
        "logprob_token_ids",
        "logprobs",
        "loss_mask",
        "loss_masks",
        "media_imgs",
        "multi_modal_inputs",
        "old_log_probs",
        "old_logprobs",
        "output_ids",
        "output_token_ids",
        "position_ids",
        "prev_logprobs",
        "prompt_ids",
        "prompt_ids_for_adv",
        "prompt_token_ids",
        "prompts",
        "ref_log_prob",
        "ref_logprobs",
        "reference_policy_logprobs",
        "required_prefix_token_ids",
        "response_ids",
        "response_mask",
        "responses",
        "rm_scores",
        "rollout_expert_indices",
        "rollout_log_probs",
        "rollout_logprobs",
        "routed_experts",
        "routed_experts_boundary",
        "target_tokens",
        "token_ids",
        "token_ids_delta",
        "token_mask",
        "token_mask_delta",
    }
)

_MESSAGES = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in (
        FinalizedGroup,
        KVBatchMeta,
        ReassemblyRequest,
        RefusedReceipt,
        RolloutReassemblerActorConfig,
        ReceiptBounds,
    )
}
_KEYED_BY_ID = frozenset({"rejections"})
"""Parts of messages whose keys are rollout ids: a rollout may have any name."""

_NUMBERS = frozenset({int, float, bool, type(None)})
_NUMBER_BYTES = 8
_FLAT = _NUMBERS | {str}
_MANY = 1 << 64
_MANY_TIMES = 8


def assert_metadata_only(value: Any, *, path: str = "rpc", max_bytes: int = MAX_RPC_BYTES) -> int:
    """Refuse anything but metadata; returns its size in bytes (text as UTF-8, 8 a number or item).

    Raises `RpcPayloadError` with the path of the first offender, what was found and its size.
    """
    return _measure(value, path, max_bytes, [])


def guarded_request(request: ReassemblyRequest, *, max_bytes: int = MAX_RPC_BYTES) -> ReassemblyRequest:
    """The request as it may cross, with a `RefusedReceipt` for each receipt that may not.

    Refused are receipts that are more than metadata, or larger than the budget, or out of all proportion to the
    others (over `_MANY_TIMES` the median) where it takes that for the rest to fit. A group that is too large as
    a whole is its caller's: `RpcPayloadError` with its size and the setting. `request` is one of `plain_request`.
    """
    receipts: list[Any] = list(request.receipts)
    sizes = [0] * len(receipts)
    for index, receipt in enumerate(receipts):
        try:
            sizes[index] = assert_metadata_only(receipt, path=f"rpc.receipts[{index}]", max_bytes=max_bytes)
        except RpcPayloadError as error:
            receipts[index] = RefusedReceipt(one_line(str(error)))
    rest = dataclasses.replace(request, receipts=())
    total = sum(sizes) + _NUMBER_BYTES * len(sizes) + assert_metadata_only(rest, max_bytes=max_bytes)
    if total > max_bytes:
        typical = sorted(sizes)[(len(sizes) - 1) // 2]
        huge = [index for index, size in enumerate(sizes) if size > _MANY_TIMES * typical]
        if total - sum(sizes[index] for index in huge) > max_bytes:
            raise _over_group_budget(request, sizes, total, max_bytes)
        for index in huge:
            what = f"{sizes[index]} bytes, beside others of {typical}: the group goes over max_rpc_bytes={max_bytes}"
            receipts[index] = RefusedReceipt(what)
    return dataclasses.replace(request, receipts=tuple(receipts))


def _over_group_budget(request: ReassemblyRequest, sizes: Sequence[int], total: int, max_bytes: int) -> RpcPayloadError:
    manifests = [receipt.get("manifest") for receipt in request.receipts if isinstance(receipt, dict)]
    calls = sum(len(manifest) for manifest in manifests if isinstance(manifest, list | tuple))
    return RpcPayloadError(
        "rpc.receipts",
        f"group {request.group_id!r:.200} has {total} bytes of metadata ({len(sizes)} rollouts, {calls} calls), more "
        f"than max_rpc_bytes={max_bytes}; {how_to_raise('max_rpc_bytes')} and in that of ReassemblerPool",
    )


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
