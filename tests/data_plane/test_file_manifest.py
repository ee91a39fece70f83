"""The files of a checkpoint, without a store: what is written is whole, what is damaged is named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rollout_reassembler.contract.errors import DataPlaneError, RequestError
from rollout_reassembler.data_plane.checkpoint import (
    CONTROLLER,
    MANIFEST,
    Checkpoint,
    Manifest,
    SavedObject,
    ShardWriter,
    check_files,
    check_shard,
    read_manifest,
    read_object,
    shard_path,
    write_manifest,
)

HERE = Checkpoint("ck", "session")
OBJECTS = {"one": b"1" * 1000, "empty": b"", "two": bytes(range(256)) * 9}


def write(directory: Path, checkpoint: Checkpoint = HERE) -> Manifest:
    with ShardWriter(str(directory), "shard-0-0.rows", checkpoint) as shard:
        saved = tuple(shard.add(name, content) for name, content in OBJECTS.items())
    (directory / CONTROLLER).write_bytes(b"state")
    manifest = Manifest(
        checkpoint, hashlib.sha256(b"state").hexdigest(), {"shard-0-0.rows": shard.size}, saved, {"step": 7}
    )
    write_manifest(directory, manifest)
    return manifest


def test_what_was_written_is_read(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    assert read_manifest(tmp_path) == manifest
    check_files(tmp_path, manifest)
    path = tmp_path / "shard-0-0.rows"
    with path.open("rb") as file:
        check_shard(file, path, HERE)
        assert {saved.name: read_object(file, path, saved) for saved in manifest.objects} == OBJECTS
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONTROLLER, MANIFEST, "shard-0-0.rows"]


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a/../b", "link/x"], ids=lambda name: name or "empty"
)
def test_a_shard_outside_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("/tmp")
    with pytest.raises(RequestError, match="does not lie in"):
        shard_path(str(tmp_path), name)


def test_a_symlink_that_leads_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shard-0-0.rows").symlink_to(tmp_path.parent / "elsewhere")
    with pytest.raises(RequestError, match="does not lie in"):
        shard_path(str(tmp_path), "shard-0-0.rows")


def test_a_relative_folder_is_refused() -> None:
    with pytest.raises(RequestError, match="relative path"):
        shard_path("checkpoints/7", "shard-0-0.rows")


def test_a_shard_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path)
    before = (tmp_path / "shard-0-0.rows").read_bytes()
    with pytest.raises(RequestError, match=r"shard-0-0\.rows exists already"):
        write(tmp_path)
    assert (tmp_path / "shard-0-0.rows").read_bytes() == before


def test_a_shard_that_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    def give_up() -> None:
        with ShardWriter(str(tmp_path), "shard-0-0.rows", HERE) as shard:
            shard.add("one", b"1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(DataPlaneError, match=r"nowhere/shard-0-0\.rows can't be written"),
        ShardWriter(str(tmp_path / "nowhere"), "shard-0-0.rows", HERE),
    ):
        pytest.fail("it cannot be opened")


def test_no_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DataPlaneError, match="no checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "digest alone"])
def test_a_damaged_manifest_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path)
    path = tmp_path / MANIFEST
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-20] ^= 1
    else:
        del content[{"cut": len(content) - 7, "empty": 0, "digest alone": 64}[damage] :]
    path.write_bytes(content)
    with pytest.raises(DataPlaneError, match=rf"{MANIFEST} is damaged or cut short"):
        read_manifest(tmp_path)


def test_missing_and_short_files_are_named(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    shard = tmp_path / "shard-0-0.rows"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(DataPlaneError, match=r"shard-0-0\.rows holds \d+ bytes, the manifest says \d+"):
        check_files(tmp_path, manifest)
    shard.unlink()
    with pytest.raises(DataPlaneError, match=r"shard-0-0\.rows is missing"):
        check_files(tmp_path, manifest)
    shard.write_bytes(content)
    (tmp_path / CONTROLLER).write_bytes(b"other")
    with pytest.raises(DataPlaneError, match=rf"{CONTROLLER} does not hash"):
        check_files(tmp_path, manifest)
    (tmp_path / CONTROLLER).unlink()
    with pytest.raises(DataPlaneError, match=rf"{CONTROLLER} is missing"):
        check_files(tmp_path, manifest)


@pytest.mark.parametrize("other", [Checkpoint("ck", "another session"), Checkpoint("another", "session")])
def test_a_manifest_of_another_checkpoint_or_session_is_told(tmp_path: Path, other: Checkpoint) -> None:
    manifest = write(tmp_path, other)
    mixed = Manifest(HERE, manifest.controller_sha256, manifest.shards, manifest.objects)
    with pytest.raises(DataPlaneError, match=rf"shard-0-0\.rows belongs to checkpoint '{other.id}'"):
        check_files(tmp_path, mixed)


@pytest.mark.parametrize("first_line", [b"\x00\xff garbage\n", b"[1]\n", b"{}\n", b""])
def test_a_file_that_is_no_shard_is_told(tmp_path: Path, first_line: bytes) -> None:
    path = tmp_path / "shard-0-0.rows"
    path.write_bytes(first_line + b"x" * 100)
    with path.open("rb") as file, pytest.raises(DataPlaneError, match="is no shard"):
        check_shard(file, path, HERE)


def test_a_flipped_byte_names_file_and_object(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    path = tmp_path / "shard-0-0.rows"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with path.open("rb") as file:
        for saved in manifest.objects:
            if saved.name == "two":
                with pytest.raises(DataPlaneError, match=r"shard-0-0\.rows: object 'two' does not hash"):
                    read_object(file, path, saved)
            else:
                assert read_object(file, path, saved) == OBJECTS[saved.name]
        with pytest.raises(DataPlaneError, match="ends within object 'beyond'"):
            read_object(file, path, SavedObject("beyond", path.name, len(content) - 2, 5, ""))
