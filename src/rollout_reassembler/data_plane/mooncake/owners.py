"""The handles by which a driver commands those who own memory of the store.

    as_owner(actor)         a Ray actor with `mooncake_checkpoint(body)`: a memory host, or a reassembler
    PipeOwner(process)      a `reassemble mooncake-host --commands` that this process has started

A command is answered within its deadline or raises; what the owner raised arrives with its type.
"""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any, Protocol, runtime_checkable

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rollout_reassembler.contract import errors
from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneUnavailable, RequestError
from rollout_reassembler.data_plane.mooncake.participant import Participant
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, run_blocking


@runtime_checkable
class Owner(Protocol):
    """A process that may own memory, as the driver sees it."""

    def command(self, body: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Its answer; `None` when it owns no memory."""


def as_owner(handle: Any) -> Owner:
    """The handle itself if it is an owner, else one over a Ray actor's handle."""
    return handle if isinstance(handle, Owner) else ActorOwner(handle)


class ActorOwner:
    """A Ray actor that owns memory."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def command(self, body: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        site = CallSite(body["operation"])
        try:
            answer: dict[str, Any] | None = ray.get(self._actor.mooncake_checkpoint.remote(body), timeout=seconds)
        except GetTimeoutError as error:
            raise site.timeout(seconds, f"{self._actor} does not answer") from error
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise site.unavailable(f"{self._actor} is gone: {error}") from error
        return answer


class PipeOwner:
    """A memory host that is a child of this process, with pipes to its standard input and output."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._turn = threading.Lock()

    def command(self, body: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        with self._turn:
            reply = run_blocking(CallSite(body["operation"]), lambda: self._ask(body), seconds)
        if "error" not in reply:
            answer: dict[str, Any] = reply["answer"]
            return answer
        fields = reply["fields"]
        kind = getattr(errors, reply["error"])
        if issubclass(kind, DataPlaneError):
            raise kind(fields["what"], call=fields["call"], keys=fields["keys"])
        raise RequestError(fields["what"])

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        commands, answers = self._process.stdin, self._process.stdout
        if commands is None or answers is None:
            raise ValueError("a memory host that is commanded needs pipes: stdin=PIPE, stdout=PIPE, text=True")
        try:
            print(json.dumps(body), file=commands, flush=True)
            line = answers.readline()
        except OSError:
            line = ""
        if not line:
            what = f"the memory host of pid {self._process.pid} is gone"
            raise DataPlaneUnavailable(what, call=body["operation"])
        reply: dict[str, Any] = json.loads(line)
        return reply


class LocalOwner:
    """This process itself, where its client gives memory."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant

    def command(self, body: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        return run_blocking(CallSite(body["operation"]), lambda: self._participant.run(body), seconds)
