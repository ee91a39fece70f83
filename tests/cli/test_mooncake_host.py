"""`reassemble mooncake-host`: what it accepts, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from rollout_reassembler.cli.app import app

COMMAND = [sys.executable, "-m", "rollout_reassembler", "mooncake-host"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--segment-size", "much"], "is no size"),
        (["--segment-size", "0"], "greater than 0"),
        (["--protocol", "carrier pigeon"], "'tcp' or 'rdma'"),
        (["--protocol", "rdma"], "needs device_name"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["mooncake-host", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.mooncake
def test_without_a_master_it_says_so() -> None:
    done = subprocess.run(
        [*COMMAND, "--master", "127.0.0.1:1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "no Mooncake master listens at 127.0.0.1:1" in done.stderr


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    from rollout_reassembler.data_plane.mooncake.master import start_master

    master = start_master("127.0.0.1:0", 20)
    yield master.address
    master.end()


@pytest.mark.mooncake
def test_a_signal_ends_it(master: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--master", master, "--segment-size", "32MiB"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "of 33554432 bytes is in the store" in process.stdout.readline().replace("\n", " ")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


@pytest.mark.mooncake
def test_commands_come_by_the_line(master: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--master", master, "--segment-size", "32MiB", "--commands"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    commands = [{"operation": "DESCRIBE", "session": "s"}, {"operation": "NO"}, "no JSON"]
    lines = [command if isinstance(command, str) else json.dumps(command) for command in commands]
    out, _ = process.communicate("\n".join(lines) + "\n", timeout=60)
    ready, described, refused, garbage = map(json.loads, out.splitlines())
    assert ready["ready"]["size"] == 32 << 20
    assert described["answer"]["session"] == "s"
    assert described["answer"]["segment"] == ready["ready"]["segment"]
    assert refused["error"] == garbage["error"] == "RequestError"
    assert process.returncode == 0
