"""One reassembler actor: its signatures, its guard, what it needs, and that it does what a reassembler does."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import time
from typing import Any

import numpy as np
import pytest
import ray
import torch

import rollout_reassembler as rr
from rollout_reassembler.actors import rollout_reassembler_actor as module
from rollout_reassembler.files.exports import rows_table
from tests.actors.conftest import Site
from tests.actors.groups import assert_rows_proven, request_of, rollouts_of, stage_group
from tests.captures import chain, memory_plane


def _parameters(function: Any) -> list[str]:
    """Without the one that Ray adds to every method of a class when it first makes an actor of it."""
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


def test_public_signatures_are_those_of_the_design() -> None:
    fields = [field.name for field in dataclasses.fields(rr.ReassemblyRequest)]
    assert fields[:9] == [
        "group_id",
        "rollout_ids",
        "canonical_sample_ids",
        "receipts",
        "rewards",
        "fallback_weight_version",
        "prompt_idx",
        "mask_sample",
        "loss_multiplier",
    ]
    assert [field.name for field in dataclasses.fields(rr.RolloutReassemblerActorConfig)][:6] == [
        "partition_id",
        "staging_partition",
        "pad_token_id",
        "router_replay_enabled",
        "defer_routed_experts_to_policy",
        "max_seq_len",
    ]
    assert [field.name for field in dataclasses.fields(rr.FinalizedGroup)][:10] == [
        "meta",
        "group_min_wv",
        "group_max_wv",
        "staging_keys",
        "canonical_output_tokens",
        "metrics",
        "dropped",
        "drop_reason",
        "valid_row_count",
        "total_row_count",
    ]
    assert _parameters(rr.RolloutReassemblerActor) == ["dp_config", "config"]
    assert _parameters(rr.RolloutReassemblerActor.finalize) == ["self", "request"]
    assert _parameters(rr.RolloutReassemblerActor.check_dependencies) == ["self"]
    assert _parameters(rr.RolloutReassemblerActor.mooncake_checkpoint) == ["self", "body"]
    create = inspect.signature(rr.create_rollout_reassembler_actors).parameters
    assert list(create)[:3] == ["dp_config", "config", "num_workers"]
    assert create["num_workers"].kind is inspect.Parameter.KEYWORD_ONLY
    guard = inspect.signature(rr.assert_metadata_only).parameters
    assert list(guard)[:2] == ["value", "path"]
    assert guard["path"].default == "rpc"
    assert guard["path"].kind is inspect.Parameter.KEYWORD_ONLY
    assert _parameters(rr.RolloutReassembler.finalize_rollout) == ["self", "rollout_id", "receipt", "reward"]
    assert _parameters(rr.RolloutReassembler.finalize_group)[1:9] == [
        "group_id",
        "rollout_ids",
        "receipts",
        "rewards",
        "mask_sample",
        "fallback_weight_version",
        "prompt_idx",
        "loss_multiplier",
    ]
    for message in (rr.ReassemblyRequest, rr.RolloutReassemblerActorConfig):
        assert message.__dataclass_params__.frozen


def test_the_module_offers_the_guard_and_its_names() -> None:
    assert module.assert_metadata_only is rr.assert_metadata_only
    assert "input_ids" in module._FORBIDDEN_RPC_KEYS


def test_an_actor_publishes_what_a_reassembler_in_this_process_publishes(site: Site, actors: list[Any]) -> None:
    made = rollouts_of(1)
    stage_group(site.plane, site.config.staging_partition, 1)
    actor = actors[0]
    answer = ray.get(actor.finalize.remote(request_of(1)))

    memory = memory_plane()
    stage_group(memory, "staging", 1)
    local = rr.RolloutReassembler(
        memory, partition_id="canonical", staging_partition="staging", pad_token_id=0, max_seq_len=None
    )
    request = request_of(1)
    expected = local.finalize_group(
        "g1",
        request.rollout_ids,
        request.receipts,
        request.rewards,
        mask_sample=None,
        fallback_weight_version=0,
        prompt_idx=1,
    )
    rows = rows_table(site.plane.get_data(answer.meta), answer.meta.tags)
    assert rows.equals(rows_table(memory.get_data(expected.meta), expected.meta.tags))
    assert dataclasses.replace(answer, meta=expected.meta) == expected
    assert answer.valid_row_count == len(made)
    assert not {key for key in site.plane.list_samples(site.config.staging_partition) if key.startswith("g1/")}


def test_finalizing_twice_in_two_actors_gives_one_answer(site: Site, actors: list[Any]) -> None:
    stage_group(site.plane, site.config.staging_partition, 2)
    first, second = actors
    answer = ray.get(first.finalize.remote(request_of(2)))
    assert ray.get(second.finalize.remote(request_of(2))) == answer
    assert_rows_proven(site.plane, site.config.partition_id, [2])


@pytest.mark.parametrize("smuggled", [torch.zeros(2), np.zeros(2), b"raw", {"input_ids": [1, 2]}, {1, 2}], ids=type)
@pytest.mark.parametrize("place", ["rewards", "rollout_ids", "mask_sample"])
def test_rows_in_a_request_are_refused_with_their_place(site: Site, smuggled: Any, place: str) -> None:
    request = request_of(3)
    parts = getattr(request, place) or (False,) * 4
    actor = rr.RolloutReassemblerActor(site.dp_config, site.config)
    with pytest.raises(rr.RequestError, match=rf"^group 'g3': {place}.*\[?1?\]? must be .*, got") as caught:
        actor.finalize(dataclasses.replace(request, **{place: (parts[0], smuggled, *parts[2:])}))
    assert "[1]" in str(caught.value)


@pytest.mark.parametrize("smuggled", [torch.zeros(2), np.zeros(2), b"raw", [1, 2]], ids=type)
def test_rows_in_a_receipt_cost_its_rollout(site: Site, smuggled: Any) -> None:
    group_id = f"smuggled-{type(smuggled).__name__}"
    made = [chain(f"{group_id}/r{index}") for index in range(2)]
    request = request_of(3, made, group_id=group_id)
    stage_group(site.plane, site.config.staging_partition, 3, made)
    receipts = (request.receipts[0], {**made[1].receipt(), "input_ids": smuggled})
    actor = rr.RolloutReassemblerActor(site.dp_config, site.config)
    answer = actor.finalize(dataclasses.replace(request, receipts=receipts))
    assert answer.rejections == {made[1].rollout_id: "invalid_receipt"}


def test_rows_in_an_answer_are_refused(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    actor = rr.RolloutReassemblerActor(site.dp_config, site.config)
    stage_group(site.plane, site.config.staging_partition, 4)
    whole = rr.RolloutReassembler.finalize

    def leaky(self: rr.RolloutReassembler, *args: Any, **kwargs: Any) -> rr.FinalizedGroup:
        return dataclasses.replace(whole(self, *args, **kwargs), metrics={"rows": torch.zeros(3)})

    monkeypatch.setattr(rr.RolloutReassembler, "finalize", leaky)
    with pytest.raises(rr.RpcPayloadError, match=r"rpc\.metrics\['rows'\].*Tensor"):
        actor.finalize(request_of(4))


def test_a_refused_request_reaches_the_caller_with_its_type(site: Site, actors: list[Any]) -> None:
    actor = actors[0]
    with pytest.raises(rr.RequestError, match="group_id must be a non-empty str, got bytes of 3 items"):
        ray.get(actor.finalize.remote(dataclasses.replace(request_of(5), group_id=b"raw")))


@pytest.mark.parametrize("part", ["receipts", "rewards", "mask_sample", "canonical_sample_ids", "truncated"])
def test_a_tuple_that_does_not_align_is_named(site: Site, part: str) -> None:
    actor = rr.RolloutReassemblerActor(site.dp_config, site.config)
    with pytest.raises(rr.RequestError, match=f"3 {part} for 4 rollout_ids"):
        actor.finalize(dataclasses.replace(request_of(6), **{part: ("a", "b", "c")}))


def test_eight_rollouts_of_thirty_calls_cross_in_a_few_hundred_kilobytes() -> None:
    made = [chain(f"group-17/rollout-{index}", 30) for index in range(8)]
    request = request_of(17, made)
    size = rr.assert_metadata_only(request)
    assert size < 400_000
    assert len(pickle.dumps(request)) < 400_000


def test_check_dependencies_reports_versions(site: Site) -> None:
    versions = rr.RolloutReassemblerActor(site.dp_config, site.config).check_dependencies()
    assert versions["ray"] == ray.__version__
    assert set(versions) >= {"torch", "TransferQueue", "numpy"}


@pytest.mark.parametrize("part", ["partition_id", "staging_partition"])
def test_an_unregistered_partition_is_named_and_no_actor_is_left(site: Site, part: str) -> None:
    config = dataclasses.replace(site.config, **{part: "never-registered"})
    before = ray.available_resources()["CPU"]
    with pytest.raises(rr.PartitionNotRegistered, match="never-registered"):
        rr.create_rollout_reassembler_actors(site.dp_config, config, num_workers=2)
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) != before:
        assert time.monotonic() < deadline, "an actor still holds its CPU"
        time.sleep(0.1)


@pytest.mark.parametrize("count", [0, -1])
def test_no_workers_is_a_clear_error(site: Site, count: int) -> None:
    with pytest.raises(rr.RequestError, match=f"num_workers must be at least 1, got {count}"):
        rr.create_rollout_reassembler_actors(site.dp_config, site.config, num_workers=count)


def test_more_workers_than_cpus_is_a_clear_error(site: Site) -> None:
    with pytest.raises(rr.RequestError, match="1000 actors need a CPU each; the cluster has"):
        rr.create_rollout_reassembler_actors(site.dp_config, site.config, num_workers=1000)


def test_a_memory_plane_cannot_be_shared_with_an_actor(site: Site) -> None:
    with pytest.raises(rr.DataPlaneUnavailable, match="one process"):
        rr.create_rollout_reassembler_actors(rr.DataPlaneConfig(impl="memory"), site.config, num_workers=1)


def test_too_few_free_cpus_are_told_at_once_with_who_holds_them(site: Site, actors: list[Any]) -> None:
    with pytest.raises(rr.RequestError) as caught:
        rr.create_rollout_reassembler_actors(site.dp_config, site.config, num_workers=10)
    print(caught.value)
    assert "10 actors need a CPU each, and" in str(caught.value)
    assert "of 10 are free now; node " in str(caught.value)
    assert re.search(r"alive there: .*\d x _ReassemblerProcess", str(caught.value))


def test_a_checkpoint_command_where_nothing_is_owned_is_a_clear_error(site: Site) -> None:
    actor = rr.RolloutReassemblerActor(site.dp_config, site.config)
    with pytest.raises(rr.RequestError, match="save_checkpoint"):
        actor.mooncake_checkpoint({"operation": "DESCRIBE"})
    with pytest.raises(rr.RpcPayloadError):
        actor.mooncake_checkpoint({"payload": b"raw"})


def test_an_actor_collects_what_its_groups_lost(site: Site, pool: rr.ReassemblerPool) -> None:
    """In the background, some ten seconds later; nobody asks for it."""
    stage_group(site.plane, site.config.staging_partition, 410)
    others = request_of(410).receipts[1:]
    answer = pool.submit(dataclasses.replace(request_of(410), receipts=(None, *others))).result(60)
    assert (answer.to_collect, answer.cleanup_pending) == (("g410/r0",), ())
    until = time.monotonic() + 60
    while any(key.startswith("g410/") for key in site.plane.list_samples(site.config.staging_partition)):
        assert time.monotonic() < until, "nobody collects"
        time.sleep(0.5)


def test_an_actor_is_set_as_its_config_says(site: Site) -> None:
    made = rollouts_of(90, rollouts=1, turns=1)
    made[0].call([7], [8], call_id="a sub-agent's")
    stage_group(site.plane, site.config.staging_partition, 90, made)
    actor = rr.RolloutReassemblerActor(site.dp_config, dataclasses.replace(site.config, branches="all", max_seq_len=9))
    answer = actor.finalize(request_of(90, made))
    assert answer.rows_by_rollout == (2,)
    with pytest.raises(rr.GroupConflict, match=r"max_seq_len was 9 and is None here, branches was all and is terminal"):
        rr.RolloutReassembler.from_config(site.plane, site.config).finalize(request_of(90, made))
