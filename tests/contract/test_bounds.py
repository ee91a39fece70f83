"""The door for receipts from outside: every way in is either a receipt or one typed error, and cheap."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import pytest

from rollout_reassembler.contract.bounds import DEFAULT_BOUNDS, ReceiptBounds, parse_receipt
from rollout_reassembler.contract.errors import BoundExceeded, InvalidReceipt
from rollout_reassembler.contract.records import RolloutReceipt
from tests.captures import MadeRollout, chain


def receipt(**changes: Any) -> dict[str, Any]:
    return chain("r", 3).receipt(**changes)


def with_row(**changes: Any) -> dict[str, Any]:
    """A receipt whose second row has these changes."""
    sound = receipt()
    manifest = [dict(row) for row in sound["manifest"]]
    manifest[1].update(changes)
    return {**sound, "manifest": manifest}


def test_a_sound_receipt_parses_from_every_kind_of_mapping():
    sound = receipt()
    parsed = parse_receipt(sound)
    assert parse_receipt(MappingProxyType(sound)) == parsed
    assert parse_receipt({**sound, "manifest": tuple(sound["manifest"])}) == parsed
    assert parse_receipt(parsed) == parsed


def test_a_receipt_that_was_made_unvalidated_is_validated_here():
    unvalidated = RolloutReceipt.model_construct(**{**receipt(), "terminal_model_call_id": "absent"})
    with pytest.raises(InvalidReceipt, match="absent"):
        parse_receipt(unvalidated)


@pytest.mark.parametrize(
    "value", [None, "receipt", b"{}", 7, 1.5, [], [receipt()], ("a",), {1}, object(), RolloutReceipt], ids=repr
)
def test_what_is_no_mapping_is_no_receipt(value):
    with pytest.raises(InvalidReceipt, match="expected a mapping, got"):
        parse_receipt(value)


@pytest.mark.parametrize(
    "manifest", ["c0,c1", b"", 5, None, {}, {"c0": 1}, {1}, deque(), (row for row in ()), iter([]), range(3)], ids=repr
)
def test_a_manifest_is_a_list(manifest):
    with pytest.raises(InvalidReceipt, match="list of calls"):
        parse_receipt(receipt(manifest=manifest))


@pytest.mark.parametrize("row", [None, "c0", 5, [], ["model_call_id"], {}, {1: 2}, object()], ids=repr)
def test_a_row_that_is_no_record_is_named(row):
    sound = receipt()
    with pytest.raises(InvalidReceipt, match=r"manifest\.3"):
        parse_receipt({**sound, "manifest": [*sound["manifest"], row]})


BEYOND = {
    "max_calls": receipt(),
    "max_fields": receipt(),
    "max_id_chars": receipt(),
    "max_reason_chars": receipt(terminal_attribution_reason="because"),
}
BOUNDS = {"max_calls": 2, "max_fields": 10, "max_id_chars": 1, "max_reason_chars": 6}


@pytest.mark.parametrize("bound", [field.name for field in fields(ReceiptBounds) if field.name in BOUNDS])
def test_each_bound_names_itself(bound):
    tight = ReceiptBounds(**{bound: BOUNDS[bound]})
    assert parse_receipt(BEYOND[bound])
    where = f"raise ReceiptBounds.{bound} in RolloutReassemblerActorConfig.bounds"
    with pytest.raises(BoundExceeded, match=f"more than {bound}={BOUNDS[bound]}; {where}") as caught:
        parse_receipt(BEYOND[bound], tight)
    assert caught.value.code == "invalid_receipt"


def test_the_fields_of_a_receipt_and_of_a_row_are_bounded_apart():
    unknown = dict.fromkeys(map(str, range(32)))
    with pytest.raises(BoundExceeded, match="43 fields in the receipt, more than max_fields=32"):
        parse_receipt({**receipt(), **unknown})
    with pytest.raises(BoundExceeded, match="fields in a call's record, more than max_fields=32"):
        parse_receipt(with_row(**unknown))


@pytest.mark.parametrize("name", ["model_call_id", "parent_call_id", "response_id"])
def test_every_id_of_a_row_is_bounded(name):
    long = "x" * (DEFAULT_BOUNDS.max_id_chars + 1)
    with pytest.raises(BoundExceeded, match=f"{len(long)} characters in {name}, more than max_id_chars"):
        parse_receipt(with_row(**{name: long}))


def test_a_call_that_may_be_staged_may_be_named():
    """The longest ids that a receipt may hold make a staging key that it may hold."""
    longest = DEFAULT_BOUNDS.max_id_chars
    made = MadeRollout("r" * longest)
    made.call([1], [2], call_id="c" * longest)
    receipt = made.receipt()
    receipt["manifest"][0]["response_id"] = "resp"
    assert len(receipt["manifest"][0]["staging_key"]) == 2 * longest + 1
    assert parse_receipt(receipt).rollout_id == made.rollout_id
    too_long = {**receipt["manifest"][0], "staging_key": "x" * (2 * longest + 2)}
    with pytest.raises(BoundExceeded, match="2050 characters in staging_key, more than two ids of max_id_chars=1024"):
        parse_receipt({**receipt, "manifest": [too_long]})


@pytest.mark.parametrize("value", [0, -1, 1.5, "4096", None, True], ids=repr)
@pytest.mark.parametrize("bound", [field.name for field in fields(ReceiptBounds)])
def test_a_bound_is_a_positive_int(bound, value):
    with pytest.raises(ValueError, match=f"{bound} must be a positive int, got {value!r}"):
        ReceiptBounds(**{bound: value})


@pytest.mark.parametrize("name", ["rollout_id", "terminal_model_call_id"])
def test_every_id_of_a_receipt_is_bounded(name):
    with pytest.raises(BoundExceeded, match=f"characters in {name}, more than max_id_chars"):
        parse_receipt(receipt(**{name: "x" * 1025}))


@pytest.mark.parametrize("name", ["failure_reason", "terminal_attribution_reason"])
def test_every_reason_is_bounded(name):
    with pytest.raises(BoundExceeded, match=f"characters in {name}, more than max_reason_chars"):
        parse_receipt(receipt(**{name: "x" * 65_537}))


def test_what_just_fits_is_taken():
    just = ReceiptBounds(max_calls=3, max_fields=20, max_id_chars=max(len("resp-c2"), len("r/c2")))
    assert parse_receipt(receipt(), just)


class Untouchable(dict[str, Any]):
    """A row that must not be walked."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(f"{key} was read")

    get = __iter__ = keys = items = values = __getitem__  # type: ignore[assignment]


def test_a_receipt_over_its_bound_is_not_walked():
    with pytest.raises(BoundExceeded, match="3 calls"):
        parse_receipt(receipt(manifest=[Untouchable(), Untouchable(), Untouchable()]), ReceiptBounds(max_calls=2))


ABSURD = {
    "a million calls": lambda: receipt(manifest=[None] * 1_000_000),
    "200,000 fields": lambda: {**receipt(), **dict.fromkeys(map(str, range(200_000)))},
    "200,000 fields in a row": lambda: with_row(**dict.fromkeys(map(str, range(200_000)))),
    "a field named by 10 MB": lambda: {**receipt(), "x" * 10_000_000: 1},
    "a call id of 10 MB": lambda: with_row(model_call_id="x" * 10_000_000),
    "a terminal of 10 MB": lambda: receipt(terminal_model_call_id="x" * 10_000_000),
    "a digest of 10 MB": lambda: with_row(digest="0" * 10_000_000),
    "a mode of 10 MB": lambda: with_row(mode="x" * 10_000_000),
    "a method of 10 MB": lambda: receipt(terminal_selection="x" * 10_000_000),
    "an integer of 5,000 digits": lambda: with_row(weight_version=10**5000),
    "a reward of 5,000 digits": lambda: receipt(reward=10**5000),
    "4,096 rows of nothing": lambda: receipt(manifest=[{}] * 4096),
    "4,096 rows of 32 unknown fields": lambda: receipt(manifest=[{str(i): i for i in range(32)}] * 4096),
    "an id nested 100,000 deep": lambda: with_row(model_call_id=nested(100_000)),
    "a row that holds itself": lambda: cyclic(),
}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    row: dict[str, Any] = {}
    row["parent_call_id"] = row
    return receipt(manifest=[row])


@pytest.mark.parametrize("make", ABSURD.values(), ids=ABSURD)
def test_an_absurd_receipt_is_refused_quickly_and_briefly(make):
    absurd = make()
    begun = time.thread_time()
    with pytest.raises(InvalidReceipt) as caught:
        parse_receipt(absurd)
    assert time.thread_time() - begun < 1.0
    assert len(str(caught.value)) < 3000


def test_the_first_faults_are_shown_and_the_others_counted():
    with pytest.raises(InvalidReceipt, match=r"manifest\.0\.model_call_id: Field required;.* \(and \d+ more\)"):
        parse_receipt(receipt(manifest=[{}, {}]))


def test_the_first_bad_row_is_the_last_that_costs():
    def fault(rows: int) -> str:
        with pytest.raises(InvalidReceipt) as caught:
            parse_receipt(receipt(manifest=[{}] * rows))
        return str(caught.value)

    assert fault(1) == fault(4096)


def test_an_error_never_shows_the_contents():
    with pytest.raises(InvalidReceipt) as caught:
        parse_receipt(receipt(rollout_id=["secret"], reward="secret", capture_poisoned="secret"))
    assert "secret" not in str(caught.value)
