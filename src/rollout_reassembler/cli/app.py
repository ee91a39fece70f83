"""The commands and their options. What a command does is in the module that it imports when it runs."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollout_reassembler.cli.faults import EXIT_CODES, ExitCode, complain, in_one_line
from rollout_reassembler.contract.features import feature

app = typer.Typer(
    help="Turn agent rollouts into verified training rows for reinforcement learning.\n\n"
    "Try `reassemble demo` first: a real policy, real agents, and a proof that every trained token is one the policy "
    "sampled.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()


def _installed_plane(name: str) -> str:
    from rollout_reassembler.data_plane import backends

    if name not in (known := backends.names()):
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, known))}.")
    return name


class BenchPlane(StrEnum):
    """The planes that the bench can share with its reference."""

    memory = "memory"
    simple = "simple"


class Branches(StrEnum):
    """Which chains of a rollout become rows."""

    terminal = "terminal"
    all = "all"


PlaneOption = Annotated[
    str,
    typer.Option(
        "--plane",
        "--backend",
        callback=_installed_plane,
        metavar="[memory|simple|mooncake_cpu|…]",
        help="memory: all in this process, no Ray. simple: local Ray, TransferQueue and reassembler actors. "
        "mooncake_cpu: the same, with rows in a Mooncake store. Any other: the plane of that name, where one is "
        "installed.",
    ),
]
WorkersOption = Annotated[int, typer.Option(min=1, help="Reassembler actors (planes other than memory).")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from rollout_reassembler import __version__

        print(f"reassemble {__version__}")
        raise typer.Exit


@app.callback()
def reassemble(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command()
@in_one_line()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for summary.json, and for the archive with --keep.")] = Path(
        "runs/demo"
    ),
    plane: PlaneOption = "simple",
    workers: WorkersOption = 2,
    groups: Annotated[int, typer.Option(min=1, help="Prompt groups.")] = 3,
    rollouts: Annotated[int, typer.Option(min=4, help="Rollouts a group; three of the first group are sabotaged.")] = 8,
    calls: Annotated[int, typer.Option(min=2, help="Model calls a rollout.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the policy's weights and of its sampling.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep an archive for `reassemble run`.")] = False,
) -> None:
    """The main job on this machine: a small real policy, agents with a tool, capture to proof.

    Writes summary.json and exits with 1 if the proof fails.
    """
    with feature("reassemble demo", extra="demo"):
        from rollout_reassembler.demo.run import DemoSettings, run_demo

    settings = DemoSettings(out=out, plane=plane, workers=workers, groups=groups, rollouts=rollouts, calls=calls)
    if not run_demo(settings, seed=seed, keep=keep, console=console):
        raise typer.Exit(ExitCode.FAILED)


@app.command()
@in_one_line()
def run(
    archive: Annotated[Path, typer.Argument(help="Folder with receipts.jsonl and staged.parquet.")],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for rows.parquet, groups.jsonl and summary.json. It appears whole or not at all; one that "
            "holds nothing else is replaced."
        ),
    ],
    plane: PlaneOption = "memory",
    workers: WorkersOption = 2,
    pad_token_id: Annotated[int | None, typer.Option(help="Token of placeholders; the archive's by default.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(min=1, help="Longer rows are rejected.")] = None,
    branches: Annotated[
        Branches | None,
        typer.Option(
            help="terminal: one row a rollout. all: one for each chain of its conversation. What the archive says of a "
            "group by default, else terminal."
        ),
    ] = None,
    allow_rejected: Annotated[
        bool, typer.Option("--allow-rejected", help="Exit with 0 even if every rollout was rejected; otherwise with 3.")
    ] = False,
    uncounted: Annotated[
        bool,
        typer.Option("--uncounted", help="Read receipts without their counts, of which a cut would not be noticed."),
    ] = False,
) -> None:
    """Finalize an archive: prove its staged calls against its receipts and write the canonical rows as Parquet.

    `reassemble demo --keep` leaves an archive to try this on.
    """
    with feature("reassemble run", extra="archive"):
        from rollout_reassembler.cli.run import run_archive

    groups = run_archive(
        archive,
        out,
        plane=plane,
        workers=workers,
        pad_token_id=pad_token_id,
        max_seq_len=max_seq_len,
        branches=branches.value if branches is not None else None,
        uncounted=uncounted,
        console=console,
    )
    if not allow_rejected and not any(group.valid_row_count for group in groups):
        raise complain(
            "every rollout was rejected, so all rows are placeholders; --allow-rejected makes that exit code 0",
            ExitCode.ALL_REJECTED,
        )


@app.command()
@in_one_line()
def sweep(
    address: Annotated[
        str,
        typer.Option(
            help="Ray cluster of the run, host:port; auto finds one on this machine, which may be another's: --clear "
            "wants an address."
        ),
    ] = "auto",
    staging_partition: Annotated[str, typer.Option(help="The staging partition.")] = "staging",
    rollout: Annotated[list[str] | None, typer.Option(help="Sweep this rollout's rows (repeatable).")] = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="Sweep rows staged so many seconds ago.")] = None,
    live: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File of rollout ids to spare, one a line: all that may yet be finalized."
        ),
    ] = None,
    untagged_after: Annotated[
        float | None, typer.Option(min=0, help="Sweep rows that have no tags now and so many seconds later.")
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Clear what was found, on the cluster of --address; otherwise only list it.")
    ] = False,
) -> None:
    """List, and with --clear remove, staged rows that no finalizer will come for.

    Says first which cluster and partition it looks at. On a cluster with tokens it shows yours as Ray finds it:
    RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token.
    """
    with feature("reassemble sweep", extra="ray"):
        from rollout_reassembler.cli.sweep import sweep_running_plane, sweep_table

        report = sweep_running_plane(
            address,
            staging_partition=staging_partition,
            rollout_ids=rollout or [],
            older_than_s=older_than,
            live=live,
            untagged_after_s=untagged_after,
            clear=clear,
            say=print,
        )
    console.print(sweep_table(report))


class BenchShape(StrEnum):
    """The agents that a group is measured for."""

    small = "small"
    agentic = "agentic"
    long = "long"


@app.command()
@in_one_line()
def bench(
    shape: Annotated[
        BenchShape,
        typer.Option(
            help="rollouts × calls; tokens of the prompt, of a tool result, of a generation. small: 8 × 4; 500, 200, "
            "100. agentic: 8 × 30; 2000, 400, 300. long: 16 × 50; 8000, 1000, 500."
        ),
    ] = BenchShape.agentic,
    plane: Annotated[
        BenchPlane,
        typer.Option(
            "--plane", "--backend", help="memory: rows in this process. simple: TransferQueue on a local Ray."
        ),
    ] = BenchPlane.simple,
    repeat: Annotated[int, typer.Option(min=1, help="Groups to measure; medians want at least 5.")] = 5,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference/--no-reference",
            help="Also measure nemo-gym's verifier over TransferQueue's own calls, on the same queue, and the ratio.",
        ),
    ] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file, too.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tokens.")] = 0,
) -> None:
    """Measure how fast groups are finalized on this machine, phase by phase, next to what one has today.

    All arms finalize the same calls, in turns, in this process, and must publish the same rows.

    Read the ratio first: other work on the machine moves the milliseconds.

    A quick look: `reassemble bench --shape small --plane memory`.
    """
    from rollout_reassembler.bench.report import print_report, write_report
    from rollout_reassembler.bench.run import BenchSettings, CannotMeasure, run_bench
    from rollout_reassembler.bench.shapes import SHAPES
    from rollout_reassembler.data_plane.durable import replacing_file

    settings = BenchSettings(SHAPES[shape.value], plane.value, repeat=repeat, reference=reference, seed=seed)
    try:
        with ExitStack() as writing, console.status("") as status:
            partial = writing.enter_context(replacing_file(json_file)) if json_file is not None else None
            report = run_bench(settings, progress=status.update)
            if partial is not None:
                write_report(report, partial)
    except CannotMeasure as error:
        raise complain(str(error)) from None
    print_report(report, console)


@app.command("mooncake-host")
@in_one_line()
def mooncake_host(
    master: Annotated[str, typer.Option(help="Address of the Mooncake master.")] = "127.0.0.1:50051",
    segment_size: Annotated[str, typer.Option(help="Memory to give, for example 512MiB or 64GiB.")] = "1GiB",
    local_hostname: Annotated[str, typer.Option(help="This machine as others reach it.")] = "127.0.0.1",
    protocol: Annotated[str, typer.Option(help="tcp, or rdma with --device-name.")] = "tcp",
    device_name: Annotated[str, typer.Option(help="RDMA devices, comma-separated.")] = "",
    metadata_server: Annotated[str, typer.Option(help="P2PHANDSHAKE, or the address of one.")] = "P2PHANDSHAKE",
    buffer_size: Annotated[str, typer.Option(help="Memory to move objects of a checkpoint through.")] = "256MiB",
    commands: Annotated[
        bool, typer.Option("--commands", help="Obey checkpoint commands on stdin, one a line; end when it ends.")
    ] = False,
) -> None:
    """Give memory of this machine to a Mooncake store, and do nothing else: the rows in it outlive their writers."""
    from pydantic import ValidationError

    from rollout_reassembler.cli.mooncake_host import run_host
    from rollout_reassembler.data_plane.config import MooncakeCpuBackendConfig

    try:
        cfg = MooncakeCpuBackendConfig.model_validate(
            {
                "master_server_address": master,
                "global_segment_size": segment_size,
                "local_buffer_size": buffer_size,
                "local_hostname": local_hostname,
                "protocol": protocol,
                "device_name": device_name,
                "metadata_server": metadata_server,
            }
        )
    except ValidationError as error:
        what = error.errors()[0]
        raise complain(f"{'.'.join(map(str, what['loc']))}: {what['msg']}") from None
    run_host(cfg, commands=commands, console=console)


@app.command()
@in_one_line()
def doctor() -> None:
    """Say whether this machine can run all of it: one line a requirement, with the fix. Exit code 1 if not."""
    from rollout_reassembler.cli.doctor import examine, verdict

    findings = examine()
    for finding in findings:
        print(verdict(finding))
    if not all(finding.ok or finding.optional for finding in findings):
        raise typer.Exit(ExitCode.FAILED)
