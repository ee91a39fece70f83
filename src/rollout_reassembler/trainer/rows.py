"""What a trainer receives: canonical rows of a partition as batches of torch tensors.

    for batch in iter_batches(client, group.meta, batch_size=8, pad_token_id=0, layout="packed"):
        batch.input_ids        # int64 [sum T]
        batch.cu_seqlens       # int32 [B + 1]: row i is [cu_seqlens[i], cu_seqlens[i + 1])
        batch.token_mask       # float32 [sum T]: 1 where the policy sampled the token

Rows of several groups come in one iteration when their metas do, `[group.meta for group in groups]`. A batch
holds `batch_size` rows, or as many as fit `max_tokens` (tokens as they lie in memory, padding included), or
both. `loss_weight` is what a token weighs in a loss: "token" 1, "rollout" 1 over the tokens that its rollout
owns, so that a rollout weighs 1 however it was cut into rows; 0 where nothing is trained.

Rows lie jagged in the data plane and are put together here, for one batch at a time: *padded* to
the batch's longest row (`[B, S]`), or *packed* end to end (`[sum T]`). Worked example, pad token 0, rows
[5, 6, 7] and [8]:

    padded   input_ids [[5, 6, 7], [8, 0, 0]]    attention_mask [[1, 1, 1], [1, 0, 0]]
    packed   input_ids [5, 6, 7, 8]              cu_seqlens [0, 3, 4]

The pad token may be a real token too: what is padding is told by `input_lengths` alone. Masks and
log probabilities are padded with 0, routes with -1. A placeholder (a rejected rollout) is a row like any
other, with `sample_mask` 0.

Routes, where asked for, are int16 `[B, S, L, K]` or `[sum T, L, K]`, -1 where missing: read from the
column in `"direct"` mode, by executing the rows' plans in `"deferred"` mode; there staged rows
are released as a batch is made, so that it can be made once. `batch.route_report` says what became of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import numpy as np
import numpy.typing as npt
import torch

from rollout_reassembler.contract import engine_values
from rollout_reassembler.contract.digests import Integers
from rollout_reassembler.contract.errors import ContractError
from rollout_reassembler.contract.messages import KVBatchMeta
from rollout_reassembler.contract.model_shape import ModelShape
from rollout_reassembler.contract.routed_experts import MISSING_ROUTE
from rollout_reassembler.contract.settings import RouteMode
from rollout_reassembler.data_plane.base import RowStore, SampleBatch, Tags
from rollout_reassembler.reassembly.routes import LayersAndTopK, RowRoutes
from rollout_reassembler.reassembly.rows import (
    CANONICAL_SCHEMA,
    ROUTES_FIELD,
    SPANS_FIELD,
)
from rollout_reassembler.reassembly.spans import RowSpans, decode_spans
from rollout_reassembler.trainer.batch import Layout, TrainBatch
from rollout_reassembler.trainer.deferred_routes import OnFailure, RouteReport, execute_route_plans, settle_routes
from rollout_reassembler.trainer.selection import Budget, Place, named_rows, places_of, row_tags_of

LossWeight = Literal["token", "rollout"]

_TOKEN_COLUMNS = ("input_ids", "token_mask", "generation_logprobs")
_PROMPT_COLUMN = "prompt_ids_for_adv"
_NO_VERSION = -1


def iter_batches(
    client: RowStore,
    rows: KVBatchMeta | Sequence[KVBatchMeta] | Sequence[str],
    partition_id: str | None = None,
    *,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    pad_token_id: int,
    layout: Layout = "padded",
    loss_weight: LossWeight = "token",
    spans: bool = False,
    routes: RouteMode | Literal["off", "direct", "deferred"] = "off",
    model_shape: ModelShape | LayersAndTopK | None = None,
    on_failure: OnFailure = "sentinel",
    release: bool = True,
) -> Iterator[TrainBatch]:
    """Batches of the named rows, in order; the last one may be smaller. One read a batch.

    `rows` are sample ids of `partition_id`, or a `KVBatchMeta`, which knows both, or several of one partition.
    Give `batch_size` (rows), `max_tokens` or both; a token budget costs one more read, of the lengths. `spans`
    reads each row's proof too. Routes need `model_shape`, a `ModelShape` or its `(layers, top_k)`; `on_failure` and
    `release` are those of `execute_route_plans`.

    Raises `TypeError` or `ValueError`, before anything is read, for arguments that name no rows or no layout;
    `RowsMissing` for a row that is gone, `ContractError` for one that contradicts itself, `ValueError` for a row
    that is longer than `max_tokens`.
    """
    meta = named_rows(rows, partition_id)
    budget = Budget.of(batch_size, max_tokens, layout)
    pad_token_id = engine_values.count(pad_token_id, "pad_token_id")
    if pad_token_id > np.iinfo(np.int64).max:
        raise ValueError(f"pad_token_id must fit int64, as token ids do, got {pad_token_id}")
    _check_choice("layout", layout, Layout)
    _check_choice("loss_weight", loss_weight, LossWeight)
    if routes not in list(RouteMode):
        raise ValueError(f"routes must be one of {', '.join(repr(mode.value) for mode in RouteMode)}, got {routes!r}")
    _check_choice("on_failure", on_failure, OnFailure)
    reader = None
    if routes != RouteMode.OFF:
        if isinstance(model_shape, ModelShape):
            model_shape = (model_shape.layers or 0, model_shape.top_k or 0)
        if not _is_shape(model_shape):
            needed = "model_shape, the model's (layers, experts a token)"
            raise ValueError(f"routes={routes!r} needs {needed}, as (48, 8); got {model_shape!r:.80}")
        reader = _RouteReader(client, RouteMode(routes), model_shape, on_failure, release)
    return _batches(client, meta, budget, _Making(pad_token_id, layout, loss_weight, spans, reader))


class Votes(NamedTuple):
    """What `algorithms.advantages` takes, one entry a row, in the order in which `iter_batches` gives the rows.

    `rewards` float64, `group_index` and `rollout_index` int64, `may_vote` bool, all `[R]`.
    """

    rewards: npt.NDArray[np.float64]
    group_index: Integers
    rollout_index: Integers
    may_vote: npt.NDArray[np.bool_]


def read_votes(
    client: RowStore, rows: KVBatchMeta | Sequence[KVBatchMeta] | Sequence[str], partition_id: str | None = None
) -> Votes:
    """The rewards of these rows and who may vote, without a token. Takes and raises what `iter_batches` does."""
    meta = named_rows(rows, partition_id)
    if not meta.sample_ids:
        return Votes(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool))
    places = places_of(meta.sample_ids, row_tags_of(client, meta))
    batch = client.get_samples(meta.sample_ids, meta.partition_id, ["total_reward", "mask_sample"])
    return Votes(
        rewards=np.asarray(batch["total_reward"], np.float64),
        group_index=np.array([place.group for place in places], np.int64),
        rollout_index=np.array([place.rollout for place in places], np.int64),
        may_vote=~np.asarray(batch["mask_sample"], bool),
    )


def _is_shape(model_shape: object) -> TypeGuard[LayersAndTopK]:
    return (
        isinstance(model_shape, Sequence)
        and len(model_shape) == 2
        and all(isinstance(size, int | np.integer) and size > 0 for size in model_shape)
    )


def _check_choice(name: str, choice: object, choices: Any) -> None:
    known = get_args(choices)
    if choice not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {choice!r}")


@dataclass(frozen=True)
class _RouteReader:
    """Where a batch's routes come from, and what they are held to."""

    client: RowStore
    mode: RouteMode
    model_shape: LayersAndTopK
    on_failure: OnFailure
    release: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (ROUTES_FIELD,) if self.mode is RouteMode.DIRECT else ()

    def read(self, batch: SampleBatch, lengths: list[int], tags: list[Tags]) -> tuple[list[RowRoutes], RouteReport]:
        if self.mode is RouteMode.DIRECT:
            return settle_routes(
                batch.sample_ids,
                lengths,
                batch[ROUTES_FIELD],
                model_shape=self.model_shape,
                on_failure=self.on_failure,
            )
        return execute_route_plans(
            self.client,
            batch.sample_ids,
            lengths,
            tags,
            model_shape=self.model_shape,
            on_failure=self.on_failure,
            release=self.release,
        )


@dataclass(frozen=True)
class _Making:
    """How rows become a batch."""

    pad_token_id: int
    layout: Layout
    loss_weight: LossWeight
    spans: bool
    routes: _RouteReader | None

    @property
    def columns(self) -> list[str]:
        read = [name for name in CANONICAL_SCHEMA if name != SPANS_FIELD or self.spans]
        return [*read, *(self.routes.columns if self.routes else ())]


def _batches(client: RowStore, meta: KVBatchMeta, budget: Budget, making: _Making) -> Iterator[TrainBatch]:
    tags = row_tags_of(client, meta)
    places = places_of(meta.sample_ids, tags)
    lengths = None
    if budget.tokens is not None and meta.sample_ids:
        lengths = [
            int(n) for n in client.get_samples(meta.sample_ids, meta.partition_id, ["input_lengths"])["input_lengths"]
        ]
    for start, end in budget.cut(meta.sample_ids, lengths):
        batch = client.get_samples(meta.sample_ids[start:end], meta.partition_id, making.columns)
        yield _train_batch(batch, start, tags[start:end], places[start:end], making)


def _train_batch(
    batch: SampleBatch, start: int, tags: list[Tags], places: Sequence[Place], making: _Making
) -> TrainBatch:
    layout = making.layout
    lengths = _checked_lengths(batch)
    routes, report = making.routes.read(batch, lengths, tags) if making.routes else (None, None)
    spans = None
    if making.spans:
        spans = [_spans(*row) for row in zip(batch.sample_ids, lengths, batch[SPANS_FIELD], strict=True)]
    sampled = [int(np.count_nonzero(mask)) for mask in batch["token_mask"]]
    owned = [
        place.rollout_tokens if place.rollout_tokens is not None else count
        for place, count in zip(places, sampled, strict=True)
    ]
    shares = [1.0 if making.loss_weight == "token" else 1.0 / max(tokens, 1) for tokens in owned]
    weights = [mask * np.float32(share) for mask, share in zip(batch["token_mask"], shares, strict=True)]
    return TrainBatch(
        sample_ids=batch.sample_ids,
        tags=tags,
        layout=layout,
        input_ids=_tokens(batch["input_ids"], layout, making.pad_token_id),
        token_mask=_tokens(batch["token_mask"], layout, 0.0),
        generation_logprobs=_tokens(batch["generation_logprobs"], layout, 0.0),
        input_lengths=_int64(lengths),
        cu_seqlens=_cu_seqlens(lengths),
        sample_mask=_scalars(batch["sample_mask"]),
        total_reward=_scalars(batch["total_reward"]),
        mask_sample=_scalars(batch["mask_sample"]),
        truncated=_scalars(batch["truncated"]),
        prompt_ids_for_adv=_tokens(batch[_PROMPT_COLUMN], "padded", making.pad_token_id),
        prompt_lengths=_int64(list(map(len, batch[_PROMPT_COLUMN]))),
        row_number=torch.arange(start, start + len(batch)),
        group_index=_int64([place.group for place in places]),
        rollout_index=_int64([place.rollout for place in places]),
        rollout_tokens=_int64(owned),
        weight_version=_int64([row_tags.get("weight_version", _NO_VERSION) for row_tags in tags]),
        loss_weight=_tokens(weights, layout, 0.0),
        token_weight_version=_token_versions(spans, lengths, layout) if spans is not None else None,
        spans=spans,
        routed_experts=_tokens(routes, layout, MISSING_ROUTE) if routes is not None else None,
        route_report=report,
    )


def _spans(sample_id: str, length: int, encoded: bytes) -> RowSpans | None:
    """The row's spans, `None` for a placeholder's."""
    if not encoded:
        return None
    spans = decode_spans(encoded)
    if spans.length != length:
        detail = f"row {sample_id!r} has {length} tokens, its spans hold {spans.length}"
        raise ContractError(detail, code="invalid_canonical_row")
    return spans


def _token_versions(spans: Sequence[RowSpans | None], lengths: Sequence[int], layout: Layout) -> torch.Tensor:
    cells = [
        row.weight_versions() if row is not None else np.full(length, _NO_VERSION, np.int64)
        for row, length in zip(spans, lengths, strict=True)
    ]
    return _tokens(cells, layout, _NO_VERSION)


def _int64(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _cu_seqlens(lengths: Sequence[int]) -> torch.Tensor:
    """Where each row begins in a packed batch: int32 `[B + 1]`, which is what attention kernels take."""
    if sum(lengths) > torch.iinfo(torch.int32).max:
        raise ValueError(f"a batch of {sum(lengths)} tokens is beyond int32 cu_seqlens: take a smaller batch_size")
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _checked_lengths(batch: SampleBatch) -> list[int]:
    """Each row's T. Its token columns must agree, since numpy would stretch a column of one value over all."""
    lengths = [int(length) for length in batch["input_lengths"]]
    for name in _TOKEN_COLUMNS:
        for sample_id, length, cell in zip(batch.sample_ids, lengths, batch[name], strict=True):
            if len(cell) != length:
                detail = f"row {sample_id!r} has {len(cell)} values of {name}, its input_lengths is {length}"
                raise ContractError(detail, code="invalid_canonical_row")
    return lengths


def _tokens(cells: Sequence[npt.NDArray[Any]], layout: Layout, fill: float) -> torch.Tensor:
    """Rows `[T_i, ...]` as `[B, S, ...]`, short ones filled up, or as `[sum T, ...]`."""
    if layout == "packed":
        return torch.from_numpy(np.concatenate(cells))
    longest = max(map(len, cells))
    padded = np.full((len(cells), longest, *cells[0].shape[1:]), fill, cells[0].dtype)
    for row, cell in zip(padded, cells, strict=True):
        row[: len(cell)] = cell
    return torch.from_numpy(padded)


def _scalars(column: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(column))
