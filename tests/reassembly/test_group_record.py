"""The durable answer of a group: what is written is what is read, and nothing of one run's clock is in it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from rollout_reassembler.contract.messages import FinalizedGroup, KVBatchMeta
from rollout_reassembler.reassembly.group_record import GroupRecord, GroupRecords
from tests.captures import CANONICAL, chain, finalize, memory_plane, stage
from tests.reassembly.contents import RECORDS, contents_of

ANSWER = FinalizedGroup(
    meta=KVBatchMeta(
        CANONICAL,
        sample_ids=["é/0", "\ud800"],
        fields=["input_ids"],
        sequence_lengths=[3, 1],
        tags=[{"weight_version": 2**64 - 1, "group_id": "☃"}] * 2,
    ),
    group_min_wv=0,
    group_max_wv=2**64 - 1,
    staging_keys=("é/0/c0", "a/b"),
    canonical_output_tokens=2,
    metrics={"finalize/invalid_row_rate": 1 / 3, "tiny": 5e-324},
    valid_row_count=1,
    total_row_count=2,
    rejections={"\ud800": "missing_receipt"},
    cleanup_pending=("é/0/c0",),
    timings={"row_assembly/fetch_ms": 1.5},
)


def test_an_answer_is_read_as_it_was_written_but_for_its_run():
    records = GroupRecords(memory_plane(), partition_id=CANONICAL)
    records.write("g", GroupRecord("fingerprint", ANSWER))
    found = records.lookup("g")
    assert found == GroupRecord("fingerprint", replace(ANSWER, cleanup_pending=(), timings={}))
    for field in fields(FinalizedGroup):
        assert type(getattr(found.answer, field.name)) is type(getattr(ANSWER, field.name))


def test_a_group_that_was_not_published_has_no_record():
    plane = memory_plane()
    records = GroupRecords(plane, partition_id=CANONICAL)
    assert records.lookup("g") is None
    plane.put_samples(["g"], RECORDS, tags=[{"fingerprint": "half a record"}])
    assert records.lookup("g") is None


def test_two_runs_write_the_same_record():
    written = []
    for _ in range(2):
        plane, rollouts = memory_plane(), [chain("a"), chain("b")]
        stage(plane, *rollouts)
        finalize(plane, rollouts, receipts=[None, rollouts[1].receipt()])
        written.append(contents_of(plane, RECORDS))
    assert written[0] == written[1]


def test_records_are_forgotten_when_the_trainer_says_so():
    plane, rollouts = memory_plane(), [chain("a"), chain("b")]
    stage(plane, *rollouts)
    for made in rollouts:
        finalize(plane, [made], group_id=f"group-{made.rollout_id}")
    records = GroupRecords(plane, partition_id=CANONICAL)
    assert records.group_ids() == ["group-a", "group-b"]
    records.forget(["group-a", "unknown"])
    assert records.group_ids() == ["group-b"]
    assert records.lookup("group-a") is None


def consumed_and_not(plane):
    """Four groups on record, in versions 1 to 4; the trainer has cleared the rows of the first three."""
    for version in (1, 2, 3, 4):
        made = chain(f"r{version}", weight_version=version)
        stage(plane, made)
        answer = finalize(plane, [made], group_id=f"g{version}")
        if version < 4:
            plane.clear_samples(answer.meta.sample_ids, CANONICAL)
    return GroupRecords(plane, partition_id=CANONICAL)


def test_records_expire_oldest_first_and_never_before_their_group_is_consumed():
    records = consumed_and_not(memory_plane())
    assert records.expire(keep=2) == ["g1", "g2"]
    assert records.group_ids() == ["g3", "g4"]
    assert records.expire(keep=0) == ["g3"]
    assert records.group_ids() == ["g4"]
    assert records.expire(keep=0) == []


def test_records_expire_by_the_trainers_own_count():
    records = consumed_and_not(memory_plane())
    assert records.expire(keep=0, before_weight_version=3) == ["g1", "g2"]
    with pytest.raises(ValueError, match="keep must be a number of records, 0 or more, got -1"):
        records.expire(keep=-1)


def test_records_of_two_canonical_partitions_are_apart():
    plane = memory_plane()
    GroupRecords(plane, partition_id=CANONICAL).write("g", GroupRecord("one", ANSWER))
    assert GroupRecords(plane, partition_id="other").lookup("g") is None
