"""Parts of a Mooncake plane that die or stall: a typed error in time, never bytes that were not written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout, DataPlaneUnavailable
from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.config import Deadlines
from tests.data_plane.plain_queue import QueueHost
from tests.data_plane.transfer_queue.test_calls import run_all
from tests.mooncake_site import MooncakeSite

pytestmark = pytest.mark.mooncake

SECONDS = 4.0
DEADLINES = Deadlines(read=SECONDS, write=SECONDS, clear=SECONDS, metadata=SECONDS, connect=20, checkpoint=SECONDS)
IN_TIME = SECONDS + 1.5

LARGE = np.arange(20_000)


@pytest.fixture
def site(queues: QueueHost) -> Iterator[MooncakeSite]:
    site = MooncakeSite(queues)
    yield site
    site.close()


@pytest.fixture
def plane(site: MooncakeSite) -> Iterator[Any]:
    plane = site.connect(DEADLINES)
    plane.register_partition("p", {"step": FieldSpec("int64"), "tokens": FieldSpec("int64", 1)})
    plane.put_samples(["a", "b"], "p", {"step": [1, 2], "tokens": [LARGE, np.arange(40)]}, tags=[{"x": 1}, {}])
    yield plane
    plane.close()


def value_calls(plane: Any, directory: Path) -> dict[str, Callable[[], object]]:
    """Every call that needs the store."""
    return {
        "put_samples": lambda: plane.put_samples(["c"], "p", {"step": [3], "tokens": [LARGE]}),
        "get_samples": lambda: plane.get_samples(["a", "b"], "p"),
        "get_samples partial": lambda: plane.get_samples(["a", "b"], "p", partial=True),
        "save_checkpoint": lambda: plane.save_checkpoint(str(directory / "ck")),
    }


def test_a_dead_memory_host_is_an_error_in_time_and_never_bytes(site: MooncakeSite, plane: Any, tmp_path: Path) -> None:
    site.hosts[0].kill()
    for name, (error, seconds) in run_all(value_calls(plane, tmp_path)).items():
        assert isinstance(error, DataPlaneUnavailable), name
        assert "host" in str(error), name
        assert seconds < IN_TIME, name
    assert plane.get_samples(["a", "b"], "p", ["step"])["step"].tolist() == [1, 2]
    assert plane.get_tags(["a"], "p") == [{"x": 1}]
    assert [path.name for path in tmp_path.iterdir()] == []
    plane.clear_samples(["a"], "p")
    assert plane.list_samples("p").keys() == {"b", "c"}


def test_a_row_whose_memory_the_master_has_written_off_is_lost_not_missing(plane: Any) -> None:
    """What is left some ten seconds after the death of a host: a row that is listed, and no object."""
    store = plane._checkpoints.connected.store
    store.remove_session()
    for partial in (False, True):
        with pytest.raises(DataPlaneUnavailable, match="row 'a' is lost") as raised:
            plane.get_samples(["a", "b"], "p", partial=partial)
        assert raised.value.keys == ("a", "b")
    assert plane.get_samples(["x"], "p", partial=True).missing == ["x"]
    plane.put_samples(["a"], "p", {"tokens": [LARGE]})
    np.testing.assert_array_equal(plane.get_samples(["a"], "p", ["tokens"])["tokens"][0], LARGE)
    plane.clear_samples(None, "p")
    assert plane.list_samples("p") == {}


def test_writes_go_on_once_the_master_has_written_a_dead_host_off(site: MooncakeSite, plane: Any) -> None:
    from tests.mooncake_site import start_hosts

    site.hosts.extend(start_hosts(site.master.address, 1))
    site.hosts[0].kill()
    until = time.monotonic() + 20
    failed = 0
    keys = [f"k{index}" for index in range(8)]
    while True:
        try:
            plane.put_samples(keys, "p", {"tokens": [LARGE] * 8})
            break
        except DataPlaneUnavailable:
            failed += 1
            assert time.monotonic() < until
    assert failed
    for tokens in plane.get_samples(keys, "p", ["tokens"])["tokens"]:
        np.testing.assert_array_equal(tokens, LARGE)


def test_a_stalled_memory_host_is_an_error_in_time_and_nothing_is_lost(site: MooncakeSite, plane: Any) -> None:
    site.hosts[0].stall()
    calls = value_calls(plane, Path("/nowhere"))
    del calls["save_checkpoint"]
    for name, (error, seconds) in run_all(calls).items():
        assert isinstance(error, DataPlaneTimeout | DataPlaneUnavailable), name
        assert seconds < IN_TIME, name
    site.hosts[0].resume()
    _eventually(lambda: plane.put_samples(["c"], "p", {"step": [3], "tokens": [LARGE]}))
    batch = plane.get_samples(["c", "b", "a"], "p")
    assert batch["step"].tolist() == [3, 2, 1]
    np.testing.assert_array_equal(batch["tokens"][2], LARGE)


def test_a_dead_master_is_an_error_in_time(site: MooncakeSite, plane: Any, tmp_path: Path) -> None:
    site.master.end()
    calls = {**value_calls(plane, tmp_path), "clear_samples": lambda: plane.clear_samples(["a"], "p")}
    for name, (error, seconds) in run_all(calls).items():
        assert isinstance(error, DataPlaneUnavailable), name
        assert "master" in str(error) or "host" in str(error), name
        assert seconds < IN_TIME, name
    assert plane.get_tags(["a"], "p") == [{"x": 1}]


def test_a_dead_controller_is_an_error_in_time(site: MooncakeSite, plane: Any, tmp_path: Path) -> None:
    site.controller.kill()
    for name, (error, seconds) in run_all(value_calls(plane, tmp_path)).items():
        assert isinstance(error, DataPlaneUnavailable), name
        assert "controller" in str(error)
        assert seconds < IN_TIME, name


def test_no_master_is_an_error_in_seconds(site: MooncakeSite) -> None:
    site.master.end()
    started = time.monotonic()
    with pytest.raises(DataPlaneUnavailable, match="no Mooncake master listens"):
        site.connect(DEADLINES, owners=False)
    assert time.monotonic() - started < 5


def test_a_master_that_cannot_start_says_why(site: MooncakeSite) -> None:
    from rollout_reassembler.data_plane.mooncake.master import start_master

    with pytest.raises(DataPlaneUnavailable, match="listens there already"):
        start_master(site.master.address, 10)


def test_a_master_ends_with_its_parent() -> None:
    import subprocess
    import sys

    code = (
        "import os, signal; from rollout_reassembler.data_plane.mooncake.master import start_master; "
        "print(start_master('127.0.0.1:0', 20).address, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    host, _, port = done.stdout.strip().rpartition(":")
    _eventually(lambda: _assert_refused(host, int(port)), AssertionError)


def _assert_refused(host: str, port: int) -> None:
    import socket

    with socket.socket() as probe:
        assert probe.connect_ex((host, port)) != 0


def _eventually(action: Callable[[], object], kind: type[BaseException] = DataPlaneError, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            action()
            return
        except kind:
            if time.monotonic() > until:
                raise
            threading.Event().wait(0.2)
