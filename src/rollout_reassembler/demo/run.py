"""The main job from end to end: agents on a policy, capture, staging, receipts, rows, and the proof.

    policy + tokenizer, made on the spot
    groups × rollouts agents, black boxes, some at a time       → staged calls, ledgers
    sabotage: one retried call, one failing capture, one tampered row
    receipts → requests → finalized groups                      → canonical rows, one a chain
    the policy scores every row                                  → summary.json

The sabotage shows what the system is for: the retried call's dead branch is proven and left out, the failing
capture costs its own call, and the tampered row its own rollout. In each group one agent compacts its history, one has
two others work for it and one strips what it sends back: all that they sampled is trained.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollout_reassembler.capture import CallRecorder, CaptureLedger
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest, RolloutReassemblerActorConfig
from rollout_reassembler.contract.records import StagedCall, StageResult, staging_key
from rollout_reassembler.data_plane.base import ClaimQueue, RowStore
from rollout_reassembler.data_plane.durable import make_folder, replacing_file
from rollout_reassembler.demo.agents import Answer, solve, solve_compacting, solve_stripping, solve_with_two_helpers
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
RETRIED, UNCAPTURED, TAMPERED, COMPACTING, DELEGATING, STRIPPING = range(6)
_AGENTS = {
    COMPACTING: ("compacts", solve_compacting),
    DELEGATING: ("two sub-agents", solve_with_two_helpers),
    STRIPPING: ("strips text", solve_stripping),
}
_SABOTAGED = {RETRIED: "sends a call again", UNCAPTURED: "a capture fails", TAMPERED: "a row is tampered"}
_PLAIN = "plain"
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

    def rollouts_by_agent(self) -> dict[str, list[str]]:
        """What each rollout's agent does → the rollouts."""
        found: dict[str, list[str]] = {}
        for group in range(self.groups):
            for index, rollout_id in enumerate(self.rollout_ids(group)):
                does = _AGENTS[index][0] if index in _AGENTS else _PLAIN
                found.setdefault(_SABOTAGED.get(index, does) if group == 0 else does, []).append(rollout_id)
        return found


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
            f"{summary['routes_checked']:,} replayed routes are its own; {summary['trained_tokens']:,} of "
            f"{summary['sampled_tokens']:,} tokens that valid rollouts sampled are trained; re-tokenising the text "
            f"would have changed {summary['retokenized_rollouts']} of {summary['valid_rollouts']} rollouts"
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
        sampled = Counter[str]()
        answers = _roll_out(settings, policy, plane.client, ledger, sampled, seed, console)
        requests = [_request(group, settings, ledger, answers, epoch) for group in range(settings.groups)]
    _tamper(plane.client, settings.rollout_ids(0)[TAMPERED])
    if keep:
        _keep_archive(settings.out / "archive", requests, plane.client, policy.tokenizer.pad_id)
        kept, rows = settings.out / "archive", settings.out / "rows"
        console.print(f"archive kept in {kept}: try `reassemble run {kept} --out {rows}`")
    with console.status("proving and publishing the rows"):
        groups = list(plane.finalize_all(requests))
    console.print(groups_table(groups, title=f"{len(groups)} groups over the {settings.plane} plane"))
    masks = _of_rollouts(plane.client, groups, requests, "token_mask")
    trained = {rollout: int(sum(mask.sum() for mask in of_rollout)) for rollout, of_rollout in masks.items()}
    rows_of = {rollout: len(of_rollout) for rollout, of_rollout in masks.items()}
    console.print(_agents_table(settings, rows_of, sampled, trained))
    with console.status("scoring every row with the policy"):
        proof = prove_rows(plane.client, groups, policy)
    token_ids = _of_rollouts(plane.client, groups, requests, "input_ids")
    summary: dict[str, Any] = {
        "groups": len(groups),
        "rows": proof.rows,
        "valid_rows": proof.valid_rows,
        "valid_rollouts": len(trained),
        "rejections": rejection_counts(groups),
        "tokens_checked": proof.tokens_checked,
        "max_abs_logprob_error": proof.max_abs_logprob_error,
        "retokenized_rollouts": retokenized_rollouts(
            [(answers[r], ids) for r, ids in token_ids.items()], policy.tokenizer
        ),
        "routes_checked": proof.routes_checked,
        "routes_equal": proof.routes_equal,
        "routes_missing": proof.routes_missing,
        "rows_by_rollout": rows_of,
        "sampled_tokens": sum(sampled[rollout] for rollout in trained),
        "trained_tokens": sum(trained.values()),
        "staged_rows_left": len(plane.client.list_samples(STAGING)),
    }
    faults = find_faults(settings, groups, proof, summary["staged_rows_left"])
    untrained = {
        rollout: sampled[rollout] - tokens
        for rollout, tokens in trained.items()
        if rollout not in settings.rollout_ids(0)[: len(_SABOTAGED)] and tokens != sampled[rollout]
    }
    if untrained:
        faults.append(f"sampled tokens that are not trained, by rollout: {untrained}")
    return _Outcome(summary, faults)


def _of_rollouts(
    client: ClaimQueue, groups: Sequence[FinalizedGroup], requests: Sequence[ReassemblyRequest], column: str
) -> dict[str, list[Any]]:
    """Valid rollout → the column's value in each of its rows."""
    found = {}
    for group, request in zip(groups, requests, strict=True):
        values = iter(client.get_data(group.meta, [column])[column])
        for rollout_id, count in zip(request.rollout_ids, group.rows_by_rollout, strict=True):
            of_rollout = list(islice(values, count))
            if rollout_id not in group.rejections:
                found[rollout_id] = of_rollout
    return found


def _agents_table(
    settings: DemoSettings, rows: Mapping[str, int], sampled: Mapping[str, int], trained: Mapping[str, int]
) -> Table:
    table = Table(title="what became of the agents' rollouts", title_justify="left")
    table.add_column("agent", overflow="fold")
    for name in ("rollouts", "valid", "rows each", "sampled", "trained"):
        table.add_column(name, justify="right")
    for does, rollouts in settings.rollouts_by_agent().items():
        table.add_row(
            does,
            str(len(rollouts)),
            str(sum(rollout in trained for rollout in rollouts)),
            " or ".join(map(str, sorted({rows[rollout] for rollout in rollouts if rollout in rows}))) or "–",
            f"{sum(sampled[rollout] for rollout in rollouts):,}",
            f"{sum(trained.get(rollout, 0) for rollout in rollouts):,}",
        )
    return table


def _roll_out(
    settings: DemoSettings,
    policy: DemoPolicy,
    client: RowStore,
    ledger: CaptureLedger,
    sampled: Counter[str],
    seed: int,
    console: Console,
) -> dict[str, Answer]:
    """Let all agents work, `AGENTS_AT_A_TIME` of them at once. Rollout id → what its agent ended with.

    `sampled` gets how many tokens each rollout sampled.
    """
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
            index = settings.rollout_ids(group).index(rollout_id)
            agent = _AGENTS[index][1] if index in _AGENTS else solve
            if (group, index) == (0, RETRIED):
                agent = partial(solve, retried_call=1)
            answer = agent(_TASKS[group % len(_TASKS)], partial(server.chat, rollout_id), calls=settings.calls)
            progress.advance(task)
            return answer

        answers = dict(
            zip((rollout for _, rollout in rollouts), agents.map(work, *zip(*rollouts, strict=True)), strict=True)
        )
    sampled.update(server.sampled_tokens)
    return answers


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
        branches="all",
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


def find_faults(settings: DemoSettings, groups: Sequence[FinalizedGroup], proof: Proof, staged_left: int) -> list[str]:
    """What a run must show besides equal log probabilities: the right rows, the right rejections, no leak."""
    # With two calls the one that is not captured gave the answer, and no chain is left that earned the reward.
    costly = (TAMPERED,) if settings.calls > 2 else (TAMPERED, UNCAPTURED)
    expected = {settings.rollout_ids(0)[index] for index in costly}
    rejected = {rollout for group in groups for rollout in group.rejections}
    faults = []
    if not proof.holds:
        faults.append(f"{proof}, with a bound of {MAX_LOGPROB_ERROR}")
    rows = [count for group in groups for count in group.rows_by_rollout]
    if proof.rows != sum(rows) or len(rows) != settings.groups * settings.rollouts or 0 in rows:
        faults.append(f"{proof.rows} rows for {settings.groups * settings.rollouts} rollouts, which have {rows}")
    if rejected != expected:
        faults.append(f"rejected {sorted(rejected)}, expected {sorted(expected)}")
    if staged_left:
        faults.append(f"{staged_left} staged rows were left behind")
    return faults
