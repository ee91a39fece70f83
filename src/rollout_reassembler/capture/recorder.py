"""The worker's side of capture: from an engine's answer to a staged call.

In come an admission (from the ledger) and what the engine did: prompt, sampled tokens, their log
probabilities. Out go coordinates, and only after the call's delta is durable: *staged before
acknowledged*. Nothing here knows an engine.

    recorder = CallRecorder(sink, weight_version=lambda: trainer_version, source=source)
    call = recorder.begin_call(admission)                       # stamps the weight version: 7
    prompt = [*call.prefix_token_ids, *tokenize(what_was_added)]
    answer = engine.generate(prompt)                            # meanwhile the weights became 8
    coords = recorder.complete_call(call, prompt, answer.token_ids, answer.logprobs)
    assert (coords.disposition, coords.weight_version) == ("staged", 7)

What an engine gives is judged by value, whatever type it came as (`contract.engine_values`): lists of
Python, numpy or torch numbers, arrays and tensors of any integer or float width.

What must stay true: **capture never fails the model's answer**. Wrong data, a data plane that cannot be
reached and whatever else the sink, the source or the weight version's callback raises become
coordinates with `capture_failed` and a reason, which poison the rollout when the ledger records them. Each
is logged (with the traceback of what was raised) and counted by the first word of its reason. Only misuse raises: a
call closed twice, a weight version that is no count.

For router replay `extras` holds `routed_experts`, one row a *delta* token, and optionally
`routed_experts_boundary`, the route of the parent's last sampled token as this call's prefill
computed it. Extras are staged as they come, under their digest.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rollout_reassembler.capture.prefixes import DEFAULT_MAX_TOKENS, PrefixCache
from rollout_reassembler.capture.records import (
    CAPTURE_ERROR,
    PREFIX_UNAVAILABLE,
    PROMPT_DIVERGES,
    STAGING_FAILED,
    UNRESOLVED_PARENT,
    VERSION_UNAVAILABLE,
    CaptureAdmission,
    CommitCoords,
)
from rollout_reassembler.contract import digests, engine_values
from rollout_reassembler.contract.call_info import CALL_KEY, CallInfo
from rollout_reassembler.contract.digests import Floats, Integers
from rollout_reassembler.contract.engine_values import Numbers
from rollout_reassembler.contract.errors import CallClosed, InvalidStagedCall, ReassemblerError, StagedRowsMissing
from rollout_reassembler.contract.model_shape import ModelShape
from rollout_reassembler.contract.records import StagedCall, StagedReference, StageResult, seal_call

LOGGER = logging.getLogger(__name__)

NO_TOKENS: Integers = np.empty(0, dtype=np.int64)
UNKNOWN_VERSION = 0
FAILED_BY_CALLER = "failed_by_caller"


class CallSink(Protocol):
    """Where calls become durable. Reports a data plane's failure in its result; called from many threads."""

    def stage(self, record: StagedCall, /) -> StageResult: ...


class CallSource(Protocol):
    """Where staged calls are read from: in the order asked, or `StagedRowsMissing`."""

    def fetch(self, keys: list[StagedReference], /) -> list[StagedCall]: ...


@dataclass(frozen=True, eq=False)
class OpenCall:
    """A call between its admission and its answer.

    `prefix_token_ids` is int64 `[prev_len]`, the parent's whole sequence, with which the engine's prompt
    must begin; empty for a root. When the call already cannot be captured, `failure` says why and
    the prefix is empty: answer it from the messages alone. (Where the failure is that of the weight version itself,
    `weight_version` is 0.)
    """

    admission: CaptureAdmission
    weight_version: int
    prefix_token_ids: Integers = field(default_factory=lambda: NO_TOKENS)
    failure: str | None = None
    _closing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def close(self) -> None:
        """Raises `CallClosed` for everyone but the first who closes the call."""
        if not self._closing.acquire(blocking=False):
            raise CallClosed(f"call {self.admission.model_call_id!r} of {self.admission.rollout_id!r} is closed")


@dataclass(frozen=True)
class CaptureCounts:
    """What became of a recorder's closed calls. `failed` counts by the first word of the reason."""

    staged: int = 0
    aborted: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)


class CallRecorder:
    """Stages the calls of one inference worker. Safe to share between its threads.

    `weight_version` is asked once a call, when it begins. `source` is needed where a parent may have
    been served by another worker, or so long ago that its sequence fell out of the cache. Where `model` says what the
    policy is, a call with values that it cannot have said is a failed capture.
    """

    def __init__(
        self,
        sink: CallSink,
        *,
        weight_version: Callable[[], int],
        source: CallSource | None = None,
        max_cached_tokens: int = DEFAULT_MAX_TOKENS,
        model: ModelShape | None = None,
    ) -> None:
        self._sink = sink
        self._source = source
        self._weight_version = weight_version
        self._prefixes = PrefixCache(max_cached_tokens)
        self._model = model
        self._counting = threading.Lock()
        self._closed: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    @property
    def counts(self) -> CaptureCounts:
        """How many calls were staged, aborted and failed (by reason) so far."""
        with self._counting:
            return CaptureCounts(self._closed["staged"], self._closed["aborted"], dict(self._failed))

    def begin_call(self, admission: CaptureAdmission) -> OpenCall:
        """Stamp the weight version and find the tokens that the prompt must begin with.

        Raises `ValueError` for a weight version that is no count.
        """
        try:
            stamped = self._weight_version()
        except Exception as error:
            return self._unfit(admission, UNKNOWN_VERSION, VERSION_UNAVAILABLE, error)
        version = engine_values.count(stamped, "a weight version")
        if admission.resolution == "unresolved":
            return OpenCall(admission, version, failure=f"{UNRESOLVED_PARENT}: {admission.unresolved_reason}")
        try:
            return OpenCall(admission, version, self.prefix_token_ids(admission))
        except Exception as error:
            return self._unfit(admission, version, PREFIX_UNAVAILABLE, error)

    def prefix_token_ids(self, admission: CaptureAdmission) -> Integers:
        """The parent's whole sequence, int64 `[prev_len]`, read-only; proven by the parent's chain hash.

        Raises `StagedRowsMissing` (or another `DataPlaneError`) when it cannot be read, and
        `InvalidStagedCall` when what was read is not that sequence.
        """
        parent = admission.parent
        if parent is None:
            return NO_TOKENS
        key = admission.staging_chain[-1]
        held = self._prefixes.get(key, parent.chain_hash)
        if held is not None:
            return held
        if self._source is None:
            raise StagedRowsMissing("not cached here, and this recorder has no source", keys=admission.staging_chain)
        if not admission.staging_digests:
            raise StagedRowsMissing("the admission names no digests to find them by", keys=admission.staging_chain)
        token_ids = _followed(self._source.fetch(admission.staged_chain), admission)
        self._prefixes.put(key, parent.chain_hash, token_ids)
        return token_ids

    def complete_call(
        self,
        call: OpenCall,
        prompt_token_ids: Numbers,
        generated_token_ids: Numbers,
        generated_logprobs: Numbers,
        extras: Mapping[str, Any] | None = None,
        *,
        info: CallInfo | None = None,
    ) -> CommitCoords:
        """Stage what the call added to its parent, then acknowledge it.

        `prompt_token_ids` is `[P]`, the engine's whole prompt; `generated_token_ids` and
        `generated_logprobs` are `[G]`. A call with `G = 0` is staged for the record: nothing of it can be trained.
        `info` is what the engine says of the call beside its tokens: why it ended, how it was sampled, and, where
        weights changed in the middle of it, from which token on.
        """
        call.close()
        if call.failure is not None:
            return self._fail(call, call.failure)
        try:
            generated = engine_values.token_ids(generated_token_ids, "generated token ids")
            token_ids = _sequence(call, engine_values.token_ids(prompt_token_ids, "prompt token ids"), generated)
            log_probs = engine_values.floats(generated_logprobs, "log probabilities")
            extras = _with_info(extras, info, len(generated))
            version = info.weight_versions[0][1] if info is not None and info.weight_versions else call.weight_version
            staged = _sealed(call, token_ids, len(generated), log_probs, extras, self._model, version)
        except InvalidStagedCall as error:
            return self._fail(call, f"{error.code}: {error.detail}")
        except Exception as error:
            return self._fail(call, f"{CAPTURE_ERROR}: {_told(error)}", error)
        try:
            result = self._sink.stage(staged)
            if not result.ok:
                return self._fail(call, f"{STAGING_FAILED}: {result.error}")
            coords = CommitCoords.of(staged, generation_len=len(generated), key=result.staging_key)
        except Exception as error:
            return self._fail(call, f"{STAGING_FAILED}: {_told(error)}", error)
        self._prefixes.put(staged.staging_key, staged.chain_hash, token_ids)
        self._count("staged")
        return coords

    def fail_call(self, call: OpenCall, reason: str) -> CommitCoords:
        """The engine answered, but its tokens cannot be had (an answer without them, say): poisons the rollout.

        Counted as `failed_by_caller`, whatever the reason says.
        """
        call.close()
        return self._fail(call, reason, word=FAILED_BY_CALLER)

    def abort_call(self, call: OpenCall) -> None:
        """The engine gave no answer. Nothing is staged and nothing poisoned: nobody saw a token of it."""
        call.close()
        self._count("aborted")

    def _unfit(self, admission: CaptureAdmission, version: int, word: str, error: Exception) -> OpenCall:
        """A call that can be answered and not captured, as became clear when it began."""
        reason = f"{word}: {_told(error)}"
        LOGGER.warning("%s will not be captured: %s", _named(admission), reason, exc_info=error)
        return OpenCall(admission, version, failure=reason)

    def _fail(
        self, call: OpenCall, reason: str, error: Exception | None = None, *, word: str | None = None
    ) -> CommitCoords:
        LOGGER.warning("%s not captured: %s", _named(call.admission), reason, exc_info=error)
        with self._counting:
            self._failed[word or reason.partition(":")[0]] += 1
        return CommitCoords.failed(call.admission, weight_version=call.weight_version, reason=reason)

    def _count(self, outcome: str) -> None:
        with self._counting:
            self._closed[outcome] += 1


def _sequence(call: OpenCall, prompt: Integers, generated: Integers) -> Integers:
    """The call's whole sequence, int64 `[P + G]`, once its prompt is known to begin with the parent's."""
    prefix = call.prefix_token_ids
    if len(prompt) < len(prefix):
        raise InvalidStagedCall(
            f"the parent's sequence has {len(prefix)} tokens, the prompt only {len(prompt)}", code=PROMPT_DIVERGES
        )
    differs = np.flatnonzero(prompt[: len(prefix)] != prefix)
    if differs.size:
        raise InvalidStagedCall(f"the prompt leaves the parent's sequence at {differs[0]}", code=PROMPT_DIVERGES)
    return np.concatenate([prompt, generated])


def _sealed(
    call: OpenCall,
    token_ids: Integers,
    generation_len: int,
    sampled: Floats,
    extras: Mapping[str, Any] | None,
    model: ModelShape | None,
    weight_version: int,
) -> StagedCall:
    """The call's delta: the carry with mask 0, then `generation_len` sampled tokens with mask 1."""
    admission, prev_len = call.admission, call.admission.prev_len
    if len(sampled) != generation_len:
        raise InvalidStagedCall(f"{generation_len} tokens were sampled, with {len(sampled)} log probabilities")
    carry_len = len(token_ids) - prev_len - generation_len
    return seal_call(
        rollout_id=admission.rollout_id,
        model_call_id=admission.model_call_id,
        token_ids_delta=token_ids[prev_len:],
        token_mask_delta=np.repeat(np.array([0, 1], dtype=np.float32), [carry_len, generation_len]),
        generation_log_probs_delta=np.concatenate([np.zeros(carry_len, dtype=np.float32), sampled]),
        weight_version=weight_version,
        parent=admission.parent,
        prefix_token_ids=token_ids[:prev_len],
        extras=extras,
        model=model,
    )


def _with_info(
    extras: Mapping[str, Any] | None, info: CallInfo | None, generation_len: int
) -> Mapping[str, Any] | None:
    if info is None:
        return extras
    info.check_length(generation_len)
    return {**(extras or {}), CALL_KEY: info.encode()}


def _named(admission: CaptureAdmission) -> str:
    return f"call {admission.model_call_id!r} of rollout {admission.rollout_id!r}"


def _told(error: Exception) -> str:
    """What an exception says; our own without their type, which their first word tells."""
    if isinstance(error, ReassemblerError):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()


def _followed(chain: Sequence[StagedCall], admission: CaptureAdmission) -> Integers:
    """The deltas from root to parent as one sequence, int64 `[prev_len]`, proven by the parent's chain hash.

    The hash covers every delta in order, so nothing else about the rows has to be believed.
    """
    link = None
    for staged in chain:
        link = digests.chain_hash(link, staged.token_ids_delta)
    token_ids = np.concatenate([staged.token_ids_delta for staged in chain])
    if link != admission.parent_chain_hash or len(token_ids) != admission.prev_len:
        raise InvalidStagedCall(f"the rows of {admission.staging_chain} are not the parent's sequence")
    return token_ids
