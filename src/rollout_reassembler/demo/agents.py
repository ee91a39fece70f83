"""The demo's agents: black boxes that send messages, get a message back, and call a tool in between.

An agent knows nothing of tokens, capture or training. It speaks to the policy the way any agent
speaks to a chat API, which is all that the system needs of it:

    task ─▶ chat(messages) ─▶ message ─▶ tool ─▶ chat(messages + …) ─▶ … ─▶ Answer

Some do with their history what agents do: one sends a summary in its place, one lets two others work for it,
one strips the text of what it got.
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


def solve_compacting(task: str, chat: Chat, *, calls: int) -> Answer:
    """Work on a task; half way the history is replaced by a summary of it."""
    first = solve(task, chat, calls=max(calls // 2, 1))
    summary = f"{task}\n\nSo far: {first.messages[-1]['content'][:200]}"
    return solve(summary, chat, calls=max(calls - calls // 2, 1))


def solve_with_two_helpers(task: str, chat: Chat, *, calls: int) -> Answer:
    """Let two agents work on parts of the task, taking turns, then go on with what they found."""
    helpers: list[list[Message]] = [
        [{"role": "user", "content": f"{part} of: {task}"}] for part in ("Half", "The rest")
    ]
    for turn in range(max(calls // 2, 1)):
        for messages in helpers:
            if turn:
                messages.append({"role": "tool", "content": _tool(messages[-1]["content"])})
            messages.append(chat(messages).message)
    found = " ".join(messages[-1]["content"][:100] for messages in helpers)
    return solve(f"{task}\n\nFound: {found}", chat, calls=calls)


def solve_stripping(task: str, chat: Chat, *, calls: int) -> Answer:
    """Work on a task, and send each answer back without the white space around it and at the ends of its lines."""

    def strip(message: Message) -> Message:
        lines = (line.rstrip() for line in message["content"].splitlines())
        return {**message, "content": "\n".join(lines).strip() + "\n\n"}

    def chat_stripped(messages: Sequence[Message]) -> Reply:
        return chat([strip(message) if message["role"] == "assistant" else message for message in messages])

    return solve(task, chat_stripped, calls=calls)


def _tool(query: str) -> str:
    """A deterministic stand-in for a tool: some reading, some unicode, of varying length."""
    digest = hashlib.sha256(query.encode()).digest()
    places = ("Zürich", "Kraków", "東京", "Reykjavík")
    readings = "; ".join(f"{places[byte % 4]}: {byte / 4:.2f} °C" for byte in digest[: 1 + digest[0] % 4])
    return f"<tool_response>{readings}, status ok ✓</tool_response>"


def _reward(messages: Sequence[Message]) -> float:
    """Random weights solve nothing, so the reward only has to differ: the parity of the last answer."""
    return float(len(messages[-1]["content"]) % 2)
