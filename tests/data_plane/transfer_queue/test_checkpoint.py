"""Checkpoints of a queue on storage units: whole, or refused by the name of the file, with the queue as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_reassembler.contract.errors import CheckpointDamaged, DataPlaneError
from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.config import Deadlines
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.data_plane.transfer_queue import checkpoint
from tests.data_plane.plain_queue import PlainQueue, QueueHost

DEADLINES = Deadlines(read=10, write=10, clear=10, metadata=10, connect=20, checkpoint=20, quiesced=5)


@pytest.fixture(scope="module")
def queue(queues: QueueHost) -> Iterator[PlainQueue]:
    queue = queues.start_queue()
    yield queue
    queue.stop()


@pytest.fixture
def plane(queue: PlainQueue) -> Iterator[Any]:
    plane = queue.connect(DEADLINES)
    plane.register_partition("p", {"step": FieldSpec("int64")})
    plane.clear_samples(None, "p")
    yield plane
    plane.close()


@pytest.fixture
def saved(plane: Any, tmp_path: Path) -> Path:
    """A checkpoint of the row `old`; the plane holds the row `new` then."""
    directory = tmp_path / "checkpoint"
    plane.put_samples(["old"], "p", {"step": [1]}, [{"n": 1}])
    plane.save_checkpoint(str(directory), metadata={"n": 1})
    plane.clear_samples(None, "p")
    plane.put_samples(["new"], "p", {"step": [2]}, [{"n": 2}])
    return directory


def assert_as_it_was(plane: Any, directory: Path) -> None:
    assert plane.list_samples("p") == {"new": {"n": 2}}
    assert plane.get_samples(["new"], "p")["step"].tolist() == [2]
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    """A file of the same size from another checkpoint."""
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES = {"cut": cut, "flip": flip, "missing": Path.unlink, "foreign": swap}
FILES = ("metadata.json", "controller_state.pkl", "simple_storage/su_0_*.pkl", "simple_storage/storage_unit_info.json")


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_and_nothing_is_loaded(
    plane: Any, saved: Path, name: str, damage: Callable[[Path], None]
) -> None:
    (path,) = saved.glob(name)
    damage(path)
    with pytest.raises(CheckpointDamaged, match=path.name):
        plane.load_checkpoint(str(saved))
    assert_as_it_was(plane, saved)


def test_a_whole_one_is_loaded_over_rows(plane: Any, saved: Path) -> None:
    assert plane.load_checkpoint(str(saved)) == {"n": 1}
    assert plane.list_samples("p") == {"old": {"n": 1}}
    assert plane.get_samples(["old"], "p")["step"].tolist() == [1]
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_no_pickle_is_read_before_all_files_were_hashed(plane: Any, saved: Path, tmp_path: Path) -> None:
    """Whoever swaps a file for code: the code does not run."""
    sign = tmp_path / "it ran"
    code = f"cposix\nsystem\n(S'touch \"{sign}\"'\ntR.".encode()
    (path,) = saved.glob("simple_storage/su_0_*.pkl")
    path.write_bytes(code.ljust(path.stat().st_size, b" "))
    with pytest.raises(CheckpointDamaged, match="su_0_"):
        plane.load_checkpoint(str(saved))
    assert not sign.exists()


@pytest.mark.parametrize("part", ["unit", "controller"])
def test_a_part_that_cannot_load_its_whole_file_leaves_the_queue_as_it_was(plane: Any, saved: Path, part: str) -> None:
    """The file hashes to what the manifest says, and is not what the process can take."""
    name = {"unit": "simple_storage/su_0_*.pkl", "controller": "controller_state.pkl"}[part]
    (path,) = saved.glob(name)
    epoch = plane.epoch()
    path.write_bytes(b"no pickle")
    (saved / "manifest.json").unlink()
    checkpoint.write_file_manifest(saved, checkpoint._FORMAT)
    with pytest.raises(DataPlaneError, match="load"):
        plane.load_checkpoint(str(saved))
    assert_as_it_was(plane, saved)
    assert plane.epoch() == epoch
    plane.clear_samples(None, "p")
    with pytest.raises(DataPlaneError, match="load"):
        plane.load_checkpoint(str(saved))
    assert plane.list_samples("p") == {}
    assert plane.epoch() != epoch


def test_a_queue_that_cannot_be_set_back_says_where_its_rows_are(
    plane: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_parts = checkpoint._load_parts

    def fails(call: Any, controller: Any, units: Any, directory: Path) -> None:
        load_parts(call, controller, units, directory)
        raise call.site.failed("a unit ran out of memory")

    monkeypatch.setattr(checkpoint, "_load_parts", fails)
    with pytest.raises(DataPlaneError, match="could not be set back") as raised:
        plane.load_checkpoint(str(saved))
    monkeypatch.undo()
    before = saved.with_name("checkpoint.before")
    assert str(before) in str(raised.value)
    plane.load_checkpoint(str(before))
    shutil.rmtree(before)
    assert_as_it_was(plane, saved)


def test_one_without_a_manifest_is_not_loaded(plane: Any, saved: Path) -> None:
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"has no manifest\.json: what is in it cannot be checked"):
        plane.load_checkpoint(str(saved))
    assert_as_it_was(plane, saved)


@pytest.mark.parametrize("name", [".", "controller_state.pkl", "manifest.json"])
def test_one_that_every_user_may_write_is_not_loaded(plane: Any, saved: Path, name: str) -> None:
    os.chmod(saved, 0o755)  # where nobody else can enter, nobody else can write
    os.chmod(saved / name, 0o777)
    with pytest.raises(DataPlaneError, match=r"others can write to it: .*chmod -R go-w"):
        plane.load_checkpoint(str(saved))
    assert_as_it_was(plane, saved)


def test_one_of_another_number_of_units_is_not_loaded(plane: Any, saved: Path) -> None:
    units = saved / "simple_storage" / "storage_unit_info.json"
    units.write_text("[" + ", ".join([units.read_text()[1:-1]] * 2) + "]")
    (saved / "manifest.json").unlink()
    checkpoint.write_file_manifest(saved, checkpoint._FORMAT)
    with pytest.raises(DataPlaneError, match="of 2 storage units, the queue has 1"):
        plane.load_checkpoint(str(saved))
    assert_as_it_was(plane, saved)


def test_a_folder_that_cannot_be_written_is_named_and_the_last_checkpoint_stays(
    plane: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved.parent / "checkpoint.tmp").write_text("a file where the folder is to be")
    with pytest.raises(DataPlaneError, match=r"checkpoint can't be written"):
        plane.save_checkpoint(str(saved))
    (saved.parent / "checkpoint.tmp").unlink()
    assert plane.load_checkpoint(str(saved)) == {"n": 1}


@pytest.mark.parametrize("damage", [cut, flip, swap])
def test_a_damaged_memory_checkpoint_is_named_and_nothing_is_loaded(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    plane = MemoryDataPlane()
    plane.register_partition("p", {"step": FieldSpec("int64")})
    plane.save_checkpoint(str(tmp_path))
    plane.put_samples(["new"], "p", {"step": [2]})
    damage(tmp_path / "memory_plane.rows")
    with pytest.raises(CheckpointDamaged, match=r"memory_plane\.rows is damaged or cut short"):
        plane.load_checkpoint(str(tmp_path))
    assert plane.list_samples("p") == {"new": {}}
