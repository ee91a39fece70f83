"""Connecting to a process of the queue, and why it does not let one in.

ZeroMQ tells of a handshake through the events of a socket alone, and one that fails looks like a lost connection.
So nobody watches while all is well; a client whose peer is silent or lost connects once more, and watches.

Import nothing here that imports `transfer_queue`.
"""

from __future__ import annotations

import ipaddress
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rollout_reassembler.data_plane.transfer_queue.calls import Peer
from rollout_reassembler.data_plane.transfer_queue.keys import Keys

_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
}


def connected_dealer(dealer: zmq.Socket[bytes], peer: Peer, keys: Keys | None) -> zmq.Socket[bytes]:
    """The socket, connecting to `peer`. It lives as long as its connection, and holds as much as it is given."""
    dealer.linger = 0
    dealer.reconnect_ivl = -1
    dealer.sndhwm = dealer.rcvhwm = 0
    is_ipv6 = _is_ipv6(peer.host)
    dealer.ipv6 = is_ipv6
    if keys is not None:
        keys.present(dealer)
    dealer.connect(f"tcp://[{peer.host}]:{peer.port}" if is_ipv6 else f"tcp://{peer.host}:{peer.port}")
    return dealer


def why_refused(dealer: zmq.Socket[bytes], peer: Peer, keys: Keys | None, seconds: float) -> str:
    """What `peer` has against these keys; `""` if nothing, or if it does not say in time. Uses up the socket."""
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_FAILURES))
    try:
        connected_dealer(dealer, peer, keys)
        event = _next_event(monitor, seconds)
    finally:
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=0)
    if event not in _FAILURES:
        return ""
    if keys is None:
        return "it wants keys, and this client has none; connect through the Ray cluster that the plane runs in"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"these are not its {keys.mechanism} keys but those of another plane, or of an earlier one; connect anew"
    return (
        f"it has no {keys.mechanism} keys or others than this client, "
        "as another plane, or one that was started anew; connect anew"
    )


def _next_event(monitor: Any, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while monitor.poll(max(0.0, 1e3 * (until - time.monotonic()))):
        event: int = recv_monitor_message(monitor)["event"]
        if event != zmq.EVENT_MONITOR_STOPPED:
            return event
    return None


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
