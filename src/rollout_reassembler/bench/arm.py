"""What all arms of a bench can do, so that one loop measures them alike."""

from __future__ import annotations

from typing import Any, Protocol

from rollout_reassembler.bench.figures import Traffic
from rollout_reassembler.bench.shapes import MadeGroup
from rollout_reassembler.contract.records import StagedCall

STAGING = "bench-staging"
CANONICAL = "bench-rows"
PAD_TOKEN_ID = 0

PublishedRow = dict[str, Any]
"""A canonical row by column, without padding: arrays `[T]` and Python scalars."""


class Arm(Protocol):
    """One way to get from staged calls to published rows. Only `finalize` and `stage_one` are timed."""

    def stage(self, group: MadeGroup) -> None:
        """Stage all calls of the group, as fast as may be."""

    def finalize(self, group: MadeGroup, group_id: str) -> dict[str, float]:
        """Publish the group's rows under `<group_id>_g<i>` and clear its staging; milliseconds by phase."""

    def published(self, group: MadeGroup, group_id: str) -> list[PublishedRow]:
        """The rows of a finalized group, in request order."""

    def forget(self, group: MadeGroup, group_id: str) -> None:
        """Remove a finalized group's rows, so that one group does not weigh on the next."""

    def traffic(self) -> Traffic:
        """What the last `finalize` asked of the data plane."""

    def stage_one(self, call: StagedCall) -> None:
        """Make one call durable, as an inference worker does. From any thread."""

    def clear_staged(self, calls: list[StagedCall]) -> None:
        """Remove what `stage_one` staged."""
