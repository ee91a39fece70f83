"""A row proves itself, long after everything that it was made from is gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.contract.errors import VerificationError
from rollout_reassembler.contract.records import RolloutReceipt
from rollout_reassembler.reassembly.spans import RowSpans, decode_spans, encode_spans, prove_row
from rollout_reassembler.reassembly.verify import LinearizedRow, prove_forest
from rollout_reassembler.staging.codec import pack_call
from tests.captures import MadeRollout, chain, finalize, memory_plane, stage, staged_keys


def rows_of(made: MadeRollout) -> tuple[LinearizedRow, ...]:
    receipt = RolloutReceipt.model_validate(made.receipt())
    return prove_forest(receipt, [pack_call(call) for call in made.calls]).rows


def branched() -> tuple[LinearizedRow, ...]:
    made = MadeRollout("g/r €")
    a = made.call([1, 2], [3], call_id="a", weight_version=4)
    made.call([4], [5, 6], parent=a, call_id="b", weight_version=5)
    made.call([7], [8], parent=a, call_id="c", weight_version=6)
    return rows_of(made)


def proven(row: LinearizedRow, **changes: Any) -> RowSpans:
    columns = {"token_ids": row.token_ids, "token_mask": row.token_mask, "logprobs": row.logprobs}
    return prove_row(**{**columns, "encoded": encode_spans(row), **changes})


def test_spans_say_what_the_row_is_made_of() -> None:
    first, second = branched()
    assert decode_spans(encode_spans(first)) == RowSpans.of(first) == proven(first)
    spans = proven(second)
    assert spans.rollout_id == "g/r €"
    assert [(s.model_call_id, s.start, s.carry_len, s.generation_len, s.owned) for s in spans.spans] == [
        ("a", 0, 2, 1, False),
        ("c", 3, 1, 1, True),
    ]
    assert spans.owned_tokens == 1
    assert spans.weight_versions().tolist() == [4, 4, 4, 6, 6]
    assert spans.chain_hash == second.calls[-1].chain_hash


def test_a_published_row_proves_itself_when_staging_is_cleared() -> None:
    plane, made = memory_plane(), chain("r", turns=4)
    stage(plane, made)
    group = finalize(plane, [made, chain("lost")], receipts=[made.receipt(), None])
    plane.clear_samples(None, "staging")
    assert staged_keys(plane) == set()
    rows = plane.get_data(group.meta)
    spans = prove_row(rows["input_ids"][0], rows["token_mask"][0], rows["generation_logprobs"][0], rows["spans"][0])
    assert [span.model_call_id for span in spans.spans] == [call.model_call_id for call in made.calls]
    assert spans.spans[-1].cumulative_hash == made.receipt()["manifest"][-1]["cumulative_hash"]
    assert rows["spans"][1] == b""


def test_every_changed_token_mask_and_owned_log_probability_is_found() -> None:
    for row in branched():
        for at in range(len(row.token_ids)):
            ids, mask, logprobs = row.token_ids.copy(), row.token_mask.copy(), row.logprobs.copy()
            ids[at] += 1
            with pytest.raises(VerificationError, match="chain_hash_mismatch"):
                proven(row, token_ids=ids)
            mask[at] = 1 - mask[at]
            with pytest.raises(VerificationError, match=f"row_mask_mismatch: token {at}: mask"):
                proven(row, token_mask=mask)
            logprobs[at] = np.nextafter(logprobs[at], -1, dtype=np.float32)
            code = "corrupt_digest" if row.token_mask[at] else "row_mask_mismatch"
            with pytest.raises(VerificationError, match=code):
                proven(row, logprobs=logprobs)


def test_every_flipped_bit_of_the_proof_is_found() -> None:
    """Of an owned call everything is bound; of a call in the context, its digests are other rows' to prove."""
    row = branched()[0]
    encoded = encode_spans(row)
    for bit in range(8 * len(encoded)):
        garbled = bytearray(encoded)
        garbled[bit // 8] ^= 1 << bit % 8
        with pytest.raises(VerificationError):
            proven(row, encoded=bytes(garbled))


@pytest.mark.parametrize("encoded", [b"", b"RRS1", b"RRS2", b"RRS1\xff\xff\xff\xff", b"RRS1\x00\x00\x00\x02[]"])
def test_bytes_that_are_no_spans_are_told(encoded: bytes) -> None:
    with pytest.raises(VerificationError, match=f"invalid_spans: garbled spans of {len(encoded)} bytes"):
        decode_spans(encoded)


@given(st.binary(max_size=200))
def test_any_bytes_are_spans_or_a_typed_error(garbage: bytes) -> None:
    for encoded in (garbage, b"RRS1" + garbage, b"RRS1\x00\x00\x00\x10" + garbage):
        with pytest.raises(VerificationError, match="invalid_spans"):
            decode_spans(encoded)


def test_a_row_of_another_length_is_told() -> None:
    row = branched()[0]
    with pytest.raises(VerificationError, match="row_length_mismatch: 5 tokens, 6 masks and 6 log probabilities"):
        proven(row, token_ids=row.token_ids[:-1])
