"""What router replay costs: `python benchmarks/routes.py` prints it for a group in each mode, on both planes.

off        no router replay: what a group costs anyway
direct     the actor reads, proves and assembles the routes, and publishes them as a column
deferred   the actor publishes plans as tags; the trainer reads, proves and assembles the routes

`finalize` is the actor's part, from receipts to the answer; `batch` is the trainer's, from the answer to one packed
batch. Memory is how far the process rose above where it stood before (on the memory plane, the rows that it
then holds are in it). Last comes the size of a deferred row's tag against the number of its calls.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from rollout_reassembler.bench.figures import Spread
from rollout_reassembler.bench.machine import peak_growth_bytes
from rollout_reassembler.bench.run import BenchPlane, open_client
from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.contract.records import CallRecord, RolloutReceipt, StagedCall, seal_call
from rollout_reassembler.contract.routed_experts import route_extras
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from rollout_reassembler.reassembly.route_plan import RoutePlan, encode_route_plan
from rollout_reassembler.reassembly.rows import register_canonical_partition
from rollout_reassembler.staging.schema import register_staging_partition
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.trainer.rows import iter_batches

Mode = Literal["off", "direct", "deferred"]
MODES: tuple[Mode, ...] = ("off", "direct", "deferred")
PLANES: tuple[BenchPlane, ...] = ("memory", "simple")
TAG_CALLS = (1, 10, 50, 256)

_PAD = 0
_numbers = itertools.count()


@dataclass(frozen=True)
class Load:
    """The size of a group: `rollouts` of `tokens` in `calls` calls, routed over `layers` × `topk` of `experts`."""

    rollouts: int
    tokens: int
    calls: int
    layers: int
    topk: int
    experts: int

    @property
    def route_bytes(self) -> int:
        """The routes of a group as the rows hold them, int16."""
        return self.rollouts * self.tokens * self.layers * self.topk * 2


@dataclass(frozen=True)
class ModeFigures:
    """One mode on one plane: milliseconds a group, their phases' medians, and peak growth in bytes."""

    plane: str
    mode: str
    finalize_ms: Spread
    batch_ms: Spread
    phases_ms: dict[str, float]
    finalize_peak_bytes: int | None
    batch_peak_bytes: int | None


@dataclass(frozen=True)
class TagSize:
    """A deferred row's tag in characters, by how its ids look, beside the same plan as plain JSON."""

    calls: int
    short_ids: int
    uuids: int
    uuids_as_json: int


def routes(
    plane: Annotated[Literal["memory", "simple", "both"], typer.Option(help="memory, simple, or both.")] = "both",
    rollouts: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens a rollout.")] = 2000,
    calls: Annotated[int, typer.Option(min=1, help="Calls a rollout.")] = 4,
    layers: Annotated[int, typer.Option(min=1)] = 48,
    topk: Annotated[int, typer.Option(min=1)] = 8,
    experts: Annotated[int, typer.Option(min=2, help="128 or fewer travel as int8, more as int16.")] = 256,
    repeat: Annotated[int, typer.Option(min=1, help="Groups a figure.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure router replay in both modes."""
    console = Console()
    load = Load(rollouts, tokens, calls, layers, topk, experts)
    before = [round(value, 2) for value in os.getloadavg()]
    group = make_group(load)
    figures: list[ModeFigures] = []
    for name in PLANES if plane == "both" else (plane,):
        with open_client(name) as client:
            figures += [measure(client, name, mode, load, group, repeat) for mode in MODES]
    tags = [tag_size(count) for count in TAG_CALLS]
    staged = sum(len(text) for calls_ in group for call in calls_ for text in (call.extras or {}).values())
    console.print(
        f"{rollouts} rollouts × {tokens:,} tokens in {calls} calls × {layers} layers × top-{topk} of {experts}: "
        f"{load.route_bytes / 1e6:.1f} MB of routes, {staged / 1e6:.1f} MB staged. Load average before: {before}."
    )
    console.print(_mode_table(figures))
    console.print(_tag_table(tags))
    if json_file is not None:
        report = {"load": load, "load_average": before, "modes": figures, "tags": tags}
        json_file.write_text(json.dumps(report, indent=2, default=dataclasses.asdict) + "\n", encoding="utf-8")


def make_group(load: Load) -> list[list[StagedCall]]:
    """The staged calls of each rollout: half of a call is carried, half is generated, all of it is routed."""
    rng = np.random.default_rng(0)
    return [list(_make_calls(f"routes/r{index}", load, rng)) for index in range(load.rollouts)]


def _make_calls(rollout_id: str, load: Load, rng: np.random.Generator) -> Iterator[StagedCall]:
    ids = rng.integers(0, 150_000, load.tokens)
    experts = rng.integers(0, load.experts, (load.tokens, load.layers, load.topk)).astype(np.int16)
    ends = [load.tokens * (index + 1) // load.calls for index in range(load.calls)]
    parent: StagedCall | None = None
    for start, end in itertools.pairwise([0, *ends]):
        is_generated = np.arange(start, end) >= (start + end) // 2
        parent = seal_call(
            rollout_id=rollout_id,
            model_call_id=f"call-{end:06d}",
            token_ids_delta=ids[start:end],
            token_mask_delta=is_generated.astype(np.float32),
            generation_log_probs_delta=np.where(is_generated, np.float32(-0.5), np.float32(0)),
            weight_version=1,
            parent=parent,
            prefix_token_ids=ids[:start],
            extras=route_extras(experts[: end - 1], prev_len=start, delta_len=end - start),
        )
        yield parent


def measure(
    client: DataPlaneClient, plane: str, mode: Mode, load: Load, group: list[list[StagedCall]], repeat: int
) -> ModeFigures:
    """Finalize and read the group again and again, the first time to warm up, and once more for the peaks."""
    site = Site(client, mode, load, group)
    site.run(milliseconds)
    runs = [site.run(milliseconds) for _ in range(repeat)]
    peaks = site.run(peak_growth_bytes)
    return ModeFigures(
        plane=plane,
        mode=mode,
        finalize_ms=Spread.of([run.finalize for run in runs]),
        batch_ms=Spread.of([run.batch for run in runs]),
        phases_ms={
            name: float(np.median([run.answer.timings[name] for run in runs])) for name in runs[0].answer.timings
        },
        finalize_peak_bytes=peaks.finalize,
        batch_peak_bytes=peaks.batch,
    )


class Run(NamedTuple):
    """One group: its answer, and what was measured of its two halves."""

    answer: FinalizedGroup
    finalize: Any
    batch: Any


class Site:
    """The partitions of one mode, and a group that goes through them under ever new ids."""

    def __init__(self, client: DataPlaneClient, mode: Mode, load: Load, group: list[list[StagedCall]]) -> None:
        self._client = client
        self._mode = mode
        self._load = load
        self._group = group
        self._receipts = [_receipt(calls) for calls in group]
        self._canonical, staging = f"{mode}-rows", f"{mode}-staging"
        register_staging_partition(client, staging)
        register_canonical_partition(client, self._canonical, with_routes=mode == "direct")
        self._sink = StagingSink(client, staging_partition=staging)
        self._reassembler = RolloutReassembler(
            client,
            partition_id=self._canonical,
            staging_partition=staging,
            pad_token_id=_PAD,
            max_seq_len=None,
            router_replay_enabled=mode != "off",
            defer_routed_experts_to_policy=mode == "deferred",
        )

    def run(self, measured: Callable[[Callable[[], object]], Any]) -> Run:
        """Stage the group, then have both halves measured, and leave nothing behind."""
        for calls in self._group:
            if not all(result.ok for result in self._sink.stage_all(calls)):
                raise RuntimeError("staging failed")
        answers: list[FinalizedGroup] = []
        finalize = measured(lambda: answers.append(self._finalize()))
        batch = measured(lambda: self._batch(answers[0]))
        self._client.clear_samples(answers[0].meta.sample_ids, self._canonical)
        gc.collect()
        return Run(answers[0], finalize, batch)

    def _finalize(self) -> FinalizedGroup:
        answer = self._reassembler.finalize_group(
            f"group-{next(_numbers)}",
            [calls[0].rollout_id for calls in self._group],
            self._receipts,
            [1.0] * len(self._group),
            mask_sample=None,
            fallback_weight_version=0,
            prompt_idx=0,
        )
        if answer.rejections:
            raise RuntimeError(f"a sound group was rejected: {answer.rejections}")
        return answer

    def _batch(self, answer: FinalizedGroup) -> None:
        (batch,) = iter_batches(
            self._client,
            answer.meta,
            batch_size=len(self._group),
            pad_token_id=_PAD,
            layout="packed",
            routes=self._mode,
            model_shape=(self._load.layers, self._load.topk),
            on_failure="raise",
        )
        report = batch.route_report
        if report is not None and report.sentinel_tokens != len(self._group):
            raise RuntimeError(f"{report.sentinel_tokens} tokens without routes; each row's last one was expected")


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def tag_size(calls: int) -> TagSize:
    """A deferred row's tag for a rollout of that many calls."""
    rng = np.random.default_rng(calls)

    def uuid() -> UUID:
        return UUID(bytes=rng.bytes(16))

    rollout = uuid()
    long = _plan([f"{rollout}/chatcmpl-{uuid().hex}" for _ in range(calls)], rng)
    short = _plan([f"g12/r3/call-{index:04d}" for index in range(calls)], rng)
    plain = json.dumps(long.to_dict(), separators=(",", ":"))
    return TagSize(calls, len(encode_route_plan(short)), len(encode_route_plan(long)), len(plain))


def _plan(keys: list[str], rng: np.random.Generator) -> RoutePlan:
    carried, generated = rng.integers(50, 800, len(keys)).tolist(), rng.integers(50, 600, len(keys)).tolist()
    return RoutePlan.from_dict(
        {
            "schema_version": 2,
            "staging_partition": "staging",
            "spans": [
                {
                    "staging_key": key,
                    "carry_len": carry_len,
                    "generation_len": generation_len,
                    "staged_route_len": carry_len + generation_len,
                    "extras_digest_version": 1,
                    "extras_digest": rng.bytes(32).hex(),
                }
                for key, carry_len, generation_len in zip(keys, carried, generated, strict=True)
            ],
            "cleanup_staging_keys": keys,
            "expected_token_length": sum(carried) + sum(generated),
        }
    )


def _receipt(calls: list[StagedCall]) -> dict[str, Any]:
    receipt = RolloutReceipt(
        rollout_id=calls[0].rollout_id,
        terminal_model_call_id=calls[-1].model_call_id,
        terminal_selection="declared",
        manifest=[CallRecord.of(call, response_id=f"resp-{call.model_call_id}") for call in calls],
    )
    return receipt.model_dump()


def _mode_table(figures: list[ModeFigures]) -> Table:
    table = Table(title="a group: median ms (p99), peak MB", title_justify="left")
    for name in ("plane", "mode", "finalize", "of it fetch", "routes", "publish", "peak", "batch", "peak"):
        table.add_column(name, justify="left" if name in ("plane", "mode") else "right")
    for found in figures:
        phases = [found.phases_ms.get(f"row_assembly/{name}_ms", 0.0) for name in ("fetch", "routes", "publish")]
        table.add_row(
            found.plane,
            found.mode,
            f"{found.finalize_ms.median:.0f} ({found.finalize_ms.p99:.0f})",
            *(f"{ms:.0f}" for ms in phases),
            _megabytes(found.finalize_peak_bytes),
            f"{found.batch_ms.median:.0f} ({found.batch_ms.p99:.0f})",
            _megabytes(found.batch_peak_bytes),
        )
    return table


def _megabytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:.0f}"


def _tag_table(tags: list[TagSize]) -> Table:
    table = Table(title="a deferred row's tag, characters", title_justify="left")
    for name in ("calls", "short ids", "uuids", "uuids, as JSON"):
        table.add_column(name, justify="right")
    for size in tags:
        table.add_row(*(f"{value:,}" for value in (size.calls, size.short_ids, size.uuids, size.uuids_as_json)))
    return table


if __name__ == "__main__":
    typer.run(routes)
