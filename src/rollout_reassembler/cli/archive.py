"""An archive: everything that finalizing a set of rollouts needs, in a folder of two files.

`receipts.jsonl`, one JSON object a rollout, groups in one piece:

    {"group_id": "g0", "rollout_id": "g0/r1", "receipt": {…} or null, "reward": 1.0,
     "prompt_idx": 0, "fallback_weight_version": 0}

`sample_id`, `mask_sample`, `truncated` and `loss_multiplier` may be given too. A line that is itself a
receipt is a group of its own, with the receipt's reward.

`staged.parquet`, one row a staged call: `key`, `rollout_id`, `call` (the packed call, see
`staging/codec.py`) and `extras` (see `staging/extras.py`; empty for none). Its metadata may hold
`pad_token_id`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollout_reassembler.contract.errors import BadArchive
from rollout_reassembler.contract.messages import ReassemblyRequest
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.staging.schema import CALL_FIELD, EXTRAS_FIELD, ROLLOUT_TAG

RECEIPTS_FILE = "receipts.jsonl"
STAGED_FILE = "staged.parquet"
_PAD_KEY = b"pad_token_id"
_STAGED_SCHEMA = pa.schema(
    {"key": pa.string(), "rollout_id": pa.string(), "call": pa.large_binary(), "extras": pa.large_binary()}
)
_ROWS_A_PUT = 256


@dataclass(frozen=True)
class Archive:
    """A readable archive; its staged rows stay in the file until they are staged."""

    folder: Path
    requests: list[ReassemblyRequest]
    pad_token_id: int
    staged_rows: int

    def stage(self, dp_client: DataPlaneClient, staging_partition: str) -> None:
        """Put all staged rows of the archive into a staging partition."""
        with pq.ParquetFile(self.folder / STAGED_FILE) as file:
            for batch in file.iter_batches(_ROWS_A_PUT):
                rows = batch.to_pydict()
                dp_client.put_samples(
                    rows["key"],
                    staging_partition,
                    {CALL_FIELD: rows["call"], EXTRAS_FIELD: rows["extras"]},
                    [{ROLLOUT_TAG: rollout_id} for rollout_id in rows["rollout_id"]],
                )


def read_archive(folder: Path) -> Archive:
    """Open an archive. Raises `BadArchive` saying which file, and which line, is wrong and how."""
    if not folder.is_dir():
        raise BadArchive(f"{folder}: no such folder; an archive is a folder with {RECEIPTS_FILE} and {STAGED_FILE}")
    for name in (RECEIPTS_FILE, STAGED_FILE):
        if not (folder / name).is_file():
            raise BadArchive(f"{folder}: has no {name}; an archive is a folder with {RECEIPTS_FILE} and {STAGED_FILE}")
    requests = list(_requests(folder / RECEIPTS_FILE))
    if not requests:
        raise BadArchive(f"{folder / RECEIPTS_FILE}: is empty; expected one JSON object a rollout")
    try:
        with pq.ParquetFile(folder / STAGED_FILE) as file:
            found, rows = file.schema_arrow, file.metadata.num_rows
            pad = (file.metadata.metadata or {}).get(_PAD_KEY, b"0")
    except pa.ArrowInvalid as error:
        raise BadArchive(f"{folder / STAGED_FILE}: is not a Parquet file ({error})") from error
    missing = [name for name in _STAGED_SCHEMA.names if name not in found.names]
    if missing:
        raise BadArchive(f"{folder / STAGED_FILE}: lacks the columns {', '.join(missing)}")
    return Archive(folder, requests, int(pad), rows)


def write_archive(
    folder: Path,
    requests: Sequence[ReassemblyRequest],
    staged: Mapping[str, tuple[str, bytes, bytes]],
    *,
    pad_token_id: int,
) -> None:
    """Write an archive. `staged` maps a key to its rollout id, packed call and encoded extras."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"key": key, "rollout_id": r, "call": call, "extras": extras} for key, (r, call, extras) in staged.items()]
    schema = _STAGED_SCHEMA.with_metadata({_PAD_KEY: str(pad_token_id).encode()})
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / STAGED_FILE)
    with open(folder / RECEIPTS_FILE, "w", encoding="utf-8") as file:
        for request in requests:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in _lines(request))


def _lines(request: ReassemblyRequest) -> Iterator[dict[str, Any]]:
    for index, rollout_id in enumerate(request.rollout_ids):
        line: dict[str, Any] = {
            "group_id": request.group_id,
            "rollout_id": rollout_id,
            "receipt": request.receipts[index],
            "reward": request.rewards[index],
            "prompt_idx": request.prompt_idx,
            "fallback_weight_version": request.fallback_weight_version,
            "loss_multiplier": request.loss_multiplier,
        }
        if request.canonical_sample_ids is not None:
            line["sample_id"] = request.canonical_sample_ids[index]
        if request.truncated is not None:
            line["truncated"] = request.truncated[index]
        masked = request.mask_sample
        line["mask_sample"] = masked[index] if isinstance(masked, tuple) else bool(masked)
        yield line


def _requests(path: Path) -> Iterator[ReassemblyRequest]:
    """The groups of a receipts file, in its order."""
    group: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, line in _json_lines(path):
        if "manifest" in line:
            line = {"group_id": line.get("rollout_id"), "rollout_id": line.get("rollout_id"), "receipt": line}
            line["reward"] = line["receipt"].get("reward")
        for name in ("group_id", "rollout_id"):
            if not isinstance(line.get(name), str) or not line[name]:
                raise BadArchive(f"{path}:{number}: expected a non-empty string {name!r}, got {line.get(name)!r:.80}")
        if "receipt" not in line:
            raise BadArchive(f"{path}:{number}: expected a 'receipt' (null when it was lost)")
        if group and line["group_id"] != group[0]["group_id"]:
            yield _request(group)
            group = []
        if not group and line["group_id"] in seen:
            raise BadArchive(f"{path}:{number}: group {line['group_id']!r} is in two pieces; keep its lines together")
        seen.add(line["group_id"])
        group.append(line)
    if group:
        yield _request(group)


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, encoding="utf-8") as file:
        try:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise BadArchive(f"{path}:{number}: is not JSON ({error})") from error
                if not isinstance(line, dict):
                    raise BadArchive(f"{path}:{number}: expected a JSON object, got {type(line).__name__}")
                yield number, line
        except UnicodeDecodeError as error:
            raise BadArchive(f"{path}: is not UTF-8 text ({error})") from error


def _request(lines: Sequence[dict[str, Any]]) -> ReassemblyRequest:
    first = lines[0]
    said_ids = [line["sample_id"] for line in lines if line.get("sample_id")]
    said_truncated = [bool(line["truncated"]) for line in lines if line.get("truncated") is not None]
    try:
        return ReassemblyRequest(
            group_id=first["group_id"],
            rollout_ids=tuple(line["rollout_id"] for line in lines),
            canonical_sample_ids=tuple(said_ids) if len(said_ids) == len(lines) else None,
            receipts=tuple(line["receipt"] for line in lines),
            rewards=tuple(line.get("reward") for line in lines),
            fallback_weight_version=int(first.get("fallback_weight_version") or 0),
            prompt_idx=int(first.get("prompt_idx") or 0),
            mask_sample=tuple(bool(line.get("mask_sample")) for line in lines),
            loss_multiplier=float(first.get("loss_multiplier", 1.0)),
            truncated=tuple(said_truncated) if len(said_truncated) == len(lines) else None,
        )
    except (TypeError, ValueError) as error:
        raise BadArchive(f"{RECEIPTS_FILE}: group {first['group_id']!r}: {error}") from error
