"""What the ledger costs: `python benchmarks/admissions.py` prints two tables; `--json FILE` keeps the figures.

The first is the time of all admissions of one rollout against its turns, with messages that are new objects each
time, as a proxy parses them. The second is how many calls a second (one admission and one record each) 1, 16 and 64
rollouts make at once, a thread each, in a folder on a disk, and in memory for comparison.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rollout_reassembler.capture import CaptureAdmission, CaptureLedger, CommitCoords

IN_MEMORY = Path("/dev/shm")
TURNS = (500, 1000, 2000, 4000)
ROLLOUTS = (1, 16, 64)
_HASH = "ab" * 32
_TEXT = "a word of the tool and what it found " * 6


def admissions(
    folder: Annotated[Path, typer.Option(help="A folder on the disk to measure.")] = Path(),
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep the figures here.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs a figure; the median counts.")] = 3,
    calls: Annotated[int, typer.Option(min=1, help="Calls a rollout, in the second table.")] = 20,
    most_turns: Annotated[int, typer.Option(min=1, help="Leave out rollouts of more turns.")] = TURNS[-1],
) -> None:
    """Measure admissions against turns, and calls a second of many rollouts at once."""
    console = Console()
    measured: dict[str, Any] = {"turns": [], "calls": []}
    for turns in (turns for turns in TURNS if turns <= most_turns):
        seconds = _median(partial(_admit_turns, turns), IN_MEMORY, repeat)
        measured["turns"].append({"turns": turns, "seconds": seconds})
    for rollouts in ROLLOUTS:
        where = {"disk": folder, "memory": IN_MEMORY}
        rates = {
            name: rollouts * calls / _median(partial(_run_rollouts, rollouts, calls), root, repeat)
            for name, root in where.items()
        }
        measured["calls"].append({"rollouts": rollouts, **rates})
    if json_file is not None:
        json_file.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    console.print(_table("all admissions of one rollout, s", measured["turns"]))
    console.print(_table("calls a second", measured["calls"]))


def _median(run: Callable[[Path], float], root: Path, repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(dir=root, prefix="admissions-") as home:
            seconds.append(run(Path(home)))
    return statistics.median(seconds)


def _admit_turns(turns: int, home: Path) -> float:
    """Seconds that all admissions of one rollout take; records and the making of messages are not counted."""
    ledger = CaptureLedger(home)
    history = [{"role": "user", "content": "begin"}]
    spent = 0.0
    for turn in range(turns):
        request = json.loads(json.dumps(history))
        started = time.perf_counter()
        admission = ledger.admit("r", request, model_call_id=f"c{turn}")
        spent += time.perf_counter() - started
        history.append(_record(ledger, admission, turn))
        history.append({"role": "user", "content": f"{turn} {_TEXT}"})
    return spent


def _run_rollouts(rollouts: int, calls: int, home: Path) -> float:
    """Wall seconds of `calls` calls of each of several rollouts, a thread a rollout."""
    ledger = CaptureLedger(home)
    started = time.perf_counter()
    with ThreadPoolExecutor(rollouts) as pool:
        list(pool.map(lambda number: _run_rollout(ledger, f"r{number}", calls), range(rollouts)))
    return time.perf_counter() - started


def _run_rollout(ledger: CaptureLedger, rollout_id: str, calls: int) -> None:
    history = [{"role": "user", "content": "begin"}]
    for turn in range(calls):
        admission = ledger.admit(rollout_id, history, model_call_id=f"c{turn}")
        history += [_record(ledger, admission, turn), {"role": "user", "content": f"{turn} {_TEXT}"}]


def _record(ledger: CaptureLedger, admission: CaptureAdmission, turn: int) -> dict[str, str]:
    answer = {"role": "assistant", "content": f"answer {turn} {_TEXT}"}
    coords = CommitCoords(
        rollout_id=admission.rollout_id,
        model_call_id=admission.model_call_id,
        parent_call_id=admission.parent_call_id,
        prev_len=admission.prev_len,
        delta_len=10,
        cum_len=admission.prev_len + 10,
        weight_version=1,
        digest=_HASH,
        extras_digest=_HASH,
        staging_key=f"{admission.rollout_id}/{admission.model_call_id}",
        chain_hash=_HASH,
        cumulative_hash=_HASH,
        generation_len=5,
    )
    ledger.record(admission, coords, response_id=f"resp-{turn}", output=answer)
    return answer


def _table(title: str, rows: list[dict[str, float]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


if __name__ == "__main__":
    typer.run(admissions)
