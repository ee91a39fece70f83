"""What the snippets of a page or a module find when they run: real planes, real calls, a small engine.

A snippet's names are its own imports, for a docstring also the package's and its module's, and what its world
gives. Worlds are built when a snippet runs, in a folder of its own. A page or module without a world needs none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zmq

import rollout_reassembler as rr
from rollout_reassembler.capture import CallRecorder, CaptureLedger
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.gate import WriteGate
from rollout_reassembler.staging.places import place, place_of
from tests import route_captures
from tests.captures import MadeRollout, chain, finalize, memory_plane

Names = dict[str, Any]
MODEL_SHAPE = (48, 8)

_CONTEXTS: list[zmq.Context[Any]] = []
"""Kept to the end of the process: one that goes waits for its sockets."""


@dataclass
class Cluster:
    """The session's queue with two partitions of one test's own, and how actors reach it."""

    client: DataPlaneClient
    dp_config: rr.DataPlaneConfig
    config: rr.RolloutReassemblerActorConfig


def names_in(module: str) -> Names:
    """What the example of a module's docstring may name without importing it: the package's names and the module's."""
    return {name: getattr(rr, name) for name in rr.__all__} | vars(importlib.import_module(module))


def registered() -> DataPlaneClient:
    """The plane of most examples: in memory, with the partitions that they name."""
    client = rr.build_data_plane_client(rr.DataPlaneConfig(impl="memory"))
    rr.register_staging_partition(client, "staging")
    rr.register_canonical_partition(client, "train")
    return client


def sink_of(client: DataPlaneClient) -> rr.StagingSink:
    return rr.StagingSink(client, staging_partition="staging")


def staged(client: DataPlaneClient, partition: str, *rollouts: MadeRollout) -> None:
    results = rr.StagingSink(client, staging_partition=partition).stage_all(
        [call for made in rollouts for call in made.calls]
    )
    assert all(result.ok for result in results), results


def group_names(client: DataPlaneClient, group_id: str = "g7", *, partition: str = "staging") -> Names:
    """Two rollouts of one group, staged, and the parts of their request."""
    rollouts = [chain(f"{group_id}/r{index}") for index in range(2)]
    staged(client, partition, *rollouts)
    rollout_ids, receipts = [made.rollout_id for made in rollouts], [made.receipt() for made in rollouts]
    request = rr.ReassemblyRequest(
        group_id=group_id,
        rollout_ids=tuple(rollout_ids),
        canonical_sample_ids=None,
        receipts=tuple(receipts),
        rewards=(1.0, 0.0),
        fallback_weight_version=3,
        prompt_idx=7,
        mask_sample=None,
    )
    return {
        "client": client,
        "call": rollouts[0].calls[0],
        "rollout_ids": rollout_ids,
        "receipts": receipts,
        "rewards": [1.0, 0.0],
        "request": request,
        "requests": [request, replace_group(request, f"{group_id}-b", client, partition)],
    }


def replace_group(
    request: rr.ReassemblyRequest, group_id: str, client: DataPlaneClient, partition: str
) -> rr.ReassemblyRequest:
    """Another group like `request`'s, staged as well."""
    rollouts = [chain(f"{group_id}/r{index}") for index in range(2)]
    staged(client, partition, *rollouts)
    ids, receipts = (made.rollout_id for made in rollouts), (made.receipt() for made in rollouts)
    return replace(request, group_id=group_id, rollout_ids=tuple(ids), receipts=tuple(receipts))


def group_world() -> Names:
    return group_names(registered())


def collector_world() -> Names:
    names = group_world()
    settings: dict[str, Any] = {"pad_token_id": 0, "max_seq_len": None}
    reassembler = rr.RolloutReassembler(names["client"], partition_id="train", staging_partition="staging", **settings)
    return {**names, "reassembler": reassembler}


def published_world() -> Names:
    """A published group with deferred routes, and something that logs."""
    turns = [route_captures.Turn(3, 2), route_captures.Turn(1, 3)]
    layers, topk = MODEL_SHAPE
    client, rollout = memory_plane(), route_captures.made("g7/r0", turns, layers=layers, topk=topk)
    route_captures.stage(client, rollout)
    options = {"router_replay_enabled": True, "defer_routed_experts_to_policy": True}
    group = finalize(client, [rollout], group_id="g7", options=options)
    assert group.valid_row_count == 1
    engine = route_captures.truth(4, layers=layers, topk=topk)
    logged: list[Any] = []
    return {"client": client, "group": group, "meta": group.meta, "engine": engine, "log": logged.append}


def recorder_world() -> Names:
    """A worker with an engine that gets new weights while it answers, and an admission behind a staged parent."""
    client = registered()
    sink = rr.StagingSink(client, staging_partition="staging")
    source = rr.StagingSource(client, staging_partition="staging")
    names: Names = {"sink": sink, "source": source, "trainer_version": 7, "what_was_added": "42"}

    def generate(prompt: list[int]) -> SimpleNamespace:
        names["trainer_version"] = 8
        assert list(map(int, prompt)) == [1, 2, 3, 42]
        return SimpleNamespace(token_ids=[5, np.int32(6)], logprobs=torch.tensor([-0.5, -0.25], dtype=torch.bfloat16))

    parent = rr.seal_call(
        rollout_id="r",
        model_call_id="a",
        token_ids_delta=[1, 2, 3],
        token_mask_delta=[0, 0, 1],
        generation_log_probs_delta=[0, 0, -0.5],
        weight_version=7,
    )
    assert sink.stage(parent).ok
    names["admission"] = rr.CaptureAdmission(
        rollout_id="r",
        model_call_id="b",
        resolution="resolved",
        parent_call_id="a",
        prev_len=3,
        parent_chain_hash=parent.chain_hash,
        staging_chain=(parent.staging_key,),
        staging_digests=(parent.digest,),
    )
    names["engine"] = SimpleNamespace(generate=generate)
    names["tokenize"] = lambda text: [int(text)]
    return names


def ledger_world() -> Names:
    """An agent's messages, and a worker that answers them from the same plane."""
    client = registered()
    recorder = CallRecorder(rr.StagingSink(client, staging_partition="staging"), weight_version=lambda: 7)

    def generate(admission: rr.CaptureAdmission, messages: list[Any]) -> tuple[SimpleNamespace, rr.CommitCoords]:
        call = recorder.begin_call(admission)
        coords = recorder.complete_call(call, [*call.prefix_token_ids, 1, 2], [3], [-0.5])
        message = {"role": "assistant", "content": "hello"}
        return SimpleNamespace(id="resp-1", message=message), coords

    served: list[Any] = []
    return {
        "CaptureLedger": CaptureLedger,
        "directory": "ledger",
        "messages": [{"role": "user", "content": "hi"}],
        "worker": SimpleNamespace(generate=generate),
        "serve": served.append,
        "served": served,
    }


def plane_world() -> Names:
    client = registered()
    client.register_partition("train.groups", {})
    columns = {"input_ids": [np.arange(3)], "total_reward": [1.0]}
    return {"client": client, "directory": "checkpoint", "ids": ["g0_g0"], "columns": columns, "tags": [{}]}


def keys_world() -> Names:
    context = zmq.Context()
    _CONTEXTS.append(context)
    return {"router": context.socket(zmq.ROUTER), "dealer": context.socket(zmq.DEALER)}


def gate_world() -> Names:
    written: list[int] = []
    return {
        "gate": WriteGate(),
        "partition": "staging",
        "keys": ["r/a"],
        "seconds": 1.0,
        "write": lambda: written.append(1),
    }


def crashed_plane_world() -> Names:
    """A plane with a checkpoint, before it is lost."""
    client = registered()
    client.save_checkpoint("checkpoints/plane-0042")
    return {"rr": rr, "client": client, "dp_config": rr.DataPlaneConfig(impl="memory")}


def training_world() -> Names:
    return {"step": lambda input_ids, token_mask: (input_ids * token_mask).sum()}


def sweep_world() -> Names:
    return {"client": registered(), "running": ["g3/r1"]}


def source_world() -> Names:
    """A receipt's row of a staged call, and a source that finds the call by it."""
    client, rollout = registered(), chain("r")
    staged(client, "staging", rollout)
    record = rr.CallRecord.of(rollout.calls[0], response_id="resp-0")
    source = rr.StagingSource(client, staging_partition="staging")
    return {"source": source, "record": record, "place": place, "receipt": rr.RolloutReceipt(**rollout.receipt())}


def prover_world() -> Names:
    """A staged rollout as the reassembler holds it when it proves: its receipt, checked, and its values by place."""
    client, rollout = registered(), chain("r")
    staged(client, "staging", rollout)
    receipt = rr.RolloutReceipt(**rollout.receipt())
    source = rr.StagingSource(client, staging_partition="staging")
    values, _ = source.read_values([place_of(record) for record in receipt.manifest])
    return {"rollout_id": "r", "receipt": receipt, "reward": 1.0, "values": values}


def sink_world() -> Names:
    return {"dp_client": registered(), "call": chain("r").calls[0]}


def rollouts_world() -> Names:
    index = torch.tensor([[0, 0, 1], [1, 1, 1]])
    return {"index": index, "tokens": torch.tensor([2, 4]), "mask": torch.ones(2, 3), "log_ratio": torch.zeros(2, 3)}


WORLDS: dict[str, Callable[[], Names]] = {
    "README.md": training_world,
    "docs/crashes.md": crashed_plane_world,
    "docs/router-replay.md": published_world,
    "rollout_reassembler": group_world,
    "rollout_reassembler.algorithms.rollouts": rollouts_world,
    "rollout_reassembler.capture.ledger": ledger_world,
    "rollout_reassembler.capture.recorder": recorder_world,
    "rollout_reassembler.contract.model_shape": lambda: {"sink": sink_of(registered())},
    "rollout_reassembler.data_plane.base": plane_world,
    "rollout_reassembler.data_plane.gate": gate_world,
    "rollout_reassembler.data_plane.transfer_queue.keys": keys_world,
    "rollout_reassembler.reassembly.collector": collector_world,
    "rollout_reassembler.reassembly.proofs": prover_world,
    "rollout_reassembler.reassembly.reassembler": group_world,
    "rollout_reassembler.reassembly.sweep": sweep_world,
    "rollout_reassembler.staging.sink": sink_world,
    "rollout_reassembler.staging.source": source_world,
    "rollout_reassembler.trainer.deferred_routes": published_world,
    "rollout_reassembler.trainer.rows": published_world,
}


def _actors_world(cluster: Cluster) -> Names:
    names = group_names(cluster.client, cluster.config.partition_id, partition=cluster.config.staging_partition)
    return {**names, "dp_config": cluster.dp_config, "config": cluster.config}


def _pool_world(cluster: Cluster) -> Names:
    actors = rr.create_rollout_reassembler_actors(cluster.dp_config, cluster.config, num_workers=2)
    return {**_actors_world(cluster), "actors": actors}


def _open_plane_world(cluster: Cluster) -> Names:
    settings = rr.RolloutReassemblerActorConfig("canonical", "staging", pad_token_id=0, max_seq_len=None)
    rr.register_staging_partition(cluster.client, "staging")
    return {**group_names(cluster.client, "planes"), "settings": settings}


CLUSTER_WORLDS: dict[str, Callable[[Cluster], Names]] = {
    "rollout_reassembler.actors.pool": _pool_world,
    "rollout_reassembler.actors.rollout_reassembler_actor": _actors_world,
    "rollout_reassembler.files.planes": _open_plane_world,
    "rollout_reassembler.data_plane.transfer_queue.client": lambda cluster: {"cfg": cluster.dp_config},
}
"""Modules whose docstrings show a cluster: they run on the session's queue."""
