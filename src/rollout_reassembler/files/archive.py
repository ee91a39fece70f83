"""An archive: everything that finalizing a set of rollouts needs, in a folder of two files.

`receipts.jsonl`, one JSON object a line. The first says what there is, so that a file that was cut is not
taken for a whole one; then comes one a rollout, groups in one piece:

    {"archive": 1, "groups": 1, "rollouts": 2, "staged_rows": 6}
    {"group_id": "g0", "rollout_id": "g0/r0", "receipt": {…}, "reward": 1.0, "prompt_idx": 0}
    {"group_id": "g0", "rollout_id": "g0/r1", "receipt": null, "reward": 0.0, "prompt_idx": 0}

`fallback_weight_version`, `sample_id`, `mask_sample`, `truncated`, `loss_multiplier` and `branches` may be given too.
A line that is itself a receipt is a group of its own, with the receipt's reward.

`staged.parquet`, one row a staged call: `key` (its place, or its staging key), `rollout_id`, `call` (the
packed call, see `staging/codec.py`) and `extras` (see `staging/extras.py`; empty for none). Its metadata may hold
`pad_token_id`. A row that cannot be staged costs its rollout: one with a null in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from rollout_reassembler.contract.errors import BadArchive
from rollout_reassembler.contract.messages import ReassemblyRequest
from rollout_reassembler.contract.settings import Branches
from rollout_reassembler.data_plane.base import RowStore
from rollout_reassembler.data_plane.durable import replacing_folder
from rollout_reassembler.staging.codec import staged_place
from rollout_reassembler.staging.schema import CALL_FIELD, EXTRAS_FIELD, ROLLOUT_TAG

RECEIPTS_FILE = "receipts.jsonl"
STAGED_FILE = "staged.parquet"

_FORMAT = 1
_PAD_KEY = b"pad_token_id"
_STAGED_SCHEMA = pa.schema(
    {"key": pa.string(), "rollout_id": pa.string(), "call": pa.large_binary(), "extras": pa.large_binary()}
)
_ROWS_A_PUT = 256

_Model = TypeVar("_Model", bound=BaseModel)
_Id = Annotated[StrictStr, Field(min_length=1)]
_Int64 = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


class _Counts(BaseModel):
    """The first line: what the archive holds."""

    model_config = ConfigDict(extra="forbid")

    archive: StrictInt
    groups: StrictInt
    rollouts: StrictInt
    staged_rows: StrictInt


class _Line(BaseModel):
    """One rollout. A receipt that is none costs its rollout, so it may be anything here."""

    model_config = ConfigDict(extra="forbid")

    group_id: _Id
    rollout_id: _Id
    receipt: Any
    reward: StrictFloat | StrictInt | StrictBool | None = None
    prompt_idx: _Int64 = 0
    fallback_weight_version: _Int64 = 0
    loss_multiplier: Annotated[StrictFloat, Field(allow_inf_nan=False)] | StrictInt = 1.0
    mask_sample: StrictBool = False
    sample_id: _Id | None = None
    truncated: StrictBool | None = None
    branches: Branches | None = None


@dataclass(frozen=True)
class Archive:
    """A readable archive; its staged rows stay in the file until they are staged.

    `counted` says whether the archive's own counts were there and held.
    """

    folder: Path
    requests: list[ReassemblyRequest]
    pad_token_id: int
    staged_rows: int
    counted: bool = True

    @property
    def rollouts(self) -> int:
        return sum(len(request.rollout_ids) for request in self.requests)

    def stage(self, dp_client: RowStore, staging_partition: str) -> int:
        """Put the staged rows of the archive into a staging partition; how many could not be.

        Raises `BadArchive` when the file cannot be read to its end.
        """
        refused = 0
        for rows in _staged_batches(self.folder / STAGED_FILE):
            good = [row for row in rows if _fault_of(row) is None]
            refused += len(rows) - len(good)
            # What is there twice is put once; calls that differ under one staging key have places of their own.
            placed = {staged_place(row["key"], row["call"]): row for row in good}
            if placed:
                dp_client.put_samples(
                    list(placed),
                    staging_partition,
                    {name: [row[name] for row in placed.values()] for name in (CALL_FIELD, EXTRAS_FIELD)},
                    [{ROLLOUT_TAG: row["rollout_id"]} for row in placed.values()],
                )
        return refused


def _fault_of(row: Mapping[str, Any]) -> str | None:
    """Why a staged row cannot be put on a plane."""
    for name in ("key", "rollout_id"):
        if not row[name]:
            return f"no {name}"
    for name in ("call", "extras"):
        if row[name] is None:
            return f"a null {name}"
    return None


def read_archive(folder: Path, *, uncounted: bool = False) -> Archive:
    """Open an archive. Raises `BadArchive` saying which file, and which line, is wrong and how.

    One whose `receipts.jsonl` does not begin with its counts is read only if that is said: `uncounted`.
    """
    if not folder.is_dir():
        raise BadArchive(f"{folder}: no such folder; an archive is a folder with {RECEIPTS_FILE} and {STAGED_FILE}")
    for name in (RECEIPTS_FILE, STAGED_FILE):
        if not (folder / name).is_file():
            raise BadArchive(f"{folder}: has no {name}; an archive is a folder with {RECEIPTS_FILE} and {STAGED_FILE}")
    pad, staged_rows = _staged_facts(folder / STAGED_FILE)
    path = folder / RECEIPTS_FILE
    counts, lines = _read_lines(path)
    if not lines and counts is None:
        raise BadArchive(f"{path}: is empty; expected one JSON object a rollout")
    requests = _requests(path, lines)
    archive = Archive(folder, requests, pad, staged_rows, counted=counts is not None)
    if counts is not None:
        _hold_counts(path, counts, archive)
    elif not uncounted:
        should = json.dumps(_counts(len(requests), len(lines), staged_rows))
        raise BadArchive(
            f"{path}: does not begin with its counts, so a file that was cut could not be told from a whole one; "
            f"if {len(lines)} rollouts in {len(requests)} groups is all, say so with --uncounted, or begin it with "
            f"{should}"
        )
    return archive


def write_archive(
    folder: Path,
    requests: Sequence[ReassemblyRequest],
    staged: Mapping[str, tuple[str, bytes, bytes]],
    *,
    pad_token_id: int,
) -> None:
    """Write an archive. `staged` maps a key to its rollout id, packed call and encoded extras.

    The folder appears whole or not at all; one that was there is replaced, or not touched. Raises `OSError`.
    """
    rows = [{"key": key, "rollout_id": r, "call": call, "extras": extras} for key, (r, call, extras) in staged.items()]
    schema = _STAGED_SCHEMA.with_metadata({_PAD_KEY: str(pad_token_id).encode()})
    counts = _counts(len(requests), sum(len(request.rollout_ids) for request in requests), len(rows))
    with replacing_folder(folder, only=(RECEIPTS_FILE, STAGED_FILE)) as fresh:
        pq.write_table(pa.Table.from_pylist(rows, schema), fresh / STAGED_FILE)
        with open(fresh / RECEIPTS_FILE, "w", encoding="utf-8") as file:
            for line in (counts, *(line for request in requests for line in _lines(request))):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _counts(groups: int, rollouts: int, staged_rows: int) -> dict[str, int]:
    return _Counts(archive=_FORMAT, groups=groups, rollouts=rollouts, staged_rows=staged_rows).model_dump()


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
        if request.branches is not None:
            line["branches"] = request.branches
        masked = request.mask_sample
        line["mask_sample"] = masked[index] if isinstance(masked, tuple) else bool(masked)
        yield line


# --- staged.parquet -----------------------------------------------------------------------------------


@contextmanager
def _reading_parquet(path: Path) -> Iterator[None]:
    """Whatever Arrow cannot read is a `BadArchive`."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise BadArchive(f"{path}: is not a whole Parquet file ({_first_line(error)})") from error
    except OSError as error:
        # Arrow raises it for damaged pages too, then without a number.
        if error.errno is not None:
            raise
        raise BadArchive(f"{path}: is damaged ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _staged_batches(path: Path) -> Iterator[list[dict[str, Any]]]:
    with _reading_parquet(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_ROWS_A_PUT):
            yield batch.to_pylist()


def _staged_facts(path: Path) -> tuple[int, int]:
    """The pad token and the number of rows."""
    with _reading_parquet(path), pq.ParquetFile(path) as file:
        found, rows = file.schema_arrow, file.metadata.num_rows
        pad = (file.metadata.metadata or {}).get(_PAD_KEY, b"0")
    missing = [name for name in _STAGED_SCHEMA.names if name not in found.names]
    if missing:
        raise BadArchive(f"{path}: lacks the columns {', '.join(missing)}")
    for name in _STAGED_SCHEMA.names:
        kind, text = found.field(name).type, name in ("key", "rollout_id")
        if kind not in ((pa.string(), pa.large_string()) if text else (pa.binary(), pa.large_binary())):
            raise BadArchive(f"{path}: expected {'text' if text else 'bytes'} in column {name}, got {kind}")
    try:
        return int(pad), rows
    except ValueError as error:
        raise BadArchive(f"{path}: expected an integer as pad_token_id, got {pad!r:.80}") from error


# --- receipts.jsonl -----------------------------------------------------------------------------------


def _read_lines(path: Path) -> tuple[_Counts | None, list[tuple[int, _Line]]]:
    """The counts, where the file begins with them, and every rollout with the number of its line."""
    counts: _Counts | None = None
    lines: list[tuple[int, _Line]] = []
    for number, found in _json_lines(path):
        is_first = counts is None and not lines
        if is_first and "archive" in found:
            counts = _parsed(_Counts, found, path, number)
            if counts.archive != _FORMAT:
                raise BadArchive(f"{path}:{number}: is of format {counts.archive}, this version reads {_FORMAT}")
            continue
        if "manifest" in found:
            own = {"group_id": found.get("rollout_id"), "rollout_id": found.get("rollout_id")}
            found = {**own, "receipt": found, "reward": found.get("reward")}
        if "receipt" not in found:
            raise BadArchive(f"{path}:{number}: expected a 'receipt' (null when it was lost)")
        lines.append((number, _parsed(_Line, found, path, number)))
    return counts, lines


def _parsed(kind: type[_Model], found: dict[str, Any], path: Path, number: int) -> _Model:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = str(fault["loc"][0])
        what = " is missing" if fault["type"] == "missing" else f": {fault['msg']}, got {fault['input']!r:.80}"
        raise BadArchive(f"{path}:{number}: {name!r}{what}") from error


def _hold_counts(path: Path, counts: _Counts, archive: Archive) -> None:
    """Raise `BadArchive` unless all that the first line speaks of is there."""
    found, said = (len(archive.requests), archive.rollouts), (counts.groups, counts.rollouts)
    if found != said:
        raise BadArchive(
            f"{path}: holds {found[1]} rollouts in {found[0]} groups, its first line says {said[1]} in {said[0]}; "
            "was it cut?"
        )
    if archive.staged_rows < counts.staged_rows:
        staged = archive.folder / STAGED_FILE
        raise BadArchive(f"{staged}: holds {archive.staged_rows} rows, {path.name} says {counts.staged_rows}")


def _requests(path: Path, lines: Sequence[tuple[int, _Line]]) -> list[ReassemblyRequest]:
    """The groups of a receipts file, in its order."""
    requests: list[ReassemblyRequest] = []
    groups: set[str] = set()
    rollouts: dict[str, int] = {}
    samples: dict[str, str] = {}
    for group_id, members in groupby(lines, key=lambda entry: entry[1].group_id):
        group = list(members)
        if group_id in groups:
            raise BadArchive(f"{path}:{group[0][0]}: group {group_id!r} is in two pieces; keep its lines together")
        groups.add(group_id)
        for number, line in group:
            if line.rollout_id in rollouts:
                first = rollouts[line.rollout_id]
                raise BadArchive(f"{path}:{number}: rollout {line.rollout_id!r} is in line {first} already")
            rollouts[line.rollout_id] = number
        request = _request(path, group)
        for sample_id in request.canonical_sample_ids or [f"{group_id}_g{i}" for i in range(len(group))]:
            if sample_id in samples:
                where = f"groups {samples[sample_id]!r} and {group_id!r}"
                raise BadArchive(f"{path}:{group[0][0]}: sample id {sample_id!r} is in {where}; each names one row")
            samples[sample_id] = group_id
        requests.append(request)
    return requests


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


def _request(path: Path, group: Sequence[tuple[int, _Line]]) -> ReassemblyRequest:
    number, first = group[0]
    lines = [line for _, line in group]
    for name in ("prompt_idx", "fallback_weight_version", "loss_multiplier", "branches"):
        found = {getattr(line, name) for line in lines}
        if len(found) > 1:
            differ = sorted(found, key=repr)
            raise BadArchive(f"{path}:{number}: group {first.group_id!r}: lines differ in {name}: {differ}")
    for name in ("sample_id", "truncated"):
        said = sum(getattr(line, name) is not None for line in lines)
        if said not in (0, len(lines)):
            raise BadArchive(f"{path}:{number}: group {first.group_id!r}: {said} of {len(lines)} lines have a {name}")
    return ReassemblyRequest(
        group_id=first.group_id,
        rollout_ids=tuple(line.rollout_id for line in lines),
        canonical_sample_ids=tuple(line.sample_id for line in lines if line.sample_id) or None,
        receipts=tuple(line.receipt for line in lines),
        rewards=tuple(line.reward for line in lines),
        fallback_weight_version=first.fallback_weight_version,
        prompt_idx=first.prompt_idx,
        mask_sample=tuple(line.mask_sample for line in lines),
        loss_multiplier=first.loss_multiplier,
        truncated=tuple(line.truncated for line in lines if line.truncated is not None) or None,
        branches=first.branches,
    )
