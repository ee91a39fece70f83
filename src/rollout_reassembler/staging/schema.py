"""The staging partition: which columns a staged row has.

`call` holds a packed call (`codec.py`), `extras` its extras (`extras.py`; no bytes where there are
none). They are two columns so that reading tokens never moves routes. Tags: `rollout_id`, by which
rows are found when the receipt that named them is lost, and `staged_at`, unix seconds by the plane's clock.
"""

from __future__ import annotations

from rollout_reassembler.data_plane.base import FieldSpec, RowStore, Schema, Tags

CALL_FIELD = "call"
EXTRAS_FIELD = "extras"
ROLLOUT_TAG = "rollout_id"
STAGED_AT_TAG = "staged_at"

STAGING_SCHEMA: Schema = {CALL_FIELD: FieldSpec("bytes"), EXTRAS_FIELD: FieldSpec("bytes")}


def register_staging_partition(dp_client: RowStore, staging_partition: str) -> None:
    """Create the staging partition, and the one that marks its lost rollouts; doing it again changes nothing."""
    dp_client.register_partition(staging_partition, STAGING_SCHEMA)
    dp_client.register_partition(lost_partition(staging_partition), {})


def lost_partition(staging_partition: str) -> str:
    """Where rollouts are marked whose rows no receipt names: a row without columns under each one's id."""
    return f"{staging_partition}.lost"


def rollout_of(tags: Tags) -> str | None:
    """Whose row these tags say it is, `None` where they do not say. Any client may have written them."""
    rollout_id = tags.get(ROLLOUT_TAG)
    return rollout_id if isinstance(rollout_id, str) else None


def staged_at_of(tags: Tags) -> float | None:
    """When these tags say that their row was staged, in unix seconds."""
    staged_at = tags.get(STAGED_AT_TAG)
    return staged_at if isinstance(staged_at, int | float) else None
