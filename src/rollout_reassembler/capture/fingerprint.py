"""Version-1 fingerprints of conversations: how a request finds the call it continues.

In come messages as agents send them (chat dialect, plain JSON values); out come SHA-256 hex digests.
One digest a prefix, each made from the one before, so that "which recorded call does this request
extend furthest?" is one dictionary lookup a prefix:

    messages     [system, user, assistant, user]
    fingerprints [f0, f1, f2, f3, f4]      f0 of nothing, f3 = sha256(f2 + canonical(assistant))
    a call that was asked [system, user] and answered `assistant` is recorded under f3

Two messages are the same when they *say* the same, whatever became of their JSON on the way through
an agent: key order, keys with the value `None`, empty lists and empty text do not count, a string is
one text part, and a tool call's arguments compare as the JSON they are. Whitespace in what was said
counts, and so do tool call ids: an agent echoes them, and they tell two equal-looking retries apart.
Reasoning and token fields are what an engine adds and agents need not echo; they are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_reassembler.capture.records import Message
from rollout_reassembler.contract.errors import UnreadableConversation

FINGERPRINT_VERSION = 1

_DOMAIN = b"rollout-reassembler-conversation-v1"
_MAX_DEPTH = 64
_NOT_ECHOED = frozenset(
    {
        "generation_log_probs",
        "generation_token_ids",
        "logprobs",
        "prompt_token_ids",
        "reasoning",
        "reasoning_content",
        "routed_experts",
        "token_ids",
    }
)

Output = Message | Sequence[Message]
"""What a call answered: one assistant message, or the several items of one answer."""


def prefix_fingerprints(messages: Sequence[Message]) -> list[str]:
    """The fingerprints of all `len(messages) + 1` prefixes, that of the empty one first."""
    return continued_fingerprints(hashlib.sha256(_DOMAIN).hexdigest(), messages)


def continued_fingerprints(start: str, messages: Sequence[Message]) -> list[str]:
    """The fingerprints of the conversation `start` and of it with one, two, … `messages` added."""
    fingerprints = [start]
    for message in messages:
        previous = bytes.fromhex(fingerprints[-1])
        fingerprints.append(hashlib.sha256(previous + canonical_message(message)).hexdigest())
    return fingerprints


def conversation_fingerprint(messages: Sequence[Message]) -> str:
    """The fingerprint of a whole conversation."""
    return prefix_fingerprints(messages)[-1]


def output_messages(output: Output) -> list[Message]:
    """An answer as the turns that an agent will echo; a message without a role is the assistant's."""
    items = [output] if isinstance(output, Mapping) else list(output)
    return [item if "role" in item or "type" in item else {"role": "assistant", **item} for item in items]


def is_model_authored(message: Message) -> bool:
    """Whether a model said this turn; a turn that says nothing is nobody's."""
    if message.get("role") != "assistant" and message.get("type") != "function_call":
        return False
    return bool(_said(message).keys() - {"role"})


def canonical_message(message: Message) -> bytes:
    """One encoding for all messages that say the same. Raises `UnreadableConversation`."""
    return json.dumps(_said(message), sort_keys=True, separators=(",", ":")).encode("ascii")


def _said(message: Message) -> dict[str, Any]:
    """What a message says: its keys without the empty, the unechoed and the merely formal."""
    if not isinstance(message, Mapping):
        raise UnreadableConversation(f"a message is a {type(message).__name__}, not an object")
    said = {}
    for key, value in message.items():
        if key in _NOT_ECHOED or value is None:
            continue
        plain = _plain(value)
        if key == "content" and isinstance(plain, str) and plain:
            plain = [{"type": "text", "text": plain}]
        elif key == "tool_calls" and isinstance(plain, list):
            plain = [_with_plain_arguments(call) for call in plain]
        if plain not in ("", [], {}):
            said[_string_key(key)] = plain
    return said


def _plain(value: Any, depth: int = 0) -> Any:
    """A JSON value without the keys that hold `None`."""
    if depth > _MAX_DEPTH:
        raise UnreadableConversation(f"a message is nested deeper than {_MAX_DEPTH}")
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {_string_key(key): _plain(item, depth + 1) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise UnreadableConversation(f"a message holds a {type(value).__name__}")


def _string_key(key: Any) -> str:
    if not isinstance(key, str):
        raise UnreadableConversation(f"a message has the key {key!r:.80}, which is not a string")
    return key


def _with_plain_arguments(call: Any) -> Any:
    """A tool call whose arguments, if they are a JSON object in a string, no longer depend on its spacing."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
        if not isinstance(arguments, dict):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(arguments, sort_keys=True)}}
    except (ValueError, RecursionError):
        return call
