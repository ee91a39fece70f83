"""Which chains of a rollout's calls become rows, and which row each sampled token is trained in.

A rollout's calls are a forest: an agent tries again, hands work to sub-agents, or compacts its history and
begins a new root. Each call without a child, a *leaf*, ends one chain:

    a ── b ── c          leaves c, b', e. b' is a retry: its later sibling b answers the same prompt, so it
    └─── b'              goes. c and e are kept: two rows.
    d ── e

    segment 0   a b c    owns a, b, c
    segment 1   d e      owns d, e

A call that several kept chains hold is *owned* by the earliest of them; elsewhere it is context:

    a ── b               segment 0   a b    owns a, b
    └─── c               segment 1   a c    owns c: a's tokens are there with mask 0

What must stay true: every sampled token of a kept chain has exactly one owner; a chain that owns no
sampled token is no row; the order in which the manifest lists the calls changes nothing, as long as it
says when they were admitted. (A manifest without times is taken to be in order of commitment.) The
receipt's terminal is never dropped as a retry: its chain is what the reward was given for.

Linear in the calls and in the tokens of their carries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rollout_reassembler.contract.records import CallRecord
from rollout_reassembler.staging.codec import PackedCall


class Segment(NamedTuple):
    """One row of a rollout: the calls of a chain, root first, and which of them this row owns."""

    call_ids: tuple[str, ...]
    owned: tuple[bool, ...]


def cut(
    manifest: Sequence[CallRecord],
    proven: Mapping[str, PackedCall],
    *,
    terminal: str | None,
    keep_retries: bool = False,
    max_tokens: int | None = None,
) -> list[Segment]:
    """The segments of a rollout, earliest leaf first.

    `proven` holds the calls that may be trained, by id; a chain with any other call is left out, and so is one of
    more than `max_tokens`.
    """
    trainable = _trainable(manifest, proven)
    leaves = [leaf for leaf in _leaves(trainable) if max_tokens is None or leaf.cum_len <= max_tokens]
    if not keep_retries:
        retried = _retried(trainable, proven)
        leaves = [leaf for leaf in leaves if leaf.model_call_id == terminal or leaf.model_call_id not in retried]
    by_id = {record.model_call_id: record for record in trainable}
    owned: set[str] = set()
    segments: list[Segment] = []
    for leaf in leaves:
        chain = _chain(leaf, by_id)
        news = tuple(call_id not in owned for call_id in chain)
        if any(new and _generated(proven[call_id]) for call_id, new in zip(chain, news, strict=True)):
            owned.update(chain)
            segments.append(Segment(chain, news))
    return segments


def _trainable(manifest: Sequence[CallRecord], proven: Mapping[str, PackedCall]) -> list[CallRecord]:
    """The calls whose whole chain is proven, in order of commitment."""
    by_id = {record.model_call_id: record for record in manifest}
    sound: dict[str, bool] = {}
    for record in manifest:
        walked: list[CallRecord] = []
        cursor: CallRecord | None = record
        while cursor is not None and cursor.model_call_id not in sound:
            walked.append(cursor)
            cursor = by_id[cursor.parent_call_id] if cursor.parent_call_id is not None else None
        is_sound = cursor is None or sound[cursor.model_call_id]
        for step in reversed(walked):
            is_sound = is_sound and step.model_call_id in proven
            sound[step.model_call_id] = is_sound
    kept = [record for record in manifest if sound[record.model_call_id]]
    if all(record.admitted_at is not None for record in kept):
        kept.sort(key=lambda record: (record.admitted_at or 0.0, record.model_call_id))
    return kept


def _leaves(calls: Sequence[CallRecord]) -> list[CallRecord]:
    parents = {record.parent_call_id for record in calls}
    return [record for record in calls if record.model_call_id not in parents]


def _retried(calls: Sequence[CallRecord], proven: Mapping[str, PackedCall]) -> Collection[str]:
    """Every call that a later one answers again: another child of its parent, with the same carry."""
    alike: dict[tuple[str | None, bytes], list[str]] = defaultdict(list)
    for record in calls:
        alike[record.parent_call_id, bytes(_carry(proven[record.model_call_id]))].append(record.model_call_id)
    return {call_id for tries in alike.values() for call_id in tries[:-1]}


def _carry(call: PackedCall) -> memoryview:
    return call.encoded_token_ids[8 : 8 + 8 * (call.carry_len or 0)]


def _generated(call: PackedCall) -> bool:
    return call.carry_len is not None and call.carry_len < call.delta_len


def _chain(leaf: CallRecord, by_id: Mapping[str, CallRecord]) -> tuple[str, ...]:
    chain = [leaf.model_call_id]
    while (parent_id := by_id[chain[-1]].parent_call_id) is not None:
        chain.append(parent_id)
    return tuple(reversed(chain))
