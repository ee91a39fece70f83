"""Which rows an iteration reads, how they are dealt out to batches, and where each belongs.

named_rows    what a caller names (metas, ids)   →  one `KVBatchMeta`
Budget        rows and tokens a batch may hold   →  where each batch begins and ends
places_of     the rows' tags                     →  the group and the rollout of each, by number
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from rollout_reassembler.contract import engine_values
from rollout_reassembler.contract.messages import FinalizedGroup, KVBatchMeta
from rollout_reassembler.data_plane.base import RowStore, Tags
from rollout_reassembler.reassembly.rows import ROLLOUT_TAG, ROLLOUT_TOKENS_TAG


def named_rows(rows: Any, partition_id: str | None) -> KVBatchMeta:
    """The rows to read and their partition. Raises `TypeError` for what names no rows, `ValueError` elsewhere."""
    expected = "rows are a KVBatchMeta, a list of them, or a list of sample ids with their partition_id"
    if isinstance(rows, KVBatchMeta):
        rows = [rows]
    if isinstance(rows, FinalizedGroup):
        raise TypeError(f"{expected}; got a FinalizedGroup: pass its .meta")
    if isinstance(rows, str):
        raise TypeError(f"{expected}; got the text {rows!r:.80}: pass [{rows!r:.80}]")
    if not isinstance(rows, Sequence):
        raise TypeError(f"{expected}; got {type(rows).__name__}")
    kinds = {type(row) for row in rows}
    if kinds == {KVBatchMeta}:
        return _joined(rows, partition_id)
    for at, row in enumerate(rows):
        if isinstance(row, FinalizedGroup):
            raise TypeError(f"{expected}; got a FinalizedGroup at {at}: pass its .meta")
        if not isinstance(row, str):
            raise TypeError(f"{expected}; got {type(row).__name__} at {at}")
    if not partition_id:
        raise ValueError("partition_id is needed where rows are given by their ids")
    return KVBatchMeta(partition_id, sample_ids=list(rows))


def _joined(metas: Sequence[KVBatchMeta], partition_id: str | None) -> KVBatchMeta:
    partitions = {meta.partition_id for meta in metas}
    if partition_id is not None and partitions != {partition_id}:
        found = ", ".join(sorted(map(repr, partitions)))
        raise ValueError(f"partition_id is {partition_id!r}, the KVBatchMeta's own is {found}")
    if len(partitions) > 1:
        raise ValueError(f"rows of one iteration are of one partition, got {', '.join(sorted(map(repr, partitions)))}")
    sample_ids = [sample_id for meta in metas for sample_id in meta.sample_ids]
    if len(set(sample_ids)) != len(sample_ids):
        twice = next(sample_id for sample_id in sample_ids if sample_ids.count(sample_id) > 1)
        raise ValueError(f"row {twice!r} is named twice")
    return KVBatchMeta(metas[0].partition_id, sample_ids=sample_ids)


@dataclass(frozen=True)
class Budget:
    """How much goes into one batch."""

    rows: int | None
    tokens: int | None
    padded: bool

    @classmethod
    def of(cls, batch_size: Any, max_tokens: Any, layout: str) -> Self:
        if batch_size is None and max_tokens is None:
            raise ValueError("give batch_size (rows), max_tokens (tokens as they lie in memory) or both")
        limits: list[int | None] = []
        for name, limit in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            checked = None if limit is None else engine_values.count(limit, name)
            if checked is not None and checked < 1:
                raise ValueError(f"{name} must be 1 or more, got {limit}")
            limits.append(checked)
        return cls(limits[0], limits[1], layout == "padded")

    def cut(self, sample_ids: Sequence[str], lengths: Sequence[int] | None) -> Iterator[tuple[int, int]]:
        """Where each batch begins and ends. `lengths` are needed for a budget of tokens."""
        start = longest = total = 0
        for at in range(len(sample_ids)):
            length = lengths[at] if lengths is not None else 0
            if self.tokens is not None and length > self.tokens:
                raise ValueError(f"row {sample_ids[at]!r} has {length} tokens, more than max_tokens={self.tokens}")
            longest, total = max(longest, length), total + length
            held = longest * (at + 1 - start) if self.padded else total
            if at - start == self.rows or (self.tokens is not None and held > self.tokens):
                yield start, at
                start, longest, total = at, length, length
        if start < len(sample_ids):
            yield start, len(sample_ids)


class Place(NamedTuple):
    """Where a row belongs, by numbers of the whole iteration; its rollout's owned tokens, where its tags say them."""

    group: int
    rollout: int
    rollout_tokens: int | None


def row_tags_of(client: RowStore, meta: KVBatchMeta) -> list[Tags]:
    """The plane's own tags, not those of the meta: an RPC may have left the bulky ones (route plans) out."""
    return [row_tags or {} for row_tags in client.get_tags(meta.sample_ids, meta.partition_id)]


def places_of(sample_ids: Sequence[str], tags: Sequence[Tags]) -> list[Place]:
    groups: dict[Any, int] = {}
    rollouts: dict[tuple[Any, Any], int] = {}
    places = []
    for sample_id, row_tags in zip(sample_ids, tags, strict=True):
        group_id = row_tags.get("group_id")
        # A row whose tags name no rollout is the only one of its own.
        rollout = (group_id, row_tags[ROLLOUT_TAG]) if ROLLOUT_TAG in row_tags else (None, sample_id)
        group = groups.setdefault(group_id, len(groups))
        tokens = row_tags.get(ROLLOUT_TOKENS_TAG)
        places.append(Place(group, rollouts.setdefault(rollout, len(rollouts)), tokens))
    return places
