"""The rows of a ledger file: what was admitted, what became of it, and where an attempt begins.

    {"kind": "attempt", …}                          all above belongs to an earlier attempt
    {"kind": "admitted", "model_call_id": "b", …}   b may be generated; whose child it is
    {"kind": "recorded", "record": {…}, …}          b is staged: its manifest row
    {"kind": "failed", "model_call_id": "b", …}     or its capture failed (without a call: the whole rollout's)
    {"kind": "aborted", "model_call_id": "b", …}    or nobody saw an answer

Fingerprints of text stand in for messages; no row holds a token or a word of a conversation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictStr, TypeAdapter, ValidationError

from rollout_reassembler.capture.fingerprint import FINGERPRINT_VERSION, Marks
from rollout_reassembler.contract.errors import InvalidLedger
from rollout_reassembler.contract.records import CallRecord, Count, DigestHex, Identifier


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    fingerprint_version: Count = FINGERPRINT_VERSION


class AttemptRow(_Row):
    """The rollout starts again: a receipt lists what comes behind this row alone."""

    kind: Literal["attempt"] = "attempt"
    rollout_id: Identifier
    attempt: Identifier


class AdmittedRow(_Row):
    """A call may now be generated.

    `request` is the fingerprint of its messages (`verbatim` and the like are its other marks), `preamble`, for a
    root alone, that of the messages up to the last one that a model said. `new_root_reason` says why a request that
    begins no rollout continues no call; its first word is the cause.
    """

    kind: Literal["admitted"] = "admitted"
    rollout_id: Identifier
    model_call_id: Identifier
    admitted_at: StrictFloat
    parent_call_id: Identifier | None = None
    unresolved_reason: StrictStr | None = None
    new_root_reason: StrictStr | None = None
    request: DigestHex | None = None
    preamble: DigestHex | None = None
    verbatim: DigestHex | None = None
    spoken: DigestHex | None = None
    spoken_verbatim: DigestHex | None = None

    @property
    def marks(self) -> Marks | None:
        """The request's marks; `None` when it could not be read, or was by another version."""
        if self.fingerprint_version != FINGERPRINT_VERSION:
            return None
        marks = (self.request, self.verbatim, self.spoken, self.spoken_verbatim)
        return Marks(*marks) if None not in marks else None  # type: ignore[arg-type]


class RecordedRow(_Row):
    """A call is staged, and this is its manifest row; `verbatim` and the like are marks of its continuation."""

    kind: Literal["recorded"] = "recorded"
    record: CallRecord
    generation_len: Count | None = None
    verbatim: DigestHex | None = None
    spoken: DigestHex | None = None
    spoken_verbatim: DigestHex | None = None


class FailedRow(_Row):
    """A call, or the rollout as a whole, could not be captured; `continuation` is a request that holds the answer."""

    kind: Literal["failed"] = "failed"
    model_call_id: Identifier | None = None
    reason: Identifier
    continuation: DigestHex | None = None


class AbortedRow(_Row):
    """A call was given up before anybody saw an answer."""

    kind: Literal["aborted"] = "aborted"
    model_call_id: Identifier


LedgerRow = AttemptRow | AdmittedRow | RecordedRow | FailedRow | AbortedRow
_ROWS: TypeAdapter[LedgerRow] = TypeAdapter(Annotated[LedgerRow, Field(discriminator="kind")])


def parse_row(row: dict[str, Any]) -> LedgerRow:
    """A row of a ledger from its JSON. Raises `InvalidLedger`."""
    try:
        return _ROWS.validate_python(row)
    except ValidationError as error:
        raise InvalidLedger(f"not a ledger row: {error.errors(include_url=False, include_input=False)[0]}") from error
