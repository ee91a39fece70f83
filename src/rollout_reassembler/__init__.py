"""Rollout Reassembler: black-box agent rollouts in, verified training rows out.

    import rollout_reassembler as rr

    client = rr.build_data_plane_client(rr.DataPlaneConfig(impl="memory"))
    rr.register_staging_partition(client, "staging")
    rr.register_canonical_partition(client, "train")
    rr.StagingSink(client, staging_partition="staging").stage(call)
    reassembler = rr.RolloutReassembler(
        client, partition_id="train", staging_partition="staging", pad_token_id=0, max_seq_len=32768
    )
    group = reassembler.finalize_group(
        "g0", rollout_ids, receipts, rewards, mask_sample=None, fallback_weight_version=3, prompt_idx=0
    )

All public names import from here:

- *staging*, in an inference worker: `seal_call`, `StagedCall`, `StagingSink`, `StagingSource`, `StageResult`
- *capture*, around an engine and an agent: `CallRecorder`, `OpenCall`, `CaptureLedger`, `LedgerView`,
  `CaptureAdmission`, `CommitCoords`, `CallInfo`, `CaptureCounts`, `ModelShape`; and what it makes,
  `RolloutReceipt` of `CallRecord`s
- *finalizing*: `RolloutReassembler`, `FinalizedGroup`, `FailedGroup`, `FinalizedRollout`, `GroupRecords`; on a cluster
  `ReassemblerPool` over `create_rollout_reassembler_actors`, `ReassemblyRequest`
- *training*: `iter_batches`, `TrainBatch`, `read_votes`, `Votes`, `execute_route_plans`, `RouteReport`
- *the data plane*: `build_data_plane_client`, `DataPlaneConfig`, `DataPlaneClient` (which is `RowStore`,
  `ClaimQueue` and `Checkpointable`), `KVBatchMeta`, `register_staging_partition`,
  `register_canonical_partition`, `sweep_staging`
- *proving by hand*: `parse_receipt`, `verify_and_linearize`, `LinearizedRow`, `assert_metadata_only`
- *expert routes*: `route_extras`, `encode_routed_experts`, `decode_routed_experts`, `RoutePlan`
- *errors*: every one is a `ReassemblerError`; docs/errors.md has the table

Those that need Ray or torch load it when they are first used, so that the rest works without. Where
it is not installed, their first use raises `MissingExtra` (an `ImportError`) with the line that installs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollout_reassembler.capture import (
    CallInfo,
    CallRecorder,
    CaptureAdmission,
    CaptureCounts,
    CaptureLedger,
    CommitCoords,
    LedgerView,
    OpenCall,
)
from rollout_reassembler.contract.bounds import ReceiptBounds, parse_receipt
from rollout_reassembler.contract.errors import (
    BadArchive,
    BoundExceeded,
    CallClosed,
    CheckpointDamaged,
    ContractError,
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnauthenticated,
    DataPlaneUnavailable,
    GroupConflict,
    InvalidLedger,
    InvalidReceipt,
    InvalidRoutePlan,
    InvalidRoutes,
    InvalidStagedCall,
    LedgerConflict,
    MissingExtra,
    PartitionNotRegistered,
    PlaneLost,
    PoolClosed,
    ReassemblerError,
    RequestCrashedActor,
    RequestDeadlineExceeded,
    RequestError,
    RouteFailure,
    RowsCondemned,
    RowsMissing,
    RpcPayloadError,
    SchemaViolation,
    StagedRowsMissing,
    UnreadableConversation,
    VerificationError,
    WriteFenced,
)
from rollout_reassembler.contract.features import feature
from rollout_reassembler.contract.messages import (
    FailedGroup,
    FinalizedGroup,
    KVBatchMeta,
    ReassemblyRequest,
    RolloutReassemblerActorConfig,
)
from rollout_reassembler.contract.model_shape import ModelShape
from rollout_reassembler.contract.records import CallRecord, RolloutReceipt, StagedCall, StageResult, seal_call
from rollout_reassembler.contract.routed_experts import decode_routed_experts, encode_routed_experts, route_extras
from rollout_reassembler.contract.rpc_guard import _FORBIDDEN_RPC_KEYS as _FORBIDDEN_RPC_KEYS
from rollout_reassembler.contract.rpc_guard import assert_metadata_only
from rollout_reassembler.data_plane.base import (
    Checkpointable,
    ClaimQueue,
    DataPlaneClient,
    FieldSpec,
    RowStore,
    SampleBatch,
)
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.reassembly.group_record import GroupRecords
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from rollout_reassembler.reassembly.route_plan import RoutePlan
from rollout_reassembler.reassembly.rows import FinalizedRollout, register_canonical_partition
from rollout_reassembler.reassembly.sweep import SweepReport, sweep_staging
from rollout_reassembler.reassembly.verify import LinearizedRow, verify_and_linearize
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.schema import register_staging_partition
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.staging.source import StagingSource

if TYPE_CHECKING:
    from rollout_reassembler.actors.pool import ReassemblerPool
    from rollout_reassembler.actors.rollout_reassembler_actor import (
        RolloutReassemblerActor,
        create_rollout_reassembler_actors,
    )
    from rollout_reassembler.data_plane.transfer_queue.cluster import attach_ray
    from rollout_reassembler.trainer.batch import TrainBatch
    from rollout_reassembler.trainer.deferred_routes import RouteReport, execute_route_plans
    from rollout_reassembler.trainer.rows import Votes, iter_batches, read_votes

__version__ = "0.1.0"

__all__ = [
    "BadArchive",
    "BoundExceeded",
    "CallClosed",
    "CallInfo",
    "CallRecord",
    "CallRecorder",
    "CaptureAdmission",
    "CaptureCounts",
    "CaptureLedger",
    "CheckpointDamaged",
    "Checkpointable",
    "ClaimQueue",
    "CommitCoords",
    "ContractError",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "DataPlaneTimeout",
    "DataPlaneUnauthenticated",
    "DataPlaneUnavailable",
    "FailedGroup",
    "FieldSpec",
    "FinalizedGroup",
    "FinalizedRollout",
    "GroupConflict",
    "GroupRecords",
    "InvalidLedger",
    "InvalidReceipt",
    "InvalidRoutePlan",
    "InvalidRoutes",
    "InvalidStagedCall",
    "KVBatchMeta",
    "LedgerConflict",
    "LedgerView",
    "LinearizedRow",
    "MissingExtra",
    "ModelShape",
    "OpenCall",
    "PartitionNotRegistered",
    "PlaneLost",
    "PoolClosed",
    "ReassemblerError",
    "ReassemblerPool",
    "ReassemblyRequest",
    "ReceiptBounds",
    "RequestCrashedActor",
    "RequestDeadlineExceeded",
    "RequestError",
    "RolloutReassembler",
    "RolloutReassemblerActor",
    "RolloutReassemblerActorConfig",
    "RolloutReceipt",
    "RouteFailure",
    "RoutePlan",
    "RouteReport",
    "RowStore",
    "RowsCondemned",
    "RowsMissing",
    "RpcPayloadError",
    "SampleBatch",
    "SchemaViolation",
    "StageResult",
    "StagedCall",
    "StagedRowsMissing",
    "StagingSink",
    "StagingSource",
    "SweepReport",
    "TrainBatch",
    "UnreadableConversation",
    "VerificationError",
    "Votes",
    "WriteFenced",
    "assert_metadata_only",
    "attach_ray",
    "build_data_plane_client",
    "create_rollout_reassembler_actors",
    "decode_routed_experts",
    "encode_routed_experts",
    "execute_route_plans",
    "iter_batches",
    "parse_receipt",
    "place_of",
    "read_votes",
    "register_canonical_partition",
    "register_staging_partition",
    "route_extras",
    "seal_call",
    "sweep_staging",
    "verify_and_linearize",
]

_LAZY = {
    "ReassemblerPool": ("actors.pool", "ray"),
    "RolloutReassemblerActor": ("actors.rollout_reassembler_actor", "ray"),
    "RouteReport": ("trainer.deferred_routes", "trainer"),
    "TrainBatch": ("trainer.batch", "trainer"),
    "Votes": ("trainer.rows", "trainer"),
    "attach_ray": ("data_plane.transfer_queue.cluster", "ray"),
    "create_rollout_reassembler_actors": ("actors.rollout_reassembler_actor", "ray"),
    "execute_route_plans": ("trainer.deferred_routes", "trainer"),
    "iter_batches": ("trainer.rows", "trainer"),
    "read_votes": ("trainer.rows", "trainer"),
}
"""Names that need Ray or torch: the module where they live, and the extra that brings what it needs."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _LAZY[name]
    with feature(f"{__name__}.{name}", extra=extra):
        return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
