"""`reassemble sweep`: what is left in a running plane's staging partition, and clearing it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from rollout_reassembler.contract.errors import RequestError
from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.reassembly.sweep import SweepReport, sweep_staging

AUTO = "auto"
_STDERR = 2


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that this process is attached to: who else is on the machine must be able to tell it."""

    address: str
    session: str
    node: str

    def __str__(self) -> str:
        return f"the Ray cluster at {self.address} (session {self.session}, this node {self.node})"


def sweep_running_plane(
    address: str,
    *,
    staging_partition: str,
    rollout_ids: list[str],
    older_than_s: float | None,
    live: Path | None,
    untagged_after_s: float | None,
    clear: bool,
    say: Callable[[str], None],
) -> SweepReport:
    """Attach to the TransferQueue of the Ray cluster at `address` and sweep; `say` hears first where that is.

    Raises `RequestError` for a sweep of nothing, and for one that clears on a cluster that nobody named,
    `ConnectionError` when the cluster cannot be joined, and what `sweep_staging` raises.
    """
    if not (rollout_ids or older_than_s is not None or untagged_after_s is not None):
        raise RequestError("a sweep needs --rollout, --older-than or --untagged-after: what is it to find?")
    live_rollouts = set(live.read_text(encoding="utf-8").split("\n")) - {""} if live is not None else set()
    with _attached(address) as cluster:
        if clear and address == AUTO:
            raise RequestError(
                f"--clear needs an explicit address, and auto found {cluster}; if that is the one, repeat this with "
                f"--address {cluster.address}"
            )
        say(f"attached to {cluster}, staging partition {staging_partition!r}")
        with closing(build_data_plane_client(_running_plane(), bootstrap=False)) as client:
            return sweep_staging(
                client,
                staging_partition,
                rollout_ids=rollout_ids or None,
                older_than_s=older_than_s,
                live_rollouts=live_rollouts,
                untagged_after_s=untagged_after_s,
                dry_run=not clear,
            )


@contextmanager
def _attached(address: str) -> Iterator[Cluster]:
    """Join the cluster for the time of a block. Raises `RequestError` for what is no address of one."""
    # Ray tries for 20 seconds otherwise.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")
    import ray

    from rollout_reassembler.data_plane.transfer_queue.cluster import attach_ray

    _, _, port = address.rpartition(":")
    if address != AUTO and ("://" in address or not port.isdigit()):
        raise RequestError(f"--address {address}: expected host:port of a Ray cluster, or auto")
    with _without_standard_error():
        attach_ray(address)
    try:
        here = ray.get_runtime_context()
        yield Cluster(here.gcs_address, here.get_session_name(), ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


@contextmanager
def _without_standard_error() -> Iterator[None]:
    """Ray's core writes a line there a try, from below Python; what the tries came to is in the error it raises."""
    sys.stderr.flush()
    kept = os.dup(_STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nowhere)


def _running_plane() -> DataPlaneConfig:
    """How to reach the queue of this Ray cluster, whatever its rows are in."""
    from rollout_reassembler.data_plane.mooncake import environment as mooncake_environment
    from rollout_reassembler.data_plane.transfer_queue import environment

    deadlines = DataPlaneConfig().deadlines
    environment.prepare_environment()
    mooncake_environment.prepare_environment(deadlines)
    # Only now: the queue and the store read their environment when they are imported.
    from rollout_reassembler.data_plane.transfer_queue.connection import running_backend

    backend = running_backend(deadlines.connect)
    fields = {"impl": "transfer_queue", "backend": backend, "mooncake_cpu": {"local_hostname": ""}}
    return DataPlaneConfig.model_validate(fields)


def sweep_table(report: SweepReport) -> Table:
    """One line a rollout."""
    table = Table(
        "rollout", "staged rows", min_width=48, title="cleared" if report.cleared else "found (dry run; --clear clears)"
    )
    for rollout_id, keys in report.found.items():
        table.add_row(rollout_id, str(len(keys)))
    if report.untagged:
        table.add_row("(no tags: puts that failed)", str(len(report.untagged)))
    table.caption = f"{len(report.keys)} rows; {report.spared} others spared"
    return table
