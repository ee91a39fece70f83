"""Directories and files that are there whole or not at all, whenever the machine stops."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable: those made, and those renamed."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def new_directory(directory: Path) -> Path:
    """An empty directory beside `directory`, to be filled and then put in its place."""
    partial = _beside(directory, ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
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


def mend(directory: Path) -> None:
    """Give the last whole directory its name back, where a crash came in between."""
    old = _beside(directory, ".old")
    if not directory.exists() and old.exists():
        old.rename(directory)


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(directory.name + suffix)
