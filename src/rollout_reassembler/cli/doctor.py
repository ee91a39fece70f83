"""`reassemble doctor`: what this machine has of what the system needs, and the fix for what it lacks."""

from __future__ import annotations

import ctypes.util
import importlib
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rich.table import Table

TESTED = {"torch": "2.13.0", "ray": "2.60.0", "TransferQueue": "0.1.11", "mooncake": "0.3.13.post1"}


@dataclass(frozen=True)
class Finding:
    """One requirement: whether it is met, what was found, and what to do about it."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    optional: bool = False


def examine() -> list[Finding]:
    """All requirements, in the order in which they are needed."""
    return [check() for check in (_python, _cpus, _torch, _ray, _transfer_queue, _ibverbs, _mooncake)]


def verdict_table(findings: list[Finding]) -> Table:
    """One line a finding."""
    table = Table(show_header=False, box=None)
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[yellow]optional[/]" if finding.optional else "[red]missing[/]"
        table.add_row(mark, finding.name, finding.found, "" if finding.ok else f"fix: {finding.fix}")
    return table


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", sys.version_info >= (3, 11), found, "install Python 3.11 or newer, then `make venv`")


def _cpus() -> Finding:
    cpus = len(os.sched_getaffinity(0))
    return Finding("CPUs", cpus >= 2, str(cpus), "give the machine 2 CPUs; with one, use --plane memory")


def _torch() -> Finding:
    return _importable("torch", "torch", f"pip install torch=={TESTED['torch']}")


def _ray() -> Finding:
    return _importable("Ray", "ray", "pip install 'rollout-reassembler[ray]'; without it, use --plane memory")


def _transfer_queue() -> Finding:
    """The adapter uses parts of TransferQueue that are not public, so its version counts exactly."""
    fix = f"pip install TransferQueue=={TESTED['TransferQueue']}"
    try:
        found = version("TransferQueue")
    except PackageNotFoundError:
        return Finding("TransferQueue", False, "not installed", fix)
    return Finding("TransferQueue", found == TESTED["TransferQueue"], found, fix)


def _ibverbs() -> Finding:
    found = ctypes.util.find_library("ibverbs")
    return Finding("libibverbs", bool(found), found or "not found", "apt-get install libibverbs1", optional=True)


def _mooncake() -> Finding:
    fix = "apt-get install libibverbs1, then pip install 'rollout-reassembler[mooncake]'"
    return _importable("Mooncake", "mooncake.store", fix, "mooncake-transfer-engine-non-cuda", optional=True)


def _importable(
    name: str, module: str, fix: str, distribution: str | None = None, *, optional: bool = False
) -> Finding:
    try:
        importlib.import_module(module)
        return Finding(name, True, version(distribution or module), fix, optional)
    except (ImportError, OSError, PackageNotFoundError) as error:
        return Finding(name, False, f"cannot be imported ({error})"[:120], fix, optional)
