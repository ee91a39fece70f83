"""A prompt group, start to end: N receipts come in, exactly N rows are published, staging is cleared.

The steps, what a crash just after each one leaves, and who mends it:

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
from typing import Any

from rollout_reassembler.contract.bounds import DEFAULT_BOUNDS, ReceiptBounds
from rollout_reassembler.contract.errors import (
    DataPlaneError,
    InvalidRoutePlan,
    InvalidStagedCall,
    VerificationError,
)
from rollout_reassembler.contract.messages import FinalizedGroup, KVBatchMeta, ReassemblyRequest
from rollout_reassembler.contract.records import RolloutReceipt
from rollout_reassembler.contract.requests import plain_request, plain_reward, plain_rollout_id, publishable_reward
from rollout_reassembler.contract.settings import checked_settings
from rollout_reassembler.contract.text import one_line
from rollout_reassembler.data_plane.base import RowStore
from rollout_reassembler.reassembly.admission import (
    Rejection,
    admit,
    fingerprint_of,
    reads_nothing,
)
from rollout_reassembler.reassembly.cleanup import clear_group
from rollout_reassembler.reassembly.collector import Collected, LostRollouts
from rollout_reassembler.reassembly.group_record import GroupRecords
from rollout_reassembler.reassembly.lost import lacks_rows, refuse_lost_rows
from rollout_reassembler.reassembly.metrics import group_metrics
from rollout_reassembler.reassembly.phases import Phases
from rollout_reassembler.reassembly.publication import CanonicalRows, Offer, Publisher
from rollout_reassembler.reassembly.route_plan import RoutePlan, plan_routes
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
    canonical_columns,
    canonical_schema,
    rejected,
)
from rollout_reassembler.reassembly.spans import encode_spans
from rollout_reassembler.reassembly.verify import LinearizedRow, prove_rollout
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
    `bounds` says how large a receipt may be. Raises `ValueError` for a setting that cannot be, naming it.
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
    ) -> None:
        settings = checked_settings(
            partition_id=partition_id,
            staging_partition=staging_partition,
            pad_token_id=pad_token_id,
            max_seq_len=max_seq_len,
            router_replay_enabled=router_replay_enabled,
            defer_routed_experts_to_policy=defer_routed_experts_to_policy,
            bounds=bounds,
        )
        self._client = dp_client
        self._partition_id = partition_id
        self._staging_partition = staging_partition
        self._pad_token_id: int = settings["pad_token_id"]
        self._max_seq_len: int | None = settings["max_seq_len"]
        self._direct_routes = router_replay_enabled and not defer_routed_experts_to_policy
        self._deferred_routes = defer_routed_experts_to_policy
        self._bounds = bounds
        self._model_shape = None if model_shape is None else (int(model_shape[0]), int(model_shape[1]))
        self._seen_shape: LayersAndTopK | None = None
        self._source = StagingSource(dp_client, staging_partition=staging_partition)
        self._records = GroupRecords(dp_client, partition_id=partition_id)
        self._lost = LostRollouts(dp_client, staging_partition=staging_partition)
        self._publisher = Publisher(dp_client, self._records, partition_id=partition_id)

    def finalize_rollout(self, rollout_id: str, receipt: Any, *, reward: float | None) -> FinalizedRollout:
        """Prove one rollout. Publishes and clears nothing.

        Rows that are gone because the rollout's group was finalized before are `missing_staging_row` here: what
        became of the rollout then is in that group's `rejections`. Raises `RequestError` for a reward or an id of
        another type, `DataPlaneError` when the plane fails.
        """
        rollout_id = plain_rollout_id(rollout_id)
        admitted = admit(rollout_id, receipt, self._bounds)
        worth = plain_reward(reward)
        rollouts = self._prove_group([rollout_id], [admitted], [worth], Phases())
        rollout = self._with_routes(rollouts)[0]
        if rollout.missing_keys and isinstance(admitted, RolloutReceipt):
            return _maybe_cleared(rollout, len(admitted.manifest))
        return rollout

    def finalize(self, request: ReassemblyRequest) -> FinalizedGroup:
        """`finalize_group` for a request in one piece."""
        return self.finalize_group(
            request.group_id,
            request.rollout_ids,
            request.receipts,
            request.rewards,
            mask_sample=request.mask_sample,
            fallback_weight_version=request.fallback_weight_version,
            prompt_idx=request.prompt_idx,
            loss_multiplier=request.loss_multiplier,
            canonical_sample_ids=request.canonical_sample_ids,
            truncated=request.truncated,
            staged_on=request.staged_on,
            accept_lost=request.accept_lost,
        )

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
    ) -> FinalizedGroup:
        """Publish the group's N rows and clear its staged calls.

        `staged_on` is the plane's `epoch()` from before the group's first rollout, so that rows which went with a
        plane are not taken for rows that never were; `accept_lost` makes placeholders of those knowingly.

        Numpy and torch values are taken as the numbers they are (`contract/requests.py`).

        Raises `RequestError` for a part that is missing, too short or of another type, `GroupConflict` when another
        request was finalized under this id, `PlaneLost` when staged rows went with their plane,
        `DataPlaneError` when the plane fails before the answer
        is on record; after that the answer is given, with `cleanup_pending` where clearing failed.
        """
        request = plain_request(
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
            )
        )
        with _Naming(request.group_id):
            return self._finalize(request)

    def _finalize(self, request: ReassemblyRequest) -> FinalizedGroup:
        phases = Phases()
        with phases("admit"):
            admitted = [
                admit(rollout_id, receipt, self._bounds)
                for rollout_id, receipt in zip(request.rollout_ids, request.receipts, strict=True)
            ]
            fingerprint = fingerprint_of(request, admitted, self._settings())
        rollouts = self._prove_group(request.rollout_ids, admitted, request.rewards, phases)
        if self._direct_routes:
            with phases("routes"):
                rollouts = self._with_routes(rollouts)
        lacks = lacks_rows(rollouts)
        if lacks and not request.accept_lost:
            with phases("record"):
                is_known = self._records.lookup(request.group_id) is not None
            if not is_known:
                refuse_lost_rows(self._client, self._staging_partition, rollouts, admitted, request.staged_on)
        is_unread = reads_nothing(admitted, rollouts)
        offer = Offer(
            request,
            fingerprint,
            rows=lambda: self._canonical_rows(request, admitted, rollouts, phases),
            lacks_rows=lacks,
            is_unread=is_unread,
        )
        answer = self._publisher.publish(offer, phases)
        if is_unread:
            pending = tuple(f"{rollout_id}/*" for rollout_id in request.rollout_ids)
            answer = dataclasses.replace(answer, cleanup_pending=pending)
        else:
            with phases("clear"):
                answer = clear_group(self._client, self._staging_partition, self._lost, answer)
        return dataclasses.replace(answer, timings=phases.timings())

    def collect_lost(self) -> Collected:
        """Clear the staged rows of rejected rollouts, those of all groups and processes so far, in one look.

        Takes time in proportion to the staging partition, so not after each group. Raises `DataPlaneError`; what is
        left is collected the next time.
        """
        return self._lost.collect()

    def _with_routes(self, rollouts: list[FinalizedRollout]) -> list[FinalizedRollout]:
        """The rollouts with their routes, in direct mode. The shape that rows agree on counts for later groups."""
        if not self._direct_routes:
            return rollouts
        shapes: dict[str, Any] = {"model_shape": self._model_shape, "seen_shape": self._seen_shape}
        routed = assemble_group_routes(self._source, rollouts, **shapes)
        self._seen_shape = shape_seen(routed) or self._seen_shape
        return routed

    def _settings(self) -> dict[str, Any]:
        """What else decides the rows, under the names of the config: part of a request's fingerprint."""
        return {
            "pad_token_id": self._pad_token_id,
            "max_seq_len": self._max_seq_len,
            "router_replay_enabled": self._direct_routes or self._deferred_routes,
            "defer_routed_experts_to_policy": self._deferred_routes,
            "model_shape": self._model_shape,
        }

    def _prove_group(
        self,
        rollout_ids: Sequence[str],
        admitted: Sequence[RolloutReceipt | Rejection],
        rewards: Sequence[Any],
        phases: Phases,
    ) -> list[FinalizedRollout]:
        """Each rollout's proof or rejection.

        A row that is missing, garbled or another's may be the plane's passing fault (a place that
        was reused between two steps of the read), so those rows are read once more.
        """
        with phases("fetch"):
            values = self._read(admitted)
        with phases("verify"):
            rollouts = [self._prove(*entry, values) for entry in zip(rollout_ids, admitted, rewards, strict=True)]
        unread = [index for index, rollout in enumerate(rollouts) if rollout.rejection_reason in _UNREAD]
        if unread:
            with phases("fetch"):
                values = self._read([admitted[index] for index in unread])
            with phases("verify"):
                for index in unread:
                    rollouts[index] = self._prove(rollout_ids[index], admitted[index], rewards[index], values)
        return rollouts

    def _read(self, admitted: Sequence[RolloutReceipt | Rejection]) -> dict[str, bytes]:
        """The staged values that the admitted receipts name, in one read."""
        receipts = [receipt for receipt in admitted if isinstance(receipt, RolloutReceipt)]
        values, _ = self._source.read_values([place_of(record) for r in receipts for record in r.manifest])
        return values

    def _prove(
        self, rollout_id: str, receipt: RolloutReceipt | Rejection, reward: Any, values: dict[str, bytes]
    ) -> FinalizedRollout:
        """One rollout, from its staged values to its row or its rejection."""
        worth = publishable_reward(reward)
        if isinstance(receipt, Rejection):
            return rejected(rollout_id, receipt.reason, receipt.detail, reward=worth or 0.0)
        keys = tuple(map(place_of, receipt.manifest))
        missing = [key for key in keys if key not in values]
        if missing:
            detail = f"{len(missing)} of {len(keys)} staged rows are missing, first {missing[0]!r}"
            return rejected(rollout_id, "missing_staging_row", detail, reward=worth or 0.0, missing_keys=tuple(missing))
        try:
            row = prove_rollout(receipt, [values[key] for key in keys])
        except InvalidStagedCall as error:
            return rejected(rollout_id, error.code, error.detail, reward=worth or 0.0)
        except VerificationError as error:
            return rejected(rollout_id, f"rebuild_failed:{error.code}", error.detail, reward=worth or 0.0)
        if worth is None:
            detail = f"expected a reward that binary32 can hold, got {reward}"
            return rejected(rollout_id, "invalid_reward", detail, staging_keys=keys)
        length = len(row.token_ids)
        if self._max_seq_len is not None and length > self._max_seq_len:
            detail = f"{length} tokens, more than max_seq_len={self._max_seq_len}"
            return rejected(rollout_id, "exceeds_max_seq_len", detail, reward=worth, staging_keys=keys)
        plan = None
        if self._direct_routes or self._deferred_routes:
            try:
                plan = plan_routes(row, staging_partition=self._staging_partition, cleanup_keys=keys)
            except InvalidRoutePlan as error:
                return rejected(rollout_id, error.code, error.detail, reward=worth, staging_keys=keys)
        return _proven(row, worth, keys, plan)

    def _answer(
        self,
        request: ReassemblyRequest,
        admitted: Sequence[RolloutReceipt | Rejection],
        rollouts: Sequence[FinalizedRollout],
        plan_tags: Sequence[PlanTag],
    ) -> FinalizedGroup:
        valid = [rollout for rollout in rollouts if rollout.valid]
        fallback = request.fallback_weight_version
        weight_version = min((r.min_wv for r in valid if r.min_wv is not None), default=fallback)
        meta = KVBatchMeta(
            partition_id=self._partition_id,
            task_name=TRAIN_TASK,
            sample_ids=list(request.canonical_sample_ids or ()),
            fields=list(canonical_schema(with_routes=self._direct_routes)),
            sequence_lengths=[len(r.token_ids) if r.valid else 1 for r in rollouts],
            tags=[{"weight_version": weight_version, "prompt_idx": request.prompt_idx, "group_id": request.group_id}]
            * len(rollouts),
        )
        return FinalizedGroup(
            meta=meta,
            group_min_wv=weight_version,
            group_max_wv=max((r.max_wv for r in valid if r.max_wv is not None), default=fallback),
            staging_keys=tuple(key for rollout in rollouts for key in self._done_with(rollout)),
            canonical_output_tokens=sum(r.generated_tokens for r in valid),
            metrics={**group_metrics(rollouts, admitted), **route_metrics(rollouts, plan_tags)},
            valid_row_count=len(valid),
            total_row_count=len(rollouts),
            rejections={r.rollout_id: r.rejection_reason for r in rollouts if r.rejection_reason},
        )

    def _canonical_rows(
        self,
        request: ReassemblyRequest,
        admitted: Sequence[RolloutReceipt | Rejection],
        rollouts: Sequence[FinalizedRollout],
        phases: Phases,
    ) -> CanonicalRows:
        """The group as it is published; what was rejected is told to people."""
        with phases("assemble"):
            plan_tags = route_plan_tags(rollouts) if self._deferred_routes else [{} for _ in rollouts]
            answer = self._answer(request, admitted, rollouts, plan_tags)
            columns = canonical_columns(
                rollouts,
                pad_token_id=self._pad_token_id,
                loss_multiplier=request.loss_multiplier,
                mask_sample=request.mask_sample,  # type: ignore[arg-type]  # a tuple, of a plain request
                truncated=request.truncated or (None,) * len(rollouts),
                max_seq_len=self._max_seq_len,
                with_routes=self._direct_routes,
            )
            tags = [{**tag, **extra} for tag, extra in zip(answer.meta.tags or [], plan_tags, strict=True)]
        _log_rejections(request.group_id, rollouts)
        return CanonicalRows(answer, columns, tags)

    def _done_with(self, rollout: FinalizedRollout) -> tuple[str, ...]:
        """The rollout's proven staged rows that nobody needs once the group is on record.

        In deferred mode the trainer still reads routes from them, and clears them afterwards.
        """
        plan = rollout.route_plan
        return () if self._deferred_routes and plan is not None and plan.fragment_keys else rollout.staging_keys


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


def _proven(row: LinearizedRow, reward: float, keys: tuple[str, ...], plan: RoutePlan | None) -> FinalizedRollout:
    return FinalizedRollout(
        rollout_id=row.rollout_id,
        valid=True,
        rejection_reason=None,
        token_ids=row.token_ids,
        token_mask=row.token_mask,
        logprobs=row.logprobs,
        prompt_len=row.prompt_len,
        reward=reward,
        staging_keys=keys,
        min_wv=min(row.weight_versions),
        max_wv=max(row.weight_versions),
        calls=len(row.model_call_ids),
        generated_tokens=sum(span.generation_len for span in row.link_spans),
        route_plan=plan,
        spans=encode_spans(row),
    )


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
