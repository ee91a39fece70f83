"""The durable answer of a finalized group, by which finalizing twice equals finalizing once.

Once a group's rows are stored, and before anybody can read them, a `GroupRecord` of it is written to a
companion partition of the canonical one, as tags of a row without columns, so that it outlives both the
staged rows (cleared last) and the canonical rows (cleared by the trainer). Together with the numbers of its
rows it says what is to be announced, and what never again (`publication.py`). It costs a healthy group the
write; the look-up comes with the numbers.

But for those numbers the record is a function of the request and the staged bytes alone (no clock in it), and
two finalizers of one request have the same numbers, so they write the same record. Records are small but stay until the
training loop says that it will not ask again (`forget`, `expire`), for instance when a trainer checkpoint is durable.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.contract.messages import FinalizedGroup, KVBatchMeta
from rollout_reassembler.data_plane.base import RowStore, Tags

_FINGERPRINT_TAG = "fingerprint"
_ANSWER_TAG = "answer"
_LOST_TAG = "is_lost"
_UNREAD_TAG = "is_unread"
_NUMBERS_TAG = "numbers"


@dataclass(frozen=True)
class GroupRecord:
    """That this group was published, for which request, and what was answered.

    `is_lost`: placeholders stand for rows that were lost, which their caller gave up; once they are staged
    again, another record may take this one's place. `is_unread`: placeholders stand for rollouts whose
    receipts or rewards were none at all; another request may take this one's place. No other record is ever replaced.
    `numbers` are those of the rows that are announced behind the record (`publication.py`).
    """

    fingerprint: str
    answer: FinalizedGroup
    is_lost: bool = False
    is_unread: bool = False
    numbers: tuple[int, ...] = ()


class GroupRecords:
    """The records of one canonical partition."""

    def __init__(self, dp_client: RowStore, *, partition_id: str) -> None:
        self._client = dp_client
        self._canonical = partition_id
        self.partition_id = f"{partition_id}.groups"
        dp_client.register_partition(self.partition_id, {})

    def lookup(self, group_id: str) -> GroupRecord | None:
        """The group's record, `None` before it was published. One round trip. Raises as `decode` does."""
        (tags,) = self._client.get_tags([group_id], self.partition_id)
        return self.decode(group_id, tags)

    def decode(self, group_id: str, tags: Tags | None) -> GroupRecord | None:
        """The record in these tags of the group's key.

        Raises `DataPlaneError` for a record that this version cannot read: whether the group was
        published is then unknown, and publishing it again might double its rows.
        """
        if not tags or _ANSWER_TAG not in tags:
            return None
        try:
            return GroupRecord(
                tags[_FINGERPRINT_TAG],
                _decode_answer(tags[_ANSWER_TAG]),
                bool(tags.get(_LOST_TAG)),
                bool(tags.get(_UNREAD_TAG)),
                tuple(tags.get(_NUMBERS_TAG, ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            what = (
                f"the record of this group is not readable ({error!r:.200}); clear it to have the group published again"
            )
            raise DataPlaneError(what, call="get_tags", partition=self.partition_id, keys=[group_id]) from error

    def write(self, group_id: str, record: GroupRecord) -> None:
        """Make the answer durable; from here on the group is finalized."""
        tags = {
            _FINGERPRINT_TAG: record.fingerprint,
            _ANSWER_TAG: _encode_answer(record.answer),
            _LOST_TAG: record.is_lost,
            _UNREAD_TAG: record.is_unread,
            _NUMBERS_TAG: list(record.numbers),
        }
        self._client.put_samples([group_id], self.partition_id, tags=[tags])

    def forget(self, group_ids: Sequence[str]) -> None:
        """Drop the records of groups that nobody will ask for again."""
        self._client.clear_samples(list(group_ids), self.partition_id)

    def expire(self, *, keep: int, before_weight_version: int | None = None) -> list[str]:
        """Drop the records of groups that were consumed, but for the newest `keep`; returns their ids.

        A group is consumed once the trainer has cleared all its canonical rows: no record goes before. The newest are
        those of the highest weight version, the plane's order among equals; with `before_weight_version` only
        records of groups that ended below it go. A request whose record is gone is a new one: its staged
        rows were cleared, so it is `PlaneLost`, or all placeholders where its `staged_on` is the plane's epoch.
        Keep as many as your driver may send again, for instance all since the last durable trainer checkpoint. Lists
        both partitions: call it between training steps, not for each group. Raises `ValueError` for a negative `keep`.
        """
        if keep < 0:
            raise ValueError(f"keep must be a number of records, 0 or more, got {keep}")
        answers = {
            group_id: _decode_answer(tags[_ANSWER_TAG])
            for group_id, tags in self._client.list_samples(self.partition_id).items()
            if _ANSWER_TAG in tags
        }
        rows = self._client.list_samples(self._canonical)
        newest_last = sorted(answers, key=lambda group_id: answers[group_id].group_max_wv)
        expired = [
            group_id
            for group_id in newest_last[: max(0, len(newest_last) - keep)]
            if rows.keys().isdisjoint(answers[group_id].meta.sample_ids)
            and (before_weight_version is None or answers[group_id].group_max_wv < before_weight_version)
        ]
        self.forget(expired)
        return expired

    def group_ids(self) -> list[str]:
        """All groups on record; a key without an answer is that of a write that failed."""
        return [
            group_id for group_id, tags in self._client.list_samples(self.partition_id).items() if _ANSWER_TAG in tags
        ]


def _encode_answer(answer: FinalizedGroup) -> str:
    fields = dataclasses.asdict(answer)
    del fields["timings"], fields["cleanup_pending"]
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _decode_answer(text: str) -> FinalizedGroup:
    fields = json.loads(text)
    fields["meta"] = KVBatchMeta(**fields["meta"])
    fields["staging_keys"] = tuple(fields["staging_keys"])
    fields["to_collect"] = tuple(fields["to_collect"])
    fields["rows_by_rollout"] = tuple(fields["rows_by_rollout"])
    return FinalizedGroup(**fields)
