"""Which conversations are the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.capture.fingerprint import (
    UnreadableConversation,
    conversation_fingerprint,
    is_model_authored,
    output_messages,
    prefix_fingerprints,
)

TEXT = st.text(alphabet='aé \n"\\\ud800', max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(width=16) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), JSON, max_size=4), max_size=6)


def _tool_call(arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return conversation_fingerprint([left]) == conversation_fingerprint([right])


def test_the_format_of_version_1_is_fixed() -> None:
    conversation = [{"role": "user", "content": "héllo\n"}, _tool_call('{"b": 1, "a": [2]}')]
    assert prefix_fingerprints(conversation) == [
        "243d51594099e65506a6d725ed89b44be706ed957107eb76d84a30bf0180f48f",
        "9a9f28e26fe16c29443d8390c7c5918d153512c755792c55f4552c36751a63d0",
        "5d52b229de043f9a9998d9cd263fbaa3b3d0989c7ce0e33d2f93cc2fe5c17aa2",
    ]


def test_key_order_empty_values_and_the_form_of_text_do_not_count() -> None:
    plain = {"role": "assistant", "content": "hi"}
    assert same(plain, {"content": "hi", "role": "assistant"})
    assert same(plain, {**plain, "refusal": None, "tool_calls": [], "audio": None})
    assert same(plain, {**plain, "content": [{"type": "text", "text": "hi"}]})
    assert same(_tool_call("{}"), {**_tool_call("{}"), "content": ""})
    call = _tool_call("{}")["tool_calls"][0]
    assert same(_tool_call("{}"), {"role": "assistant", "tool_calls": [{**call, "index": None}]})


def test_whitespace_and_who_speaks_count() -> None:
    assert not same({"role": "user", "content": "hi"}, {"role": "user", "content": "hi "})
    assert not same({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"})
    assert not same({"role": "user", "content": "ä"}, {"role": "user", "content": "a\u0308"})


def test_tool_arguments_compare_as_json_and_tool_call_ids_as_they_are() -> None:
    assert same(_tool_call('{"a": 1, "b": null}'), _tool_call('{"b":null,"a":1}'))
    assert not same(_tool_call('{"a": 1}'), _tool_call('{"a": 2}'))
    assert not same(_tool_call("{}", "call_1"), _tool_call("{}", "call_2"))
    assert not same(_tool_call("{broken"), _tool_call("{ broken"))


def test_tokens_and_reasoning_that_an_agent_does_not_echo_do_not_count() -> None:
    echoed = {"role": "assistant", "content": "hi"}
    assert same(echoed, {**echoed, "reasoning_content": "hmm", "generation_token_ids": [1], "prompt_token_ids": [2]})


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
    ["text", {"content": b"x"}, {1: "x"}, {"content": {2: "x"}}, {"content": _deep(1_000)}],
    ids=["not an object", "bytes", "integer key", "nested integer key", "too deep"],
)
def test_what_is_not_plain_json_is_refused_by_name(message: Any) -> None:
    with pytest.raises(UnreadableConversation):
        prefix_fingerprints([message])


@given(messages=MESSAGES)
def test_prefix_fingerprints_are_those_of_the_prefixes(messages: list[dict[str, Any]]) -> None:
    prefixes = [conversation_fingerprint(messages[:n]) for n in range(len(messages) + 1)]
    assert prefix_fingerprints(messages) == prefixes
    assert len(set(prefixes)) == len(prefixes)
