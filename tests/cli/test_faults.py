"""Each way in which the command ends: its exit code, and the one line that says why."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_reassembler.cli.doctor import Finding, verdict
from rollout_reassembler.cli.faults import EXIT_CODES, ExitCode
from rollout_reassembler.files.archive import RECEIPTS_FILE
from tests.conftest import Run

EXTRAS = ("jinja2", "matplotlib", "mooncake", "pyarrow", "ray", "tensordict", "tokenizers", "torch", "transfer_queue")
PLAIN = (*EXTRAS, "transformers", "zmq")
SLOW_START = """
import time
from rollout_reassembler.data_plane.memory import MemoryDataPlane
def put(*_, **__):
    print("working", flush=True)
    time.sleep(60)
MemoryDataPlane.put_samples = put
"""


def line_of(done: subprocess.CompletedProcess[str]) -> str:
    """What the command complained of; it must be all that it wrote on standard error, besides the log."""
    *log, line = done.stderr.splitlines()
    assert not [said for said in log if not said.startswith("g")], done.stderr
    assert line.startswith("reassemble: ")
    return line.removeprefix("reassemble: ")


def test_a_run_whose_rollouts_were_all_rejected_is_3_unless_that_is_allowed(
    archive: Path, tmp_path: Path, reassemble: Run
) -> None:
    lines = [json.loads(line) for line in (archive / RECEIPTS_FILE).read_text().splitlines()]
    lines[1:] = [{**line, "receipt": None} for line in lines[1:]]
    (archive / RECEIPTS_FILE).write_text("\n".join(map(json.dumps, lines)))
    done = reassemble("run", archive, "--out", tmp_path / "out")
    assert done.returncode == 3
    allowed = "--allow-rejected makes that exit code 0"
    assert line_of(done) == f"every rollout was rejected, so all rows are placeholders; {allowed}"
    assert (tmp_path / "out" / "rows.parquet").exists()
    assert reassemble("run", archive, "--out", tmp_path / "out", "--allow-rejected").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        (["demo", "--plane", "memory"], "reassemble demo needs"),
        (["run", "archive", "--out", "out"], "reassemble run needs 'pyarrow'"),
        (["sweep", "--older-than", "1"], "reassemble sweep needs 'ray'"),
        (["bench", "--no-reference"], "the simple plane needs Ray"),
        (["bench", "--plane", "memory"], "the reference arm needs torch"),
        (["mooncake-host"], "Mooncake cannot be imported"),
    ],
)
def test_a_plain_install_names_the_extra(arguments: list[str], needs: str, tmp_path: Path, reassemble: Run) -> None:
    done = reassemble(*arguments, without=PLAIN, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert needs in line_of(done)
    assert "pip install" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plane", ["simple", "mooncake_cpu"])
def test_a_plane_that_is_not_installed_names_the_extra(
    archive: Path, tmp_path: Path, reassemble: Run, plane: str
) -> None:
    done = reassemble("run", archive, "--out", tmp_path / "out", "--plane", plane, without=["ray"])
    extra = "ray,mooncake" if plane == "mooncake_cpu" else "ray"
    assert done.returncode == 2
    assert line_of(done) == (
        f"the {plane} plane needs 'ray', which is not installed: pip install 'rollout-reassembler[{extra}]'"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_bench_on_a_plain_install_measures_in_memory(reassemble: Run) -> None:
    arguments = ["bench", "--plane", "memory", "--no-reference", "--shape", "small", "--repeat", "1"]
    done = reassemble(*arguments, without=PLAIN)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "library", "arguments", "says"),
    [
        (
            "pyarrow",
            "libthing.so.3",
            ["run", "archive", "--out", "out"],
            "the system library libthing.so.3 is missing; install the package that holds it",
        ),
        ("mooncake", "libibverbs.so.1", ["mooncake-host", "--master", "127.0.0.1:1"], "apt-get install libibverbs1"),
    ],
)
def test_a_system_library_that_is_missing_is_named(
    module: str, library: str, arguments: list[str], says: str, tmp_path: Path, reassemble: Run
) -> None:
    hidden = f"""
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ImportError("{library}: cannot open shared object file: No such file or directory")
sys.meta_path.insert(0, Finder())
"""
    done = reassemble(*arguments, before=hidden, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in line_of(done)


def test_a_fault_of_ours_keeps_its_traceback(archive: Path, tmp_path: Path, reassemble: Run) -> None:
    bug = "import rollout_reassembler.cli.run as r\nr.finalize_archive = lambda *_, **__: 1 / 0"
    done = reassemble("run", archive, "--out", tmp_path / "out", before=bug)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_a_plane_that_fails_is_1(archive: Path, tmp_path: Path, reassemble: Run) -> None:
    failing = """
from rollout_reassembler.contract.errors import DataPlaneTimeout
from rollout_reassembler.data_plane.memory import MemoryDataPlane
def put(*_, **__):
    raise DataPlaneTimeout("no answer", call="put_samples", partition="staging", seconds=30)
MemoryDataPlane.put_samples = put
"""
    done = reassemble("run", archive, "--out", tmp_path / "out", before=failing)
    assert done.returncode == 1
    assert line_of(done) == "put_samples('staging'): no answer; after 30.0 s"
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("file", "{out}: is a file, not a folder"),
        ("file/below", "{file}: is a file, not a folder"),
        ("link", "{out}: is a symbolic link; name the folder itself"),
        ("full", "{out}: holds 'mine', which would be lost; name a folder of its own"),
        ("/proc/nowhere", "/proc: Operation not permitted|/proc/nowhere: No such file or directory"),
    ],
)
def test_an_output_that_cannot_be_is_said_before_any_work(
    archive: Path, tmp_path: Path, reassemble: Run, out: str, says: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "link").symlink_to("elsewhere")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = reassemble("run", archive, "--out", tmp_path / out, before=SLOW_START)
    assert done.returncode == 2, done.stderr
    assert line_of(done) in says.format(out=tmp_path / out, file=tmp_path / "file").split("|")
    assert not done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_demo_says_in_one_line_that_its_folder_cannot_be(tmp_path: Path, reassemble: Run) -> None:
    (tmp_path / "file").write_text("")
    done = reassemble("demo", "--plane", "memory", "--out", tmp_path / "file")
    assert done.returncode == 2
    assert line_of(done) == f"{tmp_path / 'file'}: is a file, not a folder"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_clean(archive: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    program = f"import sys\n{SLOW_START}\nfrom rollout_reassembler.cli import main\nmain()"
    arguments = ["run", str(archive), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err == ("reassemble: interrupted\n" if number == signal.SIGINT else "")
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_help_and_version_load_nothing_heavy(reassemble: Run) -> None:
    seen = f"import atexit\natexit.register(lambda: print('loaded', sorted(set({PLAIN!r}) & set(sys.modules))))"
    for arguments, says in ((["--help"], "Exit codes"), (["--version"], "reassemble 0."), (["run", "--help"], "--out")):
        done = reassemble(*arguments, before=seen)
        assert done.returncode == 0
        assert says in done.stdout
        assert done.stdout.endswith("loaded []\n")


def test_help_and_readme_name_every_exit_code() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| exit code |")[2].partition("\n\n")[0]
    named = re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)))
    assert sorted(map(int, named)) == sorted(ExitCode)
    assert all(f"{code:d}" in EXIT_CODES for code in ExitCode)


class TestDoctor:
    def test_a_plain_install_gets_each_fix_whole_within_80_columns(self, reassemble: Run) -> None:
        done = reassemble("doctor", without=PLAIN)
        assert done.returncode == 1
        lines = done.stdout.splitlines()
        for fix in (
            "pip install 'rollout-reassembler[archive]'",
            "pip install 'rollout-reassembler[ray]'",
            "pip install 'rollout-reassembler[demo]'",
            "pip install 'rollout-reassembler[mooncake]'",
        ):
            assert f"    {fix}" in lines
        assert max(map(len, lines)) <= 80

    def test_what_was_found_wraps_and_a_fix_does_not(self) -> None:
        fix = "apt-get install " + " ".join(f"library-number-{number}" for number in range(8))
        *found, last = verdict(
            Finding("Thing", False, "cannot be imported (" + "very " * 30 + "long)", (fix,))
        ).splitlines()
        assert last == f"    {fix}"
        assert max(map(len, found)) <= 80

    def test_brackets_in_what_was_found_are_shown(self) -> None:
        assert verdict(Finding("Thing", True, "1.0 [red]")).endswith("1.0 [red]")


class TestSweep:
    def test_a_sweep_of_nothing_is_refused_before_a_cluster_is_looked_for(self, reassemble: Run) -> None:
        done = reassemble("sweep")
        assert done.returncode == 2
        assert line_of(done) == "a sweep needs --rollout, --older-than or --untagged-after: what is it to find?"

    @pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "local", "127.0.0.1", "here:port"])
    def test_what_is_no_address_is_refused(self, reassemble: Run, address: str) -> None:
        done = reassemble("sweep", "--address", address, "--older-than", 1)
        assert done.returncode == 2
        assert line_of(done) == f"--address {address}: expected host:port of a Ray cluster, or auto"

    def test_where_nobody_answers(self, reassemble: Run) -> None:
        done = reassemble("sweep", "--address", "127.0.0.1:1", "--older-than", 1)
        assert done.returncode == 2
        assert line_of(done).startswith("no Ray cluster answers at 127.0.0.1:1")


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(os.urandom(16).hex())
    return path


@pytest.fixture(scope="module")
def plane_of_a_run(token: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver in a Ray cluster that wants its token, with the rows of two rollouts staged."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment.pop("RAY_ADDRESS", None)
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.scenarios.plane_of_a_run"],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield driver
    if driver.poll() is None:
        driver.communicate(timeout=60)


@pytest.mark.ray
@pytest.mark.slow
def test_a_sweep_says_where_it_is_and_clears_only_where_it_was_told(
    plane_of_a_run: subprocess.Popen[str], token: Path, tmp_path: Path, reassemble: Run
) -> None:
    assert plane_of_a_run.stdout is not None
    address = plane_of_a_run.stdout.readline().strip()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}

    refused = reassemble("sweep", "--older-than", 0, "--clear", env={**environment, "RAY_ADDRESS": address})
    assert refused.returncode == 2
    said = line_of(refused)
    assert said.startswith(f"--clear needs an explicit address, and auto found the Ray cluster at {address} (session ")
    assert said.endswith(f"repeat this with --address {address}")

    listed = reassemble("sweep", "--address", address, "--older-than", 0, env=environment)
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.startswith(f"attached to the Ray cluster at {address} (session session_")
    assert "staging partition 'staging'" in listed.stdout.splitlines()[0]
    assert "old" in listed.stdout
    assert "dry run" in listed.stdout

    cleared = reassemble("sweep", "--address", address, "--rollout", "old", "--clear", env=environment)
    assert cleared.returncode == 0, cleared.stderr

    stranger = tmp_path / "token"
    stranger.write_text(os.urandom(16).hex())
    for wrong in (stranger, tmp_path / "none"):
        other = {**environment, "RAY_AUTH_TOKEN_PATH": str(wrong), "HOME": str(tmp_path)}
        denied = reassemble("sweep", "--address", address, "--older-than", 0, env=other)
        assert denied.returncode == 2, denied.stderr
        assert line_of(denied).startswith(f"cannot join the Ray cluster at {address}: ")
        assert "RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token" in denied.stderr

    left, _ = plane_of_a_run.communicate(timeout=60)
    assert left.strip() == "new"
