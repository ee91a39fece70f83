"""The records of the wire: a staged call, its token-free manifest row, and a rollout's receipt.

A `StagedCall` is what an inference worker makes durable for one model call: the tokens the call
*added* to its parent's sequence. A `CallRecord` is the same call without its tokens. A
`RolloutReceipt` lists the calls of one rollout and names the one whose chain is trained.

Worked example, prompt `[1, 2]`, sampled `[3]`, then a tool result `[4]` and sampled `[5, 6]`:

    call a: parent None, prev_len 0, delta [1, 2, 3], mask [0, 0, 1], cum_len 3
    call b: parent a,    prev_len 3, delta [4, 5, 6], mask [0, 1, 1], cum_len 6

All three validate from plain dicts with lists; a record that validated is internally true (lengths
add up, the digest is that of the contents). Constructing one raises pydantic's `ValidationError`;
`parse_receipt` in `bounds.py` is the door for receipts from outside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainSerializer,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from rollout_reassembler.contract import digests, engine_values
from rollout_reassembler.contract.digests import EMPTY_EXTRAS_DIGEST, Floats, Integers
from rollout_reassembler.contract.engine_values import Numbers
from rollout_reassembler.contract.errors import InvalidRoutes, InvalidStagedCall
from rollout_reassembler.contract.model_shape import ModelShape, check_log_probs

Identifier = Annotated[StrictStr, Field(min_length=1)]
Reason = Annotated[StrictStr, Field(min_length=0)]
"""Any text. The length constraint makes pydantic look at the text, which refuses lone surrogates."""
Count = Annotated[StrictInt, Field(ge=0, lt=1 << 64)]
DigestHex = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
CallMode = Literal["text", "token_in"]
TerminalMethod = Literal["declared", "response_id", "content", "heuristic"]


def _read_only(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The column through a view that refuses writes; the array that the caller gave stays writable."""
    view = column.view()
    view.flags.writeable = False
    return view


TokenIds = Annotated[
    Integers,
    BeforeValidator(lambda v: _read_only(digests.as_token_ids(v))),
    PlainSerializer(np.ndarray.tolist),
]
TokenMask = Annotated[
    Floats,
    BeforeValidator(lambda v: _read_only(digests.as_floats(v, "token mask"))),
    PlainSerializer(np.ndarray.tolist),
]
LogProbs = Annotated[
    Floats,
    BeforeValidator(lambda v: _read_only(digests.as_floats(v, "log probabilities"))),
    PlainSerializer(np.ndarray.tolist),
]


def staging_key(rollout_id: str, model_call_id: str) -> str:
    """The key of a call's row in the staging partition."""
    return f"{rollout_id}/{model_call_id}"


class _WireRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)

    schema_version: Literal[2] = 2
    digest_version: Literal[2] = 2
    extras_digest_version: Literal[1] = 1


class _CallFields(_WireRecord):
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: Count
    delta_len: Count
    cum_len: Count
    weight_version: Count
    digest: DigestHex
    extras_digest: DigestHex
    chain_hash: DigestHex
    cumulative_hash: DigestHex

    def _check_lineage(self, mode: str) -> None:
        """A root is text from position 0; a child is token_in behind a parent; both add something."""
        expected = "text" if self.parent_call_id is None else "token_in"
        if mode != expected:
            raise ValueError(f"mode {mode!r} with parent {self.parent_call_id!r}; expected {expected!r}")
        if (self.prev_len == 0) != (self.parent_call_id is None):
            raise ValueError(f"prev_len {self.prev_len} with parent {self.parent_call_id!r}")
        if self.delta_len == 0:
            raise ValueError("a call must add at least one token")
        if self.cum_len != self.prev_len + self.delta_len:
            raise ValueError(f"cum_len {self.cum_len} is not prev_len {self.prev_len} + delta_len {self.delta_len}")


class StagedCall(_CallFields):
    """One call's tokens and everything that proves them.

    `token_ids_delta` is int64 `[delta_len]`, `token_mask_delta` and `generation_log_probs_delta` are
    float32 `[delta_len]`; lists are taken too. `extras` may be absent although `extras_digest`
    commits to some: whoever reads extras checks them at that moment.
    """

    rollout_id: Identifier
    mode: CallMode
    token_ids_delta: TokenIds
    token_mask_delta: TokenMask
    generation_log_probs_delta: LogProbs
    extras_digest: DigestHex = EMPTY_EXTRAS_DIGEST
    extras: dict[str, Any] | None = None

    _preimage: bytes = PrivateAttr(b"")

    @model_validator(mode="after")
    def _check_contents(self) -> Self:
        self._check_lineage(self.mode)
        mask, log_probs = self.token_mask_delta, self.generation_log_probs_delta
        lengths = (len(self.token_ids_delta), len(mask), len(log_probs))
        if lengths != (self.delta_len,) * 3:
            raise ValueError(
                f"tokens, mask and log probabilities have lengths {lengths}, delta_len is {self.delta_len}"
            )
        carried = mask == 0.0
        if not (carried | (mask == 1.0)).all():
            raise ValueError("token_mask_delta must hold only 0.0 and 1.0")
        if log_probs[carried].any():
            raise ValueError("a token with mask 0 must have log probability 0.0")
        self._preimage = self._encode()
        if hashlib.sha256(self._preimage).hexdigest() != self.digest:
            raise ValueError("digest does not match the call's contents")
        if self.extras is not None and digests.extras_digest(self.extras) != self.extras_digest:
            raise ValueError("extras_digest does not match the extras")
        return self

    def _encode(self) -> bytes:
        return digests.staging_preimage(
            rollout_id=self.rollout_id,
            model_call_id=self.model_call_id,
            parent_call_id=self.parent_call_id,
            mode=self.mode,
            prev_len=self.prev_len,
            delta_len=self.delta_len,
            cum_len=self.cum_len,
            weight_version=self.weight_version,
            token_ids_delta=self.token_ids_delta,
            token_mask_delta=self.token_mask_delta,
            generation_log_probs_delta=self.generation_log_probs_delta,
            extras_digest=self.extras_digest,
            chain_hash=self.chain_hash,
            cumulative_hash=self.cumulative_hash,
        )

    @property
    def preimage(self) -> bytes:
        """The bytes that `digest` hashes, encoded once, when the call was validated."""
        return self._preimage or self._encode()

    @property
    def staging_key(self) -> str:
        return staging_key(self.rollout_id, self.model_call_id)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy; as with any pydantic model, `update` is not validated. Its preimage is its own."""
        copied = super().model_copy(update=update, deep=deep)
        if update:
            copied._preimage = b""
        return copied

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StagedCall):
            return NotImplemented
        return self.preimage == other.preimage and self.digest == other.digest and self.extras == other.extras

    def __hash__(self) -> int:
        return hash(self.digest)


class StagedReference(NamedTuple):
    """A staged call by its key and digest: what is needed to find its row."""

    staging_key: str
    digest: str


class ParentCall(Protocol):
    """What a child is sealed behind: a `StagedCall`, its `CallRecord`, or any record with these three."""

    @property
    def model_call_id(self) -> str: ...
    @property
    def cum_len(self) -> int: ...
    @property
    def chain_hash(self) -> str: ...


def seal_call(
    *,
    rollout_id: str,
    model_call_id: str,
    token_ids_delta: Numbers,
    token_mask_delta: Numbers,
    generation_log_probs_delta: Numbers,
    weight_version: int,
    parent: ParentCall | None = None,
    prefix_token_ids: Numbers | None = None,
    extras: Mapping[str, Any] | None = None,
    model: ModelShape | None = None,
) -> StagedCall:
    """Make a `StagedCall` with its digests from what an engine knows.

    Columns are `[delta_len]`: sequences, arrays or tensors of numbers, judged by value; a mask may be of bools.
    A call without a `parent` is a root; for any other one give the parent's `StagedCall` or `CallRecord`, and as
    `prefix_token_ids` `[parent.cum_len]` the parent's whole sequence. Where `model` says what the policy is, ids and
    routes are held to it. Raises `InvalidStagedCall`, naming the call, when the columns cannot be a call
    (`impossible_value` for a value that no engine means).
    """
    with _naming(rollout_id, model_call_id):
        if parent is not None and not hasattr(parent, "cum_len"):
            raise InvalidStagedCall(f"parent must be the parent's StagedCall or CallRecord, got {parent!r:.80}")
        ids = engine_values.token_ids(token_ids_delta)
        prefix = engine_values.token_ids(
            prefix_token_ids if prefix_token_ids is not None else (), "ids of the parent's sequence"
        )
        prev_len = parent.cum_len if parent is not None else 0
        if len(prefix) != prev_len:
            raise InvalidStagedCall(f"the parent's sequence has {prev_len} tokens, the prefix given {len(prefix)}")
        log_probs = engine_values.floats(generation_log_probs_delta, "log probabilities")
        mask = engine_values.floats(token_mask_delta, "token mask", or_bools=True)
        check_log_probs(log_probs, mask)
        if model is not None:
            model.check_token_ids(ids)
            model.check_extras(extras)
        fields: dict[str, Any] = {
            "rollout_id": rollout_id,
            "model_call_id": model_call_id,
            "parent_call_id": parent.model_call_id if parent is not None else None,
            "mode": "text" if parent is None else "token_in",
            "prev_len": prev_len,
            "delta_len": len(ids),
            "cum_len": prev_len + len(ids),
            "weight_version": int(weight_version) if isinstance(weight_version, np.integer) else weight_version,
            "token_ids_delta": ids,
            "token_mask_delta": mask,
            "generation_log_probs_delta": log_probs,
            "extras_digest": digests.extras_digest(extras),
            "chain_hash": digests.chain_hash(parent.chain_hash if parent is not None else None, ids),
            "cumulative_hash": digests.cumulative_hash(np.concatenate([prefix, ids])),
        }
        try:
            return StagedCall(
                **fields,
                extras=dict(extras) if extras is not None else None,
                digest=digests.staging_digest(**fields),
            )
        except ValidationError as error:
            raise InvalidStagedCall("; ".join(map(_fault, error.errors(include_input=False)))) from error


@contextmanager
def _naming(rollout_id: str, model_call_id: str) -> Iterator[None]:
    """Errors of the block say which call they are about."""
    try:
        yield
    except (InvalidStagedCall, InvalidRoutes) as error:
        where = f"call {model_call_id!r:.80} of rollout {rollout_id!r:.80}"
        raise InvalidStagedCall(f"{where}: {error.detail}", code=error.code) from error


def _fault(fault: Any) -> str:
    """One fault as pydantic found it: the field and what is wrong with it."""
    place = ".".join(map(str, fault["loc"]))
    message = fault["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


class CallRecord(_CallFields):
    """A staged call without its tokens: one row of a receipt's manifest."""

    staging_key: Identifier
    mode: CallMode = "token_in"
    response_id: Identifier
    admitted_at: StrictFloat | None = None
    output_fingerprint: DigestHex | None = None
    continuation_fingerprint: DigestHex | None = None
    fingerprint_version: Count = 0

    @model_validator(mode="after")
    def _check_contents(self) -> Self:
        self._check_lineage(self.mode)
        return self

    @classmethod
    def of(cls, call: StagedCall, *, response_id: str, **witness: Any) -> CallRecord:
        """The manifest row of a staged call; `witness` fields (fingerprints, admission time) as they are."""
        return cls(
            model_call_id=call.model_call_id,
            parent_call_id=call.parent_call_id,
            prev_len=call.prev_len,
            delta_len=call.delta_len,
            cum_len=call.cum_len,
            weight_version=call.weight_version,
            digest=call.digest,
            extras_digest=call.extras_digest,
            chain_hash=call.chain_hash,
            cumulative_hash=call.cumulative_hash,
            staging_key=call.staging_key,
            mode=call.mode,
            response_id=response_id,
            **witness,
        )


class RolloutReceipt(_WireRecord):
    """What the agent's side hands over for one rollout: its calls and which one ends the trained chain.

    It is in one of three states: *trainable* (names a terminal and the method that chose it),
    *poisoned* (capture failed somewhere; may still name a terminal), or *unattributed* (no method
    ran; poisoned, with a reason).
    """

    rollout_id: Identifier
    reward: float | None = None
    terminal_model_call_id: Identifier | None = None
    manifest: Annotated[list[CallRecord], FailFast()] = Field(default_factory=list)
    capture_poisoned: bool = False
    failure_reason: Reason | None = None
    terminal_selection: TerminalMethod | None = None
    terminal_attribution_reason: Reason | None = None

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        calls = {record.model_call_id for record in self.manifest}
        if len(calls) != len(self.manifest):
            raise ValueError("the manifest lists a model_call_id twice")
        if self.terminal_model_call_id is not None and self.terminal_model_call_id not in calls:
            raise ValueError(f"terminal {self.terminal_model_call_id!r} is not in the manifest")
        if not self.capture_poisoned:
            if self.failure_reason is not None:
                raise ValueError("a receipt that is not poisoned cannot have a failure_reason")
            if self.terminal_model_call_id is None or self.terminal_selection is None:
                raise ValueError("a receipt that is not poisoned must name its terminal and the method that chose it")
        if self.terminal_selection is None:
            if self.terminal_model_call_id is not None:
                raise ValueError("a terminal needs the method that chose it")
            if self.failure_reason is None:
                raise ValueError("a receipt without a terminal method must give a failure_reason")
        return self


class StageResult(BaseModel):
    """What a sink answers for one call: durable under `staging_key`, or not, and why."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ok: StrictBool
    staging_key: str | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        if self.ok and not self.staging_key:
            raise ValueError("a successful result names its staging_key")
        if not self.ok and not self.error:
            raise ValueError("a failed result says why")
        return self
