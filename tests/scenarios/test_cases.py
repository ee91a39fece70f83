"""CASES: faults from the field, each by its smallest input. `[prompt]|[generated]` is one call.

Those that capture and the ledger decide (which call is whose parent, which one is the terminal) are
tests of theirs; here are the ones that show once calls are staged and a receipt is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.bounds import parse_receipt
from rollout_reassembler.contract.errors import DataPlaneTimeout, VerificationError
from rollout_reassembler.contract.records import CallRecord, StagedCall, seal_call
from rollout_reassembler.data_plane.base import SampleBatch
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.verify import LinearizedRow, verify_and_linearize
from rollout_reassembler.staging.codec import pack_call
from rollout_reassembler.staging.places import place_of
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
    registered,
    stage,
    staged_keys,
)
from tests.reassembly.contents import contents_of, published, whole_plane
from tests.reassembly.crash_plane import CrashPlane
from tests.staging.unchecked import packed_unchecked, resigned


def linearized(made: MadeRollout, terminal: StagedCall | None = None) -> LinearizedRow:
    return verify_and_linearize(parse_receipt(made.receipt(terminal)), made.calls)


def code_of(made: MadeRollout, terminal: StagedCall | None = None) -> str:
    with pytest.raises(VerificationError) as caught:
        linearized(made, terminal)
    return caught.value.code


def rejection(plane: MemoryDataPlane, made: MadeRollout, **request: Any) -> str | None:
    return finalize(plane, [made], **request).rejections.get(made.rollout_id)


# --- chains and lineage -----------------------------------------------------------------------------


def test_three_calls_that_extend_each_other_are_one_chain():
    """`[1]|[2]`, `[1,2,3]|[4]`, `[1,2,3,4,5]|[6]`."""
    made = MadeRollout("r")
    first = made.call([1], [2])
    second = made.call([3], [4], parent=first)
    made.call([5], [6], parent=second)
    row = linearized(made)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.token_mask.tolist() == [0, 1, 0, 1, 0, 1]
    assert row.model_call_ids == ["c0", "c1", "c2"]
    assert row.prompt_len == 1


def test_a_token_sampled_behind_another_prefix_is_no_continuation():
    """`[1]|[2,3]`, then `[1,3,4]|[5]`: token 3 was sampled behind [1, 2]. Cut to fit, the chain says no."""
    made = MadeRollout("r")
    first = made.call([1], [2, 3])
    cut = seal_call(
        rollout_id="r",
        model_call_id="c1",
        token_ids_delta=[5],
        token_mask_delta=[1.0],
        generation_log_probs_delta=[-1.0],
        weight_version=1,
        parent=first,
        prefix_token_ids=[1, 3, 4],
    )
    made.calls.append(cut)
    assert code_of(made, cut) == "cumulative_hash_mismatch"


def test_a_child_behind_other_tokens_of_the_same_length_is_refused():
    """Parent `[1,2,3]`, child prompt `[1,9,3,4]`: the length fits, the tokens do not."""
    made = MadeRollout("r")
    parent = made.call([1, 2], [3])
    other = MadeRollout("r")
    forged = other.call([1, 9], [3])
    child = other.call([4], [5], parent=forged, call_id="c1")
    made.calls.append(child)
    assert child.prev_len == parent.cum_len
    assert code_of(made, child) == "chain_hash_mismatch"


def test_a_dead_branch_is_verified_and_never_joins_the_row():
    """Two calls with identical messages; one has a child, the childless one is a dead branch."""
    made = MadeRollout("r")
    root = made.call([1], [2])
    made.call([3], [9, 9], parent=root, call_id="dead")
    kept = made.call([3], [4], parent=root, call_id="kept")
    made.call([5], [6], parent=kept)
    row = linearized(made)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.model_call_ids == ["c0", "kept", "c3"]


def test_an_abandoned_call_cannot_hide_bad_bytes():
    made = MadeRollout("r")
    root = made.call([1], [2])
    dead = made.call([3], [9], parent=root, call_id="dead")
    made.call([3], [4], parent=root)
    plane = memory_plane()
    stage(plane, made)
    plane.put_samples([place_in(plane, "r/dead")], STAGING, {"call": [pack_call(dead)[:-1]]})
    assert rejection(plane, made) == "invalid_staging_row"


def test_two_agents_interleaved_in_one_rollout_are_two_chains():
    """A1 B1 A2 B2: the row is the chain of the agent whose call is the terminal."""
    made = MadeRollout("r")
    a1 = made.call([1], [2], call_id="A1")
    b1 = made.call([11], [12], call_id="B1")
    a2 = made.call([3], [4], parent=a1, call_id="A2")
    b2 = made.call([13], [14], parent=b1, call_id="B2")
    assert linearized(made, a2).token_ids.tolist() == [1, 2, 3, 4]
    assert linearized(made, b2).token_ids.tolist() == [11, 12, 13, 14]


def test_a_call_that_generated_nothing_is_harmless_off_the_chain_and_refused_on_it():
    made = MadeRollout("r")
    empty = made.call([1, 2], [], call_id="empty")
    again = made.call([1, 2], [3], call_id="again")
    assert linearized(made, again).token_ids.tolist() == [1, 2, 3]
    child = made.call([4], [5], parent=empty)
    assert code_of(made, child) == "empty_generation"


def test_the_first_turn_sent_again_after_later_turns_is_a_new_root():
    made = MadeRollout("r")
    first = made.call([1], [2])
    made.call([3], [4], parent=first)
    again = made.call([1], [5], call_id="again")
    row = linearized(made, again)
    assert row.token_ids.tolist() == [1, 5]
    assert row.model_call_ids == ["again"]


def test_a_call_off_the_chain_has_no_say_in_the_weight_version():
    """Reference: 9 became 2."""
    made = MadeRollout("r")
    made.call([1], [2], weight_version=2, call_id="abandoned")
    made.call([1], [3], weight_version=9)
    plane = memory_plane()
    stage(plane, made)
    answer = finalize(plane, [made])
    assert (answer.group_min_wv, answer.group_max_wv) == (9, 9)
    assert plane.list_samples(CANONICAL)["g_g0"]["weight_version"] == 9


def test_a_call_that_the_receipt_does_not_list_costs_nothing_when_its_row_is_gone():
    made = chain("r", 2)
    receipt = made.receipt()
    made.call([1], [2], call_id="unlisted")
    plane = memory_plane()
    stage(plane, made)
    plane.clear_samples([place_in(plane, "r/unlisted")], STAGING)
    assert rejection(plane, made, receipts=[receipt]) is None


def test_a_call_off_the_chain_that_the_receipt_lists_must_be_there():
    """The receipt demands it: an abandoned call cannot hide bad bytes, nor hide altogether."""
    made = chain("r", 2)
    made.call([1], [2], call_id="abandoned")
    plane = memory_plane()
    stage(plane, made)
    plane.clear_samples([place_in(plane, "r/abandoned")], STAGING)
    assert rejection(plane, made, receipts=[made.receipt(made.calls[1])]) == "missing_staging_row"


# --- tokens, masks, log probabilities ---------------------------------------------------------------


def test_a_one_token_completion_is_trained():
    made = MadeRollout("r")
    made.call([1, 2], [7])
    row = linearized(made)
    assert (row.token_ids.tolist(), row.token_mask.tolist()) == ([1, 2, 7], [0, 0, 1])


def test_a_completion_of_length_zero_is_no_training_row():
    made = MadeRollout("r")
    made.call([1, 2], [])
    plane = memory_plane()
    stage(plane, made)
    assert rejection(plane, made) == "rebuild_failed:empty_generation"


@pytest.mark.parametrize("log_probs", [[0.0] * 2 + [-1.0] * 2, [], [0.0] * 2], ids=["one short", "none", "carry only"])
def test_log_probabilities_that_are_short_reject_that_rollout_only(log_probs):
    """Turn 1 has them all, turn 2 does not; the batch is never blanked."""
    short, good = chain("short", 2), chain("good", 2)
    plane = memory_plane()
    stage(plane, short, good)
    value = packed_unchecked(resigned({**short.calls[1].model_dump(), "generation_log_probs_delta": log_probs}))
    plane.put_samples([place_in(plane, "short/c1")], STAGING, {"call": [value]})
    answer = finalize(plane, [short, good])
    assert answer.rejections == {"short": "invalid_staging_row"}
    row = published(plane, answer.meta.sample_ids)[1]
    assert row["generation_logprobs"].tolist() == [0] * 5 + [-0.5, -0.75, -1.0] + [0] * 2 + [-0.5, -0.75, -1.0]


def test_a_fabricated_token_is_never_trainable():
    """`[0]` with no generation behind it: whoever makes up a token has no log probability for it."""
    made, lost = MadeRollout("r"), chain("lost")
    made.call([0], [])
    plane = memory_plane()
    stage(plane, made)
    answer = finalize(plane, [made, lost], receipts=[made.receipt(), None])
    for row in published(plane, answer.meta.sample_ids):
        assert not row["token_mask"].any()
        assert row["sample_mask"] == 0
        assert row["mask_sample"]


# --- groups -----------------------------------------------------------------------------------------


def test_a_masked_row_does_not_vote_and_keeps_its_reward():
    """Rewards `[1,1,0,0]`, row 2 masked."""
    rollouts = [chain(f"r{index}") for index in range(4)]
    plane = memory_plane()
    stage(plane, *rollouts)
    answer = finalize(plane, rollouts, rewards=[1, 1, 0, 0], mask_sample=(False, False, True, False))
    rows = published(plane, answer.meta.sample_ids)
    assert [bool(row["mask_sample"]) for row in rows] == [False, False, True, False]
    assert [float(row["total_reward"]) for row in rows] == [1, 1, 0, 0]
    assert rows[2]["input_ids"].tolist() == rollouts[2].tokens()


def test_a_placeholder_is_masked_everywhere():
    rollouts = [chain("a"), chain("b")]
    plane = memory_plane()
    stage(plane, rollouts[0])
    answer = finalize(plane, rollouts, receipts=[rollouts[0].receipt(), None], loss_multiplier=2.0)
    row = published(plane, answer.meta.sample_ids)[1]
    assert (row["token_mask"].tolist(), row["generation_logprobs"].tolist()) == ([0.0], [0.0])
    assert row["sample_mask"] == 0
    assert row["mask_sample"]


def test_four_rollouts_and_three_results_are_four_rows_with_their_own_rewards():
    rollouts = [chain(f"r{index}") for index in range(4)]
    plane = memory_plane()
    stage(plane, *rollouts)
    receipts = [made.receipt() for made in rollouts]
    receipts[1] = None
    answer = finalize(plane, rollouts, receipts=receipts, rewards=[0.1, None, 0.3, 0.4])
    rows = published(plane, answer.meta.sample_ids)
    assert [float(row["total_reward"]) for row in rows] == pytest.approx([0.1, 0.0, 0.3, 0.4])
    assert [row["input_ids"].tolist() for row in rows] == [
        rollouts[0].tokens(),
        [PAD],
        rollouts[2].tokens(),
        rollouts[3].tokens(),
    ]


BAD_REWARDS = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "missing": None,
    "too large for binary32": 3.5e38,
    "an integer too large for a float": 10**400,
    "an integer too large to print": 10**5000,
}


@pytest.mark.parametrize("reward", BAD_REWARDS.values(), ids=BAD_REWARDS)
def test_a_reward_that_is_no_finite_number_rejects_its_rollout(reward):
    bad, good = chain("bad"), chain("good")
    plane = memory_plane()
    stage(plane, bad, good)
    answer = finalize(plane, [bad, good], rewards=[reward, 0.5])
    assert answer.rejections == {"bad": "invalid_reward"}
    rows = published(plane, answer.meta.sample_ids)
    assert [float(row["total_reward"]) for row in rows] == [0.0, 0.5]
    assert rows[0]["input_ids"].tolist() == [PAD]
    assert staged_keys(plane) == set()


@pytest.mark.parametrize("reward", [0, 1, -1, 0.25, -3.4e38, np.float32(0.5), np.float64(0.5), np.int64(1)], ids=repr)
def test_a_reward_that_is_a_finite_number_is_published(reward):
    made = chain("r")
    plane = memory_plane()
    stage(plane, made)
    answer = finalize(plane, [made], rewards=[reward])
    assert published(plane, answer.meta.sample_ids)[0]["total_reward"] == np.float32(reward)


@pytest.mark.parametrize(
    "receipt",
    [
        "receipt",
        b"receipt",
        7,
        [],
        {},
        {"manifest": "c0"},
        chain("bad").receipt(manifest="c0,c1,c2"),
        chain("bad").receipt(manifest=[]),
        chain("bad").receipt(manifest=[1]),
        chain("bad").receipt(reward=10**5000),
        chain("bad").receipt(terminal_attribution_reason="\ud800"),
        chain("bad").receipt(rollout_id=["bad"]),
        object(),
        type,
    ],
    ids=lambda receipt: type(receipt).__name__,
)
def test_a_receipt_of_the_wrong_type_is_one_rollouts_rejection(receipt):
    bad, good = chain("bad"), chain("good")
    plane = memory_plane()
    stage(plane, bad, good)
    answer = finalize(plane, [bad, good], receipts=[receipt, good.receipt()])
    assert answer.rejections == {"bad": "invalid_receipt"}
    assert answer.valid_row_count == 1
    collect(plane)
    assert staged_keys(plane) == set()


def test_a_group_with_every_rollout_rejected_is_published_and_cleared():
    rollouts = [chain(f"r{index}") for index in range(3)]
    plane = memory_plane()
    stage(plane, *rollouts)
    answer = finalize(plane, rollouts, receipts=[None, "x", {}], fallback_weight_version=5)
    assert answer.valid_row_count == 0
    assert answer.total_row_count == 3
    assert (answer.group_min_wv, answer.group_max_wv) == (5, 5)
    rows = published(plane, answer.meta.sample_ids)
    assert all(row["prompt_ids_for_adv"].tolist() == [PAD] for row in rows)
    assert all(tags["weight_version"] == 5 for tags in plane.list_samples(CANONICAL).values())
    collect(plane)
    assert staged_keys(plane) == set()


@pytest.mark.parametrize(
    ("rollout_id", "call_id"),
    [("группа/0", "é"), ("a/b/c", "d/e"), ("/", "/"), ("..", "../x"), ("a*", "*"), (" ", "\n"), ("😀" * 200, "x")],
)
def test_unicode_and_slashes_in_ids(rollout_id, call_id):
    made = MadeRollout(rollout_id)
    made.call([1], [2], call_id=call_id)
    lost = MadeRollout(rollout_id + "!")
    lost.call([1], [2], call_id=call_id)
    plane = memory_plane()
    stage(plane, made, lost)
    answer = finalize(plane, [made, lost], group_id=rollout_id, receipts=[made.receipt(), None])
    assert answer.rejections == {lost.rollout_id: "missing_receipt"}
    assert answer.meta.sample_ids == [f"{rollout_id}_g0", f"{rollout_id}_g1"]
    assert published(plane, answer.meta.sample_ids)[0]["input_ids"].tolist() == [1, 2]
    collect(plane)
    assert staged_keys(plane) == set()


def test_ids_whose_keys_collide_cost_nobody_anything():
    """`a/b` + `c` and `a` + `b/c` share the staging key `a/b/c`; each has a place of its own."""
    long, short = MadeRollout("a/b"), MadeRollout("a")
    long.call([1], [2], call_id="c")
    short.call([1], [3], call_id="b/c")
    plane = memory_plane()
    stage(plane, long, short)
    answer = finalize(plane, [long, short])
    assert answer.rejections == {}
    assert [row["input_ids"].tolist() for row in published(plane, answer.meta.sample_ids)] == [[1, 2], [1, 3]]
    assert staged_keys(plane) == set()


def test_a_rollout_cannot_take_a_row_of_a_longer_named_one():
    """Rollout `a` lists `a/b/c` as its call `b/c`; the row there is call `c` of `a/b`, in another group."""
    long, short = MadeRollout("a/b"), MadeRollout("a")
    call = long.call([1], [2], call_id="c")
    receipt = {**long.receipt(), "rollout_id": "a", "terminal_model_call_id": "b/c"}
    receipt["manifest"] = [{**receipt["manifest"][0], "model_call_id": "b/c"}]
    plane = memory_plane()
    stage(plane, long)
    answer = finalize(plane, [short], receipts=[receipt])
    assert answer.rejections == {"a": "rebuild_failed:snapshot_identity_mismatch"}
    assert staged_keys(plane) == {call.staging_key}


@pytest.mark.parametrize("receipt", [None, "unreadable", {"rollout_id": "bad"}])
def test_a_rejected_rollouts_own_rows_are_cleared_also_without_a_receipt(receipt):
    bad, stranger = chain("bad"), chain("stranger")
    plane = memory_plane()
    stage(plane, bad, stranger)
    finalize(plane, [bad], receipts=[receipt])
    collect(plane)
    assert staged_keys(plane) == {call.staging_key for call in stranger.calls}


def test_a_receipt_that_names_another_groups_keys_clears_nothing():
    liar, stranger = chain("liar"), chain("stranger")
    plane = memory_plane()
    stage(plane, liar, stranger)
    stolen = [{**row, "staging_key": f"stranger/c{at}"} for at, row in enumerate(liar.receipt()["manifest"])]
    before = staged_keys(plane)
    assert rejection(plane, liar, receipts=[liar.receipt(manifest=stolen)]) == "foreign_staging_key"
    assert staged_keys(plane) == before


def test_a_receipt_that_misnames_its_own_key_is_a_key_mismatch():
    made = chain("r")
    receipt = made.receipt()
    receipt["manifest"][0]["staging_key"] = "r/c9"
    plane = memory_plane()
    stage(plane, made)
    assert rejection(plane, made, receipts=[receipt]) == "staging_key_mismatch"
    collect(plane)
    assert staged_keys(plane) == set()


# --- retry and faults -------------------------------------------------------------------------------


def test_a_read_that_times_out_is_not_missing():
    """Reference: placeholders published, good rows deleted."""
    inner, rollouts = memory_plane(), [chain("a"), chain("b")]
    stage(inner, *rollouts)
    plane = CrashPlane(inner)
    before = whole_plane(inner)
    plane.fail("get_samples")
    with pytest.raises(DataPlaneTimeout, match="group 'g'"):
        finalize(plane, rollouts)
    assert whole_plane(inner) == before
    assert finalize(plane, rollouts).valid_row_count == 2


def test_the_same_group_finalized_again_after_success_is_the_same_answer():
    """Reference: good rows overwritten with placeholders."""
    plane, rollouts = memory_plane(), [chain("a"), chain("b")]
    stage(plane, *rollouts)
    first = finalize(plane, rollouts)
    rows = contents_of(plane, CANONICAL)
    assert finalize(plane, rollouts) == first
    assert contents_of(plane, CANONICAL) == rows


def test_a_clear_that_fails_after_publication_is_said_in_the_answer():
    inner, made = memory_plane(), chain("r")
    stage(inner, made)
    plane = CrashPlane(inner)
    plane.fail("clear_samples")
    answer = finalize(plane, [made])
    assert answer.valid_row_count == 1
    assert set(answer.cleanup_pending) == {place_of(call) for call in made.calls}
    assert finalize(plane, [made]).cleanup_pending == ()


# --- weight versions --------------------------------------------------------------------------------


def test_spans_say_which_tokens_had_which_weight_version():
    """A call begun at version 7 and answered at 8 carries 7; the next one 8."""
    made = MadeRollout("r")
    first = made.call([1, 2], [3], weight_version=7)
    made.call([4], [5, 6], parent=first, weight_version=8)
    row = linearized(made)
    assert [tuple(span) for span in row.weight_version_spans] == [("c0", 0, 3, 7), ("c1", 3, 6, 8)]
    assert row.weight_versions == [7, 8]
    plane = memory_plane()
    stage(plane, made)
    answer = finalize(plane, [made])
    assert (answer.group_min_wv, answer.group_max_wv) == (7, 8)


# --- the data plane ---------------------------------------------------------------------------------


class Treacherous(MemoryDataPlane):
    """A plane whose reads of staged calls may be changed on their way, once or always."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.change: Any = lambda read, batch: batch

    def get_samples(self, sample_ids: Any, partition_id: str, *args: Any, **kwargs: Any) -> SampleBatch:
        batch = super().get_samples(sample_ids, partition_id, *args, **kwargs)
        if partition_id != STAGING:
            return batch
        self.reads += 1
        return self.change(self.reads, batch)


def treacherous_plane(*rollouts: MadeRollout) -> Treacherous:
    plane = Treacherous()
    stage(registered(plane), *rollouts)
    return plane


def without_last_row(read: int, batch: SampleBatch) -> SampleBatch:
    return SampleBatch(batch.sample_ids[:-1], {name: column[:-1] for name, column in batch.columns.items()})


def test_two_rows_for_three_keys_and_no_error_are_noticed():
    """Not even the plane's own word is taken on what is missing."""
    made = chain("r", 3)
    plane = treacherous_plane(made)
    plane.change = without_last_row
    assert rejection(plane, made) == "missing_staging_row"


def test_two_rows_for_three_keys_once_cost_nothing():
    made = chain("r", 3)
    plane = treacherous_plane(made)
    plane.change = lambda read, batch: without_last_row(read, batch) if read == 1 else batch
    assert rejection(plane, made) is None
    assert plane.reads == 2


def test_a_healthy_group_is_read_once():
    rollouts = [chain("a"), chain("b")]
    plane = treacherous_plane(*rollouts)
    finalize(plane, rollouts)
    assert plane.reads == 1


def recycled(batch: SampleBatch) -> SampleBatch:
    """Every key holds the bytes of the next one."""
    values = batch["call"]
    return SampleBatch(batch.sample_ids, {"call": [*values[1:], values[0]]}, batch.missing)


def test_another_samples_bytes_under_the_right_key_are_noticed():
    made, good = chain("r", 3), chain("good", 1)
    plane = treacherous_plane(made, good)
    plane.change = lambda read, batch: recycled(batch)
    answer = finalize(plane, [made])
    assert answer.rejections == {"r": "staging_key_mismatch"}
    assert finalize(plane, [good], group_id="other").rejections == {}


def test_a_place_reused_in_the_middle_of_one_read_costs_nothing():
    made = chain("r", 3)
    plane = treacherous_plane(made)
    plane.change = lambda read, batch: recycled(batch) if read == 1 else batch
    answer = finalize(plane, [made])
    assert answer.valid_row_count == 1
    assert published(plane, answer.meta.sample_ids)[0]["input_ids"].tolist() == made.tokens()


def test_a_key_cleared_by_another_client_before_the_read_is_one_rollouts_loss():
    made, good = chain("r", 3), chain("good")
    plane = treacherous_plane(made, good)
    plane.clear_samples([place_in(plane, "r/c1")], STAGING)
    answer = finalize(plane, [made, good])
    assert answer.rejections == {"r": "missing_staging_row"}
    collect(plane)
    assert staged_keys(plane) == set()


def test_a_put_that_raises_in_the_middle_is_mended_by_the_same_request():
    inner, rollouts = memory_plane(), [chain(f"r{index}") for index in range(4)]
    stage(inner, *rollouts)
    undisturbed = memory_plane()
    stage(undisturbed, *rollouts)
    plane = CrashPlane(inner)
    plane.fail("reserve_samples", where="during")
    with pytest.raises(DataPlaneTimeout):
        finalize(plane, rollouts)
    assert 0 < len(inner.list_samples(CANONICAL)) < 4
    assert finalize(plane, rollouts) == finalize(undisturbed, rollouts)
    assert whole_plane(inner) == whole_plane(undisturbed)


def test_rows_without_tags_are_proven_all_the_same():
    """A staging put that died before its tags: what the receipt lists is there and proves itself."""
    made = chain("r")
    plane = memory_plane()
    for call in made.calls:
        plane.put_samples([place_of(call)], STAGING, {"call": [pack_call(call)], "extras": [b""]})
    assert rejection(plane, made) is None
    assert staged_keys(plane) == set()


def test_a_row_listed_but_unreadable_is_missing():
    made = chain("r")
    plane = memory_plane()
    stage(plane, made)
    plane.clear_samples([place_of(made.calls[1])], STAGING)
    plane.put_samples([place_of(made.calls[1])], STAGING, tags=[{"rollout_id": "r"}])
    assert rejection(plane, made) == "missing_staging_row"
    collect(plane)
    assert staged_keys(plane) == set()


@pytest.mark.parametrize("delta_len", [6, 1 << 60, 1 << 61, 1 << 63])
def test_a_manifest_row_is_as_untrusted_as_the_plane(delta_len):
    """Lengths made to fit: the staged row, whose digest covers them, says otherwise."""
    made = chain("r", 2)
    record = CallRecord.of(made.calls[1], response_id="x").model_dump()
    longer = {**record, "delta_len": delta_len, "cum_len": record["prev_len"] + delta_len}
    receipt = made.receipt(manifest=[made.receipt()["manifest"][0], longer])
    plane = memory_plane()
    stage(plane, made)
    assert rejection(plane, made, receipts=[receipt]) == "rebuild_failed:wrong_delta_len"
