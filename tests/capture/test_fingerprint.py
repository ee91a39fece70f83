"""Which conversations are the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.capture.fingerprint import (
    Marks,
    conversation_fingerprint,
    is_model_authored,
    output_messages,
    prefix_marks,
)
from rollout_reassembler.contract.errors import UnreadableConversation

TEXT = st.text(alphabet='aé \n"\\\ud800', max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(width=16) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), JSON, max_size=4), max_size=6)


def _tool_call(arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return conversation_fingerprint([left]) == conversation_fingerprint([right])


def test_the_format_of_version_2_is_fixed() -> None:
    conversation = [{"role": "user", "content": "héllo\n"}, _tool_call('{"b": 1, "a": [2]}')]
    assert prefix_marks(conversation)[1:] == [
        Marks(
            said="2ce59eb89ae93c5ebec7be9f93ad8811341cd3e18af263f8406f8dcc2d03bba7",
            verbatim="e591362d8720657dda0f8466a344a0f0a34450dd8d2e48533389a67a78537787",
            spoken="3cbf74a7b591671c5ad1ead4ce7453d518f78eee08c55e69e3c68ee4fef8ed7a",
            spoken_verbatim="3cbf74a7b591671c5ad1ead4ce7453d518f78eee08c55e69e3c68ee4fef8ed7a",
        ),
        Marks(
            said="0d3b770605f245461a59a8483e15611bf7bc17da41851ed7ed8f27065f999ae7",
            verbatim="d1b8621869e4c8443304f2084b6deabd2c847f6c038f8b5ea509d88a9321c8da",
            spoken="fbc26a1c221a9be8625688bb47040532f7092e528dfc3633881acd8265fa04d8",
            spoken_verbatim="fbc26a1c221a9be8625688bb47040532f7092e528dfc3633881acd8265fa04d8",
        ),
    ]


def test_key_order_and_the_form_of_content_do_not_count() -> None:
    plain = {"role": "assistant", "content": "hi there"}
    assert same(plain, {"content": "hi there", "role": "assistant"})
    assert same(plain, {**plain, "content": [{"type": "text", "text": "hi there"}]})
    assert same(plain, {**plain, "content": ["hi ", {"text": "there"}, {"type": "text", "text": ""}]})
    assert same(plain, {**plain, "content": [{"type": "output_text", "text": "hi there", "annotations": []}]})
    assert same(_tool_call("{}"), {**_tool_call("{}"), "content": ""})


@pytest.mark.parametrize(
    "formal",
    [
        {"name": "agent"},
        {"refusal": None, "tool_calls": [], "audio": None},
        {"cache_control": {"type": "ephemeral"}},
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        {"provider_specific_fields": {"x": [1]}, "annotations": []},
        {"reasoning_content": "hmm", "generation_token_ids": [1], "prompt_token_ids": [2]},
        {"content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "hi"}]},
    ],
    ids=str,
)
def test_keys_and_parts_that_no_template_shows_do_not_count(formal: dict[str, Any]) -> None:
    assert same({"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "hi", **formal})


def test_formal_keys_of_a_tool_call_do_not_count() -> None:
    (call,) = _tool_call("{}")["tool_calls"]
    without_type = {key: value for key, value in call.items() if key != "type"}
    for other in ({**call, "index": 0}, without_type, {**call, "cache_control": {}}):
        assert same(_tool_call("{}"), {"role": "assistant", "tool_calls": [other]})


@pytest.mark.parametrize(
    "text",
    ["line\n  indented", "\n\nline\n  indented\n", "line  \r\n\r\n  indented\t", "  line\n\n\n  indented"],
    ids=repr,
)
def test_the_normal_form_of_text_drops_what_editors_drop(text: str) -> None:
    assert same({"role": "user", "content": "line\n  indented"}, {"role": "user", "content": text})


def test_a_character_that_is_none_is_one_question_mark() -> None:
    plain = {"role": "user", "content": "a?"}
    assert same(plain, {"role": "user", "content": "a\ud800"})
    assert same(plain, {"role": "user", "content": "a\ufffd"})


def test_words_their_order_and_who_speaks_count() -> None:
    plain = {"role": "user", "content": "hi there"}
    for text in ("hithere", "hi  there", "hi\nthere", "hi there.", "there hi", "Hi there"):
        assert not same(plain, {"role": "user", "content": text})
    assert not same(plain, {**plain, "role": "assistant"})
    assert not same({"role": "user", "content": "a\nb"}, {"role": "user", "content": "a\n  b"})
    assert not same({"role": "user", "content": "ä"}, {"role": "user", "content": "a\u0308"})
    image = {"type": "image_url", "image_url": {"url": "x"}}
    assert not same({"role": "user", "content": [image]}, {"role": "user", "content": []})
    assert not same({"role": "user", "content": ["a", image, "b"]}, {"role": "user", "content": ["ab", image]})


def test_tool_arguments_compare_as_json_values_and_tool_call_ids_as_they_are() -> None:
    assert same(_tool_call('{"a": 1, "b": null}'), _tool_call('{"b":null,"a":1}'))
    assert same(_tool_call('{"a": [1, "x"]}'), _tool_call({"a": [1, "x"]}))
    assert same(_tool_call("{broken"), _tool_call(" {broken\n"))
    assert not same(_tool_call('{"a": 1}'), _tool_call('{"a": 2}'))
    assert not same(_tool_call('{"a": null}'), _tool_call("{}"))
    assert not same(_tool_call('{"a": 1}'), _tool_call('{"a": "1"}'))
    assert not same(_tool_call("{}", "call_1"), _tool_call("{}", "call_2"))
    assert not same(_tool_call("{broken"), _tool_call("{ broken"))
    assert not same(_tool_call('{"q": "x'), _tool_call("{}"))


def test_one_answer_says_the_same_in_each_dialect() -> None:
    chat = {**_tool_call('{"a": 1}'), "content": ""}
    responses = {
        "type": "function_call",
        "call_id": "call_1",
        "name": "f",
        "arguments": '{"a":1}',
        "status": "completed",
    }
    blocks = {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}]}
    assert same(chat, responses)
    assert same(chat, blocks)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "4"}
    assert same(result, {"type": "function_call_output", "call_id": "call_1", "output": "4"})
    assert not same(result, {**result, "tool_call_id": "call_2"})


def test_an_item_of_reasoning_is_no_message() -> None:
    reasoning = {"type": "reasoning", "summary": [{"text": "hm"}]}
    answer = {"role": "assistant", "content": "hi"}
    assert prefix_marks([reasoning, answer])[-1] == prefix_marks([answer])[-1]
    assert not is_model_authored(reasoning)


def test_the_marks_of_a_conversation_tell_three_things() -> None:
    asked, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}
    marks = prefix_marks([asked, answered])[-1]
    spaced = prefix_marks([asked, {**answered, "content": "a b "}])[-1]
    assert (spaced.said, spaced.spoken) == (marks.said, marks.spoken)
    assert spaced.verbatim != marks.verbatim
    other = prefix_marks([{**asked, "content": "another"}, answered])[-1]
    assert other.spoken == marks.spoken
    assert other.said != marks.said


def test_only_a_turn_that_says_something_is_a_models_word() -> None:
    assert is_model_authored({"role": "assistant", "content": "x"})
    assert is_model_authored(_tool_call("{}"))
    assert not is_model_authored({"role": "assistant", "content": ""})
    assert not is_model_authored({"role": "assistant", "content": None, "tool_calls": []})
    assert not is_model_authored({"role": "tool", "content": "x"})


def test_an_answer_without_a_role_is_the_assistants() -> None:
    assert output_messages({"content": "x"}) == [{"role": "assistant", "content": "x"}]
    assert output_messages([{"role": "assistant", "content": "x"}]) == [{"role": "assistant", "content": "x"}]


def _deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "message",
    ["text", {"content": b"x"}, {"content": {2: "x"}}, {"content": _deep(1_000)}, _tool_call({1: 2})],
    ids=["not an object", "bytes", "integer key", "too deep", "integer key in arguments"],
)
def test_what_is_not_plain_json_is_refused_by_name(message: Any) -> None:
    with pytest.raises(UnreadableConversation):
        prefix_marks([message])


@given(messages=MESSAGES)
def test_prefix_fingerprints_are_those_of_the_prefixes(messages: list[dict[str, Any]]) -> None:
    prefixes = [conversation_fingerprint(messages[:n]) for n in range(len(messages) + 1)]
    assert [marks.said for marks in prefix_marks(messages)] == prefixes
    assert len(set(prefixes)) == len(prefixes)
