"""A rollout that branched, with `branches="all"`: a row for each of its chains, and one vote for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_reassembler import ReassemblyRequest, RolloutReassembler, RolloutReassemblerActorConfig
from rollout_reassembler.contract.errors import GroupConflict, PlaneLost, RequestError
from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.spans import decode_spans
from rollout_reassembler.trainer.rows import iter_batches
from tests.captures import (
    CANONICAL,
    PAD,
    STAGING,
    MadeRollout,
    chain,
    collect,
    finalize,
    memory_plane,
    place_in,
    reassembler,
    stage,
    staged_keys,
)
from tests.reassembly.contents import contents_of, published


def branched(rollout_id: str = "a") -> MadeRollout:
    """Two turns that share the first, a sub-agent, and a history that was compacted: four leaves, three roots."""
    made = MadeRollout(rollout_id)
    first = made.call([1, 2], [3], call_id="first")
    made.call([4], [5, 6], parent=first, call_id="second")
    made.call([7], [8], parent=first, call_id="other")
    made.call([9], [10, 11], call_id="tool", weight_version=4)
    made.call([1, 12], [13], call_id="after")
    return made


def all_of(plane: MemoryDataPlane, *rollouts: MadeRollout, **request: Any) -> FinalizedGroup:
    stage(plane, *rollouts)
    return finalize(plane, rollouts, branches="all", **request)


def test_each_chain_is_a_row_and_each_sampled_token_has_one_owner() -> None:
    plane = memory_plane()
    answer = all_of(plane, branched(), chain("b", 2), group_id="g", rewards=[1.0, 0.0])
    assert answer.meta.sample_ids == ["g_g0_s0", "g_g0_s1", "g_g0_s2", "g_g0_s3", "g_g1_s0"]
    assert answer.rows_by_rollout == (4, 1)
    assert (answer.total_row_count, answer.valid_row_count, answer.canonical_output_tokens) == (5, 5, 13)
    rows = published(plane, answer.meta.sample_ids)
    assert [row["input_ids"].tolist() for row in rows[:4]] == [
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 7, 8],
        [9, 10, 11],
        [1, 12, 13],
    ]
    assert [row["token_mask"].tolist() for row in rows[:4]] == [
        [0, 0, 1, 0, 1, 1],
        [0, 0, 0, 0, 1],
        [0, 1, 1],
        [0, 0, 1],
    ]
    assert [row["total_reward"] for row in rows] == [1, 1, 1, 1, 0]
    assert staged_keys(plane) == set()


def test_rows_say_whose_they_are_and_carry_their_proof() -> None:
    plane = memory_plane()
    answer = all_of(plane, branched())
    tags = plane.get_tags(answer.meta.sample_ids, CANONICAL)
    assert [(t["rollout"], t["segment"], t["segments"], t["rollout_tokens"]) for t in tags if t] == [
        ("a", j, 4, 7) for j in range(4)
    ]
    assert [t["weight_version"] for t in tags if t] == [1] * 4
    assert (answer.group_min_wv, answer.group_max_wv) == (1, 4)
    spans = [decode_spans(row["spans"]) for row in published(plane, answer.meta.sample_ids)]
    assert all(spans)


def test_the_metrics_say_how_much_of_what_was_sampled_is_trained() -> None:
    made = branched()
    made.call([7], [9, 9, 9], parent=made.calls[0], call_id="again")
    metrics = all_of(memory_plane(), made, chain("b", 1)).metrics
    assert metrics["branches/rows_per_rollout"] == 2.5
    assert metrics["branches/sampled_tokens"] == 13
    assert metrics["branches/trained_fraction"] == 12 / 13, "the retry that was answered again is not"


def test_a_rejected_rollout_is_one_placeholder() -> None:
    plane = memory_plane()
    made = branched()
    answer = all_of(plane, made, chain("b", 1), receipts=[made.receipt(), None], mask_sample=[True, False])
    assert answer.rows_by_rollout == (4, 1)
    rows = published(plane, answer.meta.sample_ids)
    assert [bool(row["mask_sample"]) for row in rows] == [True] * 5
    assert rows[4]["input_ids"].tolist() == [PAD]
    assert answer.rejections == {"b": "missing_receipt"}


@pytest.mark.parametrize("fault", ["garbled", "missing"])
def test_what_cannot_be_proven_costs_its_own_chain(fault: str) -> None:
    plane, made = memory_plane(), branched()
    stage(plane, made)
    place = place_in(plane, "a/tool")
    if fault == "garbled":
        plane.put_samples([place], STAGING, {"call": [b"garbage"]})
    else:
        plane.clear_samples([place], STAGING)
    answer = finalize(plane, [made], branches="all", staged_on=plane.epoch())
    assert (answer.rejections, answer.rows_by_rollout) == ({}, (3,))
    code = {"garbled": "invalid_staging_row", "missing": "missing_staging_row"}[fault]
    assert answer.metrics[f"branches/dropped_calls_{code}"] == 1
    assert answer.to_collect == ("a",)
    collect(plane)
    assert staged_keys(plane) == set()


def test_the_terminals_chain_must_be_sound() -> None:
    plane, made = memory_plane(), branched()
    stage(plane, made)
    plane.put_samples([place_in(plane, "a/after")], STAGING, {"call": [b"garbage"]})
    assert finalize(plane, [made], branches="all").rejections == {"a": "invalid_staging_row"}


def test_a_side_chain_that_went_with_its_plane_is_lost_and_not_dropped() -> None:
    plane, made = memory_plane(), branched()
    stage(plane, made)
    plane.clear_samples([place_in(plane, "a/tool")], STAGING)
    with pytest.raises(PlaneLost, match="1 of its 5 staged rows are missing"):
        finalize(plane, [made], branches="all", staged_on="another epoch")


def test_the_same_request_again_is_the_same_answer_when_staging_is_gone() -> None:
    plane = memory_plane()
    first = all_of(plane, branched(), chain("b", 1))
    rows = contents_of(plane, CANONICAL)
    again = finalize(plane, [branched(), chain("b", 1)], branches="all")
    assert again == first
    assert contents_of(plane, CANONICAL) == rows
    plane.clear_samples(first.meta.sample_ids, CANONICAL)
    assert finalize(plane, [branched(), chain("b", 1)], branches="all") == first
    assert contents_of(plane, CANONICAL) == {}, "what a trainer has consumed stays so"


def test_other_branches_are_another_request() -> None:
    plane, made = memory_plane(), branched()
    stage(plane, made)
    finalize(plane, [made], branches="all")
    with pytest.raises(GroupConflict, match="branches was all and is terminal here"):
        finalize(plane, [made])


def test_a_setting_is_the_default_of_its_requests() -> None:
    plane, made = memory_plane(), branched()
    stage(plane, made)
    everything = reassembler(plane, branches="all")
    request = ReassemblyRequest("g", ("a",), ("row",), (made.receipt(),), (1.0,), 0, 0)
    assert everything.finalize(request).meta.sample_ids == [f"row_s{j}" for j in range(4)]


def test_a_reassembler_is_set_by_a_config_as_by_its_parts() -> None:
    plane, made = memory_plane(), branched()
    stage(plane, made)
    config = RolloutReassemblerActorConfig(CANONICAL, STAGING, PAD, branches="all")
    request = ReassemblyRequest("g", ("a",), None, (made.receipt(),), (1.0,), 0, 0)
    answer = RolloutReassembler.from_config(plane, config).finalize(request)
    assert answer.rows_by_rollout == (4,)
    assert reassembler(plane, branches="all").finalize(request) == answer


@pytest.mark.parametrize("value", ["every", True, 1])
def test_what_branches_may_be_is_said(value: Any) -> None:
    with pytest.raises(RequestError, match=r"group 'g': branches must be one of 'terminal', 'all', or None, got"):
        finalize(memory_plane(), [branched()], branches=value)
    with pytest.raises(ValueError, match=r"branches must be one of 'terminal', 'all', got"):
        RolloutReassemblerActorConfig("canonical", "staging", 0, branches=value)


def test_routes_that_a_trainer_assembles_are_for_one_row_a_rollout() -> None:
    deferred = {"router_replay_enabled": True, "defer_routed_experts_to_policy": True}
    with pytest.raises(ValueError, match="branches='all' cannot go with defer_routed_experts_to_policy=True"):
        reassembler(memory_plane(), branches="all", **deferred)
    with pytest.raises(RequestError, match="group 'g': branches='all' cannot go with"):
        finalize(memory_plane(), [branched()], branches="all", options=deferred)


def test_a_side_chain_that_is_too_long_is_no_row() -> None:
    plane, made = memory_plane(), branched()
    stage(plane, made)
    answer = finalize(plane, [made], branches="all", options={"max_seq_len": 5})
    rows = published(plane, answer.meta.sample_ids)
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2, 3, 7, 8], [9, 10, 11], [1, 12, 13]]
    assert rows[0]["token_mask"].tolist() == [0, 0, 1, 0, 1], "the first call has another owner then"
    terminal = made.calls[1]
    stage(plane, made)
    receipts = [made.receipt(terminal)]
    refused = finalize(plane, [made], group_id="h", receipts=receipts, branches="all", options={"max_seq_len": 5})
    assert refused.rejections == {"a": "exceeds_max_seq_len"}


def test_a_batch_gives_a_rollout_one_index_and_one_weight_however_it_was_cut() -> None:
    totals = []
    for branches in ("terminal", "all"):
        plane = memory_plane()
        made = branched()
        stage(plane, made, chain("b", 2))
        answer = finalize(plane, [made, chain("b", 2)], branches=branches)
        (batch,) = iter_batches(plane, answer.meta, batch_size=8, pad_token_id=PAD, loss_weight="rollout")
        weights = (batch.loss_weight * batch.token_mask).sum(1)
        index = batch.rollout_index
        totals.append([float(weights[index == rollout].sum()) for rollout in (0, 1)])
    np.testing.assert_allclose(totals, np.ones((2, 2)), rtol=1e-6)
