"""Reader side of staging: rows by key, in the order asked, each proven to be the row asked for.

The data plane is not trusted with identity: it reuses places, and a row may come back under another
row's key. A packed call carries its own identity inside the bytes that its digest covers, so a row
that unpacks under the wrong key is caught here (`staging_key_mismatch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_reassembler.contract.errors import InvalidStagedCall, StagedRowsMissing
from rollout_reassembler.contract.records import StagedCall, staging_key
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.staging.codec import PackedCall, unpack_call
from rollout_reassembler.staging.schema import CALL_FIELD, EXTRAS_FIELD


@dataclass(frozen=True)
class FetchedCalls:
    """What one read of staged calls gave: the proven ones, the malformed ones, the missing ones.

    Every key that was asked for is in exactly one of the three.
    """

    calls: dict[str, PackedCall]
    invalid: dict[str, InvalidStagedCall] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()


class StagingSource:
    """Reads staged calls of one partition."""

    def __init__(self, dp_client: DataPlaneClient, *, staging_partition: str) -> None:
        self._client = dp_client
        self._partition = staging_partition

    def fetch(self, keys: Sequence[str]) -> list[StagedCall]:
        """The calls under `keys`, in that order.

        Raises `StagedRowsMissing` naming the keys that are not there, `InvalidStagedCall` for a row
        that is malformed or not the one asked for, `DataPlaneError` when the plane fails.
        """
        fetched = self.fetch_packed(keys)
        if fetched.missing:
            missing = [key for key in keys if key in fetched.missing]
            raise StagedRowsMissing("staged rows missing", call="fetch", partition=self._partition, keys=missing)
        for error in fetched.invalid.values():
            raise error
        return [fetched.calls[key].to_call() for key in keys]

    def fetch_packed(self, keys: Sequence[str]) -> FetchedCalls:
        """All rows under `keys` in one read, sorted into proven, malformed and missing ones."""
        values, missing = self.read_values(keys)
        calls: dict[str, PackedCall] = {}
        invalid: dict[str, InvalidStagedCall] = {}
        for key, value in values.items():
            try:
                calls[key] = prove_call(key, value)
            except InvalidStagedCall as error:
                invalid[key] = error
        return FetchedCalls(calls, invalid, missing)

    def read_values(self, keys: Sequence[str]) -> tuple[dict[str, bytes], frozenset[str]]:
        """The packed values under `keys`, unopened, and the keys that have none."""
        return self._read(keys, CALL_FIELD)

    def fetch_extras(self, keys: Sequence[str]) -> tuple[dict[str, bytes], frozenset[str]]:
        """The encoded extras under `keys`, unopened, and the keys that have no row."""
        return self._read(keys, EXTRAS_FIELD)

    def _read(self, keys: Sequence[str], field_name: str) -> tuple[dict[str, bytes], frozenset[str]]:
        if not keys:
            return {}, frozenset()
        batch = self._client.get_samples(list(keys), self._partition, [field_name], partial=True)
        return dict(zip(batch.sample_ids, batch[field_name], strict=True)), frozenset(batch.missing)


def prove_call(key: str, value: bytes) -> PackedCall:
    """Unpack the value found under `key`. Raises `InvalidStagedCall` when it is not that key's call."""
    call = unpack_call(value)
    found = staging_key(call.rollout_id, call.model_call_id)
    if found != key:
        raise InvalidStagedCall(f"the row under {key!r} is that of {found!r}", code="staging_key_mismatch")
    return call
