"""The door for receipts from outside: size first, then shape, one typed error either way.

Receipts come from the agents' side and are not trusted. Before any of a receipt is walked, its
size is held against `ReceiptBounds`, so that an absurd one costs its reader nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ValidationError

from rollout_reassembler.contract.errors import BoundExceeded, InvalidReceipt
from rollout_reassembler.contract.records import RolloutReceipt

_ERRORS_SHOWN = 3


@dataclass(frozen=True)
class ReceiptBounds:
    """How large receipts may be: each of them, and all that cross an RPC together.

    `max_calls` a receipt; `max_fields` a record, known or not; `max_id_chars` an id, in characters (a staging key,
    which is two ids and a slash, may have twice that and one); `max_reason_chars` a reason; `max_rpc_bytes` a whole
    request or answer. Set them once, in `RolloutReassemblerActorConfig.bounds`, and give the pool the same;
    `RolloutReassembler` takes them too. Raises `ValueError` for one that is no positive int.
    """

    max_calls: int = 4096
    max_fields: int = 32
    max_id_chars: int = 1024
    max_reason_chars: int = 65_536
    max_rpc_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field.name} must be a positive int, got {value!r:.80}")

    @property
    def max_key_chars(self) -> int:
        """An id that may be staged may be named: a staging key is `"{rollout_id}/{model_call_id}"`."""
        return 2 * self.max_id_chars + 1


DEFAULT_BOUNDS = ReceiptBounds()

_ID_FIELDS = ("model_call_id", "parent_call_id", "staging_key", "response_id")


def parse_receipt(value: Any, bounds: ReceiptBounds = DEFAULT_BOUNDS) -> RolloutReceipt:
    """A `RolloutReceipt` from a plain dict. Raises `InvalidReceipt`, or `BoundExceeded` naming the bound."""
    if isinstance(value, RolloutReceipt):
        value = value.model_dump()
    if not isinstance(value, Mapping):
        raise InvalidReceipt(f"expected a mapping, got {type(value).__name__}")
    _check_bound(len(value), bounds.max_fields, "max_fields", "fields in the receipt")
    manifest = value.get("manifest", ())
    if not isinstance(manifest, list | tuple):
        raise InvalidReceipt(f"expected a list of calls as manifest, got {type(manifest).__name__}")
    _check_bound(len(manifest), bounds.max_calls, "max_calls", "calls")
    for name in ("rollout_id", "terminal_model_call_id"):
        _hold_text(value, name, bounds)
    for record in manifest:
        if isinstance(record, Mapping):
            _check_bound(len(record), bounds.max_fields, "max_fields", "fields in a call's record")
            for name in _ID_FIELDS:
                _hold_text(record, name, bounds)
    for name in ("failure_reason", "terminal_attribution_reason"):
        text = value.get(name)
        if isinstance(text, str):
            _check_bound(len(text), bounds.max_reason_chars, "max_reason_chars", f"characters in {name}")
    try:
        return RolloutReceipt.model_validate(dict(value))
    except ValidationError as error:
        raise InvalidReceipt(_summary(error)) from error


def _hold_text(record: Mapping[str, Any], name: str, bounds: ReceiptBounds) -> None:
    text = record.get(name)
    if not isinstance(text, str):
        return
    what = f"characters in {name}"
    if name != "staging_key":
        _check_bound(len(text), bounds.max_id_chars, "max_id_chars", what)
    elif len(text) > bounds.max_key_chars:
        raise BoundExceeded(
            f"{len(text)} {what}, more than two ids of max_id_chars={bounds.max_id_chars} and a slash; "
            f"{how_to_raise('max_id_chars')}"
        )


def _check_bound(found: int, bound: int, bound_name: str, what: str) -> None:
    if found > bound:
        raise BoundExceeded(f"{found} {what}, more than {bound_name}={bound}; {how_to_raise(bound_name)}")


def how_to_raise(bound_name: str) -> str:
    """Where a bound is set, for the errors that name it."""
    return f"raise ReceiptBounds.{bound_name} in RolloutReassemblerActorConfig.bounds"


def _summary(error: ValidationError) -> str:
    """The first few faults of a receipt; never its contents, which may be large."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    lines = []
    for fault in found[:_ERRORS_SHOWN]:
        place = ".".join(map(str, fault["loc"])) or "receipt"
        lines.append(f"{place:.200}: {fault['msg']:.400}")
    more = f" (and {len(found) - _ERRORS_SHOWN} more)" if len(found) > _ERRORS_SHOWN else ""
    return "; ".join(lines) + more
