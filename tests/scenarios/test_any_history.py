"""Whatever an agent does with its history, each trained token stands behind the very prompt that it was sampled behind.

The policy is a hash: the next token and its log probability follow from all tokens before. So every published row
proves itself: at each trained token the hash of what stands before it must give that token and that log probability,
and nowhere else may a log probability stand. Agents continue, retry, edit, cut, compact, hand work to others, and
lose captures, at random.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_reassembler.capture import CaptureLedger
from rollout_reassembler.reassembly.rows import register_canonical_partition
from tests.capture.world import World, user
from tests.captures import CANONICAL, reassembler

Message = dict[str, Any]
History = list[Message]

EXAMPLES = int(os.environ.get("HISTORIES", "150"))
EDITS = ["words", "space", "drop", "insert", "window", "compact", "no calls"]
SEEN: Counter[str] = Counter()


def _policy(token_ids: list[int]) -> tuple[int, float]:
    """The next token behind these, and its log probability."""
    digest = hashlib.sha256(np.array(token_ids, np.int64).tobytes()).digest()
    return 1_000 + digest[0], -1.0 - int.from_bytes(digest[1:3], "big") / 2**16


def _rendered(messages: History) -> list[int]:
    """Tokens below 1,000: those of a prompt."""
    return [1, *(byte for message in messages for byte in (*repr(sorted(message.items())).encode(), 2))]


def _answer(draw: st.DrawFn, token_ids: list[int]) -> Message:
    said = f"said {token_ids[0]} {len(token_ids)}" + draw(st.sampled_from(["", " ", "\n"]))
    if not draw(st.booleans()):
        return {"role": "assistant", "content": said}
    function = {"name": "f", "arguments": draw(st.sampled_from(['{"a": 1}', "{", ""]))}
    return {"role": "assistant", "content": said, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def _edited(draw: st.DrawFn, history: History) -> History:
    """What the agent sends of a history it had."""
    edited = [dict(message) for message in history]
    at = draw(st.integers(0, len(edited) - 1))
    how = draw(
        st.sampled_from(["as it is"] * 6 + ["words", "space", "drop", "insert", "window", "compact", "no calls"])
    )
    if how == "words":
        edited[at]["content"] = "other words"
    elif how == "space":
        edited[at]["content"] = f" {edited[at]['content']}\n\n"
    elif how == "drop" and len(edited) > 1:
        del edited[at]
    elif how == "insert":
        edited.insert(at, draw(st.sampled_from([user("by the way"), {"role": "assistant", "content": "a hand-off"}])))
    elif how == "window":
        edited = edited[at:]
    elif how == "compact":
        edited = [user("a summary"), *edited[-1:]]
    elif how == "no calls":
        edited[at].pop("tool_calls", None)
    return edited


class _Agent:
    """One rollout of random calls over a world."""

    def __init__(self, draw: st.DrawFn, world: World) -> None:
        self.draw, self.world = draw, world
        self.histories: list[History] = []
        self.recorded: list[str] = []

    def call(self) -> None:
        draw, world = self.draw, self.world
        begins = not self.histories or draw(st.integers(0, 5)) == 0
        request = (
            [user(draw(st.sampled_from(["q", "q ", "part one", "part two"])))]
            if begins
            else [*_edited(draw, draw(st.sampled_from(self.histories))), user(draw(st.sampled_from(["go on", "and"])))]
        )
        admission = world.ledger.admit("r", request)
        SEEN[admission.new_root_reason.partition(":")[0] if admission.new_root_reason else admission.resolution] += 1
        opened = world.recorder.begin_call(admission)
        fate = draw(st.sampled_from(["answer"] * 8 + ["abort", "fail", "nothing"]))
        if fate == "abort":
            world.recorder.abort_call(opened)
            world.ledger.abort(admission)
            return
        prefix = opened.prefix_token_ids.tolist()
        prompt = [*prefix, *_rendered(request[-1:] if prefix else request)]
        sampled: list[int] = []
        log_probs: list[float] = []
        for _ in range(0 if fate == "nothing" else draw(st.integers(1, 3))):
            token, log_prob = _policy([*prompt, *sampled])
            sampled.append(token)
            log_probs.append(log_prob)
        coords = world.recorder.complete_call(opened, prompt, sampled, [] if fate == "fail" and sampled else log_probs)
        answer = _answer(draw, sampled) if sampled else {"role": "assistant", "content": ""}
        if world.ledger.record(admission, coords, response_id=f"resp-{admission.model_call_id}", output=answer):
            self.recorded.append(admission.model_call_id)
        self.histories.append([*request, answer])


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@pytest.mark.parametrize("branches", ["terminal", "all"])
def test_every_trained_token_stands_behind_the_prompt_that_it_was_sampled_behind(
    tmp_path_factory: pytest.TempPathFactory, branches: Any, data: st.DataObject
) -> None:
    directory: Path = tmp_path_factory.mktemp("ledger")
    world = World(directory, on_unresolved=data.draw(st.sampled_from(["root", "root", "reject"])))
    register_canonical_partition(world.plane, CANONICAL)
    agent = _Agent(data.draw, world)  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(1, 9), label="calls")):
        agent.call()
    receipt = CaptureLedger(directory).receipt(
        "r",
        response_id=f"resp-{agent.recorded[-1]}" if agent.recorded and data.draw(st.booleans()) else None,
        among_conversations=data.draw(st.sampled_from(["reject", "latest", "longest"])),
    )
    group = reassembler(world.plane, branches=branches).finalize_group(
        "g", ["r"], [receipt.model_dump()], [1.0], mask_sample=None, fallback_weight_version=0, prompt_idx=0
    )
    rows = world.plane.get_data(group.meta)
    for _, row in rows.rows():
        if not row["sample_mask"]:
            SEEN["rejected"] += 1
            continue
        SEEN["rows"] += 1
        ids = row["input_ids"].tolist()
        trained = np.flatnonzero(row["token_mask"]).tolist()
        assert trained
        SEEN["trained tokens"] += len(trained)
        for at in trained:
            token, log_prob = _policy(ids[:at])
            assert (ids[at], row["generation_logprobs"][at]) == (token, np.float32(log_prob))
        assert not row["generation_logprobs"][row["token_mask"] == 0].any()


def test_all_that_may_become_of_a_request_was_seen() -> None:
    print(f"\n{dict(SEEN)}")
    assert SEEN.keys() >= {
        "root",
        "resolved",
        "unresolved",
        "another_conversation",
        "edited_history",
        "foreign_turn",
        "failed_call",
        "rejected",
        "rows",
    }
