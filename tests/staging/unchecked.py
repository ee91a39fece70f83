"""Packed values that nobody checked: what a faulty or hostile stager could put into the plane."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollout_reassembler.contract import digests

HEADER_BYTES = 56
_HEADER = struct.Struct(">4sBBHIHH")
_FIELDS = (
    "rollout_id",
    "model_call_id",
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
)


def preimage_of(staged: Mapping[str, Any]) -> bytes:
    """What the digest of these fields hashes, whatever they hold: lengths and masks are taken as they come."""
    with np.errstate(over="ignore"):
        return digests.staging_preimage(
            **{name: staged[name] for name in _FIELDS},
            token_ids_delta=np.array(staged["token_ids_delta"], np.uint64).view(np.int64),
            token_mask_delta=np.array(staged["token_mask_delta"], np.float32),
            generation_log_probs_delta=np.array(staged["generation_log_probs_delta"], np.float32),
        )


def header(digest: bytes) -> bytes:
    """The header of a call with this digest and without routes."""
    fields = _HEADER.pack(b"RRSC", 2, 0, 0, 0, 0, 0)
    return fields + hashlib.sha256(fields + digest).digest()[:8] + digest


def signed(body: bytes) -> bytes:
    """A packed value around any body, under the digest of that body."""
    return header(hashlib.sha256(body).digest()) + body


def packed_unchecked(staged: Mapping[str, Any]) -> bytes:
    """The packed value of these fields under the digest that they name, right or wrong."""
    return header(bytes.fromhex(staged["digest"])) + preimage_of(staged)


def resigned(staged: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields with the digest of what they hold now."""
    return {**staged, "digest": hashlib.sha256(preimage_of(staged)).hexdigest()}
