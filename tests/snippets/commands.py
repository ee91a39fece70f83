"""Command lines as documents show them, held against what the commands take."""

from __future__ import annotations

import copy
import re
import shlex
from typing import Any

import typer

from rollout_reassembler.cli.app import app
from tests.snippets.pages import ROOT

OTHER_PROGRAMS = {".", "apt-get", "cd", "docker", "git", "helm", "kubectl", "pip", "python", "ray", "ruff", "uv"}
"""Programs that documents may name, and that are not ours to check."""

_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
_VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
_GROUP: Any = typer.main.get_command(app)


def check(line: str, *, whole: bool) -> None:
    """Raise `ValueError` for a command line that its program would not take; one that is not `whole` may lack parts."""
    program, *arguments = shlex.split(line, comments=True)
    if program == "reassemble":
        _check_ours(line, arguments, whole)
    elif program == "make":
        for argument in arguments:
            name, is_variable, _ = argument.partition("=")
            if name not in (_VARIABLES if is_variable else _TARGETS):
                raise ValueError(f"the Makefile has no {name!r}: {line}")
    elif program not in OTHER_PROGRAMS:
        raise ValueError(f"{program!r} is no program that documents are known to name: {line}")


def _check_ours(line: str, arguments: list[str], whole: bool) -> None:
    """Parsed as the command line is, by the command itself, which then does nothing. Files need not be there."""
    if arguments and arguments[0] not in _GROUP.commands:
        raise ValueError(f"there is no command {arguments[0]!r}, there are {', '.join(_GROUP.commands)}: {line}")
    command = copy.copy(_GROUP.commands[arguments[0]])
    command.callback = lambda **_: None
    try:
        command.main(arguments[1:], prog_name=arguments[0], standalone_mode=False)
    except Exception as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        is_forgiven = message.endswith("does not exist.") or (not whole and message.startswith("Missing"))
        if not is_forgiven:
            raise ValueError(f"{message}: {line}") from error
