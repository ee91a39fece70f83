"""A forest of calls, cut into rows: one owner a sampled token, whatever the forest."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_reassembler.contract.errors import ContractError, InvalidStagedCall, VerificationError
from rollout_reassembler.contract.records import RolloutReceipt, StagedCall
from rollout_reassembler.reassembly.branches import Segment, cut
from rollout_reassembler.reassembly.verify import ProvenForest, prove_forest
from rollout_reassembler.staging.codec import pack_call, unpack_call
from tests.captures import MadeRollout


def receipt_of(made: MadeRollout, terminal: StagedCall | None = None, *, timed: bool = True) -> RolloutReceipt:
    plain = made.receipt(terminal)
    for position, record in enumerate(plain["manifest"]):
        record["admitted_at"] = float(position) if timed else None
    return RolloutReceipt.model_validate(plain)


def values_of(made: MadeRollout) -> dict[str, bytes | None]:
    return {call.model_call_id: pack_call(call) for call in made.calls}


def proven(receipt: RolloutReceipt, values: dict[str, bytes | None], **options: Any) -> ProvenForest:
    return prove_forest(receipt, [values[record.model_call_id] for record in receipt.manifest], **options)


def segments(made: MadeRollout, terminal: StagedCall | None = None, **options: Any) -> list[tuple[str, str]]:
    """Each row as its calls and the calls that it owns."""
    forest = proven(receipt_of(made, terminal), values_of(made), **options)
    return [
        (" ".join(row.model_call_ids), " ".join(c for c, own in zip(row.model_call_ids, row.owned, strict=True) if own))
        for row in forest.rows
    ]


def test_a_chain_is_one_row() -> None:
    made = MadeRollout("r")
    a = made.call([1], [2], call_id="a")
    made.call([3], [4], parent=a, call_id="b")
    assert segments(made) == [("a b", "a b")]


def test_a_shared_call_is_owned_by_the_earliest_leaf_that_holds_it() -> None:
    made = MadeRollout("r")
    a = made.call([1], [2], call_id="a")
    made.call([3], [4], parent=a, call_id="b")
    made.call([5], [6, 7], parent=a, call_id="c")
    forest = proven(receipt_of(made), values_of(made))
    assert [row.model_call_ids for row in forest.rows] == [["a", "b"], ["a", "c"]]
    first, second = forest.rows
    assert second.token_ids.tolist() == [1, 2, 5, 6, 7]
    assert first.token_mask.tolist() == [0, 1, 0, 1]
    assert second.token_mask.tolist() == [0, 0, 0, 1, 1]
    assert second.logprobs.tolist() == [0, 0, 0, -0.5, -0.75]


def test_a_retry_that_a_later_sibling_answers_again_is_no_row() -> None:
    made = MadeRollout("r")
    a = made.call([1], [2], call_id="a")
    made.call([3], [4], parent=a, call_id="b")
    made.call([3], [5], parent=a, call_id="again")
    assert segments(made) == [("a again", "a again")]
    assert segments(made, keep_retries=True) == [("a b", "a b"), ("a again", "again")]


def test_a_retried_root_is_no_row_and_one_that_was_continued_is() -> None:
    made = MadeRollout("r")
    a = made.call([1], [2], call_id="a")
    made.call([1], [9], call_id="again")
    made.call([3], [4], parent=a, call_id="b")
    assert segments(made) == [("again", "again"), ("a b", "a b")]
    assert segments(made, made.calls[1]) == [("again", "again"), ("a b", "a b")]


def test_the_terminal_is_never_dropped_as_a_retry() -> None:
    made = MadeRollout("r")
    kept = made.call([1], [2], call_id="kept")
    made.call([1], [3], call_id="again")
    assert segments(made, kept) == [("kept", "kept"), ("again", "again")]


def test_a_compacted_history_is_a_root_of_its_own() -> None:
    made = MadeRollout("r")
    a = made.call([1], [2], call_id="a")
    made.call([3], [4], parent=a, call_id="b")
    made.call([1, 9, 9], [5], call_id="after")
    assert segments(made) == [("a b", "a b"), ("after", "after")]


def test_a_call_that_cannot_be_proven_costs_the_chains_that_hold_it_alone() -> None:
    made = MadeRollout("r")
    a = made.call([1], [2], call_id="a")
    b = made.call([3], [4], parent=a, call_id="b")
    made.call([5], [6], parent=b, call_id="under b")
    made.call([7], [8], parent=a, call_id="c")
    values = values_of(made)
    garbled = bytearray(values["b"] or b"")
    garbled[-40] ^= 1
    for broken, code in ((None, "missing_staging_row"), (bytes(garbled), "invalid_staging_row")):
        forest = proven(receipt_of(made), {**values, "b": broken})
        assert [row.model_call_ids for row in forest.rows] == [["a", "c"]]
        assert {call: fault.code for call, fault in forest.faults.items()} == {"b": code}


def test_a_terminal_chain_that_cannot_be_proven_rejects_the_rollout() -> None:
    made = MadeRollout("r")
    a = made.call([1], [2], call_id="a")
    made.call([3], [4], parent=a, call_id="b")
    made.call([7], [8], call_id="other root")
    values = values_of(made)
    with pytest.raises(InvalidStagedCall, match="missing_staging_row"):
        proven(receipt_of(made, made.calls[1]), {**values, "a": None})
    plain = receipt_of(made, made.calls[1]).model_dump()
    plain["manifest"][1]["weight_version"] = 9
    with pytest.raises(VerificationError, match="wrong_weight_version: call 'b'"):
        proven(RolloutReceipt.model_validate(plain), values)


def test_a_manifest_without_times_is_in_order_of_commitment() -> None:
    made = MadeRollout("r")
    a = made.call([1], [2], call_id="z")
    made.call([3], [4], parent=a, call_id="y")
    made.call([5], [6], parent=a, call_id="x")
    forest = proven(receipt_of(made, timed=False), values_of(made))
    assert [row.owned for row in forest.rows] == [(True, True), (False, True)]
    assert forest.rows[0].model_call_ids == ["z", "y"]


@st.composite
def forests(draw: st.DrawFn) -> tuple[MadeRollout, StagedCall]:
    """Up to a dozen calls: continuations, retries (one carry twice), branches, new roots; any of them the terminal."""
    made = MadeRollout("r")
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([None, *made.calls]))
        carry = draw(st.lists(st.integers(1, 2), min_size=0 if parent is not None else 1, max_size=2))
        made.call(carry, draw(st.lists(st.integers(3, 6), min_size=1, max_size=3)), parent=parent)
    return made, draw(st.sampled_from(made.calls))


def ancestors(made: MadeRollout, call: StagedCall) -> list[str]:
    by_id = {c.model_call_id: c for c in made.calls}
    chain = [call.model_call_id]
    while (parent := by_id[chain[-1]].parent_call_id) is not None:
        chain.append(parent)
    return chain


@settings(deadline=None)
@given(forests(), st.randoms(use_true_random=False), st.booleans())
def test_every_sampled_token_of_a_kept_chain_has_one_owner(
    drawn: tuple[MadeRollout, StagedCall], order: random.Random, keep_retries: bool
) -> None:
    assert_cut_well(drawn, order, keep_retries)


@pytest.mark.exhaustive
def test_every_sampled_token_of_a_kept_chain_has_one_owner_in_20_000_forests() -> None:
    seen: Counter[int] = Counter()

    @settings(deadline=None, max_examples=20_000, database=None)
    @given(forests(), st.randoms(use_true_random=False), st.booleans())
    def draw(drawn: tuple[MadeRollout, StagedCall], order: random.Random, keep_retries: bool) -> None:
        assert_cut_well(drawn, order, keep_retries)
        seen[len(drawn[0].calls)] += 1

    draw()
    print(f"\n{seen.total()} forests of calls, by their number of calls: {dict(sorted(seen.items()))}")
    assert seen.total() >= 20_000


def assert_cut_well(drawn: tuple[MadeRollout, StagedCall], order: random.Random, keep_retries: bool) -> None:
    """One owner a sampled token, nothing kept is lost but retries, and the manifest's order changes nothing."""
    made, terminal = drawn
    receipt, values = receipt_of(made, terminal), values_of(made)
    forest = proven(receipt, values, keep_retries=keep_retries)
    owners = Counter(
        call_id for row in forest.rows for call_id, own in zip(row.model_call_ids, row.owned, strict=True) if own
    )
    held = {call_id for row in forest.rows for call_id in row.model_call_ids}
    assert owners == Counter(held)
    assert set(ancestors(made, terminal)) <= held
    for row in forest.rows:
        leaf = row.model_call_ids[-1]
        assert row.token_ids.tolist() == made.sequences[leaf].tolist()
        assert row.token_mask.any()
        assert not row.logprobs[row.token_mask == 0].any()
    parents = {call.parent_call_id for call in made.calls}
    for call in made.calls:
        if call.model_call_id in held or call.model_call_id in parents:
            continue
        later = made.calls[made.calls.index(call) + 1 :]
        carry = int((call.token_mask_delta == 0).sum())
        assert not keep_retries
        assert any(
            other.parent_call_id == call.parent_call_id
            and other.token_ids_delta[: int((other.token_mask_delta == 0).sum())].tolist()
            == call.token_ids_delta[:carry].tolist()
            for other in later
        )
    shuffled = receipt.model_copy(update={"manifest": order.sample(receipt.manifest, len(receipt.manifest))})
    again = proven(shuffled, values, keep_retries=keep_retries)
    assert [(row.calls, row.owned) for row in again.rows] == [(row.calls, row.owned) for row in forest.rows]


@settings(deadline=None)
@given(forests(), st.data())
def test_broken_calls_take_their_descendants_along_and_nothing_else(
    drawn: tuple[MadeRollout, StagedCall], data: st.DataObject
) -> None:
    made, terminal = drawn
    broken = set(data.draw(st.lists(st.sampled_from([call.model_call_id for call in made.calls]), max_size=3)))
    receipt = receipt_of(made, terminal)
    values = {call_id: None if call_id in broken else value for call_id, value in values_of(made).items()}
    if broken & set(ancestors(made, terminal)):
        with pytest.raises(ContractError, match="missing_staging_row"):
            proven(receipt, values)
        return
    sound = {call.model_call_id: call for call in made.calls if not broken & set(ancestors(made, call))}
    packed = {call_id: unpack_call(pack_call(call)) for call_id, call in sound.items()}
    expected = cut(receipt.manifest, packed, terminal=terminal.model_call_id)
    forest = proven(receipt, values)
    assert [Segment(tuple(row.model_call_ids), row.owned) for row in forest.rows] == expected
    assert set(forest.faults) == broken
    assert {call_id for row in forest.rows for call_id in row.model_call_ids} <= set(sound)
