"""What somebody without a plane's keys may send to a port of its queue: frames whose unpickling runs code.

    frames = malicious_frames(marker)          # whoever unpickles them makes the file `marker`
    send(host, port, frames, stranger)         # for each of STRANGERS

Run as a module it does that from another process, and so from another network namespace:

    python -m tests.attacks MARKER HOST PORT…
"""

from __future__ import annotations

import sys
from pathlib import Path

import zmq

from rollout_reassembler.data_plane.transfer_queue.keys import Keys

STRANGERS: list[Keys | None] = [None, Keys.fresh("plain"), Keys.fresh("curve")]
"""What a stranger may present: nothing, another password, other keys."""


class _Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._marker,)


def malicious_frames(marker: Path) -> list[bytes]:
    """A request as the queue's own clients send it, with the payload in its body."""
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

    message = ZMQMessage.create(ZMQRequestType.GET_LIST_PARTITIONS, "TQ_STORAGE_x", {"payload": _Payload(marker)})
    return [bytes(frame) for frame in message.serialize()]


def send(host: str, port: int, frames: list[bytes], keys: Keys | None, seconds: float = 0.5) -> bool:
    """Whether an answer came."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.linger = 0
        # A storage unit drops what comes from any other name.
        dealer.identity = b"TQ_STORAGE_stranger"
        if keys is not None:
            keys.present(dealer)
        dealer.connect(f"tcp://{host}:{port}")
        dealer.send_multipart(frames)
        return bool(dealer.poll(1e3 * seconds))
    finally:
        dealer.close()
        context.term()


if __name__ == "__main__":
    made = malicious_frames(Path(sys.argv[1]))
    for target in sys.argv[3:]:
        for stranger in STRANGERS:
            send(sys.argv[2], int(target), made, stranger)
