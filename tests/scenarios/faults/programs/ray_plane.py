"""A Ray cluster's bad days: reassemblers, a storage unit and the controller are killed. Prints what happened as JSON.

A script of its own: a process can be in one Ray cluster only, and a plane that dies takes all of its users along.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rollout_reassembler import (
    DataPlaneClient,
    DataPlaneConfig,
    DataPlaneError,
    FinalizedGroup,
    ReassemblerPool,
    ReassemblyRequest,
    RolloutReassemblerActorConfig,
    build_data_plane_client,
)
from rollout_reassembler.actors.rollout_reassembler_actor import _ACTOR_OPTIONS
from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.config import Deadlines, SimpleBackendConfig
from rollout_reassembler.data_plane.transfer_queue.cluster import start_local_ray
from tests.captures import CANONICAL, PAD, STAGING, registered
from tests.reassembly.contents import RECORDS
from tests.scenarios.faults.groups import DEFERRED, KINDS, Group, count
from tests.scenarios.faults.mortal import Mortal
from tests.scenarios.faults.requests import Death

DEADLINES = Deadlines(read=5, write=5, clear=5, metadata=5, connect=20, bootstrap=90, checkpoint=30)
DP_CONFIG = DataPlaneConfig(impl="transfer_queue", deadlines=DEADLINES, simple=SimpleBackendConfig(num_storage_units=2))
ACTOR_CONFIG = RolloutReassemblerActorConfig(
    partition_id=CANONICAL, staging_partition=STAGING, pad_token_id=PAD, max_seq_len=None
)

_KINDS = tuple(kind for kind in KINDS if kind != DEFERRED)
"""An actor's config says who assembles routes, for all of its groups."""

DEATHS: list[list[Death]] = [
    [("GET_DATA#1", "after")],
    [("SET_CUSTOM_META#1", "before"), ("SET_CUSTOM_META#1", "after")],
    [("CLEAR_DATA#1", "after")],
    [("NOTIFY_DATA_UPDATE#1", "after")],
    [("CLEAR_META#1", "after")],
]
"""How the attempts at the first groups end: all fetched; stored, then on record; half cleared; announced (nothing
of that group is valid, so it clears nothing); cleared."""


class Run:
    """A training run: its plane, its pool, the groups it has finalized and their answers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plane = start_plane()
        self.groups: list[Group] = []
        self.answers: dict[str, FinalizedGroup] = {}
        self.requests: dict[str, ReassemblyRequest] = {}
        self.kills = 0
        attempts = directory / "attempts"
        attempts.mkdir()
        deaths = {f"g{number}": planned for number, planned in enumerate(DEATHS)}
        mortal = ray.remote(**_ACTOR_OPTIONS)(Mortal)
        self.actors = [mortal.remote(DP_CONFIG, ACTOR_CONFIG, deaths, attempts) for _ in range(2)]
        ray.get([actor.check_dependencies.remote() for actor in self.actors], timeout=120)
        self.pool = ReassemblerPool(self.actors)
        self.attempts = attempts

    def new_groups(self, number: int) -> list[Group]:
        """So many more groups, staged."""
        new = [Group(_KINDS[n % len(_KINDS)], n) for n in range(len(self.groups), len(self.groups) + number)]
        for group in new:
            self.requests[group.group_id] = dataclasses.replace(group.request, staged_on=self.plane.epoch())
            group.stage(self.plane)
        self.groups += new
        return new

    def finalize(self, groups: list[Group]) -> None:
        """All at the same time."""
        futures = {group.group_id: self.pool.submit(self.requests[group.group_id]) for group in groups}
        self.answers |= {group_id: future.result(180) for group_id, future in futures.items()}

    def refused(self, groups: list[Group]) -> dict[str, Any]:
        """What an attempt at each of these groups raises, and after how long."""
        started = time.monotonic()
        errors = [self.pool.submit(self.requests[group.group_id]).exception(120) for group in groups]
        return {
            "errors": sorted({type(error).__name__ for error in errors}),
            "named": all(f"group {group.group_id!r}" in str(e) for group, e in zip(groups, errors, strict=True)),
            "seconds": since(started) / len(groups),
        }

    def kill(self, name: str, namespace: str | None = None) -> None:
        pid = ray.get(ray.get_actor(name, namespace).__ray_call__.remote(lambda _: os.getpid()), timeout=60)
        os.kill(pid, signal.SIGKILL)
        self.kills += 1

    def save(self, name: str) -> Path:
        with self.plane.quiesce(20):
            self.plane.save_checkpoint(str(self.directory / name))
        return self.directory / name

    def restart_plane(self) -> dict[str, float]:
        """End what is left of the plane and start another one, empty; seconds of both."""
        started = time.monotonic()
        self.plane.close()
        close = since(started)
        self.plane = start_plane()
        return {"close": close, "in all": since(started)}

    def figures(self) -> dict[str, int]:
        figures = dataclasses.asdict(count(self.plane, self.groups, self.answers, kills=self.kills))
        return {**figures, "sample_ids": sum(len(group.sample_ids) for group in self.groups)}


def start_plane() -> DataPlaneClient:
    plane = registered(build_data_plane_client(DP_CONFIG))
    plane.register_partition(RECORDS, {})
    return plane


def bootstrap_that_takes_too_long() -> dict[str, Any]:
    """A queue whose start is given up half-way must not be in the way of the next start."""
    impatient = DP_CONFIG.model_copy(update={"deadlines": DEADLINES.model_copy(update={"bootstrap": 0.5})})
    return attempt("bootstrap", lambda: build_data_plane_client(impatient))


def killed_actors(run: Run) -> dict[str, Any]:
    run.finalize(run.new_groups(len(DEATHS) + 5))
    run.kills = sum(path.stat().st_size for path in run.attempts.iterdir()) - len(run.groups)
    return run.figures()


def killed_unit(run: Run) -> dict[str, Any]:
    """One of two storage units: half of the rows are gone, and nobody may take them for rows that never were."""
    done = run.new_groups(1)
    run.finalize(done)
    groups = run.new_groups(4)
    staged = run.plane.list_samples(STAGING).keys()
    checkpoint = run.save("before-unit")
    run.kill("TransferQueueStorageUnit#1")
    report = {
        "calls": calls_on(run.plane, run.directory, ["put_samples", "get_samples", "clear_samples", "save_checkpoint"]),
        "finalize": run.refused(groups[:2]),
        "known answer": run.pool.submit(done[0].request).result(60) == run.answers[done[0].group_id],
        "placeholders": len(readable(run.plane, groups)),
        "cleared": len(staged - run.plane.list_samples(STAGING).keys()),
    }
    report["restart"] = run.restart_plane()
    run.plane.load_checkpoint(str(checkpoint))
    run.finalize(groups)
    return {**report, **run.figures()}


def killed_controller(run: Run) -> dict[str, Any]:
    """One of the two actors has an idle connection to the dead plane, when the next one is up: empty at first."""
    groups = run.new_groups(4)
    checkpoint = run.save("before-controller")
    run.kill("TransferQueueController", "transfer_queue")
    report = {
        "calls": calls_on(run.plane, run.directory, list(CALLS)),
        "connect": attempt("connect", lambda: build_data_plane_client(DP_CONFIG, bootstrap=False)),
        "finalize": run.refused(groups[:1]),
    }
    report["restart"] = run.restart_plane()
    report["empty"] = run.refused([group for group in groups if group.kind != "nothing valid"])
    report["published on an empty plane"] = len(run.plane.list_samples(CANONICAL))
    run.plane.load_checkpoint(str(checkpoint))
    run.finalize(groups)
    return {**report, **run.figures()}


def readable(plane: DataPlaneClient, groups: list[Group]) -> list[str]:
    """The canonical rows of these groups that a trainer could claim; the controller alone knows that."""
    claimed = set(plane.claim_meta(CANONICAL, "trainer", ["input_ids"], 1000).sample_ids)
    return [sample_id for group in groups for sample_id in group.sample_ids if sample_id in claimed]


KEYS = [f"k{number}" for number in range(6)]

CALLS: dict[str, Callable[[DataPlaneClient, Path], object]] = {
    "put_samples": lambda plane, _: plane.put_samples(KEYS, "p", {"tokens": [np.arange(3)] * len(KEYS)}),
    "get_samples": lambda plane, _: plane.get_samples(KEYS, "p"),
    "clear_samples": lambda plane, _: plane.clear_samples(KEYS, "p"),
    "save_checkpoint": lambda plane, path: plane.save_checkpoint(str(path / "never")),
    "get_tags": lambda plane, _: plane.get_tags(KEYS, "p"),
    "list_samples": lambda plane, _: plane.list_samples("p"),
    "claim_meta": lambda plane, _: plane.claim_meta("p", "train", ["tokens"], 3),
    "check_consumption_status": lambda plane, _: plane.check_consumption_status("p", ["train"]),
    "is_registered": lambda plane, _: plane.is_registered("q"),
    "register_partition": lambda plane, _: plane.register_partition("q", {"x": FieldSpec("bytes")}),
}


def attempt(name: str, call: Callable[[], object]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        call()
    except DataPlaneError as error:
        return {"error": type(error).__name__, "call": error.call, "text": str(error), "seconds": since(started)}
    return {"error": None, "call": name, "text": "", "seconds": since(started)}


def since(started: float) -> float:
    return round(time.monotonic() - started, 2)


def calls_on(plane: DataPlaneClient, directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """What each call comes to, all at the same time."""
    report: dict[str, dict[str, Any]] = {}

    def run(name: str) -> None:
        report[name] = attempt(name, lambda: CALLS[name](plane, directory))

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return report


def main(directory: Path) -> None:
    start_local_ray(6)
    report: dict[str, Any] = {"bootstrap": bootstrap_that_takes_too_long()}
    run = Run(directory)
    run.plane.register_partition("p", {"tokens": FieldSpec("int64", 1)})
    report["actors"] = killed_actors(run)
    run.plane.put_samples(KEYS, "p", {"tokens": [np.arange(3)] * len(KEYS)})
    report["unit"] = killed_unit(run)
    report["controller"] = killed_controller(run)
    run.pool.close()
    run.kill("TransferQueueController", "transfer_queue")
    report["last call"] = attempt("get_tags", lambda: run.plane.get_tags(KEYS, "p"))
    report["ended_at"] = time.time()
    print(json.dumps(report))
    # Nothing is closed: a process whose plane is dead must be able to end.


if __name__ == "__main__":
    main(Path(sys.argv[1]))
