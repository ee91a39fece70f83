"""What travels between the agent's side and an inference worker around one model call.

The ledger *admits* a call and hands a `CaptureAdmission` to the worker; the worker stages the call's
tokens and hands `CommitCoords` back. Neither holds a token: they cross processes as plain JSON.

Worked example, call `b` continuing call `a` (prompt `[1, 2]`, sampled `[3]`) with `[4]` and sampled `[5, 6]`:

    admission of b   mode token_in, parent a, prev_len 3, parent_chain_hash of a, staging_chain ("r/a",)
    coords of b      staged, prev_len 3, delta_len 3, cum_len 6, generation_len 2, digests, key "r/b"
    coords, failed   capture_failed, prev_len 3, delta_len 0, cum_len 3, failure_reason "prompt_diverges: …"

The weight version is not part of an admission: the worker stamps its own when the call begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictStr, model_validator

from rollout_reassembler.contract.records import (
    CallMode,
    Count,
    DigestHex,
    Identifier,
    StagedCall,
    StagedReference,
    staging_key,
)

Message = Mapping[str, Any]
"""One turn of a conversation, as the chat API has it: `role`, `content`, `tool_calls`, …"""

Resolution = Literal["root", "resolved", "unresolved"]
Disposition = Literal["staged", "capture_failed"]

# Why a call could not be captured: the first word of a failure reason. The first five are the words
# of the reference release, which its users count by.
UNRESOLVED_PARENT = "unresolved_parent"
CAPTURE_FAILED = "worker_capture_failed"
MISSING_COORDS = "worker_response_missing_commit_coordinates"
INVALID_COORDS = "invalid_worker_commit_coordinates"
MISSING_RESPONSE_ID = "ledger_row_missing_response_id"
PREFIX_UNAVAILABLE = "prefix_unavailable"
PROMPT_DIVERGES = "prompt_diverges"
STAGING_FAILED = "staging_failed"
VERSION_UNAVAILABLE = "weight_version_unavailable"
CAPTURE_ERROR = "capture_error"

_REASON_CHARS = 500


def one_line(reason: str) -> str:
    """A reason as one line of bounded length and valid unicode, whatever an exception's text held."""
    line = " ".join(reason.encode("utf-8", "replace").decode().split())
    return line if len(line) <= _REASON_CHARS else f"{line[: _REASON_CHARS - 1]}…"


@dataclass(frozen=True)
class ParentLink:
    """All that a child needs to know of its parent to be sealed behind it."""

    model_call_id: str
    cum_len: int
    chain_hash: str


class _CaptureRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal[2] = 2
    rollout_id: Identifier
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: Count = 0

    @property
    def mode(self) -> CallMode:
        return "text" if self.parent_call_id is None else "token_in"

    def _check_parent(self) -> None:
        if (self.prev_len == 0) != (self.parent_call_id is None):
            raise ValueError(f"prev_len {self.prev_len} with parent {self.parent_call_id!r}")


class CaptureAdmission(_CaptureRecord):
    """One call that may be generated, and which tokens its prompt must begin with.

    Made by the ledger, consumed by a recorder. `staging_chain` holds the staging keys from the root to
    the parent, `staging_digests` their digests: the prefix is their deltas, one after the other. A root
    that does not begin its rollout says why in `new_root_reason`, whose first word is the cause. An
    *unresolved* admission has no parent and is never staged; the call is answered all the same, and its
    rollout is poisoned.
    """

    resolution: Resolution
    parent_chain_hash: DigestHex | None = None
    staging_chain: tuple[Identifier, ...] = ()
    unresolved_reason: StrictStr | None = None
    new_root_reason: StrictStr | None = None
    admitted_at: StrictFloat | None = None
    staging_digests: tuple[DigestHex, ...] = ()

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        self._check_parent()
        if (self.resolution == "resolved") != (self.parent_call_id is not None):
            raise ValueError(f"a {self.resolution} admission with parent {self.parent_call_id!r}")
        if (self.resolution == "unresolved") != (self.unresolved_reason is not None):
            raise ValueError(f"a {self.resolution} admission with unresolved_reason {self.unresolved_reason!r}")
        if self.new_root_reason is not None and self.resolution != "root":
            raise ValueError(f"a {self.resolution} admission with new_root_reason {self.new_root_reason!r}")
        has_parent = self.parent_call_id is not None
        if has_parent != (self.parent_chain_hash is not None) or has_parent != bool(self.staging_chain):
            raise ValueError("a call has a parent, the parent's chain hash and a staging chain, or none of the three")
        if has_parent and self.staging_chain[-1] != staging_key(self.rollout_id, str(self.parent_call_id)):
            raise ValueError(f"the staging chain ends at {self.staging_chain[-1]!r}, not at the parent")
        if self.staging_digests and len(self.staging_digests) != len(self.staging_chain):
            raise ValueError(
                f"{len(self.staging_digests)} digests for a chain of {len(self.staging_chain)} staged calls"
            )
        return self

    @property
    def staged_chain(self) -> list[StagedReference]:
        """The staged calls from the root to the parent; none where the digests are not known."""
        return list(map(StagedReference, self.staging_chain, self.staging_digests))

    @property
    def parent(self) -> ParentLink | None:
        if self.parent_call_id is None or self.parent_chain_hash is None:
            return None
        return ParentLink(self.parent_call_id, self.prev_len, self.parent_chain_hash)


class CommitCoords(_CaptureRecord):
    """What a worker acknowledges about one call: durable under `staging_key`, or not, and why.

    `generation_len` counts the sampled tokens; `None` when a worker of another make does not say. A
    call with none is staged (its prompt was real) but is never anybody's parent.
    """

    digest_version: Literal[2] = 2
    extras_digest_version: Literal[1] = 1
    delta_len: Count
    cum_len: Count
    weight_version: Count
    disposition: Disposition = "staged"
    digest: DigestHex | None = None
    extras_digest: DigestHex | None = None
    staging_key: Identifier | None = None
    chain_hash: DigestHex | None = None
    cumulative_hash: DigestHex | None = None
    generation_len: Count | None = None
    failure_reason: StrictStr | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        self._check_parent()
        if self.cum_len != self.prev_len + self.delta_len:
            raise ValueError(f"cum_len {self.cum_len} is not prev_len {self.prev_len} + delta_len {self.delta_len}")
        proof = (self.digest, self.extras_digest, self.staging_key, self.chain_hash, self.cumulative_hash)
        if self.disposition == "staged":
            self._check_staged(proof)
        elif any(part is not None for part in (*proof, self.generation_len)) or self.delta_len:
            raise ValueError("coordinates of a failed capture can name no tokens, digests or staging key")
        return self

    def _check_staged(self, proof: tuple[str | None, ...]) -> None:
        if None in proof:
            raise ValueError("staged coordinates need digest, extras_digest, staging_key and both hashes")
        if self.delta_len == 0:
            raise ValueError("a staged call adds at least one token")
        if self.failure_reason is not None:
            raise ValueError("staged coordinates cannot carry a failure_reason")
        if self.generation_len is not None and self.generation_len > self.delta_len:
            raise ValueError(f"generation_len {self.generation_len} is more than delta_len {self.delta_len}")
        if self.staging_key != staging_key(self.rollout_id, self.model_call_id):
            raise ValueError(f"staging_key {self.staging_key!r} is not that of this call")

    @classmethod
    def of(cls, call: StagedCall, *, generation_len: int, key: str | None) -> CommitCoords:
        """The coordinates of a call that a sink made durable under `key`."""
        return cls(
            rollout_id=call.rollout_id,
            model_call_id=call.model_call_id,
            parent_call_id=call.parent_call_id,
            prev_len=call.prev_len,
            delta_len=call.delta_len,
            cum_len=call.cum_len,
            weight_version=call.weight_version,
            digest=call.digest,
            extras_digest=call.extras_digest,
            staging_key=key,
            chain_hash=call.chain_hash,
            cumulative_hash=call.cumulative_hash,
            generation_len=generation_len,
        )

    @classmethod
    def failed(cls, admission: CaptureAdmission, *, weight_version: int, reason: str) -> CommitCoords:
        """The coordinates of a call that was answered but could not be captured; `reason` as `one_line` has it."""
        return cls(
            rollout_id=admission.rollout_id,
            model_call_id=admission.model_call_id,
            parent_call_id=admission.parent_call_id,
            prev_len=admission.prev_len,
            delta_len=0,
            cum_len=admission.prev_len,
            weight_version=weight_version,
            disposition="capture_failed",
            failure_reason=one_line(reason) or "no reason was given",
        )
