"""What the calls of a group's rows say of themselves, read from their extras and put on the rows.

Only calls whose header says that there is something are read, all of them in one read; a group without any costs
nothing. What is read is proven by the extras' digest, which the call's own digest covers. It decides the row's
`truncated` and its tags, and the weight versions of a call that was sampled by several:

    call    generation [5, 6, 7, 8], finish_reason stop, weight_versions (0, 7) (2, 8)
    row     tags finish_reason stop; versions 7 7 8 8; weight versions 7 to 8
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from rollout_reassembler.contract.call_info import CALL_KEY, INVALID_CALL_INFO, CallInfo
from rollout_reassembler.contract.errors import InvalidStagedCall
from rollout_reassembler.reassembly.rows import FinalizedRollout, rejected
from rollout_reassembler.reassembly.spans import decode_spans, encode_row_spans
from rollout_reassembler.staging.extras import open_extras
from rollout_reassembler.staging.source import StagingSource

FINISH_REASON_TAG = "finish_reason"
TEMPERATURE_TAG = "temperature"
LOGPROBS_TAG = "logprobs"
CONSTRAINED_TAG = "constrained"
MIXED = "mixed"
"""The value of a tag where the calls that a row trains differ."""


def with_call_infos(source: StagingSource, by_rollout: list[list[FinalizedRollout]]) -> list[list[FinalizedRollout]]:
    """The rows of each rollout with what their calls say; a rollout of which that cannot be proven is rejected.

    Raises `DataPlaneError`.
    """
    places = dict.fromkeys(place for row in chain.from_iterable(by_rollout) for place in row.info_places if place)
    if not places:
        return by_rollout
    encoded, _ = source.fetch_extras(list(places))
    return [_informed(rows, encoded) for rows in by_rollout]


def call_tags(row: FinalizedRollout) -> dict[str, Any]:
    """How the row's last call ended, and how those that it trains were sampled; what is not known is left out."""
    if not any(row.call_infos):
        return {}
    owned = [info for info, is_own in zip(row.call_infos, row.owned_calls, strict=True) if is_own]
    last = row.call_infos[-1]
    tags = {
        FINISH_REASON_TAG: last.finish_reason if last is not None else None,
        TEMPERATURE_TAG: _unanimous([info and info.temperature for info in owned]),
        LOGPROBS_TAG: _unanimous([info and info.logprobs for info in owned]),
        CONSTRAINED_TAG: _unanimous([info and info.constrained for info in owned]),
    }
    return {name: value for name, value in tags.items() if value is not None}


def _unanimous(values: Sequence[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else MIXED


def _informed(rows: list[FinalizedRollout], encoded: Mapping[str, bytes]) -> list[FinalizedRollout]:
    first = rows[0]
    missing = tuple(dict.fromkeys(place for row in rows for place in row.info_places if place and place not in encoded))
    refused = partial(rejected, first.rollout_id, reward=first.reward, staging_keys=first.staging_keys)
    if missing:
        return [refused("missing_staging_row", f"the extras at {missing[0]!r} are missing", missing_keys=missing)]
    try:
        return [_with_infos(row, encoded) if any(row.info_places) else row for row in rows]
    except InvalidStagedCall as error:
        return [refused(error.code, error.detail)]


def _with_infos(row: FinalizedRollout, encoded: Mapping[str, bytes]) -> FinalizedRollout:
    spans = decode_spans(row.spans)
    told = tuple(
        span._replace(info=_read(encoded, place, span.extras_digest, span.generation_len) if place else None)
        for span, place in zip(spans.spans, row.info_places, strict=True)
    )
    spans = spans._replace(spans=told)
    versions = [version for span in told if span.owned for _, version in span.versions]
    return dataclasses.replace(
        row,
        spans=encode_row_spans(spans),
        call_infos=tuple(span.info for span in told),
        owned_calls=tuple(span.owned for span in told),
        min_wv=min(versions),
        max_wv=max(versions),
    )


def _read(encoded: Mapping[str, bytes], place: str, digest: str, generation_len: int) -> CallInfo:
    said = open_extras(encoded[place], digest).get(CALL_KEY)
    if not isinstance(said, str | memoryview):
        raise InvalidStagedCall(f"the extras at {place!r} hold no text {CALL_KEY!r}", code=INVALID_CALL_INFO)
    info = CallInfo.decode(said if isinstance(said, str) else bytes(said))
    info.check_length(generation_len)
    return info
