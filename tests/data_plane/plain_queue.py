"""A real TransferQueue without Ray: its controller and its storage unit, a process each, for tests that kill them.

    host = QueueHost()                      # imports the queue once, which takes seconds
    queue = host.start_queue()              # forks two processes, which takes half a second
    plane = queue.connect(deadlines)
    queue.controller.kill()

The classes are the ones that Ray would run as actors, with keys as a plane on one machine has them. Run as a module
this file is the host: for each line of its standard input it forks a server, which prints where it listens.
All end with their parent.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollout_reassembler.data_plane.config import DataPlaneConfig, Deadlines
from rollout_reassembler.data_plane.transfer_queue.client import QueueDataPlane, queue_plane
from rollout_reassembler.data_plane.transfer_queue.keys import Keys

T = TypeVar("T")


@dataclass
class Server:
    """One process of the queue, and where it listens."""

    pid: int
    address: dict[str, Any]
    is_dead: bool = False

    def kill(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            os.kill(self.pid, signal.SIGKILL)

    def stall(self) -> None:
        """Stop it without ending it: its sockets stay open, nothing answers. Returns when every thread stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        threads = list(Path(f"/proc/{self.pid}/task").iterdir())
        while not all("\nState:\tT" in (thread / "status").read_text() for thread in threads):
            time.sleep(0.01)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@dataclass
class PlainQueue:
    controller: Server
    unit: Server

    def connect(self, deadlines: Deadlines) -> QueueDataPlane:
        from rollout_reassembler.data_plane.transfer_queue.connection import connect_sockets

        cfg = DataPlaneConfig(impl="transfer_queue", deadlines=deadlines)
        controller, unit = server_info(self.controller.address), server_info(self.unit.address)
        connected = connect_sockets(controller, {"unit": unit}, deadlines.connect, keys_of(self.controller.address))
        return queue_plane(connected, cfg)

    def stop(self) -> None:
        self.controller.kill()
        self.unit.kill()


class QueueHost:
    """The process that starts queues. `keys` are those of the next one; `None` opens it to everybody."""

    def __init__(self) -> None:
        self.keys: Keys | None = Keys.fresh("plain")
        self._orders = 0
        command = [sys.executable, "-m", "tests.data_plane.plain_queue"]
        env = {**os.environ, "TQ_LOGGING_LEVEL": "CRITICAL"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def start_queue(self, *, capacity: int | None = None) -> PlainQueue:
        """`capacity` is how many rows the storage unit takes."""
        return PlainQueue(self._start({"kind": "controller"}), self._start({"kind": "unit", "capacity": capacity}))

    def start_controller(self) -> Server:
        """A controller alone, for rows whose values are elsewhere."""
        return self._start({"kind": "controller"})

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def _start(self, order: dict[str, Any]) -> Server:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders += 1
        keys = with_keys({}, self.keys)["keys"]
        print(json.dumps({**order, "keys": keys, "order": self._orders}), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            answer = json.loads(line) if line.startswith("{") else {}
            if answer.get("order") != self._orders:  # a late one, to a test that gave up
                continue
            if "failed" in answer:
                raise RuntimeError(f"the queue did not start: {answer['failed']}")
            return Server(answer["pid"], {**answer, "keys": keys})
        raise RuntimeError("the host of the queue ended; its error is above")


def in_a_call(plane: Any, work: Callable[[Any], T]) -> T:
    """What `work` does with the inside of a connected plane, as one call of it."""
    from rollout_reassembler.data_plane.transfer_queue.calls import CallSite

    with plane._rows.sockets.call(CallSite("test"), 10.0) as call:
        return work(call)


def hide(plane: Any, meta: Any) -> None:
    """The first step of a clear that stops then."""
    from transfer_queue.utils.zmq_utils import ZMQRequestType

    rows = {"global_indexes": meta.global_indexes, "partition_ids": meta.partition_ids}
    in_a_call(plane, lambda call: call.ask(plane._rows.controller.peer, ZMQRequestType.MARK_CLEARING, rows))


def server_info(address: dict[str, Any]) -> Any:
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    return ZMQServerInfo(Role(address["role"]), address["id"], address["ip"], address["ports"])


def keys_of(address: dict[str, Any]) -> Keys | None:
    """What a client of this server presents."""
    keys: Keys | None = pickle.loads(base64.b64decode(address["keys"]))
    return keys


def with_keys(address: dict[str, Any], keys: Keys | None) -> dict[str, Any]:
    """The same server, for a client that presents these."""
    return {**address, "keys": base64.b64encode(pickle.dumps(keys)).decode()}


def _host() -> None:
    # Imported before any fork, and no thread started.
    from rollout_reassembler.data_plane.transfer_queue import servers  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            order = json.loads(line)
            try:
                _serve(**order)
            except Exception as error:  # told to the test; the child must not go on as a second host
                print(json.dumps({"order": order["order"], "failed": repr(error)}), flush=True)
            os._exit(1)


def _serve(order: int, kind: str, keys: str, capacity: int | None = None) -> None:
    from rollout_reassembler.data_plane.transfer_queue.servers import Controller, StorageUnit

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    server: Any
    if kind == "controller":
        server = Controller(keys_of({"keys": keys}))
    else:
        config = {"num_data_storage_units": 1, "total_storage_size": capacity}
        server = StorageUnit(keys_of({"keys": keys}), config)
    info = server.get_zmq_server_info()
    address = {"role": info.role.value, "id": info.id, "ip": info.ip, "ports": info.ports}
    print(json.dumps({**address, "pid": os.getpid(), "order": order}), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    _host()
