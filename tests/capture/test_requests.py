"""Requests as they are looked up, and what is remembered of those heard before."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_reassembler.capture import fingerprint, requests
from rollout_reassembler.capture.requests import RecentRequests, Request
from rollout_reassembler.contract.errors import UnreadableConversation
from tests.capture.world import assistant, user

TURNS = [user("q") if at % 2 == 0 else assistant(f"a{at}") for at in range(6)]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each reading hashed."""
    counts: list[int] = []

    def counted(messages: Any, start: Any = fingerprint.NOTHING_SAID) -> Any:
        counts.append(len(list(messages)))
        return fingerprint.prefix_marks(messages, start)

    monkeypatch.setattr(requests, "prefix_marks", counted)
    return counts


def test_a_request_is_hashed_from_where_it_leaves_the_longest_heard_one(hashed: list[int]) -> None:
    recent = RecentRequests()
    heard = [recent.read(copy.deepcopy(TURNS[:length])).heard for length in (1, 3, 5, 5, 6, 2)]
    assert heard == [0, 1, 3, 5, 5, 1]
    assert hashed == [1, 2, 2, 0, 1, 1]


def test_two_hundred_turns_hash_each_message_once(hashed: list[int]) -> None:
    recent, history = RecentRequests(), [user("q")]
    for turn in range(200):
        request = recent.read(copy.deepcopy(history))
        assert request.prefixes == fingerprint.prefix_marks(history)
        history += [assistant(f"answer {turn}"), user("go on")]
    assert sum(hashed) == 1 + 2 * 199


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].update(content="changed in place"),
        lambda m: m[1].update(tool_calls=[{"id": "c", "function": {"name": "f", "arguments": {"n": 1.0}}}]),
        lambda m: m[1]["tool_calls"][0]["function"]["arguments"].update(n=True),
    ],
    ids=["in place", "1 as 1.0", "1 as True"],
)
def test_what_an_agent_changes_in_place_is_heard_anew(change: Callable[[Any], None]) -> None:
    history: list[dict[str, Any]] = [
        user("q"),
        {**assistant("a"), "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"n": 1}}}]},
    ]
    recent = RecentRequests()
    before = recent.read(history).marks
    change(history)
    request = recent.read(history)
    assert request.heard == 0
    assert request.marks == Request.of(history).marks != before


def test_messages_of_other_types_are_read_each_time() -> None:
    recent, history = RecentRequests(), [OrderedDict(user("q"))]
    assert [recent.read(history).heard for _ in range(2)] == [0, 0]
    with pytest.raises(UnreadableConversation):
        recent.read([{"role": "user", "content": object()}])


@settings(max_examples=200, deadline=None)
@given(
    histories=st.lists(
        st.lists(st.sampled_from([user("q"), user("q "), assistant("a"), assistant(""), {"role": "tool"}]), max_size=6),
        max_size=20,
    )
)
def test_what_is_remembered_changes_no_mark(histories: list[list[dict[str, Any]]]) -> None:
    recent = RecentRequests()
    for history in histories:
        assert recent.read(history).prefixes == Request.of(history).prefixes
