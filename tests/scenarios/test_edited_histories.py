"""Histories that agents edit, from their messages to the rows that are trained: nothing of a rollout is thrown away.

Each call samples two tokens of its own, `50 + 2n` and `51 + 2n` for the n-th: trained tokens say whose they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.reassembly.rows import register_canonical_partition
from tests.capture.world import Exchange, World, assistant, user
from tests.captures import CANONICAL, reassembler

Message = dict[str, Any]
Chat = Callable[..., Exchange]


class Rollout:
    """One rollout's calls, and what becomes of it."""

    def __init__(self, directory: Path) -> None:
        self.world = World(directory)
        register_canonical_partition(self.world.plane, CANONICAL)
        self.calls: list[Exchange] = []

    def chat(self, messages: list[Message], answer: str = "", **call: Any) -> Exchange:
        number = len(self.calls)
        generated = {"generated": [50 + 2 * number, 51 + 2 * number], **call}
        self.calls.append(self.world.call(messages, answer or f"answer {number}", **generated))
        return self.calls[-1]

    def finalized(self, branches: Any, **witnesses: Any) -> FinalizedGroup:
        receipt = self.world.receipt(**witnesses)
        return reassembler(self.world.plane, branches=branches).finalize_group(
            "g", ["r"], [receipt.model_dump()], [1.0], mask_sample=None, fallback_weight_version=0, prompt_idx=0
        )

    def trained(self, branches: Any = "all", **witnesses: Any) -> list[list[int]]:
        """The trained tokens of each row, as the numbers of the calls that sampled them."""
        group = self.finalized(branches, **witnesses)
        assert group.rejections == {}
        rows = self.world.plane.get_data(group.meta, ["input_ids", "token_mask"])
        sampled = [ids[mask == 1].tolist() for ids, mask in zip(rows["input_ids"], rows["token_mask"], strict=True)]
        assert all(row[::2] == [token - 1 for token in row[1::2]] for row in sampled)
        return [[(token - 50) // 2 for token in row[::2]] for row in sampled]

    @property
    def last(self) -> dict[str, str]:
        """The witness that the last call was scored."""
        return {"response_id": f"resp-{self.calls[-1].id}"}


@pytest.fixture
def rollout(tmp_path: Path) -> Rollout:
    return Rollout(tmp_path)


def _tool(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "", "content": text}


def _three_calls(rollout: Rollout) -> list[Message]:
    """`[s, u, a0, t, a1, t, a2]`."""
    history: list[Message] = [{"role": "system", "content": "s"}, user("q")]
    for turn in range(3):
        history = [*rollout.chat(history).messages, _tool(f"result {turn}")]
    return history[:-1]


def test_a_compaction_trains_what_was_sampled_before_it_and_after_it(rollout: Rollout) -> None:
    history = _three_calls(rollout)
    after = rollout.chat([history[0], user("a summary")])
    rollout.chat([*after.messages, _tool("more")])
    assert rollout.trained(**rollout.last) == [[0, 1, 2], [3, 4]]
    assert rollout.world.ledger.read("r").new_roots == {"another_conversation": 1}


def test_a_compaction_pays_the_reward_to_nobody_by_guess(rollout: Rollout) -> None:
    history = _three_calls(rollout)
    rollout.chat([history[0], user("a summary")])
    for witnesses in ({}, {"response_id": "matches nothing"}):
        assert rollout.finalized("terminal", **witnesses).rejections == {"r": "rollout_failed"}


@pytest.mark.parametrize(
    ("edit", "cause"),
    [
        (lambda m: [m[0], user("a summary"), *m[-2:]], "edited_history"),
        (lambda m: [*m[:3], _tool("[cleared]"), *m[4:]], "edited_history"),
        (lambda m: [m[0], *m[4:]], "edited_history"),
        (lambda m: [m[0], user("q"), assistant("stripped words"), *m[3:]], "foreign_turn"),
        (lambda m: [m[0], user("q"), assistant("a summary under the assistant's role")], "foreign_turn"),
        (lambda m: [*m, user("t"), assistant("a hand-off")], "foreign_turn"),
    ],
    ids=[
        "a compaction that keeps the last two messages",
        "an old tool result is cleared",
        "a sliding window",
        "an edited answer",
        "a summary as an assistant",
        "another model's turn behind a clean chain",
    ],
)
def test_an_edited_history_is_a_new_root_and_all_is_trained(
    rollout: Rollout, edit: Callable[[list[Message]], list[Message]], cause: str
) -> None:
    edited = edit(_three_calls(rollout))
    rollout.chat([*edited, user("go on")])
    rollout.chat([*rollout.calls[-1].messages, user("and on")])
    assert rollout.trained(**rollout.last) == [[0, 1, 2], [3, 4]]
    assert rollout.world.ledger.read("r").new_roots == {cause: 1}


def test_few_shot_turns_before_a_clean_chain_are_the_prompts(rollout: Rollout) -> None:
    examples = [user("2+2"), assistant("4"), user("3+3")]
    first = rollout.chat(examples)
    rollout.chat([*first.messages, user("4+4")])
    assert rollout.trained("terminal", **rollout.last) == [[0, 1]]
    assert rollout.world.ledger.read("r").new_roots == {}


@pytest.mark.parametrize(
    ("recorded", "sent", "edited"),
    [
        ('{"q": "x', {}, True),
        ('{"q": "x"}', {"q": "x"}, False),
        ('{"q": "x"}', '{ "q" :"x" }', False),
    ],
    ids=["broken, mended to {}", "text as an object", "in other spaces"],
)
def test_arguments_that_come_back_otherwise(rollout: Rollout, recorded: str, sent: Any, edited: bool) -> None:
    def turn(arguments: Any) -> Message:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    world = rollout.world
    admission = world.ledger.admit("r", [user("q")], model_call_id="first")
    coords = world.recorder.complete_call(world.recorder.begin_call(admission), [1], [50, 51], [-0.5, -0.5])
    world.ledger.record(admission, coords, response_id="resp-first", output=turn(recorded))
    rollout.chat([user("q"), turn(sent), {**_tool("r"), "tool_call_id": "c"}], generated=[52, 53])
    assert rollout.trained(**rollout.last) == ([[0], [1]] if edited else [[0, 1]])


@pytest.mark.parametrize("branches", ["terminal", "all"])
def test_a_retry_whose_first_try_was_not_captured_costs_that_try_alone(rollout: Rollout, branches: Any) -> None:
    first = rollout.chat([user("q")])
    rollout.chat([*first.messages, user("t")], logprobs=[])
    rollout.chat([*first.messages, user("t")], "again")
    assert rollout.trained(branches, **rollout.last) == [[0, 2]]


def test_two_sub_agents_are_rows_beside_the_chain_that_was_scored(rollout: Rollout) -> None:
    main = rollout.chat([user("q")])
    helpers = [rollout.chat([user(f"part {part}")]) for part in range(2)]
    for helper in helpers:
        rollout.chat([*helper.messages, _tool("found")])
    rollout.chat([*main.messages, _tool("both parts")])
    assert rollout.trained(**rollout.last) == [[1, 3], [2, 4], [0, 5]]
    assert rollout.world.ledger.read("r").new_roots == {"another_conversation": 2}


def test_with_the_default_the_scored_chain_is_the_row(rollout: Rollout) -> None:
    main = rollout.chat([user("q")])
    rollout.chat([user("a title for it")])
    rollout.chat([*main.messages, user("t")])
    assert rollout.trained("terminal", **rollout.last) == [[0, 2]]
