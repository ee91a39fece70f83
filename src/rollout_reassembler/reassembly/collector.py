"""Rows that no receipt names: marked by the group that lost them, collected by whoever has the time.

A rejected rollout's receipt is no authority on what was staged for it, and only a look through the whole staging
partition finds that. A group has no time for one: at 500,000 staged rows it takes the queue's controller seconds,
and everybody shares that. So the group marks the rollout, durably, and a collection clears the rows of all that
were marked, in one look:

    answer = reassembler.finalize(request)      # answer.to_collect: rollouts whose rows are still there
    reassembler.collect_lost()                  # now and then, in a loop of one's own; actors do it by themselves

A mark is a row without columns in `<staging partition>.lost`, under the rollout's id, and says when it was set, by
the plane's clock: what is staged later, by another attempt of that rollout, is left alone. The mark goes when the
rows are gone, so a collection that dies is done again by the next one, in any process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.data_plane.base import RowStore, Tags
from rollout_reassembler.staging.schema import lost_partition, rollout_of, staged_at_of

logger = logging.getLogger(__name__)

_MARKED_AT = "marked_at"


@dataclass(frozen=True)
class Collected:
    """What a collection cleared: how many staged rows, of which rollouts."""

    rows: int = 0
    rollout_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Marks:
    """Marked rollouts, with the time of each mark, in unix seconds by the plane's clock."""

    at: dict[str, float]

    def cover(self, tags: Tags) -> bool:
        """Whether a staged row with these tags is to be collected: its rollout is marked, and it was there by then."""
        marked_at = self.at.get(rollout_of(tags) or "")
        return marked_at is not None and (staged_at_of(tags) or 0.0) <= marked_at


class LostRollouts:
    """The rollouts of one staging partition whose rows are to be collected."""

    def __init__(self, dp_client: RowStore, *, staging_partition: str) -> None:
        self._client = dp_client
        self._staging_partition = staging_partition
        self._partition = lost_partition(staging_partition)
        dp_client.register_partition(self._partition, {})

    def mark(self, rollout_ids: Collection[str]) -> None:
        """Have the rows of these rollouts collected. Returns when that is durable. Raises `DataPlaneError`."""
        if rollout_ids:
            tags = {_MARKED_AT: self._client.now()}
            self._client.put_samples(list(rollout_ids), self._partition, tags=[tags for _ in rollout_ids])

    def marks(self) -> Marks:
        """Costs time in proportion to the marks, not to the staged rows. Raises `DataPlaneError`."""
        found = self._client.list_samples(self._partition)
        return Marks({rollout_id: float(tags.get(_MARKED_AT, 0.0)) for rollout_id, tags in found.items()})

    def unmark(self, rollout_ids: Collection[str]) -> None:
        if rollout_ids:
            self._client.clear_samples(list(rollout_ids), self._partition)

    def collect(self) -> Collected:
        """Clear the staged rows of all marked rollouts. Raises `DataPlaneError`; then the marks stay."""
        marks = self.marks()
        if not marks.at:
            return Collected()
        listing = self._client.list_samples(self._staging_partition)
        keys = [key for key, tags in listing.items() if marks.cover(tags)]
        if keys:
            self._client.clear_samples(keys, self._staging_partition)
        self.unmark(marks.at)
        return Collected(len(keys), tuple(sorted(marks.at)))


class BackgroundCollector:
    """Collects in a thread of its own, `every_s` seconds after it was asked to, however often that was.

    `collect` may raise `DataPlaneError`; that is logged, and what is left is collected the next time. The thread starts
    when it is first asked, and ends with the process; the marks do not.
    """

    def __init__(self, collect: Callable[[], object], *, every_s: float) -> None:
        self._collect = collect
        self._every_s = every_s
        self._asked = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Have a collection made soon. Costs nothing."""
        self._asked.set()
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._asked.wait():
            time.sleep(self._every_s)
            self._asked.clear()
            try:
                self._collect()
            except DataPlaneError as error:
                logger.warning("rows of lost rollouts wait for the next collection: %s", error)
