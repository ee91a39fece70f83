"""The arm to compare with: what one gets today from TransferQueue's own calls and nemo-gym's own verifier.

    stage      one put a call, of eighteen jagged columns and its extras
    fetch      one read a rollout, of those eighteen columns
    decode     each call's cells taken out of the nested tensors, to Python numbers or text
    verify     a `StagedCallBaseSnapshot` a call, then `verify_and_linearize`, of nemo-gym 0.7.0
    publish    the group's rows padded to the longest, one put
    clear      one clear for the group

This is the layout of the system that staging schema 2 comes from: every column is jagged, numbers
and texts too. It does as much as it must and no more: no guard, no record, no metrics, no retry.

That system reads a call as one row of the batch, so that each cell is an index into a nested tensor, for
which torch takes the whole tensor apart. Somebody who knows this takes each column apart once; an arm
that is `tuned` does that, and is measured beside the other one.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from nemo_gym.token_id_capture.staging import (  # type: ignore[import-untyped]
    RolloutReceipt,
    StagedCallBaseSnapshot,
    verify_and_linearize,
)
from torch.nn.utils.rnn import pad_sequence

from rollout_reassembler.bench.arm import CANONICAL, PAD_TOKEN_ID, STAGING, PublishedRow
from rollout_reassembler.bench.counting import BASE_READ, CLEAR, PUBLISH
from rollout_reassembler.bench.figures import Traffic
from rollout_reassembler.bench.reference_rows import ReferenceRows
from rollout_reassembler.bench.shapes import MadeGroup
from rollout_reassembler.contract.records import StagedCall
from rollout_reassembler.reassembly.phases import Phases

T = TypeVar("T")

_STAGED = f"reference-{STAGING}"
_ROWS = f"reference-{CANONICAL}"

_TEXTS = (
    *("rollout_id", "model_call_id", "parent_call_id", "mode"),
    *("digest", "extras_digest", "chain_hash", "cumulative_hash"),
)
_NUMBERS = (
    *("schema_version", "digest_version", "extras_digest_version"),
    *("prev_len", "delta_len", "cum_len", "weight_version"),
)
_COLUMNS = {
    "token_ids_delta": torch.int64,
    "token_mask_delta": torch.float32,
    "generation_log_probs_delta": torch.float32,
}
_READ = [*_TEXTS, *_NUMBERS, *_COLUMNS]
_NO_EXTRAS = "null"


class ReferenceArm:
    """nemo-gym's verifier over rows that `rows` keeps.

    Traffic is counted on the first group alone, which is not measured: asking a nested tensor for its size takes time.
    """

    def __init__(self, rows: ReferenceRows, *, tuned: bool = False) -> None:
        self._rows = rows
        self._tuned = tuned
        self._traffic = Traffic({}, 0, 0)
        self._counting = True
        self._read = 0

    def stage(self, group: MadeGroup) -> None:
        for calls in group.calls:
            self._rows.put(_STAGED, [call.staging_key for call in calls], _staged_columns(calls))

    def finalize(self, group: MadeGroup, group_id: str) -> dict[str, float]:
        request = group.request(group_id)
        clock = Phases()
        linearized: list[Any] = []
        keys: list[str] = []
        for said in request.receipts:
            with clock("admit"):
                receipt = RolloutReceipt.model_validate(said)
                wanted = [record.staging_key for record in receipt.manifest]
            with clock("fetch"):
                columns = self._rows.get(_STAGED, wanted, _READ)
            with clock("decode"):
                calls = _decoded_by_column(columns) if self._tuned else _decoded_by_row(columns)
            with clock("verify"):
                linearized.append(verify_and_linearize(receipt, [StagedCallBaseSnapshot(**call) for call in calls]))
            keys += wanted
            if self._counting:
                self._read += sum(map(_bytes_of, columns.values()))
        with clock("assemble"):
            published = _padded_columns(linearized, request.rewards, request.loss_multiplier)
        with clock("publish"):
            weight_version = min(min(row.weight_versions) for row in linearized)
            tags = {"weight_version": weight_version, "prompt_idx": request.prompt_idx, "group_id": group_id}
            sample_ids = list(request.canonical_sample_ids or ())
            self._rows.put(_ROWS, sample_ids, published, [tags] * len(linearized))
        with clock("clear"):
            self._rows.clear(_STAGED, keys)
        if self._counting:
            calls_made = {BASE_READ: len(linearized), PUBLISH: 1, CLEAR: 1}
            self._traffic = Traffic(calls_made, self._read, sum(map(_bytes_of, published.values())))
            self._counting = False
        return clock.ms()

    def published(self, group: MadeGroup, group_id: str) -> list[PublishedRow]:
        sample_ids = list(group.request(group_id).canonical_sample_ids or ())
        columns = self._rows.get(_ROWS, sample_ids, list(_padded_columns([], (), 1.0)))
        rows = []
        for index in range(len(sample_ids)):
            row = {name: np.asarray(column[index]) for name, column in columns.items()}
            for name in ("input_ids", "token_mask", "generation_logprobs"):
                row[name] = row[name][: int(row["input_lengths"])]
            row["prompt_ids_for_adv"] = row["prompt_ids_for_adv"][: group.shape.prompt]
            rows.append(row)
        return rows

    def forget(self, group: MadeGroup, group_id: str) -> None:
        self._rows.clear(_ROWS, list(group.request(group_id).canonical_sample_ids or ()))

    def traffic(self) -> Traffic:
        return self._traffic

    def stage_one(self, call: StagedCall) -> None:
        self._rows.put(_STAGED, [call.staging_key], _staged_columns((call,)))

    def clear_staged(self, calls: list[StagedCall]) -> None:
        self._rows.clear(_STAGED, [call.staging_key for call in calls])


def _staged_columns(calls: tuple[StagedCall, ...]) -> dict[str, torch.Tensor]:
    """One jagged column a field, one cell a call."""
    cells: dict[str, list[torch.Tensor]] = {}
    for name in _TEXTS:
        cells[name] = [_text_cell(getattr(call, name) or "") for call in calls]
    for name in _NUMBERS:
        cells[name] = [torch.tensor([getattr(call, name)]) for call in calls]
    for name, dtype in _COLUMNS.items():
        cells[name] = [torch.tensor(getattr(call, name), dtype=dtype) for call in calls]
    cells["extras"] = [_text_cell(_NO_EXTRAS) for _ in calls]
    return {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in cells.items()}


def _text_cell(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _decoded_by_row(columns: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The fields of each call, as Python values."""
    rows = columns[_TEXTS[0]].size(0)
    return [_decoded({name: column[row] for name, column in columns.items()}) for row in range(rows)]


def _decoded_by_column(columns: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The same; each column is taken apart once."""
    cells = [column.unbind() for column in columns.values()]
    return [_decoded(dict(zip(columns, row, strict=True))) for row in zip(*cells, strict=True)]


def _decoded(cells: dict[str, torch.Tensor]) -> dict[str, Any]:
    call: dict[str, Any] = {name: cells[name].numpy().tobytes().decode() for name in _TEXTS}
    call["parent_call_id"] = call["parent_call_id"] or None
    call.update({name: int(cells[name]) for name in _NUMBERS})
    call.update({name: cells[name].tolist() for name in _COLUMNS})
    return call


def _padded_columns(
    rows: list[Any], rewards: tuple[float | None, ...], loss_multiplier: float
) -> dict[str, torch.Tensor]:
    """The canonical columns of these rows: `[N, longest]` for tokens, `[N]` for scalars."""
    ids = [torch.tensor(row.token_ids, dtype=torch.int64) for row in rows]
    mask = [torch.tensor(row.token_mask, dtype=torch.float32) for row in rows]
    log_probs = [torch.tensor(row.logprobs, dtype=torch.float32) for row in rows]
    prompts = [row_ids[: row.prompt_len] for row_ids, row in zip(ids, rows, strict=True)]
    return {
        "input_ids": _padded(ids, PAD_TOKEN_ID),
        "input_lengths": torch.tensor([len(row_ids) for row_ids in ids], dtype=torch.int64),
        "token_mask": _padded(mask, 0.0),
        "generation_logprobs": _padded(log_probs, 0.0),
        "sample_mask": torch.full((len(rows),), loss_multiplier, dtype=torch.float32),
        "prompt_ids_for_adv": _padded(prompts, PAD_TOKEN_ID),
        "total_reward": torch.tensor(rewards, dtype=torch.float32),
        "mask_sample": torch.zeros(len(rows), dtype=torch.bool),
        "truncated": torch.zeros(len(rows), dtype=torch.bool),
    }


def _padded(rows: list[torch.Tensor], value: float) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value) if rows else torch.empty(0)


def _bytes_of(column: torch.Tensor) -> int:
    values = column.values() if column.is_nested else column
    return values.numel() * values.element_size()
