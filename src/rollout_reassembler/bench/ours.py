"""The arm that is measured: what a reassembler actor does for a request, in this process.

That is all of it: the guard on request and answer, admission, proof, records, and the metrics that an
actor tells Prometheus. Only Ray's own call is left out, which is the same for any actor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rollout_reassembler.bench.arm import CANONICAL, PAD_TOKEN_ID, STAGING, PublishedRow
from rollout_reassembler.bench.counting import counted
from rollout_reassembler.bench.figures import Traffic
from rollout_reassembler.bench.shapes import MadeGroup
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest
from rollout_reassembler.contract.records import StagedCall
from rollout_reassembler.contract.rpc_guard import assert_metadata_only
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.reassembly.phases import Phases
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from rollout_reassembler.reassembly.rows import SPANS_FIELD, canonical_schema, register_canonical_partition
from rollout_reassembler.staging.schema import register_staging_partition
from rollout_reassembler.staging.sink import StagingSink

_STAGE_AT_ONCE = 256


class OursArm:
    """This package, over a client of any plane."""

    def __init__(self, client: DataPlaneClient) -> None:
        self._client = client
        register_staging_partition(client, STAGING)
        register_canonical_partition(client, CANONICAL)
        counting, self._counter = counted(client, staging_partition=STAGING, partition_id=CANONICAL)
        self._reassembler = RolloutReassembler(
            counting, partition_id=CANONICAL, staging_partition=STAGING, pad_token_id=PAD_TOKEN_ID, max_seq_len=None
        )
        self._sink = StagingSink(client, staging_partition=STAGING)
        self._metrics = _prometheus_metrics()

    def stage(self, group: MadeGroup) -> None:
        for start in range(0, len(group.all_calls), _STAGE_AT_ONCE):
            for result in self._sink.stage_all(group.all_calls[start : start + _STAGE_AT_ONCE]):
                if not result.ok:
                    raise RuntimeError(f"staging for the bench failed: {result.error}")

    def finalize(self, group: MadeGroup, group_id: str) -> dict[str, float]:
        return self.finalize_request(group.request(group_id))

    def finalize_request(self, request: ReassemblyRequest) -> dict[str, float]:
        """What an actor does with a request. Safe on several threads, but then calls are counted together."""
        self._counter.reset()
        clock = Phases()
        with clock("guard"):
            assert_metadata_only(request)
        answer = self._reassembler.finalize_group(**_arguments(request))
        with clock("guard"):
            assert_metadata_only(answer)
        with clock("metrics"):
            if self._metrics is not None:
                self._metrics.observe(answer)
        if answer.rejections or answer.cleanup_pending:
            raise RuntimeError(
                f"a sound group was not finalized cleanly: {answer.rejections}, pending {answer.cleanup_pending!r:.200}"
            )
        return {**_phases(answer), **clock.ms()}

    def published(self, group: MadeGroup, group_id: str) -> list[PublishedRow]:
        # The reference publishes no spans, so there is nothing to compare them with.
        shared = [name for name in canonical_schema(with_routes=False) if name != SPANS_FIELD]
        batch = self._client.get_samples(_sample_ids(group, group_id), CANONICAL, shared)
        return [columns for _, columns in batch.rows()]

    def forget(self, group: MadeGroup, group_id: str) -> None:
        self._client.clear_samples(_sample_ids(group, group_id), CANONICAL)

    def traffic(self) -> Traffic:
        return self._counter.traffic()

    def stage_one(self, call: StagedCall) -> None:
        result = self._sink.stage(call)
        if not result.ok:
            raise RuntimeError(f"staging for the bench failed: {result.error}")

    def clear_staged(self, calls: list[StagedCall]) -> None:
        self._sink.clear(calls)


def _arguments(request: ReassemblyRequest) -> dict[str, Any]:
    return {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}


def _phases(answer: FinalizedGroup) -> dict[str, float]:
    return {name.removeprefix("row_assembly/").removesuffix("_ms"): ms for name, ms in answer.timings.items()}


def _sample_ids(group: MadeGroup, group_id: str) -> list[str]:
    return list(group.request(group_id).canonical_sample_ids or ())


def _prometheus_metrics() -> Any | None:
    """An actor's metrics; `None` where Ray is not installed, and no actor could run either."""
    try:
        from rollout_reassembler.actors.metrics import GroupMetrics
    except ImportError:
        return None
    return GroupMetrics(CANONICAL)
