"""The demo's inference server: a chat API over the policy, with capture behind it.

One call, from the agent's messages to its answer:

    ledger.admit         whose child is this request?
    recorder.begin_call  the parent's exact tokens, and the weight version
    prompt               these tokens + those of what was added; never a re-tokenised history
    policy.generate      sampled tokens, their log probabilities, the experts of every token it ran
    recorder.complete    the delta is staged, then acknowledged
    ledger.record        the manifest row, before the agent sees the answer
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout_reassembler.capture import CallInfo, CallRecorder, CaptureLedger, OpenCall
from rollout_reassembler.contract.routed_experts import BOUNDARY_KEY, ROUTES_KEY, encode_routed_experts
from rollout_reassembler.demo.agents import Reply
from rollout_reassembler.demo.policy import DemoPolicy, Generation, Session, TokenIds
from rollout_reassembler.demo.tokenizer import Message

MAX_NEW_TOKENS = 48


@dataclass
class PolicyServer:
    """Serves many agents at once; one engine session a rollout keeps its KV cache between turns."""

    policy: DemoPolicy
    recorder: CallRecorder
    ledger: CaptureLedger
    seed: int
    _sessions: dict[str, Session] = field(default_factory=dict)
    sampled_tokens: Counter[str] = field(default_factory=Counter)
    """By rollout."""
    _served: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def chat(self, rollout_id: str, messages: Sequence[Message]) -> Reply:
        """One model call. Capture that fails does not fail the answer."""
        number, session = self._next_call(rollout_id)
        admission = self.ledger.admit(rollout_id, messages, model_call_id=f"call-{number}")
        call = self.recorder.begin_call(admission)
        prompt = self._prompt(call, messages)
        generation = self.policy.generate(
            prompt,
            max_new_tokens=MAX_NEW_TOKENS,
            stop_ids=[self.policy.tokenizer.im_end_id],
            seed=zlib.crc32(f"{self.seed}/{rollout_id}/{number}".encode()),
            session=session,
        )
        coords = self.recorder.complete_call(
            call,
            prompt,
            generation.token_ids,
            generation.logprobs,
            _route_extras(generation, admission.prev_len, len(prompt) + len(generation.token_ids)),
            info=CallInfo(
                finish_reason="stop" if generation.finished else "length", temperature=1.0, logprobs="processed"
            ),
        )
        with self._lock:
            self.sampled_tokens[rollout_id] += len(generation.token_ids)
        message: Message = {"role": "assistant", "content": self.policy.tokenizer.decode(generation.token_ids)}
        response_id = f"resp-{rollout_id}-{number}"
        self.ledger.record(admission, coords, response_id=response_id, output=message)
        return Reply(message, response_id)

    def _next_call(self, rollout_id: str) -> tuple[int, Session]:
        with self._lock:
            number = self._served.get(rollout_id, 0)
            self._served[rollout_id] = number + 1
            return number, self._sessions.setdefault(rollout_id, Session())

    def _prompt(self, call: OpenCall, messages: Sequence[Message]) -> TokenIds:
        """The parent's exact tokens plus the tokens of what was added; `[P]` int64."""
        tokenizer = self.policy.tokenizer
        prefix = call.prefix_token_ids
        if not len(prefix):
            return np.array([*tokenizer.render_conversation(messages), *tokenizer.generation_header()], np.int64)
        answered = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        added = [
            *tokenizer.close_turn(prefix[-1:].tolist()),
            *tokenizer.render_conversation(messages[answered + 1 :]),
            *tokenizer.generation_header(),
        ]
        return np.concatenate([prefix, np.array(added, np.int64)])


def _route_extras(generation: Generation, prev_len: int, cum_len: int) -> dict[str, Any]:
    """The routes of the call's delta, and of the parent's last sampled token when this call ran it."""
    extras = {ROUTES_KEY: encode_routed_experts(generation.routes_between(prev_len, cum_len))}
    if prev_len > 0 and generation.routes_start < prev_len:
        extras[BOUNDARY_KEY] = encode_routed_experts(generation.routes_between(prev_len - 1, prev_len))
    return extras
