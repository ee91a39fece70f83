"""Requests that end: every wait for an answer of the queue's processes is in this file.

A request goes down a blocking DEALER socket, its answer comes up the same one. Answers do not say which
request they belong to, so a socket serves one call at a time, and its answers are taken in the order of the
requests. A call that ends with an answer outstanding closes that socket: no later call meets a late answer.

    call.ask(controller, …)                         a round trip
    call.send(controller, …), call.send(unit, …)    two of them at the same time; then the body of each answer

ZeroMQ never reports a lost peer, and by itself connects anew and delivers what came after a lost request.
So a socket here lives as long as its connection: once that is lost the call ends, long before its deadline.
And while requests wait, their peers are knocked at once a second: one that refuses connections is dead, one that
refuses this client's keys is not its plane. All round trips of a call have one deadline.
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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import zmq
from transfer_queue.utils.zmq_utils import STORAGE_MANAGER_IDENTITY_PREFIX, ZMQMessage, ZMQRequestType

from rollout_reassembler.contract.errors import DataPlaneUnauthenticated, DataPlaneUnavailable
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, Peer
from rollout_reassembler.data_plane.transfer_queue.handshake import connected_dealer, why_refused
from rollout_reassembler.data_plane.transfer_queue.keys import Keys

T = TypeVar("T")

_LOOK_EVERY = 0.25
_KNOCK_EVERY = 1.0
_KNOCK_TIMEOUT = 2.0
_SECOND_LOOK = 0.25
_HANDSHAKE_TIMEOUT = 0.5
_IDLE_SOCKETS = 64
"""So many unused sockets are kept for each peer; a call that finds none opens one."""

_FULL = "capacity exceeded"

_ANSWERS = {
    ZMQRequestType.GET_CONSUMPTION: ZMQRequestType.CONSUMPTION_RESPONSE,
    ZMQRequestType.GET_LIST_PARTITIONS: ZMQRequestType.LIST_PARTITIONS_RESPONSE,
    ZMQRequestType.GET_PRODUCTION: ZMQRequestType.PRODUCTION_RESPONSE,
    ZMQRequestType.NOTIFY_DATA_UPDATE: ZMQRequestType.NOTIFY_DATA_UPDATE_ACK,
}
"""The answers that are not named for their request."""


class Refusal(Exception):
    """A peer answered that it did not do what it was asked to; the message is its own."""


class _Context(zmq.Context[Any]):
    """This process's I/O threads. Never ended: that waits for every socket, also for one that nobody will close."""

    _instance: Any = None
    """Its own, not that of `zmq.Context.instance()`, which anybody may end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A thread needs a socket to each process of the queue, and the default is a thousand.
        self.max_sockets = self.get(zmq.SOCKET_LIMIT)


class QueueSockets:
    """This process's connections to the processes of one queue. Thread-safe: each call runs in its caller's thread."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.keys = keys
        # Storage units drop what comes from a socket of another name; a controller takes any.
        self.name = f"{STORAGE_MANAGER_IDENTITY_PREFIX}reassembler_{os.getpid()}_{uuid4().hex[:8]}"
        self.is_closed = False
        self._process = os.getpid()
        self._idle: dict[Peer, list[_Line]] = defaultdict(list)
        self._known: set[Peer] = set()
        self._numbers = itertools.count()
        self._running = 0
        self._changed = threading.Condition()
        self.clocks: dict[Peer, float] = {}
        """How far each peer's clock, in unix seconds, is ahead of `time.monotonic()` here, by its fastest answer."""

    @contextmanager
    def call(self, site: CallSite, seconds: float) -> Iterator[Call]:
        """A call under way, for at most `seconds` in all.

        Raises `DataPlaneTimeout` when they are over, `DataPlaneUnavailable` as soon as a peer is lost or does not take
        this client's keys, the client closed, or in a forked child, and a `Refusal` that nobody took as a
        `DataPlaneError` with the peer's words.
        """
        # Before the lock, which another thread may have held when it was copied.
        if os.getpid() != self._process:
            raise site.unavailable("this client was connected before a fork; connect another one in this process")
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
            while self._idle[peer]:
                line = self._idle[peer].pop()
                if line.is_unused():
                    return line
                line.dealer.close()
        dealer = _Context.instance().socket(zmq.DEALER)
        dealer.identity = f"{self.name}_{next(self._numbers)}".encode()
        return _Line(peer, connected_dealer(dealer, peer, self.keys))

    def has_answered(self, peer: Peer) -> None:
        """It takes this client's keys."""
        self._known.add(peer)

    def set_clock(self, peer: Peer, ahead: float) -> None:
        """What one answer says of a peer's clock. It was on its way for a while: the truth is later, never earlier."""
        self.clocks[peer] = max(ahead, self.clocks.get(peer, ahead))

    def why_refused(self, peer: Peer, seconds: float) -> str:
        """What is wrong with this client's keys in the eyes of `peer`; `""` if nothing, or if it does not say."""
        if peer in self._known:
            return ""
        return why_refused(_Context.instance().socket(zmq.DEALER), peer, self.keys, seconds)

    def close(self, seconds: float) -> None:
        """Refuse new calls and end those that are under way; returns once they have ended, or after `seconds`."""
        if os.getpid() != self._process:
            return
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

    def is_connected(self) -> bool:
        """Whether the connection stands, or is being made for the first time."""
        return bool(self._events() & zmq.POLLOUT)

    def is_unused(self) -> bool:
        """Whether it is connected, and no answer waits that nobody asked for."""
        return self._events() == zmq.POLLOUT

    def _events(self) -> int:
        events: Any = self.dealer.get(zmq.EVENTS)
        return int(events)


class Lease(Protocol):
    """What lets a write send: see `WriteLease` in `barrier.py`."""

    def before_message(self) -> None: ...

    def after_answers(self) -> None: ...


class Call:
    """One data-plane call: its round trips, under one deadline. Belongs to the thread that made it."""

    def __init__(self, sockets: QueueSockets, site: CallSite, seconds: float) -> None:
        self.site = site
        self.lines: dict[Peer, _Line] = {}
        self.lease: Lease | None = None
        """That of a call which writes."""
        self._sockets = sockets
        self._seconds = seconds
        self._started = self._knocked = time.monotonic()
        self._until = self._started + seconds

    def send(self, peer: Peer, request: ZMQRequestType, body: dict[str, Any]) -> Reply:
        """Send a request; its answer is taken later.

        A peer serves the requests of one call in their order, and after one that is lost none.
        """
        line = self.lines.get(peer)
        if line is None:
            line = self.lines[peer] = self._sockets.open(peer)
        frames = ZMQMessage.create(request, self._sockets.name, body, receiver_id=peer.id).serialize()
        reply = Reply(self, line, request)
        self.require_lease()
        line.outstanding.append(reply)
        try:
            line.dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            raise self._lost(peer) from error
        return reply

    def require_lease(self) -> None:
        """Before each step of a write that others may see. Raises `WriteFenced`."""
        if self.lease is not None:
            self.lease.before_message()

    def heard(self, peer: Peer, at: float) -> None:
        """Note when a peer says that it has answered."""
        self._sockets.set_clock(peer, at - time.monotonic())

    def require_time(self) -> None:
        """Before a write is acknowledged: who waited for its deadline may count on it. Raises `DataPlaneTimeout`."""
        if time.monotonic() > self._until:
            raise self.site.timeout(self._seconds, "it was not done within the deadline")

    def answered(self) -> None:
        """After the answer to such a step."""
        if self.lease is not None and not any(line.outstanding for line in self.lines.values()):
            self.lease.after_answers()

    def again(self) -> AbstractContextManager[Call]:
        """A call with as much time of its own, for what must be done although this one failed."""
        return self._sockets.call(self.site, self._seconds)

    def ask(self, peer: Peer, request: ZMQRequestType, body: dict[str, Any]) -> dict[str, Any]:
        """The body of the answer to a request. Raises `Refusal`."""
        return self.send(peer, request, body).body()

    def receive(self, line: _Line) -> list[zmq.Frame]:
        """The next message up a line."""
        while not line.dealer.poll(math.ceil(1e3 * self._patience())):
            self._look_at(line.peer)
            if not line.is_connected() and not line.dealer.poll(0):
                raise self._lost(line.peer)
        self._sockets.has_answered(line.peer)
        return line.dealer.recv_multipart(copy=False)

    def wait_for(self, work: Future[T], peer: Peer) -> T:
        """The result of work in another thread, which `peer` may keep waiting for ever."""
        while not wait((work,), self._patience()).done:
            self._look_at(peer)
        return work.result()

    def _patience(self) -> float:
        """How long to wait before the next look at the clock and at the peers, in seconds."""
        return min(_LOOK_EVERY, max(0.0, self._until - time.monotonic()))

    def _look_at(self, peer: Peer) -> None:
        """Raise unless the client is open, there is time left and, once a second, all peers still listen."""
        if self._sockets.is_closed:
            raise self.site.unavailable("this client was closed during the call")
        now = time.monotonic()
        if now >= self._until:
            raise self.site.timeout(self._seconds, f"no answer from {peer} within the deadline")
        if now - self._knocked >= _KNOCK_EVERY:
            self._knocked = now
            for waited_for in {peer, *(line.peer for line in self.lines.values() if line.outstanding)}:
                if waited_for.is_refusing(min(_KNOCK_TIMEOUT, self._until - now)):
                    raise self._gone(waited_for, "it refuses connections")
                # A store's master is no part of the queue, and speaks no handshake of its.
                if waited_for in self.lines and (
                    refusal := self._sockets.why_refused(waited_for, min(_HANDSHAKE_TIMEOUT, self._until - now))
                ):
                    raise self._unauthenticated(waited_for, refusal)

    def _lost(self, peer: Peer) -> DataPlaneUnavailable:
        if peer.is_refusing(_SECOND_LOOK):
            return self._gone(peer, "it refuses connections")
        if refusal := self._sockets.why_refused(peer, _HANDSHAKE_TIMEOUT):
            return self._unauthenticated(peer, refusal)
        return self._gone(peer, "it listens, but the connection was lost")

    def _unauthenticated(self, peer: Peer, refusal: str) -> DataPlaneUnauthenticated:
        site = self.site
        what = f"{peer} does not let this client in: {refusal}"
        return DataPlaneUnauthenticated(what, call=site.call, partition=site.partition, keys=site.keys)

    def _gone(self, peer: Peer, why: str) -> DataPlaneUnavailable:
        return self.site.unavailable(f"{peer} is gone: {why}", time.monotonic() - self._started)


class Reply:
    """The answer to a request that is on its way."""

    def __init__(self, call: Call, line: _Line, request: ZMQRequestType) -> None:
        self._call = call
        self._line = line
        self._expected = _ANSWERS.get(request) or ZMQRequestType[f"{request.name}_RESPONSE"]

    def body(self) -> dict[str, Any]:
        """The answer's body, once it has come. Raises `Refusal` when it is not of the expected kind, or unreadable."""
        body: dict[str, Any] = self.message().body
        return body

    def message(self) -> ZMQMessage:
        """The answer with what comes around its body. Raises as `body` does."""
        outstanding = self._line.outstanding
        assert outstanding[0] is self, "answers are taken in the order of their requests"
        frames = self._call.receive(self._line)
        outstanding.popleft()
        self._call.answered()
        try:
            answer = ZMQMessage.deserialize(frames)
        except ValueError as error:
            raise Refusal(f"{self._line.peer}: its answer cannot be read: {error}") from error
        self._call.heard(self._line.peer, answer.timestamp)
        if answer.request_type != self._expected:
            raise Refusal(f"{self._line.peer}: {answer.body.get('message', answer.request_type)}")
        return answer


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
