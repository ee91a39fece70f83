"""Measure everything and write it into docs/performance.md: `python benchmarks/performance_doc.py`.

Runs `reassemble bench` in its three shapes and the growth curves, keeps their JSON and plots in
docs/img/, and replaces what is between `<!-- begin NAME -->` and `<!-- end NAME -->` in the page. The
text around the tables is written by hand; no figure in it is. `--tables-only` takes the JSON as it is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from plots import plot_curve, plot_phases
from rich.console import Console

from rollout_reassembler.bench.report import PHASE_ORDER

DOCS = Path(__file__).parent.parent / "docs"
SHAPES = ("small", "agentic", "long")
Report = Mapping[str, Any]


def refresh(
    page: Annotated[Path, typer.Option(help="The page to refresh.")] = DOCS / "performance.md",
    data: Annotated[Path, typer.Option(help="Folder for the JSON and the plots.")] = DOCS / "img",
    repeat: Annotated[int, typer.Option(min=1, help="Groups a figure.")] = 5,
    tables_only: Annotated[
        bool, typer.Option("--tables-only", help="Measure nothing; use the JSON in --data.")
    ] = False,
) -> None:
    """Refresh every figure of docs/performance.md."""
    console = Console()
    if not tables_only:
        _measure(data, repeat, console)
    reports = {shape: json.loads((data / f"bench-{shape}.json").read_text()) for shape in SHAPES}
    growth = json.loads((data / "growth.json").read_text())
    plot_phases(reports, data / "phases.png")
    for curve in growth["curves"]:
        plot_curve(curve, data / f"growth-{curve['name']}.png")
    page.write_text(with_tables(page.read_text(encoding="utf-8"), tables(reports, growth)), encoding="utf-8")
    console.print(f"refreshed {page}")


def _measure(data: Path, repeat: int, console: Console) -> None:
    """Each shape and the curves in a process of its own, as a user would run them."""
    here = Path(__file__).parent
    reassemble = [sys.executable, "-m", "rollout_reassembler"]
    for shape in SHAPES:
        console.rule(shape)
        file = data / f"bench-{shape}.json"
        _run([*reassemble, "bench", "--shape", shape, "--repeat", str(repeat), "--json", str(file)])
    console.rule("growth")
    _run([sys.executable, str(here / "growth.py"), "--out", str(data), "--repeat", str(repeat)])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, env={**os.environ, "COLUMNS": "110"})


def with_tables(text: str, content: Mapping[str, str]) -> str:
    """The page with each marked part replaced. Raises `LookupError` for a part that the page lacks."""
    for name, table in content.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise LookupError(f"the page has no `<!-- begin {name} -->` … `<!-- end {name} -->`")
        text = pattern.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)  # type: ignore[misc]
    return text


def tables(reports: Mapping[str, Report], growth: Report) -> dict[str, str]:
    """Every generated part of the page, as Markdown."""
    return {
        "machine": _machine(reports, growth),
        "ratios": _ratios(reports),
        "phases": _phases(reports, "ours"),
        "reference-phases": _phases(reports, "reference"),
        "calls": _calls(reports),
        "hashing": _hashing(reports),
        "staging": _staging(reports),
        "memory": _memory(reports),
        "growth": _growth(growth),
    }


def _machine(reports: Mapping[str, Report], growth: Report) -> str:
    machine = next(iter(reports.values()))["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    loads = [f"{name} {report['machine']['load_average'][0]:g}" for name, report in reports.items()]
    loads.append(f"growth {growth['load_average'][0]:g}")
    repeat = min(report["repeat"] for report in reports.values())
    return (
        f"{machine['cpus']} CPUs ({machine['processor']}), Python {machine['python']}, {versions}. Medians of {repeat} "
        f"groups. Load average before each run: {', '.join(loads)}."
    )


def _ratios(reports: Mapping[str, Report]) -> str:
    def line(report: Report) -> list[str]:
        ours, work = report["ours"], report["workload"]
        sizes = f"{work['rollouts']}×{work['calls']}; {work['prompt']}, {work['tool']}, {work['generated']}"
        return [
            f"{report['shape']} {sizes}",
            f"{work['tokens']:,}",
            _spread(ours["ms"]),
            _spread(report["reference"]["ms"]) if report["reference"] else "–",
            f"**{report['ratio']:.1f} ×**" if report["ratio"] else "–",
            _spread(report["reference_tuned"]["ms"]) if report["reference_tuned"] else "–",
            f"**{report['ratio_tuned']:.1f} ×**" if report["ratio_tuned"] else "–",
            f"{ours['tokens_per_s'] / 1e6:.2f} M",
            f"{ours['cpu_s']['median'] * 1e3:.0f} ms",
        ]

    head = [
        *("shape", "tokens a group", "ours, ms (p99)", "reference, ms (p99)", "ratio"),
        *("reference tuned, ms (p99)", "ratio", "tokens/s", "CPU a group"),
    ]
    return _table(head, [line(report) for report in reports.values()])


def _phases(reports: Mapping[str, Report], arm: str) -> str:
    arms = {shape: report[arm] for shape, report in reports.items() if report[arm]}
    names = [name for name in PHASE_ORDER if any(name in found["phases_ms"] for found in arms.values())]

    def cell(found: Report, name: str) -> str:
        spread = found["phases_ms"].get(name)
        return f"{spread['median']:.2f} ({spread['median'] / found['ms']['median']:.0%})" if spread else "–"

    rows = [[name, *(cell(found, name) for found in arms.values())] for name in names]
    return _table(["phase", *arms], rows)


def _calls(reports: Mapping[str, Report]) -> str:
    def cell(arm: Report | None) -> str:
        return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in arm["calls"].items()) if arm else "–"

    def moved(arm: Report | None) -> str:
        return f"{arm['bytes_read'] / 1e6:.2f}, {arm['bytes_written'] / 1e6:.2f}" if arm else "–"

    rows = [
        [shape, cell(report["ours"]), moved(report["ours"]), cell(report["reference"]), moved(report["reference"])]
        for shape, report in reports.items()
    ]
    return _table(["shape", "ours", "MB read, written", "reference", "MB read, written"], rows)


def _hashing(reports: Mapping[str, Report]) -> str:
    rows = []
    for shape, report in reports.items():
        limit = report["hash_limit"]
        rows.append(
            [
                shape,
                f"{limit['decode_ms']:.2f}",
                f"{limit['verify_ms']:.2f}",
                f"{limit['tokens_per_s'] / 1e6:.1f} M",
                f"{limit['sha256_tokens_per_s'] / 1e6:.1f} M ({limit['sha256_gb_per_s']:.2f} GB/s)",
                f"**{limit['fraction']:.0%}**",
            ]
        )
    return _table(["shape", "decode, ms", "verify, ms", "tokens/s", "SHA-256 alone", "reached"], rows)


def _staging(reports: Mapping[str, Report]) -> str:
    rows = []
    for shape, report in reports.items():
        for callers, rate in report["ours"]["staging_rows_per_s"].items():
            reference = report["reference"]["staging_rows_per_s"][callers] if report["reference"] else None
            ratio = f"**{rate / reference:.1f} ×**" if reference else "–"
            rows.append([shape, callers, f"{rate:,.0f}", f"{reference:,.0f}" if reference else "–", ratio])
    return _table(["shape", "callers at a time", "ours, rows/s", "reference, rows/s", "ratio"], rows)


def _memory(reports: Mapping[str, Report]) -> str:
    def cell(arm: Report | None, staged: int) -> str:
        peak = arm["peak_growth_bytes"] if arm else None
        return "–" if peak is None else f"{peak / 1e6:.1f} MB ({peak / staged:.1f} ×)"

    rows = []
    for shape, report in reports.items():
        staged = report["workload"]["group_bytes"]
        rows.append([shape, f"{staged / 1e6:.1f} MB", cell(report["ours"], staged), cell(report["reference"], staged)])
    return _table(["shape", "staged bytes", "ours, peak growth", "reference, peak growth"], rows)


def _growth(growth: Report) -> str:
    rows = []
    for curve in growth["curves"]:
        points = ", ".join(f"{point['x']}: {point['ms']['median']:.1f}" for point in curve["points"])
        rows.append([curve["x_label"], curve["held"], points, f"{curve['exponent']:.2f}"])
    return _table(["against", "held", "ms a group", "exponent"], rows)


def _spread(spread: Report) -> str:
    return f"{spread['median']:,.1f} ({spread['p99']:,.1f})"


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


if __name__ == "__main__":
    typer.run(refresh)
