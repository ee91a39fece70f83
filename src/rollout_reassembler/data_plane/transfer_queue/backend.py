"""The plane `simple`: TransferQueue with its own storage units. Imports neither the queue nor torch until it builds."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rollout_reassembler.contract.features import feature
from rollout_reassembler.data_plane.backends import Backend
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.config import DataPlaneConfig, SimpleBackendConfig
from rollout_reassembler.data_plane.requirements import Finding, importable, pip
from rollout_reassembler.data_plane.transfer_queue.environment import TESTED_VERSION

_EXTRA = "ray"


def _build(cfg: DataPlaneConfig, *, bootstrap: bool) -> DataPlaneClient:
    with feature("the data plane on TransferQueue", extra=_EXTRA):
        from rollout_reassembler.data_plane.transfer_queue.client import open_queue

    return open_queue(cfg, bootstrap=bootstrap)


def _checks() -> list[Finding]:
    return [
        importable("torch", "torch", pip(_EXTRA)),
        importable("Ray", "ray", pip(_EXTRA), "or, without it, use --plane memory"),
        _transfer_queue(),
    ]


def _transfer_queue() -> Finding:
    """The adapter uses parts of TransferQueue that are not public, so its version counts exactly."""
    fix = f"pip install TransferQueue=={TESTED_VERSION}"
    try:
        found = version("TransferQueue")
    except PackageNotFoundError:
        return Finding("TransferQueue", False, "not installed", (fix,))
    return Finding("TransferQueue", found == TESTED_VERSION, found, (fix,))


BACKEND = Backend(
    name="simple",
    impl="transfer_queue",
    build=_build,
    config=SimpleBackendConfig,
    extra=_EXTRA,
    cells=("bytes", "tensors"),
    checks=_checks,
)
