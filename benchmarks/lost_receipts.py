"""What a lost receipt costs a group: `python benchmarks/lost_receipts.py` prints it against the rows that are staged.

Groups of four rollouts are finalized on a real queue beside 1,000, 50,000 and 500,000 staged rows of others: good
ones, and ones of which one rollout has no receipt, in turns. Last comes the collection that clears what those lost:
one look through the whole partition for all of them, off every group's path.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rollout_reassembler.bench.run import open_client
from rollout_reassembler.bench.shapes import Shape, make_group
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.reassembly.reassembler import RolloutReassembler
from rollout_reassembler.reassembly.rows import register_canonical_partition
from rollout_reassembler.staging.schema import CALL_FIELD, EXTRAS_FIELD, register_staging_partition
from rollout_reassembler.staging.sink import StagingSink

SHAPE = Shape("tiny", 4, 3, prompt=50, tool=20, generated=10)
STAGING, CANONICAL = "staging", "canonical"
_AT_ONCE = 5000

_numbers = itertools.count()


def fill(client: DataPlaneClient, rows: int) -> None:
    """Stage so many rows of one byte, of rollouts that nobody finalizes."""
    there = len(client.list_samples(STAGING))
    now = client.now()
    for start in range(there, rows, _AT_ONCE):
        keys = [f"filler/{index}" for index in range(start, min(start + _AT_ONCE, rows))]
        columns = {CALL_FIELD: [b"x"] * len(keys), EXTRAS_FIELD: [b""] * len(keys)}
        client.put_samples(keys, STAGING, columns, [{"rollout_id": key, "staged_at": now} for key in keys])


def timed_group(client: DataPlaneClient, reassembler: RolloutReassembler, *, is_lost: bool) -> float:
    """Milliseconds from a request to its answer."""
    number = next(_numbers)
    group = make_group(SHAPE, seed=number, prefix=f"g{number}")
    StagingSink(client, staging_partition=STAGING).stage_all(group.all_calls)
    request = group.request(f"g{number}")
    if is_lost:
        request = dataclasses.replace(request, receipts=(None, *request.receipts[1:]))
    start = time.perf_counter()
    answer = reassembler.finalize(request)
    elapsed = time.perf_counter() - start
    assert len(answer.rejections) == is_lost
    assert not answer.cleanup_pending
    return elapsed * 1e3


def main(
    rows: Annotated[list[int] | None, typer.Option(help="Rows that are staged beside the groups.")] = None,
    runs: Annotated[int, typer.Option(help="Groups of either kind.")] = 31,
) -> None:
    """Print the table."""
    table = Table(title=f"a group of {SHAPE}, ms, medians of {runs}", title_justify="left")
    for name in ("staged rows", "good", "a lost receipt", "more", "collecting"):
        table.add_column(name, justify="right")
    load = os.getloadavg()
    with open_client("simple") as client:
        register_staging_partition(client, STAGING)
        register_canonical_partition(client, CANONICAL)
        reassembler = RolloutReassembler(
            client, partition_id=CANONICAL, staging_partition=STAGING, pad_token_id=0, max_seq_len=None
        )
        for count in rows or [1_000, 50_000, 500_000]:
            fill(client, count)
            good, lost = [], []
            for _ in range(runs):
                good.append(timed_group(client, reassembler, is_lost=False))
                lost.append(timed_group(client, reassembler, is_lost=True))
            start = time.perf_counter()
            collected = reassembler.collect_lost()
            collecting = (time.perf_counter() - start) * 1e3
            assert collected.rows == runs * SHAPE.calls
            more = median(lost) - median(good)
            figures = (median(good), median(lost), more, collecting)
            table.add_row(f"{count:,}", *(f"{figure:,.1f}" for figure in figures))
    console = Console()
    console.print(table)
    console.print(f"load average {' / '.join(f'{figure:.1f}' for figure in load)} before the runs")


if __name__ == "__main__":
    typer.run(main)
