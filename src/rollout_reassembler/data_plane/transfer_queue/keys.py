"""The keys of one plane: what each of its sockets proves before a frame of it is read.

    keys = Keys.fresh("curve")          # the process that starts the plane, once
    keys.serve(router)                  # a process of the queue, before it binds
    keys.for_clients().present(dealer)  # everybody else, before they connect

What comes down a socket of the queue is unpickled, so who may send a frame may run code. Both mechanisms turn
the others away in ZeroMQ's own handshake, before any frame:

    plain   a password; readable on the wire, free. It does not prove the server to the client.
    curve   encrypted, each side proves its key to the other; 3 ms of CPU a MB

A server asks a *doorkeeper*, one thread a context, about each connection (ZeroMQ's ZAP, RFC 27). Without
one that answers nobody gets in.

Import nothing here that imports `transfer_queue`. Keys are in no repr, no error and no file.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import weakref
from typing import Any, Literal

import zmq
from zmq.utils import z85

Mechanism = Literal["plain", "curve"]

_DOMAIN = b"rollout_reassembler"
_USER = b"plane"
_DOORKEEPERS = "inproc://zeromq.zap.01"
_PASSWORD_BYTES = 32
_OK, _REFUSED = (b"200", b"OK"), (b"400", b"other keys")


class Keys:
    """What the sockets of one plane prove to each other. A plain class: OmegaConf would print a dataclass's fields."""

    __slots__ = ("_password", "_public", "_secret", "_server_public", "_server_secret", "mechanism")

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        password: bytes = b"",
        public: bytes = b"",
        secret: bytes = b"",
        server_public: bytes = b"",
        server_secret: bytes = b"",
    ) -> None:
        self.mechanism = mechanism
        self._password = password
        self._public = public
        self._secret = secret
        self._server_public = server_public
        self._server_secret = server_secret

    @classmethod
    def fresh(cls, mechanism: Mechanism) -> Keys:
        """New ones, which nobody else has."""
        if mechanism == "plain":
            return cls(mechanism, password=secrets.token_urlsafe(_PASSWORD_BYTES).encode())
        (public, secret), (server_public, server_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(mechanism, public=public, secret=secret, server_public=server_public, server_secret=server_secret)

    def for_clients(self) -> Keys:
        """The same without what only servers need."""
        return Keys(
            self.mechanism,
            password=self._password,
            public=self._public,
            secret=self._secret,
            server_public=self._server_public,
        )

    def present(self, socket: zmq.Socket[Any]) -> None:
        """Have a socket show these keys to whom it connects to."""
        if self.mechanism == "plain":
            socket.plain_username, socket.plain_password = _USER, self._password
        else:
            socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
            socket.curve_serverkey = self._server_public

    def serve(self, socket: zmq.Socket[Any]) -> None:
        """Have a socket that will bind let in only who shows these keys."""
        _station(socket.context, self)
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self.mechanism == "plain":
            socket.plain_server = True
        else:
            socket.curve_server = True
            socket.curve_secretkey = self._server_secret

    def admit(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        """Whether what a connection showed are these keys."""
        expected = [_USER, self._password] if self.mechanism == "plain" else [z85.decode(self._public)]
        if mechanism != self.mechanism.upper().encode() or len(credentials) != len(expected):
            return False
        return all([hmac.compare_digest(*pair) for pair in zip(credentials, expected, strict=True)])

    def __repr__(self) -> str:
        return f"<{self.mechanism} keys>"


_stationed: weakref.WeakSet[zmq.Context[Any]] = weakref.WeakSet()
_stationing = threading.Lock()


def _station(context: zmq.Context[Any], keys: Keys) -> None:
    """Start the context's doorkeeper, unless it has one."""
    with _stationing:
        if context in _stationed:
            return
        door: zmq.Socket[bytes] = context.socket(zmq.REP, socket_class=zmq.Socket)
        door.bind(_DOORKEEPERS)
        threading.Thread(target=_keep_door, args=(door, keys), name="zap-doorkeeper", daemon=True).start()
        _stationed.add(context)


def _keep_door(door: zmq.Socket[bytes], keys: Keys) -> None:
    """Answer until the context ends. A doorkeeper that fails lets nobody in."""
    try:
        while True:
            version, request, _domain, _address, _identity, mechanism, *credentials = door.recv_multipart()
            status = _OK if keys.admit(mechanism, credentials) else _REFUSED
            door.send_multipart([version, request, *status, b"", b""])
    except zmq.ContextTerminated:
        pass
    finally:
        door.close(linger=0)
