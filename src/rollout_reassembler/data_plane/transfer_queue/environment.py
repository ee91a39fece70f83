"""What TransferQueue must be, and what it reads from the environment when it is imported.

Import nothing here that imports `transfer_queue`.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from rollout_reassembler.contract.errors import DataPlaneUnavailable

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


def prepare_environment() -> None:
    """What the queue logs below this level, this adapter raises. What the user has set stays."""
    os.environ.setdefault("TQ_LOGGING_LEVEL", "CRITICAL")
