"""Reading staged calls back: in order, each the one asked for, and by name which are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout_reassembler.contract.errors import DataPlaneTimeout, InvalidStagedCall, StagedRowsMissing
from rollout_reassembler.data_plane.base import SampleBatch
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.staging.codec import pack_call
from rollout_reassembler.staging.source import StagingSource, prove_call
from tests.captures import STAGING, MadeRollout, chain, memory_plane, registered, stage


def staged_plane(*rollouts: MadeRollout) -> MemoryDataPlane:
    plane = memory_plane()
    stage(plane, *rollouts)
    return plane


def source_on(plane: Any) -> StagingSource:
    return StagingSource(plane, staging_partition=STAGING)


def put_value(plane: MemoryDataPlane, key: str, value: bytes) -> None:
    plane.put_samples([key], STAGING, {"call": [value], "extras": [b""]})


def test_rows_come_in_the_order_asked():
    made = chain("r", 4)
    plane = staged_plane(made)
    order = [2, 0, 3, 1]
    assert source_on(plane).fetch([f"r/c{at}" for at in order]) == [made.calls[at] for at in order]


def test_a_key_asked_twice_comes_twice():
    made = chain("r", 1)
    plane = staged_plane(made)
    assert source_on(plane).fetch(["r/c0", "r/c0"]) == [made.calls[0]] * 2


def test_no_keys_ask_nothing_of_the_plane():
    plane = MemoryDataPlane()
    plane.close()
    source = source_on(plane)
    assert source.fetch([]) == []
    assert source.read_values([]) == source.fetch_extras([]) == ({}, frozenset())


def test_missing_keys_are_named_in_the_order_asked():
    plane = staged_plane(chain("r", 2))
    with pytest.raises(StagedRowsMissing, match="'r/c9', 'r/c8'") as caught:
        source_on(plane).fetch(["r/c9", "r/c0", "r/c8", "r/c1"])
    assert caught.value.keys == ("r/c9", "r/c8")
    assert caught.value.partition == STAGING


def test_a_row_half_written_is_missing():
    """A put that died between its columns leaves a key without a call."""
    plane = staged_plane(chain("r", 1))
    plane.put_samples(["r/c1"], STAGING, {"extras": [b""]})
    plane.put_samples(["r/c2"], STAGING, tags=[{"rollout_id": "r"}])
    with pytest.raises(StagedRowsMissing) as caught:
        source_on(plane).fetch(["r/c0", "r/c1", "r/c2"])
    assert caught.value.keys == ("r/c1", "r/c2")


def test_the_right_row_under_another_key_is_refused():
    """A place that the plane gave to another row: sound bytes, the wrong row."""
    made, other = chain("r", 2), chain("s", 2)
    plane = staged_plane(made)
    put_value(plane, "r/c1", pack_call(other.calls[1]))
    with pytest.raises(InvalidStagedCall, match="the row under 'r/c1' is that of 's/c1'") as caught:
        source_on(plane).fetch(["r/c0", "r/c1"])
    assert caught.value.code == "staging_key_mismatch"


def test_a_malformed_row_is_refused():
    plane = staged_plane(chain("r", 1))
    put_value(plane, "r/c0", b"RRSC garbage")
    with pytest.raises(InvalidStagedCall) as caught:
        source_on(plane).fetch(["r/c0"])
    assert caught.value.code == "invalid_staging_row"


def test_a_packed_read_puts_every_key_into_exactly_one_place():
    made = chain("r", 4)
    plane = staged_plane(made)
    put_value(plane, "r/c1", b"")
    put_value(plane, "r/c2", pack_call(made.calls[3]))
    keys = ["r/c0", "r/c1", "r/c2", "r/c3", "r/c4"]
    fetched = source_on(plane).fetch_packed(keys)
    assert set(fetched.calls) == {"r/c0", "r/c3"}
    assert {key: error.code for key, error in fetched.invalid.items()} == {
        "r/c1": "invalid_staging_row",
        "r/c2": "staging_key_mismatch",
    }
    assert fetched.missing == {"r/c4"}


def test_one_read_a_call():
    class Counting(MemoryDataPlane):
        reads = 0

        def get_samples(self, *args: Any, **kwargs: Any) -> SampleBatch:
            Counting.reads += 1
            return super().get_samples(*args, **kwargs)

    plane = Counting()
    stage(registered(plane), chain("r", 20))
    source_on(plane).fetch([f"r/c{at}" for at in range(20)])
    assert Counting.reads == 1


def test_reading_calls_never_moves_extras():
    class Selective(MemoryDataPlane):
        def get_samples(
            self, sample_ids: Sequence[str], partition_id: str, select_fields: Any = None, **kwargs: Any
        ) -> SampleBatch:
            assert select_fields == ["call"]
            return super().get_samples(sample_ids, partition_id, select_fields, **kwargs)

    plane = Selective()
    stage(registered(plane), chain("r", 2))
    assert len(source_on(plane).fetch(["r/c0", "r/c1"])) == 2


def test_a_read_that_times_out_is_not_missing():
    class Silent(MemoryDataPlane):
        def get_samples(self, *args: Any, **kwargs: Any) -> SampleBatch:
            raise DataPlaneTimeout("no answer", call="get_samples", partition=STAGING, seconds=60)

    with pytest.raises(DataPlaneTimeout):
        source_on(Silent()).fetch(["r/c0"])


def test_ids_with_slashes_are_not_told_by_their_key():
    """`a/b/c` is call `c` of `a/b` and call `b/c` of `a`: the row itself says which."""
    long, short = MadeRollout("a/b"), MadeRollout("a")
    call, other = long.call([1], [2], call_id="c"), short.call([1], [2], call_id="b/c")
    assert call.staging_key == other.staging_key == "a/b/c"
    assert prove_call("a/b/c", pack_call(call)).rollout_id == "a/b"
    assert prove_call("a/b/c", pack_call(other)).rollout_id == "a"
