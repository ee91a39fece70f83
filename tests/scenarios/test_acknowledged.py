"""What is acknowledged stays: two workers answer one admission with other bytes, in every order of the steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_reassembler.capture import CallRecorder, CaptureLedger, CommitCoords, LedgerConflict
from rollout_reassembler.contract.records import RolloutReceipt
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.reassembly.sweep import sweep_staging
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.staging.source import StagingSource
from tests.captures import STAGING, memory_plane, reassembler, staged_places
from tests.reassembly.contents import published

ASKED = [{"role": "user", "content": "?"}]
SAMPLED = {"one": [3, 4], "other": [3, 5, 6]}
"""What each of the two workers sampled behind the prompt [1, 2]."""

STEPS = {worker: [("stage", worker), ("record", worker)] for worker in SAMPLED}
FINALIZE = ("finalize", "")
AGAIN = ("stage", "one")


def interleavings(*ways: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Every order of all steps that keeps each way's own order."""
    if not any(ways):
        yield []
    for at, way in enumerate(ways):
        if way:
            for rest in interleavings(*ways[:at], way[1:], *ways[at + 1 :]):
                yield [way[0], *rest]


def orders() -> list[list[tuple[str, str]]]:
    """Finalizing comes at any time after the first record: a receipt without a call is another matter."""
    every = [[*order, AGAIN] for order in interleavings(*STEPS.values(), [FINALIZE])]
    every += list(interleavings(*STEPS.values(), [FINALIZE], [AGAIN]))
    return [order for order in every if "record" in {step for step, _ in order[: order.index(FINALIZE)]}]


def run(order: list[tuple[str, str]], plane: DataPlaneClient, ledger: CaptureLedger) -> list[int]:
    """One rollout with one admission through these steps; the tokens that its record says."""
    admission = ledger.admit("r", ASKED, model_call_id="c")
    sink = StagingSink(plane, staging_partition=STAGING)
    coords: dict[str, CommitCoords] = {}
    recorded: list[str] = []
    answer = None
    for step, worker in order:
        if step == "stage":
            recorder = CallRecorder(sink, weight_version=lambda: 1)
            call, sampled = recorder.begin_call(admission), SAMPLED[worker]
            coords[worker] = recorder.complete_call(call, [1, 2], sampled, [-0.5] * len(sampled))
            assert coords[worker].disposition == "staged"
        elif step == "record":
            try:
                ledger.record(
                    admission, coords[worker], response_id=worker, output={"role": "assistant", "content": worker}
                )
                recorded.append(worker)
            except LedgerConflict:
                assert recorded, "the first word counts"
        else:
            receipt = ledger.receipt("r", reward=1.0, response_id=recorded[0])
            answer = finalize(plane, receipt)
    assert answer is not None
    assert answer.rejections == {}
    (row,) = published(plane, answer.meta.sample_ids)
    assert row["input_ids"].tolist() == [1, 2, *SAMPLED[recorded[0]]], order
    return row["input_ids"].tolist()


def finalize(plane: DataPlaneClient, receipt: RolloutReceipt):
    return reassembler(plane).finalize_group(
        "g", ["r"], [receipt.model_dump()], [1.0], mask_sample=None, fallback_weight_version=0, prompt_idx=0
    )


def test_two_workers_one_admission_other_bytes_the_recorded_ones_are_published(tmp_path: Path) -> None:
    every = orders()
    seen = set()
    for number, order in enumerate(every):
        plane = memory_plane()
        seen.add(tuple(run(order, plane, CaptureLedger(tmp_path / str(number)))))
        sweep_staging(plane, STAGING, rollout_ids=["r"], dry_run=False)
        assert staged_places(plane) == set()
    assert seen == {(1, 2, 3, 4), (1, 2, 3, 5, 6)}, "either worker was first in some order"
    print(f"\n{len(every)} orders of stage, record and finalize")


def test_the_next_call_continues_the_bytes_that_were_recorded(tmp_path: Path) -> None:
    """The prefix is read by the chain's digests, with the other worker's bytes lying under the same staging key."""
    for first in SAMPLED:
        plane, ledger = memory_plane(), CaptureLedger(tmp_path / first)
        sink, source = StagingSink(plane, staging_partition=STAGING), StagingSource(plane, staging_partition=STAGING)
        admission = ledger.admit("r", ASKED, model_call_id="c")
        for worker in (first, *(SAMPLED.keys() - {first})):
            recorder = CallRecorder(sink, weight_version=lambda: 1)
            coords = recorder.complete_call(
                recorder.begin_call(admission), [1, 2], SAMPLED[worker], [-0.5] * len(SAMPLED[worker])
            )
            if worker == first:
                said = {"role": "assistant", "content": first}
                ledger.record(admission, coords, response_id=first, output=said)
        next_call = ledger.admit("r", [*ASKED, said, {"role": "user", "content": "go on"}])
        assert next_call.staging_digests == (ledger.read("r").records[0].digest,)
        prefix = CallRecorder(sink, weight_version=lambda: 1, source=source).begin_call(next_call).prefix_token_ids
        assert prefix.tolist() == [1, 2, *SAMPLED[first]]


def test_an_admission_of_a_ledger_that_names_no_digests_fails_its_capture_and_says_why(tmp_path: Path) -> None:
    plane, ledger = memory_plane(), CaptureLedger(tmp_path)
    sink, source = StagingSink(plane, staging_partition=STAGING), StagingSource(plane, staging_partition=STAGING)
    admission = ledger.admit("r", ASKED, model_call_id="c")
    recorder = CallRecorder(sink, weight_version=lambda: 1)
    coords = recorder.complete_call(recorder.begin_call(admission), [1, 2], [3], [-0.5])
    said = {"role": "assistant", "content": "!"}
    ledger.record(admission, coords, response_id="one", output=said)
    child = ledger.admit("r", [*ASKED, said, {"role": "user", "content": "go on"}])
    call = CallRecorder(sink, weight_version=lambda: 1, source=source).begin_call(
        child.model_copy(update={"staging_digests": ()})
    )
    assert call.failure is not None
    assert "the admission names no digests" in call.failure


@pytest.mark.parametrize("digests", [("0" * 64, "1" * 64), ("zz",)])
def test_an_admission_names_one_digest_a_staged_call_of_its_chain(tmp_path: Path, digests: tuple[str, ...]) -> None:
    from rollout_reassembler.capture import CaptureAdmission

    with pytest.raises(ValueError, match=r"digests for a chain of 1|should match pattern"):
        CaptureAdmission(
            rollout_id="r",
            model_call_id="d",
            resolution="resolved",
            parent_call_id="c",
            prev_len=3,
            parent_chain_hash="0" * 64,
            staging_chain=("r/c",),
            staging_digests=digests,
        )
