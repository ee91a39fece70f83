"""Errors travel between processes: what was raised in an actor is what its caller catches."""

from __future__ import annotations

import inspect
import pickle

import pytest

from rollout_reassembler.contract import errors
from rollout_reassembler.contract.errors import (
    ContractError,
    DataPlaneError,
    DataPlaneTimeout,
    InvalidReceipt,
    ReassemblerError,
    RpcPayloadError,
    StagedRowsMissing,
    VerificationError,
)

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ReassemblerError)]
CONTRACT = [kind for kind in ALL if issubclass(kind, ContractError)]
DATA_PLANE = [kind for kind in ALL if issubclass(kind, DataPlaneError)]


def made(kind: type[ReassemblerError]) -> ReassemblerError:
    if issubclass(kind, ContractError):
        return kind("the détail", code="some_code")
    if issubclass(kind, DataPlaneError):
        return kind("lost", call="get_samples", partition="staging", keys=["a", "b", "c", "d"], seconds=1.5)
    if issubclass(kind, RpcPayloadError):
        return kind("rpc.receipts[0]", "a tensor")
    return kind("what happened")


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_pickling(kind):
    error = made(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert repr(again) == repr(error)


def test_every_error_is_covered_above():
    assert len(ALL) >= 16


@pytest.mark.parametrize("kind", CONTRACT)
def test_a_contract_error_has_its_kinds_code_unless_told_otherwise(kind):
    assert kind("detail").code == kind.code
    assert str(kind("detail", code="other")) == "other: detail"


def test_the_two_families_never_mix():
    assert not set(CONTRACT) & set(DATA_PLANE)
    assert {kind.__name__ for kind in CONTRACT} >= {"InvalidReceipt", "InvalidStagedCall", "VerificationError"}


@pytest.mark.parametrize("kind", DATA_PLANE)
def test_a_data_plane_error_says_which_call_where_and_for_how_long(kind):
    message = str(made(kind))
    assert message == "get_samples('staging'): lost; keys 'a', 'b', 'c', … 4 in all; after 1.5 s"


def test_three_keys_are_all_shown():
    assert str(StagedRowsMissing("gone", keys=["a", "b", "c"])) == "gone; keys 'a', 'b', 'c'"


@pytest.mark.parametrize("kind", DATA_PLANE)
def test_the_same_error_names_the_group_that_it_stopped(kind):
    error = made(kind)
    named = error.for_group("g/7")
    assert type(named) is kind
    assert "group 'g/7' was not finalized" in str(named)
    assert (named.call, named.partition, named.keys, named.seconds) == (
        error.call,
        error.partition,
        error.keys,
        error.seconds,
    )


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (InvalidReceipt("x"), ValueError),
        (VerificationError("x"), ValueError),
        (DataPlaneTimeout("x"), TimeoutError),
        (errors.DataPlaneUnavailable("x"), ConnectionError),
        (errors.RowsMissing("x"), LookupError),
        (errors.SchemaViolation("x"), ValueError),
        (errors.RequestError("x"), ValueError),
        (RpcPayloadError("rpc", "x"), TypeError),
    ],
)
def test_a_caller_may_catch_the_builtin_it_knows(error, builtin):
    assert isinstance(error, builtin)
