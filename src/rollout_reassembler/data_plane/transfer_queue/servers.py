"""The queue's own processes, as Ray actors that let in only who has the plane's keys.

    Controller, StorageUnit    TransferQueue's classes; their first argument is the plane's keys, or `None`
    use_keys(keys)             the same for TransferQueue's own clients in this process

Every socket of TransferQueue is made by one function, which four of its modules hold by name. Here it is
replaced in each of them, in the process whose sockets are to have keys: ROUTER sockets are servers, all others
clients (those between the threads of a process have no handshake).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import zmq
from transfer_queue import controller
from transfer_queue.sampler import SequentialSampler
from transfer_queue.storage import simple_storage
from transfer_queue.storage.managers import base as storage_managers
from transfer_queue.utils import zmq_utils

from rollout_reassembler.data_plane.transfer_queue.keys import Keys

_MODULES = (controller, simple_storage, storage_managers, zmq_utils)
_create_plain = zmq_utils.create_zmq_socket


def use_keys(keys: Keys | None) -> None:
    """Give keys to every socket that TransferQueue opens in this process from here on; `None`: to none."""
    create = _create_plain if keys is None else partial(_create_with_keys, keys)
    for module in _MODULES:
        module.create_zmq_socket = create


def _create_with_keys(keys: Keys, ctx: Any, socket_type: Any, ip: str, identity: Any = None) -> Any:
    socket = _create_plain(ctx, socket_type, ip, identity)
    if socket_type == zmq.ROUTER:
        keys.serve(socket)
    else:
        keys.present(socket)
    return socket


def _class_behind(actor_class: Any) -> Any:
    """What `@ray.remote` was put on."""
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


# Made in the actor's process and held, not inherited: Ray copies inherited methods by value, each with the function
# that makes sockets as it was where the plane was started.


class Controller:
    """The queue's controller. A claim that finds too few rows is answered; by default it would stop for seconds."""

    def __init__(self, keys: Keys | None) -> None:
        use_keys(keys)
        made = _class_behind(controller.TransferQueueController)
        self._served = made(sampler=SequentialSampler(), polling_mode=True)

    def get_zmq_server_info(self) -> Any:
        """Where it listens, and who it is."""
        return self._served.get_zmq_server_info()

    def store_config(self, config: Any) -> None:
        """Keep what `get_config` tells."""
        self._served.store_config(config)

    def get_config(self) -> Any:
        """How to reach the plane; `None` while it is being started. TransferQueue's own clients ask for it too."""
        return self._served.get_config()


class StorageUnit:
    """One of `num_data_storage_units`, which hold `total_storage_size` rows together."""

    def __init__(self, keys: Keys | None, config: dict[str, Any]) -> None:
        use_keys(keys)
        self._served = _class_behind(simple_storage.SimpleStorageUnit)(config)

    def get_zmq_server_info(self) -> Any:
        """Where it listens, and who it is."""
        return self._served.get_zmq_server_info()
