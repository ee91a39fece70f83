"""Scripts and docstring examples that show a cluster: on the session's queue, and scripts in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rollout_reassembler as rr
from rollout_reassembler.data_plane.base import DataPlaneClient
from tests.snippets.pages import Snippet
from tests.snippets.running import run
from tests.snippets.test_snippets import EXAMPLES, SCRIPTS
from tests.snippets.worlds import CLUSTER_WORLDS, Cluster, names_in

ON_CLUSTER = [example for example in EXAMPLES if example.where in CLUSTER_WORLDS]
ON_MOONCAKE = [example for example in EXAMPLES if example.where == "rollout_reassembler.data_plane.mooncake.master"]


@pytest.fixture
def cluster(queue_plane: DataPlaneClient, queue_config: rr.DataPlaneConfig, partition_name: str) -> Cluster:
    train, staging = f"{partition_name}/train", f"{partition_name}/staging"
    rr.register_staging_partition(queue_plane, staging)
    rr.register_canonical_partition(queue_plane, train)
    config = rr.RolloutReassemblerActorConfig(train, staging, pad_token_id=0, max_seq_len=None)
    return Cluster(queue_plane, queue_config, config)


@pytest.mark.ray
@pytest.mark.parametrize("example", ON_CLUSTER, ids=str)
def test_the_example_of_a_docstring_runs_on_a_cluster(
    example: Snippet, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(example, {**names_in(example.where), **CLUSTER_WORLDS[example.where](cluster)})


@pytest.mark.mooncake
@pytest.mark.parametrize("example", ON_MOONCAKE, ids=str)
def test_the_example_of_a_mooncake_docstring_runs(example: Snippet) -> None:
    run(example, names_in(example.where))


def _script(title: str) -> Snippet:
    return next(script for script in SCRIPTS if script.title == title)


def _run_alone(title: str, folder: Path) -> str:
    """The script in a process of its own, as who copied it would run it; what it printed."""
    (folder / title).write_text(_script(title).text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, title], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


CLUSTER_OUTPUT = ["2 of 2 rows are valid", "[[11, 12, 13, 14], [11, 12, 13, 14]]"]


@pytest.mark.ray
@pytest.mark.slow
def test_the_cluster_script_runs_as_printed(tmp_path: Path) -> None:
    assert _run_alone("on_a_cluster.py", tmp_path).splitlines() == CLUSTER_OUTPUT


@pytest.mark.ray
def test_the_cluster_script_runs_beside_a_ray_that_is_there(
    queue_plane: DataPlaneClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """It neither starts a second Ray nor ends the queue and the Ray that it found."""
    run(_script("on_a_cluster.py"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == CLUSTER_OUTPUT
    assert queue_plane.list_samples("train")


@pytest.mark.ray
@pytest.mark.mooncake
@pytest.mark.slow
def test_the_mooncake_script_runs_as_printed(tmp_path: Path) -> None:
    _run_alone("on_mooncake.py", tmp_path)
    assert (tmp_path / "checkpoints" / "step-7" / "manifest.json").exists()
