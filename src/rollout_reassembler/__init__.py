"""Rollout Reassembler: black-box agent rollouts in, verified training rows out.

    import rollout_reassembler as rr

    client = rr.build_data_plane_client(rr.DataPlaneConfig(impl="memory"))
    rr.register_staging_partition(client, "staging")
    rr.register_canonical_partition(client, "train")
    rr.StagingSink(client, staging_partition="staging").stage(call)
    reassembler = rr.RolloutReassembler(
        client, partition_id="train", staging_partition="staging", pad_token_id=0, max_seq_len=32768
    )
    group = reassembler.finalize_group("g0", rollout_ids, receipts, rewards, ...)

All public names import from here. Those that need Ray or torch load it when they are first used, so
that the rest works without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollout_reassembler.contract.bounds import ReceiptBounds, parse_receipt
from rollout_reassembler.contract.errors import (
    BoundExceeded,
    ContractError,
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    GroupConflict,
    InvalidReceipt,
    InvalidRoutes,
    InvalidStagedCall,
    PartitionNotRegistered,
    ReassemblerError,
    RequestError,
    RowsMissing,
    RpcPayloadError,
    SchemaViolation,
    StagedRowsMissing,
    VerificationError,
)
from rollout_reassembler.contract.messages import (
    FinalizedGroup,
    KVBatchMeta,
    ReassemblyRequest,
    RolloutReassemblerActorConfig,
)
from rollout_reassembler.contract.records import CallRecord, RolloutReceipt, StagedCall, StageResult, seal_call
from rollout_reassembler.contract.routed_experts import decode_routed_experts, encode_routed_experts, route_extras
from rollout_reassembler.contract.rpc_guard import _FORBIDDEN_RPC_KEYS, assert_metadata_only
from rollout_reassembler.data_plane.base import DataPlaneClient, FieldSpec, SampleBatch
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.reassembly.group_record import GroupRecords
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from rollout_reassembler.reassembly.route_plan import RoutePlan
from rollout_reassembler.reassembly.rows import FinalizedRollout, register_canonical_partition
from rollout_reassembler.reassembly.sweep import SweepReport, sweep_staging
from rollout_reassembler.reassembly.verify import LinearizedRow, verify_and_linearize
from rollout_reassembler.staging.schema import register_staging_partition
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.staging.source import StagingSource

if TYPE_CHECKING:
    from rollout_reassembler.actors.pool import (
        PoolClosed,
        ReassemblerPool,
        RequestCrashedActor,
        RequestDeadlineExceeded,
    )
    from rollout_reassembler.actors.rollout_reassembler_actor import (
        RolloutReassemblerActor,
        create_rollout_reassembler_actors,
    )
    from rollout_reassembler.trainer.deferred_routes import RouteReport, execute_route_plans
    from rollout_reassembler.trainer.rows import iter_batches

__version__ = "0.1.0"

__all__ = [
    "_FORBIDDEN_RPC_KEYS",
    "BoundExceeded",
    "CallRecord",
    "ContractError",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "DataPlaneTimeout",
    "DataPlaneUnavailable",
    "FieldSpec",
    "FinalizedGroup",
    "FinalizedRollout",
    "GroupConflict",
    "GroupRecords",
    "InvalidReceipt",
    "InvalidRoutes",
    "InvalidStagedCall",
    "KVBatchMeta",
    "LinearizedRow",
    "PartitionNotRegistered",
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
    "RoutePlan",
    "RouteReport",
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
    "VerificationError",
    "assert_metadata_only",
    "build_data_plane_client",
    "create_rollout_reassembler_actors",
    "decode_routed_experts",
    "encode_routed_experts",
    "execute_route_plans",
    "iter_batches",
    "parse_receipt",
    "register_canonical_partition",
    "register_staging_partition",
    "route_extras",
    "seal_call",
    "sweep_staging",
    "verify_and_linearize",
]

_LAZY = {
    "PoolClosed": "rollout_reassembler.actors.pool",
    "ReassemblerPool": "rollout_reassembler.actors.pool",
    "RequestCrashedActor": "rollout_reassembler.actors.pool",
    "RequestDeadlineExceeded": "rollout_reassembler.actors.pool",
    "RolloutReassemblerActor": "rollout_reassembler.actors.rollout_reassembler_actor",
    "RouteReport": "rollout_reassembler.trainer.deferred_routes",
    "create_rollout_reassembler_actors": "rollout_reassembler.actors.rollout_reassembler_actor",
    "execute_route_plans": "rollout_reassembler.trainer.deferred_routes",
    "iter_batches": "rollout_reassembler.trainer.rows",
}
"""Names that need Ray or torch, and where they live."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
