"""What nemo-gym 0.7.0's `RolloutLineage` resolves resolves here, to the same call, however an agent edits it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from nemo_gym.token_id_capture.lineage import RolloutLineage
from nemo_gym.token_id_capture.records import ParentResolutionStatus

from tests.capture.world import World

Message = dict[str, Any]
History = list[Message]


def _answer(draw: st.DrawFn, at: int) -> Message:
    words = draw(st.sampled_from(["yes", "yes ", "no\n", "let me see", "ünï\n\ncode"]))
    count = draw(st.sampled_from([0, 0, 1, 2]))
    calls = [
        {
            "id": f"call_{at}_{number}",
            "type": "function",
            "function": {"name": "f", "arguments": draw(st.sampled_from(['{"a": 1, "b": [2]}', "{}", '{"q": "x', ""]))},
        }
        for number in range(count)
    ]
    message: Message = {"role": "assistant", "content": words}
    return {**message, "tool_calls": calls} if calls else message


def _follow_up(answer: Message, text: str) -> History:
    """What an agent adds behind an answer: results of its tool calls, or a user's word."""
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{text} of {call['id']}"}
        for call in answer.get("tool_calls", ())
    ]
    return results or [{"role": "user", "content": text}]


def _as_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    parts = [{"type": "text", "text": message["content"]}, {"type": "text", "text": ""}]
    return {**message, "content": parts}


def _with_arguments(message: Message, form: Callable[[Any], Any]) -> Message:
    calls = copy.deepcopy(message.get("tool_calls", []))
    for call in calls:
        arguments = call["function"]["arguments"]
        try:
            call["function"]["arguments"] = form(json.loads(arguments) if isinstance(arguments, str) else arguments)
        except ValueError:
            continue
    return {**message, "tool_calls": calls} if calls else message


def _with_index(message: Message) -> Message:
    calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls", []))]
    for call in calls:
        call.pop("type", None)
    return {**message, "tool_calls": calls} if calls else message


def _as_blocks(message: Message) -> Message:
    if message["role"] != "assistant" or not isinstance(message.get("content"), str):
        return message
    blocks = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": call["function"]["arguments"]}
        for call in message.get("tool_calls", ())
    ]
    return {"role": "assistant", "content": [{"type": "text", "text": message["content"]}, *blocks]}


EDITS: dict[str, Callable[[Message], Message]] = {
    "as it is": lambda m: m,
    "parts": _as_parts,
    "cache_control": lambda m: {**m, "cache_control": {"type": "ephemeral"}},
    "name": lambda m: {**m, "name": "agent"},
    "thinking_blocks": lambda m: {**m, "thinking_blocks": [{"type": "thinking", "thinking": "hm"}]},
    "reasoning": lambda m: {**m, "reasoning_content": "hm", "refusal": None},
    "key order": lambda m: dict(reversed(m.items())),
    "arguments as objects": lambda m: _with_arguments(m, lambda value: value),
    "arguments in other spaces": lambda m: _with_arguments(m, lambda value: json.dumps(value, indent=1)),
    "index, no type": _with_index,
    "messages dialect": _as_blocks,
    "stripped": lambda m: {**m, "content": m["content"].strip()} if isinstance(m.get("content"), str) else m,
    "other words": lambda m: {**m, "content": "something else"},
    "nothing said": lambda m: {**m, "content": ""},
}


@st.composite
def _edited(draw: st.DrawFn, history: History) -> History:
    """The history as an agent may send it: most messages as they were or edited in form, few in substance."""
    edited: History = []
    for message in copy.deepcopy(history):
        for name in draw(st.lists(st.sampled_from([*EDITS][:11]), max_size=2)):
            message = EDITS[name](message)
        edited.append(message)
    for name in draw(st.lists(st.sampled_from([*EDITS][11:]), max_size=1)):
        at = draw(st.integers(0, len(edited) - 1))
        edited[at] = EDITS[name](edited[at])
    change = draw(st.sampled_from([None] * 8 + ["drop", "insert", "empty turn", "interleave"]))
    at = draw(st.integers(0, len(edited) - 1))
    if change == "drop":
        del edited[at]
    elif change == "insert":
        edited.insert(at, {"role": "user", "content": "by the way"})
    elif change == "empty turn":
        edited.insert(at, {"role": "assistant", "content": ""})
    elif change == "interleave":
        edited = _interleaved(edited)
    return edited


def _interleaved(history: History) -> History:
    """Each tool call in a message of its own, its result behind it."""
    results = {message["tool_call_id"]: message for message in history if message.get("role") == "tool"}
    spread: History = []
    for message in history:
        calls = message.get("tool_calls") or []
        if message.get("role") == "tool":
            continue
        if len(calls) < 2:
            spread += [message, *(results[call["id"]] for call in calls if call["id"] in results)]
            continue
        for at, call in enumerate(calls):
            part = {"role": "assistant", "content": message.get("content") if at == 0 else None, "tool_calls": [call]}
            spread += [part, *([results[call["id"]]] if call["id"] in results else [])]
    return spread


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_what_the_reference_resolves_resolves_to_the_same_call(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    world, reference = World(tmp_path_factory.mktemp("ledger")), RolloutLineage()
    histories: list[History] = []
    records: dict[str, Any] = {}
    for at in range(data.draw(st.integers(2, 7), label="calls")):
        before = data.draw(st.sampled_from([None, *histories]), label="continues") if histories else None
        request = (
            [{"role": "user", "content": data.draw(st.sampled_from(["q", "q ", "w"]))}]
            if before is None
            else data.draw(_edited(before), label="request")
        )
        status, node, _ = reference.resolve_node(request)
        admission = world.ledger.admit("r", request, model_call_id=f"c{at}")
        event(f"reference {status.name}, here {admission.resolution}")
        if status is ParentResolutionStatus.RESOLVED and node.call_id in records:
            assert admission.resolution == "resolved", (admission.unresolved_reason, request)
            assert records[admission.parent_call_id].cumulative_hash == records[node.call_id].cumulative_hash
        answer = _answer(data.draw, at)
        opened = world.recorder.begin_call(admission)
        coords = world.recorder.complete_call(opened, [*opened.prefix_token_ids, 10 + at], [60 + at], [-0.5])
        record = world.ledger.record(admission, coords, response_id=f"resp-{at}", output=answer)
        if record is None:
            continue
        records[record.model_call_id] = record
        digest, items = record.cumulative_hash, [*request, answer]
        reference.record(record.model_call_id, items, [], digest, context_len=len(request), cum_len=record.cum_len)
        histories.append([*items, *_follow_up(answer, f"go on {at}")])
