"""The demo's agents: black boxes that send messages, get a message back, and call a tool in between.

An agent knows nothing of tokens, capture or training. It speaks to the policy the way any agent
speaks to a chat API, which is all that the system needs of it:

    task ─▶ chat(messages) ─▶ message ─▶ tool ─▶ chat(messages + …) ─▶ … ─▶ Answer
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout_reassembler.demo.tokenizer import Message


@dataclass(frozen=True)
class Reply:
    """What a chat API gives back: the message, and the id of the response."""

    message: Message
    response_id: str


Chat = Callable[[Sequence[Message]], Reply]


@dataclass(frozen=True)
class Answer:
    """A finished rollout as its agent sees it: the whole conversation and the response it kept."""

    messages: list[Message]
    response_id: str
    reward: float


def solve(task: str, chat: Chat, *, calls: int, retried_call: int | None = None) -> Answer:
    """Work on a task for `calls` turns. At turn `retried_call` the first answer is lost and asked for again."""
    messages: list[Message] = [{"role": "user", "content": task}]
    for turn in range(calls):
        if turn == retried_call:
            chat(messages)
        reply = chat(messages)
        messages.append(reply.message)
        if turn < calls - 1:
            messages.append({"role": "tool", "content": _tool(reply.message["content"])})
    return Answer(messages, reply.response_id, _reward(messages))


def _tool(query: str) -> str:
    """A deterministic stand-in for a tool: some reading, some unicode, of varying length."""
    digest = hashlib.sha256(query.encode()).digest()
    places = ("Zürich", "Kraków", "東京", "Reykjavík")
    readings = "; ".join(f"{places[byte % 4]}: {byte / 4:.2f} °C" for byte in digest[: 1 + digest[0] % 4])
    return f"<tool_response>{readings}, status ok ✓</tool_response>"


def _reward(messages: Sequence[Message]) -> float:
    """Random weights solve nothing, so the reward only has to differ: the parity of the last answer."""
    return float(len(messages[-1]["content"]) % 2)
