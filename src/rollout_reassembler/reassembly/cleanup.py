"""Whose staged rows are whose, and clearing them behind a published group.

A staged row says in its tags which rollout it belongs to. That is the only authority on ownership
besides the row's own proven bytes: keys cannot tell (`a/b/c` may be call `c` of rollout `a/b` or
call `b/c` of rollout `a`), and receipts may lie.
"""

from __future__ import annotations

import logging

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.contract.messages import FinalizedGroup
from rollout_reassembler.data_plane.base import RowStore
from rollout_reassembler.reassembly.collector import LostRollouts

logger = logging.getLogger(__name__)


def clear_group(
    dp_client: RowStore, staging_partition: str, lost: LostRollouts, answer: FinalizedGroup
) -> tuple[str, ...]:
    """Clear the staged rows of a group that is published and on record; returns what may still be there.

    A proven rollout's rows are those it was proven from. A rejected rollout's receipt is no authority on that, so
    the rollout is marked for a collection (`to_collect`).
    Where a rollout could not even be marked, `"{rollout_id}/*"` stands for its rows in `cleanup_pending`.

    The group's answer stands whether or not this works, so a failing plane is reported, not raised.
    What is left is cleared by the same request again, or by a sweep.
    """
    pending = [f"{rollout_id}/*" for rollout_id in answer.to_collect]
    try:
        lost.mark(answer.to_collect)
        pending = []
        dp_client.clear_samples(answer.staging_keys, staging_partition)
    except DataPlaneError as error:
        logger.warning("cleanup pending for %d staged rows: %s", len(answer.staging_keys) + len(pending), error)
        return (*answer.staging_keys, *pending)
    return ()
