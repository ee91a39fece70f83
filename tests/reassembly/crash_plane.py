"""A data plane that fails on command: before a call, after it took effect, or in its middle.

    plane = CrashPlane(MemoryDataPlane())
    plane.fail_at(3, where="after")                     the third call from now takes effect and raises
    plane.fail("clear_samples", where="before")         the next clear raises
    plane.fail_at(1, where="during", for_good=True)     and nothing works any more until
    plane.recover()

A put that fails in the middle has written half of its rows, and of the next row its columns without
its tags; a clear, half of its keys, as do a reservation, what is stored of one, and a release. An
announcement has set tags, and made nothing readable. All of it is what the contract of `data_plane/base.py` allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from rollout_reassembler.contract.errors import DataPlaneTimeout
from rollout_reassembler.data_plane.base import DataPlaneClient, Reservation
from rollout_reassembler.data_plane.memory import MemoryDataPlane

Where = Literal["before", "during", "after"]

CALLS = (
    "put_samples",
    "reserve_samples",
    "store_samples",
    "announce_samples",
    "release_samples",
    "get_samples",
    "get_tags",
    "list_samples",
    "clear_samples",
    "epoch",
)


class CrashPlane:
    """A `DataPlaneClient` over a plane in memory. Counts its calls (`calls`, by name) and fails when told to."""

    def __init__(self, plane: MemoryDataPlane) -> None:
        self.plane = plane
        self.calls: list[str] = []
        self._is_due: Callable[[str], bool] = lambda name: False
        self._where: Where = "before"
        self._for_good = False
        self._is_down = False

    def fail_at(self, count: int, *, where: Where = "before", for_good: bool = False) -> None:
        """Fail at the `count`-th call from now, counted from 1."""
        due = len(self.calls) + count
        self._plan(lambda name: len(self.calls) == due, where, for_good)

    def fail(self, name: str, *, where: Where = "before", for_good: bool = False) -> None:
        """Fail at the next call of this name."""
        self._plan(lambda called: called == name, where, for_good)

    def recover(self) -> None:
        self._is_down = False
        self._is_due = lambda name: False

    def _plan(self, is_due: Callable[[str], bool], where: Where, for_good: bool) -> None:
        self._is_due, self._where, self._for_good, self._is_down = is_due, where, for_good, False

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.plane, name)
        if name not in CALLS:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if self._is_down:
                raise silence(name)
            if not self._is_due(name):
                return function(*args, **kwargs)
            self._is_due = lambda name: False
            self._is_down = self._for_good
            apply_until(self.plane, name, args, kwargs, self._where)
            raise silence(name)

        return call


def silence(name: str) -> DataPlaneTimeout:
    return DataPlaneTimeout("no answer", call=name, partition="", seconds=60.0)


def apply_until(
    plane: MemoryDataPlane, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: Where
) -> None:
    """Let as much of a call take effect as had happened when it failed there."""
    if where == "after":
        getattr(plane, name)(*args, **kwargs)
    elif where == "during" and name == "put_samples":
        _put_half(plane, *args, **kwargs)
    elif where == "during" and name == "clear_samples":
        keys, partition = args
        plane.clear_samples(keys[: (len(keys) + 1) // 2], partition)
    elif where == "during" and name == "reserve_samples":
        keys, partition = args
        plane.reserve_samples(keys[: (len(keys) + 1) // 2], partition)
    elif where == "during" and name == "store_samples":
        reserved, columns = args
        half = (len(reserved.sample_ids) + 1) // 2
        plane.store_samples(first_of(reserved, half), {name: column[:half] for name, column in columns.items()})
    elif where == "during" and name == "announce_samples":
        stored, tags = args
        for index, row in plane._reserved(stored.reservation).items():
            row.tags.update(tags[index])
    elif where == "during" and name == "release_samples":
        (reserved,) = args
        plane.release_samples(first_of(reserved, (len(reserved.sample_ids) + 1) // 2))


def first_of(reserved: Reservation, count: int) -> Reservation:
    """The reservation of the first so many of its rows."""
    return replace(
        reserved,
        sample_ids=reserved.sample_ids[:count],
        numbers=reserved.numbers[:count],
        tags=reserved.tags[:count],
    )


def _put_half(
    plane: DataPlaneClient,
    keys: Sequence[str],
    partition: str,
    columns: Mapping[str, Any] | None = None,
    tags: Sequence[dict[str, Any]] | None = None,
) -> None:
    half = len(keys) // 2
    columns = columns or {}
    if half:
        plane.put_samples(
            keys[:half], partition, {name: column[:half] for name, column in columns.items()}, tags and tags[:half]
        )
    if columns:
        plane.put_samples(keys[half : half + 1], partition, {n: c[half : half + 1] for n, c in columns.items()})
