"""Reader side of staging: rows by place, in the order asked, each proven to be the row asked for.

    source.fetch(receipt.manifest)                                  # manifest rows, or staged calls
    source.fetch([place(record.staging_key, record.digest)])        # or places (`staging/places.py`)

The data plane is not trusted with identity: it reuses numbers, and a row may come back under another
row's key. A packed call carries its own identity inside the bytes that its digest covers, so a row
that unpacks under the wrong key is caught here (`staging_key_mismatch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_reassembler.contract.errors import InvalidStagedCall, StagedRowsMissing
from rollout_reassembler.contract.records import StagedCall
from rollout_reassembler.data_plane.base import RowStore
from rollout_reassembler.staging.codec import PackedCall, unpack_call
from rollout_reassembler.staging.places import Staged, as_places, place_of
from rollout_reassembler.staging.schema import CALL_FIELD, EXTRAS_FIELD


@dataclass(frozen=True)
class FetchedCalls:
    """What one read of staged calls gave: the proven ones, the malformed ones, the missing ones.

    Every place that was asked for is in exactly one of the three.
    """

    calls: dict[str, PackedCall]
    invalid: dict[str, InvalidStagedCall] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()


class StagingSource:
    """Reads staged calls of one partition."""

    def __init__(self, dp_client: RowStore, *, staging_partition: str) -> None:
        self._client = dp_client
        self._partition = staging_partition

    def fetch(self, keys: Sequence[str | Staged]) -> list[StagedCall]:
        """The calls that `keys` name, in that order: manifest rows, staged calls, or places.

        Raises `StagedRowsMissing` naming the places where nothing is, `InvalidStagedCall` for a row
        that is malformed or not the one asked for, `RequestError` for a bare staging key, and
        `DataPlaneError` when the plane fails.
        """
        keys = as_places(keys)
        fetched = self.fetch_packed(keys)
        if fetched.missing:
            missing = [key for key in keys if key in fetched.missing]
            raise StagedRowsMissing("staged rows missing", call="fetch", partition=self._partition, keys=missing)
        for error in fetched.invalid.values():
            raise error
        return [fetched.calls[key].to_call() for key in keys]

    def fetch_packed(self, places: Sequence[str]) -> FetchedCalls:
        """All rows at `places` in one read, sorted into proven, malformed and missing ones."""
        values, missing = self.read_values(places)
        calls: dict[str, PackedCall] = {}
        invalid: dict[str, InvalidStagedCall] = {}
        for key, value in values.items():
            try:
                calls[key] = _proven(key, value)
            except InvalidStagedCall as error:
                invalid[key] = error
        return FetchedCalls(calls, invalid, missing)

    def read_values(self, places: Sequence[str]) -> tuple[dict[str, bytes], frozenset[str]]:
        """The packed values at `places`, unopened, and the places that have none."""
        return self._read(places, CALL_FIELD)

    def fetch_extras(self, places: Sequence[str]) -> tuple[dict[str, bytes], frozenset[str]]:
        """The encoded extras at `places`, unopened, and the places that have no row."""
        return self._read(places, EXTRAS_FIELD)

    def _read(self, places: Sequence[str], field_name: str) -> tuple[dict[str, bytes], frozenset[str]]:
        if not places:
            return {}, frozenset()
        batch = self._client.get_samples(list(places), self._partition, [field_name], partial=True)
        return dict(zip(batch.sample_ids, batch[field_name], strict=True)), frozenset(batch.missing)


def prove_call(key: str, value: bytes) -> PackedCall:
    """Unpack the value of the call with staging key `key`. Raises `InvalidStagedCall` when it is another's."""
    call = unpack_call(value)
    if call.staging_key != key:
        raise _misplaced(key, call.staging_key)
    return call


def _proven(place: str, value: bytes) -> PackedCall:
    call = unpack_call(value)
    if (found := place_of(call)) != place:
        raise _misplaced(place, found)
    return call


def _misplaced(key: str, found: str) -> InvalidStagedCall:
    return InvalidStagedCall(f"the row under {key!r} is that of {found!r}", code="staging_key_mismatch")
