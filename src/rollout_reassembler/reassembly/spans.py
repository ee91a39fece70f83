"""The proof that a canonical row carries with it: which calls it is made of, and what they hash to.

A row outlives its staged calls, its receipt and its data plane. `encode_spans` writes one bytes value
beside its columns, from which, with the columns alone, everything that was proven is proven again:

    prove_row(token_ids, token_mask, logprobs, encoded)   →   RowSpans, or VerificationError

    chain       each call's delta, hashed behind its parent's          →  the last call's chain hash
    cumulative  all tokens of the row                                  →  the last call's cumulative hash
    call        each owned call's identity, columns and hashes         →  its digest, as its manifest row lists it
    mask        1 where a call that the row owns was sampled, else 0

A call that another row of the rollout owns is context here: its log probabilities are 0, so its digest is
kept and not recomputed; its tokens are proven by the chain.

Layout: `RRS1`, u32 length of a JSON head, the head, then 96 raw bytes a call (digest, extras digest,
cumulative hash) and the last call's 32-byte chain hash. The head is `[rollout_id, call ids, carry lengths,
generation lengths, weight versions, owned calls (none: all)]`, and behind these, where a call says something of
itself, what each says, as JSON text or null. That was proven by the extras' digest before publication; from the
row alone it cannot be. A placeholder carries no bytes at all.
"""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from rollout_reassembler.contract.call_info import CallInfo
from rollout_reassembler.contract.digests import (
    CUMULATIVE_DOMAIN,
    Floats,
    Integers,
    encoded_chain_link,
    staging_digest,
    u64,
)
from rollout_reassembler.contract.errors import InvalidStagedCall, VerificationError
from rollout_reassembler.reassembly.verify import LinearizedRow

_MAGIC = b"RRS1"
_HEAD_LENGTH = struct.Struct(">I")
_HASHES = struct.Struct(">32s32s32s")
_CODE = "invalid_spans"


class Span(NamedTuple):
    """One call of a row: tokens `[start, start + carry_len + generation_len)`, the carry first."""

    model_call_id: str
    start: int
    carry_len: int
    generation_len: int
    weight_version: int
    owned: bool
    digest: str
    extras_digest: str
    cumulative_hash: str
    info: CallInfo | None = None

    @property
    def length(self) -> int:
        return self.carry_len + self.generation_len

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """The weight versions that sampled the call, as `(start, version)` in its generation."""
        return (self.info.weight_versions if self.info is not None else ()) or ((0, self.weight_version),)


class RowSpans(NamedTuple):
    """All calls of a row, root first, and the chain hash of the last one."""

    rollout_id: str
    spans: tuple[Span, ...]
    chain_hash: str

    @property
    def length(self) -> int:
        """The row's tokens."""
        return sum(span.length for span in self.spans)

    @property
    def owned_tokens(self) -> int:
        """The sampled tokens that the row owns."""
        return sum(span.generation_len for span in self.spans if span.owned)

    def weight_versions(self) -> Integers:
        """The weight version that sampled each token, or admitted the call that carried it, int64 `[T]`."""
        runs = [run for span in self.spans for run in _version_runs(span)]
        return np.repeat(np.array([version for _, version in runs], np.int64), [length for length, _ in runs])

    @classmethod
    def of(cls, row: LinearizedRow) -> Self:
        """Those of a proven row."""
        spans = tuple(
            Span(
                call.model_call_id,
                call.prev_len,
                link.carry_len,
                link.generation_len,
                call.weight_version,
                owned,
                call.digest,
                call.extras_digest,
                call.cumulative_hash,
            )
            for call, link, owned in zip(row.calls, row.link_spans, row.owned, strict=True)
        )
        return cls(row.rollout_id, spans, row.calls[-1].chain_hash)


def encode_spans(row: LinearizedRow) -> bytes:
    """A proven row's proof as bytes."""
    return encode_row_spans(RowSpans.of(row))


def encode_row_spans(row: RowSpans) -> bytes:
    """A row's spans as bytes."""
    spans = row.spans
    head: list[Any] = [
        row.rollout_id,
        [span.model_call_id for span in spans],
        [span.carry_len for span in spans],
        [span.generation_len for span in spans],
        [span.weight_version for span in spans],
        None if all(span.owned for span in spans) else [place for place, span in enumerate(spans) if span.owned],
    ]
    if any(span.info is not None for span in spans):
        head.append([span.info.encode() if span.info is not None else None for span in spans])
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    hashes = "".join([part for span in spans for part in (span.digest, span.extras_digest, span.cumulative_hash)])
    return b"".join((_MAGIC, _HEAD_LENGTH.pack(len(text)), text, bytes.fromhex(hashes), bytes.fromhex(row.chain_hash)))


def decode_spans(encoded: bytes) -> RowSpans:
    """The spans of a row. Raises `VerificationError` (`invalid_spans`) for bytes that are not any row's."""
    try:
        return _decode(encoded)
    except (struct.error, ValueError, TypeError, LookupError, RecursionError, InvalidStagedCall) as error:
        raise VerificationError(f"garbled spans of {len(encoded)} bytes: {error}", code=_CODE) from error


def _decode(encoded: bytes) -> RowSpans:
    if not encoded.startswith(_MAGIC):
        raise ValueError(f"expected {_MAGIC!r}, found {encoded[:4]!r}")
    head_at = len(_MAGIC) + _HEAD_LENGTH.size
    head_end = head_at + _HEAD_LENGTH.unpack_from(encoded, len(_MAGIC))[0]
    rollout_id, call_ids, carries, generations, versions, owned, *said = json.loads(encoded[head_at:head_end])
    hashes_end = head_end + _HASHES.size * len(call_ids)
    if len(encoded) != hashes_end + 32:
        raise ValueError(f"{len(call_ids)} calls need {hashes_end + 32} bytes")
    numbers = [*carries, *generations, *versions, *(owned or ())]
    if not all(type(number) is int and number >= 0 for number in numbers) or not call_ids:
        raise ValueError("lengths, versions and places are counts, and a row has a call")
    if not all(isinstance(text, str) and text for text in (rollout_id, *call_ids)):
        raise ValueError("ids are texts")
    owns = set(range(len(call_ids)) if owned is None else owned)
    (infos,) = said or ([None] * len(call_ids),)
    hashes = _HASHES.iter_unpack(encoded[head_end:hashes_end])
    spans = []
    start = 0
    rows = zip(call_ids, carries, generations, versions, hashes, infos, strict=True)
    for place, (call_id, carry_len, generation_len, version, parts, info) in enumerate(rows):
        digest, extras_digest, cumulative_hash = (part.hex() for part in parts)
        told = CallInfo.decode(info) if info is not None else None
        if told is not None:
            told.check_length(generation_len)
        is_own = place in owns
        spans.append(
            Span(
                call_id, start, carry_len, generation_len, version, is_own, digest, extras_digest, cumulative_hash, told
            )
        )
        start += carry_len + generation_len
    return RowSpans(rollout_id, tuple(spans), encoded[hashes_end:].hex())


def _version_runs(span: Span) -> list[tuple[int, int]]:
    """The call's tokens as `(how many, weight version)`; its carry counts with the first sampled token."""
    starts = [0, *(span.carry_len + start for start, _ in span.versions[1:]), span.length]
    runs = zip(pairwise(starts), span.versions, strict=True)
    return [(end - start, version) for (start, end), (_, version) in runs]


def prove_row(token_ids: Integers, token_mask: Floats, logprobs: Floats, encoded: bytes) -> RowSpans:
    """Prove a row, columns `[T]`, by the spans that it carries.

    Raises `VerificationError` with `invalid_spans` for bytes that are none, `row_length_mismatch`,
    `row_mask_mismatch`, `chain_hash_mismatch`, `cumulative_hash_mismatch`, or `corrupt_digest`, naming the call
    (and the first token, where it is the mask).
    """
    row = decode_spans(encoded)
    lengths = {len(token_ids), len(token_mask), len(logprobs), row.length}
    if len(lengths) != 1:
        found = f"{len(token_ids)} tokens, {len(token_mask)} masks and {len(logprobs)} log probabilities"
        raise VerificationError(f"{found}; the spans hold {row.length} tokens", code="row_length_mismatch")
    _check_mask(row, token_mask, logprobs)
    encoded_ids = token_ids.astype(">u8").tobytes()
    chain_hashes = _chain_hashes(row, encoded_ids)
    if chain_hashes[-1] != row.chain_hash:
        raise VerificationError(
            f"the row's tokens are not the chain of call {row.spans[-1].model_call_id!r}", code="chain_hash_mismatch"
        )
    cumulative = hashlib.sha256(CUMULATIVE_DOMAIN + u64(row.length) + encoded_ids).hexdigest()
    if cumulative != row.spans[-1].cumulative_hash:
        raise VerificationError(
            f"the row's tokens are not the sequence of call {row.spans[-1].model_call_id!r}",
            code="cumulative_hash_mismatch",
        )
    for place, span in enumerate(row.spans):
        if span.owned and _digest(row, place, chain_hashes, token_ids, token_mask, logprobs) != span.digest:
            raise VerificationError(
                f"call {span.model_call_id!r}: what the row holds of it does not hash to its digest",
                code="corrupt_digest",
            )
    return row


def _check_mask(row: RowSpans, token_mask: Floats, logprobs: Floats) -> None:
    runs = [length for span in row.spans for length in (span.carry_len, span.generation_len)]
    trained = np.array([float(own) for span in row.spans for own in (False, span.owned)], np.float32)
    expected = np.repeat(trained, runs)
    differs = np.flatnonzero((token_mask != expected) | ((expected == 0) & (logprobs != 0)))
    if differs.size:
        at = int(differs[0])
        raise VerificationError(
            f"token {at}: mask {token_mask[at]:g} and log probability {logprobs[at]:g}, the spans say mask "
            f"{expected[at]:g}",
            code="row_mask_mismatch",
        )


def _chain_hashes(row: RowSpans, encoded_ids: bytes) -> list[str]:
    link = b""
    hashes = []
    ids = memoryview(encoded_ids)
    for span in row.spans:
        end = span.start + span.length
        link = encoded_chain_link(link, u64(span.length) + bytes(ids[8 * span.start : 8 * end]))
        hashes.append(link.hex())
    return hashes


def _digest(
    row: RowSpans, place: int, chain_hashes: list[str], token_ids: Integers, token_mask: Floats, logprobs: Floats
) -> str:
    span, part = row.spans[place], slice(row.spans[place].start, row.spans[place].start + row.spans[place].length)
    fields: dict[str, Any] = {
        "rollout_id": row.rollout_id,
        "model_call_id": span.model_call_id,
        "parent_call_id": row.spans[place - 1].model_call_id if place else None,
        "mode": "token_in" if place else "text",
        "prev_len": span.start,
        "delta_len": span.length,
        "cum_len": span.start + span.length,
        "weight_version": span.weight_version,
        "token_ids_delta": token_ids[part],
        "token_mask_delta": token_mask[part],
        "generation_log_probs_delta": logprobs[part],
        "extras_digest": span.extras_digest,
        "chain_hash": chain_hashes[place],
        "cumulative_hash": span.cumulative_hash,
    }
    return staging_digest(**fields)
