"""From an engine's answer to a staged call: exact, stamped at admission, and never at the answer's cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_reassembler.capture import CallClosed, CallRecorder, CaptureAdmission, CaptureCounts
from rollout_reassembler.capture.prefixes import PrefixCache
from rollout_reassembler.contract.errors import DataPlaneTimeout, StagedRowsMissing
from rollout_reassembler.contract.model_shape import ModelShape
from rollout_reassembler.contract.records import StagedCall, StagedReference, StageResult
from tests.capture.world import World, user

ROOT = CaptureAdmission(rollout_id="r", model_call_id="a", resolution="root")


class ListSink:
    """Keeps what is staged, or refuses it."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.staged: list[StagedCall] = []

    def stage(self, record: StagedCall, /) -> StageResult:
        if self.error is not None:
            return StageResult(ok=False, error=self.error)
        self.staged.append(record)
        return StageResult(ok=True, staging_key=record.staging_key)


class BrokenSource:
    def fetch(self, wanted: list[StagedReference], /) -> list[StagedCall]:
        raise DataPlaneTimeout("no answer", call="get_samples", keys=[one.staging_key for one in wanted], seconds=30.0)


class ListSource:
    def __init__(self, calls: list[StagedCall]) -> None:
        self.calls = calls

    def fetch(self, wanted: list[StagedReference], /) -> list[StagedCall]:
        return self.calls


def _child_of(parent: StagedCall) -> CaptureAdmission:
    return CaptureAdmission(
        rollout_id="r",
        model_call_id="b",
        resolution="resolved",
        parent_call_id=parent.model_call_id,
        prev_len=parent.cum_len,
        parent_chain_hash=parent.chain_hash,
        staging_chain=(parent.staging_key,),
        staging_digests=(parent.digest,),
    )


def _recorder(sink: ListSink, **settings: Any) -> CallRecorder:
    return CallRecorder(sink, weight_version=lambda: 7, **settings)


def _root(sink: ListSink, recorder: CallRecorder) -> StagedCall:
    recorder.complete_call(recorder.begin_call(ROOT), [1, 2], [3], [-0.5])
    return sink.staged[-1]


def test_a_call_is_its_carry_and_then_its_generation() -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    _root(sink, recorder)
    call = recorder.begin_call(_child_of(sink.staged[0]))
    assert call.prefix_token_ids.tolist() == [1, 2, 3]
    coords = recorder.complete_call(call, [1, 2, 3, 4], [5, 6], [-0.25, -0.75], {"note": "kept"})
    staged = sink.staged[1]
    assert staged.token_ids_delta.tolist() == [4, 5, 6]
    assert staged.token_mask_delta.tolist() == [0.0, 1.0, 1.0]
    assert staged.generation_log_probs_delta.tolist() == [0.0, -0.25, -0.75]
    assert staged.extras == {"note": "kept"}
    assert (coords.prev_len, coords.delta_len, coords.cum_len, coords.generation_len) == (3, 3, 6, 2)
    assert (coords.digest, coords.chain_hash) == (staged.digest, staged.chain_hash)


@pytest.mark.parametrize(
    ("prompt", "generated", "logprobs"),
    [
        (np.array([1, 2], np.int32), np.array([3], np.uint16), np.array([-0.5], np.float64)),
        (np.array([1, 2], np.uint64), np.array([3.0]), np.array([-0.5], np.float16)),
        ([np.int64(1), 2], (np.uint8(3),), [np.float32(-0.5)]),
        (torch.tensor([1, 2]), torch.tensor([3], dtype=torch.int8), torch.tensor([-0.5], requires_grad=True)),
        ([torch.tensor(1), 2], [torch.tensor(3)], torch.tensor([-0.5], dtype=torch.bfloat16)),
    ],
    ids=["arrays", "uint64, float ids, float16", "numpy scalars", "tensors", "torch scalars, bfloat16"],
)
def test_whatever_type_an_engine_gives_the_same_numbers_are_the_same_call(
    prompt: Any, generated: Any, logprobs: Any
) -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    recorder.complete_call(recorder.begin_call(ROOT), [1, 2], [3], [-0.5])
    recorder.complete_call(recorder.begin_call(ROOT), prompt, generated, logprobs)
    assert sink.staged[0] == sink.staged[1]


def test_a_prompt_is_put_together_from_the_prefix_and_a_list() -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    child = recorder.begin_call(_child_of(_root(sink, recorder)))
    coords = recorder.complete_call(child, [*child.prefix_token_ids, *[4, 5]], [6], [np.float32(-0.5)])
    assert (coords.disposition, sink.staged[1].token_ids_delta.tolist()) == ("staged", [4, 5, 6])


def test_a_call_begun_at_version_7_and_answered_at_8_is_stamped_7(world: World) -> None:
    admission = world.ledger.admit("r", [user("q")])
    call = world.recorder.begin_call(admission)
    world.version = 8
    coords = world.recorder.complete_call(call, [1, 2], [3], [-0.5])
    assert coords.weight_version == 7


def test_a_one_token_completion_is_staged() -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    coords = recorder.complete_call(recorder.begin_call(ROOT), [1, 2], [2], [-0.1])
    assert (coords.disposition, coords.generation_len, coords.delta_len) == ("staged", 1, 3)


def test_a_completion_of_length_0_is_staged_with_nothing_to_train() -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    coords = recorder.complete_call(recorder.begin_call(ROOT), [1, 2], [], [])
    assert (coords.disposition, coords.generation_len) == ("staged", 0)
    assert not sink.staged[0].token_mask_delta.any()


@pytest.mark.parametrize(
    ("prompt", "generated", "logprobs", "reason"),
    [
        ([1, 2], [3, 4], [-0.5], "2 tokens were sampled, with 1 log probabilities"),
        ([1, 2], [3], [-0.5, -0.5], "1 tokens were sampled, with 2 log probabilities"),
        ([1, 2], [3], None, "log probabilities must be a sequence"),
        ([1, 2], [3], [math.nan], "log probabilities must be finite"),
        ([1, 2], [3], [-math.inf], "log probabilities must be finite"),
        ([1, 2], [3], [-1e300], "log probabilities must be finite"),
        ([1, 2], [0], [], "1 tokens were sampled, with 0 log probabilities"),
        ([1, 2], [-1], [-0.5], "non-negative"),
        ([1, 2], [3.5], [-0.5], "generated token ids must be whole numbers, found 3.5 at 0"),
        ([1, 2], [None], [-0.5], "generated token ids must be numbers, found NoneType at 0"),
        ([1, 2], [3], [None], "log probabilities must be numbers, found NoneType at 0"),
        ([1, 2], [True], [-0.5], "generated token ids must be whole numbers, got bool[1]"),
        (None, [3], [-0.5], "prompt token ids must be a sequence or an array of numbers, got NoneType"),
        ([], [], [], "at least one token"),
    ],
    ids=[
        "logprobs one short",
        "logprobs one long",
        "no logprobs",
        "nan logprob",
        "infinite logprob",
        "logprob beyond binary32",
        "fabricated token without a generation",
        "negative token",
        "half a token",
        "a token that is none",
        "a log probability that is none",
        "a truth for a token",
        "no prompt tokens",
        "nothing at all",
    ],
)
def test_what_cannot_be_a_call_fails_its_capture_and_stages_nothing(
    prompt: Any, generated: Any, logprobs: Any, reason: str
) -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    coords = recorder.complete_call(recorder.begin_call(ROOT), prompt, generated, logprobs)
    assert coords.disposition == "capture_failed"
    assert reason in (coords.failure_reason or "")
    assert sink.staged == []


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([1, 9, 3, 4], "leaves the parent's sequence at 1"),
        ([1, 3, 4], "leaves the parent's sequence at 1"),
        ([1, 2], "has 3 tokens, the prompt only 2"),
    ],
    ids=["other tokens of the same length", "retokenised shorter", "truncated"],
)
def test_a_child_whose_prompt_does_not_start_with_its_parents_tokens_is_refused(prompt: list[int], reason: str) -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    child = recorder.begin_call(_child_of(_root(sink, recorder)))
    coords = recorder.complete_call(child, prompt, [5], [-0.5])
    assert coords.disposition == "capture_failed"
    assert (coords.failure_reason or "").startswith("prompt_diverges: ")
    assert reason in (coords.failure_reason or "")
    assert len(sink.staged) == 1


@pytest.mark.parametrize("extras", [{"routes": np.zeros(3)}, ["routes"]], ids=["an array", "not a mapping"])
def test_extras_that_have_no_digest_fail_the_capture(extras: Any) -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    coords = recorder.complete_call(recorder.begin_call(ROOT), [1], [2], [-0.5], extras)
    assert coords.disposition == "capture_failed"


def test_routes_and_their_boundary_pass_through_unchanged() -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    extras = {"routed_experts": "nrlre1:int8:1x1x2:AAE=", "routed_experts_boundary": "nrlre1:int8:1x1x2:AgM="}
    recorder.complete_call(recorder.begin_call(ROOT), [1], [2], [-0.5], extras)
    assert sink.staged[0].extras == extras


def test_a_sink_that_fails_never_fails_the_answer() -> None:
    recorder = _recorder(ListSink("the plane is gone"))
    coords = recorder.complete_call(recorder.begin_call(ROOT), [1, 2], [3], [-0.5])
    assert (coords.disposition, coords.failure_reason) == ("capture_failed", "staging_failed: the plane is gone")


class RaisingSink:
    def stage(self, record: StagedCall, /) -> StageResult:
        raise KeyError("a bug in the client")


class SilentSink:
    def stage(self, record: StagedCall, /) -> Any:
        return None


class WrongSink:
    def stage(self, record: StagedCall, /) -> StageResult:
        return StageResult(ok=True, staging_key="another/call")


class OddExtras(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("extras that cannot be walked \ud800")

    keys = __iter__ = items


@pytest.mark.parametrize("sink", [RaisingSink(), SilentSink(), WrongSink()], ids=lambda sink: type(sink).__name__)
def test_a_sink_that_raises_or_answers_nonsense_fails_the_capture_and_not_the_answer(
    sink: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = _recorder(sink)
    coords = recorder.complete_call(recorder.begin_call(ROOT), [1, 2], [3], [-0.5])
    assert (coords.failure_reason or "").startswith("staging_failed: ")
    assert recorder.counts.failed == {"staging_failed": 1}
    assert caplog.records[-1].exc_info is not None


def test_what_raises_while_a_call_is_sealed_fails_its_capture(caplog: pytest.LogCaptureFixture) -> None:
    recorder = _recorder(ListSink())
    coords = recorder.complete_call(recorder.begin_call(ROOT), [1], [2], [-0.5], OddExtras(a=1))
    assert coords.failure_reason == "capture_error: RuntimeError: extras that cannot be walked ?"
    assert caplog.records[-1].exc_info is not None


def test_a_source_that_raises_something_untyped_fails_the_capture_of_that_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Source:
        def fetch(self, wanted: list[StagedReference], /) -> list[StagedCall]:
            raise ZeroDivisionError("a bug in the source")

    sink = ListSink()
    recorder = _recorder(sink, source=Source())
    call = recorder.begin_call(_child_of(_root(sink, _recorder(sink))))
    assert caplog.records[-1].exc_info is not None
    coords = recorder.complete_call(call, [1, 2, 3], [4], [-0.5])
    assert coords.failure_reason == "prefix_unavailable: ZeroDivisionError: a bug in the source"


def test_a_weight_version_that_cannot_be_had_fails_the_capture_of_that_call() -> None:
    def gone() -> int:
        raise ConnectionResetError("the trainer is gone")

    recorder = CallRecorder(ListSink(), weight_version=gone)
    call = recorder.begin_call(ROOT)
    coords = recorder.complete_call(call, [1, 2], [3], [-0.5])
    assert coords.failure_reason == "weight_version_unavailable: ConnectionResetError: the trainer is gone"
    assert recorder.counts.failed == {"weight_version_unavailable": 1}


@pytest.mark.parametrize("version", [np.int64(7), np.uint8(7), torch.tensor(7)], ids=str)
def test_a_weight_version_is_any_whole_number(version: Any) -> None:
    assert CallRecorder(ListSink(), weight_version=lambda: version).begin_call(ROOT).weight_version == 7


def test_what_became_of_a_recorders_calls_is_counted() -> None:
    recorder = _recorder(ListSink())
    recorder.complete_call(recorder.begin_call(ROOT), [1], [2], [-0.5])
    recorder.complete_call(recorder.begin_call(ROOT), [1], [2], [])
    recorder.complete_call(recorder.begin_call(ROOT), [1], [], [-0.5])
    recorder.fail_call(recorder.begin_call(ROOT), "no token ids: in this answer")
    recorder.abort_call(recorder.begin_call(ROOT))
    assert recorder.counts == CaptureCounts(
        staged=1, aborted=1, failed={"invalid_staging_row": 2, "failed_by_caller": 1}
    )


def test_a_reason_of_any_text_fits_the_coordinates() -> None:
    recorder = _recorder(ListSink("\ud800 " * 400))
    coords = recorder.complete_call(recorder.begin_call(ROOT), [1], [2], [-0.5])
    assert len(coords.failure_reason or "") == 500
    assert recorder.fail_call(recorder.begin_call(ROOT), "").failure_reason == "no reason was given"


def test_a_plane_that_was_closed_poisons_the_rollout_and_nothing_else(world: World) -> None:
    first = world.call([user("q")], "a", rollout_id="good")
    world.plane.close()
    lost = world.call([user("q")], "a", rollout_id="bad")
    assert lost.coords.disposition == "capture_failed"
    assert world.receipt("bad").capture_poisoned
    assert world.receipt("good").terminal_model_call_id == first.id


def test_a_parent_served_by_another_worker_is_read_from_staging(world: World) -> None:
    a = world.call([user("q")], "a", prompt=[1], generated=[2])
    b = world.call([*a.messages, user("t")], "b", carry=[3], generated=[4])
    world.recorder = world.new_recorder()
    c = world.call([*b.messages, user("t")], "c", carry=[5], generated=[6])
    assert world.staged(c).prev_len == 4
    assert world.recorder.prefix_token_ids(c.admission).tolist() == [1, 2, 3, 4]


def test_a_sequence_that_fell_out_of_the_cache_is_read_from_staging(world: World) -> None:
    world.recorder = world.new_recorder(max_cached_tokens=4)
    a = world.call([user("q")], "a")
    world.call([user("other")], "x")
    b = world.call([*a.messages, user("t")], "b")
    assert b.coords.disposition == "staged"


def test_a_cached_sequence_of_a_reused_call_id_is_not_taken_for_the_new_one() -> None:
    sink = ListSink()
    here = _recorder(sink, source=ListSource(sink.staged))
    here.complete_call(here.begin_call(ROOT), [1, 2], [9], [-0.5])
    sink.staged.clear()
    parent = _root(sink, _recorder(sink))
    assert here.begin_call(_child_of(parent)).prefix_token_ids.tolist() == [1, 2, 3]


def test_the_cache_keeps_what_was_used_last_within_its_budget() -> None:
    cache = PrefixCache(max_tokens=4)
    for key in ("a", "b"):
        cache.put(key, key, np.arange(2))
    assert cache.get("a", "a") is not None
    cache.put("c", "c", np.arange(2))
    assert [cache.get(key, key) is not None for key in "abc"] == [True, False, True]
    cache.put("too long", "too long", np.arange(5))
    assert [cache.get(key, key) is not None for key in ("a", "c", "too long")] == [True, True, False]


@pytest.mark.parametrize("source", [None, BrokenSource()], ids=["no source", "a source that times out"])
def test_a_prefix_that_cannot_be_read_fails_the_capture_of_that_call(source: Any) -> None:
    sink = ListSink()
    parent = _root(sink, _recorder(sink))
    recorder = _recorder(sink, source=source)
    call = recorder.begin_call(_child_of(parent))
    coords = recorder.complete_call(call, [1, 2, 3, 4], [5], [-0.5])
    assert (coords.failure_reason or "").startswith("prefix_unavailable: ")
    with pytest.raises((StagedRowsMissing, DataPlaneTimeout)):
        recorder.prefix_token_ids(_child_of(parent))


def test_rows_that_are_not_the_parents_sequence_are_not_believed() -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    parent = _root(sink, recorder)
    recorder.complete_call(recorder.begin_call(ROOT), [1, 2], [4], [-0.5])
    impostor = _recorder(sink, source=ListSource([sink.staged[1]]))
    call = impostor.begin_call(_child_of(parent))
    assert "are not the parent's sequence" in (call.failure or "")


def test_an_unresolved_call_is_answered_and_not_staged() -> None:
    sink = ListSink()
    recorder = _recorder(sink)
    admission = CaptureAdmission(
        rollout_id="r", model_call_id="a", resolution="unresolved", unresolved_reason="ambiguous"
    )
    coords = recorder.complete_call(recorder.begin_call(admission), [1], [2], [-0.5])
    assert coords.failure_reason == "unresolved_parent: ambiguous"
    assert sink.staged == []


def test_misuse_raises() -> None:
    recorder = _recorder(ListSink())
    call = recorder.begin_call(ROOT)
    recorder.complete_call(call, [1], [2], [-0.5])
    with pytest.raises(CallClosed):
        recorder.complete_call(call, [1], [2], [-0.5])
    aborted = recorder.begin_call(ROOT)
    recorder.abort_call(aborted)
    with pytest.raises(CallClosed):
        recorder.fail_call(aborted, "late")
    for version in (-1, True, 1.0, "7", None):
        with pytest.raises(ValueError, match=f"a weight version is a non-negative int, got {version!r}"):
            CallRecorder(ListSink(), weight_version=lambda version=version: version).begin_call(ROOT)


def test_a_call_that_the_engine_cannot_explain_is_failed_by_hand() -> None:
    recorder = _recorder(ListSink())
    coords = recorder.fail_call(recorder.begin_call(ROOT), "the response carries no token ids")
    assert (coords.disposition, coords.failure_reason) == ("capture_failed", "the response carries no token ids")


TURN = st.tuples(st.lists(st.integers(0, 50), max_size=4), st.lists(st.integers(0, 50), min_size=1, max_size=4))


@settings(deadline=None)
@given(turns=st.lists(TURN, min_size=1, max_size=6), cached=st.integers(0, 20))
def test_the_deltas_of_a_chain_are_the_last_prompt_and_generation(
    turns: list[tuple[list[int], list[int]]], cached: int
) -> None:
    sink = ListSink()

    class Source:
        def fetch(self, wanted: list[StagedReference], /) -> list[StagedCall]:
            return [next(call for call in sink.staged if call.digest == one.digest) for one in wanted]

    recorder = _recorder(sink, source=Source(), max_cached_tokens=cached)
    so_far: list[int] = []
    for at, (carry, generated) in enumerate(turns):
        chain = tuple(call.staging_key for call in sink.staged)
        parent = sink.staged[-1] if sink.staged else None
        call = recorder.begin_call(
            CaptureAdmission(
                rollout_id="r",
                model_call_id=str(at),
                resolution="resolved" if parent else "root",
                parent_call_id=parent.model_call_id if parent else None,
                prev_len=parent.cum_len if parent else 0,
                parent_chain_hash=parent.chain_hash if parent else None,
                staging_chain=chain,
                staging_digests=tuple(call.digest for call in sink.staged),
            )
        )
        assert call.prefix_token_ids.tolist() == so_far
        coords = recorder.complete_call(call, [*so_far, *carry], generated, [-1.0] * len(generated))
        assert coords.disposition == "staged"
        so_far += [*carry, *generated]
    assert np.concatenate([call.token_ids_delta for call in sink.staged]).tolist() == so_far


def test_a_value_that_the_model_cannot_have_said_is_a_failed_capture() -> None:
    sink = ListSink()
    recorder = _recorder(sink, model=ModelShape(vocab_size=100))
    coords = recorder.complete_call(recorder.begin_call(ROOT), [1, 2], [100], [-0.5])
    assert coords.disposition == "capture_failed"
    assert "impossible_value: call 'a' of rollout 'r': token id 100 at 2; the vocabulary has 100" in str(coords)
    assert recorder.counts == CaptureCounts(failed={"impossible_value": 1})
    assert sink.staged == []
