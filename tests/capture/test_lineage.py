"""Whose child a request is, from the messages alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_reassembler.capture.fingerprint import conversation_fingerprint
from rollout_reassembler.capture.lineage import RolloutIndex
from rollout_reassembler.capture.requests import Request
from rollout_reassembler.capture.rows import RecordedRow, parse_row
from rollout_reassembler.contract.errors import InvalidLedger
from rollout_reassembler.contract.records import CallRecord
from tests.capture.world import World, assistant, user


def test_a_next_prompt_extends_the_longest_of_several_calls(world: World) -> None:
    # [1,2]|[3,4], [1..5]|[6] and a retry [1,2]|[3..7]: the prompt [1..8] extends the retry.
    first = world.call([user("q")], "a", prompt=[1, 2], generated=[3, 4])
    second = world.call([*first.messages, user("t")], "b", carry=[5], generated=[6])
    retry = world.call([user("q")], "a long answer", prompt=[1, 2], generated=[3, 4, 5, 6, 7])
    after_retry = world.call([*retry.messages, user("t")], "c", carry=[8], generated=[9])
    after_second = world.call([*second.messages, user("t")], "c", carry=[8], generated=[9])
    assert after_retry.admission.parent_call_id == retry.id
    assert after_second.admission.parent_call_id == second.id
    assert (after_retry.admission.prev_len, after_second.admission.prev_len) == (7, 6)
    assert world.staged(after_retry).token_ids_delta.tolist() == [8, 9]


def test_three_turns_are_one_chain_of_three_calls(world: World) -> None:
    a = world.call([user("q")], "a", prompt=[1], generated=[2])
    b = world.call([*a.messages, user("t")], "b", carry=[3], generated=[4])
    c = world.call([*b.messages, user("t")], "c", carry=[5], generated=[6])
    assert [x.admission.resolution for x in (a, b, c)] == ["root", "resolved", "resolved"]
    assert c.admission.staging_chain == tuple(f"r/{x.id}" for x in (a, b))
    assert c.admission.staging_digests == (a.coords.digest, b.coords.digest)
    assert [x.coords.cum_len for x in (a, b, c)] == [2, 4, 6]
    receipt = world.receipt()
    assert (receipt.terminal_model_call_id, receipt.capture_poisoned) == (c.id, False)


def test_interleaved_agents_in_one_ledger_are_two_chains(world: World) -> None:
    a1 = world.call([user("agent A")], "a1")
    b1 = world.call([user("agent B")], "b1")
    a2 = world.call([*a1.messages, user("go on")], "a2")
    b2 = world.call([*b1.messages, user("go on")], "b2")
    parents = [x.admission.parent_call_id for x in (a1, b1, a2, b2)]
    assert parents == [None, None, a1.id, b1.id]


def test_a_call_sent_again_with_identical_messages_is_a_sibling_and_both_stay(world: World) -> None:
    a = world.call([user("q")], "a")
    b = world.call([*a.messages, user("t")], "b", generated=[60])
    again = world.call([*a.messages, user("t")], "b again", generated=[61])
    assert again.admission.parent_call_id == b.admission.parent_call_id == a.id
    assert [r.model_call_id for r in world.ledger.read("r").records] == [a.id, b.id, again.id]


def test_a_call_that_generated_nothing_is_never_a_parent_of_the_call_sent_again(world: World) -> None:
    a = world.call([user("q")], "a")
    empty = world.call([*a.messages, user("t")], "", generated=[])
    again = world.call([*a.messages, user("t")], "b")
    after_empty = world.call([*empty.messages, user("please answer")], "c")
    assert again.admission.parent_call_id == a.id
    assert after_empty.admission.parent_call_id == a.id
    assert world.ledger.read("r").empty_calls == {empty.id}
    assert not world.ledger.read("r").failures


def test_a_one_token_answer_is_a_parent_although_it_says_nothing(world: World) -> None:
    eos = world.call([user("q")], "", generated=[2])
    assert world.call([*eos.messages, user("well?")], "b").admission.parent_call_id == eos.id


def test_the_first_turn_sent_again_after_later_turns_is_a_new_root(world: World) -> None:
    a = world.call([user("q")], "a")
    world.call([*a.messages, user("t")], "b")
    again = world.call([user("q")], "a, differently", generated=[60])
    assert again.admission.resolution == "root"
    assert not world.receipt().capture_poisoned


def test_a_first_turn_with_examples_in_it_is_a_root_each_time_it_is_sent(world: World) -> None:
    examples = [user("2+2"), assistant("4")]
    first = world.call([*examples, user("3+3")], "6")
    world.call([*first.messages, user("and 1+1?")], "2")
    again = world.call([*examples, user("3+3")], "6!", generated=[60])
    other = world.call([*examples, user("5+5")], "10")
    assert [x.admission.resolution for x in (first, again, other)] == ["root"] * 3


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda m: [m[0], assistant("an edited answer"), *m[2:]],
        lambda m: [m[0], m[1], m[2], assistant("not what b said"), user("t")],
        lambda m: [user("a summary so far"), assistant("it went well"), user("t")],
    ],
    ids=["first answer edited", "later answer edited", "history summarised"],
)
def test_a_rewritten_history_is_unresolved_and_poisons_where_that_is_wanted(strict: World, rewrite: Any) -> None:
    world = strict
    a = world.call([user("q")], "a")
    b = world.call([*a.messages, user("t")], "b")
    rewritten = world.call(rewrite([*b.messages, user("t")]), "c")
    assert rewritten.admission.resolution == "unresolved"
    assert rewritten.coords.disposition == "capture_failed"
    receipt = world.receipt()
    assert receipt.capture_poisoned
    assert "unresolved_parent: foreign_turn" in (receipt.failure_reason or "")


def tool_turn(arguments: Any = '{"q": "x"}', **call: Any) -> dict[str, Any]:
    function = {"name": "search", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "I look it up.\n",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function, **call}],
    }


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "found it"}


def first_call(world: World, output: dict[str, Any], messages: list[dict[str, Any]] | None = None) -> None:
    """Call `first`, asked `messages`, answered with `output`."""
    admission = world.ledger.admit("r", messages or [user("q")], model_call_id="first")
    coords = world.recorder.complete_call(world.recorder.begin_call(admission), [1, 2], [3], [-0.5])
    assert world.ledger.record(admission, coords, response_id="resp-first", output=output) is not None


@pytest.mark.parametrize(
    "echo",
    [
        tool_turn(),
        {**tool_turn(), "cache_control": {"type": "ephemeral"}},
        {**tool_turn(), "thinking_blocks": [{"type": "thinking", "thinking": "hm"}]},
        {**tool_turn(), "name": "agent"},
        tool_turn(index=0),
        tool_turn(type=None),
        tool_turn(arguments={"q": "x"}),
        tool_turn(arguments='{ "q" :"x" }'),
        {**tool_turn(), "content": "I look it up."},
        {**tool_turn(), "content": [{"type": "text", "text": "I look "}, {"type": "text", "text": "it up."}]},
        {**tool_turn(), "content": [{"type": "text", "text": "I look it up."}, {"type": "text", "text": ""}]},
        {**tool_turn(), "content": ["I look it up.\n"], "reasoning_content": "hm"},
    ],
    ids=[
        "as it was",
        "cache_control",
        "thinking_blocks",
        "name",
        "index in a tool call",
        "a missing type",
        "arguments as an object",
        "arguments in other spaces",
        "a stripped newline",
        "a split text part",
        "an empty text part",
        "content as parts",
    ],
)
def test_an_echo_that_says_the_same_continues_its_call(world: World, echo: dict[str, Any]) -> None:
    first_call(world, tool_turn())
    admission = world.ledger.admit("r", [user("q"), echo, RESULT])
    assert (admission.resolution, admission.parent_call_id) == ("resolved", "first")


def test_tool_results_between_the_calls_of_one_answer_continue_it(world: World) -> None:
    calls = [{"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": "{}"} for at in range(2)]
    results = [{"type": "function_call_output", "call_id": f"c{at}", "output": "ok"} for at in range(2)]
    admission = world.ledger.admit("r", [user("q")], model_call_id="first")
    coords = world.recorder.complete_call(world.recorder.begin_call(admission), [1, 2], [3], [-0.5])
    world.ledger.record(admission, coords, response_id="resp-first", output=calls)
    spread = world.ledger.admit("r", [user("q"), calls[0], results[0], calls[1], results[1]])
    assert spread.parent_call_id == "first"
    halved = world.ledger.admit("r", [user("q"), calls[0], results[0]])
    assert (halved.new_root_reason or "").startswith("foreign_turn: ")


def test_of_two_answers_that_differ_in_white_space_the_one_to_the_letter_is_continued(world: World) -> None:
    a = world.call([user("q")], "yes", generated=[50])
    b = world.call([user("q")], "yes ", generated=[51])
    world.call([*a.messages, user("t")], "c")
    neither = [user("q"), assistant(" yes"), user("t")]
    assert world.call(neither, "d").admission.parent_call_id == a.id  # the one that was continued before
    assert world.call([*b.messages, user("t")], "e").admission.parent_call_id == b.id
    spread = [user("q"), user("by the way"), assistant("yes "), user("t")]
    assert world.call(spread, "f").admission.parent_call_id == b.id


def test_an_unresolved_request_is_told_the_nearest_message_and_the_first_difference(strict: World) -> None:
    world = strict
    first_call(world, tool_turn(arguments='{"q": "x'))
    admission = world.ledger.admit("r", [user("q"), tool_turn(arguments={}), RESULT])
    assert admission.unresolved_reason == (
        "foreign_turn: message 1 is an assistant's that no call answered; "
        'message 1 differs from the nearest recorded one: recorded \'…"call_1", "search", text: {"q": "x\', '
        'came \'…"call_1", "search", json: {}\''
    )


def test_the_nearest_message_is_bounded_text_in_the_ledger_and_the_receipt(strict: World) -> None:
    world = strict
    first_call(world, assistant("a " * 5_000))
    world.call([user("q"), assistant("a " * 5_000 + "b"), user("t")], "c")
    reason = world.receipt().failure_reason or ""
    assert "message 1 differs from the nearest recorded one" in reason
    assert len(reason) < 600


def test_a_ledger_that_did_not_hear_the_conversation_names_the_first_unknown_message(world: World) -> None:
    first_call(world, assistant("a"))
    elsewhere = World(world.ledger.path_of("r").parent)
    admission = elsewhere.ledger.admit("r", [user("q"), assistant("b"), user("t")])
    assert (admission.new_root_reason or "").endswith("message 0 is the first that this process has not heard")


def test_rows_of_version_1_are_read_and_continued_by_nobody(world: World) -> None:
    exchange = world.call([user("q")], "a")
    path = world.ledger.path_of("r")
    old = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        row = {**row, "fingerprint_version": 1}
        for mark in ("verbatim", "spoken", "spoken_verbatim"):
            row.pop(mark, None)
        if "record" in row:
            row["record"] = {**row["record"], "fingerprint_version": 1}
        old.append(json.dumps(row))
    path.write_text("\n".join(old) + "\n", encoding="utf-8")
    again = World(path.parent)
    assert again.receipt().terminal_model_call_id == exchange.id
    assert again.ledger.admit("r", [*exchange.messages, user("t")]).parent_call_id is None


def test_two_equal_answers_with_other_tokens_leave_the_next_request_unresolved(strict: World) -> None:
    world = strict
    a = world.call([user("q")], "same words", generated=[50, 51])
    world.call([user("q")], "same words", generated=[52])
    unresolved = world.call([*a.messages, user("t")], "b")
    assert unresolved.admission.resolution == "unresolved"
    assert "ambiguous" in (unresolved.admission.unresolved_reason or "")
    assert world.receipt().capture_poisoned


def test_two_equal_answers_with_the_same_tokens_are_interchangeable(world: World) -> None:
    a = world.call([user("q")], "same words")
    world.call([user("q")], "same words")
    assert world.call([*a.messages, user("t")], "b").admission.parent_call_id == a.id


def test_of_two_equal_answers_the_one_that_was_continued_is_continued_again(world: World) -> None:
    a = world.call([user("q")], "same words", generated=[50])
    world.call([*a.messages, user("t")], "b")
    world.call([user("q")], "same words", generated=[51])
    assert world.call([*a.messages, user("another")], "c").admission.parent_call_id == a.id


def test_a_history_that_cannot_be_read_is_unresolved(world: World, strict: World) -> None:
    unreadable = [{"role": "user", "content": object()}]
    assert strict.ledger.admit("r", unreadable).resolution == "unresolved"
    assert strict.receipt().capture_poisoned
    a = world.call(unreadable, "a")
    assert (a.admission.new_root_reason or "").startswith("unreadable: ")
    assert world.receipt().terminal_model_call_id == a.id


def _tool_history(world: World) -> list[dict[str, Any]]:
    """`[u, a, tool, a, u]`, two calls captured."""
    a = world.call([user("q")], "a", generated=[50])
    b = world.call([*a.messages, {"role": "tool", "tool_call_id": "", "content": "a long result"}], "b", generated=[51])
    return [*b.messages, user("t")]


@pytest.mark.parametrize(
    ("edit", "cause"),
    [
        (lambda m: [user("a summary of all so far")], "another_conversation"),
        (lambda m: [m[0], m[1], {**m[2], "content": "[cleared]"}, *m[3:]], "edited_history"),
        (lambda m: m[3:], "edited_history"),
        (lambda m: [user("a summary"), *m[3:]], "edited_history"),
        (lambda m: [m[0], assistant("other words"), *m[2:]], "foreign_turn"),
        (lambda m: [m[0], assistant("a summary under the assistant's role"), m[4]], "foreign_turn"),
        (lambda m: [*m[:4], user("t"), assistant("a hand-off"), user("go on")], "foreign_turn"),
        (lambda m: [*m[:4], {"role": "user", "content": object()}], "unreadable"),
    ],
    ids=[
        "compacted",
        "a tool result cleared",
        "a sliding window",
        "a compaction that keeps the last messages",
        "an edited answer",
        "a summary as an assistant",
        "another model's turn behind a clean chain",
        "nothing that can be read",
    ],
)
def test_an_edited_history_opens_a_new_root_and_costs_nothing(world: World, edit: Any, cause: str) -> None:
    edited = edit(_tool_history(world))
    c = world.call(edited, "c", generated=[52, 53])
    assert (c.admission.resolution, c.admission.prev_len) == ("root", 0)
    assert (c.admission.new_root_reason or "").partition(":")[0] == cause
    assert world.ledger.read("r").new_roots == {cause: 1}
    assert world.ledger.read("r").metrics()[f"lineage/new_root_{cause}"] == 1
    staged = world.staged(c)
    assert staged.token_mask_delta.tolist() == [0.0, 0.0, 1.0, 1.0]  # its whole prompt is context
    if cause != "unreadable":
        d = world.call([*c.messages, user("and on")], "d")
        assert d.admission.parent_call_id == c.id
    receipt = world.receipt(response_id=f"resp-{c.id}")
    assert (receipt.terminal_model_call_id, receipt.capture_poisoned) == (c.id, False)


def test_an_edited_request_sent_again_is_a_retry_and_no_new_cause(world: World) -> None:
    history = _tool_history(world)
    edited = [history[0], assistant("other words"), user("t")]
    for answer in ("c", "c again"):
        assert world.call(edited, answer).admission.resolution == "root"
    assert world.ledger.read("r").new_roots == {"foreign_turn": 1}


def test_two_equal_answers_with_other_tokens_open_a_new_root(world: World) -> None:
    a = world.call([user("q")], "same words", generated=[50, 51])
    world.call([user("q")], "same words", generated=[52])
    assert world.call([*a.messages, user("t")], "b").coords.disposition == "staged"
    assert world.ledger.read("r").new_roots == {"ambiguous": 1}


def test_a_request_behind_a_failed_call_opens_a_new_root(world: World) -> None:
    a = world.call([user("q")], "a")
    failed = world.call([*a.messages, user("t")], "b", logprobs=[])
    c = world.call([*failed.messages, user("t")], "c")
    assert c.admission.new_root_reason == "failed_call: message 3 is the answer of a call that was not captured"
    receipt = world.receipt(response_id=f"resp-{c.id}")
    assert [record.model_call_id for record in receipt.manifest] == [a.id, c.id]
    assert not receipt.capture_poisoned


def test_the_first_request_of_a_rollout_has_no_cause(world: World) -> None:
    assert world.call([user("2+2"), assistant("4"), user("3+3")], "6").admission.new_root_reason is None
    assert world.call([user("2+2"), assistant("4"), user("3+3")], "six").admission.new_root_reason is None
    assert world.ledger.read("r").new_roots == {}


def test_fingerprints_of_another_version_match_nothing(world: World) -> None:
    a = world.call([user("q")], "a")
    assert a.record is not None
    index = RolloutIndex()
    index.followed_by(RecordedRow(record=a.record.model_copy(update={"fingerprint_version": 1}), generation_len=2))
    assert index.resolve(Request.of([*a.messages, user("t")])).resolution == "root"  # nothing admitted yet


def test_a_row_of_unknown_kind_is_refused_rather_than_skipped() -> None:
    with pytest.raises(InvalidLedger):
        parse_row({"kind": "amended", "model_call_id": "c"})


@st.composite
def _rollouts(draw: st.DrawFn) -> list[tuple[int, str, str]]:
    """Calls as (index of the earlier call to continue, or -1, what is asked, what is answered)."""
    words = st.sampled_from(["x", "y", "z"])
    calls: list[tuple[int, str, str]] = []
    for at in range(draw(st.integers(1, 12))):
        calls.append((draw(st.integers(-1, at - 1)), draw(words), f"answer {at}"))
    return calls


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rollout=_rollouts())
def test_every_continuation_finds_the_call_it_continues(
    tmp_path_factory: pytest.TempPathFactory, rollout: list[tuple[int, str, str]]
) -> None:
    world = World(tmp_path_factory.mktemp("ledger"))
    made = []
    for parent, asked, answer in rollout:
        history = made[parent].messages if parent >= 0 else []
        made.append(world.call([*history, user(asked)], answer, generated=[60 + len(made)]))
    for exchange, (parent, _, _) in zip(made, rollout, strict=True):
        assert exchange.admission.parent_call_id == (made[parent].id if parent >= 0 else None)
        assert exchange.coords.disposition == "staged"


def test_lookup_is_one_dictionary_access_a_prefix() -> None:
    messages = [user(str(n)) if n % 2 == 0 else assistant(str(n)) for n in range(2_000)]
    request = Request.of([*messages, user("next")])
    index = RolloutIndex()
    record = CallRecord(
        model_call_id="c",
        prev_len=0,
        delta_len=1,
        cum_len=1,
        weight_version=0,
        digest="0" * 64,
        extras_digest="0" * 64,
        chain_hash="0" * 64,
        cumulative_hash="0" * 64,
        staging_key="r/c",
        mode="text",
        response_id="x",
        continuation_fingerprint=conversation_fingerprint(messages),
        fingerprint_version=2,
    )
    index.followed_by(RecordedRow(record=record, generation_len=1))
    assert index.resolve(request).parent == record
    assert len(request.prefixes) == len(messages) + 2
