"""What a trainer receives: canonical rows of a partition as batches of torch tensors.

    for batch in iter_batches(client, group.meta, batch_size=8, pad_token_id=0, layout="packed"):
        batch.input_ids        # int64 [sum T]
        batch.cu_seqlens       # int32 [B + 1]: row i is [cu_seqlens[i], cu_seqlens[i + 1])
        batch.token_mask       # float32 [sum T]: 1 where the policy sampled the token

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
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from rollout_reassembler.contract.errors import ContractError
from rollout_reassembler.contract.messages import FinalizedGroup, KVBatchMeta
from rollout_reassembler.contract.routed_experts import MISSING_ROUTE
from rollout_reassembler.data_plane.base import DataPlaneClient, SampleBatch, Tags
from rollout_reassembler.reassembly.routes import ModelShape, RowRoutes
from rollout_reassembler.reassembly.rows import CANONICAL_SCHEMA, ROUTES_FIELD
from rollout_reassembler.trainer.deferred_routes import OnFailure, RouteReport, execute_route_plans, settle_routes

Layout = Literal["padded", "packed"]
RouteMode = Literal["off", "direct", "deferred"]

_TOKEN_COLUMNS = ("input_ids", "token_mask", "generation_logprobs")
_PROMPT_COLUMN = "prompt_ids_for_adv"


@dataclass(frozen=True)
class TrainBatch:
    """B rows in one layout. "Tokens" below is `[B, S]` when padded, `[sum T]` when packed.

    `input_ids` int64, `token_mask` and `generation_logprobs` float32: tokens. `input_lengths` int64 `[B]`,
    `cu_seqlens` int32 `[B + 1]`. `sample_mask` and `total_reward` float32 `[B]`, `mask_sample` and
    `truncated` bool `[B]`. `prompt_ids_for_adv` int64 `[B, P]`, padded in both layouts, its lengths in
    `prompt_lengths` `[B]`. `routed_experts` int16 tokens + `[L, K]`, or none.
    """

    sample_ids: list[str]
    tags: list[Tags]
    layout: Layout
    input_ids: torch.Tensor
    token_mask: torch.Tensor
    generation_logprobs: torch.Tensor
    input_lengths: torch.Tensor
    cu_seqlens: torch.Tensor
    sample_mask: torch.Tensor
    total_reward: torch.Tensor
    mask_sample: torch.Tensor
    truncated: torch.Tensor
    prompt_ids_for_adv: torch.Tensor
    prompt_lengths: torch.Tensor
    routed_experts: torch.Tensor | None = None
    route_report: RouteReport | None = None

    @property
    def attention_mask(self) -> torch.Tensor:
        """Which tokens are data, bool: `[B, S]`, or all of `[sum T]`."""
        if self.layout == "packed":
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return torch.arange(self.input_ids.shape[1])[None, :] < self.input_lengths[:, None]


def iter_batches(
    client: DataPlaneClient,
    rows: KVBatchMeta | Sequence[str],
    partition_id: str | None = None,
    *,
    batch_size: int,
    pad_token_id: int,
    layout: Layout = "padded",
    routes: RouteMode = "off",
    model_shape: ModelShape | None = None,
    on_failure: OnFailure = "sentinel",
    release: bool = True,
) -> Iterator[TrainBatch]:
    """Batches of the named rows, in order; the last one may be smaller. One read a batch.

    `rows` are sample ids of `partition_id`, or a `KVBatchMeta`, which knows both. Routes need
    `model_shape`, the model's `(L, K)`; `on_failure` and `release` are those of `execute_route_plans`.
    Raises `RowsMissing` for a row that is gone, `ContractError` for one that contradicts itself.
    """
    if isinstance(rows, FinalizedGroup):
        raise TypeError("rows are named by sample ids or a KVBatchMeta, got a FinalizedGroup: pass its .meta")
    meta = rows if isinstance(rows, KVBatchMeta) else KVBatchMeta(partition_id or "", sample_ids=list(rows))
    if not meta.partition_id:
        raise ValueError("partition_id is needed where rows are given by their ids")
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
    _check_choice("layout", layout, Layout)
    _check_choice("routes", routes, RouteMode)
    _check_choice("on_failure", on_failure, OnFailure)
    if routes == "off":
        return _batches(client, meta, batch_size, pad_token_id, layout, None)
    if model_shape is None:
        raise ValueError(f"routes={routes!r} needs model_shape, the model's (layers, experts a token)")
    reader = _RouteReader(client, routes, model_shape, on_failure, release)
    return _batches(client, meta, batch_size, pad_token_id, layout, reader)


def _check_choice(name: str, choice: object, choices: Any) -> None:
    known = get_args(choices)
    if choice not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {choice!r}")


@dataclass(frozen=True)
class _RouteReader:
    """Where a batch's routes come from, and what they are held to."""

    client: DataPlaneClient
    mode: RouteMode
    model_shape: ModelShape
    on_failure: OnFailure
    release: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (ROUTES_FIELD,) if self.mode == "direct" else ()

    def read(self, batch: SampleBatch, lengths: list[int], tags: list[Tags]) -> tuple[list[RowRoutes], RouteReport]:
        if self.mode == "direct":
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


def _batches(
    client: DataPlaneClient,
    meta: KVBatchMeta,
    batch_size: int,
    pad_token_id: int,
    layout: Layout,
    route_reader: _RouteReader | None,
) -> Iterator[TrainBatch]:
    columns = [*CANONICAL_SCHEMA, *(route_reader.columns if route_reader else ())]
    # The plane's own tags, not those of the meta: an RPC may have left the bulky ones (route plans) out.
    tags = [row_tags or {} for row_tags in client.get_tags(meta.sample_ids, meta.partition_id)]
    for start in range(0, len(meta.sample_ids), batch_size):
        sample_ids = meta.sample_ids[start : start + batch_size]
        batch = client.get_samples(sample_ids, meta.partition_id, columns)
        yield _train_batch(batch, tags[start : start + batch_size], pad_token_id, layout, route_reader)


def _train_batch(
    batch: SampleBatch, tags: list[Tags], pad_token_id: int, layout: Layout, route_reader: _RouteReader | None
) -> TrainBatch:
    lengths = _checked_lengths(batch)
    routes, report = route_reader.read(batch, lengths, tags) if route_reader else (None, None)
    return TrainBatch(
        sample_ids=batch.sample_ids,
        tags=tags,
        layout=layout,
        input_ids=_tokens(batch["input_ids"], layout, pad_token_id),
        token_mask=_tokens(batch["token_mask"], layout, 0.0),
        generation_logprobs=_tokens(batch["generation_logprobs"], layout, 0.0),
        input_lengths=torch.tensor(lengths, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        sample_mask=_scalars(batch["sample_mask"]),
        total_reward=_scalars(batch["total_reward"]),
        mask_sample=_scalars(batch["mask_sample"]),
        truncated=_scalars(batch["truncated"]),
        prompt_ids_for_adv=_tokens(batch[_PROMPT_COLUMN], "padded", pad_token_id),
        prompt_lengths=torch.tensor(list(map(len, batch[_PROMPT_COLUMN])), dtype=torch.int64),
        routed_experts=_tokens(routes, layout, MISSING_ROUTE) if routes is not None else None,
        route_report=report,
    )


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
