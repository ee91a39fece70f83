"""Thirty receipts that are meant to harm: each is made from a sound one, under its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Receipt = dict[str, Any]


def _nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def _holds_itself(receipt: Receipt) -> Receipt:
    receipt["manifest"] = [*receipt["manifest"], receipt]
    return receipt


def _with_row(receipt: Receipt, **changes: Any) -> Receipt:
    return {**receipt, "manifest": [{**receipt["manifest"][0], **changes}, *receipt["manifest"][1:]]}


HOSTILE: dict[str, Callable[[Receipt], Any]] = {
    "an error page": lambda sound: "internal server error",
    "JSON text": json.dumps,
    "a list": lambda sound: [],
    "a number": lambda sound: 5,
    "a NaN": lambda sound: float("nan"),
    "a bool": lambda sound: True,
    "nothing in it": lambda sound: {},
    "bytes": lambda sound: b"{}",
    "a tensor": lambda sound: torch.zeros(4),
    "an array": lambda sound: np.zeros(4),
    "a set": lambda sound: {1, 2},
    "an object": lambda sound: Path("/"),
    "a field input_ids": lambda sound: {**sound, "input_ids": [1, 2]},
    "a field token_ids in a call": lambda sound: _with_row(sound, token_ids=[1, 2]),
    "a field __class__": lambda sound: {**sound, "__class__": "x"},
    "a tensor in it": lambda sound: {**sound, "reward": torch.ones(())},
    "a numpy scalar in it": lambda sound: _with_row(sound, prev_len=np.int64(0)),
    "nested 40 deep": lambda sound: {**sound, "failure_reason": _nested(40)},
    "nested 5,000 deep": lambda sound: {**sound, "failure_reason": _nested(5000)},
    "a container that holds itself": _holds_itself,
    "a reason of 17 MB": lambda sound: {**sound, "capture_poisoned": True, "failure_reason": "x" * 17_000_000},
    "a reason of 15 MB": lambda sound: {**sound, "capture_poisoned": True, "failure_reason": "x" * 15_000_000},
    "an integer of 5,000 digits": lambda sound: _with_row(sound, weight_version=10**5000),
    "a weight version of 2**63": lambda sound: _with_row(sound, weight_version=2**63),
    "keys that are numbers": lambda sound: {**sound, 1: 2},
    "keys that are tuples": lambda sound: {("a", 1): sound},
    "a key that is a surrogate": lambda sound: {**sound, "\ud800": 1},
    "an id that is a surrogate": lambda sound: _with_row(sound, response_id="\udfff"),
    "a manifest of a million": lambda sound: {**sound, "manifest": [None] * 1_000_000},
    "a manifest by name": lambda sound: {**sound, "manifest": {"c0": sound["manifest"][0]}},
}


def is_json(value: Any) -> bool:
    """Whether a file of receipts can say it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
