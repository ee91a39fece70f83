"""`reassemble sweep`: what is left in a running plane's staging partition, and clearing it."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from rich.table import Table

from rollout_reassembler.data_plane.config import DataPlaneConfig
from rollout_reassembler.data_plane.factory import build_data_plane_client
from rollout_reassembler.reassembly.sweep import SweepReport, sweep_staging

_CONNECT_TIMEOUT_S = 5


def sweep_running_plane(
    address: str,
    *,
    staging_partition: str,
    rollout_ids: list[str],
    older_than_s: float | None,
    live: Path | None,
    untagged_after_s: float | None,
    clear: bool,
) -> SweepReport:
    """Attach to the TransferQueue of the Ray cluster at `address` and sweep. Raises what `sweep_staging` does."""
    import ray

    _refuse_unreachable(address)
    live_rollouts = set(live.read_text(encoding="utf-8").split("\n")) - {""} if live is not None else set()
    was_in_a_cluster = ray.is_initialized()
    if not was_in_a_cluster:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        client = build_data_plane_client(_running_plane(), bootstrap=False)
        try:
            return sweep_staging(
                client,
                staging_partition,
                rollout_ids=rollout_ids or None,
                older_than_s=older_than_s,
                live_rollouts=live_rollouts,
                untagged_after_s=untagged_after_s,
                dry_run=not clear,
            )
        finally:
            client.close()
    finally:
        if not was_in_a_cluster:
            ray.shutdown()


def _refuse_unreachable(address: str) -> None:
    """Raise `ConnectionError` where nobody listens; Ray would go on trying for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ConnectionError(f"no Ray cluster answers at {address} ({error})") from error


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
    table = Table("rollout", "staged rows", title="cleared" if report.cleared else "found (dry run; --clear clears)")
    for rollout_id, keys in report.found.items():
        table.add_row(rollout_id, str(len(keys)))
    if report.untagged:
        table.add_row("(no tags: puts that failed)", str(len(report.untagged)))
    table.caption = f"{len(report.keys)} rows; {report.spared} others spared"
    return table
