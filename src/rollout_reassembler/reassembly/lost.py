"""Whether staged rows that are missing went with the plane that they were staged on.

A row that a worker was told is durable, and that is missing without a record of its group, is one of two
things: it was never staged under its receipt's key, which costs its rollout; or the plane died, and the one
that is there now is another, empty or taken back by a checkpoint, which is nobody's data error. The
plane's epoch tells them apart: the driver reads it before the first rollout of a group, and it is read
again here, after the rows were:

    staged on E1, read on E1, row missing        the rollout's own fault
    staged on E1, read on E2, row missing        `PlaneLost`
    no epoch known, some rows missing            the rollouts' own fault
    no epoch known, every row missing            `PlaneLost`

A group whose rows are all there asks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_reassembler.contract.errors import PlaneLost
from rollout_reassembler.contract.records import RolloutReceipt
from rollout_reassembler.data_plane.base import RowStore
from rollout_reassembler.reassembly.admission import Rejection
from rollout_reassembler.reassembly.rows import FinalizedRollout

_REASONS = frozenset({"missing_staging_row", "route_assembly:missing_fragment"})

_WHAT_TO_DO = "stage its rollouts again and send the same request, or give them up with accept_lost=True"


def lacks_rows(rollouts: Sequence[FinalizedRollout]) -> bool:
    """Whether any rollout was rejected because staged rows are missing."""
    return any(rollout.rejection_reason in _REASONS or rollout.missing_keys for rollout in rollouts)


def refuse_lost_rows(
    dp_client: RowStore,
    staging_partition: str,
    rollouts: Sequence[FinalizedRollout],
    admitted: Sequence[RolloutReceipt | Rejection],
    staged_on: str | None,
) -> None:
    """Raise `PlaneLost` when rows of these rollouts are missing and may have gone with their plane.

    To be called after the rows were read, for a group that is not on record.
    """
    if not lacks_rows(rollouts):
        return
    missing = [key for rollout in rollouts for key in rollout.missing_keys]
    listed = sum(len(receipt.manifest) for receipt in admitted if isinstance(receipt, RolloutReceipt))
    if staged_on is None:
        if len(missing) < listed:
            return
        why = "all of its staged rows are missing: the plane that held them may be gone"
    else:
        epoch = dp_client.epoch()
        if epoch == staged_on:
            return
        count = f"{len(missing)} of its {listed} staged rows" if missing else "staged routes"
        why = f"{count} are missing, and the plane is not the one they were staged on (epoch {staged_on}, now {epoch})"
    raise PlaneLost(f"{why}; {_WHAT_TO_DO}", call="finalize", partition=staging_partition, keys=missing)
