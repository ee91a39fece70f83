"""Find and clear staged rows that no finalizer will come for.

A finalized group clears its own rows. Rows stay behind where that failed (`cleanup_pending`), where
a rollout was given up before it had a receipt, and where a worker died between staging a call and
recording it. They are found by what they were staged under:

    sweep_staging(client, "staging", rollout_ids=["g3/r1"])  # by rollout
    sweep_staging(client, "staging", older_than_s=3600, live_rollouts=running)  # by age, sparing the living
    sweep_staging(client, "staging", older_than_s=3600, live_rollouts=running, dry_run=False)  # and clear them

*Live* is every rollout that may still be finalized: running ones, finished ones whose group was not
answered, and in deferred mode those whose rows the trainer has not worked through. Rows whose tags
name no rollout are puts that failed or are going on; they are cleared only if it is still so
`untagged_after_s` seconds later. Let that be longer than the plane's write deadline: a put that takes
longer has failed, so no worker counts on it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from rollout_reassembler.contract.errors import RequestError
from rollout_reassembler.data_plane.base import RowStore, Tags
from rollout_reassembler.staging.schema import rollout_of, staged_at_of


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
    """Find staged rows by rollout, or by age (seconds); clear them unless it is a dry run.

    Raises `RequestError` when neither is given, or a rollout is to be both swept and spared, and
    `DataPlaneError` when the plane fails; a sweep that failed may be repeated.
    """
    if rollout_ids is None and older_than_s is None and untagged_after_s is None:
        raise RequestError("a sweep needs rollout_ids, older_than_s or untagged_after_s")
    if isinstance(rollout_ids, str) or isinstance(live_rollouts, str):
        raise RequestError("rollout_ids and live_rollouts take a list of rollout ids, not one id")
    swept, live = frozenset(rollout_ids or ()), frozenset(live_rollouts)
    if swept & live:
        raise RequestError(f"rollouts to sweep and to spare at once: {sorted(swept & live)[:3]}")
    listing = dp_client.list_samples(staging_partition)
    found: dict[str, list[str]] = {}
    spared = 0
    for key, tags in listing.items():
        rollout_id = rollout_of(tags)
        if rollout_id is None:
            continue
        if rollout_id in live:
            spared += 1
        elif rollout_id in swept or _is_old(tags, older_than_s):
            found.setdefault(rollout_id, []).append(key)
        else:
            spared += 1
    untagged = _still_untagged(dp_client, staging_partition, listing, untagged_after_s)
    report = SweepReport(found, untagged, spared, cleared=not dry_run)
    if not dry_run and report.keys:
        dp_client.clear_samples(report.keys, staging_partition)
    return report


def _is_old(tags: Tags, older_than_s: float | None) -> bool:
    staged_at = staged_at_of(tags)
    return older_than_s is not None and staged_at is not None and time.time() - staged_at >= older_than_s


def _still_untagged(
    dp_client: RowStore, staging_partition: str, listing: dict[str, Tags], after_s: float | None
) -> list[str]:
    """Keys without tags now and `after_s` seconds later: nobody is writing them any more."""
    suspects = [key for key, tags in listing.items() if rollout_of(tags) is None]
    if after_s is None or not suspects:
        return []
    time.sleep(after_s)
    later = dp_client.list_samples(staging_partition)
    return [key for key in suspects if key in later and rollout_of(later[key]) is None]
