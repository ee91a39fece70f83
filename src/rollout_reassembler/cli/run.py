"""`reassemble run`: an archive in, canonical rows as Parquet out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import track

from rollout_reassembler.cli.archive import Archive, read_archive
from rollout_reassembler.cli.planes import CANONICAL, STAGING, OpenPlane, PlaneName, open_plane
from rollout_reassembler.cli.report import groups_table
from rollout_reassembler.contract.errors import BadArchive
from rollout_reassembler.contract.messages import FinalizedGroup, RolloutReassemblerActorConfig
from rollout_reassembler.trainer.exports import export_rows

ROWS_FILE = "rows.parquet"
GROUPS_FILE = "groups.jsonl"


def run_archive(
    folder: Path,
    out: Path,
    *,
    plane: PlaneName,
    workers: int,
    pad_token_id: int | None,
    max_seq_len: int | None,
    console: Console,
) -> list[FinalizedGroup]:
    """Finalize every group of the archive; writes `rows.parquet` and `groups.jsonl` (the answers) to `out`.

    Raises `BadArchive` before anything is started when the archive or `out` can't be used.
    """
    archive = read_archive(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArchive(f"{out}: can't be made the output folder ({error.strerror})") from error
    config = RolloutReassemblerActorConfig(
        partition_id=CANONICAL,
        staging_partition=STAGING,
        pad_token_id=archive.pad_token_id if pad_token_id is None else pad_token_id,
        max_seq_len=max_seq_len,
    )
    with open_plane(plane, config, workers=workers) as opened:
        groups = finalize_archive(archive, opened, console)
        rows = export_rows(opened.client, [group.meta for group in groups], out / ROWS_FILE)
    write_answers(groups, out / GROUPS_FILE)
    console.print(groups_table(groups, title=f"{archive.folder}: {len(groups)} groups, {rows} rows"))
    console.print(f"rows in {out / ROWS_FILE}, answers in {out / GROUPS_FILE}")
    return groups


def finalize_archive(archive: Archive, plane: OpenPlane, console: Console) -> list[FinalizedGroup]:
    """Stage the archive's rows on the plane and finalize its groups, with a progress bar."""
    epoch = plane.client.epoch()
    archive.stage(plane.client, STAGING)
    requests = [dataclasses.replace(request, staged_on=epoch) for request in archive.requests]
    answers: Iterable[FinalizedGroup] = plane.finalize_all(requests)
    return list(track(answers, "finalizing", total=len(requests), console=console, transient=True))


def write_answers(groups: Iterable[FinalizedGroup], path: Path) -> None:
    """One answer a line, without its timings."""
    with open(path, "w", encoding="utf-8") as file:
        for group in groups:
            answer = dataclasses.asdict(group)
            del answer["timings"]
            file.write(json.dumps(answer, ensure_ascii=False, sort_keys=True) + "\n")
