"""Whether anybody listens at a port."""

from __future__ import annotations

import socket


def why_unreachable(host: str, port: int, seconds: float) -> OSError | None:
    """What came of a connection that was tried for so long; `None` when somebody listens there.

    A `ConnectionRefusedError` says that nobody does; anything else may be a host that is slow.
    """
    try:
        socket.create_connection((host.strip("[]"), port), seconds).close()
    except OSError as error:
        return error
    return None
