"""The `reassemble` command."""

from __future__ import annotations

from rollout_reassembler.cli.app import app
from rollout_reassembler.cli.faults import ended_by_signals


def main() -> None:
    """Entry point of the `reassemble` command."""
    with ended_by_signals():
        app()
