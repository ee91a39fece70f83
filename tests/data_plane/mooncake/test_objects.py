"""A row's values as objects: whatever is packed comes back, and an index knows what nobody refers to any more."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.data_plane.mooncake.objects import (
    INLINE_BYTES,
    SHARED_BYTES,
    Names,
    RowIndex,
    is_intact,
    is_part,
    pack_row,
    referred,
    unpack,
)

SIZES = st.sampled_from([0, 1, INLINE_BYTES, INLINE_BYTES + 1, 1000, SHARED_BYTES - 1, SHARED_BYTES, SHARED_BYTES + 7])
VALUES = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), SIZES.map(lambda size: b"\x07" * size)
)
ROWS = st.dictionaries(st.sampled_from("abcdef"), VALUES, max_size=6)


@given(ROWS)
def test_what_is_packed_is_unpacked(values: dict[str, Any]) -> None:
    packed = pack_row(values, Names())
    contents = {stored.name: content for stored, content in packed.objects}
    assert all(is_intact(stored, content) for stored, content in packed.objects)
    assert {name: unpack(cell, contents) for name, cell in packed.cells.items()} == values
    assert {stored.name for stored in referred(packed.cells.values())} == contents.keys()


@given(ROWS)
def test_middling_values_share_one_object_and_small_ones_need_none(values: dict[str, Any]) -> None:
    packed = pack_row(values, Names())
    sizes = [len(value) for value in values.values() if isinstance(value, bytes)]
    large = sum(size >= SHARED_BYTES for size in sizes)
    middling = any(INLINE_BYTES < size < SHARED_BYTES for size in sizes)
    assert len(packed.objects) == large + middling


@given(ROWS, ROWS)
def test_an_index_tells_what_an_overwriting_put_leaves_unused(first: dict[str, Any], second: dict[str, Any]) -> None:
    names = Names()
    before, after = pack_row(first, names), pack_row(second, names)
    index = RowIndex(b"owner").overwritten(b"owner", before.cells)
    cells = {**before.cells, **after.cells}
    now = RowIndex.of(index.to_cell()).overwritten(b"owner", after.cells)
    assert now.names() == {stored.name for stored in referred(cells.values())}
    assert now.columns.keys() == {name for name, cell in cells.items() if is_part(cell)}


def test_bytes_that_are_not_the_written_ones_are_noticed() -> None:
    ((stored, content),) = pack_row({"a": b"\x07" * 5000}, Names()).objects
    assert is_intact(stored, content)
    for other in (b"", content[:-1], content + b"\x07", b"\x06" + content[1:], b"\x00" * len(content)):
        assert not is_intact(stored, other)


def test_no_name_is_given_twice() -> None:
    writers = [Names() for _ in range(3)]
    given_names = [writer.new() for _ in range(100) for writer in writers]
    assert len(set(given_names)) == 300
