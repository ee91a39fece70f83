"""How fast both backends are: `python benchmarks/stores.py` prints calls on staged rows, and checkpoints.

A row is a packed call of 25 kB and no extras, tagged as a sink tags it. Medians of nine. The
checkpoint is of rows of 256 KiB over two storage units or two memory hosts; loading is into the plane
that was saved, after all rows were cleared.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import ray
import typer
from rich.console import Console
from rich.table import Table

from rollout_reassembler import DataPlaneConfig, build_data_plane_client, register_staging_partition
from rollout_reassembler.data_plane.base import DataPlaneClient, FieldSpec
from rollout_reassembler.data_plane.transfer_queue.cluster import start_local_ray

BACKENDS = ("simple", "mooncake_cpu")
ROWS = (1, 64, 512)
CALL_BYTES = 25_000
TURNS = 9
LARGE = 256 << 10


@contextmanager
def plane_on(backend: str) -> Iterator[DataPlaneClient]:
    mooncake = {
        "master_server_address": "127.0.0.1:0",
        "start_master": True,
        "memory_hosts": 2,
        "global_segment_size": 2 << 30,
    }
    config = {
        "impl": "transfer_queue",
        "backend": backend,
        "simple": {"num_storage_units": 2},
        "mooncake_cpu": mooncake,
    }
    plane = build_data_plane_client(DataPlaneConfig.model_validate(config))
    yield plane
    plane.close()


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def measure_calls(plane: DataPlaneClient, rows: int) -> list[float]:
    """Median milliseconds of a put, a get and a clear."""
    values = [os.urandom(CALL_BYTES) for _ in range(rows)]
    tags: list[dict[str, Any]] = [{"rollout_id": "r", "staged_at": 0.0}] * rows
    columns = {"call": values, "extras": [b""] * rows}
    taken = []
    for turn in range(TURNS):
        keys = [f"{rows}/{turn}/{index}" for index in range(rows)]
        taken.append(
            (
                milliseconds(lambda keys=keys: plane.put_samples(keys, "staging", columns, tags)),  # type: ignore[misc]
                milliseconds(lambda keys=keys: plane.get_samples(keys, "staging", ["call"])),  # type: ignore[misc]
                milliseconds(lambda keys=keys: plane.clear_samples(keys, "staging")),  # type: ignore[misc]
            )
        )
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def measure_checkpoint(plane: DataPlaneClient, megabytes: int) -> tuple[float, float]:
    """Megabytes a second of a save and of a load."""
    plane.register_partition("large", {"payload": FieldSpec("bytes")})
    keys = [f"k{index}" for index in range((megabytes << 20) // LARGE)]
    for start in range(0, len(keys), 128):
        some = keys[start : start + 128]
        plane.put_samples(some, "large", {"payload": [os.urandom(LARGE) for _ in some]})
    with tempfile.TemporaryDirectory() as folder:
        saved = milliseconds(lambda: plane.save_checkpoint(f"{folder}/checkpoint"))
        plane.clear_samples(None, "large")
        loaded = milliseconds(lambda: plane.load_checkpoint(f"{folder}/checkpoint"))
    assert len(plane.get_samples(keys[:8], "large")) == 8
    plane.clear_samples(None, "large")
    return 1000 * megabytes / saved, 1000 * megabytes / loaded


def main(
    megabytes: Annotated[int, typer.Option(min=1, help="Size of the checkpoint.")] = 1024,
) -> None:
    """Measure both backends, one after the other, on a Ray of this machine."""
    calls = Table("backend", "rows", "put ms", "get ms", "clear ms")
    checkpoints = Table("backend", "save MB/s", "load MB/s")
    start_local_ray(8)
    for backend in BACKENDS:
        with plane_on(backend) as plane:
            register_staging_partition(plane, "staging")
            for rows in ROWS:
                calls.add_row(backend, str(rows), *(f"{ms:.1f}" for ms in measure_calls(plane, rows)))
            save, load = measure_checkpoint(plane, megabytes)
            checkpoints.add_row(backend, f"{save:.0f}", f"{load:.0f}")
    ray.shutdown()
    console = Console()
    console.print(calls)
    console.print(checkpoints)


if __name__ == "__main__":
    typer.run(main)
