"""Starting the queue, attaching to it, ending it.

The queue is a controller, which is a named Ray actor, and storage units, one Ray actor each. Whoever
starts it owns it: it ends with the owner's client or with the owner's process, and nobody else
may end it. All others find the controller by name and connect to the sockets it tells them of.

With the addresses the controller hands out the plane's keys (`keys.py`), made when the plane is started. So
who may attach is who may call an actor of this Ray cluster: who has Ray's token.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray
import transfer_queue
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, RayError
from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, Peer, run_blocking
from rollout_reassembler.data_plane.transfer_queue.cluster import (
    attach_ray,
    has_tokens,
    is_loopback,
    is_on_loopback,
    start_local_ray,
)
from rollout_reassembler.data_plane.transfer_queue.controller import QueueController
from rollout_reassembler.data_plane.transfer_queue.keys import Keys
from rollout_reassembler.data_plane.transfer_queue.rows import QueueRows
from rollout_reassembler.data_plane.transfer_queue.servers import Controller, StorageUnit, use_keys
from rollout_reassembler.data_plane.transfer_queue.sockets import QueueSockets
from rollout_reassembler.data_plane.transfer_queue.store import SimpleStore

CONTROLLER = "TransferQueueController"
NAMESPACE = "transfer_queue"
BACKENDS = {"simple": "SimpleStorage", "mooncake_cpu": "RolloutReassemblerMooncake"}
"""What the running queue's config calls each of our backends."""

UNIT = "TransferQueueStorageUnit#{}"

_BACKEND = BACKENDS["simple"]
_LOCAL_SPARE_CPUS = 4
_RELEASE_SECONDS = 5.0
_END_SECONDS = 20.0

_ray: Any = ray
"""Ray, where it has no types of its own."""

_START = CallSite("bootstrap")
_END = CallSite("close")
_ATTACH = CallSite("connect")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Connection:
    """An attached process: the rows, and the storage units that hold their values."""

    rows: QueueRows
    units: tuple[Peer, ...]


def start_queue(cfg: DataPlaneConfig) -> ExitStack | None:
    """Start the queue; closing the stack ends it. `None` if one is running in this Ray cluster already.

    Without a Ray cluster one is started on this machine, or the one of `RAY_ADDRESS` is joined. A
    local one offers more CPUs than the queue takes, so that actors find room beside it; it stays up
    when the queue ends. Takes 10 to 30 s. Raises `DataPlaneUnavailable` when CPUs are short: with
    too few, the queue's start would wait for ever.
    """
    start_ray(cfg.simple.num_storage_units)
    if find_controller(cfg.deadlines.connect) is not None:
        return None
    check_cpus(cfg.simple.num_storage_units)
    keys = fresh_keys(cfg)
    with ExitStack() as started:
        controller = start_controller(cfg, keys, started)
        if controller is None:
            return None
        sizes = {
            "num_data_storage_units": cfg.simple.num_storage_units,
            "total_storage_size": cfg.simple.total_storage_size,
        }
        places = get_node_round_robin_scheduling_strategies(cfg.simple.num_storage_units)
        actor_class: Any = ray.remote(num_cpus=1)(StorageUnit)
        units = {}
        for number, place in enumerate(places):
            unit = actor_class.options(name=UNIT.format(number), scheduling_strategy=place).remote(keys, sizes)
            started.callback(kill_actor, unit)
            units[UNIT.format(number)] = unit
        infos = {name: answer_of(unit.get_zmq_server_info.remote(), cfg) for name, unit in units.items()}
        tell_controller(cfg, controller, keys, _BACKEND, {**sizes, "zmq_info": infos})
        return started.pop_all()


def start_controller(cfg: DataPlaneConfig, keys: Keys | None, started: ExitStack) -> Any | None:
    """The actor of a new controller, which `started` ends. `None` if somebody else was faster."""
    # A queue that died under this process leaves its handles in the module.
    _drop_handles()
    actor_class: Any = ray.remote(num_cpus=1)(Controller)
    try:
        controller = actor_class.options(name=CONTROLLER, namespace=NAMESPACE).remote(keys)
    except ValueError:  # the name is taken
        return None
    started.callback(_drop_handles)
    started.callback(kill_actor, controller)
    answer_of(controller.get_zmq_server_info.remote(), cfg)
    return controller


def tell_controller(
    cfg: DataPlaneConfig, controller: Any, keys: Keys | None, backend: str, settings: Mapping[str, Any]
) -> None:
    """Have the controller tell all others how to reach the plane. From here on it runs."""
    running = {
        "controller": {"polling_mode": True, "zmq_info": answer_of(controller.get_zmq_server_info.remote(), cfg)},
        "backend": {"storage_backend": backend, backend: dict(settings)},
        "security": {"keys": keys.for_clients() if keys is not None else None},
    }
    config = OmegaConf.create(running, flags={"allow_objects": True})
    answer_of(controller.store_config.remote(config), cfg)
    _say_who_reaches(running["controller"]["zmq_info"].ip, keys)


def fresh_keys(cfg: DataPlaneConfig) -> Keys | None:
    """The keys of a new plane, `None` where the config trusts the network."""
    if cfg.security == "trusted_network":
        return None
    if cfg.security == "auto":
        return Keys.fresh("plain" if is_on_loopback() else "curve")
    return Keys.fresh(cfg.security)


def _say_who_reaches(host: str, keys: Keys | None) -> None:
    """At start-up, once: what is reachable, from where, by whom."""
    reach = "this machine alone" if is_loopback(host) else f"every machine that reaches {host}"
    tokens = "with" if has_tokens() else "WITHOUT"
    if keys is None:
        logger.warning(
            "the queue's ports at %s unpickle what anybody sends them (security='trusted_network'): who reaches them, "
            "from %s, can run code in the queue; Ray runs %s token authentication",
            host,
            reach,
            tokens,
        )
        return
    logger.info(
        "the queue is reachable from %s, by %s keys; Ray runs %s token authentication", reach, keys.mechanism, tokens
    )
    if keys.mechanism == "plain" and not is_loopback(host):
        logger.warning("the plane's password is readable on the network (security='plain' at %s); use 'curve'", host)


def attach(cfg: DataPlaneConfig) -> Connection:
    """Connect to the running queue. Raises `DataPlaneUnavailable` when there is none.

    Waits, within the connect deadline, for a queue that is just starting.
    """
    if not ray.is_initialized():
        raise _ATTACH.unavailable("Ray is not initialised here; call ray.init(address='auto') first")
    config = running_config(cfg.deadlines.connect)
    check_backend(config, _BACKEND)
    units = config.backend[_BACKEND].zmq_info
    return connect_sockets(config.controller.zmq_info, units, cfg.deadlines.connect, running_keys(config, cfg))


def running_keys(config: Any, cfg: DataPlaneConfig) -> Keys | None:
    """The keys of the running plane, which TransferQueue's own clients in this process present too from here on.

    Raises `DataPlaneUnavailable` when the caller's config insists on others.
    """
    security = config.get("security")
    keys: Keys | None = security.get("keys") if security is not None else None
    runs_by = keys.mechanism if keys is not None else "trusted_network"
    if cfg.security in ("plain", "curve") and cfg.security != runs_by:
        raise _ATTACH.unavailable(f"the queue runs by security={runs_by!r}, the config says {cfg.security!r}")
    if keys is None and cfg.security != "trusted_network":
        logger.warning(
            "the queue at %s was started without keys: whoever reaches its ports can run code in it",
            config.controller.zmq_info.ip,
        )
    use_keys(keys)
    return keys


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


def connect_sockets(
    controller_info: Any, unit_infos: Mapping[str, Any], seconds: float, keys: Keys | None = None
) -> Connection:
    """Connect to a controller and to storage units whose addresses are known. Needs no Ray.

    Raises `DataPlaneUnavailable` when the controller does not answer.
    """
    units = tuple(Peer("a storage unit", u.ip, u.ports["put_get_socket"], u.id) for u in unit_infos.values())
    controller = QueueController(controller_peer(controller_info))
    rows = QueueRows(QueueSockets(keys), controller, SimpleStore(units))
    try:
        with rows.sockets.call(_ATTACH, seconds) as call:
            controller.partitions(call)
    except DataPlaneTimeout as error:
        raise _ATTACH.unavailable(f"{controller.peer} does not answer", seconds) from error
    return Connection(rows, units)


def controller_peer(info: Any) -> Peer:
    """The controller that the queue's config tells of."""
    return Peer("the queue's controller", info.ip, info.ports["request_handle_socket"], info.id)


def answer_of(reference: Any, cfg: DataPlaneConfig) -> Any:
    """What an actor answers while the plane is started. Raises `DataPlaneError`."""
    try:
        return ray.get(reference, timeout=cfg.deadlines.bootstrap)
    except GetTimeoutError as error:
        raise _START.timeout(cfg.deadlines.bootstrap) from error
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, DataPlaneError):
            raise cause from error
        raise _START.unavailable(f"the plane did not start: {error}") from error


def kill_actor(actor: Any) -> None:
    """End an actor of the plane, if its cluster is still there."""
    with contextlib.suppress(RayError, DataPlaneTimeout):
        run_blocking(_END, lambda: ray.kill(actor), _END_SECONDS)


def _drop_handles() -> None:
    """Close TransferQueue's own client in this process, if somebody here has used it."""
    with contextlib.suppress(RayError, DataPlaneTimeout):
        run_blocking(_END, transfer_queue.close, _END_SECONDS)


def start_ray(units: int) -> None:
    """Initialise Ray in the caller's own thread, which must live on; Ray bounds this wait itself.

    One that is started here has CPUs for a controller and so many storage units besides its own.
    """
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        attach_ray()
    else:
        start_local_ray(max(os.cpu_count() or 1, _LOCAL_SPARE_CPUS) + 1 + units)


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


def check_cpus(units: int) -> None:
    """Raise unless Ray has a free CPU for the controller and for each storage unit on the node it goes to.

    Waits a moment for CPUs that there are and that somebody has: those of a queue that was just ended.
    """
    needed = 1 + units
    until = time.monotonic() + _RELEASE_SECONDS
    while (free := _cpus(_ray.available_resources())) < needed:
        if _cpus(_ray.cluster_resources()) >= needed and time.monotonic() < until:
            time.sleep(0.2)
            continue
        what = f"the queue needs {needed} free CPUs in Ray (a controller and {units} storage units), {free} are free"
        raise _START.unavailable(f"{what}; free some, or start Ray with a larger num_cpus")
    bare = [node["NodeManagerAddress"] for node in _ray.nodes() if node["Alive"] and not node["Resources"].get("CPU")]
    if bare and units:
        what = f"storage units are dealt out to all nodes, and {', '.join(bare)} has no CPU for one"
        raise _START.unavailable(f"{what}; start that node with num_cpus of at least 1")


def _cpus(resources: dict[str, float]) -> int:
    return int(resources.get("CPU", 0))
