"""A bench's figures for people: one table of the arms, one of their phases, and the ratio."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollout_reassembler.bench.figures import ArmFigures, BenchReport

PHASE_ORDER = (
    *("guard", "admit", "fetch", "decode", "verify", "routes", "assemble"),
    *("record", "publish", "clear", "metrics", "other"),
)


def write_report(report: BenchReport, path: Path) -> None:
    """The report as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n", encoding="utf-8")


def print_report(report: BenchReport, console: Console) -> None:
    """The report as two tables, with the ratio and the limit below."""
    columns = {"ours": report.ours, "reference": report.reference, "tuned": report.reference_tuned}
    arms = {name: arm for name, arm in columns.items() if arm is not None}
    console.print(_figures_table(report, arms))
    console.print(_phases_table(arms))
    limit = report.hash_limit
    console.print(
        f"packed values → rows on one thread: {limit.tokens_per_s / 1e6:.1f} M tokens/s, [bold]{limit.fraction:.0%}[/] "
        f"of the {limit.sha256_tokens_per_s / 1e6:.1f} M that SHA-256 alone ({limit.sha256_gb_per_s:.2f} GB/s) allows"
    )
    if report.ratio is not None and report.staging_ratio is not None:
        staging = ", ".join(f"{ratio:.1f}× at {callers}" for callers, ratio in report.staging_ratio.items())
        console.print(
            f"[bold]ratio {report.ratio:.1f}×[/] (reference ÷ ours, ms a group), "
            f"{report.ratio_tuned:.1f}× with the reference tuned; staging {staging} concurrent"
        )
    console.print(f"reference: {report.reference_note}")
    load = ", ".join(f"{value:g}" for value in report.machine.load_average)
    console.print(f"{report.machine.cpus} CPUs, {report.machine.processor}; load average before the run {load}")


def ordered_phases(arm: ArmFigures) -> list[str]:
    """The arm's phases in the order in which a group meets them."""
    known = [name for name in PHASE_ORDER if name in arm.phases_ms]
    return known + [name for name in arm.phases_ms if name not in PHASE_ORDER]


def _figures_table(report: BenchReport, arms: dict[str, ArmFigures]) -> Table:
    work = report.workload
    title = (
        f"{report.shape} on the {report.plane} plane: {work.rollouts} rollouts × {work.calls} calls, "
        f"{work.tokens:,} tokens, {_megabytes(work.group_bytes)} staged; {report.repeat} groups"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("a group")
    for name in arms:
        table.add_column(name, justify="right")
    lines: list[tuple[str, Callable[[ArmFigures], str]]] = [
        ("ms, median", lambda arm: f"{arm.ms.median:,.1f}"),
        ("ms, p99", lambda arm: f"{arm.ms.p99:,.1f}"),
        ("tokens/s", lambda arm: f"{arm.tokens_per_s:,.0f}"),
        ("CPU s of this process", lambda arm: f"{arm.cpu_s.median:.3f}"),
        ("peak memory growth", lambda arm: _growth(arm.peak_growth_bytes, work.group_bytes)),
        ("read, written", lambda arm: f"{_megabytes(arm.bytes_read)}, {_megabytes(arm.bytes_written)}"),
        ("data-plane calls", lambda arm: ", ".join(f"{count} {kind}" for kind, count in arm.calls.items())),
    ]
    for title, figure in lines:
        table.add_row(title, *map(figure, arms.values()))
    for callers in report.ours.staging_rows_per_s:
        rates = (f"{arm.staging_rows_per_s[callers]:,.0f}" for arm in arms.values())
        table.add_row(f"rows staged/s, {callers} at a time", *rates)
    return table


def _phases_table(arms: dict[str, ArmFigures]) -> Table:
    table = Table(title="ms a phase, median (p99)", title_justify="left")
    table.add_column("phase")
    for name in arms:
        table.add_column(name, justify="right")
    for phase in dict.fromkeys(phase for arm in arms.values() for phase in ordered_phases(arm)):
        table.add_row(phase, *(_phase(arm, phase) for arm in arms.values()))
    return table


def _phase(arm: ArmFigures, name: str) -> str:
    spread = arm.phases_ms.get(name)
    return f"{spread.median:,.2f} ({spread.p99:,.2f})" if spread else "–"


def _growth(peak: int | None, group_bytes: int) -> str:
    return "not known here" if peak is None else f"{_megabytes(peak)} ({peak / group_bytes:.1f} × staged)"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
