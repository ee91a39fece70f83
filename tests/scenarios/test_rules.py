"""DESIGN's nine rules, each by its name. Break one and a training run is silently wrong."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import (
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    GroupConflict,
    RpcPayloadError,
)
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest
from rollout_reassembler.contract.rpc_guard import assert_metadata_only
from rollout_reassembler.data_plane.base import SampleBatch
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly import proofs as proofs_module
from rollout_reassembler.reassembly import reassembler as reassembler_module
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
    reassembler,
    registered,
    stage,
    staged_keys,
    staged_places,
)
from tests.reassembly.contents import RECORDS, contents_of, published, whole_plane
from tests.reassembly.crash_plane import CrashPlane
from tests.staging.unchecked import packed_unchecked, resigned


def group(size: int = 4) -> list[MadeRollout]:
    return [chain(f"r{index}", index + 1) for index in range(size)]


def staged_group(size: int = 4) -> tuple[MemoryDataPlane, list[MadeRollout]]:
    plane, rollouts = memory_plane(), group(size)
    stage(plane, *rollouts)
    return plane, rollouts


# --- 1. exactly N rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [set(), {0}, {2}, {3}, {0, 1}, {1, 2, 3}, {0, 1, 2, 3}], ids=str)
def test_rule_1_exactly_n_rows_in_request_order_under_the_requests_ids(bad):
    plane, rollouts = staged_group()
    receipts = [None if index in bad else made.receipt() for index, made in enumerate(rollouts)]
    sample_ids = ["d", "a", "c", "b"]
    answer = finalize(plane, rollouts, receipts=receipts, rewards=[0.1, 0.2, 0.3, 0.4], canonical_sample_ids=sample_ids)
    assert set(plane.list_samples(CANONICAL)) == set(sample_ids)
    assert answer.meta.sample_ids == sample_ids
    assert answer.total_row_count == 4
    assert answer.valid_row_count == 4 - len(bad)
    for index, row in enumerate(published(plane, sample_ids)):
        assert row["total_reward"] == np.float32([0.1, 0.2, 0.3, 0.4][index])
        if index in bad:
            assert row["input_ids"].tolist() == [PAD]
            assert row["sample_mask"] == 0
        else:
            assert row["input_ids"].tolist() == rollouts[index].tokens()
            assert row["sample_mask"] == 1


def test_rule_1_one_bad_rollout_never_costs_a_sibling():
    """Every kind of badness at once, and one good rollout among them."""
    plane, rollouts = staged_group(8)
    receipts: list[Any] = [made.receipt() for made in rollouts]
    receipts[0] = None
    receipts[1] = "receipt"
    receipts[2] = rollouts[7].receipt()
    receipts[3] = rollouts[3].receipt(capture_poisoned=True)
    plane.clear_samples([place_in(plane, "r4/c0")], STAGING)
    plane.put_samples([place_in(plane, "r5/c2")], STAGING, {"call": [b"garbage"]})
    receipts[6] = {**receipts[6], "manifest": [{**row, "weight_version": 9} for row in receipts[6]["manifest"]]}
    answer = finalize(plane, rollouts, receipts=receipts)
    assert answer.rejections == {
        "r0": "missing_receipt",
        "r1": "invalid_receipt",
        "r2": "identity_mismatch",
        "r3": "capture_poisoned",
        "r4": "missing_staging_row",
        "r5": "invalid_staging_row",
        "r6": "rebuild_failed:wrong_weight_version",
    }
    assert published(plane, answer.meta.sample_ids)[7]["input_ids"].tolist() == rollouts[7].tokens()


# --- 2. every published token was proven ------------------------------------------------------------


def tampered_call(made: MadeRollout, **changes: Any) -> bytes:
    return packed_unchecked(resigned({**made.calls[1].model_dump(), **changes}))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda made: bytes(255 - byte for byte in pack_call(made.calls[1])), "invalid_staging_row"),
        (lambda made: pack_call(made.calls[1])[:-1], "invalid_staging_row"),
        (lambda made: pack_call(made.calls[2]), "staging_key_mismatch"),
        (lambda made: tampered_call(made, token_ids_delta=[1, 2, 3, 4, 5]), "rebuild_failed:wrong_digest"),
        (lambda made: tampered_call(made, weight_version=9), "rebuild_failed:wrong_weight_version"),
        (lambda made: tampered_call(made, rollout_id="s"), "staging_key_mismatch"),
    ],
    ids=["inverted", "cut", "other call", "other tokens, signed", "other version, signed", "other rollout, signed"],
)
def test_rule_2_nothing_unproven_is_ever_published_valid(value, reason):
    plane, (good, bad) = memory_plane(), (chain("good"), chain("bad"))
    stage(plane, good, bad)
    plane.put_samples([place_in(plane, "bad/c1")], STAGING, {"call": [value(bad)]})
    answer = finalize(plane, [good, bad])
    assert answer.rejections == {"bad": reason}
    row = published(plane, answer.meta.sample_ids)[1]
    assert row["input_ids"].tolist() == [PAD]
    assert not row["token_mask"].any()
    assert row["sample_mask"] == 0


def test_rule_2_every_single_flipped_bit_of_a_staged_row_keeps_the_rollout_out():
    made = chain("r", 1)
    sound = pack_call(made.calls[0])
    for byte in range(16, len(sound), 3):
        plane = memory_plane()
        stage(plane, made)
        flipped = bytearray(sound)
        flipped[byte] ^= 1 << byte % 8
        plane.put_samples([place_in(plane, "r/c0")], STAGING, {"call": [bytes(flipped)]})
        assert finalize(plane, [made]).rejections == {"r": "invalid_staging_row"}


# --- 3. metadata only -------------------------------------------------------------------------------


def test_rule_3_answers_and_requests_are_metadata():
    plane, rollouts = staged_group()
    request = ReassemblyRequest(
        group_id="g",
        rollout_ids=tuple(made.rollout_id for made in rollouts),
        canonical_sample_ids=None,
        receipts=tuple(made.receipt() for made in rollouts),
        rewards=(1.0, None, 0.0, float("nan")),
        fallback_weight_version=0,
        prompt_idx=0,
    )
    assert assert_metadata_only(request)
    answer = finalize(plane, rollouts, receipts=[None, *request.receipts[1:]], rewards=request.rewards)
    assert assert_metadata_only(answer)
    assert assert_metadata_only(
        finalize(plane, rollouts, receipts=[None, *request.receipts[1:]], rewards=request.rewards)
    )


def test_rule_3_tokens_in_a_receipt_are_stopped_with_their_path():
    receipt = chain("r").receipt()
    receipt["manifest"][1]["token_ids"] = [1, 2, 3]
    request = ReassemblyRequest("g", ("r",), None, (receipt,), (1.0,), 0, 0)
    with pytest.raises(RpcPayloadError) as caught:
        assert_metadata_only(request)
    assert caught.value.path == "rpc.receipts[0]['manifest'][1]['token_ids']"


# --- 4. finalizing twice equals finalizing once -----------------------------------------------------


@pytest.mark.parametrize("bad", [set(), {1}, {0, 1, 2, 3}], ids=str)
def test_rule_4_the_same_request_again_gives_the_same_rows_and_the_same_answer(bad):
    plane, rollouts = staged_group()
    receipts = [None if index in bad else made.receipt() for index, made in enumerate(rollouts)]
    first = finalize(plane, rollouts, receipts=receipts)
    once = whole_plane(plane)
    second = finalize(plane, rollouts, receipts=receipts)
    assert second == first
    assert pickle.dumps(dataclasses.replace(second, timings={})) != b""
    assert {name: type(value) for name, value in vars(second).items()} == {
        name: type(value) for name, value in vars(first).items()
    }
    assert whole_plane(plane) == once


def test_rule_4_good_rows_are_never_replaced_because_staging_was_cleared():
    plane, rollouts = staged_group()
    finalize(plane, rollouts)
    assert staged_keys(plane) == set()
    again = finalize(plane, rollouts)
    assert again.valid_row_count == 4
    assert published(plane, again.meta.sample_ids)[0]["input_ids"].tolist() == rollouts[0].tokens()


def test_rule_4_the_answer_outlives_the_rows():
    """The trainer has worked through the rows and cleared them; the same request must not publish placeholders."""
    plane, rollouts = staged_group()
    first = finalize(plane, rollouts)
    plane.clear_samples(None, CANONICAL)
    assert finalize(plane, rollouts) == first
    assert plane.list_samples(CANONICAL) == {}


def test_rule_4_holds_for_one_reassembler_that_serves_many_groups():
    """As in an actor, which lives as long as the run."""
    plane, rollouts = staged_group()
    finalizer = reassembler(plane)

    def group_of(made: MadeRollout) -> FinalizedGroup:
        return finalizer.finalize_group(
            f"g-{made.rollout_id}",
            [made.rollout_id],
            [made.receipt()],
            [1.0],
            mask_sample=None,
            fallback_weight_version=0,
            prompt_idx=0,
        )

    first = [group_of(made) for made in rollouts]
    assert [group_of(made) for made in rollouts] == first
    assert all(answer.valid_row_count == 1 for answer in first)


@pytest.mark.parametrize(
    "other",
    [
        {"rewards": [1.0, 1.0, 1.0, 0.5]},
        {"rewards": [1.0, 1.0, 1.0, None]},
        {"prompt_idx": 1},
        {"fallback_weight_version": 1},
        {"loss_multiplier": 0.5},
        {"mask_sample": True},
        {"truncated": [True, False, False, False]},
        {"canonical_sample_ids": ["a", "b", "c", "d"]},
        {"options": {"pad_token_id": 1}},
        {"options": {"max_seq_len": 4096}},
        {"receipts": [None] * 4},
    ],
    ids=str,
)
def test_rule_4_another_request_under_the_same_id_is_a_conflict(other):
    plane, rollouts = staged_group()
    finalize(plane, rollouts)
    once = whole_plane(plane)
    with pytest.raises(GroupConflict, match="'g'"):
        finalize(plane, rollouts, **other)
    assert whole_plane(plane) == once


def test_rule_4_rewards_that_publish_the_same_are_the_same_request():
    """Whatever is no finite number is one thing: a NaN, an infinity, and none at all."""
    plane, rollouts = staged_group(2)
    first = finalize(plane, rollouts, rewards=[None, 1])
    assert finalize(plane, rollouts, rewards=[float("nan"), np.float64(1.0)]) == first


# --- 5. clear only what is yours --------------------------------------------------------------------


def test_rule_5_only_keys_under_the_requests_own_rollouts_are_cleared():
    plane, rollouts = staged_group()
    others = [chain("r"), chain("r0x"), chain("r0/c0"), chain("s")]
    stage(plane, *others)
    finalize(plane, rollouts, receipts=[None, *(made.receipt() for made in rollouts[1:])])
    collect(plane)
    assert staged_keys(plane) == {call.staging_key for made in others for call in made.calls}


@pytest.mark.parametrize("victim", ["sibling", "stranger"])
def test_rule_5_a_receipt_that_names_anothers_key_is_rejected_and_clears_nothing(victim):
    plane, liar = memory_plane(), chain("liar")
    robbed = chain(victim)
    stage(plane, liar, robbed)
    receipt = liar.receipt()
    receipt["manifest"][0]["staging_key"] = f"{victim}/c0"
    answer = finalize(plane, [liar], receipts=[receipt])
    assert answer.rejections == {"liar": "foreign_staging_key"}
    assert answer.staging_keys == ()
    assert staged_keys(plane) == {call.staging_key for made in (liar, robbed) for call in made.calls}


def test_rule_5_rows_are_cleared_only_after_publication_is_durable():
    class Ordered(MemoryDataPlane):
        steps: list[str] = []  # noqa: RUF012

        def put_samples(self, sample_ids: Any, partition_id: str, *args: Any, **kwargs: Any) -> Any:
            answer = super().put_samples(sample_ids, partition_id, *args, **kwargs)
            self.steps.append(f"put {partition_id}")
            return answer

        def announce_samples(self, stored: Any, tags: Any = None) -> None:
            super().announce_samples(stored, tags)
            self.steps.append(f"announce {stored.reservation.partition_id}")

        def clear_samples(self, sample_ids: Any, partition_id: str) -> None:
            self.steps.append(f"clear {partition_id}")
            super().clear_samples(sample_ids, partition_id)

    plane, rollouts = Ordered(), group(2)
    stage(registered(plane), *rollouts)
    Ordered.steps.clear()
    finalize(plane, rollouts)
    assert Ordered.steps == [f"put {RECORDS}", f"announce {CANONICAL}", f"clear {STAGING}"]


@pytest.mark.parametrize("receipt", [None, "unreadable", {}, {"rollout_id": "other"}, 7], ids=repr)
def test_rule_5_a_lost_receipts_rows_are_found_by_rollout_and_cleared(receipt):
    plane, rollouts = staged_group(2)
    answer = finalize(plane, rollouts, receipts=[receipt, rollouts[1].receipt()])
    assert answer.valid_row_count == 1
    assert (answer.cleanup_pending, answer.to_collect) == ((), ("r0",))
    collect(plane)
    assert staged_keys(plane) == set()


# --- 6. our own faults are never a rejection --------------------------------------------------------


@pytest.mark.parametrize("kind", [DataPlaneTimeout, DataPlaneUnavailable, DataPlaneError])
def test_rule_6_a_plane_that_fails_raises_names_the_group_and_leaves_staging(kind):
    class Failing(MemoryDataPlane):
        failing = False

        def get_samples(self, sample_ids: Any, partition_id: str, *args: Any, **kwargs: Any) -> SampleBatch:
            if self.failing:
                raise kind("lost", call="get_samples", partition=partition_id, keys=sample_ids, seconds=60)
            return super().get_samples(sample_ids, partition_id, *args, **kwargs)

    plane, rollouts = Failing(), group(2)
    stage(registered(plane), *rollouts)
    before = contents_of(plane, STAGING)
    plane.failing = True
    with pytest.raises(kind, match=r"group 'g/7' was not finalized.*lost.*after 60\.0 s"):
        finalize(plane, rollouts, group_id="g/7")
    plane.failing = False
    assert contents_of(plane, STAGING) == before
    assert contents_of(plane, CANONICAL) == {}
    assert finalize(plane, rollouts, group_id="g/7").valid_row_count == 2


@pytest.mark.parametrize(
    ("module", "step"),
    [
        (proofs_module, "prove_rollout"),
        (reassembler_module, "canonical_columns"),
        (reassembler_module, "group_metrics"),
        (proofs_module, "publishable_reward"),
    ],
)
def test_rule_6_a_programming_error_raises_names_the_group_and_leaves_staging(module, step, monkeypatch):
    plane, rollouts = staged_group(2)
    before = whole_plane(plane)

    def bug(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a bug of ours")

    with monkeypatch.context() as patched:
        patched.setattr(module, step, bug)
        with pytest.raises(KeyError, match="a bug of ours") as caught:
            finalize(plane, rollouts)
    assert any("group 'g'" in note for note in caught.value.__notes__)
    after = whole_plane(plane)
    assert (after[STAGING], after[RECORDS]) == (before[STAGING], before[RECORDS])
    assert plane.get_samples(["g_g0", "g_g1"], CANONICAL, partial=True).sample_ids == []
    assert finalize(plane, rollouts).valid_row_count == 2


# --- 7. a published group is an answer --------------------------------------------------------------


def test_rule_7_a_clear_that_fails_is_cleanup_pending():
    inner, rollouts = staged_group(2)
    plane = CrashPlane(inner)
    plane.fail("clear_samples", where="before", for_good=True)
    answer = finalize(plane, rollouts)
    assert answer.valid_row_count == 2
    assert set(answer.cleanup_pending) == staged_places(inner) == set(answer.staging_keys)
    plane.recover()
    again = finalize(plane, rollouts)
    assert again == dataclasses.replace(answer, cleanup_pending=())
    assert staged_keys(inner) == set()


def test_rule_7_rollouts_that_could_not_even_be_marked_as_lost_are_pending():
    inner, rollouts = staged_group(3)
    plane = CrashPlane(inner)
    receipts = [None, rollouts[1].receipt(), "unreadable"]
    steps_before_the_mark = ["get_samples", "reserve_samples", "store_samples", "put_samples", "announce_samples"]
    plane.fail_at(len(steps_before_the_mark) + 1, for_good=True)
    answer = finalize(plane, rollouts, receipts=receipts)
    assert plane.calls[:-1] == steps_before_the_mark
    assert answer.to_collect == ("r0", "r2")
    assert answer.cleanup_pending == (*map(place_of, rollouts[1].calls), "r0/*", "r2/*")
    plane.recover()
    assert finalize(plane, rollouts, receipts=receipts).cleanup_pending == ()
    collect(inner)
    assert staged_keys(inner) == set()


# --- 8. padding is never data -----------------------------------------------------------------------


def test_rule_8_padding_is_never_confused_with_data():
    """A policy that samples the pad token has sampled a token; a placeholder's pad is none."""
    plane, made, lost = memory_plane(), MadeRollout("r"), chain("lost")
    made.call([PAD, 5], [PAD, PAD])
    stage(plane, made, lost)
    answer = finalize(plane, [made, lost], receipts=[made.receipt(), None])
    row, placeholder = published(plane, answer.meta.sample_ids)
    assert row["input_ids"].tolist() == [PAD, 5, PAD, PAD]
    assert row["token_mask"].tolist() == [0, 0, 1, 1]
    assert row["input_lengths"] == 4
    assert placeholder["input_ids"].tolist() == [PAD]
    assert placeholder["token_mask"].tolist() == [0]
    assert placeholder["input_lengths"] == 1


def test_rule_8_rows_are_jagged_not_padded_to_the_longest():
    plane, rollouts = staged_group()
    answer = finalize(plane, rollouts)
    rows = published(plane, answer.meta.sample_ids)
    assert [len(row["input_ids"]) for row in rows] == [len(made.tokens()) for made in rollouts]
    assert [row["input_lengths"] for row in rows] == answer.meta.sequence_lengths


# --- 9. no call waits for ever ----------------------------------------------------------------------


def test_rule_9_a_deadline_that_passed_says_which_call_which_keys_and_after_how_long():
    """The deadlines are the adapters'; what they say must reach the caller whole."""

    class Late(MemoryDataPlane):
        def reserve_samples(self, sample_ids: Any, partition_id: str, **look_up: Any) -> Any:
            raise DataPlaneTimeout("no answer", call="reserve", partition=partition_id, keys=sample_ids, seconds=15)

    plane, rollouts = Late(), group(2)
    stage(registered(plane), *rollouts)
    with pytest.raises(DataPlaneTimeout) as caught:
        reassembler(plane).finalize_group(
            "g",
            [made.rollout_id for made in rollouts],
            [made.receipt() for made in rollouts],
            [1.0, 1.0],
            mask_sample=None,
            fallback_weight_version=0,
            prompt_idx=0,
        )
    assert (caught.value.call, caught.value.partition, caught.value.keys) == ("reserve", CANONICAL, ("g_g0", "g_g1"))
    assert caught.value.seconds == 15
    assert isinstance(caught.value.__cause__, DataPlaneTimeout)
