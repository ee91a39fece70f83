"""Whose staged rows are whose, and clearing them.

A staged row says in its tags which rollout it belongs to. That is the only authority on ownership
besides the row's own proven bytes: keys cannot tell (`a/b/c` may be call `c` of rollout `a/b` or
call `b/c` of rollout `a`), and receipts may lie.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.data_plane.base import RowStore
from rollout_reassembler.staging.schema import rollout_of

logger = logging.getLogger(__name__)


def staged_keys_of(dp_client: RowStore, staging_partition: str, rollout_ids: Collection[str]) -> list[str]:
    """The staged rows of these rollouts, by their tags. Reads the whole partition's tags."""
    listing = dp_client.list_samples(staging_partition)
    return [key for key, tags in listing.items() if rollout_of(tags) in rollout_ids]


def clear_group(dp_client: RowStore, staging_partition: str, answer: FinalizedGroup) -> tuple[str, ...]:
    """Clear the staged rows of a group that is published and on record; returns what may still be there.

    A proven rollout's rows are those it was proven from. A rejected rollout's receipt is no
    authority on that, so its rows are found by the tag they were staged under; a receipt that claimed
    someone else's row clears nothing at all. Where the rows of a rollout could not even be found,
    `"{rollout_id}/*"` stands for them.

    The group's answer stands whether or not this works, so a failing plane is reported, not raised.
    What is left is cleared by the same request again, or by a sweep.
    """
    keys = list(answer.staging_keys)
    rejected = {rollout for rollout, reason in answer.rejections.items() if reason != "foreign_staging_key"}
    pending: list[str] = []
    try:
        if rejected:
            pending = [f"{rollout_id}/*" for rollout_id in sorted(rejected)]
            keys = list(dict.fromkeys([*keys, *staged_keys_of(dp_client, staging_partition, rejected)]))
            pending = []
        dp_client.clear_samples(keys, staging_partition)
    except DataPlaneError as error:
        logger.warning("cleanup pending for %d staged rows: %s", len(keys) + len(pending), error)
        return (*keys, *pending)
    return ()
