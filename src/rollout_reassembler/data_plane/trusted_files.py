"""Whether what lies in a directory was written by who may run code here. Pickles are read from nowhere else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rollout_reassembler.contract.errors import DataPlaneError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def require_trusted(directory: Path, call: str) -> None:
    """Raise `DataPlaneError` if somebody else can write to the directory or to a file in it, or owns one.

    Files are not looked at where nobody else can enter the directory. Of the directories above, those count that
    everybody can write to: there it could be replaced.
    """
    directory = directory.resolve()
    for path in directory.parents:
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _refusal(path, "everybody can write to it", f"chmod o-w {path}", call)
    _require_ours(directory, call)
    if directory.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        for path in sorted(directory.rglob("*")):
            _require_ours(path, call)


def _require_ours(path: Path, call: str) -> None:
    found = path.lstat()
    if found.st_uid not in (os.geteuid(), _ROOT):
        raise _refusal(path, f"it belongs to user {found.st_uid}", "copy the checkpoint, if you trust its writer", call)
    if found.st_mode & _OTHERS and not stat.S_ISLNK(found.st_mode):
        raise _refusal(path, "others can write to it", f"chmod -R go-w {path}, if nobody has", call)


def _refusal(path: Path, why: str, fix: str, call: str) -> DataPlaneError:
    what = f"{path} is not loaded, since {why}: the files are pickles, and who writes one runs code here; {fix}"
    return DataPlaneError(what, call=call)
