"""The plane `mooncake_cpu`: TransferQueue's controller over a Mooncake store. Imports neither until it builds."""

from __future__ import annotations

import ctypes.util

from rollout_reassembler.contract.features import feature
from rollout_reassembler.data_plane.backends import Backend
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.config import DataPlaneConfig, MooncakeCpuBackendConfig
from rollout_reassembler.data_plane.requirements import Finding, importable, pip

_EXTRA = "ray,mooncake"
_APT = "apt-get install libibverbs1"


def _build(cfg: DataPlaneConfig, *, bootstrap: bool) -> DataPlaneClient:
    with feature("the data plane on Mooncake", extra=_EXTRA):
        from rollout_reassembler.data_plane.mooncake.client import open_mooncake

    return open_mooncake(cfg, bootstrap=bootstrap)


def _checks() -> list[Finding]:
    library, wheel = ctypes.util.find_library("ibverbs"), "mooncake-transfer-engine-non-cuda"
    return [
        Finding("libibverbs", bool(library), library or "not found", (_APT,), optional=True),
        importable("Mooncake", "mooncake.store", _APT, pip("mooncake"), of=wheel, optional=True),
    ]


BACKEND = Backend(
    name="mooncake_cpu",
    impl="transfer_queue",
    build=_build,
    config=MooncakeCpuBackendConfig,
    on_this_machine={"master_server_address": "127.0.0.1:0", "start_master": True, "memory_hosts": 1},
    extra=_EXTRA,
    has_owners=True,
    checks=_checks,
)
