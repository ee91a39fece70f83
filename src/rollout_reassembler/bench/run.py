"""The run: stage a group, finalize it through each arm in turn, again and again, and add up.

warm-up    one group each, not measured; all arms must have published the same rows
measured   `repeat` groups each, in turn: ours, reference, reference tuned, ours …
memory     one more group each, for the peak alone
staging    rows a second through each arm's sink
hashing    packed values → rows on one thread, against SHA-256 alone
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rollout_reassembler.bench.arm import Arm, PublishedRow
from rollout_reassembler.bench.figures import (
    ArmFigures,
    BenchReport,
    GroupRun,
    HashLimit,
    Spread,
    Traffic,
    Workload,
)
from rollout_reassembler.bench.machine import machine_facts, measure_hash_limit, peak_growth_bytes
from rollout_reassembler.bench.ours import OursArm
from rollout_reassembler.bench.shapes import MadeGroup, Shape, make_group
from rollout_reassembler.bench.staging import staging_group, staging_rates
from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.staging.codec import pack_call

_GROUPS_A_TURN = 3
_RAY_CPUS = 8
"""What the local Ray may promise to the queue and to whoever is measured beside it; waiting costs none."""

BenchPlane = Literal["memory", "simple"]
Progress = Callable[[str], None]


class CannotMeasure(Exception):
    """The bench can't run as asked. The message is one line for the person who asked."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure."""

    shape: Shape
    plane: BenchPlane = "simple"
    repeat: int = 5
    reference: bool = True
    seed: int = 0


def run_bench(settings: BenchSettings, *, progress: Progress = lambda _: None) -> BenchReport:
    """Start the plane, measure one shape on it, end the plane. Raises `CannotMeasure`."""
    if settings.reference:
        _require_reference()
    load = os.getloadavg()
    progress(f"starting the {settings.plane} plane")
    with open_client(settings.plane) as client:
        return measure(client, settings, load_average=load, progress=progress)


@contextmanager
def open_client(plane: BenchPlane) -> Iterator[DataPlaneClient]:
    """A client of a plane that is started for the bench alone, and ended with it. Raises `CannotMeasure`."""
    if plane == "memory":
        with closing(build_data_plane_client(DataPlaneConfig(impl="memory"))) as client:
            yield client
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise CannotMeasure(
            "the simple plane needs Ray: pip install 'rollout-reassembler[ray]', or measure with --plane memory"
        ) from error
    from rollout_reassembler.data_plane.transfer_queue.cluster import local_ray

    with local_ray(num_cpus=_RAY_CPUS), closing(_start_queue()) as client:
        yield client


def _start_queue() -> DataPlaneClient:
    try:
        return build_data_plane_client(DataPlaneConfig(impl="transfer_queue"), bootstrap=True)
    except DataPlaneError as error:
        raise CannotMeasure(str(error)) from error


def measure(
    client: DataPlaneClient,
    settings: BenchSettings,
    *,
    load_average: Sequence[float],
    progress: Progress = lambda _: None,
) -> BenchReport:
    """Measure one shape on a running plane, which the reference arm shares if it is a queue."""
    shape = settings.shape
    progress(f"making {shape}")
    group = make_group(shape, seed=settings.seed)
    to_stage = staging_group(shape, seed=settings.seed).all_calls
    arms: dict[str, Arm] = {"ours": OursArm(client)}
    if settings.reference:
        arms["reference"] = _reference_arm(settings.plane, tuned=False)
        arms["reference_tuned"] = _reference_arm(settings.plane, tuned=True)
    _check_rows(arms, group, progress)
    runs = _measured_runs(arms, group, settings.repeat, progress)
    traffic = {name: arm.traffic() for name, arm in arms.items()}
    progress("hashing")
    limit = measure_hash_limit(group)
    runs["ours"] = [_with_verify_split(run, limit) for run in runs["ours"]]
    figures: dict[str, ArmFigures] = {}
    for name, arm in arms.items():
        progress(f"memory and staging, {name}")
        peak = _peak_of_a_group(arm, group)
        # Tuned or not, the reference stages alike.
        rates = figures["reference"].staging_rows_per_s if name == "reference_tuned" else staging_rates(arm, to_stage)
        figures[name] = _figures(shape, runs[name], traffic[name], peak, rates)
    ours, reference, tuned = figures["ours"], figures.get("reference"), figures.get("reference_tuned")
    return BenchReport(
        shape=shape.name,
        plane=settings.plane,
        repeat=settings.repeat,
        workload=_workload(group),
        ours=ours,
        reference=reference,
        ratio=reference.ms.median / ours.ms.median if reference else None,
        reference_tuned=tuned,
        ratio_tuned=tuned.ms.median / ours.ms.median if tuned else None,
        staging_ratio=_ratios(ours.staging_rows_per_s, reference.staging_rows_per_s) if reference else None,
        reference_note=_reference_note(settings),
        hash_limit=limit,
        machine=machine_facts(limit.sha256_gb_per_s, load_average),
    )


def _check_rows(arms: dict[str, Arm], group: MadeGroup, progress: Progress) -> None:
    """One group through each arm; raises `CannotMeasure` unless they publish the same rows."""
    rows: dict[str, list[PublishedRow]] = {}
    for name, arm in arms.items():
        progress(f"checking the rows, {name}")
        arm.stage(group)
        arm.finalize(group, "check")
        rows[name] = arm.published(group, "check")
        arm.forget(group, "check")
    for name, found in rows.items():
        if difference := first_difference(rows["ours"], found):
            raise CannotMeasure(f"the {name} arm published other rows than ours: {difference}")


def first_difference(expected: Sequence[PublishedRow], found: Sequence[PublishedRow]) -> str:
    """Where two groups of rows differ, `""` where they do not."""
    if len(expected) != len(found):
        return f"{len(found)} rows, not {len(expected)}"
    for index, (row, other) in enumerate(zip(expected, found, strict=True)):
        if set(row) != set(other):
            return f"row {index} has the columns {sorted(other)}, not {sorted(row)}"
        for name, value in row.items():
            if not np.array_equal(np.asarray(value), np.asarray(other[name])):
                return f"row {index} differs in {name}"
    return ""


def _measured_runs(
    arms: dict[str, Arm], group: MadeGroup, repeat: int, progress: Progress
) -> dict[str, list[GroupRun]]:
    """Every arm's measured groups, in turns, since the machine is not the same from one minute to the next.

    A turn begins with a group that is not measured: what the other arm left in caches and allocator
    would count against this one, and no process runs both.
    """
    runs: dict[str, list[GroupRun]] = {name: [] for name in arms}
    for first in range(0, repeat, _GROUPS_A_TURN):
        numbers = range(first, min(repeat, first + _GROUPS_A_TURN))
        for name, arm in arms.items():
            progress(f"groups {numbers[0] + 1} to {numbers[-1] + 1} of {repeat}, {name}")
            _timed_run(arm, group, f"turn-{first}")
            runs[name] += [_timed_run(arm, group, f"measured-{number}") for number in numbers]
    return runs


def _timed_run(arm: Arm, group: MadeGroup, group_id: str) -> GroupRun:
    """Stage and finalize one group, and forget it; the middle one is timed."""
    arm.stage(group)
    gc.collect()
    cpu, start = time.process_time(), time.perf_counter()
    phases = arm.finalize(group, group_id)
    ms, cpu_s = (time.perf_counter() - start) * 1e3, time.process_time() - cpu
    arm.forget(group, group_id)
    return GroupRun(ms, cpu_s, {**phases, "other": max(0.0, ms - sum(phases.values()))})


def _peak_of_a_group(arm: Arm, group: MadeGroup) -> int | None:
    arm.stage(group)
    peak = peak_growth_bytes(lambda: arm.finalize(group, "memory"))
    arm.forget(group, "memory")
    return peak


def _with_verify_split(run: GroupRun, limit: HashLimit) -> GroupRun:
    """Our `verify` phase as its two halves, in the proportion that they had when they were timed apart."""
    share = limit.decode_ms / (limit.decode_ms + limit.verify_ms)
    phases: dict[str, float] = {}
    for name, ms in run.phases_ms.items():
        if name == "verify":
            phases["decode"] = ms * share
            ms -= phases["decode"]
        phases[name] = ms
    return replace(run, phases_ms=phases)


def _figures(
    shape: Shape, runs: Sequence[GroupRun], traffic: Traffic, peak: int | None, rates: dict[str, float]
) -> ArmFigures:
    ms = Spread.of([run.ms for run in runs])
    names = dict.fromkeys(name for run in runs for name in run.phases_ms)
    return ArmFigures(
        ms=ms,
        runs_ms=[run.ms for run in runs],
        phases_ms={name: Spread.of([run.phases_ms.get(name, 0.0) for run in runs]) for name in names},
        tokens_per_s=shape.tokens / ms.median * 1e3,
        cpu_s=Spread.of([run.cpu_s for run in runs]),
        calls=traffic.calls,
        bytes_read=traffic.bytes_read,
        bytes_written=traffic.bytes_written,
        peak_growth_bytes=peak,
        staging_rows_per_s=rates,
    )


def _workload(group: MadeGroup) -> Workload:
    shape = group.shape
    return Workload(
        rollouts=shape.rollouts,
        calls=shape.calls,
        prompt=shape.prompt,
        tool=shape.tool,
        generated=shape.generated,
        tokens=shape.tokens,
        group_bytes=sum(len(pack_call(call)) for call in group.all_calls),
    )


def _ratios(ours: dict[str, float], reference: dict[str, float]) -> dict[str, float]:
    return {name: rate / reference[name] for name, rate in ours.items()}


def _require_reference() -> None:
    """Say before anything is started that the reference arm can't run."""
    for module in ("torch", "orjson", "nemo_gym.token_id_capture.staging"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise CannotMeasure(
                f"the reference arm needs {module} ({error}); install it with "
                "`pip install torch orjson && pip install --no-deps --ignore-requires-python nemo-gym==0.7.0`, "
                "or measure without it: --no-reference"
            ) from error


def _reference_arm(plane: BenchPlane, *, tuned: bool) -> Arm:
    from rollout_reassembler.bench.reference import ReferenceArm
    from rollout_reassembler.bench.reference_rows import HeldRows, QueueRows

    return ReferenceArm(HeldRows() if plane == "memory" else QueueRows(), tuned=tuned)


def _reference_note(settings: BenchSettings) -> str:
    if not settings.reference:
        return "not run (--no-reference)"
    if settings.plane == "memory":
        return "nemo-gym's verifier over columns held in a dict: the memory plane has no queue to share"
    return "nemo-gym's verifier over TransferQueue's own key-value calls, on the queue that ours ran on"
