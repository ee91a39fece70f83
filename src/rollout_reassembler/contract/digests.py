"""The four digests that prove a staged call, byte for byte those of staging schema 2.

Every digest is SHA-256, printed as lowercase hex, over length-prefixed big-endian encodings. Tokens
and floats are encoded by numpy in one pass; nothing here loops over tokens. What the digests mean:

- `extras_digest` commits to the optional extras mapping of one call;
- `chain_hash` links a call's delta to its parent's chain hash;
- `cumulative_hash` covers every token from the root to the call;
- `staging_digest` covers one call: its identity, lengths, columns and the three digests above.

Format source: `nemo_gym.token_id_capture.staging` of the `nemo-gym` 0.7.0 release. Errors are
`InvalidStagedCall`.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_reassembler.contract.errors import InvalidStagedCall

SCHEMA_VERSION = 2
DIGEST_VERSION = 2
EXTRAS_DIGEST_VERSION = 1

CUMULATIVE_DOMAIN = b"nemo-gym-staging-prefix-v2"
CHAIN_DOMAIN = b"nemo-gym-staging-chain-v1"
EXTRAS_DOMAIN = b"nemo-gym-staging-extras-v1"
CALL_DOMAIN = b"nemo-gym-staging-call-v2"

_CHAIN_ROOT = CHAIN_DOMAIN + b"\x00"
_CHAIN_CHILD = CHAIN_DOMAIN + b"\x01"

MAX_EXTRAS_DEPTH = 64

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_U64 = struct.Struct(">Q")
_I64 = struct.Struct(">q")
_F64 = struct.Struct(">d")
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


def u64(value: int) -> bytes:
    """Encode an unsigned 64-bit integer. Raises `InvalidStagedCall` for anything else."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise InvalidStagedCall(f"expected an unsigned 64-bit integer, got {value!r}")
    return _U64.pack(value)


def text(value: str) -> bytes:
    """Encode a string: its UTF-8 length, then its UTF-8 bytes. Raises `InvalidStagedCall` for anything else."""
    if not isinstance(value, str):
        raise InvalidStagedCall(f"expected a text, got {type(value).__name__}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise InvalidStagedCall(f"text is not valid unicode: {error}") from error
    return _U64.pack(len(encoded)) + encoded


def optional_text(value: str | None) -> bytes:
    return b"\x00" if value is None else b"\x01" + text(value)


def raw_digest(value: str) -> bytes:
    """The 32 bytes of a hex digest. Raises `InvalidStagedCall` when it is not one."""
    if not isinstance(value, str) or _HEX_DIGEST.fullmatch(value) is None:
        raise InvalidStagedCall(f"expected a lowercase SHA-256 hex digest, got {value!r:.80}")
    return bytes.fromhex(value)


def as_token_ids(values: Sequence[int] | npt.NDArray[Any]) -> Integers:
    """Token ids as int64 `[T]`: exact integers only, none negative, none above 2**63 - 1."""
    array = _exact_array(values, int, "iu", "token ids")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InvalidStagedCall("token ids must fit a signed 64-bit integer")
    ids = np.ascontiguousarray(array, dtype=np.int64)
    if ids.size and int(ids.min()) < 0:
        raise InvalidStagedCall(f"token ids must be non-negative, found {int(ids.min())}")
    return ids


def as_floats(values: Sequence[float] | npt.NDArray[Any], what: str) -> Floats:
    """Values as float32 `[T]`: finite, and still finite when rounded to binary32."""
    array = _exact_array(values, float, "f", what)
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(floats).all():
        at = int(np.flatnonzero(~np.isfinite(floats))[0])
        raise InvalidStagedCall(f"{what} must be finite in binary32, found {array[at]!r} at {at}")
    return floats


def _exact_array(values: Sequence[Any] | npt.NDArray[Any], kind: type, dtype_kinds: str, what: str) -> npt.NDArray[Any]:
    """A one-dimensional array of exactly `kind`; numpy alone would let `True` pass for 1."""
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in dtype_kinds:
            raise InvalidStagedCall(
                f"{what} must be one-dimensional {kind.__name__}s, got {values.dtype}{values.shape}"
            )
        return values
    if not isinstance(values, list | tuple):
        expected = f"a list or a numpy array of {kind.__name__}s"
        raise InvalidStagedCall(f"{what} must be {expected}, got {type(values).__module__}.{type(values).__name__}")
    found = set(map(type, values)) - {kind}
    if found - {int} if kind is float else found:
        names = ", ".join(sorted(f"{other.__module__}.{other.__name__}".removeprefix("builtins.") for other in found))
        expected = f"a flat list of {kind.__name__}s, or a numpy array"
        raise InvalidStagedCall(f"{what} must be {expected}, found {names} in a list")
    try:
        return np.array(values, dtype=np.int64 if kind is int else np.float64)
    except OverflowError as error:
        raise InvalidStagedCall(f"{what} must fit 64 bits: {error}") from error


def encode_token_ids(token_ids: Integers) -> bytes:
    """`tokens(ids)`: the count, then each id, 8 bytes each. `token_ids` is int64 `[T]`."""
    return _U64.pack(len(token_ids)) + token_ids.astype(">i8").tobytes()


def encode_floats(values: Floats) -> bytes:
    """`floats(xs)`: the count, then each value, 4 bytes each. `values` is float32 `[T]`."""
    return _U64.pack(len(values)) + values.astype(">f4").tobytes()


def cumulative_hash(token_ids: Sequence[int] | npt.NDArray[Any]) -> str:
    """Digest of all tokens from the root to a call. `token_ids` is `[T]`."""
    return hashlib.sha256(CUMULATIVE_DOMAIN + encode_token_ids(as_token_ids(token_ids))).hexdigest()


def chain_hash(parent_chain_hash: str | None, token_ids_delta: Sequence[int] | npt.NDArray[Any]) -> str:
    """Digest that links a delta `[T]` to its parent; `None` for a root."""
    return encoded_chain_hash(parent_chain_hash, encode_token_ids(as_token_ids(token_ids_delta)))


def encoded_chain_hash(parent_chain_hash: str | None, encoded_token_ids: bytes | memoryview) -> str:
    """`chain_hash` over tokens that are already encoded (count included), without copying them."""
    parent = b"" if parent_chain_hash is None else raw_digest(parent_chain_hash)
    return encoded_chain_link(parent, encoded_token_ids).hex()


def encoded_chain_link(parent: bytes, encoded_token_ids: bytes | memoryview) -> bytes:
    """`encoded_chain_hash` in raw digests: `parent` is 32 bytes, or none for a root."""
    digest = hashlib.sha256(_CHAIN_CHILD + parent if parent else _CHAIN_ROOT)
    digest.update(encoded_token_ids)
    return digest.digest()


def extras_digest(extras: Mapping[str, Any] | None) -> str:
    """Digest of a call's extras: none, or a string-keyed mapping of JSON-like values."""
    return encoded_extras_digest(encode_extras(extras))


def encoded_extras_digest(encoded: bytes | memoryview) -> str:
    """`extras_digest` of extras that are already encoded, without copying them."""
    digest = hashlib.sha256(EXTRAS_DOMAIN + bytes([EXTRAS_DIGEST_VERSION]))
    digest.update(encoded)
    return digest.hexdigest()


def encode_extras(extras: Mapping[str, Any] | None) -> bytes:
    """`extra(v)`: the typed binary form of a call's extras.

    Only exact `None`, `bool`, `int` (signed 64-bit), finite `float`, `str`, `list` and `dict` are
    accepted, nested at most `MAX_EXTRAS_DEPTH` deep, so that no two runtimes can encode one value
    in two ways. Raises `InvalidStagedCall`.
    """
    if extras is not None and not isinstance(extras, Mapping):
        raise InvalidStagedCall(f"extras must be a mapping or none, got {type(extras).__name__}")
    pieces: list[bytes] = []
    _encode_extra(None if extras is None else dict(extras), pieces, depth=0)
    return b"".join(pieces)


def _encode_extra(value: Any, pieces: list[bytes], *, depth: int) -> None:
    if depth > MAX_EXTRAS_DEPTH:
        raise InvalidStagedCall(f"extras are nested deeper than {MAX_EXTRAS_DEPTH}")
    if type(value) is list:
        pieces.append(b"L" + _U64.pack(len(value)))
        for item in value:
            _encode_extra(item, pieces, depth=depth + 1)
    elif type(value) is dict:
        if any(type(key) is not str for key in value):
            raise InvalidStagedCall("extras mappings must have string keys")
        pieces.append(b"D" + _U64.pack(len(value)))
        for key in sorted(value, key=lambda key: key.encode("utf-8", "surrogatepass")):
            pieces.append(text(key))
            _encode_extra(value[key], pieces, depth=depth + 1)
    else:
        encode = _EXTRA_SCALARS.get(type(value))
        if encode is None:
            raise InvalidStagedCall(f"extras cannot hold a {type(value).__name__}")
        pieces.append(encode(value))


def _encode_extra_int(value: int) -> bytes:
    if not -(1 << 63) <= value < 1 << 63:
        raise InvalidStagedCall(f"extras integers must fit signed 64 bits, got {value}")
    return b"I" + _I64.pack(value)


def _encode_extra_float(value: float) -> bytes:
    if not math.isfinite(value):
        raise InvalidStagedCall(f"extras floats must be finite, got {value!r}")
    return b"F" + _F64.pack(value)


_EXTRA_SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"B\x01" if value else b"B\x00",
    int: _encode_extra_int,
    float: _encode_extra_float,
    str: lambda value: b"S" + text(value),
}

EMPTY_EXTRAS_DIGEST = extras_digest(None)


def staging_preimage(
    *,
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    delta_len: int,
    cum_len: int,
    weight_version: int,
    token_ids_delta: Integers,
    token_mask_delta: Floats,
    generation_log_probs_delta: Floats,
    extras_digest: str,
    chain_hash: str,
    cumulative_hash: str,
) -> bytes:
    """The exact bytes that a call's `digest` hashes. Columns are `[delta_len]`.

    The preimage holds everything a staged call is, so it is also what staging stores: whoever
    holds these bytes and the digest needs nothing else to prove the call.
    """
    tokens = encode_token_ids(token_ids_delta)
    mask = encode_floats(token_mask_delta)
    log_probs = encode_floats(generation_log_probs_delta)
    return b"".join(
        (
            CALL_DOMAIN,
            bytes([SCHEMA_VERSION, DIGEST_VERSION, EXTRAS_DIGEST_VERSION]),
            text(rollout_id),
            text(model_call_id),
            optional_text(parent_call_id),
            text(mode),
            u64(prev_len),
            u64(delta_len),
            u64(cum_len),
            u64(weight_version),
            _U64.pack(len(tokens)),
            tokens,
            _U64.pack(len(mask)),
            mask,
            _U64.pack(len(log_probs)),
            log_probs,
            raw_digest(extras_digest),
            b"\x01",
            raw_digest(chain_hash),
            b"\x01",
            raw_digest(cumulative_hash),
        )
    )


def staging_digest(
    *,
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    delta_len: int,
    cum_len: int,
    weight_version: int,
    token_ids_delta: Sequence[int] | npt.NDArray[Any],
    token_mask_delta: Sequence[float] | npt.NDArray[Any],
    generation_log_probs_delta: Sequence[float] | npt.NDArray[Any],
    extras_digest: str,
    chain_hash: str,
    cumulative_hash: str,
) -> str:
    """Digest of one staged call. Columns are `[delta_len]`. Raises `InvalidStagedCall`."""
    preimage = staging_preimage(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        parent_call_id=parent_call_id,
        mode=mode,
        prev_len=prev_len,
        delta_len=delta_len,
        cum_len=cum_len,
        weight_version=weight_version,
        token_ids_delta=as_token_ids(token_ids_delta),
        token_mask_delta=as_floats(token_mask_delta, "token mask"),
        generation_log_probs_delta=as_floats(generation_log_probs_delta, "log probabilities"),
        extras_digest=extras_digest,
        chain_hash=chain_hash,
        cumulative_hash=cumulative_hash,
    )
    return hashlib.sha256(preimage).hexdigest()
