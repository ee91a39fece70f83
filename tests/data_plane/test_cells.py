"""Cells: every array comes back, and whatever else is under a key is noticed or harmless."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.cells import DTYPES, MalformedCell, decode_cell, encode_cell


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (5,), (0, 3), (2, 0, 3), (2, 3, 4)])
def test_an_array_comes_back_as_an_aligned_read_only_view(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    cell = encode_cell(array)
    back = decode_cell(cell, FieldSpec(dtype, len(shape)))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert back.flags.aligned
    assert not back.flags.writeable
    assert back.size == 0 or np.shares_memory(back, np.frombuffer(cell, np.uint8))


def test_the_layout_is_fixed() -> None:
    """Queues and checkpoints outlive a version: this may only change together with the magic."""
    cell = encode_cell(np.array([[1, -1]], np.int16))
    assert cell.hex(" ", 4) == "52526331 02020000 01000000 00000000 02000000 00000000 0100ffff"


@pytest.mark.parametrize("spec", [FieldSpec("int64", 2), FieldSpec("int32", 1), FieldSpec("float64", 1)])
def test_a_cell_of_another_dtype_or_rank_is_refused(spec: FieldSpec) -> None:
    with pytest.raises(MalformedCell):
        decode_cell(encode_cell(np.arange(4)), spec)


def test_shapes_that_no_memory_can_hold_are_refused() -> None:
    for shape in ([2**63, 8], [0, 2**63], [2**32, 2**32], [1, 2**64 - 1]):
        header = b"RRc1" + bytes([DTYPES.index("int64"), 2, 0, 0]) + np.array(shape, np.uint64).tobytes()
        with pytest.raises(MalformedCell):
            decode_cell(header, FieldSpec("int64", 2))


def test_damaged_cells_are_refused_or_are_cells_of_the_same_dtype_and_rank() -> None:
    rng = np.random.default_rng(0)
    spec = FieldSpec("int64", 2)
    whole = encode_cell(np.arange(12).reshape(3, 4))
    refused = 0
    for _ in range(10_000):
        cell = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            cell[rng.integers(0, 24)] ^= 1 << rng.integers(0, 8)
        cell = cell[: rng.integers(0, len(cell) + 1)] if rng.random() < 0.3 else cell
        try:
            array = decode_cell(bytes(cell), spec)
        except MalformedCell:
            refused += 1
        else:
            assert (array.dtype, array.ndim) == (np.int64, 2)
            assert array.nbytes <= len(whole)
    assert refused > 9_000
