"""The main job from end to end: agents on a policy, capture, staging, receipts, rows, and the proof.

    policy + tokenizer, made on the spot
    groups × rollouts agents, black boxes, some at a time       → staged calls, ledgers
    sabotage: one retried call, one failing capture, one tampered row
    receipts → requests → finalized groups                      → canonical rows
    the policy scores every row                                  → summary.json

The sabotage shows what the system is for: the retried call's dead branch is proven and left out, and
each of the other two costs its own rollout and nothing else.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollout_reassembler.capture import CallRecorder, CaptureLedger
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest, RolloutReassemblerActorConfig
from rollout_reassembler.contract.records import StagedCall, StageResult, staging_key
from rollout_reassembler.data_plane.base import ClaimQueue, RowStore
from rollout_reassembler.data_plane.durable import make_folder, replacing_file
from rollout_reassembler.demo.agents import Answer, solve
from rollout_reassembler.demo.policy import DemoPolicy
from rollout_reassembler.demo.proof import MAX_LOGPROB_ERROR, Proof, prove_rows, retokenized_rollouts
from rollout_reassembler.demo.server import PolicyServer
from rollout_reassembler.files.archive import write_archive
from rollout_reassembler.files.planes import CANONICAL, STAGING, OpenPlane, open_plane
from rollout_reassembler.files.tables import groups_table, rejection_counts
from rollout_reassembler.staging.codec import unpack_call
from rollout_reassembler.staging.places import place
from rollout_reassembler.staging.schema import CALL_FIELD, EXTRAS_FIELD
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.staging.source import StagingSource

AGENTS_AT_A_TIME = 8
WEIGHT_VERSION = 7
RETRIED, UNCAPTURED, TAMPERED = 0, 1, 2
_TASKS = (
    "What is 318 + 45? Please use the calculator.",
    "Which of Zürich and 東京 is warmer now? Ask the weather service.",
    "Convert 12 m² to ft² and round the result, step by step.",
)


@dataclass(frozen=True)
class DemoSettings:
    """How large the demo is and where it runs."""

    out: Path = Path("runs/demo")
    plane: str = "simple"
    workers: int = 2
    groups: int = 3
    rollouts: int = 8
    calls: int = 4

    def rollout_ids(self, group: int) -> list[str]:
        return [f"g{group}/r{index}" for index in range(self.rollouts)]


def run_demo(settings: DemoSettings, *, seed: int, keep: bool, console: Console) -> bool:
    """Run the demo and write `summary.json`; whether the proof holds. Raises `OSError` when `out` can't be written."""
    start = time.perf_counter()
    # The capture that is made to fail says so in the table.
    logging.getLogger("rollout_reassembler.capture").setLevel(logging.ERROR)
    make_folder(settings.out)
    with console.status("building the policy and training its tokenizer"):
        policy = DemoPolicy(seed)
    config = RolloutReassemblerActorConfig(
        partition_id=CANONICAL,
        staging_partition=STAGING,
        pad_token_id=policy.tokenizer.pad_id,
        router_replay_enabled=True,
        max_seq_len=8192,
    )
    with ExitStack() as running:
        with console.status(f"starting the data plane ({settings.plane})"):
            plane = running.enter_context(open_plane(settings.plane, config, workers=settings.workers))
        outcome = _run(settings, policy, plane, seed=seed, keep=keep, console=console)
    summary = {**outcome.summary, "wall_s": round(time.perf_counter() - start, 1)}
    path = settings.out / "summary.json"
    with replacing_file(path) as partial:
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for fault in outcome.faults:
        console.print(f"[red]the proof fails:[/] {fault}")
    if not outcome.faults:
        console.print(
            f"[green]proven:[/] {summary['tokens_checked']:,} trained tokens carry the policy's own log probabilities "
            f"(largest difference {summary['max_abs_logprob_error']:.1e}), {summary['routes_equal']:,} of "
            f"{summary['routes_checked']:,} replayed routes are its own; re-tokenising the text would have changed "
            f"{summary['retokenized_rollouts']} of {summary['valid_rows']} rollouts"
        )
    console.print(f"{summary['wall_s']} s in all, summary in {path}")
    return not outcome.faults


@dataclass(frozen=True)
class _Outcome:
    summary: dict[str, Any]
    faults: list[str]


def _run(
    settings: DemoSettings, policy: DemoPolicy, plane: OpenPlane, *, seed: int, keep: bool, console: Console
) -> _Outcome:
    epoch = plane.client.epoch()
    with tempfile.TemporaryDirectory() as ledgers:
        ledger = CaptureLedger(Path(ledgers))
        answers = _roll_out(settings, policy, plane.client, ledger, seed, console)
        requests = [_request(group, settings, ledger, answers, epoch) for group in range(settings.groups)]
    _tamper(plane.client, settings.rollout_ids(0)[TAMPERED])
    if keep:
        _keep_archive(settings.out / "archive", requests, plane.client, policy.tokenizer.pad_id)
        kept, rows = settings.out / "archive", settings.out / "rows"
        console.print(f"archive kept in {kept}: try `reassemble run {kept} --out {rows}`")
    with console.status("proving and publishing the rows"):
        groups = list(plane.finalize_all(requests))
    console.print(groups_table(groups, title=f"{len(groups)} groups over the {settings.plane} plane"))
    with console.status("scoring every row with the policy"):
        proof = prove_rows(plane.client, groups, policy)
    summary: dict[str, Any] = {
        "groups": len(groups),
        "rows": proof.rows,
        "valid_rows": proof.valid_rows,
        "rejections": rejection_counts(groups),
        "tokens_checked": proof.tokens_checked,
        "max_abs_logprob_error": proof.max_abs_logprob_error,
        "retokenized_rollouts": _retokenized(plane.client, groups, requests, answers, policy),
        "routes_checked": proof.routes_checked,
        "routes_equal": proof.routes_equal,
        "routes_missing": proof.routes_missing,
        "staged_rows_left": len(plane.client.list_samples(STAGING)),
    }
    return _Outcome(summary, find_faults(settings, groups, proof, summary["staged_rows_left"]))


def _roll_out(
    settings: DemoSettings,
    policy: DemoPolicy,
    client: RowStore,
    ledger: CaptureLedger,
    seed: int,
    console: Console,
) -> dict[str, Answer]:
    """Let all agents work, `AGENTS_AT_A_TIME` of them at once. Rollout id → what its agent ended with."""
    sink = _OutageSink(StagingSink(client, staging_partition=STAGING))
    sink.outage_of = settings.rollout_ids(0)[UNCAPTURED]
    source = StagingSource(client, staging_partition=STAGING)
    recorder = CallRecorder(sink, weight_version=lambda: WEIGHT_VERSION, source=source)
    server = PolicyServer(policy, recorder, ledger, seed)
    rollouts = [(group, rollout) for group in range(settings.groups) for rollout in settings.rollout_ids(group)]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        Progress(*columns, console=console, transient=True) as progress,
        ThreadPoolExecutor(AGENTS_AT_A_TIME) as agents,
    ):
        task = progress.add_task("agents at work, rollouts", total=len(rollouts))

        def work(group: int, rollout_id: str) -> Answer:
            retried = 1 if rollout_id == settings.rollout_ids(0)[RETRIED] else None
            chat = partial(server.chat, rollout_id)
            answer = solve(_TASKS[group % len(_TASKS)], chat, calls=settings.calls, retried_call=retried)
            progress.advance(task)
            return answer

        return dict(
            zip((rollout for _, rollout in rollouts), agents.map(work, *zip(*rollouts, strict=True)), strict=True)
        )


@dataclass
class _OutageSink:
    """The staging sink, with an outage for the second call of one rollout."""

    sink: StagingSink
    outage_of: str = ""

    def stage(self, record: StagedCall) -> StageResult:
        if record.rollout_id == self.outage_of and record.model_call_id == "call-1":
            return StageResult(ok=False, error="the demo made this one fail")
        return self.sink.stage(record)


def _request(
    group: int, settings: DemoSettings, ledger: CaptureLedger, answers: dict[str, Answer], epoch: str
) -> ReassemblyRequest:
    rollout_ids = settings.rollout_ids(group)
    return ReassemblyRequest(
        group_id=f"g{group}",
        rollout_ids=tuple(rollout_ids),
        canonical_sample_ids=None,
        receipts=tuple(
            ledger.receipt(rollout, response_id=answers[rollout].response_id).model_dump() for rollout in rollout_ids
        ),
        rewards=tuple(answers[rollout].reward for rollout in rollout_ids),
        fallback_weight_version=WEIGHT_VERSION,
        prompt_idx=group,
        staged_on=epoch,
    )


def _tamper(client: RowStore, rollout_id: str) -> None:
    """Flip one bit of one staged token, as a bad disk or a stray write would."""
    staged = place(staging_key(rollout_id, "call-1"), "")
    key = next(key for key in client.list_samples(STAGING) if key.startswith(staged))
    value = bytearray(client.get_samples([key], STAGING, [CALL_FIELD])[CALL_FIELD][0])
    value[unpack_call(bytes(value)).tokens_at + 7] ^= 1
    client.put_samples([key], STAGING, {CALL_FIELD: [bytes(value)]})


def _keep_archive(folder: Path, requests: Sequence[ReassemblyRequest], client: RowStore, pad_token_id: int) -> None:
    tags = client.list_samples(STAGING)
    batch = client.get_samples(sorted(tags), STAGING)
    staged = {key: (tags[key]["rollout_id"], row[CALL_FIELD], row[EXTRAS_FIELD]) for key, row in batch.rows()}
    write_archive(folder, requests, staged, pad_token_id=pad_token_id)


def _retokenized(
    client: ClaimQueue,
    groups: Sequence[FinalizedGroup],
    requests: Sequence[ReassemblyRequest],
    answers: dict[str, Answer],
    policy: DemoPolicy,
) -> int:
    rows = []
    for group, request in zip(groups, requests, strict=True):
        batch = client.get_data(group.meta, ["input_ids"])
        for rollout_id, token_ids in zip(request.rollout_ids, batch["input_ids"], strict=True):
            if rollout_id not in group.rejections:
                rows.append((answers[rollout_id], token_ids))
    return retokenized_rollouts(rows, policy.tokenizer)


def find_faults(settings: DemoSettings, groups: Sequence[FinalizedGroup], proof: Proof, staged_left: int) -> list[str]:
    """What a run must show besides equal log probabilities: the right rows, the right rejections, no leak."""
    expected = {settings.rollout_ids(0)[UNCAPTURED], settings.rollout_ids(0)[TAMPERED]}
    rejected = {rollout for group in groups for rollout in group.rejections}
    faults = []
    if not proof.holds:
        faults.append(f"{proof}, with a bound of {MAX_LOGPROB_ERROR}")
    if proof.rows != settings.groups * settings.rollouts:
        faults.append(f"{proof.rows} rows for {settings.groups * settings.rollouts} rollouts")
    if rejected != expected:
        faults.append(f"rejected {sorted(rejected)}, expected {sorted(expected)}")
    if staged_left:
        faults.append(f"{staged_left} staged rows were left behind")
    return faults
