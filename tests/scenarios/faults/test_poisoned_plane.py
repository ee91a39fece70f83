"""Whatever another client writes into the plane costs the rollout under which it lies, and nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack

from rollout_reassembler.contract.errors import DataPlaneError
from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.reassembly.sweep import sweep_staging
from rollout_reassembler.staging.codec import pack_call
from rollout_reassembler.staging.places import place_of
from tests.captures import PAD, STAGING, MadeRollout, chain, collect, finalize, stage, staged_keys
from tests.reassembly.contents import RECORDS, published
from tests.scenarios.faults.raw_queue import raw_put

pytestmark = pytest.mark.slow

SECONDS = 5.0
MISSING, GARBLED, ANOTHERS = "missing_staging_row", "invalid_staging_row", "staging_key_mismatch"

Poison = Callable[[DataPlaneClient, MadeRollout], None]


def overwritten(**fields: Any) -> Poison:
    """The second call's row, with these columns written over its own."""
    return lambda plane, made: raw_put(plane, place_of(made.calls[1]), fields)


def replaced(fields: dict[str, Any] | None) -> Poison:
    """The second call's row, gone and made anew with these columns alone; with `None`, listed and never written."""

    def poison(plane: DataPlaneClient, made: MadeRollout) -> None:
        plane.clear_samples([place_of(made.calls[1])], STAGING)
        raw_put(plane, place_of(made.calls[1]), fields, {})

    return poison


def anothers_value(plane: DataPlaneClient, made: MadeRollout) -> None:
    other = chain("another")
    plane.put_samples([place_of(made.calls[1])], STAGING, {"call": [pack_call(other.calls[1])]})


def value(content: object) -> NonTensorStack:
    return NonTensorStack(content)


POISONS = {
    "a tensor": (overwritten(call=torch.ones(1, 3)), MISSING),
    "a jagged tensor": (
        overwritten(call=torch.nested.as_nested_tensor([torch.ones(3)], layout=torch.jagged)),
        MISSING,
    ),
    "a text": (overwritten(call=value("text")), MISSING),
    "a dict": (overwritten(call=value({"token_ids": [1, 2]})), MISSING),
    "nothing": (overwritten(call=value(None)), MISSING),
    "garbage": (overwritten(call=value(b"garbage")), GARBLED),
    "no bytes": (overwritten(call=value(b"")), GARBLED),
    "many bytes": (overwritten(call=value(bytes(32 << 20))), GARBLED),
    "another's value": (anothers_value, ANOTHERS),
    "an owner that is no text": (overwritten(__owner__=torch.ones(1, 3)), MISSING),
    "another owner": (overwritten(__owner__=value(b"staging\nother")), MISSING),
    "a field missing": (replaced({"extras": value(b"")}), MISSING),
    "an unknown field": (replaced({"tokens": torch.ones(1, 3)}), MISSING),
    "no owner": (replaced({"call": value(pack_call(chain("bad").calls[1])), "extras": value(b"")}), MISSING),
    "listed and unreadable": (replaced(None), MISSING),
}


@pytest.mark.parametrize(("poison", "reason"), POISONS.values(), ids=POISONS)
def test_a_poisoned_row_costs_its_own_rollout(plane: DataPlaneClient, poison: Poison, reason: str) -> None:
    good, bad, lost = chain("good"), chain("bad"), chain("lost")
    stage(plane, good, bad, lost)
    poison(plane, bad)
    started = time.monotonic()
    answer = finalize(plane, [good, bad, lost], receipts=[good.receipt(), bad.receipt(), None])
    assert time.monotonic() - started < SECONDS
    assert answer.rejections == {"bad": reason, "lost": "missing_receipt"}
    assert answer.cleanup_pending == ()
    rows = published(plane, answer.meta.sample_ids)
    assert rows[0]["input_ids"].tolist() == good.tokens()
    assert rows[1]["input_ids"].tolist() == [PAD]
    assert not rows[1]["token_mask"].any()
    collect(plane)
    sweep_staging(plane, STAGING, untagged_after_s=0, dry_run=False)
    assert staged_keys(plane) == set()


TAGS = {
    "a list": {"rollout_id": ["bad"], "staged_at": 0.0},
    "a dict": {"rollout_id": {"of": "bad"}},
    "a number": {"rollout_id": 7, "staged_at": "long ago"},
    "nothing": {"rollout_id": None, "staged_at": None},
    "tensors": {"rollout_id": torch.ones(2), "staged_at": torch.ones(2)},
}


@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
def test_poisoned_tags_stop_neither_a_cleanup_nor_a_sweep(plane: DataPlaneClient, tags: dict[str, Any]) -> None:
    good, lost, stray = chain("good"), chain("lost"), chain("stray")
    stage(plane, good, lost, stray)
    raw_put(plane, place_of(stray.calls[0]), None, tags)
    answer = finalize(plane, [good, lost], receipts=[good.receipt(), None])
    assert answer.rejections == {"lost": "missing_receipt"}
    assert answer.cleanup_pending == ()
    collect(plane)
    swept = sweep_staging(plane, STAGING, older_than_s=0, live_rollouts=["stray"], dry_run=False)
    assert swept.keys == []
    swept = sweep_staging(plane, STAGING, rollout_ids=["stray"], untagged_after_s=0, dry_run=False)
    assert set(swept.found["stray"]) == {place_of(call) for call in stray.calls}, "its bytes say whose row it is"
    assert staged_keys(plane) == set()


def test_a_row_without_tags_is_proven_by_its_bytes(plane: DataPlaneClient) -> None:
    made = chain("r")
    plane.put_samples(
        [place_of(call) for call in made.calls],
        STAGING,
        {"call": [pack_call(call) for call in made.calls], "extras": [b""] * 3},
    )
    assert finalize(plane, [made]).valid_row_count == 1
    assert staged_keys(plane) == set()


@pytest.mark.parametrize(
    "record",
    [
        {"answer": "{}"},
        {"answer": "no JSON", "fingerprint": "f"},
        {"answer": "[]", "fingerprint": "f"},
        {"answer": '{"meta": {}, "staging_keys": []}', "fingerprint": "f"},
        {"answer": 7, "fingerprint": "f"},
    ],
    ids=str,
)
def test_an_unreadable_record_stops_its_own_group_and_says_so(plane: DataPlaneClient, record: dict[str, Any]) -> None:
    """It may be that of a group whose rows are trained already: to publish them again would double them."""
    made, other = chain("r"), chain("other")
    stage(plane, made, other)
    plane.put_samples(["g"], RECORDS, tags=[record])
    with pytest.raises(DataPlaneError, match=r"group 'g' was not finalized.*record of this group is not readable"):
        finalize(plane, [made])
    assert finalize(plane, [other], group_id="other").valid_row_count == 1
    assert staged_keys(plane) == {call.staging_key for call in made.calls}
    plane.clear_samples(["g"], RECORDS)
    assert finalize(plane, [made]).valid_row_count == 1
