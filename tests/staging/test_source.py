"""Reading staged calls back: in order, each the one asked for, and by name which are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout_reassembler.contract.errors import DataPlaneTimeout, InvalidStagedCall, RequestError, StagedRowsMissing
from rollout_reassembler.data_plane.base import SampleBatch
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.staging.codec import pack_call
from rollout_reassembler.staging.places import place, place_of
from rollout_reassembler.staging.source import StagingSource, prove_call
from tests.captures import STAGING, MadeRollout, chain, memory_plane, place_in, registered, stage


def staged_plane(*rollouts: MadeRollout) -> MemoryDataPlane:
    plane = memory_plane()
    stage(plane, *rollouts)
    return plane


def source_on(plane: Any) -> StagingSource:
    return StagingSource(plane, staging_partition=STAGING)


def put_value(plane: MemoryDataPlane, key: str, value: bytes) -> None:
    plane.put_samples([place_in(plane, key)], STAGING, {"call": [value], "extras": [b""]})


def test_rows_come_in_the_order_asked():
    made = chain("r", 4)
    plane = staged_plane(made)
    order = [2, 0, 3, 1]
    assert source_on(plane).fetch([made.calls[at] for at in order]) == [made.calls[at] for at in order]


def test_a_key_asked_twice_comes_twice():
    made = chain("r", 1)
    plane = staged_plane(made)
    assert source_on(plane).fetch([made.calls[0], place_of(made.calls[0])]) == [made.calls[0]] * 2


def test_no_keys_ask_nothing_of_the_plane():
    plane = MemoryDataPlane()
    plane.close()
    source = source_on(plane)
    assert source.fetch([]) == []
    assert source.read_values([]) == source.fetch_extras([]) == ({}, frozenset())


def test_missing_keys_are_named_in_the_order_asked():
    made, other = chain("r", 2), chain("s", 2)
    plane = staged_plane(made)
    with pytest.raises(StagedRowsMissing, match=r"'s/c1#[0-9a-f]{32}', 's/c0#") as caught:
        source_on(plane).fetch([other.calls[1], made.calls[0], other.calls[0], made.calls[1]])
    assert caught.value.keys == (place_of(other.calls[1]), place_of(other.calls[0]))
    assert caught.value.partition == STAGING


def test_a_row_half_written_is_missing():
    """A put that died between its columns leaves a key without a call."""
    made = chain("r", 3)
    half, tagged = map(place_of, made.calls[1:])
    plane = staged_plane(MadeRollout("r", made.calls[:1]))
    plane.put_samples([half], STAGING, {"extras": [b""]})
    plane.put_samples([tagged], STAGING, tags=[{"rollout_id": "r"}])
    with pytest.raises(StagedRowsMissing) as caught:
        source_on(plane).fetch(made.calls)
    assert caught.value.keys == (half, tagged)


def test_the_right_row_under_another_key_is_refused():
    """A place that the plane gave to another row: sound bytes, the wrong row."""
    made, other = chain("r", 2), chain("s", 2)
    plane = staged_plane(made)
    put_value(plane, "r/c1", pack_call(other.calls[1]))
    with pytest.raises(InvalidStagedCall, match=r"the row under 'r/c1#.{32}' is that of 's/c1#") as caught:
        source_on(plane).fetch(made.calls)
    assert caught.value.code == "staging_key_mismatch"


def test_a_malformed_row_is_refused():
    made = chain("r", 1)
    plane = staged_plane(made)
    put_value(plane, "r/c0", b"RRSC garbage")
    with pytest.raises(InvalidStagedCall) as caught:
        source_on(plane).fetch(made.calls)
    assert caught.value.code == "invalid_staging_row"


def test_a_packed_read_puts_every_key_into_exactly_one_place():
    made = chain("r", 4)
    plane = staged_plane(made)
    put_value(plane, "r/c1", b"")
    put_value(plane, "r/c2", pack_call(made.calls[3]))
    c0, c1, c2, c3 = map(place_of, made.calls)
    gone = place("r/c4", made.calls[0].digest)
    fetched = source_on(plane).fetch_packed([c0, c1, c2, c3, gone])
    assert set(fetched.calls) == {c0, c3}
    assert {key: error.code for key, error in fetched.invalid.items()} == {
        c1: "invalid_staging_row",
        c2: "staging_key_mismatch",
    }
    assert fetched.missing == {gone}


def test_one_read_a_call():
    class Counting(MemoryDataPlane):
        reads = 0

        def get_samples(self, *args: Any, **kwargs: Any) -> SampleBatch:
            Counting.reads += 1
            return super().get_samples(*args, **kwargs)

    plane = Counting()
    made = chain("r", 20)
    stage(registered(plane), made)
    source_on(plane).fetch(made.calls)
    assert Counting.reads == 1


def test_reading_calls_never_moves_extras():
    class Selective(MemoryDataPlane):
        def get_samples(
            self, sample_ids: Sequence[str], partition_id: str, select_fields: Any = None, **kwargs: Any
        ) -> SampleBatch:
            assert select_fields == ["call"]
            return super().get_samples(sample_ids, partition_id, select_fields, **kwargs)

    plane = Selective()
    made = chain("r", 2)
    stage(registered(plane), made)
    assert len(source_on(plane).fetch(made.calls)) == 2


def test_a_read_that_times_out_is_not_missing():
    class Silent(MemoryDataPlane):
        def get_samples(self, *args: Any, **kwargs: Any) -> SampleBatch:
            raise DataPlaneTimeout("no answer", call="get_samples", partition=STAGING, seconds=60)

    with pytest.raises(DataPlaneTimeout):
        source_on(Silent()).fetch(chain("r", 1).calls)


def test_ids_with_slashes_are_not_told_by_their_key():
    """`a/b/c` is call `c` of `a/b` and call `b/c` of `a`: the row itself says which."""
    long, short = MadeRollout("a/b"), MadeRollout("a")
    call, other = long.call([1], [2], call_id="c"), short.call([1], [2], call_id="b/c")
    assert call.staging_key == other.staging_key == "a/b/c"
    assert prove_call("a/b/c", pack_call(call)).rollout_id == "a/b"
    assert prove_call("a/b/c", pack_call(other)).rollout_id == "a"


def test_other_bytes_under_the_same_staging_key_are_not_the_call_asked_for():
    made = MadeRollout("r")
    asked, other = made.call([1], [2], call_id="c"), made.call([1], [3], call_id="c")
    plane = staged_plane(MadeRollout("r", [asked]))
    put_value(plane, "r/c", pack_call(other))
    with pytest.raises(InvalidStagedCall) as caught:
        source_on(plane).fetch([asked])
    assert caught.value.code == "staging_key_mismatch"


def test_a_bare_staging_key_says_too_little_to_fetch():
    with pytest.raises(RequestError, match="'r/c0' is not the place of a staged call"):
        source_on(staged_plane(chain("r", 1))).fetch(["r/c0"])
