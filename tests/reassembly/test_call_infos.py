"""What calls say of themselves, from the recorder to the trainer's batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_reassembler.capture import CallInfo
from rollout_reassembler.contract.call_info import CALL_KEY
from rollout_reassembler.contract.errors import PlaneLost
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.spans import decode_spans
from rollout_reassembler.staging.schema import CALL_FIELD, EXTRAS_FIELD
from rollout_reassembler.trainer.rows import iter_batches
from tests.capture.world import World, assistant, user
from tests.captures import (
    CANONICAL,
    STAGING,
    MadeRollout,
    finalize,
    memory_plane,
    reassembler,
    register_canonical_partition,
    stage,
)

STOPPED = CallInfo(finish_reason="stop", temperature=1.0, logprobs="raw")


def _rollout(*infos: CallInfo | None, rollout_id: str = "r", generated: int = 4) -> MadeRollout:
    """A chain of calls of two carried and `generated` sampled tokens that say `infos`."""
    made, parent = MadeRollout(rollout_id), None
    for info in infos:
        extras = {CALL_KEY: info.encode()} if info is not None else None
        parent = made.call([1, 2], range(5, 5 + generated), parent=parent, weight_version=7, extras=extras)
    return made


def _finalized(plane: DataPlaneClient, *rollouts: MadeRollout, **request: Any) -> Any:
    stage(plane, *rollouts)
    return finalize(plane, rollouts, **request)


def _tags(plane: MemoryDataPlane, *rollouts: MadeRollout) -> list[dict[str, Any]]:
    group = _finalized(plane, *rollouts)
    tags = plane.get_tags(group.meta.sample_ids, "canonical")
    names = ("finish_reason", "temperature", "logprobs", "constrained")
    return [{name: tag[name] for name in names if name in tag} for tag in tags if tag is not None]


def test_how_a_call_ended_and_was_sampled_is_on_its_row() -> None:
    constrained = STOPPED.model_copy(update={"finish_reason": "length", "constrained": True})
    hotter = STOPPED.model_copy(update={"temperature": 0.5})
    assert _tags(
        memory_plane(),
        _rollout(STOPPED, constrained, rollout_id="a"),
        _rollout(STOPPED, hotter, rollout_id="b"),
        _rollout(STOPPED, None, rollout_id="c"),
        _rollout(None, None, rollout_id="d"),
    ) == [
        {"finish_reason": "length", "temperature": 1.0, "logprobs": "raw", "constrained": "mixed"},
        {"finish_reason": "stop", "temperature": "mixed", "logprobs": "raw"},
        {"temperature": "mixed", "logprobs": "mixed"},
        {},
    ]


@pytest.mark.parametrize(
    ("reason", "said", "truncated"),
    [("length", None, True), ("stop", None, False), ("length", [False], False), (None, None, True)],
    ids=["ended for its length", "stopped at the limit", "the request says otherwise", "nobody says"],
)
def test_truncated_follows_the_finish_reason_where_it_is_known(reason: Any, said: Any, truncated: bool) -> None:
    plane = memory_plane()
    made = _rollout(CallInfo(finish_reason=reason, temperature=1.0))
    group = _finalized(plane, made, options={"max_seq_len": 6}, truncated=said)
    assert plane.get_data(group.meta, ["truncated"])["truncated"].tolist() == [truncated]


def test_a_generation_that_goes_on_with_new_weights_is_one_call_of_several_versions(tmp_path: Path) -> None:
    world = World(tmp_path)
    admission = world.ledger.admit("r", [user("q")])
    coords = world.recorder.complete_call(
        world.recorder.begin_call(admission),
        [1, 2],
        [5, 6, 7, 8],
        [-0.5] * 4,
        info=CallInfo(finish_reason="stop", weight_versions=((0, 7), (3, 9))),
    )
    world.ledger.record(admission, coords, response_id="x", output=assistant("Hello"))
    plane = world.plane
    register_canonical_partition(plane, CANONICAL)
    group = reassembler(plane).finalize_group(
        "g",
        ["r"],
        [world.receipt(response_id="x").model_dump()],
        [1.0],
        mask_sample=None,
        fallback_weight_version=0,
        prompt_idx=0,
    )
    assert (group.valid_row_count, group.group_min_wv, group.group_max_wv) == (1, 7, 9)
    (batch,) = iter_batches(plane, group.meta, batch_size=1, pad_token_id=0, spans=True)
    assert batch.token_weight_version.tolist() == [[7, 7, 7, 7, 7, 9]]


def test_what_a_row_says_of_its_calls_is_read_back_from_its_spans() -> None:
    plane = memory_plane()
    info = CallInfo(finish_reason="tool_calls", weight_versions=((0, 7), (1, 8)))
    group = _finalized(plane, _rollout(info, None))
    spans = decode_spans(plane.get_data(group.meta, ["spans"])["spans"][0])
    assert [span.info for span in spans.spans] == [info, None]
    assert spans.weight_versions().tolist() == [7, 7, 7, 8, 8, 8] + [7] * 6


@pytest.mark.parametrize(
    ("extras", "code"),
    [
        ({CALL_KEY: "{}", "more": 1}, None),
        ({CALL_KEY: '{"finish_reason":"bored"}'}, "invalid_call_info"),
        ({CALL_KEY: "not JSON"}, "invalid_call_info"),
        ({CALL_KEY: {"finish_reason": "stop"}}, "invalid_call_info"),
        ({CALL_KEY: '{"weight_versions":[[1,7]]}'}, "invalid_call_info"),
        ({CALL_KEY: '{"weight_versions":[[0,7],[4,8]]}'}, "invalid_call_info"),
        ({CALL_KEY: '{"temperature":-1.0}'}, "invalid_call_info"),
    ],
    ids=["nothing", "another reason", "no JSON", "no text", "not from 0", "behind the end", "a temperature below 0"],
)
def test_what_no_call_can_say_of_itself_costs_its_rollout(extras: dict[str, Any], code: str | None) -> None:
    made = MadeRollout("r")
    made.call([1, 2], [5, 6, 7, 8], extras=extras)
    other = _rollout(STOPPED, rollout_id="other")
    group = _finalized(memory_plane(), made, other)
    assert group.rejections == ({"r": code} if code else {})


def test_changed_extras_are_noticed() -> None:
    plane, made = memory_plane(), _rollout(STOPPED)
    stage(plane, made)
    (key,) = plane.list_samples(STAGING)
    row = plane.get_samples([key], STAGING)
    changed = row[EXTRAS_FIELD][0].replace(b"stop", b"step")
    plane.put_samples([key], STAGING, {CALL_FIELD: row[CALL_FIELD], EXTRAS_FIELD: [changed]})
    assert finalize(plane, [made]).rejections == {"r": "extras_digest_mismatch"}


def test_extras_that_went_with_their_plane_are_lost_and_not_rejected() -> None:
    plane, made = memory_plane(), _rollout(STOPPED)
    stage(plane, made)
    taken = plane.get_samples
    with pytest.MonkeyPatch.context() as patch:

        def without_extras(keys: Any, partition: str, fields: Any = None, **options: Any) -> Any:
            return taken([] if fields == [EXTRAS_FIELD] else keys, partition, fields, **options)

        patch.setattr(plane, "get_samples", without_extras)
        with pytest.raises(PlaneLost, match="1 of its 1 staged rows are missing"):
            finalize(plane, [made], staged_on="another epoch")
        assert finalize(plane, [made], staged_on=plane.epoch()).rejections == {"r": "missing_staging_row"}


def test_the_recorder_refuses_versions_behind_the_last_sampled_token(tmp_path: Path) -> None:
    world = World(tmp_path)
    opened = world.recorder.begin_call(world.ledger.admit("r", [user("q")]))
    info = CallInfo(weight_versions=((0, 7), (2, 8)))
    coords = world.recorder.complete_call(opened, [1], [2, 3], [-0.5, -0.5], info=info)
    assert coords.failure_reason == "invalid_call_info: weight_versions begin at token 2 of 2 sampled"
    with pytest.raises(ValueError, match="expected 0, then ever later tokens"):
        CallInfo(weight_versions=((0, 7), (0, 8)))


def test_a_call_with_older_weights_than_its_parent_is_counted() -> None:
    made = MadeRollout("r")
    parent = made.call([1], [2], weight_version=57)
    made.call([3], [4], parent=parent, weight_version=1)
    group = _finalized(memory_plane(), made)
    assert (group.group_min_wv, group.group_max_wv) == (1, 57)
    assert group.metrics["finalize/calls_older_than_their_parent_count"] == 1.0
