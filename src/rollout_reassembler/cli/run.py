"""`reassemble run`: an archive in, canonical rows as Parquet out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from rollout_reassembler.contract.messages import FinalizedGroup, RolloutReassemblerActorConfig
from rollout_reassembler.contract.settings import Branches
from rollout_reassembler.data_plane.durable import replacing_folder
from rollout_reassembler.files.archive import RECEIPTS_FILE, STAGED_FILE, Archive, read_archive
from rollout_reassembler.files.exports import export_rows
from rollout_reassembler.files.planes import CANONICAL, STAGING, OpenPlane, open_plane
from rollout_reassembler.files.tables import groups_table, rejection_counts

ROWS_FILE = "rows.parquet"
GROUPS_FILE = "groups.jsonl"
SUMMARY_FILE = "summary.json"


def run_archive(
    folder: Path,
    out: Path,
    *,
    plane: str,
    workers: int,
    pad_token_id: int | None,
    max_seq_len: int | None,
    branches: Branches | None,
    uncounted: bool,
    console: Console,
) -> list[FinalizedGroup]:
    """Finalize every group of the archive; its rows, the answers and a summary become the folder `out`.

    The three appear together, on disk, or not at all. Raises `BadArchive` and `OSError` before anything is started
    when the archive or `out` can't be used, and `OSError` when the disk is full.
    """
    archive = read_archive(folder, uncounted=uncounted)
    config = RolloutReassemblerActorConfig(
        partition_id=CANONICAL,
        staging_partition=STAGING,
        pad_token_id=archive.pad_token_id if pad_token_id is None else pad_token_id,
        max_seq_len=max_seq_len,
    )
    with replacing_folder(out, only=(ROWS_FILE, GROUPS_FILE, SUMMARY_FILE)) as fresh:
        with open_plane(plane, config, workers=workers) as opened:
            groups = finalize_archive(archive, opened, console, branches=branches)
            rows = export_rows(opened.client, [group.meta for group in groups], fresh / ROWS_FILE)
        write_answers(groups, fresh / GROUPS_FILE)
        write_summary(groups, archive, fresh / SUMMARY_FILE)
    console.print(groups_table(groups, title=f"{archive.folder}: {len(groups)} groups, {rows} rows"))
    if not archive.counted:
        console.print(f"{archive.folder / RECEIPTS_FILE} has no counts: had it been cut, nothing would show it")
    console.print(f"rows in {out / ROWS_FILE}, answers in {out / GROUPS_FILE}")
    return groups


def finalize_archive(
    archive: Archive, plane: OpenPlane, console: Console, *, branches: Branches | None = None
) -> list[FinalizedGroup]:
    """Stage the archive's rows on the plane and finalize its groups, with a progress bar.

    `branches` counts for all groups, whatever the archive says of them.
    """
    epoch = plane.client.epoch()
    refused = archive.stage(plane.client, STAGING)
    if refused:
        console.print(f"{refused} rows of {archive.folder / STAGED_FILE} can't be staged; their rollouts are rejected")
    requests = [
        dataclasses.replace(request, staged_on=epoch, branches=branches or request.branches)
        for request in archive.requests
    ]
    answers: Iterable[FinalizedGroup] = plane.finalize_all(requests)
    return list(track(answers, "finalizing", total=len(requests), console=console, transient=True))


def write_answers(groups: Iterable[FinalizedGroup], path: Path) -> None:
    """One answer a line, without its timings."""
    with open(path, "w", encoding="utf-8") as file:
        for group in groups:
            answer = dataclasses.asdict(group)
            del answer["timings"]
            file.write(json.dumps(answer, ensure_ascii=False, sort_keys=True) + "\n")


def write_summary(groups: Sequence[FinalizedGroup], archive: Archive, path: Path) -> None:
    """What a reader of the rows can hold against them."""
    summary = {
        "groups": len(groups),
        "rows": sum(group.total_row_count for group in groups),
        "valid_rows": sum(group.valid_row_count for group in groups),
        "rejections": rejection_counts(groups),
        "archive_was_counted": archive.counted,
    }
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
