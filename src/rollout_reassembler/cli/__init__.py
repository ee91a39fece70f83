"""Floor 6: the `reassemble` command."""

from __future__ import annotations

from rollout_reassembler.cli.app import app


def main() -> None:
    """Entry point of the `reassemble` command."""
    app()
