"""A route plan: where each of a row's routes comes from, written down before any route is read.

A plan has one span for each call of the chain, in order; the spans' lengths sum to the row's. It says
which fragment a span takes its rows from and what that fragment must hash to, so that whoever
executes it (the actor at once, or the trainer later) needs neither receipt nor tokens:

    call a: 2 carried, 1 generated, 3 route rows staged     span 0: tokens 0-2  of "r1/a#9f2c…"
    call b: 1 carried, 1 generated, 2 route rows staged     span 1: tokens 3-4  of "r1/b#07d1…"

A plan's staging keys are *places* (`staging/places.py`): the keys under which the rows lie.

In deferred mode the plan travels as a tag of its row, which every reader of metadata pays for, so it
is small: `encode_route_plan` writes the digests raw (32 bytes that nothing can compress), keys once
and without their common prefix, and deflates all. A call costs from 57 (short ids) to 90 (uuids)
characters of tag, 43 of them its digest: 4.5 kB at 50 calls. Decoding gives the exact plan, and
never inflates more than `MAX_PLAN_BYTES`.

Schema 2, the keys of `RoutePlan` and `RouteSpan` and their names are fixed on the wire. A plan that
breaks its rules is `InvalidRoutePlan` (`invalid_route_plan`).
"""

from __future__ import annotations

import binascii
import json
import os.path
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator

from rollout_reassembler.contract.digests import EXTRAS_DIGEST_VERSION
from rollout_reassembler.contract.errors import InvalidRoutePlan
from rollout_reassembler.contract.records import Count, DigestHex, Identifier
from rollout_reassembler.contract.routed_experts import RouteSpanMode, classify_route_span
from rollout_reassembler.reassembly.verify import LinearizedRow
from rollout_reassembler.staging.places import place_of

ROUTE_PLAN_TAG = "route_plan"
ROUTE_PLAN_SCHEMA = 2
MAX_PLAN_BYTES = 8 << 20

_ENCODED_MAGIC = "rp2:"
_DIGEST_BYTES = 32
_U32 = struct.Struct(">I")


class RouteSpan(BaseModel):
    """One call's part of the row: `carry_len + generation_len` tokens, and the fragment that routes them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    staging_key: Identifier
    carry_len: Count
    generation_len: Count
    staged_route_len: Count
    extras_digest_version: Literal[1]
    extras_digest: DigestHex

    @property
    def length(self) -> int:
        return self.carry_len + self.generation_len

    @property
    def mode(self) -> RouteSpanMode:
        """What the executor takes from the fragment: as `classify_route_span`, but never from one too long.

        More rows than tokens means that the producer counted something else (a preempted attempt, the
        whole sequence); then no row can be told to belong to a token.
        """
        if self.staged_route_len > self.length:
            return "sentinel"
        return classify_route_span(self.carry_len, self.generation_len, self.staged_route_len)


class RoutePlan(BaseModel):
    """All spans of one row, and the staged keys that are done with once it has been executed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[2]
    staging_partition: StrictStr = Field(min_length=1)
    spans: tuple[RouteSpan, ...]
    cleanup_staging_keys: tuple[Identifier, ...]
    expected_token_length: StrictInt = Field(gt=0)

    @model_validator(mode="after")
    def _check_spans(self) -> Self:
        keys = [span.staging_key for span in self.spans]
        if len(set(keys)) != len(keys):
            raise ValueError("two spans name one staging key")
        if len(set(self.cleanup_staging_keys)) != len(self.cleanup_staging_keys):
            raise ValueError("a cleanup key is listed twice")
        if foreign := set(keys).difference(self.cleanup_staging_keys):
            raise ValueError(f"span {min(foreign)!r} is not among the cleanup keys")
        total = sum(span.length for span in self.spans)
        if total != self.expected_token_length:
            raise ValueError(f"the spans hold {total} tokens, the row {self.expected_token_length}")
        return self

    @property
    def fragment_keys(self) -> list[str]:
        """The staged rows that executing the plan reads, in order."""
        return [span.staging_key for span in self.spans if span.mode != "sentinel"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the keys of the wire."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> RoutePlan:
        """A plan from exactly the keys of the wire. Raises `InvalidRoutePlan`."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, fault["loc"])) or "plan"
            raise InvalidRoutePlan(f"{where}: {fault['msg']}") from error


def plan_routes(row: LinearizedRow, *, staging_partition: str, cleanup_keys: Sequence[str]) -> RoutePlan:
    """The plan of a proven row. `cleanup_keys` are the places of all staged calls of its rollout, off the chain too.

    Raises `InvalidRoutePlan`, also for a cleanup key of another rollout: executing the plan clears it.
    """
    own = f"{row.rollout_id}/"
    if foreign := [key for key in cleanup_keys if not key.startswith(own)]:
        raise InvalidRoutePlan(f"cleanup key {foreign[0]!r} is not of rollout {row.rollout_id!r}")
    spans = [
        {
            "staging_key": place_of(call),
            "carry_len": link.carry_len,
            "generation_len": link.generation_len,
            "staged_route_len": call.routes.rows,
            "extras_digest_version": commitment.extras_digest_version,
            "extras_digest": commitment.extras_digest,
        }
        for call, link, commitment in zip(row.calls, row.link_spans, row.extras_commitments, strict=True)
    ]
    return RoutePlan.from_dict(
        {
            "schema_version": ROUTE_PLAN_SCHEMA,
            "staging_partition": staging_partition,
            "spans": spans,
            "cleanup_staging_keys": tuple(dict.fromkeys(cleanup_keys)),
            "expected_token_length": len(row.token_ids),
        }
    )


def encode_route_plan(plan: RoutePlan) -> str:
    """The plan as a row tag: ASCII text. Layout before deflate: u32 length of a JSON head, head, raw digests."""
    prefix = os.path.commonprefix(plan.cleanup_staging_keys)  # noqa: RUF071 - by character is meant
    places = {key: place for place, key in enumerate(plan.cleanup_staging_keys)}
    order = [places[span.staging_key] for span in plan.spans]
    head = [
        plan.staging_partition,
        plan.expected_token_length,
        prefix,
        [key[len(prefix) :] for key in plan.cleanup_staging_keys],
        None if order == list(range(len(order))) else order,
        [span.carry_len for span in plan.spans],
        [span.generation_len for span in plan.spans],
        [span.staged_route_len for span in plan.spans],
    ]
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    digests = [bytes.fromhex(span.extras_digest) for span in plan.spans]
    body = b"".join([_U32.pack(len(text)), text, *digests])
    return _ENCODED_MAGIC + binascii.b2a_base64(zlib.compress(body, 9), newline=False).decode("ascii")


def decode_route_plan(encoded: str) -> RoutePlan:
    """The exact plan that `encode_route_plan` was given. Raises `InvalidRoutePlan`."""
    if not isinstance(encoded, str) or not encoded.startswith(_ENCODED_MAGIC):
        raise InvalidRoutePlan(f"not an encoded route plan: {encoded!r:.40}")
    try:
        return _decode_body(_inflate(encoded[len(_ENCODED_MAGIC) :]))
    except InvalidRoutePlan:
        raise
    except (zlib.error, struct.error, ValueError, TypeError, LookupError, RecursionError) as error:
        raise InvalidRoutePlan(f"garbled route plan of {len(encoded)} characters: {error}") from error


def _inflate(text: str) -> bytes:
    if len(text) > MAX_PLAN_BYTES:
        raise InvalidRoutePlan(f"{len(text)} characters, more than MAX_PLAN_BYTES={MAX_PLAN_BYTES}")
    inflater = zlib.decompressobj()
    body = inflater.decompress(binascii.a2b_base64(text, strict_mode=True), MAX_PLAN_BYTES)
    if not inflater.eof or inflater.unused_data:
        raise InvalidRoutePlan(f"{len(text)} characters that do not end within MAX_PLAN_BYTES={MAX_PLAN_BYTES}")
    return body


def _decode_body(body: bytes) -> RoutePlan:
    head_end = _U32.size + _U32.unpack_from(body)[0]
    partition, length, prefix, suffixes, order, *columns = json.loads(body[_U32.size : head_end])
    keys = tuple(prefix + suffix for suffix in suffixes)
    digests = [body[at : at + _DIGEST_BYTES].hex() for at in range(head_end, len(body), _DIGEST_BYTES)]
    places = range(len(digests)) if order is None else order
    spans = [
        {
            "staging_key": keys[place],
            "carry_len": carry_len,
            "generation_len": generation_len,
            "staged_route_len": staged_route_len,
            "extras_digest_version": EXTRAS_DIGEST_VERSION,
            "extras_digest": digest,
        }
        for place, digest, carry_len, generation_len, staged_route_len in zip(places, digests, *columns, strict=True)
    ]
    return RoutePlan.from_dict(
        {
            "schema_version": ROUTE_PLAN_SCHEMA,
            "staging_partition": partition,
            "spans": spans,
            "cleanup_staging_keys": keys,
            "expected_token_length": length,
        }
    )
