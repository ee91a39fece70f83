"""A process that stands still within a write while a plane on Mooncake is quiesced."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import DataPlaneError, WriteFenced
from rollout_reassembler.data_plane import barrier
from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite
from tests.data_plane.plain_queue import QueueHost
from tests.data_plane.stoppable import Stoppable
from tests.mooncake_site import MooncakeSite

pytestmark = pytest.mark.mooncake

LARGE = np.arange(20_000)
SITE = CallSite("test")


@pytest.fixture(scope="module")
def site(queues: QueueHost) -> Iterator[MooncakeSite]:
    site = MooncakeSite(queues)
    yield site
    site.close()


@pytest.fixture
def planes(site: MooncakeSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.setattr(barrier, "BEAT", 0.1)
    monkeypatch.setattr(barrier, "LEASE", 1.5)
    monkeypatch.setattr(barrier, "SILENT", 2.5)
    planes = [site.connect() for _ in range(2)]
    planes[0].register_partition("p", {"tokens": FieldSpec("int64", 1)})
    planes[1].put_samples(["a"], "p", {"tokens": [LARGE]}, [{"n": 1}])
    yield planes
    for plane in planes:
        plane.close()


def put(plane: Any) -> None:
    plane.put_samples(["a"], "p", {"tokens": [LARGE + 1]}, [{"n": 2}])


def clear(plane: Any) -> None:
    plane.clear_samples(["a"], "p")


@pytest.mark.parametrize(
    ("write", "step"),
    [*((put, step) for step in (0, 1, 2, 3, 5)), *((clear, step) for step in range(4))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_a_stopped_writer_had_begun_does_not_go_on_in_the_block(
    planes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, step: int
) -> None:
    """The checkpoint that is taken while it wakes holds what there was before; the same call then does it."""
    writer = Stoppable(planes[1], monkeypatch)
    writer.stop_at(step)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write, planes[1])
        assert writer.is_stopped.wait(10)
        with planes[0].quiesce(10):
            before = planes[0]._checkpoints._driver()._stored(SITE)
            writer.resume()
            with pytest.raises(WriteFenced):
                writing.result(10)
            assert planes[0]._checkpoints._driver()._stored(SITE) == before
            planes[0].save_checkpoint(str(tmp_path / "ck"))
    write(planes[1])
    if write is clear:
        assert planes[0].list_samples("p") == {}
    else:
        assert planes[0].get_samples(["a"], "p")["tokens"][0].tolist() == (LARGE + 1).tolist()


@pytest.mark.parametrize("step", range(1, 6))
def test_objects_or_messages_that_slip_out_are_told_to_both(
    planes: list[Any], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    writer = Stoppable(planes[1], monkeypatch)
    writer.stop_at(step, behind_look=True)

    def wake_it() -> None:
        writer.resume()
        with pytest.raises(WriteFenced, match="part of the write may have arrived"):
            writing.result(10)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(put, planes[1])
        assert writer.is_stopped.wait(10)
        with pytest.raises(DataPlaneError, match="not quiesced to the end"), planes[0].quiesce(10):
            wake_it()
    put(planes[1])
    assert planes[0].get_samples(["a"], "p")["tokens"][0].tolist() == (LARGE + 1).tolist()
