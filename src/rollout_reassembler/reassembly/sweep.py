"""Find and clear staged rows that no finalizer will come for.

A finalized group clears its own rows. Rows stay behind where that failed (`cleanup_pending`), until they are
collected (`to_collect`), where a rollout was given up before it had a receipt, and where a worker died between
staging a call and recording it. They are found by what they were staged under:

    sweep_staging(client, "staging", rollout_ids=["g3/r1"])  # by rollout
    sweep_staging(client, "staging", older_than_s=3600, live_rollouts=running)  # by age, sparing the living
    sweep_staging(client, "staging", older_than_s=3600, live_rollouts=running, dry_run=False)  # and clear them

*Live* is every rollout that may still be finalized: running ones, finished ones whose group was not
answered, and in deferred mode those whose rows the trainer has not worked through. Ages are by the plane's clock.

Rows whose tags name no rollout are puts that failed or are going on. Those are *condemned* first: from then on
the plane refuses to write them. A put that began before has its deadline to end, and is acknowledged within it
or never; so `untagged_after_s` must be longer than the plane's write deadline. What is then still not readable
belongs to nobody, and is cleared; what is readable has its tags given back. A sweep that dies in between leaves
rows condemned: the next one clears them.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from rollout_reassembler.contract.errors import InvalidStagedCall, RequestError
from rollout_reassembler.data_plane.base import CONDEMNED_TAG, RowStore, Tags
from rollout_reassembler.reassembly.collector import LostRollouts, Marks
from rollout_reassembler.staging.codec import unpack_call
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.schema import CALL_FIELD, ROLLOUT_TAG, STAGED_AT_TAG, rollout_of, staged_at_of


@dataclass(frozen=True)
class SweepReport:
    """What a sweep found: staged keys by rollout, and those without tags. `cleared` says whether they are gone."""

    found: dict[str, list[str]] = field(default_factory=dict)
    untagged: list[str] = field(default_factory=list)
    spared: int = 0
    cleared: bool = False

    @property
    def keys(self) -> list[str]:
        return [key for keys in self.found.values() for key in keys] + self.untagged


@dataclass(frozen=True)
class _Rule:
    """Which rollouts' rows a sweep takes."""

    swept: frozenset[str]
    live: frozenset[str]
    marks: Marks
    staged_before: float | None

    def takes(self, rollout_id: str, tags: Tags) -> bool:
        if rollout_id in self.live:
            return False
        staged_at = staged_at_of(tags)
        is_old = self.staged_before is not None and staged_at is not None and staged_at <= self.staged_before
        return rollout_id in self.swept or is_old or self.marks.cover(tags)


def sweep_staging(
    dp_client: RowStore,
    staging_partition: str,
    *,
    rollout_ids: Collection[str] | None = None,
    older_than_s: float | None = None,
    live_rollouts: Collection[str] = (),
    untagged_after_s: float | None = None,
    dry_run: bool = True,
) -> SweepReport:
    """Find staged rows by rollout, or by age (seconds), and those of rollouts that wait to be collected.

    Clears them unless it is a dry run. Raises `RequestError` when it is not told what to find, or a rollout is to
    be both swept and spared, and `DataPlaneError` when the plane fails; a sweep that failed may be repeated.
    """
    if rollout_ids is None and older_than_s is None and untagged_after_s is None:
        raise RequestError("a sweep needs rollout_ids, older_than_s or untagged_after_s")
    if isinstance(rollout_ids, str) or isinstance(live_rollouts, str):
        raise RequestError("rollout_ids and live_rollouts take a list of rollout ids, not one id")
    swept, live = frozenset(rollout_ids or ()), frozenset(live_rollouts)
    if swept & live:
        raise RequestError(f"rollouts to sweep and to spare at once: {sorted(swept & live)[:3]}")
    lost = LostRollouts(dp_client, staging_partition=staging_partition)
    marks = lost.marks()
    before = None if older_than_s is None else dp_client.now() - older_than_s
    rule = _Rule(swept, live, marks, before)
    listing = dp_client.list_samples(staging_partition)
    tagged = {key: tags for key, tags in listing.items() if rollout_of(tags) is not None}
    untagged: list[str] = []
    suspects = [key for key in listing if key not in tagged]
    if untagged_after_s is not None and suspects:
        spared: dict[str, Tags] = {}
        look = _still_untagged if dry_run else _condemned
        untagged, spared = look(dp_client, staging_partition, suspects, untagged_after_s)
        tagged |= spared
    found: dict[str, list[str]] = {}
    for key, tags in tagged.items():
        rollout_id = rollout_of(tags) or ""
        if rule.takes(rollout_id, tags):
            found.setdefault(rollout_id, []).append(key)
    report = SweepReport(found, untagged, len(tagged) - sum(map(len, found.values())), cleared=not dry_run)
    if not dry_run:
        if report.keys:
            dp_client.clear_samples(report.keys, staging_partition)
        lost.unmark(marks.at.keys() - live)
    return report


def _still_untagged(
    dp_client: RowStore, staging_partition: str, suspects: list[str], after_s: float
) -> tuple[list[str], dict[str, Tags]]:
    """Of keys without tags, those that have none `after_s` seconds later, and the others with their tags."""
    time.sleep(after_s)
    found = zip(suspects, dp_client.get_tags(suspects, staging_partition), strict=True)
    later = {key: tags for key, tags in found if tags is not None}
    return (
        [key for key, tags in later.items() if rollout_of(tags) is None],
        {key: tags for key, tags in later.items() if rollout_of(tags) is not None},
    )


def _condemned(
    dp_client: RowStore, staging_partition: str, suspects: list[str], after_s: float
) -> tuple[list[str], dict[str, Tags]]:
    """Of keys without tags, those that nobody wrote and nobody can write any more, and the others with their tags."""
    condemned: Tags = {CONDEMNED_TAG: dp_client.now()}
    dp_client.put_samples(suspects, staging_partition, tags=[condemned] * len(suspects))
    untagged, spared = _still_untagged(dp_client, staging_partition, suspects, after_s)
    # Who tags a row while somebody else does may lose: the row's own bytes say whose it is.
    batch = dp_client.get_samples(untagged, staging_partition, [CALL_FIELD], partial=True)
    for key, value in zip(batch.sample_ids, batch[CALL_FIELD], strict=True):
        try:
            call = unpack_call(value)
        except InvalidStagedCall:
            continue
        if place_of(call) == key:
            spared[key] = {ROLLOUT_TAG: call.rollout_id, STAGED_AT_TAG: dp_client.now()}
    if spared:
        restored = [{**tags, CONDEMNED_TAG: None} for tags in spared.values()]
        dp_client.put_samples(list(spared), staging_partition, tags=restored)
    return [key for key in untagged if key not in spared], spared
