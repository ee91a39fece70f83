"""Processes that die at work: a host that has imported everything, and forks one for each job.

    host = VictimHost()                                 # takes the seconds of an import
    end = host.run(Finalize(queue, group, die_at=(7, "before")))
    end.was_killed, end.said

A victim connects to a queue of its own accord, as any worker does, and says what it has to say by
`say`: what was said before the victim died has arrived. All victims end with their host.
"""

from __future__ import annotations

import base64
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_reassembler.contract.records import StagedCall
from rollout_reassembler.data_plane.config import Deadlines
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.sink import StagingSink
from tests.captures import STAGING, chain
from tests.data_plane.plain_queue import PlainQueue
from tests.scenarios.faults.groups import Group
from tests.scenarios.faults.requests import Death, Requests

DEADLINES = Deadlines(read=20, write=20, clear=20, metadata=20, connect=20, checkpoint=20)

Say = Callable[[Any], None]


class Job(Protocol):
    """What a victim does. Crosses to the host as a pickle."""

    @property
    def kill_at(self) -> tuple[int, float] | None:
        """The host kills the victim so many seconds behind its so-many-eth word; `None` leaves it alone."""

    def work(self, say: Say) -> None: ...


@dataclass(frozen=True)
class End:
    """How a victim ended, and what it had said."""

    status: int
    said: list[Any]

    @property
    def was_killed(self) -> bool:
        return self.status == -signal.SIGKILL


@dataclass(frozen=True)
class Finalize:
    """Finalizes one group; says its answer, and the requests that it took."""

    queue: PlainQueue
    group: Group
    die_at: Death | None = None
    kill_at: None = None

    def work(self, say: Say) -> None:
        plane = self.queue.connect(DEADLINES)
        requests = Requests(plane)
        requests.die_at(self.die_at)
        say((self.group.finalize(plane), requests.steps))


@dataclass(frozen=True)
class Stage:
    """Stages three calls of each rollout, from many threads at once; says the key of each that is durable."""

    queue: PlainQueue
    rollout_ids: list[str]
    kill_at: tuple[int, float] | None = None
    threads: int = 16

    def work(self, say: Say) -> None:
        sink = StagingSink(self.queue.connect(DEADLINES), staging_partition=STAGING)
        calls = [call for rollout_id in self.rollout_ids for call in chain(rollout_id).calls]

        def stage(call: StagedCall) -> None:
            result = sink.stage(call)
            assert result.ok, result.error
            say(place_of(call))

        say("begin")
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(stage, calls))


class VictimHost:
    """The process that forks victims, one at a time. Several hosts work side by side."""

    def __init__(self, **env: str) -> None:
        command = [sys.executable, "-c", "from tests.scenarios.faults import victims; victims.serve()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
        )

    def run(self, job: Job) -> End:
        """How the job ended. Raises what it raised."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(_encoded(job), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(_MARK):
                end: End = _decoded(line)
                if end.said and isinstance(end.said[-1], BaseException):
                    raise end.said[-1]
                return end
        raise RuntimeError("the host of the victims ended; its error is above")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


_MARK = "> "


def _encoded(value: Any) -> str:
    return _MARK + base64.b64encode(pickle.dumps(value)).decode()


def _decoded(line: str) -> Any:
    return pickle.loads(base64.b64decode(line.removeprefix(_MARK)))


def serve() -> None:
    """The host: a job a line of standard input, an end a line of standard output."""
    # Imported before any fork, and no thread started.
    from rollout_reassembler.data_plane.transfer_queue import connection  # noqa: F401

    for line in sys.stdin:
        print(_encoded(_end_of(_decoded(line))), flush=True)


def _end_of(job: Job) -> End:
    """Fork a victim, listen to it, kill it when it is due, and wait for it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            job.work(lambda word: _write(writer, _encoded(word) + "\n"))
        except BaseException as error:
            _write(writer, _encoded(error) + "\n")
            os._exit(1)
        os._exit(0)
    os.close(writer)
    heard = b"".join(_heard(reader, pid, job.kill_at))
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    lines = heard.decode().split("\n")[:-1]
    return End(status, [_decoded(line) for line in lines])


def _heard(reader: int, pid: int, kill_at: tuple[int, float] | None) -> Iterator[bytes]:
    """All that the victim says, until it ends; kills it when it is due."""
    words, due = 0, None
    while True:
        wait = None if due is None else max(0.0, due - time.monotonic())
        if not select.select([reader], [], [], wait)[0]:
            os.kill(pid, signal.SIGKILL)
            kill_at = due = None
            continue
        part = os.read(reader, 1 << 16)
        if not part:
            return
        yield part
        words += part.count(b"\n")
        if due is None and kill_at is not None and words >= kill_at[0]:
            due = time.monotonic() + kill_at[1]


def _write(fd: int, text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(fd, data) :]
