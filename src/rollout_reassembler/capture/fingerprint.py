"""Version-2 fingerprints of conversations: how a request finds the call it continues.

In come messages as agents send them (chat, responses or messages dialect, plain JSON values); out come SHA-256
hex digests. One a prefix, each made from the one before, so that "which recorded call does this request
extend furthest?" is one dictionary lookup a prefix:

    messages     [system, user, assistant, user]
    fingerprints [f0, f1, f2, f3, f4]      f0 of nothing, f3 = sha256(f2 + said(assistant))
    a call that was asked [system, user] and answered `assistant` is recorded under f3

Two messages are the same when they *say* the same. What is said is an allow list of what a chat template can see:

- the role; `assistant` for a `function_call` item, `tool` for a `function_call_output`
- text, its parts joined, in normal form; other parts (images) as their JSON
- tool calls: id, name, arguments; the id that a tool's result answers

Every other key is ignored (`name`, `cache_control`, `index`, `refusal`, token fields), and so is reasoning, also as
parts or items of its own: an agent need not echo it. Arguments are JSON values, whether they came as text or as
an object; broken JSON is its text. A text's **normal form**: line ends are `\\n`; white space at the end of a line,
and at both ends of the text, does not count, nor do blank lines; a lone surrogate, and U+FFFD, is `?`.

A prefix has four marks. `said` is the above; `verbatim` the same without the normal form of text, which tells two
calls apart that differ in white space alone; `spoken` covers what models said and nothing else, whatever messages it
was cut into, for an agent that puts tool results between the calls of one answer, and `spoken_verbatim` is its like.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_reassembler.capture.records import Message
from rollout_reassembler.contract.errors import UnreadableConversation

FINGERPRINT_VERSION = 2

_DOMAIN = b"rollout-reassembler-conversation-v2"
_MAX_DEPTH = 64
_TEXT_PARTS = frozenset({"", "text", "input_text", "output_text"})
_UNSAID_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text", "tool_use"})
_FORMAL_KEYS = frozenset({"annotations", "cache_control", "index", "logprobs"})
_NO_CHARACTER = re.compile("[\ud800-\udfff\ufffd]")

Output = Message | Sequence[Message]
"""What a call answered: one assistant message, or the several items of one answer."""


@dataclass(frozen=True)
class Marks:
    """What the conversation up to some message is known by."""

    said: str
    verbatim: str
    spoken: str
    spoken_verbatim: str

    def followed_by(self, message: Message) -> Marks:
        """The marks of the conversation with one message more. Raises `UnreadableConversation`."""
        heard = _said(message)
        if heard is None:
            return self
        normal, exact = _encoded(heard, _normal_text), _encoded(heard, str)
        said = _json(normal)
        spoken, spoken_verbatim = self.spoken, self.spoken_verbatim
        if heard.role == "assistant":
            spoken, spoken_verbatim = _spoken(spoken, normal), _spoken(spoken_verbatim, exact)
        return Marks(
            said=_link(self.said, said),
            verbatim=_link(self.verbatim, said if exact == normal else _json(exact)),
            spoken=spoken,
            spoken_verbatim=spoken_verbatim,
        )


_START = hashlib.sha256(_DOMAIN).hexdigest()
NOTHING_SAID = Marks(_START, _START, _START, _START)


def prefix_marks(messages: Iterable[Message], start: Marks = NOTHING_SAID) -> list[Marks]:
    """The marks of `start` and of it with one, two, … `messages` added."""
    marks = [start]
    for message in messages:
        marks.append(marks[-1].followed_by(message))
    return marks


def conversation_fingerprint(messages: Sequence[Message]) -> str:
    """The fingerprint of a whole conversation."""
    return prefix_marks(messages)[-1].said


def output_messages(output: Output) -> list[Message]:
    """An answer as the turns that an agent will echo; a message without a role is the assistant's."""
    items = [output] if isinstance(output, Mapping) else list(output)
    return [item if "role" in item or "type" in item else {"role": "assistant", **item} for item in items]


def is_model_authored(message: Message) -> bool:
    """Whether a model said this turn; a turn that says nothing is nobody's."""
    heard = _said(message)
    if heard is None or heard.role != "assistant":
        return False
    normal = _encoded(heard, _normal_text)
    return bool(normal["content"] or normal["calls"])


def shown(message: Message) -> str:
    """What a message says as one text, for people who look for the difference between two."""
    heard = _said(message)
    if heard is None:
        return ""
    said = _encoded(heard, _normal_text)
    parts = [value if kind == "text" else f"{kind}: {_readable(value)}" for kind, value in said["content"]]
    calls = [f"call {_readable(call[:2])[1:-1]}, {call[2][0]}: {_written(call[2])}" for call in said["calls"]]
    answers = [f"answers {said['answers']}"] if said["answers"] else []
    return f"{said['role']}: {' | '.join([*parts, *calls, *answers])}"


def _written(arguments: list[Any]) -> str:
    return str(arguments[1]) if arguments[0] == "text" else _readable(arguments[1])


def _readable(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True)
class _Said:
    """A message: role, parts as `[kind, value]`, tool calls as `[id, name, arguments]`, the call it answers."""

    role: Any
    parts: list[list[Any]]
    calls: list[list[Any]]
    answers: Any


def _said(message: Message) -> _Said | None:
    """What a message says; `None` for an item of reasoning, which nobody has to echo."""
    if not isinstance(message, Mapping):
        raise UnreadableConversation(f"a message is a {type(message).__name__}, not an object")
    kind = message.get("type")
    if kind == "function_call":
        name = message.get("name")
        if message.get("namespace"):
            name = f"{message['namespace']}__{name}"
        call = _call(message.get("call_id") or message.get("id"), name, message.get("arguments"))
        return _Said("assistant", [], [call], "")
    if kind == "function_call_output":
        identity = message.get("call_id") or message.get("id") or ""
        return _Said("tool", _parts(message.get("output")), [], _plain(identity))
    role = message.get("role")
    if kind == "reasoning" and role is None:
        return None
    content = message.get("content")
    answers = message.get("tool_call_id") or ""
    return _Said(_plain(role or kind or ""), _parts(content), _calls(message, content), _plain(answers))


def _parts(content: Any) -> list[list[Any]]:
    """Content as `[kind, value]`: texts that follow each other as one, other parts without formal keys."""
    parts: list[list[Any]] = []
    for part in content if isinstance(content, list | tuple) else [content]:
        kind, value = _part(part)
        if kind == "text" and parts and parts[-1][0] == "text":
            parts[-1][1] += value
        elif kind:
            parts.append([kind, value])
    return parts


def _part(part: Any) -> tuple[str, Any]:
    """One part of a message; its kind is empty when it says nothing."""
    if part is None:
        return "", None
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, Mapping):
        return "json", _plain(part)
    kind = str(part.get("type") or "")
    if kind in _UNSAID_PARTS:
        return "", None
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return "text", part["text"]
    if kind == "tool_result":
        identity = part.get("tool_use_id") or part.get("id") or ""
        return kind, [_plain(identity), _parts(part.get("content"))]
    if kind in _TEXT_PARTS and "text" in part and part["text"] is None:
        return "", None
    return kind or "json", _plain({key: value for key, value in part.items() if key not in _FORMAL_KEYS})


def _calls(message: Message, content: Any) -> list[list[Any]]:
    """A message's tool calls as `[id, name, arguments]`, wherever its dialect puts them."""
    calls: list[list[Any]] = []
    for block in content if isinstance(content, list | tuple) else ():
        if isinstance(block, Mapping) and block.get("type") == "tool_use":
            calls.append(_call(block.get("id"), block.get("name"), block.get("input")))
    told = message.get("tool_calls")
    for call in told if isinstance(told, list | tuple) else ():
        if not isinstance(call, Mapping):
            calls.append(["", "", _plain(call)])
            continue
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        calls.append(_call(call.get("id"), function.get("name"), function.get("arguments")))
    alone = message.get("function_call")
    if isinstance(alone, Mapping):
        calls.append(_call("", alone.get("name"), alone.get("arguments")))
    return calls


def _call(identity: Any, name: Any, arguments: Any) -> list[Any]:
    return [_plain(identity or ""), _plain(name or ""), _arguments(arguments)]


def _arguments(value: Any) -> Any:
    """Arguments as the JSON value they are, under `json`; what is no JSON as its text."""
    if value is None:
        return ["text", ""]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ["text", value.strip()]
    return ["json", _plain(value)]


def _plain(value: Any, depth: int = 0) -> Any:
    """A JSON value with texts that can be encoded."""
    if depth > _MAX_DEPTH:
        raise UnreadableConversation(f"a message is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, str):
        return _NO_CHARACTER.sub("?", value)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {_string_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise UnreadableConversation(f"a message holds a {type(value).__name__}")


def _string_key(key: Any) -> str:
    if not isinstance(key, str):
        raise UnreadableConversation(f"a message has the key {key!r:.80}, which is not a string")
    return _NO_CHARACTER.sub("?", key)


def _normal_text(text: str) -> str:
    """A text in normal form; the module's docstring says what that is."""
    lines = (line.rstrip() for line in _NO_CHARACTER.sub("?", text).splitlines())
    return "\n".join(filter(None, lines)).strip()


def _encoded(heard: _Said, form: Callable[[str], str]) -> dict[str, Any]:
    """A message as it is hashed, its texts in `form`; a text of which nothing is left was not said."""
    return {
        "role": heard.role,
        "content": _formed(heard.parts, form),
        "calls": heard.calls,
        "answers": heard.answers,
    }


def _formed(parts: list[list[Any]], form: Callable[[str], str]) -> list[list[Any]]:
    formed = []
    for kind, value in parts:
        if kind == "text":
            value = form(value)
        elif kind == "tool_result":
            value = [value[0], _formed(value[1], form)]
        if value != "":
            formed.append([kind, value])
    return formed


def _spoken(previous: str, encoded: dict[str, Any]) -> str:
    """The chain of what models said, one digest a part or tool call, whatever messages they came in."""
    for piece in (*encoded["content"], *encoded["calls"]):
        previous = _link(previous, _json(piece))
    return previous


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _link(previous: str, encoded: bytes) -> str:
    """The next digest of a chain."""
    return hashlib.sha256(bytes.fromhex(previous) + encoded).hexdigest()
