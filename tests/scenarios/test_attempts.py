"""A rollout that is dispatched again under its own id, over a plane and a ledger that outlived the crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_reassembler.capture import CallRecorder, CaptureLedger, LedgerConflict
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.rows import register_canonical_partition
from rollout_reassembler.reassembly.sweep import sweep_staging
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.staging.source import StagingSource
from tests.capture.world import World, user
from tests.captures import CANONICAL, STAGING, reassembler


def _restored(world: World, directory: Path) -> None:
    """Another plane with what the checkpoint holds, in place of the world's."""
    world.plane = MemoryDataPlane()
    world.plane.load_checkpoint(str(directory))
    world.sink = StagingSink(world.plane, staging_partition=STAGING)
    world.source = StagingSource(world.plane, staging_partition=STAGING)
    world.recorder = CallRecorder(world.sink, weight_version=lambda: world.version, source=world.source)


def test_an_unfinished_rollout_is_run_again_over_a_restored_plane(tmp_path: Path) -> None:
    world = World(tmp_path / "ledger")
    register_canonical_partition(world.plane, CANONICAL)
    a = world.call([user("q")], "a", generated=[50])
    world.plane.save_checkpoint(str(tmp_path / "checkpoint"))
    lost = world.call([*a.messages, user("t")], "b", generated=[51])
    world.ledger.admit("r", [*lost.messages, user("t")])  # in flight when all of it died

    world.ledger = CaptureLedger(tmp_path / "ledger")
    _restored(world, tmp_path / "checkpoint")
    epoch = world.plane.epoch()
    world.ledger.begin_attempt("r", "after the crash")
    again = world.call([user("q")], "a", generated=[60])
    last = world.call([*again.messages, user("t")], "b", generated=[61])
    receipt = world.receipt(response_id=f"resp-{last.id}")
    assert [record.model_call_id for record in receipt.manifest] == [again.id, last.id]

    group = reassembler(world.plane).finalize_group(
        "g",
        ["r"],
        [receipt.model_dump()],
        [1.0],
        mask_sample=None,
        fallback_weight_version=0,
        prompt_idx=0,
        staged_on=epoch,
    )
    assert (group.valid_row_count, group.rejections) == (1, {})
    assert world.plane.get_data(group.meta, ["input_ids"])["input_ids"][0].tolist() == [10, 11, 60, 10, 11, 61]
    assert [key.rpartition("#")[0] for key in world.plane.list_samples(STAGING)] == [a.coords.staging_key]
    assert len(sweep_staging(world.plane, STAGING, rollout_ids=["r"], dry_run=False).keys) == 1
    assert world.plane.list_samples(STAGING) == {}


def test_an_attempt_begins_clean_and_what_was_admitted_before_belongs_to_nobody(tmp_path: Path) -> None:
    world = World(tmp_path)
    a = world.call([user("q")], "a", model_call_id="c0")
    late = world.ledger.admit("r", [*a.messages, user("t")])
    world.ledger.fail("r", "the agent timed out")
    assert world.ledger.begin_attempt("r", "two") == "two"
    view = world.ledger.read("r")
    assert (view.attempt, view.records, view.failures, view.pending) == ("two", (), (), ())
    b = world.call([*a.messages, user("t")], "b")
    assert (b.admission.resolution, b.admission.new_root_reason) == ("root", None)
    coords = world.recorder.complete_call(world.recorder.begin_call(late), [10, 11, 50, 51, 1], [2], [-0.5])
    for close in (
        lambda: world.ledger.record(late, coords, response_id="late", output={"content": "late"}),
        lambda: world.ledger.abort(late),
        lambda: world.ledger.record(a.admission, a.coords, response_id="resp-c0", output={"content": "a"}),
    ):
        with pytest.raises(LedgerConflict, match="belongs to an attempt before 'two'"):
            close()
    with pytest.raises(LedgerConflict, match="admitted before"):
        world.ledger.admit("r", [user("q")], model_call_id="c0")
    assert world.receipt().terminal_model_call_id == b.id


def test_an_attempt_is_begun_once_by_its_name_and_never_gone_back_to(tmp_path: Path) -> None:
    here, there = World(tmp_path), World(tmp_path)
    here.ledger.begin_attempt("r", "one")
    a = here.call([user("q")], "a")
    there.ledger.begin_attempt("r", "one")
    assert there.receipt().terminal_model_call_id == a.id
    two = there.ledger.begin_attempt("r")
    assert two != there.ledger.begin_attempt("r")
    for name in ("one", two):
        with pytest.raises(LedgerConflict, match=f"attempt '{name}' of rollout 'r' was followed by another one"):
            here.ledger.begin_attempt("r", name)
    assert here.ledger.read("r").records == ()
