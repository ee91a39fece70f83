"""A request as its caller gave it, into the plain one that every later step trusts; or the caller's slip, named.

In comes what training loops have: lists, tuples, numpy arrays, torch tensors, numpy and torch scalars, bools that
mean a number. Out goes a `ReassemblyRequest` of tuples of Python's own values, the same for all of these. A part of
another type is the caller's slip, and a slip costs nothing: `RequestError` says which part and entry, what was
expected and what came, before anything is read, published or cleared. It is checked where a request enters: in the
pool before it is dispatched, in the actor, in `RolloutReassembler`.

What an *agent* got wrong is not looked for here. A receipt that is no receipt, and a reward that is missing or
not finite, cost their own rollout later (`invalid_receipt`, `invalid_reward`):

    rewards  [1, np.float32(0.5), True, None]    (1.0, 0.5, 1.0, None)
    rewards  ["1.0", 0.5]                        RequestError: … rewards[0] must be a number or None, got str '1.0'
    receipts [{…}, "internal server error"]      as it is; the second rollout is rejected
    receipts ['{…}', '{…}']                      RequestError: JSON text, all of them: nobody parsed them
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import numpy as np

from rollout_reassembler.contract.errors import RequestError
from rollout_reassembler.contract.messages import ReassemblyRequest
from rollout_reassembler.contract.records import RolloutReceipt
from rollout_reassembler.contract.settings import BRANCHES, Branches
from rollout_reassembler.contract.text import described

MAX_WEIGHT_VERSION = 2**63 - 1
"""The wire holds 64 bits without a sign; tags, exports and tensors hold int64."""


def plain_request(request: ReassemblyRequest) -> ReassemblyRequest:
    """The request in Python's own types, its parts aligned, its defaults filled in. Raises `RequestError`.

    `canonical_sample_ids` are there (`"{group_id}_g{i}"` by default), `mask_sample` is a tuple, `truncated` a tuple
    or `None`. Doing it twice changes nothing.
    """
    if not isinstance(request, ReassemblyRequest):
        raise RequestError(f"expected a ReassemblyRequest, got {described(request)}")
    group_id = _identifier(request.group_id, "group_id must be a non-empty str")
    part = _Parts(group_id)
    rollout_ids = part.ids("rollout_ids", request.rollout_ids)
    size = len(rollout_ids)
    if not size:
        raise part.wrong(f"rollout_ids must name a rollout or more, got {described(request.rollout_ids)}")
    sample_ids = request.canonical_sample_ids
    truncated = request.truncated
    return dataclasses.replace(
        request,
        group_id=group_id,
        rollout_ids=rollout_ids,
        canonical_sample_ids=tuple(f"{group_id}_g{i}" for i in range(size))
        if sample_ids is None
        else part.ids("canonical_sample_ids", sample_ids, size),
        receipts=part.receipts(request.receipts, size),
        rewards=part.each("rewards", request.rewards, size, _number_or_none, "a number or None"),
        mask_sample=part.masks(request.mask_sample, size),
        truncated=truncated
        if truncated is None
        else part.each("truncated", truncated, size, _bool_or_none, "a bool or None"),
        fallback_weight_version=part.integer("fallback_weight_version", request.fallback_weight_version, 0),
        prompt_idx=part.integer("prompt_idx", request.prompt_idx, -(2**63)),
        loss_multiplier=part.multiplier(request.loss_multiplier),
        staged_on=part.epoch(request.staged_on),
        accept_lost=part.flag("accept_lost", request.accept_lost),
        branches=part.branches(request.branches),
    )


def plain_reward(reward: Any) -> float | None:
    """One reward as a float; a missing one as `None`. Raises `RequestError`."""
    try:
        return _number_or_none(reward)
    except TypeError as error:
        raise RequestError(f"reward must be a number or None, got {described(reward)}") from error


def plain_rollout_id(rollout_id: Any) -> str:
    """A rollout's id. Raises `RequestError`."""
    return _identifier(rollout_id, "rollout_id must be a non-empty str")


def publishable_reward(reward: object) -> float | None:
    """The reward as a float that binary32 can hold, or `None` when it is not a finite number."""
    if isinstance(reward, bool) or not isinstance(reward, Real):
        return None
    try:
        value = float(reward)
    except OverflowError:
        return None
    return value if math.isfinite(value) and abs(value) <= float(np.finfo(np.float32).max) else None


class _Parts:
    """Reads one part of a request at a time; what it raises names the group and the part."""

    def __init__(self, group_id: str) -> None:
        self._group_id = group_id

    def wrong(self, what: str) -> RequestError:
        return RequestError(f"group {self._group_id!r:.200}: {what}")

    def branches(self, value: Any) -> Branches | None:
        if value is not None and value not in BRANCHES:
            raise self.wrong(f"branches must be one of 'terminal', 'all', or None, got {described(value)}")
        return cast("Branches | None", value)

    def entries(self, name: str, value: Any, size: int | None) -> list[Any]:
        """The entries of a sequence or a 1-d array, as many as there are rollouts."""
        if hasattr(value, "ndim") and hasattr(value, "tolist") and value.ndim == 1:
            value = value.tolist()
        if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
            raise self.wrong(f"{name} must be a sequence with an entry a rollout, got {described(value)}")
        if size is not None and len(value) != size:
            raise self.wrong(f"{len(value)} {name} for {size} rollout_ids")
        return list(value)

    def each(
        self, name: str, value: Any, size: int | None, plain: Callable[[Any], Any], expected: str
    ) -> tuple[Any, ...]:
        """The entries, each made plain by `plain`, which raises `TypeError` or `ValueError` for one that can't be."""
        entries = self.entries(name, value, size)
        made = []
        for index, entry in enumerate(entries):
            try:
                made.append(plain(entry))
            except (TypeError, ValueError) as error:
                raise self.wrong(f"{name}[{index}] must be {expected}, got {described(entry)}") from error
        return tuple(made)

    def ids(self, name: str, value: Any, size: int | None = None) -> tuple[str, ...]:
        entries = self.entries(name, value, size)
        found = tuple(
            _identifier(entry, f"group {self._group_id!r:.200}: {name} must be distinct non-empty strings", f"[{i}]")
            for i, entry in enumerate(entries)
        )
        if len(set(found)) != len(found):
            twice = next(entry for entry in found if found.count(entry) > 1)
            raise self.wrong(f"{name} must be distinct non-empty strings, got {twice!r:.80} twice")
        return found

    def receipts(self, value: Any, size: int) -> tuple[Any, ...]:
        """Receipts as they are; what is wrong with one of them is its rollout's matter, not the request's."""
        receipts = [_plain_receipt(entry) for entry in self.entries("receipts", value, size)]
        given = [receipt for receipt in receipts if receipt is not None]
        if given and all(map(_is_json_object, given)):
            raise self.wrong("receipts are JSON text; pass the parsed dicts: [json.loads(text) for text in receipts]")
        return tuple(receipts)

    def masks(self, value: Any, size: int) -> tuple[bool, ...]:
        if value is None:
            return (False,) * size
        try:
            return (_bool(value),) * size
        except TypeError:
            return self.each("mask_sample", value, size, _bool, "a bool")

    def integer(self, name: str, value: Any, least: int) -> int:
        try:
            number = operator.index(value)
        except TypeError as error:
            raise self.wrong(f"{name} must be an int, got {described(value)}") from error
        if not least <= number <= MAX_WEIGHT_VERSION:
            what = "negative" if number < 0 and not least else "beyond int64"
            raise self.wrong(f"{name} must be an int from {least} to 2**63 - 1, got one that is {what}")
        return number

    def multiplier(self, value: Any) -> float:
        try:
            number = publishable_reward(_number_or_none(value))
        except TypeError:
            number = None
        if number is None:
            raise self.wrong(f"loss_multiplier must be a finite number that binary32 can hold, got {described(value)}")
        return number

    def epoch(self, value: Any) -> str | None:
        if value is None or (isinstance(value, str) and value):
            return value
        raise self.wrong(f"staged_on must be what epoch() gave, or None; got {described(value)}")

    def flag(self, name: str, value: Any) -> bool:
        if isinstance(value, bool | np.bool_):
            return bool(value)
        raise self.wrong(f"{name} must be a bool, got {described(value)}")


def _identifier(value: Any, expected: str, place: str = "") -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{expected}, got {described(value)}{' at ' + place if place else ''}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = f"a lone surrogate, U+{ord(value[error.start]):04X} at character {error.start}"
        raise RequestError(f"{expected}, got one with {found}{' in ' + place if place else ''}") from error
    return str(value)


def _scalar(value: Any) -> Any:
    """A numpy or torch scalar, or an array of no dimension, as Python's own number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _number_or_none(value: Any) -> float | None:
    if value is None:
        return None
    number = _scalar(value)
    if not isinstance(number, Real):
        raise TypeError
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _bool(value: Any) -> bool:
    """A bool, or a number that is exactly 0 or 1."""
    found = _scalar(value)
    if isinstance(found, Real) and found in (0, 1):
        return bool(found)
    raise TypeError


def _bool_or_none(value: Any) -> bool | None:
    return None if value is None else _bool(value)


def _plain_receipt(value: Any) -> Any:
    """A receipt as a plain dict where it is one of ours or another mapping; else as it is."""
    if isinstance(value, RolloutReceipt):
        return value.model_dump()
    return dict(value) if isinstance(value, Mapping) and type(value) is not dict else value


def _is_json_object(value: Any) -> bool:
    if not isinstance(value, str | bytes) or value.strip()[:1] not in ("{", b"{"):
        return False
    try:
        return isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False
