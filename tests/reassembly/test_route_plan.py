"""Route plans: what they say of a row, what makes one invalid, and how small they are as a tag."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.reassembly.route_plan import (
    MAX_PLAN_BYTES,
    InvalidRoutePlan,
    RoutePlan,
    decode_route_plan,
    encode_route_plan,
    plan_routes,
)
from tests.captures import STAGING, MadeRollout, memory_plane, staging_key_of
from tests.route_captures import Turn, made, planned, proven, stage

PLAN_KEYS = ["schema_version", "staging_partition", "spans", "cleanup_staging_keys", "expected_token_length"]
SPAN_KEYS = [
    "staging_key",
    "carry_len",
    "generation_len",
    "staged_route_len",
    "extras_digest_version",
    "extras_digest",
]


def as_dict(calls: int = 2, **changes: Any) -> dict[str, Any]:
    plan = {
        "schema_version": 2,
        "staging_partition": "staging",
        "spans": [
            {
                "staging_key": f"r/c{i}",
                "carry_len": 3 + i,
                "generation_len": 2,
                "staged_route_len": 5 + i,
                "extras_digest_version": 1,
                "extras_digest": bytes([i % 256] * 32).hex(),
            }
            for i in range(calls)
        ],
        "cleanup_staging_keys": [f"r/c{i}" for i in range(calls)],
        "expected_token_length": sum(5 + i for i in range(calls)),
    }
    return {**plan, **changes}


class TestPlanOfARow:
    def test_a_span_for_each_call_of_the_chain_and_cleanup_for_all_calls(self) -> None:
        rollout = made("r", [Turn(2, 3), Turn(1, 2, "tail"), Turn(1, 2, "none")])
        rollout.call([7], [8], parent=rollout.calls[0])
        plane = memory_plane()
        stage(plane, rollout)
        terminal = rollout.calls[2]
        rollout.calls.sort(key=lambda call: call is terminal)
        plan = planned(plane, rollout)
        assert [
            (staging_key_of(s.staging_key), s.carry_len, s.generation_len, s.staged_route_len, s.mode)
            for s in plan.spans
        ] == [
            ("r/c0", 2, 3, 5, "full"),
            ("r/c1", 1, 2, 2, "tail"),
            ("r/c2", 1, 2, 0, "sentinel"),
        ]
        assert plan.expected_token_length == 11
        assert sorted(map(staging_key_of, plan.cleanup_staging_keys)) == ["r/c0", "r/c1", "r/c2", "r/c3"]
        assert [s.extras_digest for s in plan.spans] == [
            call.extras_digest for call in sorted(rollout.calls, key=lambda call: call.model_call_id)[:3]
        ]

    def test_the_keys_on_the_wire_are_exactly_these(self) -> None:
        plain = RoutePlan.from_dict(as_dict()).to_dict()
        assert list(plain) == PLAN_KEYS
        assert list(plain["spans"][0]) == SPAN_KEYS
        assert json.loads(json.dumps(plain)) == plain == as_dict()

    def test_a_cleanup_key_of_another_rollout_makes_no_plan(self) -> None:
        plane, rollout = memory_plane(), made("r", [Turn(2, 3)])
        stage(plane, rollout)
        row = proven(plane, rollout)
        for foreign in ("s/c0", "r2/c0", "r"):
            with pytest.raises(InvalidRoutePlan, match="not of rollout"):
                plan_routes(row, staging_partition=STAGING, cleanup_keys=["r/c0", foreign])

    def test_a_chain_call_that_is_not_cleaned_up_makes_no_plan(self) -> None:
        plane, rollout = memory_plane(), made("r", [Turn(2, 3)])
        stage(plane, rollout)
        with pytest.raises(InvalidRoutePlan, match="not among the cleanup keys"):
            plan_routes(proven(plane, rollout), staging_partition=STAGING, cleanup_keys=[])

    def test_more_rows_than_tokens_are_no_tail(self) -> None:
        plan = RoutePlan.from_dict(as_dict(1, spans=[{**as_dict(1)["spans"][0], "staged_route_len": 6}]))
        assert plan.spans[0].mode == "sentinel"
        assert plan.fragment_keys == []


def with_span(**changes: Any) -> dict[str, Any]:
    first, *others = as_dict()["spans"]
    return as_dict(spans=[{**first, **changes}, *others])


INVALID: dict[str, dict[str, Any]] = {
    "another schema": as_dict(schema_version=1),
    "a schema that is text": as_dict(schema_version="2"),
    "an unknown key": as_dict(extra=1),
    "a missing key": {k: v for k, v in as_dict().items() if k != "staging_partition"},
    "no partition": as_dict(staging_partition=""),
    "spans that do not sum to the length": as_dict(expected_token_length=12),
    "no spans": as_dict(0),
    "spans that are no list": as_dict(spans="r/c0"),
    "a span's key that is not cleaned up": as_dict(cleanup_staging_keys=["r/c0"]),
    "a cleanup key twice": as_dict(cleanup_staging_keys=["r/c0", "r/c1", "r/c1"]),
    "a span twice": with_span(staging_key="r/c1"),
    "an unknown key in a span": with_span(mode="full"),
    "a missing key in a span": as_dict(spans=[{k: v for k, v in as_dict()["spans"][0].items() if k != "carry_len"}]),
    "a negative length": with_span(carry_len=-1),
    "a length that is a bool": with_span(carry_len=True),
    "a length that is text": with_span(carry_len="3"),
    "an empty key": with_span(staging_key=""),
    "another digest version": with_span(extras_digest_version=2),
    "a digest that is none": with_span(extras_digest="0" * 63),
    "an uppercase digest": with_span(extras_digest="A" * 64),
}


@pytest.mark.parametrize("plan", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_plan_is_refused_by_name(plan: dict[str, Any]) -> None:
    with pytest.raises(InvalidRoutePlan) as refused:
        RoutePlan.from_dict(plan)
    assert refused.value.code == "invalid_route_plan"


def plans() -> st.SearchStrategy[RoutePlan]:
    texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)

    @st.composite
    def plan(draw: st.DrawFn) -> RoutePlan:
        keys = draw(st.lists(texts, min_size=1, max_size=8, unique=True))
        chain = draw(st.permutations(keys))[: draw(st.integers(1, len(keys)))]
        counts = st.integers(0, 1 << 40)
        spans = [
            {
                "staging_key": key,
                "carry_len": draw(counts),
                "generation_len": draw(st.integers(1, 1 << 40)),
                "staged_route_len": draw(counts),
                "extras_digest_version": 1,
                "extras_digest": draw(st.binary(min_size=32, max_size=32)).hex(),
            }
            for key in chain
        ]
        length = sum(span["carry_len"] + span["generation_len"] for span in spans)
        return RoutePlan.from_dict(
            as_dict(staging_partition=draw(texts), spans=spans, cleanup_staging_keys=keys, expected_token_length=length)
        )

    return plan()


class TestTag:
    @given(plans())
    def test_decodes_to_the_exact_plan(self, plan: RoutePlan) -> None:
        encoded = encode_route_plan(plan)
        assert decode_route_plan(encoded) == plan
        assert encoded.isascii()
        assert json.dumps(encoded) == f'"{encoded}"'

    @pytest.mark.parametrize(("calls", "most"), [(1, 260), (10, 1_200), (50, 4_800), (256, 23_000)])
    def test_its_size_is_bounded(self, calls: int, most: int) -> None:
        """With random ids of 32 hex digits, the worst there are: under 96 characters a call."""
        rng = np.random.default_rng(0)
        keys = [f"rollout-{rng.bytes(16).hex()}/chatcmpl-{rng.bytes(16).hex()}" for _ in range(calls)]
        spans = [
            {
                "staging_key": key,
                "carry_len": int(rng.integers(200, 800)),
                "generation_len": int(rng.integers(50, 600)),
                "staged_route_len": int(rng.integers(200, 1400)),
                "extras_digest_version": 1,
                "extras_digest": rng.bytes(32).hex(),
            }
            for key in (f"{keys[0].split('/')[0]}/{key.split('/')[1]}" for key in keys)
        ]
        length = sum(span["carry_len"] + span["generation_len"] for span in spans)
        plan = RoutePlan.from_dict(
            as_dict(spans=spans, cleanup_staging_keys=[s["staging_key"] for s in spans], expected_token_length=length)
        )
        assert len(encode_route_plan(plan)) <= most

    @given(st.data())
    def test_a_damaged_tag_is_refused_or_harmless(self, data: st.DataObject) -> None:
        encoded = encode_route_plan(RoutePlan.from_dict(as_dict(3)))
        at = data.draw(st.integers(0, len(encoded) - 1))
        damaged = encoded[:at] + data.draw(st.sampled_from("A/z9=:é")) + encoded[at + 1 :]
        try:
            decoded = decode_route_plan(damaged)
        except InvalidRoutePlan:
            return
        assert decoded == RoutePlan.from_dict(as_dict(3))

    def test_a_truncated_tag_is_refused(self) -> None:
        encoded = encode_route_plan(RoutePlan.from_dict(as_dict(3)))
        for length in range(len(encoded)):
            with pytest.raises(InvalidRoutePlan):
                decode_route_plan(encoded[:length])

    def test_a_tag_never_inflates_beyond_its_bound(self) -> None:
        bomb = zlib.compress(bytes(8 * MAX_PLAN_BYTES), 9)
        with pytest.raises(InvalidRoutePlan, match="MAX_PLAN_BYTES"):
            decode_route_plan("rp2:" + base64.b64encode(bomb).decode())
        with pytest.raises(InvalidRoutePlan, match="MAX_PLAN_BYTES"):
            decode_route_plan("rp2:" + "A" * (MAX_PLAN_BYTES + 4))

    @pytest.mark.parametrize("body", [b"", b"\0\0\0\2[]", b"\0\0\0\1{", b"\xff\xff\xff\xff[]", b"[" * 100_000])
    def test_anything_else_under_the_magic_is_refused(self, body: bytes) -> None:
        with pytest.raises(InvalidRoutePlan):
            decode_route_plan("rp2:" + base64.b64encode(zlib.compress(body)).decode())

    def test_nesting_without_end_is_refused(self) -> None:
        head = b"[" * 200_000
        body = len(head).to_bytes(4, "big") + head
        with pytest.raises(InvalidRoutePlan):
            decode_route_plan("rp2:" + base64.b64encode(zlib.compress(body)).decode())

    @pytest.mark.parametrize("tag", ["", "rp2:", "rp3:AAAA", "{}", None, 7, b"rp2:"])
    def test_what_is_no_tag_is_refused(self, tag: Any) -> None:
        with pytest.raises(InvalidRoutePlan):
            decode_route_plan(tag)


def test_a_plan_of_a_single_token_call() -> None:
    """A root without a prompt that sampled one token: the smallest row there is."""
    plane, rollout = memory_plane(), MadeRollout("r")
    rollout.call([], [5])
    stage(plane, rollout)
    assert planned(plane, rollout).expected_token_length == 1
