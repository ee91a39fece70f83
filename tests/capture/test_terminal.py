"""Which call's chain earned the reward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nemo_gym.token_id_capture.staging.records import CallRecord as ReferenceRecord
from nemo_gym.token_id_capture.staging.terminal import select_terminal_call

from rollout_reassembler.capture.terminal import TerminalSelection, Witnesses, select_by_parent_links, select_terminal
from rollout_reassembler.contract.errors import RequestError
from rollout_reassembler.contract.records import CallRecord
from tests.capture.world import World, assistant, user


def _record(
    call_id: str, parent: str | None = None, admitted_at: float | None = None, sequence: str = ""
) -> CallRecord:
    return CallRecord(
        model_call_id=call_id,
        parent_call_id=parent,
        prev_len=0 if parent is None else 3,
        delta_len=3,
        cum_len=3 if parent is None else 6,
        weight_version=0,
        digest="0" * 64,
        extras_digest="0" * 64,
        chain_hash="0" * 64,
        cumulative_hash=(sequence or call_id).encode().hex().rjust(64, "0"),
        staging_key=f"r/{call_id}",
        mode="text" if parent is None else "token_in",
        response_id=f"resp-{call_id}",
        admitted_at=admitted_at,
    )


@st.composite
def _graphs(draw: st.DrawFn) -> list[CallRecord]:
    """Call graphs of every sort, sound and unsound: forests, orphans, cycles, repeated ids."""
    ids = draw(st.lists(st.sampled_from("abcdefgh"), min_size=0, max_size=8, unique=draw(st.integers(0, 9)) > 0))
    parents = st.none() | st.sampled_from([*ids, *"z"][: len(ids) + (draw(st.integers(0, 9)) == 0)] or ["z"])
    earlier_only = draw(st.booleans())
    records = []
    for at, call_id in enumerate(ids):
        parent = draw(st.none() | st.sampled_from(ids[:at])) if earlier_only and at else draw(parents)
        records.append(_record(call_id, parent, draw(st.none() | st.sampled_from([0.0, 1.0, 2.0]))))
    return draw(st.permutations(records))


@settings(max_examples=1_000, deadline=None)
@given(records=_graphs())
def test_the_parent_link_walk_is_the_references(records: list[CallRecord]) -> None:
    theirs = select_terminal_call([ReferenceRecord.model_validate(r.model_dump(mode="json")) for r in records])
    assert select_by_parent_links(records) == (theirs.terminal_model_call_id, theirs.reason)


def _select(records: Sequence[CallRecord], **witnesses: str) -> TerminalSelection:
    return select_terminal(records, Witnesses(**witnesses))  # type: ignore[arg-type]


CHAIN = [_record("a", None, 1.0), _record("b", "a", 2.0), _record("c", "b", 3.0)]


def test_witnesses_come_in_the_order_declared_response_id_content_heuristic(world: World) -> None:
    a = world.call([user("q")], "a")
    b = world.call([*a.messages, user("t")], "b")
    witnesses = {"declared": b.id, "response_id": f"resp-{b.id}", "output": assistant("b")}
    methods = []
    for _ in range(4):
        receipt = world.receipt(**witnesses)
        assert receipt.terminal_model_call_id == b.id
        methods.append(receipt.terminal_selection)
        witnesses.pop(next(iter(witnesses), ""), None)
    assert methods == ["declared", "response_id", "content", "heuristic"]


def test_agreeing_witnesses_corroborate(world: World) -> None:
    a = world.call([user("q")], "a")
    receipt = world.receipt(response_id=f"resp-{a.id}", output=assistant("a"))
    assert receipt.terminal_attribution_reason == "corroborated_by=content"


def test_witnesses_that_disagree_attribute_nothing(world: World) -> None:
    a = world.call([user("q")], "a")
    b = world.call([*a.messages, user("t")], "b")
    receipt = world.receipt(response_id=f"resp-{a.id}", output=assistant("b"))
    assert receipt.terminal_model_call_id is None
    assert receipt.terminal_selection is None
    assert receipt.capture_poisoned
    assert f"witness_disagreement[response_id={a.id};content={b.id}]" in (receipt.failure_reason or "")


def test_witnesses_that_name_one_and_the_same_sequence_agree() -> None:
    records = [*CHAIN, _record("c2", "b", 4.0, sequence="c")]
    assert _select(records, declared="c2", response_id="resp-c").model_call_id == "c2"


@pytest.mark.parametrize("declared", ["b", "resp-b"], ids=["by call id", "by response id"])
def test_a_declared_call_wins_over_the_shape_of_the_graph(declared: str) -> None:
    assert _select(CHAIN, declared=declared) == TerminalSelection("b", "declared", "")


def test_a_declared_call_that_was_not_captured_ends_the_matter() -> None:
    assert _select(CHAIN, declared="nobody") == TerminalSelection(
        None, "declared", "declared_no_match,terminal_not_found[declared='nobody' of 3 captured calls]"
    )


def test_nothing_is_guessed_past_a_witness_that_fits_no_call(world: World) -> None:
    assert _select(CHAIN, response_id="elsewhere") == TerminalSelection(
        None, None, "response_id_no_match,terminal_not_found[response_id='elsewhere' of 3 captured calls]"
    )
    world.call([user("q")], "a")
    receipt = world.receipt(output=assistant("what nobody said"), response_id="elsewhere", among_conversations="latest")
    assert receipt.failure_reason == (
        "no terminal: response_id_no_match,content_no_match,terminal_not_found"
        "[response_id='elsewhere';content='assistant: what nobody said' of 1 captured calls]"
    )


def test_a_witness_that_fits_several_calls_leaves_the_guess_between_them() -> None:
    twice = [*CHAIN, _record("d", "c", 4.0).model_copy(update={"response_id": "resp-b"})]
    assert _select(twice, response_id="resp-b") == TerminalSelection("d", "heuristic", "response_id_ambiguous,selected")
    inner = [*CHAIN[:2], CHAIN[2].model_copy(update={"response_id": "resp-b"}), _record("d", "c", 4.0)]
    assert _select(inner, response_id="resp-b") == TerminalSelection(
        None, "heuristic", "response_id_ambiguous,ambiguous_terminal"
    )
    assert _select(twice, response_id="resp-b", declared="a").model_call_id == "a"


def test_two_answers_of_equal_content_abstain(world: World) -> None:
    a = world.call([user("q")], "done", generated=[50])
    b = world.call([*a.messages, user("t")], "done", generated=[51])
    receipt = world.receipt(output=assistant("done"))
    assert (receipt.terminal_model_call_id, receipt.terminal_selection) == (b.id, "heuristic")
    assert receipt.terminal_attribution_reason == "content_ambiguous,selected"


def test_a_whole_transcript_tells_equal_answers_apart(world: World) -> None:
    a = world.call([user("q")], "done", generated=[50])
    world.call([*a.messages, user("t")], "done", generated=[51])
    receipt = world.receipt(output=a.messages)
    assert (receipt.terminal_model_call_id, receipt.terminal_selection) == (a.id, "content")


def test_the_last_turn_of_a_transcript_is_enough(world: World) -> None:
    a = world.call([user("q")], "a")
    assert world.receipt(output=[user("a made-up question"), assistant("a")]).terminal_model_call_id == a.id


def test_content_that_cannot_be_read_abstains(world: World) -> None:
    world.call([user("q")], "a")
    assert world.receipt(output={"content": b"a"}).terminal_attribution_reason == "content_unreadable,selected"
    assert world.receipt(output=[]).terminal_attribution_reason == "content_empty,selected"


def test_of_two_calls_with_identical_messages_the_childless_one_is_a_dead_branch(world: World) -> None:
    a = world.call([user("q")], "a")
    world.call([*a.messages, user("t")], "dropped", generated=[60])
    kept = world.call([*a.messages, user("t")], "kept", generated=[61])
    last = world.call([*kept.messages, user("t")], "last")
    assert world.receipt().terminal_model_call_id == last.id


@pytest.mark.parametrize("depth", [0, 1], ids=["roots", "children"])
def test_two_childless_calls_with_identical_messages_are_ambiguous_unless_a_witness_names_one(
    world: World, depth: int
) -> None:
    history = world.call([user("q")], "a").messages if depth else []
    world.call([*history, user("t")], "one", generated=[60])
    two = world.call([*history, user("t")], "two", generated=[61])
    receipt = world.receipt()
    assert (receipt.terminal_model_call_id, receipt.capture_poisoned) == (None, True)
    assert "ambiguous_terminal" in (receipt.failure_reason or "")
    named = world.receipt(response_id=f"resp-{two.id}")
    assert (named.terminal_model_call_id, named.capture_poisoned) == (two.id, False)


def test_of_several_conversations_none_is_guessed_and_the_caller_may_choose(world: World) -> None:
    a = world.call([user("agent A")], "a", carry=range(10, 40))
    b = world.call([user("agent B")], "b")
    a2 = world.call([*a.messages, user("t")], "a2")
    b2 = world.call([*b.messages, user("t")], "b2")
    receipt = world.receipt()
    assert (receipt.terminal_model_call_id, receipt.failure_reason) == (
        None,
        "no terminal: several_conversations[2]",
    )
    longest = world.receipt(among_conversations="longest")
    assert (longest.terminal_model_call_id, longest.terminal_selection) == (a2.id, "heuristic")
    assert longest.terminal_attribution_reason == "longest_of_2_conversations"
    assert world.receipt(among_conversations="latest").terminal_model_call_id == b2.id
    with pytest.raises(RequestError, match="among_conversations must be one of"):
        world.receipt(among_conversations="newest")


def test_after_a_compaction_the_reward_goes_to_nobody_unless_it_is_said_to_whom(world: World) -> None:
    a = world.call([user("s"), user("q")], "a")
    b = world.call([*a.messages, user("t")], "b")
    c = world.call([user("s"), user("a summary")], "c")
    d = world.call([*c.messages, user("t")], "d")
    assert world.receipt().capture_poisoned
    for said in ({"response_id": f"resp-{d.id}"}, {"output": assistant("d")}, {"among_conversations": "latest"}):
        assert world.receipt(**said).terminal_model_call_id == d.id
    assert world.receipt(response_id=f"resp-{b.id}").terminal_model_call_id == b.id


def test_the_latest_conversation_may_end_in_an_answer_that_was_not_captured(world: World) -> None:
    world.call([user("q")], "a")
    world.call([user("a summary")], "lost", logprobs=[])
    receipt = world.receipt(among_conversations="latest")
    assert (receipt.terminal_model_call_id, receipt.terminal_attribution_reason) == (None, "answer_not_captured")


def test_a_retry_of_an_empty_answer_is_chosen_over_it(world: World) -> None:
    a = world.call([user("q")], "a")
    world.call([*a.messages, user("t")], "", generated=[])
    again = world.call([*a.messages, user("t")], "b")
    assert world.receipt().terminal_model_call_id == again.id


def test_an_empty_answer_that_a_witness_names_is_the_terminal_for_verification_to_refuse(world: World) -> None:
    empty = world.call([user("q")], "", generated=[])
    world.call([user("q")], "b")
    assert world.receipt(response_id=f"resp-{empty.id}").terminal_model_call_id == empty.id


def test_only_empty_answers_leave_one_of_them_the_terminal(world: World) -> None:
    empty = world.call([user("q")], "", generated=[])
    assert world.receipt().terminal_model_call_id == empty.id
