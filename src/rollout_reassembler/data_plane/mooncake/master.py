"""A Mooncake master as a child of this process: started when asked, ended by its pid, and with its parent.

    master = start_master("127.0.0.1:0", seconds=20)      # a free port
    master.address
    master.end()

Between the two stands a keeper, this file run as a module, which ends the master when the pipe from
its own parent closes. So a driver that is killed leaves no master behind, and a terminal's Ctrl-C
does not reach the master before the driver has closed its plane.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rollout_reassembler.contract.errors import DataPlaneUnavailable
from rollout_reassembler.data_plane.ports import why_unreachable

_CALL = "bootstrap"
_POLL = 0.05
_END_SECONDS = 10.0


@dataclass
class Master:
    """A running master that this process started."""

    address: str
    keeper: subprocess.Popen[str]

    def end(self) -> None:
        """End it, with all that it knew. Safe to call twice."""
        if self.keeper.stdin is not None and not self.keeper.stdin.closed:
            self.keeper.stdin.close()
        try:
            self.keeper.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.keeper.kill()


def start_master(address: str, seconds: float) -> Master:
    """Start a master at `host:port`, and wait until it listens. Raises `DataPlaneUnavailable`, with its last words."""
    command = [sys.executable, "-m", __name__, address, str(seconds)]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    line = keeper.stdout.readline() if keeper.stdout is not None else ""
    report = json.loads(line) if line.startswith("{") else {"error": "its keeper ended"}
    if "error" in report:
        Master(address, keeper).end()
        raise DataPlaneUnavailable(f"the Mooncake master did not start at {address}: {report['error']}", call=_CALL)
    return Master(report["address"], keeper)


def _program() -> Path:
    package = importlib.util.find_spec("mooncake")
    if package is None or package.origin is None:
        raise DataPlaneUnavailable("Mooncake is not installed: pip install 'rollout-reassembler[mooncake]'", call=_CALL)
    return Path(package.origin).parent / "mooncake_master"


def _keep(address: str, seconds: float) -> None:
    """The keeper: report where the master listens, or why it does not, and end it when standard input ends."""
    host, _, port_text = address.rpartition(":")
    port = int(port_text) or _free_port(host)
    if why_unreachable(host, port, 1.0) is None:
        _report(error="something listens there already")
        return
    with tempfile.TemporaryFile() as log:
        command = [str(_program()), *_options(host, port)]
        master = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent
        )
        if not _comes_up(master, host, port, seconds):
            master.kill()
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-3:]
            _report(error=" ".join(last) or f"it does not listen after {seconds:g} s")
            return
        _report(address=f"{host}:{port}")
        sys.stdin.read()
        master.terminate()
        try:
            master.wait(_END_SECONDS / 2)
        except subprocess.TimeoutExpired:
            master.kill()


def _options(host: str, port: int) -> list[str]:
    options = {
        "rpc_address": host,
        "rpc_port": port,
        "metrics_host": host,
        "metrics_port": _free_port(host),
        "enable_metric_reporting": "false",
        # Nothing is ever dropped to make room: a row that was put stays until it is cleared.
        "eviction_high_watermark_ratio": 1.0,
        "eviction_ratio": 0.0,
    }
    return [f"-{name}={value}" for name, value in options.items()]


def _comes_up(master: subprocess.Popen[bytes], host: str, port: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while why_unreachable(host, port, 1.0) is not None:
        if master.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True


def _report(**fields: str) -> None:
    print(json.dumps(fields), flush=True)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    _keep(sys.argv[1], float(sys.argv[2]))
