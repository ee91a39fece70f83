"""The staging partition: which columns a staged row has.

`call` holds a packed call (`codec.py`), `extras` its extras (`extras.py`; no bytes where there are
none). They are two columns so that reading tokens never moves routes. Tags: `rollout_id`, by which
rows are found when the receipt that named them is lost, and `staged_at`, unix seconds.
"""

from __future__ import annotations

from rollout_reassembler.data_plane.base import DataPlaneClient, FieldSpec, Schema

CALL_FIELD = "call"
EXTRAS_FIELD = "extras"
ROLLOUT_TAG = "rollout_id"
STAGED_AT_TAG = "staged_at"

STAGING_SCHEMA: Schema = {CALL_FIELD: FieldSpec("bytes"), EXTRAS_FIELD: FieldSpec("bytes")}


def register_staging_partition(dp_client: DataPlaneClient, staging_partition: str) -> None:
    """Create the staging partition; doing it again changes nothing."""
    dp_client.register_partition(staging_partition, STAGING_SCHEMA)
