"""What TransferQueue reads from the environment when it is imported, set from our deadlines before that.

Import nothing here that imports `transfer_queue`.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from rollout_reassembler.contract.errors import DataPlaneUnavailable
from rollout_reassembler.data_plane.config import Deadlines

TESTED_VERSION = "0.1.11"
"""The adapter drives private parts of the queue, as their behaviour was measured in this version."""


def check_version() -> None:
    """Raise `DataPlaneUnavailable` unless the tested TransferQueue is installed."""
    try:
        found = version("TransferQueue")
    except PackageNotFoundError as error:
        what = "TransferQueue is not installed: pip install 'rollout-reassembler[ray]'"
        raise DataPlaneUnavailable(what, call="connect") from error
    if found != TESTED_VERSION:
        what = f"TransferQueue {found} is installed, this adapter needs {TESTED_VERSION}: "
        raise DataPlaneUnavailable(f"{what}pip install TransferQueue=={TESTED_VERSION}", call="connect")


def prepare_environment(deadlines: Deadlines) -> None:
    """Fit the queue's own waits into our deadlines; what the user has set stays."""
    settings = {
        "TQ_STORAGE_HANDSHAKE_TIMEOUT": max(1, int(0.5 * deadlines.connect)),
        # Whatever it logs below this level, this adapter raises.
        "TQ_LOGGING_LEVEL": "CRITICAL",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, str(value))
