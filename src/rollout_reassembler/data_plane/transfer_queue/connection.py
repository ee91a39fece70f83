"""Starting the queue, attaching to it, ending it.

The queue is a controller, which is a named Ray actor, and storage units, one Ray actor each. Whoever
starts it owns it: it ends with the owner's `end_queue` or with the owner's process, and nobody else
may end it. All others find the controller by name and connect to the sockets it tells them of.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

import ray
import transfer_queue
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, RayError
from transfer_queue import interface

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, Peer, run_blocking
from rollout_reassembler.data_plane.transfer_queue.rows import QueueRows
from rollout_reassembler.data_plane.transfer_queue.sockets import QueueSockets
from rollout_reassembler.data_plane.transfer_queue.store import SimpleStore

CONTROLLER = "TransferQueueController"
NAMESPACE = "transfer_queue"
BACKENDS = {"simple": "SimpleStorage", "mooncake_cpu": "RolloutReassemblerMooncake"}
"""What the running queue's config calls each of our backends."""

_BACKEND = BACKENDS["simple"]
_LOCAL_SPARE_CPUS = 4
_RELEASE_SECONDS = 5.0

_ray: Any = ray
"""Ray, where it has no types of its own."""

_START = CallSite("bootstrap")
_ATTACH = CallSite("connect")


def start_queue(cfg: DataPlaneConfig) -> bool:
    """Start the queue if none is running in this Ray cluster; whether this process owns it now.

    Without a Ray cluster one is started on this machine, or the one of `RAY_ADDRESS` is joined. A
    local one offers more CPUs than the queue takes, so that actors find room beside it; it stays up
    when the queue ends. Takes 10 to 30 s. Raises `DataPlaneUnavailable` when CPUs are short: with
    too few, the queue's own start would wait for ever.
    """
    start_ray(cfg)
    if find_controller(cfg.deadlines.connect) is not None:
        return False
    check_cpus(cfg)
    # A queue that died under this process leaves its handles in the module: drop them first.
    run_blocking(_START, transfer_queue.close, cfg.deadlines.bootstrap)
    try:
        run_blocking(_START, lambda: transfer_queue.init(_queue_config(cfg)), cfg.deadlines.bootstrap)
    except (DataPlaneError, RayError, RuntimeError, ValueError) as error:
        _remove_half_started(cfg)
        if isinstance(error, DataPlaneError):
            raise
        raise _START.unavailable(f"the queue did not start: {error}") from error
    return bool(interface._TQ_STORAGE)


def attach(cfg: DataPlaneConfig) -> QueueRows:
    """Connect to the running queue. Raises `DataPlaneUnavailable` when there is none.

    Waits, within the connect deadline, for a queue that is just starting.
    """
    if not ray.is_initialized():
        raise _ATTACH.unavailable("Ray is not initialised here; call ray.init(address='auto') first")
    config = running_config(cfg.deadlines.connect)
    check_backend(config, _BACKEND)
    units = config.backend[_BACKEND].zmq_info
    return connect_sockets(config.controller.zmq_info, units, cfg.deadlines.connect)


def running_backend(seconds: float) -> str:
    """The backend of the queue of this Ray cluster, as a `DataPlaneConfig` calls it. Raises `DataPlaneUnavailable`."""
    found = running_config(seconds).backend.storage_backend
    for name, called in BACKENDS.items():
        if called == found:
            return name
    raise _ATTACH.unavailable(f"the queue runs on {found}, which this adapter does not know")


def check_backend(config: Any, wanted: str) -> None:
    """Raise `DataPlaneUnavailable` when the running queue is on another backend than the caller's config says."""
    if config.backend.storage_backend != wanted:
        raise _ATTACH.unavailable(f"the queue runs on {config.backend.storage_backend}, the config says {wanted}")


def connect_sockets(controller_info: Any, unit_infos: Mapping[str, Any], seconds: float) -> QueueRows:
    """Connect to a controller and to storage units whose addresses are known. Needs no Ray.

    Raises `DataPlaneUnavailable` when the controller does not answer.
    """
    units = [Peer("a storage unit", unit.ip, unit.ports["put_get_socket"], unit.id) for unit in unit_infos.values()]
    rows = QueueRows(QueueSockets(), controller_peer(controller_info), SimpleStore(units))
    try:
        with rows.sockets.call(_ATTACH, seconds) as call:
            rows.partitions(call)
    except DataPlaneTimeout as error:
        raise _ATTACH.unavailable(f"{rows.controller} does not answer", seconds) from error
    return rows


def controller_peer(info: Any) -> Peer:
    """The controller that the queue's config tells of."""
    return Peer("the queue's controller", info.ip, info.ports["request_handle_socket"], info.id)


def end_queue(seconds: float) -> None:
    """End the queue that this process owns, with all rows in it."""
    with contextlib.suppress(RayError):
        run_blocking(CallSite("close"), transfer_queue.close, seconds)


def start_ray(cfg: DataPlaneConfig) -> None:
    """Initialise Ray in the caller's own thread, which must live on: a local cluster dies with it.

    (Linux tells Ray's processes of the death of the *thread* that started them.) Ray bounds this wait itself.
    """
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        cpus = max(os.cpu_count() or 1, _LOCAL_SPARE_CPUS) + _cpus_needed(cfg)
        ray.init(address="local", num_cpus=cpus, **quiet)


def find_controller(seconds: float) -> Any | None:
    """The controller's actor handle, `None` when there is no queue in this cluster."""
    try:
        return run_blocking(_ATTACH, lambda: ray.get_actor(CONTROLLER, namespace=NAMESPACE), seconds)
    except ValueError:
        return None


def running_config(seconds: float) -> Any:
    """The queue's config, with the addresses of its sockets, from its controller."""
    until = time.monotonic() + seconds
    while True:
        left = max(until - time.monotonic(), 0.1)
        controller = find_controller(left)
        if controller is None:
            raise _ATTACH.unavailable("no queue is running in this Ray cluster; the driver must bootstrap it first")
        try:
            config = ray.get(controller.get_config.remote(), timeout=left)
        except GetTimeoutError as error:
            raise _ATTACH.timeout(seconds, "the queue's controller does not answer") from error
        except RayError as error:
            raise _ATTACH.unavailable(f"the queue's controller is gone: {error}") from error
        if config is not None:
            return config
        if time.monotonic() >= until:
            raise _ATTACH.timeout(seconds, "the queue was still starting")
        time.sleep(0.2)


def _cpus_needed(cfg: DataPlaneConfig) -> int:
    return 1 + (cfg.simple.num_storage_units if cfg.backend == "simple" else 0)


def check_cpus(cfg: DataPlaneConfig) -> None:
    """Raise unless Ray has a free CPU for the controller and for each storage unit on the node it goes to.

    Waits a moment for CPUs that there are and that somebody has: those of a queue that was just ended.
    """
    needed = _cpus_needed(cfg)
    until = time.monotonic() + _RELEASE_SECONDS
    while (free := _cpus(_ray.available_resources())) < needed:
        if _cpus(_ray.cluster_resources()) >= needed and time.monotonic() < until:
            time.sleep(0.2)
            continue
        what = (
            f"the queue needs {needed} free CPUs in Ray (a controller and {needed - 1} storage units), {free} are free"
        )
        raise _START.unavailable(f"{what}; free some, or start Ray with a larger num_cpus")
    bare = [node["NodeManagerAddress"] for node in _ray.nodes() if node["Alive"] and not node["Resources"].get("CPU")]
    if bare and cfg.backend == "simple":
        what = f"storage units are dealt out to all nodes, and {', '.join(bare)} has no CPU for one"
        raise _START.unavailable(f"{what}; start that node with num_cpus of at least 1")


def _cpus(resources: dict[str, float]) -> int:
    return int(resources.get("CPU", 0))


def _queue_config(cfg: DataPlaneConfig) -> Any:
    """What `transfer_queue.init` takes."""
    simple = {
        "num_data_storage_units": cfg.simple.num_storage_units,
        "total_storage_size": cfg.simple.total_storage_size,
    }
    backend = {"storage_backend": _BACKEND, _BACKEND: simple}
    # With polling a claim that finds too few rows is answered; without, it stops the controller for seconds.
    return OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend})


def _remove_half_started(cfg: DataPlaneConfig) -> None:
    """End what this process has started: a controller without a config makes every later caller wait.

    The one that another driver is starting has the same name, and is left alone.
    """
    controller = interface._TQ_CONTROLLER
    if controller is not None and not controller._ray_original_handle:
        interface._TQ_CONTROLLER = None
    end_queue(cfg.deadlines.connect)
