"""What engines hand over is judged by value, whatever its type; what is no number is refused by its place."""

from __future__ import annotations

import array
import subprocess
import sys
from collections import deque
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.contract import engine_values
from rollout_reassembler.contract.errors import InvalidStagedCall
from rollout_reassembler.contract.records import seal_call


class Token(IntEnum):
    EOS = 2


class Converts:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([1, 2], np.int16)


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize(
    "values",
    [
        *(np.array([1, 2], kind) for kind in (*INTEGERS, ">i4", "float16", "float32", "float64", object)),
        *(torch.tensor([1, 2], dtype=getattr(torch, kind)) for kind in ("int8", "int32", "int64", "uint8", "uint64")),
        *(torch.tensor([1, 2], dtype=kind) for kind in (torch.bfloat16, torch.float16, torch.float32)),
        [np.int64(1), 2],
        [np.uint64(1), np.int8(2)],
        (torch.tensor(1), 2),
        [np.array(1), torch.tensor(2.0)],
        [1, Token.EOS],
        [1.0, 2],
        range(1, 3),
        deque([1, 2]),
        array.array("q", [1, 2]),
        memoryview(array.array("i", [1, 2])),
        np.array([1, 9, 2, 9])[::2],
        Converts(),
    ],
    ids=lambda values: f"{type(values).__name__}-{getattr(values, 'dtype', values)}"[:40],
)
def test_token_ids_of_any_type_are_their_values(values: Any) -> None:
    ids = engine_values.token_ids(values)
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "values",
    [
        *(np.array([-0.5, -1], kind) for kind in ("float16", "float32", "float64", "longdouble", object)),
        torch.tensor([-0.5, -1.0], dtype=torch.bfloat16),
        torch.tensor([-0.5, -1.0], requires_grad=True),
        torch.tensor([-0.5, -1.0], dtype=torch.float8_e4m3fn),
        [np.float32(-0.5), -1],
        (torch.tensor(-0.5), np.float16(-1)),
    ],
    ids=lambda values: f"{type(values).__name__}-{getattr(values, 'dtype', values)}"[:40],
)
def test_log_probabilities_of_any_type_are_their_values(values: Any) -> None:
    floats = engine_values.floats(values, "log probabilities")
    assert floats.dtype == np.float32
    assert floats.tolist() == [-0.5, -1.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 1.5], "found 1.5 at 1"),
        (np.array([1, np.nan]), "found nan at 1"),
        (torch.tensor([1.0, torch.inf]), "found inf at 1"),
        ([1, -1], "non-negative, found -1"),
        (torch.tensor([-1], dtype=torch.int8), "non-negative, found -1"),
        (np.array([-1.0]), "non-negative, found -1"),
        ([2**63], "must fit 64 bits"),
        (np.array([2**63], np.uint64), "must fit a signed 64-bit integer"),
        ([np.uint64(2**63)], "must fit 64 bits"),
        ([True], "must be whole numbers, got bool[1]"),
        (np.array([True]), "must be whole numbers, got bool[1]"),
        ([1, True], "found a bool at 1"),
        ([1, np.bool_(True)], "found a bool at 1"),
        ([1, None], "found NoneType at 1"),
        ([1, "2"], "found str at 1"),
        ([1, 2j], "found complex at 1"),
        ([1, [2]], "found list at 1"),
        ([torch.tensor([1])], "found torch.Tensor at 0"),
        (np.array(["1"]), "must be whole numbers, got <U1[1]"),
        (np.array([[1]]), "one-dimensional, got int64[1, 1]"),
        (np.array(1), "one-dimensional, got int64[]"),
        (torch.tensor([[1]]), "one-dimensional, got int64[1, 1]"),
        (torch.empty(2, device="meta"), "has no values to read"),
        ("12", "a sequence or an array of numbers, got str"),
        (b"12", "got bytes"),
        ({1: 2}, "got dict"),
        ({1}, "got set"),
        (None, "got NoneType"),
        (7, "got int"),
        (iter([1]), "got list_iterator"),
        (np.array([2**24], np.float32), "lack whole numbers from 16777216 on, found 16777216 at 0"),
        (torch.tensor([1, 300.0], dtype=torch.bfloat16), "lack whole numbers from 256 on, found 300 at 1"),
        ([1, np.float16(4096)], "lack whole numbers from 2048 on, found 4096 at 1"),
        ([float(2**53)], "lack whole numbers from 9007199254740992 on"),
    ],
    ids=lambda value: f"{value!r}"[:50],
)
def test_what_are_no_token_ids_is_refused_by_value_and_place(values: Any, message: str) -> None:
    with pytest.raises(InvalidStagedCall) as raised:
        engine_values.token_ids(values)
    assert "token ids" in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "values",
    [[None], ["x"], [1j], [True], np.array([True]), [np.nan], [-1e39], np.array([-1e39]), torch.tensor([-torch.inf])],
    ids=repr,
)
def test_what_are_no_finite_log_probabilities_is_refused(values: Any) -> None:
    with pytest.raises(InvalidStagedCall, match="log probabilities must be"):
        engine_values.floats(values, "log probabilities")


@given(st.lists(st.integers(0, 2**63 - 1), max_size=5), st.data())
def test_mixed_lists_lose_no_bit(ids: list[int], data: st.DataObject) -> None:
    kinds = [int, np.int64, np.uint64, torch.tensor]
    mixed = [data.draw(st.sampled_from(kinds))(value) for value in ids]
    assert engine_values.token_ids(mixed).tolist() == ids


def test_a_call_is_sealed_from_tensors_and_a_mask_of_truths() -> None:
    plain = {"rollout_id": "r", "model_call_id": "c", "weight_version": 1}
    sealed = seal_call(
        **plain,
        token_ids_delta=[1, 2],
        token_mask_delta=[0.0, 1.0],
        generation_log_probs_delta=[0.0, -0.5],
    )
    ids = torch.tensor([1, 2])
    again = seal_call(
        **{**plain, "weight_version": np.int64(1)},
        token_ids_delta=ids,
        token_mask_delta=ids > 1,
        generation_log_probs_delta=torch.tensor([0, -0.5], dtype=torch.bfloat16, requires_grad=True),
    )
    assert again == sealed


def test_torch_is_not_imported_for_what_is_no_tensor() -> None:
    script = (
        "import sys\n"
        "from rollout_reassembler.contract import engine_values\n"
        "assert engine_values.token_ids([1, 2]).tolist() == [1, 2]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def _lines_run(work: Any) -> int:
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


@pytest.mark.parametrize("of", [np.asarray, torch.tensor, list], ids=["array", "tensor", "list"])
def test_arrays_tensors_and_plain_lists_meet_no_loop_over_tokens(of: Any) -> None:
    few, many = (of(np.arange(count).tolist()) for count in (10, 100_000))
    engine_values.token_ids(few)
    assert _lines_run(lambda: engine_values.token_ids(many)) == _lines_run(lambda: engine_values.token_ids(few))
