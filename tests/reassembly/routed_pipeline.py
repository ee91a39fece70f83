"""Groups with routes, all the way: staged, finalized in either mode, read back as a trainer reads them.

    pipeline = Pipeline.on(plane, "deferred")
    pipeline.stage(rollout)
    answer = pipeline.finalize([rollout])
    pipeline.routes(answer)        # one int16 [T, L, K] a row

A `Capture` is a generated group: rollouts of all kinds of turns, and what is wrong with some of them. It
can be put through any number of pipelines, and says itself what each row must be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from rollout_reassembler.contract.digests import encode_extras
from rollout_reassembler.contract.messages import FinalizedGroup, KVBatchMeta
from rollout_reassembler.contract.records import StagedCall
from rollout_reassembler.contract.routed_experts import (
    BOUNDARY_KEY,
    ROUTES_KEY,
    decode_routed_experts,
    encode_routed_experts,
)
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.reassembly.collector import LostRollouts
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from rollout_reassembler.reassembly.route_plan import RouteSpan
from rollout_reassembler.reassembly.rows import register_canonical_partition
from rollout_reassembler.staging.codec import RouteShape, pack_call
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.routes import route_shape
from rollout_reassembler.staging.schema import ROLLOUT_TAG, register_staging_partition
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.trainer.batch import TrainBatch
from rollout_reassembler.trainer.rows import iter_batches
from tests.captures import CANONICAL, PAD, STAGING, MadeRollout, staging_key_of
from tests.route_captures import Turn, expected, extras, truth

Mode = Literal["direct", "deferred"]
MODES: tuple[Mode, ...] = ("direct", "deferred")
MODEL = (2, 2)
"""`(L, K)` of the policy in these tests."""


@dataclass(frozen=True)
class Pipeline:
    """A plane with a staging and a canonical partition, and the mode in which groups go through them."""

    plane: DataPlaneClient
    mode: Mode
    staging: str = STAGING
    canonical: str = CANONICAL

    @classmethod
    def on(cls, plane: DataPlaneClient, mode: Mode, *, prefix: str = "") -> Pipeline:
        """Register both partitions, their names behind `prefix`."""
        pipeline = cls(plane, mode, prefix + STAGING, prefix + CANONICAL)
        register_staging_partition(plane, pipeline.staging)
        register_canonical_partition(plane, pipeline.canonical, with_routes=mode == "direct")
        return pipeline

    def over(self, plane: DataPlaneClient) -> Pipeline:
        """The same partitions through another client, for instance one that counts."""
        return dataclasses.replace(self, plane=plane)

    def stage(self, *rollouts: MadeRollout, shape: Callable[[StagedCall], RouteShape] = route_shape) -> None:
        sink = StagingSink(self.plane, staging_partition=self.staging, route_shape=shape)
        results = sink.stage_all([call for rollout in rollouts for call in rollout.calls])
        assert all(result.ok for result in results), results

    def reassembler(self) -> RolloutReassembler:
        return RolloutReassembler(
            self.plane,
            partition_id=self.canonical,
            staging_partition=self.staging,
            pad_token_id=PAD,
            max_seq_len=None,
            router_replay_enabled=True,
            defer_routed_experts_to_policy=self.mode == "deferred",
        )

    def finalize(
        self,
        rollouts: Sequence[MadeRollout],
        *,
        group_id: str = "g",
        receipts: Sequence[Any] | None = None,
        reassembler: RolloutReassembler | None = None,
    ) -> FinalizedGroup:
        """Finalize these rollouts as one group, by a reassembler of its own unless one is given."""
        return (reassembler or self.reassembler()).finalize_group(
            group_id,
            [rollout.rollout_id for rollout in rollouts],
            receipts if receipts is not None else [rollout.receipt() for rollout in rollouts],
            [1.0] * len(rollouts),
            mask_sample=None,
            fallback_weight_version=0,
            prompt_idx=0,
        )

    def rows(self, answer: FinalizedGroup) -> list[dict[str, Any]]:
        """The published rows, a dict of columns each."""
        return [row for _, row in self.plane.get_samples(answer.meta.sample_ids, self.canonical).rows()]

    def batch(self, answer: FinalizedGroup | KVBatchMeta, **options: Any) -> TrainBatch:
        """The group as one packed batch, its routes held to the model."""
        meta = answer.meta if isinstance(answer, FinalizedGroup) else answer
        settings = {"pad_token_id": PAD, "layout": "packed", "routes": self.mode, "model_shape": MODEL, **options}
        (batch,) = iter_batches(self.plane, meta, batch_size=len(meta.sample_ids), **settings)
        return batch

    def routes(self, answer: FinalizedGroup, **options: Any) -> list[np.ndarray]:
        """The routes of each row, as the trainer has them."""
        return routes_of(self.batch(answer, **options))

    def staged(self) -> set[str]:
        """The staging keys that are there once the rows of rejected rollouts were collected."""
        LostRollouts(self.plane, staging_partition=self.staging).collect()
        return set(map(staging_key_of, self.plane.list_samples(self.staging)))


def finalized(pipeline: Pipeline, *rollouts: MadeRollout, **options: Any) -> FinalizedGroup:
    """Stage these rollouts and finalize them as one group."""
    pipeline.stage(*rollouts)
    return pipeline.finalize(rollouts, **options)


def routes_of(batch: TrainBatch) -> list[np.ndarray]:
    """A packed batch's routes, row by row."""
    assert batch.routed_experts is not None
    return np.split(batch.routed_experts.numpy(), batch.cu_seqlens[1:-1].tolist())


def is_read(call: StagedCall) -> bool:
    """Whether a plan takes rows from what this call staged."""
    generated = int(call.token_mask_delta.sum())
    span = RouteSpan(
        staging_key=place_of(call),
        carry_len=call.delta_len - generated,
        generation_len=generated,
        staged_route_len=route_shape(call).rows,
        extras_digest_version=1,
        extras_digest=call.extras_digest,
    )
    return span.mode != "sentinel"


# --- what can be wrong with one call of a rollout ---------------------------------------------------

Spoiled = tuple[dict[str, Any], RouteShape]
"""Extras that a producer staged, sealed by their digest like sound ones, and the shape that it claimed for them."""


def of_another_shape(staged: dict[str, Any]) -> Spoiled:
    rows = decode_routed_experts(staged[ROUTES_KEY])
    wider = {ROUTES_KEY: encode_routed_experts(np.repeat(rows, 2, axis=1))}
    return wider, RouteShape(len(rows), rows.shape[1] * 2, rows.shape[2])


def of_another_rank(staged: dict[str, Any]) -> Spoiled:
    rows = decode_routed_experts(staged[ROUTES_KEY])
    flat = staged[ROUTES_KEY].replace(
        f"{len(rows)}x{rows.shape[1]}x{rows.shape[2]}", f"{len(rows)}x{rows.shape[1] * rows.shape[2]}"
    )
    return {ROUTES_KEY: flat}, RouteShape(len(rows), *rows.shape[1:])


def beyond_int16(staged: dict[str, Any]) -> Spoiled:
    rows = decode_routed_experts(staged[ROUTES_KEY]).astype(np.int32)
    rows[0, 0, 0] = 1 << 15
    return {ROUTES_KEY: encode_routed_experts(rows, dtype="int32")}, RouteShape(*rows.shape)


def with_two_boundaries(staged: dict[str, Any]) -> Spoiled:
    rows = decode_routed_experts(staged[ROUTES_KEY])
    two = encode_routed_experts(np.repeat(rows[:1], 2, axis=0))
    return {ROUTES_KEY: staged[ROUTES_KEY], BOUNDARY_KEY: two}, RouteShape(*rows.shape, True)


AtCapture = Callable[[dict[str, Any]], Spoiled]
AT_CAPTURE: dict[AtCapture, str] = {
    of_another_shape: "fragment_model_shape",
    of_another_rank: "fragment_rank",
    beyond_int16: "fragment_integrity",
    with_two_boundaries: "fragment_length",
}


def extras_emptied(pipeline: Pipeline, call: StagedCall) -> None:
    """No bytes, though the receipt commits to routes."""
    pipeline.plane.put_samples([place_of(call)], pipeline.staging, {"extras": [b""]})


def extras_never_written(pipeline: Pipeline, call: StagedCall) -> None:
    """A row with its tokens alone, as a put leaves it that died between two columns."""
    packed = pack_call(call, route_shape(call))
    pipeline.plane.clear_samples([place_of(call)], pipeline.staging)
    pipeline.plane.put_samples([place_of(call)], pipeline.staging, {"call": [packed]}, [{ROLLOUT_TAG: call.rollout_id}])


def digest_broken(pipeline: Pipeline, call: StagedCall) -> None:
    """One bit of one value is another."""
    encoded = bytearray(encode_extras(call.extras))
    encoded[-5] ^= 1
    pipeline.plane.put_samples([place_of(call)], pipeline.staging, {"extras": [bytes(encoded)]})


def routes_of_another_call(pipeline: Pipeline, call: StagedCall) -> None:
    """Sound routes, of the same shape, under a digest of their own."""
    rows = np.full((route_shape(call).rows, *MODEL), 7, np.int16)
    encoded = encode_extras({ROUTES_KEY: encode_routed_experts(rows)})
    pipeline.plane.put_samples([place_of(call)], pipeline.staging, {"extras": [encoded]})


def claimed_one_more(pipeline: Pipeline, call: StagedCall) -> None:
    _claim(pipeline, call, +1)


def claimed_one_less(pipeline: Pipeline, call: StagedCall) -> None:
    _claim(pipeline, call, -1)


def _claim(pipeline: Pipeline, call: StagedCall, off: int) -> None:
    """The packed header, which no digest covers, is a row off."""
    shape = route_shape(call)
    packed = pack_call(call, shape._replace(rows=shape.rows + off))
    pipeline.plane.put_samples([place_of(call)], pipeline.staging, {"call": [packed]})


InStaging = Callable[[Pipeline, StagedCall], None]
IN_STAGING: dict[InStaging, str] = {
    extras_emptied: "fragment_integrity",
    extras_never_written: "missing_fragment",
    digest_broken: "fragment_integrity",
    routes_of_another_call: "fragment_integrity",
}
ONE_OFF: tuple[InStaging, ...] = (claimed_one_more, claimed_one_less)
"""Found by `fragment_length`; unless the claim alone makes the fragment one that gives nothing, then it is -1."""


# --- generated groups -------------------------------------------------------------------------------

SOUND = (Turn(2, 2), Turn(1, 3))


@dataclass(frozen=True)
class Planned:
    """One rollout of a capture: its turns, and what is wrong. `spoiled` is the index of the call that is hit."""

    turns: tuple[Turn, ...]
    layers: int = MODEL[0]
    spoil: AtCapture | InStaging | None = None
    spoiled: int = 0
    has_receipt: bool = True

    @property
    def code(self) -> str | None:
        """The failure that it must have, `None` for none."""
        if self.layers != MODEL[0] and any(map(is_read, self.sound("r").calls)):
            return "fragment_model_shape"
        return {**AT_CAPTURE, **IN_STAGING}.get(self.spoil)

    def sound(self, rollout_id: str) -> MadeRollout:
        return self._made(rollout_id)[0]

    def _made(self, rollout_id: str) -> tuple[MadeRollout, dict[str, RouteShape]]:
        """The rollout with its calls named c0, c1, …, and the shapes claimed for spoiled extras."""
        routes = truth(sum(turn.carry + turn.generated for turn in self.turns), layers=self.layers, topk=MODEL[1])
        rollout, parent, claims = MadeRollout(rollout_id), None, {}
        for index, turn in enumerate(self.turns):
            staged = extras(turn, routes, parent.cum_len if parent is not None else 0)
            if self.spoil in AT_CAPTURE and index == self.spoiled:
                staged, claims[f"{rollout_id}/c{index}"] = self.spoil(staged)
            parent = rollout.call(
                range(100, 100 + turn.carry), range(200, 200 + turn.generated), parent=parent, extras=staged
            )
        return rollout, claims

    def stage(self, pipeline: Pipeline, rollout_id: str) -> MadeRollout:
        rollout, claims = self._made(rollout_id)
        pipeline.stage(rollout, shape=lambda call: claims.get(call.staging_key) or route_shape(call))
        if self.spoil is not None and self.spoil not in AT_CAPTURE:
            self.spoil(pipeline, rollout.calls[self.spoiled])
        return rollout


@dataclass(frozen=True)
class Outcome:
    """What became of a capture: its answer, and the routes and failures that the trainer sees."""

    answer: FinalizedGroup
    routes: list[np.ndarray]
    failed_rows: dict[str, str]

    def failure(self, index: int) -> str | None:
        """Why row `index` has no routes of its own: a code of the executor, or the rejection of its rollout."""
        reason = self.answer.rejections.get(f"{self.answer.meta.tags[0]['group_id']}-r{index}")
        if reason is not None:
            return reason.removeprefix("route_assembly:")
        error = self.failed_rows.get(self.answer.meta.sample_ids[index])
        return error.partition(":")[0] if error else None


@dataclass(frozen=True)
class Capture:
    """A group of rollouts."""

    rollouts: tuple[Planned, ...]

    def through(self, pipeline: Pipeline, group_id: str) -> Outcome:
        """Stage, finalize and read it. Rollouts are named `<group_id>-r<index>`."""
        made = [planned.stage(pipeline, f"{group_id}-r{index}") for index, planned in enumerate(self.rollouts)]
        receipts = [
            rollout.receipt() if planned.has_receipt else None
            for planned, rollout in zip(self.rollouts, made, strict=True)
        ]
        answer = pipeline.finalize(made, group_id=group_id, receipts=receipts)
        batch = pipeline.batch(answer)
        assert batch.route_report is not None
        return Outcome(answer, routes_of(batch), batch.route_report.failed_rows)

    def check(self, outcomes: dict[Mode, Outcome]) -> None:
        """Both modes: the same tensor row by row, and the right one; or the same reason, and -1 throughout."""
        direct, deferred = outcomes["direct"], outcomes["deferred"]
        for index, planned in enumerate(self.rollouts):
            failure = direct.failure(index)
            assert failure == deferred.failure(index)
            row, other = direct.routes[index], deferred.routes[index]
            if not planned.has_receipt:
                assert failure == "missing_receipt"
                assert row.shape == other.shape == (1, *MODEL)
            elif planned.spoil in ONE_OFF:
                assert failure in (None, "fragment_length")
            else:
                assert failure == planned.code
            if failure:
                assert len(row) == 1
                assert (row == -1).all()
                assert (other == -1).all()
            else:
                assert np.array_equal(row, other)
                right = expected(planned.turns, layers=planned.layers)
                known = row != -1 if planned.spoil in ONE_OFF else slice(None)
                if row.shape == right.shape:
                    assert np.array_equal(row[known], right[known])
                else:
                    assert (row == -1).all()


def turns() -> st.SearchStrategy[Turn]:
    staged = st.sampled_from(["full", "dummy_last", "tail", "tail_dummy", "one_short", "too_few", "surplus", "none"])
    dtypes = st.sampled_from(["int8", "int16", "int32"])
    return st.builds(Turn, st.integers(1, 4), st.integers(1, 4), staged, st.booleans(), dtypes)


@st.composite
def planned_rollouts(draw: st.DrawFn) -> Planned:
    """A rollout, one of three of them with something wrong that shows."""
    planned = Planned(tuple(draw(st.lists(turns(), min_size=1, max_size=4))))
    readable = [index for index, call in enumerate(planned.sound("r").calls) if is_read(call)]
    kind = draw(st.sampled_from(["sound", "sound", "sound", "spoiled", "spoiled", "lost", "other layers"]))
    if kind == "lost":
        return dataclasses.replace(planned, has_receipt=False)
    if kind == "other layers":
        return dataclasses.replace(planned, layers=3)
    if kind == "spoiled" and readable:
        spoil = draw(st.sampled_from([*AT_CAPTURE, *IN_STAGING, *ONE_OFF]))
        return dataclasses.replace(planned, spoil=spoil, spoiled=draw(st.sampled_from(readable)))
    return planned


@st.composite
def captures(draw: st.DrawFn) -> Capture:
    """Up to three generated rollouts among as many sound ones and one more: so the model's shape is that of most."""
    generated = draw(st.lists(planned_rollouts(), min_size=1, max_size=3))
    return Capture(tuple(draw(st.permutations([*generated, *[Planned(SOUND)] * (len(generated) + 1)]))))
