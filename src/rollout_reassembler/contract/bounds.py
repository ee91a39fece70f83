"""The door for receipts from outside: size first, then shape, one typed error either way.

Receipts come from the agents' side and are not trusted. Before any of a receipt is walked, its
size is held against `ReceiptBounds`, so that an absurd one costs its reader nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rollout_reassembler.contract.errors import BoundExceeded, InvalidReceipt
from rollout_reassembler.contract.records import RolloutReceipt

_ERRORS_SHOWN = 3


@dataclass(frozen=True)
class ReceiptBounds:
    """How large a receipt may be. Lengths of ids are in characters; `max_fields` is of one record, known or not."""

    max_calls: int = 4096
    max_fields: int = 32
    max_id_chars: int = 1024
    max_reason_chars: int = 65_536


DEFAULT_BOUNDS = ReceiptBounds()

_ID_FIELDS = ("model_call_id", "parent_call_id", "staging_key", "response_id")


def parse_receipt(value: Any, bounds: ReceiptBounds = DEFAULT_BOUNDS) -> RolloutReceipt:
    """A `RolloutReceipt` from a plain dict. Raises `InvalidReceipt`, or `BoundExceeded` naming the bound."""
    if isinstance(value, RolloutReceipt):
        value = value.model_dump()
    if not isinstance(value, Mapping):
        raise InvalidReceipt(f"expected a mapping, got {type(value).__name__}")
    _hold(len(value), bounds.max_fields, "max_fields", "fields in the receipt")
    manifest = value.get("manifest", ())
    if not isinstance(manifest, list | tuple):
        raise InvalidReceipt(f"expected a list of calls as manifest, got {type(manifest).__name__}")
    _hold(len(manifest), bounds.max_calls, "max_calls", "calls")
    for name in ("rollout_id", "terminal_model_call_id"):
        _hold_text(value, name, bounds)
    for record in manifest:
        if isinstance(record, Mapping):
            _hold(len(record), bounds.max_fields, "max_fields", "fields in a call's record")
            for name in _ID_FIELDS:
                _hold_text(record, name, bounds)
    for name in ("failure_reason", "terminal_attribution_reason"):
        text = value.get(name)
        if isinstance(text, str):
            _hold(len(text), bounds.max_reason_chars, "max_reason_chars", f"characters in {name}")
    try:
        return RolloutReceipt.model_validate(dict(value))
    except ValidationError as error:
        raise InvalidReceipt(_summary(error)) from error


def _hold_text(record: Mapping[str, Any], name: str, bounds: ReceiptBounds) -> None:
    text = record.get(name)
    if isinstance(text, str):
        _hold(len(text), bounds.max_id_chars, "max_id_chars", f"characters in {name}")


def _hold(found: int, bound: int, bound_name: str, what: str) -> None:
    if found > bound:
        raise BoundExceeded(f"{found} {what}, more than {bound_name}={bound}")


def _summary(error: ValidationError) -> str:
    """The first few faults of a receipt; never its contents, which may be large."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    lines = []
    for fault in found[:_ERRORS_SHOWN]:
        place = ".".join(map(str, fault["loc"])) or "receipt"
        lines.append(f"{place:.200}: {fault['msg']:.400}")
    more = f" (and {len(found) - _ERRORS_SHOWN} more)" if len(found) > _ERRORS_SHOWN else ""
    return "; ".join(lines) + more
