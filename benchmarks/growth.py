"""Growth curves: `python benchmarks/growth.py` writes `growth.json` and a PNG a curve to docs/img/."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from curves import Curve, measure_growth
from plots import plot_curve
from rich.console import Console
from rich.table import Table

from rollout_reassembler.cli.app import BenchPlane

OUT = Path(__file__).parent.parent / "docs" / "img"
GROWTH_FILE = "growth.json"


def growth(
    out: Annotated[Path, typer.Option(help="Folder for growth.json and the plots.")] = OUT,
    plane: Annotated[BenchPlane, typer.Option(help="Where rows live.")] = BenchPlane.simple,
    repeat: Annotated[int, typer.Option(min=1, help="Groups a point; medians want at least 5.")] = 5,
    most: Annotated[int, typer.Option(min=1, help="Leave out the steps of a dimension above this.")] = 1 << 20,
) -> None:
    """Measure how the time of a group grows with calls, tokens, rollouts, groups in flight and actors."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    with console.status("") as status:
        measured = measure_growth(plane.value, repeat=repeat, most=most, progress=status.update)
    content = dataclasses.asdict(measured)
    (out / GROWTH_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for curve in content["curves"]:
        plot_curve(curve, out / f"growth-{curve['name']}.png")
    console.print(_table(measured.curves))
    console.print(f"plots and {GROWTH_FILE} in {out}; load average before the run {measured.load_average}")


def _table(curves: list[Curve]) -> Table:
    table = Table(title="median ms a group", title_justify="left")
    for name in ("against", "x: ms", "exponent"):
        table.add_column(name, justify="right" if name == "exponent" else "left", overflow="fold")
    for curve in curves:
        points = "  ".join(f"{point.x}: {point.ms.median:.1f}" for point in curve.points)
        table.add_row(curve.x_label, points, f"{curve.exponent:.2f}")
    return table


if __name__ == "__main__":
    typer.run(growth)
