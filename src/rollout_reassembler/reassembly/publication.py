"""From proven rows to a published group, once: however many finalizers work on it, and however late one wakes.

    reserve    number the N rows, then look the group up; one round trip
    store      values under those numbers, readable by nobody
    record     the answer and the numbers, durably
    announce   tags and values become readable, under those numbers and no others

The numbers are what fences. A row keeps its number until it is cleared, and it is cleared only once it was
announced, which is behind the record. So all finalizers that find no record have the same numbers, and who
has others finds one:

    the record has my numbers, nothing readable     its writer died or is on its way: store and announce again
    the record has my numbers, readable             published
    the record has other numbers                    published, and cleared by a trainer: give mine back
    I hold numbers of before a clear, and wake      what I announce belongs to no key, and is taken back

A record of placeholders may be replaced: where they stand for rows that were lost, by the same request with all
rows staged again; where nothing could be read of a request, by another one. The rows get new numbers: those of
the placeholders are released first, so that a trainer which had them claims the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_reassembler.contract.errors import GroupConflict, PlaneLost
from rollout_reassembler.contract.messages import FinalizedGroup, ReassemblyRequest
from rollout_reassembler.contract.settings import Branches
from rollout_reassembler.data_plane.base import Column, Reservation, RowStore, Tags
from rollout_reassembler.reassembly.admission import difference, refuse_held_samples
from rollout_reassembler.reassembly.group_record import GroupRecord, GroupRecords
from rollout_reassembler.reassembly.phases import Phases


@dataclasses.dataclass(frozen=True)
class CanonicalRows:
    """A group's N rows as they are written, and the answer that names them."""

    answer: FinalizedGroup
    columns: Mapping[str, Column]
    tags: Sequence[Tags]


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one finalizer has to publish for a plain request: `rows` are assembled only where they are needed.

    `sample_ids` are those of the rows; how many a rollout has is known once it was proven.

    `lacks_rows` tells that staged rows are missing, `is_unread` that nothing of the group could be read.
    """

    request: ReassemblyRequest
    fingerprint: str
    branches: Branches
    sample_ids: Sequence[str]
    rows: Callable[[], CanonicalRows]
    lacks_rows: bool
    is_unread: bool

    @property
    def group_id(self) -> str:
        return self.request.group_id

    def may_replace(self, recorded: GroupRecord) -> bool:
        """Whether this takes the place of what is on record. Raises `GroupConflict` when it is another request's."""
        if recorded.fingerprint == self.fingerprint:
            return recorded.is_lost and not self.lacks_rows
        if recorded.is_unread:
            return True
        what = difference(recorded.fingerprint, self.fingerprint)
        raise GroupConflict(
            f"group {self.group_id!r} was finalized before, by a request that differs in {what}; "
            "give this one a group id of its own"
        )


class Publisher:
    """Publishes groups into one canonical partition."""

    def __init__(self, dp_client: RowStore, records: GroupRecords, *, partition_id: str) -> None:
        self._client = dp_client
        self._records = records
        self._partition_id = partition_id

    def publish(self, offer: Offer, phases: Phases) -> FinalizedGroup:
        """The group's answer; it is on record, and its rows can be read, or could be until they were cleared.

        Raises `GroupConflict` when the record is that of another request, `PlaneLost` when its rows were never
        announced and can't be put together again.
        """
        has_released = False
        sample_ids = offer.sample_ids
        while True:
            with phases("record"):
                look_up = (self._records.partition_id, offer.group_id)
                reserved = self._client.reserve_samples(sample_ids, self._partition_id, look_up=look_up)
                recorded = self._records.decode(offer.group_id, reserved.looked_up)
            if recorded is None:
                refuse_held_samples(offer.group_id, offer.sample_ids, reserved.tags)
                return self._write(offer, reserved, phases)
            try:
                replaces = offer.may_replace(recorded)
            except GroupConflict:
                self._give_back(reserved, recorded)
                raise
            published = recorded.answer.meta.sample_ids
            has_others = list(published) != list(reserved.sample_ids)
            if replaces:
                if has_others and not has_released:
                    self._release_all(published)
                    has_released = True
                    continue
                placeholders = _those(reserved, set(recorded.numbers))
                # A plane without numbers set aside gives those that were released again.
                if has_released or not placeholders.numbers:
                    return self._write(offer, reserved, phases)
                with phases("publish"):
                    self._client.release_samples(placeholders)
                has_released = True
                continue
            if has_others:
                # Rows of other chains: staging has changed since. The record knows which ones it stands for.
                self._give_back(reserved, recorded)
                sample_ids = published
                continue
            if reserved.numbers == recorded.numbers and not reserved.is_readable:
                return self._complete(offer, reserved, recorded, phases)
            self._give_back(reserved, recorded)
            return recorded.answer

    def _write(self, offer: Offer, reserved: Reservation, phases: Phases) -> FinalizedGroup:
        rows = offer.rows()
        with phases("publish"):
            stored = self._client.store_samples(reserved, rows.columns)
        is_lost = offer.request.accept_lost and offer.lacks_rows
        record = GroupRecord(offer.fingerprint, rows.answer, is_lost, offer.is_unread, reserved.numbers)
        with phases("record"):
            self._records.write(offer.group_id, record)
        with phases("publish"):
            self._client.announce_samples(stored, rows.tags)
        return rows.answer

    def _complete(self, offer: Offer, reserved: Reservation, recorded: GroupRecord, phases: Phases) -> FinalizedGroup:
        """Do again what stands behind the record. Staging is cleared later, so the rows are what they were."""
        rows = offer.rows()
        if rows.answer != recorded.answer:
            if offer.request.accept_lost:
                return self._write(offer, reserved, phases)
            raise PlaneLost(
                "the group is on record, its rows were never announced, and what is staged does not give them; "
                "stage its rollouts again and send the same request, or give them up with accept_lost=True",
                call="finalize",
                partition=self._partition_id,
                keys=offer.sample_ids,
            )
        with phases("publish"):
            self._client.announce_samples(self._client.store_samples(reserved, rows.columns), rows.tags)
        return rows.answer

    def _release_all(self, sample_ids: Sequence[str]) -> None:
        self._client.release_samples(self._client.reserve_samples(sample_ids, self._partition_id))

    def _give_back(self, reserved: Reservation, recorded: GroupRecord) -> None:
        """Release rows that were made by asking, whose number the record does not have.

        Who replaces a record of placeholders holds such numbers as well: those stay.
        """
        mine = _those(reserved, set(reserved.numbers) - set(recorded.numbers))
        if recorded.numbers and mine.numbers and not (recorded.is_lost or recorded.is_unread):
            self._client.release_samples(mine)


def _those(reserved: Reservation, numbers: set[int]) -> Reservation:
    """The part of a reservation that has these numbers."""
    places = [place for place, number in enumerate(reserved.numbers) if number in numbers]

    def picked(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[place] for place in places)

    return dataclasses.replace(
        reserved,
        sample_ids=picked(reserved.sample_ids),
        numbers=picked(reserved.numbers),
        tags=picked(reserved.tags),
    )
