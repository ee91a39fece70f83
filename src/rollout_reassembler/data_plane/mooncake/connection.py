"""Starting a plane on Mooncake, attaching to it, ending it.

    master        a child of the bootstrapping process, or one that runs already
    controller    the queue's, a named Ray actor, as with every backend
    memory hosts  Ray actors spread over the nodes, or processes that run already

Whoever starts it owns it. The controller keeps the addresses, so all others find the store through
it. The backend has a name of its own there: TransferQueue's own Mooncake clients lay values out in
another way, and had better say that they do not know it than read what is not there.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray

from rollout_reassembler.data_plane.config import DataPlaneConfig, MooncakeCpuBackendConfig
from rollout_reassembler.data_plane.mooncake.environment import on_this_node, prepare_environment
from rollout_reassembler.data_plane.mooncake.host import MemoryHost
from rollout_reassembler.data_plane.mooncake.master import start_master
from rollout_reassembler.data_plane.mooncake.store import MooncakeStore
from rollout_reassembler.data_plane.mooncake.values import MooncakeValues
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, run_blocking
from rollout_reassembler.data_plane.transfer_queue.connection import (
    BACKENDS,
    NAMESPACE,
    answer_of,
    check_backend,
    check_cpus,
    controller_peer,
    find_controller,
    fresh_keys,
    kill_actor,
    running_config,
    running_keys,
    start_controller,
    start_ray,
    tell_controller,
)
from rollout_reassembler.data_plane.transfer_queue.controller import QueueController
from rollout_reassembler.data_plane.transfer_queue.keys import Keys
from rollout_reassembler.data_plane.transfer_queue.rows import QueueRows
from rollout_reassembler.data_plane.transfer_queue.sockets import QueueSockets

_BACKEND = BACKENDS["mooncake_cpu"]

_SHARED = ("master_server_address", "metadata_server", "protocol")
"""What every process must have alike: it comes from the controller, not from the process's own config."""

_ATTACH = CallSite("connect")


@dataclass(frozen=True)
class Connection:
    """An attached process: the rows, where their values are, and the actors that own the memory of that."""

    rows: QueueRows
    values: MooncakeValues
    hosts: tuple[Any, ...] = ()

    @property
    def store(self) -> MooncakeStore:
        return self.values.store


def start(cfg: DataPlaneConfig) -> ExitStack | None:
    """Start what the config asks for; closing the stack ends it. `None` if a queue runs in this Ray cluster already.

    Raises `DataPlaneUnavailable`, and leaves nothing behind then.
    """
    start_ray(units=0)
    if find_controller(cfg.deadlines.connect) is not None:
        return None
    check_cpus(units=0)
    keys = fresh_keys(cfg)
    with ExitStack() as started:
        store = cfg.mooncake_cpu
        if store.start_master:
            master = start_master(store.master_server_address, cfg.deadlines.bootstrap)
            started.callback(master.end)
            store = store.model_copy(update={"master_server_address": master.address})
        controller = start_controller(cfg, keys, started)
        if controller is None:
            return None
        session = answer_of(controller.get_zmq_server_info.remote(), cfg).id
        hosts = []
        for _ in range(store.memory_hosts):
            name = f"rollout_reassembler.memory_host.{uuid4().hex[:8]}"
            host = _host_class(name).remote(store.model_dump(), session=session, deadlines=cfg.deadlines.model_dump())
            started.callback(kill_actor, host)
            hosts.append((name, host))
        for _, host in hosts:
            answer_of(host.mooncake_checkpoint.remote({"operation": "DESCRIBE", "session": session}), cfg)
        settings = {**{name: getattr(store, name) for name in _SHARED}, "hosts": [name for name, _ in hosts]}
        tell_controller(cfg, controller, keys, _BACKEND, settings)
        return started.pop_all()


def attach(cfg: DataPlaneConfig) -> Connection:
    """Connect to the running plane. Raises `DataPlaneUnavailable` when there is none."""
    if not ray.is_initialized():
        raise _ATTACH.unavailable("Ray is not initialised here; call ray.init(address='auto') first")
    config = running_config(cfg.deadlines.connect)
    check_backend(config, _BACKEND)
    shared = config.backend[_BACKEND]
    store = cfg.mooncake_cpu.model_copy(update={name: shared[name] for name in _SHARED})
    connected = connect(cfg, on_this_node(store), config.controller.zmq_info, running_keys(config, cfg))
    hosts = tuple(ray.get_actor(name, namespace=NAMESPACE) for name in shared.hosts)
    return Connection(connected.rows, connected.values, hosts)


def connect(
    cfg: DataPlaneConfig, store_config: MooncakeCpuBackendConfig, controller_info: Any, keys: Keys | None = None
) -> Connection:
    """Connect to a controller and a master whose addresses are known. Needs no Ray."""
    prepare_environment(cfg.deadlines)
    session, size = controller_info.id, store_config.client_segment_size

    def connected() -> MooncakeStore:
        return MooncakeStore(store_config, session=session, segment_size=size)

    store = run_blocking(_ATTACH, connected, cfg.deadlines.connect)
    controller = QueueController(controller_peer(controller_info))
    values = MooncakeValues(store, controller)
    return Connection(QueueRows(QueueSockets(keys), controller, values), values)


def _host_class(name: str) -> Any:
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
    return ray.remote(**options)(MemoryHost).options(name=name, namespace=NAMESPACE)
