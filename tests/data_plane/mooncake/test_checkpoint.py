"""Checkpoints of a Mooncake plane: taken of two owners, all of it killed, brought back over one, two and three."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_reassembler import GroupRecords, sweep_staging
from rollout_reassembler.contract.errors import CheckpointDamaged, DataPlaneError, RequestError
from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.checkpoint import MANIFEST, read_manifest
from tests.captures import CANONICAL, STAGING, MadeRollout, chain, finalize, registered, stage, staged_keys
from tests.data_plane.plain_queue import QueueHost
from tests.mooncake_site import MooncakeSite
from tests.reassembly.contents import whole_plane

pytestmark = pytest.mark.mooncake

EXTRA = "extra/…"
LARGE = [os.urandom(200_000 + 10_000 * index) for index in range(24)]


def contents_of(plane: Any) -> Any:
    batch = plane.get_samples(sorted(plane.list_samples(EXTRA)), EXTRA)
    return whole_plane(plane), batch.sample_ids, batch["payload"], batch["step"].tolist()


def rollouts_of(group: str) -> list[MadeRollout]:
    return [chain(f"{group}/r{index}", 5, seed=7) for index in range(4)]


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, and what the plane held when it was taken."""

    directory: Path
    contents: Any
    answer: FinalizedGroup
    saved_by: int


@pytest.fixture(scope="module")
def saved(queues: QueueHost, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """One group published and recorded, one staged and in flight, one given up; large rows besides."""
    site = MooncakeSite(queues, hosts=2)
    plane = site.connect()
    registered(plane)
    plane.register_partition(EXTRA, {"payload": FieldSpec("bytes"), "step": FieldSpec("int64")})
    plane.put_samples([f"k{index}" for index in range(24)], EXTRA, {"payload": LARGE, "step": list(range(24))})
    plane.claim_meta(EXTRA, "train", ["step"], 10)
    stage(plane, *rollouts_of("done"), *rollouts_of("flying"), *rollouts_of("lost"))
    answer = finalize(plane, rollouts_of("done"), group_id="done")
    directory = tmp_path_factory.mktemp("mooncake") / "step 7"
    with plane.quiesce(20):
        plane.save_checkpoint(str(directory), metadata={"step": 7})
        contents = contents_of(plane)
    saved_by = len({saved.shard for saved in read_manifest(directory).objects})
    for host in site.hosts:
        host.kill()
    site.close()
    return Saved(directory, contents, answer, saved_by)


def test_each_owner_wrote_a_shard_of_its_own(saved: Saved) -> None:
    assert saved.saved_by == 2
    assert sorted(path.name for path in saved.directory.iterdir()) == [
        "controller.pkl",
        MANIFEST,
        "shard-0-0.rows",
        "shard-1-0.rows",
    ]


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_all_of_it_comes_back_over_other_owners(queues: QueueHost, saved: Saved, hosts: int) -> None:
    site = MooncakeSite(queues, hosts=hosts)
    plane: Any = site.connect()
    assert plane.load_checkpoint(str(saved.directory)) == {"step": 7}
    assert contents_of(plane) == saved.contents
    _assert_balanced(plane, saved, hosts)

    again = finalize(plane, rollouts_of("done"), group_id="done")
    assert again == saved.answer
    assert GroupRecords(plane, partition_id=CANONICAL).group_ids() == ["done"]

    flown = finalize(plane, rollouts_of("flying"), group_id="flying")
    assert (flown.valid_row_count, flown.cleanup_pending) == (4, ())
    rows = plane.get_samples(flown.meta.sample_ids, CANONICAL)
    for tokens, made in zip(rows["input_ids"], rollouts_of("flying"), strict=True):
        assert tokens.tolist() == made.tokens()

    report = sweep_staging(plane, STAGING, older_than_s=0, live_rollouts=set(), dry_run=False)
    assert report.found.keys() == {made.rollout_id for made in rollouts_of("lost")}
    assert staged_keys(plane) == set()
    assert len(plane.claim_meta(EXTRA, "train", ["step"], 50).sample_ids) == 14
    plane.close()
    site.close()


def _assert_balanced(plane: Any, saved: Saved, hosts: int) -> None:
    objects = read_manifest(saved.directory).objects
    places = plane._checkpoints.connected.store.places([o.name for o in objects])
    loads = dict.fromkeys(places.values(), 0)
    for o in objects:
        loads[places[o.name]] += o.size
    assert len(loads) == hosts
    assert max(loads.values()) - min(loads.values()) <= max(o.size for o in objects)


# --- a checkpoint that cannot be loaded leaves the plane as it was -------------------------------------


@dataclass(frozen=True)
class Live:
    """A plane with rows of its own, which no failed load may change."""

    plane: Any
    site: MooncakeSite
    contents: Any


@pytest.fixture(scope="module")
def live(queues: QueueHost) -> Iterator[Live]:
    site = MooncakeSite(queues, hosts=2)
    plane: Any = site.connect()
    registered(plane)
    stage(plane, *rollouts_of("own"))
    finalize(plane, rollouts_of("own2"), group_id="own2", accept_lost=True)
    yield Live(plane, site, whole_plane(plane))
    plane.close()
    site.close()


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved.directory, tmp_path / "copy"))


def flip_a_byte_in_a_shard(copy: Path) -> str:
    manifest = read_manifest(copy)
    victim = max(manifest.objects, key=lambda saved: saved.size)
    with (copy / victim.shard).open("r+b") as file:
        file.seek(victim.offset + victim.size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    return rf"{victim.shard}: object '{victim.name}' does not hash"


def lose_a_shard(copy: Path) -> str:
    (copy / "shard-1-0.rows").unlink()
    return r"shard-1-0\.rows is missing"


def cut_the_manifest(copy: Path) -> str:
    content = (copy / MANIFEST).read_bytes()
    (copy / MANIFEST).write_bytes(content[: len(content) // 2])
    return "manifest.json is damaged or cut short"


def take_the_manifest_of_another_session(copy: Path) -> str:
    """A manifest that is sound in itself, and says other session and files of the same name and size."""
    from dataclasses import replace

    from rollout_reassembler.data_plane.checkpoint import Checkpoint, write_manifest

    manifest = read_manifest(copy)
    write_manifest(copy, replace(manifest, checkpoint=Checkpoint(manifest.checkpoint.id, "TQ_CONTROLLER_other")))
    return r"shard-\d-0\.rows belongs to checkpoint .* the manifest is that of .*'TQ_CONTROLLER_other'"


def damage_the_controller_state(copy: Path) -> str:
    with (copy / "controller.pkl").open("r+b") as file:
        file.write(b"x")
    return r"controller\.pkl does not hash"


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte_in_a_shard,
        lose_a_shard,
        cut_the_manifest,
        take_the_manifest_of_another_session,
        damage_the_controller_state,
    ],
)
def test_a_damaged_checkpoint_names_its_file_and_changes_nothing(
    live: Live, copy: Path, damage: Callable[[Path], str]
) -> None:
    manifest = read_manifest(copy)
    match = damage(copy)
    with pytest.raises(CheckpointDamaged, match=match):
        live.plane.load_checkpoint(str(copy))
    assert whole_plane(live.plane) == live.contents
    assert not any(live.plane._checkpoints.connected.store.are_there([saved.name for saved in manifest.objects]))


def test_a_checkpoint_that_does_not_fit_changes_nothing(queues: QueueHost, saved: Saved) -> None:
    site = MooncakeSite(queues, segment_size=16 << 20)
    plane: Any = site.connect()
    plane.register_partition("p", {"payload": FieldSpec("bytes")})
    plane.put_samples(["a"], "p", {"payload": [bytes(12 << 20)]})
    with pytest.raises(DataPlaneError, match=r"needs \d+ bytes more, and 1 owners have room for \d+; add memory hosts"):
        plane.load_checkpoint(str(saved.directory))
    assert plane.get_samples(["a"], "p")["payload"] == [bytes(12 << 20)]
    plane.close()
    site.close()


def test_an_owner_that_dies_while_loading_changes_nothing(queues: QueueHost, saved: Saved) -> None:
    """One of two owners brings its objects, the other is gone by then: none stays."""
    site = MooncakeSite(queues, hosts=2)
    plane: Any = site.connect()
    plane.register_partition("p", {"step": FieldSpec("int64")})
    plane.put_samples(["a"], "p", {"step": [1]})
    owner = plane._checkpoints.owners[1]
    command = owner.command

    def dying(body: dict[str, Any], seconds: float) -> Any:
        if body["operation"] == "LOAD_OBJECTS":
            site.hosts[1].kill()
        return command(body, seconds)

    owner.command = dying
    with pytest.raises(DataPlaneError, match="is gone"):
        plane.load_checkpoint(str(saved.directory))
    assert plane.get_samples(["a"], "p")["step"].tolist() == [1]
    assert not any(
        plane._checkpoints.connected.store.are_there([o.name for o in read_manifest(saved.directory).objects])
    )
    plane.close()
    site.close()


def test_an_owner_that_brings_fewer_objects_is_an_error(live: Live, saved: Saved, monkeypatch: Any) -> None:
    owner = live.plane._checkpoints.owners[0]
    command = owner.command

    def lazy(body: dict[str, Any], seconds: float) -> Any:
        if body["operation"] == "LOAD_OBJECTS":
            count = len(body["objects"])
            command({**body, "objects": body["objects"][:-1]}, seconds)
            return {"loaded": count, "kept": 0}
        return command(body, seconds)

    monkeypatch.setattr(owner, "command", lazy)
    with pytest.raises(DataPlaneError, match=r"\d+ of the \d+ objects of the manifest are in the store after loading"):
        live.plane.load_checkpoint(str(saved.directory))
    assert whole_plane(live.plane) == live.contents


# --- saving -------------------------------------------------------------------------------------------


def test_a_load_into_the_plane_that_was_saved_keeps_what_is_there(queues: QueueHost, tmp_path: Path) -> None:
    site = MooncakeSite(queues, hosts=2)
    plane: Any = site.connect()
    plane.register_partition("p", {"payload": FieldSpec("bytes")})
    plane.put_samples(["a", "b"], "p", {"payload": LARGE[:2]})
    plane.save_checkpoint(str(tmp_path / "ck"))
    plane.put_samples(["b", "c"], "p", {"payload": LARGE[2:4]})
    plane.clear_samples(["a"], "p")
    plane.load_checkpoint(str(tmp_path / "ck"))
    assert plane.get_samples(["a", "b"], "p")["payload"] == LARGE[:2]
    assert plane.list_samples("p").keys() == {"a", "b"}
    plane.clear_samples(None, "p")
    assert plane._checkpoints.connected.store.remove_session() == 0
    plane.close()
    site.close()


def test_a_save_while_rows_change_is_an_error_and_keeps_the_last_one(live: Live, tmp_path: Path) -> None:
    directory = tmp_path / "ck"
    live.plane.save_checkpoint(str(directory), metadata={"n": 1})
    owner = live.plane._checkpoints.owners[0]
    command = owner.command

    def meanwhile(body: dict[str, Any], seconds: float) -> Any:
        answer = command(body, seconds)
        if body["operation"] == "SAVE_SHARD":
            stage(live.plane, *rollouts_of("late"))
        return answer

    owner.command = meanwhile
    with pytest.raises(DataPlaneError, match="quiesce first"):
        live.plane.save_checkpoint(str(directory), metadata={"n": 2})
    del owner.command
    live.plane.clear_samples([key for key in staged_keys(live.plane) if key.startswith("late")], STAGING)
    assert read_manifest(directory).metadata == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    assert live.plane.load_checkpoint(str(directory)) == {"n": 1}
    assert whole_plane(live.plane) == live.contents


def test_an_object_of_an_owner_that_is_not_known_is_an_error(live: Live, tmp_path: Path) -> None:
    other: Any = live.site.connect(owners=False)
    with pytest.raises(DataPlaneError, match="which no owner known here gives; pass its handle to add_owner"):
        other.save_checkpoint(str(tmp_path / "ck"))
    assert list(tmp_path.iterdir()) == []
    other.close()


def test_a_relative_folder_is_refused(live: Live) -> None:
    with pytest.raises(RequestError, match="relative path"):
        live.plane.save_checkpoint("ck")
    with pytest.raises(RequestError, match="relative path"):
        live.plane.load_checkpoint("ck")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_names_file_and_object_and_leaves_nothing(live: Live, small_disk: Path) -> None:
    live.plane.register_partition("large", {"payload": FieldSpec("bytes")})
    live.plane.put_samples(["a", "b"], "large", {"payload": LARGE[:2]})
    with pytest.raises(DataPlaneError, match=r"shard-\d-0\.rows can't be written at object '\S+': No space left"):
        live.plane.save_checkpoint(str(small_disk / "ck"))
    assert list(small_disk.iterdir()) == []
    assert live.plane.get_samples(["a", "b"], "large")["payload"] == LARGE[:2]
    live.plane.clear_samples(None, "large")
    assert whole_plane(live.plane) == live.contents


# --- commands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"operation": "DROP_EVERYTHING"}, "not a checkpoint command"),
        ({"operation": None}, "not a checkpoint command"),
        ({"payload": "x"}, "payload: Extra inputs"),
        ({"objects": [["name", -1, 0]]}, "not a checkpoint command"),
        ({"objects": None}, "not a checkpoint command"),
        ({"session": "another"}, "serves session"),
        ({"directory": "relative"}, "relative path"),
        ({"shard": "../escaped.rows"}, "does not lie in"),
        ({"shard": "/etc/escaped.rows"}, "does not lie in"),
        ({"shard": "there.rows"}, r"there\.rows exists already"),
    ],
)
def test_a_command_that_is_none_is_refused(live: Live, tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    (tmp_path / "there.rows").write_bytes(b"before")
    body = {
        "operation": "SAVE_SHARD",
        "session": live.plane.session,
        "checkpoint": "ck",
        "directory": str(tmp_path),
        "shard": "new.rows",
        "objects": [],
    }
    with pytest.raises(RequestError, match=match):
        live.site.hosts[0].owner.command({**body, **changes}, 10)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"there.rows": b"before"}


def test_a_load_from_a_file_outside_is_refused(live: Live, tmp_path: Path) -> None:
    body = {
        "operation": "LOAD_OBJECTS",
        "session": live.plane.session,
        "checkpoint": "ck",
        "saved_session": "s",
        "directory": str(tmp_path),
        "objects": [["name", "../outside.rows", 0, 1, "00"]],
    }
    (tmp_path.parent / "outside.rows").write_bytes(b"x")
    with pytest.raises(RequestError, match="does not lie in"):
        live.site.hosts[0].owner.command(body, 10)


def test_an_object_that_is_gone_is_named(live: Live, tmp_path: Path) -> None:
    body = {
        "operation": "SAVE_SHARD",
        "session": live.plane.session,
        "checkpoint": "ck",
        "directory": str(tmp_path),
        "shard": "new.rows",
        "objects": [["nobody-1", 5, 6]],
    }
    with pytest.raises(DataPlaneError, match="object 'nobody-1' is not in the store any more"):
        live.site.hosts[0].owner.command(body, 10)
    assert list(tmp_path.iterdir()) == []


def test_answers_are_metadata(live: Live) -> None:
    from rollout_reassembler import assert_metadata_only

    answer = live.site.hosts[0].owner.command({"operation": "DESCRIBE", "session": live.plane.session}, 10)
    assert answer is not None
    assert_metadata_only(answer)
    assert answer.keys() == {"session", "segment", "endpoint", "size"}
