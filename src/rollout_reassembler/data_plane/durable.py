"""Directories and files that are there whole or not at all, whenever the machine stops.

    with replacing_folder(Path("runs/rows"), only=["rows.parquet"]) as fresh:   # an empty folder, private, beside it
        (fresh / "rows.parquet").write_bytes(b"rows")                           # runs/rows is as it was
    assert Path("runs/rows/rows.parquet").read_bytes() == b"rows"               # it is the new one, on disk

What is being written lies in a folder of its own that only this user can enter and whose name nobody can
foresee, so no link that somebody else put there is followed. It goes when the block fails.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable: those made, and those renamed."""
    _sync(directory)


def make_folder(folder: Path) -> None:
    """Make a folder, and those that it lies in, where they are missing. Raises `OSError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        blocking = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        raise NotADirectoryError(f"{blocking}: is a file, not a folder") from None


@contextmanager
def replacing_folder(folder: Path, *, only: Collection[str]) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `folder` when the block ends well.

    What was there before stays, whole, until the new one is; then it is gone. So it may hold nothing but files of
    the names in `only`. Raises `FileExistsError` when it holds another, `NotADirectoryError` when it is a file or a
    link, and other `OSError`s when nothing can be made beside it, or when the disk is full.
    """
    _refuse_what_is_not_ours(folder, only)
    with _private_folder_beside(folder) as private:
        fresh = private / "fresh"
        fresh.mkdir()
        yield fresh
        for path in (*(path for path in fresh.rglob("*") if not path.is_symlink()), fresh):
            _sync(path)
        _refuse_what_is_not_ours(folder, only)
        if folder.exists():
            _exchange(fresh, folder)
        else:
            fresh.rename(folder)
        sync_directory(folder.parent)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` when the block ends well. Raises `OSError`."""
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder, not a file")
    with _private_folder_beside(path) as private:
        fresh = private / path.name
        yield fresh
        _sync(fresh)
        fresh.replace(path)
        sync_directory(path.parent)


def _refuse_what_is_not_ours(folder: Path, only: Collection[str]) -> None:
    if folder.is_symlink():
        raise NotADirectoryError(f"{folder}: is a symbolic link; name the folder itself")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: is a file, not a folder")
    others = sorted(path.name for path in folder.iterdir() if path.name not in only)
    if others:
        raise FileExistsError(f"{folder}: holds {others[0]!r}, which would be lost; name a folder of its own")


@contextmanager
def _private_folder_beside(path: Path) -> Iterator[Path]:
    """A folder of mode 0700 under a name that nobody can foresee, gone with all that is in it after the block."""
    prefix = f".{path.name[:64]}."
    try:
        make_folder(path.parent)
        with TemporaryDirectory(prefix=prefix, dir=path.parent, ignore_cleanup_errors=True) as private:
            yield Path(private)
    except OSError as error:
        # The caller asked for `path`; the name of a part of it says nothing, and a full disk has none.
        is_part = str(error.filename).startswith(str(path.parent / prefix))
        if error.errno is None or not (is_part or error.errno in _DISK_FAULTS):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def _exchange(fresh: Path, folder: Path) -> None:
    """Swap two folders: in one step, or where the file system has none, in two that are undone on failure."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(fresh), _AT_FDCWD, os.fsencode(folder), _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in _NO_EXCHANGE:
            raise OSError(number, os.strerror(number), str(folder))
    old = fresh.with_name("old")
    folder.rename(old)
    try:
        fresh.rename(folder)
    except OSError:
        old.rename(folder)
        raise


def new_directory(directory: Path) -> Path:
    """An empty directory beside `directory`, to be filled and then put in its place; its owner alone may enter it."""
    partial = _beside(directory, ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir(mode=0o700)
    return partial


def put_in_place(partial: Path, directory: Path) -> None:
    """Give `partial` the name of `directory`. A crash leaves the old one, under its name or under `<name>.old`."""
    old = _beside(directory, ".old")
    sync_directory(partial)
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    partial.rename(directory)
    sync_directory(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def complete_replacement(directory: Path) -> None:
    """Give the last whole directory its name back, where a crash came in between."""
    old = _beside(directory, ".old")
    if not directory.exists() and old.exists():
        old.rename(directory)


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(directory.name + suffix)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
