"""What a rollout hands over, and what poisons it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nemo_gym.token_id_capture.staging.rebuild import verify_and_linearize as reference_verify
from nemo_gym.token_id_capture.staging.records import RolloutReceipt as ReferenceReceipt
from nemo_gym.token_id_capture.staging.records import StagedCallSnapshot

from rollout_reassembler.contract.bounds import parse_receipt
from rollout_reassembler.contract.errors import LedgerConflict, RequestError
from rollout_reassembler.contract.records import RolloutReceipt
from tests.capture.world import World, assistant, user


def _as_reference(receipt: RolloutReceipt) -> ReferenceReceipt:
    """The receipt as the reference release reads it, and as our own door does."""
    plain = receipt.model_dump(mode="json")
    assert parse_receipt(plain) == receipt
    return ReferenceReceipt.model_validate(plain)


def _linearized(world: World, receipt: RolloutReceipt) -> Any:
    """The row that the reference release makes of what was captured."""
    staged = world.source.fetch(receipt.manifest)
    snapshots = [StagedCallSnapshot.model_validate(call.model_dump(mode="json")) for call in staged]
    return reference_verify(_as_reference(receipt), snapshots)


def test_a_captured_rollout_is_proven_by_the_reference_release(world: World) -> None:
    a = world.call([user("q")], "a", prompt=[1, 2], generated=[3], rollout_id="r/ü", model_call_id="ä/1")
    b = world.call([*a.messages, user("t")], "b", carry=[4], generated=[5, 6], rollout_id="r/ü")
    receipt = world.receipt("r/ü", reward=1.0, response_id=f"resp-{b.id}")
    row = _linearized(world, receipt)
    assert list(row.token_ids) == [1, 2, 3, 4, 5, 6]
    assert list(row.token_mask) == [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert receipt.reward == 1.0


def test_a_branch_off_the_chain_stays_in_the_manifest_with_its_own_weight_version(world: World) -> None:
    world.version = 9
    a = world.call([user("q")], "a")
    world.version = 2
    branch = world.call([*a.messages, user("summarise")], "s")
    world.version = 9
    b = world.call([*a.messages, user("t")], "b")
    receipt = world.receipt(response_id=f"resp-{b.id}")
    versions = {record.model_call_id: record.weight_version for record in receipt.manifest}
    assert versions == {a.id: 9, branch.id: 2, b.id: 9}
    assert _linearized(world, receipt).prompt_len == 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"logprobs": [-0.5]}, "2 tokens were sampled, with 1 log probabilities"),
        ({"logprobs": []}, "2 tokens were sampled, with 0 log probabilities"),
        ({"prompt": [1, 9, 3, 4]}, "prompt_diverges"),
        ({"generated": [0], "logprobs": []}, "1 tokens were sampled, with 0 log probabilities"),
    ],
    ids=["logprobs one short", "logprobs in turn 1 and none in turn 2", "retokenised history", "fabricated token"],
)
def test_a_failed_capture_poisons_its_rollout_alone(world: World, fault: dict[str, Any], reason: str) -> None:
    a = world.call([user("q")], "a")
    b = world.call([*a.messages, user("t")], "b", **fault)
    other = world.call([user("q")], "a", rollout_id="other")
    receipt = world.receipt()
    _as_reference(receipt)
    assert receipt.capture_poisoned
    assert "no terminal: answer_not_captured" in (receipt.failure_reason or "")
    assert f"call {b.id}: worker_capture_failed: " in (receipt.failure_reason or "")
    assert reason in (receipt.failure_reason or "")
    assert [record.model_call_id for record in receipt.manifest] == [a.id]
    assert world.receipt("other").terminal_model_call_id == other.id


def test_a_failed_capture_costs_the_chains_that_hold_it_and_no_other(world: World) -> None:
    a = world.call([user("q")], "a")
    world.call([*a.messages, user("t")], "lost", logprobs=[])
    again = world.call([*a.messages, user("t")], "b")
    assert world.receipt().terminal_model_call_id is None  # nothing says which of the two was kept
    receipt = world.receipt(response_id=f"resp-{again.id}")
    assert (receipt.terminal_model_call_id, receipt.failure_reason) == (again.id, None)
    assert list(_linearized(world, receipt).token_mask) == [0, 0, 1, 1, 0, 0, 1, 1]
    last = world.call([*again.messages, user("t")], "c")
    assert world.receipt().terminal_model_call_id == last.id


def test_a_failed_stray_call_beside_the_chain_costs_nothing(world: World) -> None:
    a = world.call([user("q")], "a")
    world.call([user("a title for this?")], "lost", logprobs=[])
    b = world.call([*a.messages, user("t")], "b")
    receipt = world.receipt(output=assistant("b"))
    assert (receipt.terminal_model_call_id, receipt.capture_poisoned) == (b.id, False)


def test_a_retried_root_whose_first_answer_was_not_captured_needs_a_witness(world: World) -> None:
    world.call([user("q")], "lost", logprobs=[])
    again = world.call([user("q")], "a")
    assert "no terminal: answer_not_captured" in (world.receipt().failure_reason or "")
    assert world.receipt(response_id=f"resp-{again.id}").terminal_model_call_id == again.id


def test_a_call_that_goes_on_behind_a_failed_one_is_unresolved_where_that_is_wanted(strict: World) -> None:
    world = strict
    a = world.call([user("q")], "a")
    lost = world.call([*a.messages, user("t")], "b", logprobs=[])
    after = world.call([*lost.messages, user("t")], "c")
    assert after.admission.resolution == "unresolved"


def test_a_call_abandoned_in_flight_poisons_nothing(world: World) -> None:
    a = world.call([user("q")], "a")
    abandoned = world.ledger.admit("r", [*a.messages, user("t")])
    world.recorder.abort_call(world.recorder.begin_call(abandoned))
    receipt = world.receipt()
    assert (receipt.terminal_model_call_id, receipt.capture_poisoned) == (a.id, False)
    assert world.ledger.read("r").pending == (abandoned.model_call_id,)
    b = world.call([*a.messages, user("t")], "b")
    assert world.receipt(response_id=f"resp-{b.id}").terminal_model_call_id == b.id


def test_an_aborted_call_is_closed_for_good(world: World) -> None:
    a = world.call([user("q")], "a")
    admission = world.ledger.admit("r", [*a.messages, user("t")])
    world.ledger.abort(admission)
    world.ledger.abort(admission)
    assert world.ledger.read("r").pending == ()
    coords = world.recorder.complete_call(world.recorder.begin_call(admission), [10, 11, 50, 51, 1], [2], [-0.5])
    with pytest.raises(LedgerConflict, match="was aborted"):
        world.ledger.record(admission, coords, response_id="late", output={"content": "late"})
    with pytest.raises(LedgerConflict, match="was recorded"):
        world.ledger.abort(a.admission)
    assert world.receipt().terminal_model_call_id == a.id


def test_a_served_answer_that_nobody_went_on_from_is_not_pending(world: World) -> None:
    a = world.call([user("q")], "a")
    b = world.call([*a.messages, user("t")], "b")
    assert world.ledger.read("r").pending == ()
    assert world.receipt().terminal_model_call_id == b.id


def test_an_answer_that_no_call_gave_is_attributed_to_nobody(world: World) -> None:
    a = world.call([user("q")], "a")
    world.ledger.admit("r", [*a.messages, user("t")])
    receipt = world.receipt(response_id="never recorded")
    _as_reference(receipt)
    assert (receipt.terminal_model_call_id, receipt.terminal_selection) == (None, None)
    assert "terminal_not_found[response_id='never recorded' of 1 captured calls]" in (receipt.failure_reason or "")


def test_a_call_recorded_after_it_was_failed_keeps_its_row_and_the_poison(world: World) -> None:
    admission = world.ledger.admit("r", [user("q")])
    world.ledger.fail("r", "the agent timed out", model_call_id=admission.model_call_id)
    coords = world.recorder.complete_call(world.recorder.begin_call(admission), [1], [2], [-0.5])
    world.ledger.record(admission, coords, response_id="x", output={"content": "late"})
    receipt = world.receipt()
    assert receipt.capture_poisoned
    assert [record.staging_key for record in receipt.manifest] == [coords.staging_key]


def test_a_rollout_nobody_knows_is_poisoned_for_having_no_records(world: World) -> None:
    receipt = world.receipt("nobody")
    _as_reference(receipt)
    assert receipt.manifest == []
    assert receipt.failure_reason == "no terminal: no_records"


def test_many_failures_are_counted_and_not_listed(world: World) -> None:
    for at in range(100):
        world.ledger.fail("r", f"fault {at}")
    reason = world.receipt().failure_reason or ""
    assert reason.startswith("fault 0; fault 1; ")
    assert "95 more" in reason


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_name(world: World, reward: float) -> None:
    world.call([user("q")], "a")
    with pytest.raises(RequestError, match="rollout 'r': the reward"):
        world.receipt(reward=reward)


@st.composite
def _rollouts(draw: st.DrawFn) -> list[tuple[int, int, int, bool]]:
    """Calls as (earlier call to continue or -1, carry length, generation length, whether its logprobs fit)."""
    return [
        (draw(st.integers(-1, at - 1)), draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(0, 9)) > 0)
        for at in range(draw(st.integers(1, 8)))
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rollout=_rollouts())
def test_every_receipt_is_valid_and_an_unpoisoned_one_is_proven(
    tmp_path_factory: pytest.TempPathFactory, rollout: list[tuple[int, int, int, bool]]
) -> None:
    world = World(tmp_path_factory.mktemp("ledger"))
    made = []
    for at, (parent, carry, generated, sound) in enumerate(rollout):
        history = made[parent].messages if parent >= 0 else []
        made.append(
            world.call(
                [*history, user(f"ask {at}")],
                f"answer {at}" if generated else "",
                carry=range(10, 10 + carry),
                generated=[100 + at] * generated,
                logprobs=[-0.5] * (generated if sound else generated + 1),
            )
        )
    receipt = world.receipt()
    _as_reference(receipt)
    for exchange in made:
        if exchange.coords.disposition == "capture_failed":
            assert exchange.id not in {record.model_call_id for record in receipt.manifest}
            assert exchange.id != receipt.terminal_model_call_id
    terminal = next((e for e in made if e.id == receipt.terminal_model_call_id), None)
    if not receipt.capture_poisoned and terminal is not None and terminal.coords.generation_len:
        row = _linearized(world, receipt)
        assert sum(row.token_mask) > 0
        assert len(row.token_ids) == terminal.coords.cum_len
