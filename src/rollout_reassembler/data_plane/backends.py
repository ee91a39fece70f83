"""Which data planes there are: one `Backend` object each, found by its name.

A plane of another distribution is there once that is installed. It says so by one line in its `pyproject.toml`:

    [project.entry-points."rollout_reassembler.data_planes"]
    sqlite = "rollout_sqlite:BACKEND"

and is chosen like this package's own, its settings in the block of its name: `impl: sqlite` and
`sqlite: {path: /scratch/run7.db}` of a `DataPlaneConfig`.

The module of a `Backend` is imported to look at it, so it imports torch, Ray and the like only when it builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.requirements import Finding

if TYPE_CHECKING:
    from rollout_reassembler.data_plane.config import DataPlaneConfig

GROUP = "rollout_reassembler.data_planes"

OWN = {
    "memory": "rollout_reassembler.data_plane.memory:BACKEND",
    "simple": "rollout_reassembler.data_plane.transfer_queue.backend:BACKEND",
    "mooncake_cpu": "rollout_reassembler.data_plane.mooncake.backend:BACKEND",
}
"""This package's own, which are there however it was installed; nobody else's have these names."""


class Build(Protocol):
    """Connect to the plane that the config describes; with `bootstrap` start it, if it does not run, and own it."""

    def __call__(self, cfg: DataPlaneConfig, *, bootstrap: bool) -> DataPlaneClient: ...


@dataclass(frozen=True)
class Backend:
    """A kind of data plane: how it is named, set up, connected to and examined, and what it can do.

    `impl` is what `DataPlaneConfig.impl` says for it; where that is not its own name, `DataPlaneConfig.backend` is.
    `config` is the model of its block, `None` where it has no settings. `on_this_machine` are the settings of its
    block with which all of it starts here. `extra` are the extras of this distribution that it needs.
    """

    name: str
    build: Build
    impl: str = ""
    config: type[BaseModel] | None = None
    on_this_machine: Mapping[str, Any] = field(default_factory=dict)
    extra: str = ""
    is_shared: bool = True
    """Whether other processes can connect to it at the same time."""
    cells: tuple[str, ...] = ("bytes",)
    """The values of `DataPlaneConfig.cells` that it takes."""
    has_owners: bool = False
    """Whether its clients may own memory of it, and run `checkpoint_command` about that."""
    checks: Callable[[], Sequence[Finding]] = tuple
    """What `reassemble doctor` finds of what it needs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "impl", self.impl or self.name)


def names() -> list[str]:
    """The names of all that are installed, this package's own first."""
    return list(dict.fromkeys([*OWN, *sorted(point.name for point in entry_points(group=GROUP))]))


def find(name: str) -> Backend | None:
    """The backend of this name, `None` where none is installed.

    Raises what importing it raises, and `TypeError` when its entry point leads to something else.
    """
    if name in OWN:
        point = EntryPoint(name, OWN[name], GROUP)
    else:
        named = entry_points(group=GROUP, name=name)
        if not named:
            return None
        point = next(iter(named))
    found = point.load()
    if not isinstance(found, Backend) or found.name != name:
        what = f"entry point {name} = {point.value!r} of {GROUP!r} must lead to the Backend of that name"
        raise TypeError(f"{what}, got {found!r:.80}")
    return found


def require(name: str) -> Backend:
    """The backend of this name. Raises `ValueError` with the names that there are."""
    found = find(name)
    if found is None:
        raise ValueError(f"no data plane {name!r} is installed; there are: {', '.join(names())}")
    return found


def chosen(impl: str, backend: str) -> Backend:
    """The backend that `impl` and `backend` of a config name. Raises `ValueError` with those that there are."""
    found = find(impl) or find(backend)
    if found is None or found.impl != impl:
        known = ", ".join(_told(require(name)) for name in names())
        raise ValueError(f"impl {impl!r} with backend {backend!r} is no data plane here; there are: {known}")
    return found


def _told(backend: Backend) -> str:
    return f"impl {backend.impl!r}{'' if backend.impl == backend.name else f' with backend {backend.name!r}'}"
