"""268 receipts with the verdict of the `nemo-gym` 0.7.0 release: one file of data, two ways into the verifier."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rollout_reassembler.contract.bounds import parse_receipt
from rollout_reassembler.contract.digests import encode_extras, extras_digest
from rollout_reassembler.contract.errors import ContractError, InvalidReceipt, InvalidStagedCall, VerificationError
from rollout_reassembler.contract.records import StagedCall
from rollout_reassembler.reassembly.verify import LinearizedRow, prove_rollout, verify_and_linearize
from rollout_reassembler.staging.codec import PackedCall, pack_call, unpack_call
from rollout_reassembler.staging.extras import decode_extras
from tests.staging.unchecked import packed_unchecked

with gzip.open(Path(__file__).with_name("receipts-v2.jsonl.gz"), "rt", encoding="utf-8") as lines:
    CASES: list[dict[str, Any]] = [json.loads(line) for line in lines]

STAGES = {InvalidReceipt: "receipt", InvalidStagedCall: "snapshot", VerificationError: "verify"}


def is_under_its_keys(case: dict[str, Any]) -> bool:
    """Whether the case is one that a reader of keys can meet: each staged row is under the key that its place lists."""
    listed = [record.get("staging_key") for record in case["receipt"]["manifest"]]
    return listed == [f"{staged['rollout_id']}/{staged['model_call_id']}" for staged in case["staged"]]


by_case = pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case['name']}" for i, case in enumerate(CASES)])


def as_records(case: dict[str, Any]) -> list[StagedCall]:
    try:
        return [StagedCall.model_validate(staged) for staged in case["staged"]]
    except ValidationError as error:
        raise InvalidStagedCall(str(error)) from error


def as_packed_values(case: dict[str, Any]) -> list[PackedCall]:
    return [unpack_call(packed_unchecked(staged)) for staged in case["staged"]]


def verdict(case: dict[str, Any], read: Any) -> LinearizedRow | dict[str, str]:
    try:
        return verify_and_linearize(parse_receipt(case["receipt"]), read(case))
    except ContractError as error:
        return {"stage": STAGES[type(error)], "code": error.code}


def verdict_on_values(case: dict[str, Any]) -> LinearizedRow | dict[str, str]:
    try:
        receipt = parse_receipt(case["receipt"])
        return prove_rollout(receipt, [packed_unchecked(staged) for staged in case["staged"]])
    except ContractError as error:
        return {"stage": STAGES[type(error)], "code": error.code}


def assert_verdict(case: dict[str, Any], found: LinearizedRow | dict[str, str]) -> None:
    if "error" in case:
        assert found == case["error"]
        return
    expected = case["expected"]
    assert isinstance(found, LinearizedRow), found
    assert found.token_ids.dtype == np.int64
    assert found.token_ids.tolist() == expected["token_ids"]
    assert found.token_mask.dtype == np.float32
    assert found.token_mask.tolist() == expected["token_mask"]
    assert found.logprobs.tobytes() == np.array(expected["logprobs"], np.float32).tobytes()
    assert found.prompt_len == expected["prompt_len"]
    assert found.model_call_ids == found.call_ids == expected["model_call_ids"]
    assert found.weight_versions == expected["weight_versions"]
    assert [list(span) for span in found.link_spans] == expected["link_spans"]


@by_case
def test_records_get_the_golden_verdict(case):
    assert_verdict(case, verdict(case, as_records))


@by_case
def test_packed_values_get_the_golden_verdict(case):
    assert_verdict(case, verdict(case, as_packed_values))


@pytest.mark.parametrize("case", [case for case in CASES if is_under_its_keys(case)], ids=lambda case: case["name"])
def test_values_under_their_keys_get_the_golden_verdict(case):
    assert_verdict(case, verdict_on_values(case))


@pytest.mark.parametrize("case", [case for case in CASES if "expected" in case], ids=lambda case: case["name"])
def test_a_sound_case_survives_packing(case):
    calls = as_records(case)
    packed = [unpack_call(pack_call(call)) for call in calls]
    assert [call.to_call() for call in packed] == calls
    assert_verdict(case, verify_and_linearize(parse_receipt(case["receipt"]), packed))


@pytest.mark.parametrize("case", [case for case in CASES if "extras" in case], ids=lambda case: case["name"])
def test_extras_hash_to_what_the_row_commits_to(case):
    row = verdict(case, as_records)
    assert [commitment.model_call_id for commitment in row.extras_commitments] == case["expected"]["model_call_ids"]
    for model_call_id, version, digest in row.extras_commitments:
        extras = case["extras"].get(model_call_id)
        assert version == 1
        assert extras_digest(extras) == digest
        assert decode_extras(encode_extras(extras), digest) == (extras or {})


def test_the_file_holds_what_it_always_held():
    verdicts = Counter(case["error"]["code"] if "error" in case else "sound" for case in CASES)
    assert len(CASES) == 268
    assert verdicts["sound"] == 47
    assert len(verdicts) == 16
