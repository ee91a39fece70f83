"""`reassemble doctor`: what this machine has of what the system needs, and the fix for what it lacks."""

from __future__ import annotations

import ctypes.util
import importlib
import os
import sys
import textwrap
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

TESTED = {"torch": "2.13.0", "ray": "2.60.0", "TransferQueue": "0.1.11", "mooncake": "0.3.13.post1"}

_WIDTH = 80
_APT_IBVERBS = "apt-get install libibverbs1"


@dataclass(frozen=True)
class Finding:
    """One requirement: whether it is met, what was found, and what to do about it, one step a line."""

    name: str
    ok: bool
    found: str
    fixes: tuple[str, ...] = ()
    optional: bool = False


def examine() -> list[Finding]:
    """All requirements, in the order in which they are needed."""
    checks = (_python, _cpus, _arrow, _torch, _transformers, _ray, _transfer_queue, _ibverbs, _mooncake)
    return [check() for check in checks]


def verdict(finding: Finding) -> str:
    """A finding in a line, and below it the fix for what is missing, whole, so that it can be copied."""
    mark = "ok" if finding.ok else "optional" if finding.optional else "missing"
    fits = textwrap.wrap(
        f"{mark:<9}{finding.name:<14}{finding.found}", _WIDTH, subsequent_indent=" " * 23, break_on_hyphens=False
    )
    return "\n".join(fits if finding.ok else [*fits, *(f"    {fix}" for fix in finding.fixes)])


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", sys.version_info >= (3, 11), found, ("install Python 3.11 or newer, then: make venv",))


def _cpus() -> Finding:
    cpus = len(os.sched_getaffinity(0))
    return Finding("CPUs", cpus >= 2, str(cpus), ("give the machine 2 CPUs; with one, use --plane memory",))


def _torch() -> Finding:
    return _importable("torch", "torch", _pip("ray"))


def _ray() -> Finding:
    return _importable("Ray", "ray", _pip("ray"), "or, without it, use --plane memory")


def _transfer_queue() -> Finding:
    """The adapter uses parts of TransferQueue that are not public, so its version counts exactly."""
    fix = f"pip install TransferQueue=={TESTED['TransferQueue']}"
    try:
        found = version("TransferQueue")
    except PackageNotFoundError:
        return Finding("TransferQueue", False, "not installed", (fix,))
    return Finding("TransferQueue", found == TESTED["TransferQueue"], found, (fix,))


def _ibverbs() -> Finding:
    found = ctypes.util.find_library("ibverbs")
    return Finding("libibverbs", bool(found), found or "not found", (_APT_IBVERBS,), optional=True)


def _mooncake() -> Finding:
    fixes = _APT_IBVERBS, _pip("mooncake")
    return _importable("Mooncake", "mooncake.store", *fixes, of="mooncake-transfer-engine-non-cuda", optional=True)


def _arrow() -> Finding:
    return _importable("pyarrow", "pyarrow", _pip("archive"))


def _transformers() -> Finding:
    return _importable("transformers", "transformers", _pip("demo"))


def _pip(extra: str) -> str:
    return f"pip install 'rollout-reassembler[{extra}]'"


def _importable(name: str, module: str, *fixes: str, of: str | None = None, optional: bool = False) -> Finding:
    """Whether `module` of the distribution `of` (its own name by default) can be imported."""
    try:
        importlib.import_module(module)
        return Finding(name, True, version(of or module), fixes, optional)
    except (ImportError, OSError, PackageNotFoundError) as error:
        return Finding(name, False, f"cannot be imported ({error})"[:120], fixes, optional)
