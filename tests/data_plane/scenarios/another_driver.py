"""A driver that gives up while another one starts the queue: prints what it was told, and whether that one lives on."""

from __future__ import annotations

import json

import ray
from transfer_queue.controller import TransferQueueController
from transfer_queue.sampler import SequentialSampler

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.data_plane.config import DataPlaneConfig, Deadlines
from rollout_reassembler.data_plane.transfer_queue import connection
from rollout_reassembler.data_plane.transfer_queue.cluster import start_local_ray


def main() -> None:
    start_local_ray(4)
    options = TransferQueueController.options(name=connection.CONTROLLER, namespace=connection.NAMESPACE)
    starting = options.remote(sampler=SequentialSampler(), polling_mode=True)
    ray.get(starting.get_zmq_server_info.remote())
    find = connection.find_controller
    found = [lambda seconds: None]  # this driver looked a moment before the other one began
    connection.find_controller = lambda seconds: (found.pop() if found else find)(seconds)
    cfg = DataPlaneConfig(impl="transfer_queue", deadlines=Deadlines(bootstrap=4, connect=4))
    told = ""
    try:
        connection.start_queue(cfg)
        connection.attach(cfg)
    except DataPlaneError as error:
        told = str(error)
    try:
        ray.get(starting.get_config.remote(), timeout=20)
        lives = True
    except ray.exceptions.RayActorError:
        lives = False
    print(json.dumps({"told": told, "lives": lives}))
    ray.shutdown()


if __name__ == "__main__":
    main()
