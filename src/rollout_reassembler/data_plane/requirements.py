"""What a machine has of what something needs, and the fix for what it lacks: the lines of `reassemble doctor`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Finding:
    """One requirement: whether it is met, what was found, and what to do about it, one step a line."""

    name: str
    ok: bool
    found: str
    fixes: tuple[str, ...] = ()
    optional: bool = False


def importable(name: str, module: str, *fixes: str, of: str | None = None, optional: bool = False) -> Finding:
    """Whether `module` of the distribution `of` (its own name by default) can be imported."""
    try:
        importlib.import_module(module)
        return Finding(name, True, version(of or module), fixes, optional)
    except (ImportError, OSError, PackageNotFoundError) as error:
        return Finding(name, False, f"cannot be imported ({error})"[:120], fixes, optional)


def pip(extra: str) -> str:
    """How this distribution's extra is installed."""
    return f"pip install 'rollout-reassembler[{extra}]'"
