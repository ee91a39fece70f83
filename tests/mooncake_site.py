"""A plane on a real Mooncake master, without Ray: each part a process of its own, for tests that kill them.

    site = MooncakeSite(queues, hosts=2)        # a controller, a master, memory hosts that obey commands
    plane = site.connect()
    site.hosts[0].kill()

`queues` is the host of plain queues (`data_plane/plain_queue.py`). All of it listens on loopback, and ends
with this process, or with `close`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rollout_reassembler.data_plane.config import DataPlaneConfig, Deadlines, MooncakeCpuBackendConfig
from rollout_reassembler.data_plane.mooncake.client import MooncakeDataPlane, mooncake_plane
from rollout_reassembler.data_plane.mooncake.connection import connect
from rollout_reassembler.data_plane.mooncake.master import start_master
from rollout_reassembler.data_plane.mooncake.owners import PipeOwner
from tests.data_plane.plain_queue import QueueHost, in_a_call, keys_of, server_info

SEGMENT = 256 << 20
DEADLINES = Deadlines(read=10, write=10, clear=10, metadata=10, connect=20, checkpoint=60, quiesced=20)


@dataclass
class Host:
    """A memory host: `reassemble mooncake-host --commands` as a child of this process."""

    process: subprocess.Popen[str]
    segment: str

    @property
    def owner(self) -> PipeOwner:
        return PipeOwner(self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stall(self) -> None:
        """Stop it without ending it."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def start_hosts(master: str, count: int, *, segment_size: int = SEGMENT) -> list[Host]:
    command = [sys.executable, "-m", "rollout_reassembler", "mooncake-host", "--commands"]
    command += ["--master", master, "--segment-size", str(segment_size), "--buffer-size", "64MiB"]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    return [Host(process, _segment(process)) for process in processes]


def _segment(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the memory host ended; its error is above"
    segment: str = json.loads(line)["ready"]["segment"]
    return segment


class MooncakeSite:
    """The processes of one plane."""

    def __init__(self, queues: QueueHost, *, hosts: int = 1, segment_size: int = SEGMENT) -> None:
        self.controller = queues.start_controller()
        self.master = start_master("127.0.0.1:0", 20)
        self.hosts = start_hosts(self.master.address, hosts, segment_size=segment_size)

    def config(self, deadlines: Deadlines = DEADLINES, **store: Any) -> DataPlaneConfig:
        settings = {"master_server_address": self.master.address, "local_buffer_size": 64 << 20, **store}
        return DataPlaneConfig(
            impl="transfer_queue",
            backend="mooncake_cpu",
            deadlines=deadlines,
            mooncake_cpu=MooncakeCpuBackendConfig(**settings),
        )

    def connect(
        self, deadlines: Deadlines = DEADLINES, *, owners: bool = True, started: ExitStack | None = None, **store: Any
    ) -> MooncakeDataPlane:
        """A client in this process; with `owners` it commands the memory hosts, with `started` it owns the plane."""
        cfg = self.config(deadlines, **store)
        address = self.controller.address
        plane = mooncake_plane(connect(cfg, cfg.mooncake_cpu, server_info(address), keys_of(address)), cfg, started)
        for host in self.hosts if owners else ():
            plane.add_owner(host.owner)
        return plane

    def set_numbers_aside(self, plane: MooncakeDataPlane) -> None:
        """What whoever starts a queue does."""
        in_a_call(plane, lambda call: plane._rows.controller.set_numbers_aside(call, 8192))

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        self.master.end()
        self.controller.kill()
