"""The page of the wire format: its tables and its example are those of the code."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

from rollout_reassembler.contract.digests import encode_extras
from rollout_reassembler.contract.records import CallRecord, RolloutReceipt, StagedCall, seal_call
from rollout_reassembler.reassembly.route_plan import RoutePlan, RouteSpan
from rollout_reassembler.reassembly.rows import canonical_schema
from rollout_reassembler.staging.codec import RouteShape, pack_call, unpack_call
from rollout_reassembler.staging.schema import STAGING_SCHEMA
from tests.captures import STAGING, chain, finalize, memory_plane, stage

PAGE = (Path(__file__).parents[1] / "docs" / "wire-format.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a text, each a list of rows of cells, without its head."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|\n ").split(" |")] for line in b.splitlines()[2:]] for b in blocks]


def named(table: list[list[str]]) -> list[str]:
    """The names in backticks of a table's first column."""
    return [name for row in table for name in re.findall(r"`(\w+)`", row[0])]


def code_blocks(text: str) -> list[str]:
    return re.findall(r"```\w*\n(.*?)\n```", text, re.DOTALL)


def example() -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = json.loads(code_blocks(section("Example"))[0])
    return calls


def sealed() -> list[StagedCall]:
    """The calls of the example, sealed from what an engine would know of them."""
    calls: list[StagedCall] = []
    for said in example():
        call = seal_call(
            **{name: said[name] for name in ("rollout_id", "model_call_id", "weight_version", "extras")},
            **{name: value for name, value in said.items() if name.endswith("_delta")},
            parent=calls[-1] if calls else None,
            prefix_token_ids=[token for call in calls for token in call.token_ids_delta.tolist()],
        )
        calls.append(call)
    return calls


def test_the_fields_of_a_staged_call_are_all_there():
    assert sorted(named(tables(section("Staged call"))[0])) == sorted(StagedCall.model_fields)


def test_the_fields_of_a_receipt_and_its_manifest_are_all_there():
    receipt, row = tables(section("Receipt"))
    assert sorted(named(receipt)) == sorted(RolloutReceipt.model_fields)
    assert sorted(named(row)) == sorted(CallRecord.model_fields)


def test_the_columns_of_a_canonical_row_are_all_there_with_their_dtypes():
    (table,) = tables(section("Canonical row"))
    said = {name.strip("`"): (dtype, int(rank)) for name, dtype, rank in table}
    assert said == {name: (spec.dtype, spec.rank) for name, spec in canonical_schema(with_routes=True).items()}


def test_the_tags_of_a_canonical_row_are_named():
    plane = memory_plane()
    stage(plane, rollout := chain("r0"))
    group = finalize(plane, [rollout])
    (tags,) = plane.get_tags(group.meta.sample_ids, group.meta.partition_id)
    assert all(f"`{name}`" in section("Canonical row") for name in tags)


def test_the_fields_of_a_route_plan_are_all_there():
    plan, span = tables(section("Routes and route plan"))
    assert sorted(named(plan)) == sorted(RoutePlan.model_fields)
    assert sorted(named(span)) == sorted(RouteSpan.model_fields)


def test_the_example_has_the_digests_that_the_code_gives():
    for said, call in zip(example(), sealed(), strict=True):
        assert {name: call.model_dump()[name] for name in said} == said


def test_the_example_shows_the_extras_and_the_packed_value_as_they_are():
    first, second = sealed()
    _, extras, packed = code_blocks(section("Example"))
    assert bytes.fromhex(extras) == encode_extras(second.extras)
    assert bytes.fromhex(packed.replace("\n", "")) == pack_call(first)
    assert f"{len(pack_call(first))} bytes" in section("Example")


def test_the_header_of_a_packed_value_is_laid_out_as_the_table_says():
    call = sealed()[1]
    value = pack_call(call, RouteShape(rows=3, layers=2, topk=8, boundary=True))
    parts: dict[str, bytes] = {}
    end = 0
    for offset, size, field in tables(section("Packed value"))[0]:
        assert int(offset) == end, field
        end = len(value) if size == "…" else end + int(size)
        parts[re.split(r"[:,]| of | in ", field)[0]] = value[int(offset) : end]
    assert end == len(value)
    assert parts["magic"] == b"RRSC"
    assert parts["version"] == b"\x02"
    assert parts["flags"] == b"\x01"
    assert parts["zero"] == bytes(2)
    assert int.from_bytes(parts["route rows"]) == 3
    assert int.from_bytes(parts["layers"]) == 2
    assert int.from_bytes(parts["experts a token and layer"]) == 8
    assert parts["proof"] == hashlib.sha256(value[:16] + parts["digest"]).digest()[:8]
    assert parts["digest"].hex() == call.digest
    assert parts["preimage"] == call.preimage
    assert unpack_call(value).routes == RouteShape(3, 2, 8, True)


def test_a_staged_row_lies_under_the_key_and_with_the_tags_that_the_page_names():
    text = section("Packed value")
    key = re.search(r"under the key `(.+?)`", text)
    assert key is not None
    plane = memory_plane()
    stage(plane, rollout := chain("r0", turns=1))
    (call,) = rollout.calls
    told = key[1].replace("{digest[:32]}", call.digest[:32])
    (row,) = plane.list_samples(STAGING).items()
    assert row[0] == told.format(rollout_id="r0", model_call_id=call.model_call_id)
    assert all(f"`{name}`" in text for name in [*row[1], *STAGING_SCHEMA])


def _u64(value: int) -> bytes:
    return value.to_bytes(8)


def _text(value: str) -> bytes:
    return _u64(len(value.encode())) + value.encode()


ENCODINGS = {
    "u64": _u64,
    "text": _text,
    "opt_text": lambda value: b"\0" if value is None else b"\1" + _text(value),
    "tokens": lambda ids: _u64(len(ids)) + b"".join(map(_u64, ids)),
    "floats": lambda values: _u64(len(values)) + struct.pack(f">{len(values)}f", *values),
    "bytes": lambda value: _u64(len(value)) + value,
    "raw": bytes.fromhex,
    "present": lambda digest: b"\1" + bytes.fromhex(digest),
}
"""The table of encodings, written down a second time, from the page alone."""


def test_the_encodings_of_the_page_are_those_written_down_here():
    assert {row[0].strip("`").split("(")[0] for row in tables(section("Encodings"))[0]} == set(ENCODINGS)


def test_the_preimage_is_laid_out_as_the_page_says():
    parts = re.findall(r"`([^`]+)`", section("Digests").split("in this order:")[1])
    domain, versions, *fields = parts
    for said in example():
        names = {**ENCODINGS, **said}
        layout = b"".join(eval(part, {"__builtins__": {}}, names) for part in fields)
        assert hashlib.sha256(domain.encode() + bytes.fromhex(versions) + layout).hexdigest() == said["digest"]


def test_the_other_digests_are_over_what_the_page_says():
    domains = {row[0].strip("`"): re.findall(r"`([^`]+)`", row[1])[0] for row in tables(section("Digests"))[0][:3]}
    _, extras, _ = code_blocks(section("Example"))
    first, second = example()
    tokens = ENCODINGS["tokens"]
    over = {
        "cumulative_hash": tokens(first["token_ids_delta"] + second["token_ids_delta"]),
        "chain_hash": b"\1" + bytes.fromhex(first["chain_hash"]) + tokens(second["token_ids_delta"]),
        "extras_digest": b"\1" + bytes.fromhex(extras),
    }
    for name, domain in domains.items():
        assert hashlib.sha256(domain.encode() + over[name]).hexdigest() == second[name], name
