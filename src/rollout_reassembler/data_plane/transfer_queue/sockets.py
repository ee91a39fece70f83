"""Requests that end: every wait of this adapter for another process is in this file.

A request goes down a blocking DEALER socket, its answer comes up the same one. Answers do not say which
request they belong to, so a socket serves one call at a time, and its answers are taken in the order of the
requests. A call that ends with an answer outstanding closes that socket: no later call meets a late answer.

    with sockets.call(site, seconds) as call:                    one deadline for all of its round trips
        numbered = call.ask(controller, …)                       a round trip
        tagged, stored = call.send(controller, …), call.send(unit, …)
        tagged.body(), stored.body()                             two round trips at the same time

ZeroMQ never reports a lost peer. So while a request waits, its peer is knocked at once a second: one that
refuses connections is dead, and the call ends then, long before its deadline.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

import zmq
from transfer_queue.utils.zmq_utils import (
    STORAGE_MANAGER_IDENTITY_PREFIX,
    ZMQMessage,
    ZMQRequestType,
    format_zmq_address,
    is_ipv6_address,
)

from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, Peer

T = TypeVar("T")

_LOOK_EVERY = 0.25
_KNOCK_EVERY = 1.0
_KNOCK_TIMEOUT = 2.0
_IDLE_SOCKETS = 8
"""So many unused sockets are kept for each peer; a call that needs another one opens it."""

_FULL = "capacity exceeded"


class Refusal(Exception):
    """A peer answered that it did not do what it was asked to; the message is its own."""


class _Context(zmq.Context[Any]):
    """This process's I/O threads. Never ended: that waits for every socket, also for one that nobody will close."""


class QueueSockets:
    """This process's connections to the processes of one queue. Thread-safe: each call runs in its caller's thread."""

    def __init__(self) -> None:
        # Storage units drop what comes from a socket of another name; a controller takes any.
        self.name = f"{STORAGE_MANAGER_IDENTITY_PREFIX}reassembler_{os.getpid()}_{uuid4().hex[:8]}"
        self.is_closed = False
        self._idle: dict[Peer, list[_Line]] = defaultdict(list)
        self._numbers = itertools.count()
        self._running = 0
        self._changed = threading.Condition()

    @contextmanager
    def call(self, site: CallSite, seconds: float) -> Iterator[Call]:
        """A call under way, for at most `seconds` in all.

        Raises `DataPlaneTimeout` when they are over, `DataPlaneUnavailable` as soon as a peer refuses
        connections, and a `Refusal` that nobody took as a `DataPlaneError` with the peer's words.
        """
        call = Call(self, site, seconds)
        with self._changed:
            if self.is_closed:
                raise site.unavailable("this client was closed")
            self._running += 1
        try:
            yield call
        except Refusal as refusal:
            if _FULL in str(refusal):
                raise site.failed(f"the queue is full; clear rows or raise total_storage_size: {refusal}") from refusal
            raise site.failed(str(refusal)) from refusal
        except zmq.ZMQError as error:
            raise site.unavailable(f"the connection failed: {error}") from error
        finally:
            self._end(call)

    def open(self, peer: Peer) -> _Line:
        """A connection to `peer` that nobody else uses."""
        with self._changed:
            if self._idle[peer]:
                return self._idle[peer].pop()
        dealer = _Context.instance().socket(zmq.DEALER)
        dealer.linger = 0
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.ipv6 = is_ipv6_address(peer.host)
        dealer.identity = f"{self.name}_{next(self._numbers)}".encode()
        dealer.connect(format_zmq_address(peer.host, peer.port))
        return _Line(peer, dealer)

    def close(self, seconds: float) -> None:
        """Refuse new calls and end those that are under way; returns once they have ended, or after `seconds`."""
        with self._changed:
            self.is_closed = True
            self._changed.wait_for(lambda: self._running == 0, seconds)
            for line in itertools.chain(*self._idle.values()):
                line.dealer.close()
            self._idle.clear()

    def _end(self, call: Call) -> None:
        with self._changed:
            for line in call.lines.values():
                idle = self._idle[line.peer]
                if line.outstanding or self.is_closed or len(idle) >= _IDLE_SOCKETS:
                    line.dealer.close()
                else:
                    idle.append(line)
            self._running -= 1
            self._changed.notify_all()


@dataclass(frozen=True, eq=False)
class _Line:
    """A socket that is connected to a peer, and the answers that are to come up it."""

    peer: Peer
    dealer: zmq.Socket[bytes]
    outstanding: deque[Reply] = field(default_factory=deque)


class Call:
    """One data-plane call: its round trips, under one deadline. Belongs to the thread that made it."""

    def __init__(self, sockets: QueueSockets, site: CallSite, seconds: float) -> None:
        self.site = site
        self.lines: dict[Peer, _Line] = {}
        self._sockets = sockets
        self._seconds = seconds
        self._started = self._knocked = time.monotonic()

    def send(self, peer: Peer, request: ZMQRequestType, expected: ZMQRequestType, body: dict[str, Any]) -> Reply:
        """Send a request; its answer, of the expected kind, is taken later. A peer serves requests in their order."""
        line = self.lines.get(peer)
        if line is None:
            line = self.lines[peer] = self._sockets.open(peer)
        message = ZMQMessage.create(request, self._sockets.name, body, receiver_id=peer.id)
        reply = Reply(self, line, expected)
        line.outstanding.append(reply)
        line.dealer.send_multipart(message.serialize(), copy=False)
        return reply

    def ask(
        self, peer: Peer, request: ZMQRequestType, expected: ZMQRequestType, body: dict[str, Any]
    ) -> dict[str, Any]:
        """The body of the answer to a request. Raises `Refusal`."""
        return self.send(peer, request, expected, body).body()

    def receive(self, line: _Line) -> list[zmq.Frame]:
        """The next message up a line."""
        while not line.dealer.poll(math.ceil(1e3 * self._patience())):
            self._look_at(line.peer)
        return line.dealer.recv_multipart(copy=False)

    def wait_for(self, work: Future[T], peer: Peer) -> T:
        """The result of work in another thread, which `peer` may keep waiting for ever."""
        while not wait((work,), self._patience()).done:
            self._look_at(peer)
        return work.result()

    def _patience(self) -> float:
        """How long to wait before the next look at the clock and at the peer, in seconds."""
        return min(_LOOK_EVERY, max(0.0, self._started + self._seconds - time.monotonic()))

    def _look_at(self, peer: Peer) -> None:
        """Raise unless the client is open, there is time left and, once a second, the peer still listens."""
        if self._sockets.is_closed:
            raise self.site.unavailable("this client was closed during the call")
        now = time.monotonic()
        if now >= self._started + self._seconds:
            raise self.site.timeout(self._seconds, f"no answer from {peer} within the deadline")
        if now - self._knocked >= _KNOCK_EVERY:
            self._knocked = now
            if peer.is_refusing(min(_KNOCK_TIMEOUT, self._started + self._seconds - now)):
                raise self.site.unavailable(f"{peer} is gone: it refuses connections", now - self._started)


class Reply:
    """The answer to a request that is on its way."""

    def __init__(self, call: Call, line: _Line, expected: ZMQRequestType) -> None:
        self._call = call
        self._line = line
        self._expected = expected

    def body(self) -> dict[str, Any]:
        """The answer's body, once it has come. Raises `Refusal` when it is not of the expected kind."""
        outstanding = self._line.outstanding
        assert outstanding[0] is self, "answers are taken in the order of their requests"
        answer = ZMQMessage.deserialize(self._call.receive(self._line))
        outstanding.popleft()
        if answer.request_type != self._expected:
            raise Refusal(f"{self._line.peer}: {answer.body.get('message', answer.request_type)}")
        body: dict[str, Any] = answer.body
        return body


def all_bodies(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """All answers, or the first refusal once every one has come: none may take effect behind the call's back."""
    bodies: list[dict[str, Any]] = []
    refusals: list[Refusal] = []
    for reply in replies:
        try:
            bodies.append(reply.body())
        except Refusal as refusal:
            refusals.append(refusal)
    if refusals:
        raise refusals[0]
    return bodies
