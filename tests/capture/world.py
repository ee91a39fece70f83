"""A small world for capture tests: one ledger, one worker, the memory plane between them.

`World.call` is one model call, start to end: the agent's messages are admitted, the worker generates
what the test says, and the answer is recorded before the agent sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout_reassembler.capture import CallRecorder, CaptureAdmission, CaptureLedger, CommitCoords
from rollout_reassembler.contract.records import CallRecord, RolloutReceipt, StagedCall, StagedReference
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.staging.schema import register_staging_partition
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.staging.source import StagingSource

STAGING = "staging"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class Exchange:
    """One model call: what was admitted, what the worker acknowledged, and the conversation after it."""

    admission: CaptureAdmission
    coords: CommitCoords
    record: CallRecord | None
    messages: list[dict[str, Any]]

    @property
    def id(self) -> str:
        return self.admission.model_call_id


class World:
    def __init__(self, directory: Path, **settings: Any) -> None:
        self.plane = MemoryDataPlane()
        register_staging_partition(self.plane, STAGING)
        self.sink = StagingSink(self.plane, staging_partition=STAGING)
        self.source = StagingSource(self.plane, staging_partition=STAGING)
        self.version = 7
        self.recorder = self.new_recorder()
        self.ledger = CaptureLedger(directory, **settings)

    def new_recorder(self, **settings: Any) -> CallRecorder:
        return CallRecorder(
            settings.pop("sink", self.sink),
            weight_version=lambda: self.version,
            source=settings.pop("source", self.source),
            **settings,
        )

    def call(
        self,
        messages: Sequence[dict[str, Any]],
        answer: str,
        *,
        generated: Sequence[int] = (50, 51),
        carry: Sequence[int] = (10, 11),
        prompt: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
        rollout_id: str = "r",
        model_call_id: str | None = None,
        response_id: str | None = None,
        extras: dict[str, Any] | None = None,
    ) -> Exchange:
        """One call whose prompt is the parent's exact tokens plus `carry`, unless `prompt` says otherwise."""
        admission = self.ledger.admit(rollout_id, messages, model_call_id=model_call_id)
        opened = self.recorder.begin_call(admission)
        coords = self.recorder.complete_call(
            opened,
            np.array([*opened.prefix_token_ids, *carry], dtype=np.int64) if prompt is None else list(prompt),
            list(generated),
            [-0.5] * len(generated) if logprobs is None else list(logprobs),
            extras,
        )
        output = assistant(answer)
        response = response_id or f"resp-{admission.model_call_id}"
        record = self.ledger.record(admission, coords, response_id=response, output=output)
        return Exchange(admission, coords, record, [*messages, output])

    def receipt(self, rollout_id: str = "r", **witnesses: Any) -> RolloutReceipt:
        return self.ledger.receipt(rollout_id, **witnesses)

    def staged(self, exchange: Exchange) -> StagedCall:
        assert exchange.coords.staging_key is not None
        return self.source.fetch([StagedReference(exchange.coords.staging_key, exchange.coords.digest)])[0]
