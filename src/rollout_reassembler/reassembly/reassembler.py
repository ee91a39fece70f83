"""A prompt group, start to end: N receipts come in, exactly N rows are published, staging is cleared.

The steps, what a crash just after each one leaves, and who repairs it:

    1 admit     receipts parsed and checked          nothing yet
    2 fetch     one read of all staged calls         nothing; the same request starts over
    3 prove     rows against receipts, in memory     nothing; the same request starts over
    4 reserve   N rows numbered; on record?          N keys without values; the same request has the same
                if it is: answer from it, go to 8    numbers
    5 store     values under the numbers             values that nobody can read; the same request stores
                                                     the same ones
    6 record    the answer and the numbers           all there, nothing readable; the same request announces
    7 announce  the rows, to readers                 rows and record; staged rows are left over: the same
                                                     request, or `sweep`, clears them
    8 clear     the group's own staged rows          clean

Steps 4 to 7 are those of `publication.py`. Staging is cleared only behind a record, so a request that finds
rows missing finds the record of whoever cleared them: good rows are never replaced by placeholders. Rows that
are missing without a record, and that went with another plane, are `PlaneLost` (`lost.py`). Where the caller
gave them up (`accept_lost`) the record says so, and the same request takes its place once all rows are staged
again. Two finalizers of one request at a time write the same bytes in every step. A request that
differs from the recorded one is a `GroupConflict`.

A group of which not one rollout could be read, since all its receipts are none at all or all its rewards are
missing, is published as placeholders and clears nothing (`cleanup_pending` names its rollouts): what was
staged is not the worse for it, and another request under the same id takes its place.

Bad *data* (a `ContractError`) costs its own rollout, which becomes a placeholder; the answer holds its code, the
log the detail. Everything else
is raised with the group's name in it, and has cleared nothing: the caller may try again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, Self

from rollout_reassembler.contract.bounds import DEFAULT_BOUNDS, ReceiptBounds
from rollout_reassembler.contract.errors import (
    DataPlaneError,
    RequestError,
)
from rollout_reassembler.contract.messages import (
    FinalizedGroup,
    KVBatchMeta,
    ReassemblyRequest,
    RolloutReassemblerActorConfig,
)
from rollout_reassembler.contract.records import RolloutReceipt
from rollout_reassembler.contract.requests import plain_request, plain_reward, plain_rollout_id
from rollout_reassembler.contract.settings import DEFERRED_BRANCHES, Branches, RouteMode
from rollout_reassembler.contract.text import one_line
from rollout_reassembler.data_plane.base import RowStore
from rollout_reassembler.reassembly.admission import (
    Rejection,
    admit,
    fingerprint_of,
    reads_nothing,
)
from rollout_reassembler.reassembly.call_infos import call_tags, with_call_infos
from rollout_reassembler.reassembly.cleanup import clear_group
from rollout_reassembler.reassembly.collector import Collected, LostRollouts
from rollout_reassembler.reassembly.group_record import GroupRecords
from rollout_reassembler.reassembly.lost import lacks_rows, refuse_lost_rows
from rollout_reassembler.reassembly.metrics import group_metrics
from rollout_reassembler.reassembly.phases import Phases
from rollout_reassembler.reassembly.proofs import RolloutProver, is_unaccounted, whole_or_rejected
from rollout_reassembler.reassembly.publication import CanonicalRows, Offer, Publisher
from rollout_reassembler.reassembly.routed_rows import (
    PlanTag,
    assemble_group_routes,
    route_metrics,
    route_plan_tags,
    shape_seen,
)
from rollout_reassembler.reassembly.routes import LayersAndTopK
from rollout_reassembler.reassembly.rows import (
    FinalizedRollout,
    by_row,
    canonical_columns,
    canonical_schema,
    sample_ids_of,
    segment_tags,
)
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.source import StagingSource

logger = logging.getLogger(__name__)

TRAIN_TASK = "train"
"""The consumer that claims canonical rows, as it is called in the system that ours stands in for."""

_UNREAD = frozenset({"missing_staging_row", "invalid_staging_row", "staging_key_mismatch"})


class RolloutReassembler:
    """Finalizes rollouts and groups over one data-plane connection.

        reassembler = RolloutReassembler(
            client, partition_id="train", staging_partition="staging", pad_token_id=0, max_seq_len=32768
        )
        group = reassembler.finalize_group(
            "g7", rollout_ids, receipts, rewards, mask_sample=None, fallback_weight_version=3, prompt_idx=7
        )

    Both partitions must be registered (`register_canonical_partition`, `register_staging_partition`).
    `bounds` says how large a receipt may be; with `branches="all"` a rollout has a row for each chain of its
    conversation (`branches.py`), by default one for the chain that its reward was given for. Raises `ValueError` for a
    setting that cannot be, naming it.
    """

    def __init__(
        self,
        dp_client: RowStore,
        *,
        partition_id: str,
        staging_partition: str,
        pad_token_id: int,
        max_seq_len: int | None,
        router_replay_enabled: bool = False,
        defer_routed_experts_to_policy: bool = False,
        bounds: ReceiptBounds = DEFAULT_BOUNDS,
        model_shape: LayersAndTopK | None = None,
        branches: Branches = "terminal",
    ) -> None:
        self._config = RolloutReassemblerActorConfig(
            partition_id=partition_id,
            staging_partition=staging_partition,
            pad_token_id=pad_token_id,
            router_replay_enabled=router_replay_enabled,
            defer_routed_experts_to_policy=defer_routed_experts_to_policy,
            max_seq_len=max_seq_len,
            model_shape=None if model_shape is None else (int(model_shape[0]), int(model_shape[1])),
            bounds=bounds,
            branches=branches,
        )
        self._routes = self._config.route_mode
        self._client = dp_client
        self._seen_shape: LayersAndTopK | None = None
        self._source = StagingSource(dp_client, staging_partition=staging_partition)
        self._records = GroupRecords(dp_client, partition_id=partition_id)
        with_routes = self._routes is not RouteMode.OFF
        self._prover = RolloutProver(staging_partition, self._config.max_seq_len, with_routes)
        self._lost = LostRollouts(dp_client, staging_partition=staging_partition)
        self._publisher = Publisher(dp_client, self._records, partition_id=partition_id)

    @classmethod
    def from_config(cls, dp_client: RowStore, config: RolloutReassemblerActorConfig) -> Self:
        """One that is set as an actor with this config is."""
        return cls(dp_client, **config.settings())

    def finalize_rollout(self, rollout_id: str, receipt: Any, *, reward: float | None) -> FinalizedRollout:
        """Prove one rollout. Publishes and clears nothing.

        Rows that are gone because the rollout's group was finalized before are `missing_staging_row` here: what
        became of the rollout then is in that group's `rejections`. Raises `RequestError` for a reward or an id of
        another type, `DataPlaneError` when the plane fails.
        """
        rollout_id = plain_rollout_id(rollout_id)
        admitted = admit(rollout_id, receipt, self._config.bounds)
        rows = self._prove_group([rollout_id], [admitted], [plain_reward(reward)], "terminal", Phases())
        ((rollout,),) = self._with_routes(with_call_infos(self._source, rows))
        if rollout.missing_keys and isinstance(admitted, RolloutReceipt):
            return _maybe_cleared(rollout, len(admitted.manifest))
        return rollout

    def finalize(self, request: ReassemblyRequest) -> FinalizedGroup:
        """`finalize_group` for a request in one piece."""
        request = plain_request(request)
        with _Naming(request.group_id):
            return self._finalize(request)

    def finalize_group(
        self,
        group_id: str,
        rollout_ids: Sequence[str],
        receipts: Sequence[Any],
        rewards: Sequence[float | None],
        *,
        mask_sample: Sequence[bool] | bool | None,
        fallback_weight_version: int,
        prompt_idx: int,
        loss_multiplier: float = 1.0,
        canonical_sample_ids: Sequence[str] | None = None,
        truncated: Sequence[bool] | None = None,
        staged_on: str | None = None,
        accept_lost: bool = False,
        branches: Branches | None = None,
    ) -> FinalizedGroup:
        """Publish the group's rows, one a rollout or one a chain (`branches`), and clear its staged calls.

        `staged_on` is the plane's `epoch()` from before the group's first rollout, so that rows which went with a
        plane are not taken for rows that never were; `accept_lost` makes placeholders of those knowingly.

        Numpy and torch values are taken as the numbers they are (`contract/requests.py`).

        Raises `RequestError` for a part that is missing, too short or of another type, `GroupConflict` when another
        request was finalized under this id, `PlaneLost` when staged rows went with their plane,
        `DataPlaneError` when the plane fails before the answer
        is on record; after that the answer is given, with `cleanup_pending` where clearing failed.
        """
        return self.finalize(
            ReassemblyRequest(
                group_id=group_id,
                rollout_ids=rollout_ids,  # type: ignore[arg-type]  # `plain_request` makes tuples of them
                canonical_sample_ids=canonical_sample_ids,  # type: ignore[arg-type]
                receipts=receipts,  # type: ignore[arg-type]
                rewards=rewards,  # type: ignore[arg-type]
                fallback_weight_version=fallback_weight_version,
                prompt_idx=prompt_idx,
                mask_sample=mask_sample,  # type: ignore[arg-type]
                loss_multiplier=loss_multiplier,
                truncated=truncated,  # type: ignore[arg-type]
                staged_on=staged_on,
                accept_lost=accept_lost,
                branches=branches,
            )
        )

    def _finalize(self, request: ReassemblyRequest) -> FinalizedGroup:
        phases = Phases()
        branches = request.branches or self._config.branches
        if branches == "all" and self._routes is RouteMode.DEFERRED:
            raise RequestError(f"group {request.group_id!r:.200}: {DEFERRED_BRANCHES}")
        with phases("admit"):
            admitted = [
                admit(rollout_id, receipt, self._config.bounds)
                for rollout_id, receipt in zip(request.rollout_ids, request.receipts, strict=True)
            ]
            fingerprint = fingerprint_of(request, admitted, self._settings(branches))
        by_rollout = self._prove_group(request.rollout_ids, admitted, request.rewards, branches, phases)
        with phases("fetch"):
            by_rollout = with_call_infos(self._source, by_rollout)
        if self._routes is RouteMode.DIRECT:
            with phases("routes"):
                by_rollout = self._with_routes(by_rollout)
        rollouts = [rows[0] for rows in by_rollout]
        lacks = lacks_rows(rollouts)
        if lacks and not request.accept_lost:
            with phases("record"):
                is_known = self._records.lookup(request.group_id) is not None
            if not is_known:
                refuse_lost_rows(self._client, self._config.staging_partition, rollouts, admitted, request.staged_on)
        is_unread = reads_nothing(admitted, rollouts)
        offer = Offer(
            request,
            fingerprint,
            branches,
            sample_ids_of(request.canonical_sample_ids or (), by_rollout, branches),
            rows=lambda: self._canonical_rows(offer, admitted, by_rollout, phases),
            lacks_rows=lacks,
            is_unread=is_unread,
        )
        answer = self._publisher.publish(offer, phases)
        if is_unread:
            pending = tuple(f"{rollout_id}/*" for rollout_id in request.rollout_ids)
        else:
            with phases("clear"):
                pending = clear_group(self._client, self._config.staging_partition, self._lost, answer)
        return dataclasses.replace(answer, cleanup_pending=pending, timings=phases.timings())

    def collect_lost(self) -> Collected:
        """Clear the staged rows of rejected rollouts, those of all groups and processes so far, in one look.

        Takes time in proportion to the staging partition, so not after each group. Raises `DataPlaneError`; what is
        left is collected the next time.
        """
        return self._lost.collect()

    def _with_routes(self, by_rollout: list[list[FinalizedRollout]]) -> list[list[FinalizedRollout]]:
        """The rows of each rollout with their routes, in direct mode; where those of one fail the rollout is rejected.

        The shape that rows agree on counts for later groups.
        """
        if self._routes is not RouteMode.DIRECT:
            return by_rollout
        shapes: dict[str, Any] = {"model_shape": self._config.model_shape, "seen_shape": self._seen_shape}
        routed = assemble_group_routes(self._source, list(chain.from_iterable(by_rollout)), **shapes)
        self._seen_shape = shape_seen(routed) or self._seen_shape
        rest = iter(routed)
        grouped = [list(islice(rest, len(rows))) for rows in by_rollout]
        return [whole_or_rejected(rows, before[0]) for rows, before in zip(grouped, by_rollout, strict=True)]

    def _settings(self, branches: Branches) -> dict[str, Any]:
        """What else decides the rows, under the names of the config: part of a request's fingerprint."""
        config = self._config
        return {
            "pad_token_id": config.pad_token_id,
            "max_seq_len": config.max_seq_len,
            "router_replay_enabled": config.router_replay_enabled,
            "defer_routed_experts_to_policy": config.defer_routed_experts_to_policy,
            "model_shape": config.model_shape,
            "branches": branches,
        }

    def _prove_group(
        self,
        rollout_ids: Sequence[str],
        admitted: Sequence[RolloutReceipt | Rejection],
        rewards: Sequence[Any],
        branches: Branches,
        phases: Phases,
    ) -> list[list[FinalizedRollout]]:
        """Each rollout's rows, or its rejection.

        A row that is missing, garbled or another's may be the plane's passing fault (a place that
        was reused between two steps of the read), so those rows are read once more.
        """
        with phases("fetch"):
            values = self._read(admitted)
        with phases("verify"):
            entries = zip(rollout_ids, admitted, rewards, strict=True)
            rollouts = [self._prover.prove(*entry, values, branches) for entry in entries]
        unread = [
            index
            for index, rows in enumerate(rollouts)
            if rows[0].rejection_reason in _UNREAD or rows[0].dropped.keys() & _UNREAD
        ]
        if unread:
            with phases("fetch"):
                values = self._read([admitted[index] for index in unread])
            with phases("verify"):
                for index in unread:
                    entry = rollout_ids[index], admitted[index], rewards[index]
                    rollouts[index] = self._prover.prove(*entry, values, branches)
        return rollouts

    def _read(self, admitted: Sequence[RolloutReceipt | Rejection]) -> dict[str, bytes]:
        """The staged values that the admitted receipts name, in one read."""
        receipts = [receipt for receipt in admitted if isinstance(receipt, RolloutReceipt)]
        values, _ = self._source.read_values([place_of(record) for r in receipts for record in r.manifest])
        return values

    def _answer(
        self,
        offer: Offer,
        admitted: Sequence[RolloutReceipt | Rejection],
        by_rollout: Sequence[Sequence[FinalizedRollout]],
        plan_tags: Sequence[PlanTag],
    ) -> FinalizedGroup:
        request, rows = offer.request, list(chain.from_iterable(by_rollout))
        valid = [row for row in rows if row.valid]
        fallback = request.fallback_weight_version
        weight_version = min((r.min_wv for r in valid if r.min_wv is not None), default=fallback)
        meta = KVBatchMeta(
            partition_id=self._config.partition_id,
            task_name=TRAIN_TASK,
            sample_ids=list(offer.sample_ids),
            fields=list(canonical_schema(with_routes=self._routes is RouteMode.DIRECT)),
            sequence_lengths=[len(r.token_ids) if r.valid else 1 for r in rows],
            tags=[{"weight_version": weight_version, "prompt_idx": request.prompt_idx, "group_id": request.group_id}]
            * len(rows),
        )
        return FinalizedGroup(
            meta=meta,
            group_min_wv=weight_version,
            group_max_wv=max((r.max_wv for r in valid if r.max_wv is not None), default=fallback),
            staging_keys=tuple(key for row in rows for key in self._done_with(row)),
            canonical_output_tokens=sum(r.generated_tokens for r in valid),
            metrics={**group_metrics(by_rollout, admitted), **route_metrics(rows, plan_tags)},
            valid_row_count=len(valid),
            total_row_count=len(rows),
            rejections={r.rollout_id: r.rejection_reason for r in rows if r.rejection_reason},
            to_collect=() if offer.is_unread else tuple(sorted(r.rollout_id for r in rows if is_unaccounted(r))),
            rows_by_rollout=tuple(map(len, by_rollout)),
        )

    def _canonical_rows(
        self,
        offer: Offer,
        admitted: Sequence[RolloutReceipt | Rejection],
        by_rollout: Sequence[Sequence[FinalizedRollout]],
        phases: Phases,
    ) -> CanonicalRows:
        """The group as it is published; what was rejected is told to people."""
        request, rows = offer.request, list(chain.from_iterable(by_rollout))
        with phases("assemble"):
            plan_tags = route_plan_tags(rows) if self._routes is RouteMode.DEFERRED else [{} for _ in rows]
            answer = self._answer(offer, admitted, by_rollout, plan_tags)
            columns = canonical_columns(
                rows,
                pad_token_id=self._config.pad_token_id,
                loss_multiplier=request.loss_multiplier,
                mask_sample=by_row(request.mask_sample, by_rollout),  # type: ignore[arg-type]  # plain: a tuple
                truncated=by_row(request.truncated or (None,) * len(by_rollout), by_rollout),
                max_seq_len=self._config.max_seq_len,
                with_routes=self._routes is RouteMode.DIRECT,
            )
            entries = zip(answer.meta.tags or [], rows, plan_tags, strict=True)
            tags = [
                {**tag, **segment_tags(row, offer.branches), **call_tags(row), **extra} for tag, row, extra in entries
            ]
        _log_rejections(request.group_id, rows)
        return CanonicalRows(answer, columns, tags)

    def _done_with(self, rollout: FinalizedRollout) -> tuple[str, ...]:
        """The rollout's proven staged rows that nobody needs once the group is on record.

        In deferred mode the trainer still reads routes from them, and clears them afterwards.
        """
        plan = rollout.route_plan
        is_read_later = self._routes is RouteMode.DEFERRED and plan is not None and plan.fragment_keys
        return () if is_read_later else rollout.staging_keys


class _Naming:
    """Makes whatever stops a group's finalization name that group."""

    def __init__(self, group_id: str) -> None:
        self._group_id = group_id

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DataPlaneError):
            raise error.for_group(self._group_id) from error
        if error is not None:
            error.add_note(f"while group {self._group_id!r} was finalized")


def _maybe_cleared(rollout: FinalizedRollout, calls: int) -> FinalizedRollout:
    """Finalizing a group clears all rows of its rollouts, so where all are missing that may be why."""
    if len(rollout.missing_keys) < calls:
        return rollout
    hint = "; a group that was finalized has cleared them, and its answer's rejections say what became of the rollout"
    return dataclasses.replace(rollout, rejection_detail=rollout.rejection_detail + hint)


def _log_rejections(group_id: str, rollouts: Sequence[FinalizedRollout]) -> None:
    """The answer holds a code a rollout; what exactly was wrong is for people."""
    for rollout in rollouts:
        if not rollout.valid:
            said = (group_id, rollout.rollout_id, str(rollout.rejection_reason), rollout.rejection_detail)
            logger.warning("%s: rollout %s rejected: %s: %s", *map(one_line, said))
