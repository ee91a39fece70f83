"""What Mooncake reads from the environment, set from our deadlines, and what must hold before it is used.

Its client waits by environment variables alone, which it reads once, when it is first set up.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from rollout_reassembler.contract.errors import DataPlaneUnavailable
from rollout_reassembler.data_plane.config import Deadlines, MooncakeCpuBackendConfig

_RDMA_DEVICES = Path("/sys/class/infiniband")
_CALL = "connect"


def prepare_environment(deadlines: Deadlines) -> None:
    """Let the store's own waits end within the shortest deadline of a call; what the user has set stays."""
    budget = 0.4 * min(deadlines.read, deadlines.write, deadlines.clear)
    seconds = max(1, int(budget))
    settings = {
        "MC_RPC_TIMEOUT_MS": int(1000 * max(0.5, budget)),
        "MC_RPC_CONNECT_TIMEOUT_MS": int(1000 * max(0.5, budget / 2)),
        "MC_TRANSFER_TIMEOUT": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": 3,
        # What it logs besides, this adapter raises. Two lines on standard error remain; they mean nothing.
        "MC_LOG_LEVEL": "ERROR",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, str(value))


def import_store() -> Any:
    """The module `mooncake.store`. Raises `DataPlaneUnavailable` with the fix."""
    try:
        return importlib.import_module("mooncake.store")
    except (ImportError, OSError) as error:
        what = f"Mooncake cannot be imported ({error}): apt-get install libibverbs1, and "
        raise DataPlaneUnavailable(f"{what}pip install 'rollout-reassembler[mooncake]'", call=_CALL) from error


def on_this_node(cfg: MooncakeCpuBackendConfig) -> MooncakeCpuBackendConfig:
    """The config with this node's address in it, where it leaves that to Ray."""
    if cfg.local_hostname:
        return cfg
    ray: Any = importlib.import_module("ray")
    return cfg.model_copy(update={"local_hostname": ray.util.get_node_ip_address()})


def require_protocol(cfg: MooncakeCpuBackendConfig) -> None:
    """Raise `DataPlaneUnavailable` unless the protocol of the config is the one that will be used.

    Without a device of that name, or where it is told to by the environment, the transfer engine
    goes on over TCP as if nothing had happened.
    """
    if cfg.protocol != "rdma":
        return
    if os.environ.get("MC_FORCE_TCP", "").lower() not in ("", "0", "false"):
        raise DataPlaneUnavailable("protocol 'rdma' is required, and MC_FORCE_TCP is set: unset it", call=_CALL)
    there = sorted(path.name for path in _RDMA_DEVICES.iterdir()) if _RDMA_DEVICES.is_dir() else []
    missing = [name for name in cfg.device_name.split(",") if name.strip() not in there]
    if missing:
        found = ", ".join(there) or "none"
        what = f"protocol 'rdma' is required, and there is no device {', '.join(missing)} here; found: {found}"
        raise DataPlaneUnavailable(what, call=_CALL)
