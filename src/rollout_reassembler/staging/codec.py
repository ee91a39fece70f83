"""A staged call as bytes: a small header, the call's digest, and the bytes which that digest hashes.

    offset  size  field (big-endian)
    0       4     magic `RRSC`
    4       1     version, 2
    5       1     flags: bit 0 set when the extras hold a boundary route, bit 1 when a `CallInfo`
    6       2     zero
    8       4     route rows in the extras (0 for none), u32
    12      2     layers L of these routes, u16
    14      2     experts a token and layer K of these routes, u16
    16      8     the header's own proof: the first 8 bytes of SHA-256 over bytes 0-15 and the call's digest
    24      32    digest of the call
    56      …     the digest's preimage (`contract.digests.staging_preimage`), to the end of the value

The preimage holds the call's identity, lengths, columns and hashes, length-prefixed and in wire
order, so nothing is stored twice and proving a row is one hash over the bytes as they lie:

    unpack_call(value)                          →  PackedCall: parsed, checked and proven
    unpack_listed(values, rollout_id, records)  →  the same calls, held against what their records list and not
                                                   parsed; none where a value is another call's

A `PackedCall` that exists is valid: its columns have `delta_len` values, masks are 0 or 1, a mask-0
token has log probability 0, everything is finite, and the contents hash to the digest. What it
does not say is whether this is the row a receipt means; that is `reassembly.verify`'s part. The
route shape in the header is what lets a plan be made without reading routes. It is not under the call's
digest, so the header proves itself: no bit of it can change unnoticed, also where extras are never read.
Whoever reads the routes holds it against them as well, since a stager may have been wrong.

Extras travel in a field of their own (`encode_extras`), as the bytes that their digest hashes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_reassembler.contract.call_info import CALL_KEY
from rollout_reassembler.contract.digests import (
    CALL_DOMAIN,
    DIGEST_VERSION,
    EXTRAS_DIGEST_VERSION,
    SCHEMA_VERSION,
    optional_text,
    text,
)
from rollout_reassembler.contract.errors import InvalidStagedCall
from rollout_reassembler.contract.records import CallRecord, StagedCall, staging_key
from rollout_reassembler.staging.places import is_place, place

MAGIC = b"RRSC"
VERSION = 2

_HEADER = struct.Struct(">4sBBHIHH8s32s")
_HEADER_FIELDS = struct.Struct(">4sBBHIHH")
_PREAMBLE = CALL_DOMAIN + bytes([SCHEMA_VERSION, DIGEST_VERSION, EXTRAS_DIGEST_VERSION])
_DIGEST_AT = _HEADER.size - 32
_PROOF_AT = _DIGEST_AT - 8
_TEXTS_AT = _HEADER.size + len(_PREAMBLE)
_U64 = struct.Struct(">Q")
_LENGTHS = struct.Struct(">4Q")
_COUNTS = struct.Struct(">2Q")
_TAIL = struct.Struct(">32sc32sc32s")
_PRESENT = b"\x01"
_ROOT = optional_text(None) + text("text")
_CHILD_MODE = text("token_in")
_BOUNDARY_FLAG = 1
_INFO_FLAG = 2
_ONE = struct.pack(">f", 1.0)
_TOKEN_ID = np.dtype(">i8")
_FLOAT = np.dtype(">f4")


class RouteShape(NamedTuple):
    """What routes a call's extras hold: `[rows, layers, topk]`, and whether a boundary row comes along."""

    rows: int = 0
    layers: int = 0
    topk: int = 0
    boundary: bool = False


NO_ROUTES = RouteShape()
_NOTHING_TOLD = (NO_ROUTES, False)


class PackedCall(NamedTuple):
    """A proven staged call over its packed bytes.

    `carry_len` is the number of leading mask-0 tokens when the mask is carry, then generation, and
    `None` when it is in any other order. `has_info` says that the extras hold a `CallInfo`. The columns are
    read-only big-endian views, `[delta_len]`.
    """

    value: bytes
    rollout_id: str
    model_call_id: str
    parent_call_id: str | None
    mode: str
    prev_len: int
    delta_len: int
    cum_len: int
    weight_version: int
    digest: str
    extras_digest: str
    chain_hash: str
    cumulative_hash: str
    carry_len: int | None
    routes: RouteShape
    has_info: bool
    tokens_at: int

    @property
    def staging_key(self) -> str:
        return staging_key(self.rollout_id, self.model_call_id)

    @property
    def token_ids_delta(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.value, _TOKEN_ID, self.delta_len, self.tokens_at)

    @property
    def token_mask_delta(self) -> npt.NDArray[np.float32]:
        _, mask_at, _, _ = _columns_at(self.tokens_at, self.delta_len)
        return np.frombuffer(self.value, _FLOAT, self.delta_len, mask_at)

    @property
    def generation_log_probs_delta(self) -> npt.NDArray[np.float32]:
        _, _, log_probs_at, _ = _columns_at(self.tokens_at, self.delta_len)
        return np.frombuffer(self.value, _FLOAT, self.delta_len, log_probs_at)

    @property
    def encoded_token_ids(self) -> memoryview:
        """The delta's tokens as the digests encode them: the count, then 8 bytes a token."""
        return memoryview(self.value)[self.tokens_at - 8 : self.tokens_at + 8 * self.delta_len]

    @property
    def encoded_log_probs(self) -> memoryview:
        """The delta's log probabilities, 4 bytes each, big-endian."""
        _, _, log_probs_at, tail_at = _columns_at(self.tokens_at, self.delta_len)
        return memoryview(self.value)[log_probs_at:tail_at]

    def to_call(self) -> StagedCall:
        """The same call as a record, with native arrays."""
        return StagedCall(
            rollout_id=self.rollout_id,
            model_call_id=self.model_call_id,
            parent_call_id=self.parent_call_id,
            mode=self.mode,  # type: ignore[arg-type]
            prev_len=self.prev_len,
            delta_len=self.delta_len,
            cum_len=self.cum_len,
            weight_version=self.weight_version,
            digest=self.digest,
            extras_digest=self.extras_digest,
            chain_hash=self.chain_hash,
            cumulative_hash=self.cumulative_hash,
            token_ids_delta=self.token_ids_delta,
            token_mask_delta=self.token_mask_delta,
            generation_log_probs_delta=self.generation_log_probs_delta,
        )


LISTED_FIELDS = tuple(name for name in PackedCall._fields if name in CallRecord.model_fields)
"""What a manifest row says of a call as well, from its id to its cumulative hash."""

_listed_fields = attrgetter(*LISTED_FIELDS)


def pack_call(call: StagedCall, routes: RouteShape = NO_ROUTES) -> bytes:
    """The packed value of a call. Its extras are not in it; `routes` says what routes they hold."""
    flags = _BOUNDARY_FLAG * routes.boundary | _INFO_FLAG * (CALL_KEY in (call.extras or ()))
    digest = bytes.fromhex(call.digest)
    fields = _HEADER_FIELDS.pack(MAGIC, VERSION, flags, 0, routes.rows, routes.layers, routes.topk)
    return b"".join((fields, _header_proof(fields, digest), digest, call.preimage))


def staged_place(key: str, value: bytes) -> str:
    """Where a packed value lies whose key is a place or a staging key. Opens nothing, and proves nothing."""
    return key if is_place(key) else place(key, value[_DIGEST_AT : _HEADER.size].hex())


def unpack_call(value: bytes) -> PackedCall:
    """Parse, check and prove one packed value. Raises `InvalidStagedCall` for anything that is not one."""
    try:
        return _unpack(value)
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidStagedCall(f"truncated or garbled packed call of {len(value)} bytes: {error}") from error


def unpack_listed(
    values: Iterable[bytes | None], rollout_id: str, records: Iterable[CallRecord]
) -> list[PackedCall | None]:
    """The calls of `rollout_id` that `records` list, from their values, in that order; each proven.

    A record says every byte of a value but its header and its columns, so the value is held against those
    bytes. `None` stands for a value that is anything else: `unpack_call` says what it is. Raises
    `InvalidStagedCall` for a column that no call can have.
    """
    rollout = _PREAMBLE + text(rollout_id)
    return [
        _listed_call(value, rollout_id, rollout, record) if value is not None else None
        for value, record in zip(values, records, strict=True)
    ]


def _listed_call(value: bytes, rollout_id: str, preamble: bytes, record: CallRecord) -> PackedCall | None:
    listed = _listed_fields(record)
    call_id, parent_id, _, prev_len, delta_len, cum_len, weight_version, digest, extras, chain, cumulative = listed
    lineage = _ROOT if parent_id is None else _PRESENT + text(parent_id) + _CHILD_MODE
    lengths = _LENGTHS.pack(prev_len, delta_len, cum_len, weight_version)
    proof = bytes.fromhex(digest)
    head = b"".join((proof, preamble, text(call_id), lineage, lengths))
    tail = _PRESENT.join((bytes.fromhex(extras), bytes.fromhex(chain), bytes.fromhex(cumulative)))
    tokens_at = _DIGEST_AT + len(head) + _COUNTS.size
    told = _read_header(value, proof)
    if (
        told is None
        or not value.startswith(head, _DIGEST_AT)
        or not value.endswith(tail)
        or not _has_columns(value, delta_len, places := _columns_at(tokens_at, delta_len))
        or hashlib.sha256(memoryview(value)[_HEADER.size :]).digest() != proof
    ):
        return None
    carry_len = _check_columns(value, delta_len, places)
    return PackedCall._make((value, rollout_id, *listed, carry_len, *told, tokens_at))


def _header_proof(fields: bytes, digest: bytes) -> bytes:
    """What binds a header's fields to its call."""
    return hashlib.sha256(fields + digest).digest()[: _DIGEST_AT - _PROOF_AT]


def _read_header(value: bytes, digest: bytes) -> tuple[RouteShape, bool] | None:
    """What the header of the call with this digest says of its extras; `None` when it is not the header of one."""
    if len(value) < _HEADER.size:
        return None
    magic, version, flags, zero, rows, layers, topk, proof, _ = _HEADER.unpack_from(value)
    if magic != MAGIC or version != VERSION or zero or flags & ~(_BOUNDARY_FLAG | _INFO_FLAG):
        return None
    if proof != _header_proof(value[:_PROOF_AT], digest):
        return None
    if not (rows or flags):
        return _NOTHING_TOLD
    return RouteShape(rows, layers, topk, flags & _BOUNDARY_FLAG != 0), flags & _INFO_FLAG != 0


def _unpack(value: bytes) -> PackedCall:
    if type(value) is not bytes:
        raise InvalidStagedCall(f"a packed call is bytes, got {type(value).__name__}")
    digest = value[_DIGEST_AT : _HEADER.size]
    told = _read_header(value, digest)
    if told is None:
        found = f"{len(value)} bytes from {value[:8]!r}"
        raise InvalidStagedCall(f"not a packed call of version {VERSION} with a sound header: {found}")
    if not value.startswith(_PREAMBLE, _HEADER.size):
        raise InvalidStagedCall("unsupported schema or digest version")
    if hashlib.sha256(memoryview(value)[_HEADER.size :]).digest() != digest:
        raise InvalidStagedCall("contents do not hash to the digest")
    rollout_id, at = _text(value, _TEXTS_AT)
    model_call_id, at = _text(value, at)
    if value.startswith(_ROOT, at):
        parent_call_id, mode, at = None, "text", at + len(_ROOT)
    elif value.startswith(_PRESENT, at):
        parent_call_id, at = _text(value, at + 1)
        if not value.startswith(_CHILD_MODE, at):
            raise InvalidStagedCall(f"call {model_call_id!r}: a call with a parent is of mode token_in")
        mode, at = "token_in", at + len(_CHILD_MODE)
    else:
        raise InvalidStagedCall(f"call {model_call_id!r}: neither a root of mode text nor a call with a parent")
    prev_len, delta_len, cum_len, weight_version = _LENGTHS.unpack_from(value, at)
    tokens_at = at + _LENGTHS.size + _COUNTS.size
    places = _columns_at(tokens_at, delta_len)
    if not _has_columns(value, delta_len, places):
        raise InvalidStagedCall(
            f"call {model_call_id!r}: not three columns of delta_len {delta_len} in a value of {len(value)} bytes"
        )
    if not (rollout_id and model_call_id and delta_len) or cum_len != prev_len + delta_len or parent_call_id == "":
        raise InvalidStagedCall(f"call {model_call_id!r}: empty id or delta, or lengths that do not add up")
    if (prev_len == 0) != (parent_call_id is None):
        raise InvalidStagedCall(f"call {model_call_id!r}: prev_len {prev_len} with parent {parent_call_id!r}")
    extras, has_chain, chain, has_cumulative, cumulative = _TAIL.unpack_from(value, len(value) - _TAIL.size)
    if has_chain != _PRESENT or has_cumulative != _PRESENT:
        raise InvalidStagedCall(f"call {model_call_id!r}: a hash that is not marked as present")
    return PackedCall(
        value,
        rollout_id,
        model_call_id,
        parent_call_id,
        mode,
        prev_len,
        delta_len,
        cum_len,
        weight_version,
        digest.hex(),
        extras.hex(),
        chain.hex(),
        cumulative.hex(),
        _check_columns(value, delta_len, places),
        *told,
        tokens_at,
    )


def _text(value: bytes, at: int) -> tuple[str, int]:
    start = at + 8
    end = start + _U64.unpack_from(value, at)[0]
    if end > len(value):
        raise InvalidStagedCall(f"a text of {end - start} bytes in a value of {len(value)}")
    return value[start:end].decode(), end


Places = tuple[int, int, int, int]
"""Where the tokens, the mask, the log probabilities and the tail of a value begin, in bytes."""


def _columns_at(tokens_at: int, n: int) -> Places:
    """The places of three columns of `n` values from `tokens_at` on."""
    mask_at = tokens_at + 8 * n + _COUNTS.size
    log_probs_at = mask_at + 4 * n + _COUNTS.size
    return tokens_at, mask_at, log_probs_at, log_probs_at + 4 * n


def _has_columns(value: bytes, n: int, places: Places) -> bool:
    """Whether three columns of `n` values, then a tail, fill the value to its end."""
    tokens_at, mask_at, log_probs_at, tail_at = places
    if len(value) != tail_at + _TAIL.size:  # from here on the counts fit their 64 bits
        return False
    floats = _COUNTS.pack(8 + 4 * n, n)
    return (
        value.startswith(_COUNTS.pack(8 + 8 * n, n), tokens_at - _COUNTS.size)
        and value.startswith(floats, mask_at - _COUNTS.size)
        and value.startswith(floats, log_probs_at - _COUNTS.size)
    )


def _check_columns(value: bytes, n: int, places: Places) -> int | None:
    """The carry length of a call in order, `None` for another order; raises where a column is invalid.

    At some thousand calls a second the cost of this function is numpy's cost a call, so the common
    case is decided on the bytes: an id is non-negative when its first byte is ASCII, a mask in order
    equals zeros then ones, and a float whose first byte is neither 7f nor ff is below 2**127.
    Whatever these tests do not settle is looked at exactly.
    """
    tokens_at, mask_at, log_probs_at, tail_at = places
    first_one = value.find(_ONE[0], mask_at, mask_at + 4 * n)
    carry = n if first_one < 0 else (first_one - mask_at) // 4
    zeros = bytes(4 * carry)
    exponents = value[log_probs_at + 4 * carry : tail_at : 4]
    if (
        value[tokens_at : tokens_at + 8 * n : 8].isascii()
        and value.startswith(zeros + _ONE * (n - carry), mask_at)
        and value.startswith(zeros, log_probs_at)
        and 0x7F not in exponents
        and 0xFF not in exponents
    ):
        return carry
    return _check_columns_exactly(value, n, places)


def _check_columns_exactly(value: bytes, n: int, places: Places) -> int | None:
    tokens_at, mask_at, log_probs_at, _ = places
    ids = np.frombuffer(value, ">i8", n, tokens_at)
    mask = np.frombuffer(value, ">f4", n, mask_at)
    log_probs = np.frombuffer(value, ">f4", n, log_probs_at)
    if (ids < 0).any():
        raise InvalidStagedCall("token ids must be non-negative and fit a signed 64-bit integer")
    generated = mask == 1.0
    if not (generated | (mask == 0.0)).all():
        raise InvalidStagedCall("the token mask must hold only 0.0 and 1.0")
    if not np.isfinite(log_probs).all():
        raise InvalidStagedCall("log probabilities must be finite")
    if log_probs[~generated].any():
        raise InvalidStagedCall("a token with mask 0 must have log probability 0.0")
    carry = int(n - np.count_nonzero(generated))
    return carry if generated[carry:].all() else None
