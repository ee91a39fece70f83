"""Figures as PNG: one plot a growth curve, and where a group's time goes in each shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from rollout_reassembler.bench.report import PHASE_ORDER

_INK, _SOFT, _GRID = "#1f4e79", "#9aa7b3", "#e3e7eb"
_PHASE_COLORS = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
_SIZE = (5.2, 3.4)
_DPI = 140


def plot_curve(curve: Mapping[str, Any], path: Path) -> None:
    """Milliseconds a group against the curve's dimension: of size beside a line of slope one, of concurrency from 0."""
    x = [point["x"] for point in curve["points"]]
    ms = [point["ms"]["median"] for point in curve["points"]]
    p99 = [point["ms"]["p99"] for point in curve["points"]]
    figure, axes = plt.subplots(figsize=_SIZE)
    axes.fill_between(x, ms, p99, color=_INK, alpha=0.15, linewidth=0, label="median to p99")
    axes.plot(x, ms, "o-", color=_INK, label="median")
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(at) for at in x])
    if curve["concurrent"]:
        axes.set_ylim(0, 1.15 * max(p99))
        axes.set_ylabel("ms of wall time a group")
    else:
        axes.plot(x, [ms[-1] * at / x[-1] for at in x], "--", color=_SOFT, linewidth=1, label="linear")
        axes.set_yscale("log")
        ticks = _nice_ticks(min(ms), max(p99))
        axes.set_yticks(ticks)
        axes.set_ylim(ticks[0], ticks[-1])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylabel("ms a group")
    axes.minorticks_off()
    axes.set_xlabel(f"{curve['x_label']} ({curve['held']})", fontsize=8)
    _finish(figure, axes, path)


def plot_phases(reports: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """A bar a shape: the share of each of our phases in the milliseconds of a group."""
    figure, axes = plt.subplots(figsize=(7.6, 2.6))
    colors: dict[str, Any] = {}
    for row, report in enumerate(reports.values()):
        found = report["ours"]["phases_ms"]
        phases = {name: found[name]["median"] for name in PHASE_ORDER if name in found}
        total, left = sum(phases.values()), 0.0
        for name, ms in phases.items():
            seen = name in colors
            color = colors.setdefault(name, _PHASE_COLORS[len(colors) % len(_PHASE_COLORS)])
            share = ms / total * 100
            axes.barh(row, share, left=left, color=color, label=None if seen else name)
            if share > 6:
                axes.text(left + share / 2, row, f"{ms:.1f}", ha="center", va="center", fontsize=7)
            left += share
    axes.set_yticks(range(len(reports)), list(reports))
    axes.invert_yaxis()
    axes.set_xlabel("% of a group's time (numbers: ms)")
    _finish(figure, axes, path, legend_columns=6)


def _finish(figure: Any, axes: Any, path: Path, *, legend_columns: int = 0) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if legend_columns:
        axes.legend(ncols=legend_columns, fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    else:
        axes.grid(color=_GRID)
        axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def _nice_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten that enclose `[low, high]`."""
    ticks = [step * 10.0**power for power in range(-1, 6) for step in (1, 2, 5)]
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    return [tick for tick in ticks if below <= tick <= above]
