"""`reassemble mooncake-host`: give this machine's memory to a Mooncake store until told to end."""

from __future__ import annotations

import json
import signal
import sys

from rich.console import Console

from rollout_reassembler.data_plane.config import MooncakeCpuBackendConfig


def run_host(cfg: MooncakeCpuBackendConfig, *, commands: bool, console: Console) -> None:
    """Own a segment until a signal comes, or with `commands` until standard input ends.

    Raises `DataPlaneUnavailable` when the master cannot be reached.
    """
    from rollout_reassembler.data_plane.mooncake.host import MemoryHost, serve_commands

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: sys.exit(0))
    host = MemoryHost(cfg)
    try:
        if commands:
            print(json.dumps({"ready": {"segment": host.segment, "size": cfg.global_segment_size}}), flush=True)
            serve_commands(host, sys.stdin, sys.stdout)
        else:
            console.print(f"segment {host.segment} of {cfg.global_segment_size} bytes is in the store; Ctrl-C ends it")
            while True:
                signal.pause()
    finally:
        host.close()
