"""`reassemble doctor`: what this machine has of what the system needs, and the fix for what it lacks."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence

from rollout_reassembler.data_plane import backends
from rollout_reassembler.data_plane.requirements import Finding, importable, pip

_WIDTH = 80


def examine() -> list[Finding]:
    """All requirements, among them those of each data plane that is installed."""
    return [_python(), _cpus(), _arrow(), *(it for name in backends.names() for it in _plane(name)), _transformers()]


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


def _arrow() -> Finding:
    return importable("pyarrow", "pyarrow", pip("archive"))


def _transformers() -> Finding:
    return importable("transformers", "transformers", pip("demo"))


def _plane(name: str) -> Sequence[Finding]:
    """What a data plane needs; also that it can be imported at all, which is another distribution's affair."""
    try:
        return backends.require(name).checks()
    except (ImportError, TypeError) as error:
        what = f"cannot be imported ({error})"[:120]
        return [Finding(name, False, what, ("install its distribution anew",), optional=True)]
