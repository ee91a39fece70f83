"""How a command ends: its exit code, and one line for whoever called it.

A fault that the caller, the machine or the cluster can have is a line on standard error. Anything else is a
fault of this package and keeps its traceback. The codes are those of `EXIT_CODES`, which `--help` shows.
"""

from __future__ import annotations

import errno
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

import typer
from rich.console import Console

from rollout_reassembler.contract.errors import (
    BadArchive,
    GroupConflict,
    MissingExtra,
    ReassemblerError,
    RequestError,
)

complaints = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


class ExitCode(IntEnum):
    """What a command's exit code says."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    ALL_REJECTED = 3
    INTERRUPTED = 130
    TERMINATED = 143


EXIT_CODES = "\n\n".join(
    (
        "Exit codes (a fault is one line on standard error):",
        "0 done",
        "1 it failed: a proof, the data plane, a full disk, a machine that doctor finds unfit",
        "2 it did not begin: an option, a path, an archive, something that is not installed",
        "3 run: every rollout was rejected, and --allow-rejected was not given",
        "130 interrupted (Ctrl-C), 143 terminated",
    )
)

_CALLERS_PATHS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_SHARED_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")


@contextmanager
def in_one_line() -> Iterator[None]:
    """Around a command: a fault that is not ours ends it with a line and its exit code."""
    try:
        yield
    except (BadArchive, GroupConflict, MissingExtra, RequestError) as error:
        raise complain(str(error)) from None
    except ReassemblerError as error:
        is_missing = isinstance(error.__cause__, ImportError)
        raise complain(str(error), ExitCode.REFUSED if is_missing else ExitCode.FAILED) from None
    except ImportError as error:
        library = _SHARED_LIBRARY.search(str(error))
        if library is None:
            raise
        raise complain(f"the system library {library[1]} is missing; install the package that holds it") from None
    except BrokenPipeError:
        raise
    except OSError as error:
        begun = not isinstance(error, (*_CALLERS_PATHS, ConnectionError)) and error.errno != errno.EROFS
        raise complain(_os_fault(error), ExitCode.FAILED if begun else ExitCode.REFUSED) from None
    except KeyboardInterrupt:
        raise complain("interrupted", ExitCode.INTERRUPTED) from None


def complain(message: str, code: ExitCode = ExitCode.REFUSED) -> typer.Exit:
    """Say in one line why the command ends; what to raise."""
    complaints.print(f"reassemble: {' '.join(message.split())}")
    return typer.Exit(code)


def _os_fault(error: OSError) -> str:
    if error.errno is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """A SIGTERM ends this process as an exception does, so that what it began is undone."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(ExitCode.TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
