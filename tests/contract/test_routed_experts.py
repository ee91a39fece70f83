"""The `nrlre1` envelope and the producer's side of routes, held against nemo-gym 0.7.0."""

from __future__ import annotations

import base64
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from nemo_gym.token_id_capture.staging import routes as reference

from rollout_reassembler.contract.errors import InvalidRoutes
from rollout_reassembler.contract.routed_experts import (
    BOUNDARY_KEY,
    INVALID_RANK,
    MAX_ROUTE_VALUES,
    ROUTES_KEY,
    classify_route_span,
    decode_routed_experts,
    encode_routed_experts,
    pad_last_route,
    route_extras,
    routed_experts_shape,
)

DTYPES = ["int8", "int16", "int32"]
SHAPES = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4))


def routes_of(dtype: str) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(dtype, SHAPES, elements=st.integers(-1, int(np.iinfo(dtype).max)))


def envelope(shape: str, raw: bytes, *, dtype: str = "int16", magic: str = "nrlre1") -> str:
    return f"{magic}:{dtype}:{shape}:{base64.b64encode(raw).decode()}"


class TestEnvelope:
    @given(st.sampled_from(DTYPES).flatmap(lambda d: st.tuples(st.just(d), routes_of(d))))
    def test_reads_and_writes_what_the_reference_does(self, case: tuple[str, np.ndarray]) -> None:
        dtype, routes = case
        encoded = encode_routed_experts(routes, dtype=dtype)
        assert encoded == reference.encode_routed_experts(routes.tolist(), dtype=dtype)
        decoded = decode_routed_experts(encoded)
        assert decoded.dtype == np.dtype(dtype)
        assert decoded.tolist() == reference.decode_routed_experts(encoded).values == routes.tolist()
        assert routed_experts_shape(encoded) == routes.shape
        assert routed_experts_shape(encoded)[0] == reference.routed_experts_token_count(encoded)

    @given(routes_of("int32"))
    def test_legacy_nested_lists_are_routes(self, routes: np.ndarray) -> None:
        nested = routes.tolist()
        assert decode_routed_experts(nested).tolist() == reference.decode_routed_experts(nested).values
        assert routed_experts_shape(nested) == routes.shape
        assert encode_routed_experts(nested, dtype="int32") == encode_routed_experts(routes, dtype="int32")

    def test_a_view_of_its_bytes_is_an_envelope_too(self) -> None:
        encoded = encode_routed_experts(np.arange(12).reshape(3, 2, 2))
        assert decode_routed_experts(memoryview(encoded.encode())).tolist() == decode_routed_experts(encoded).tolist()
        assert routed_experts_shape(memoryview(encoded.encode())) == (3, 2, 2)

    def test_decoding_does_not_copy_the_values(self) -> None:
        decoded = decode_routed_experts(encode_routed_experts(np.zeros((3, 2, 2), np.int16)))
        assert not decoded.flags.owndata
        assert not decoded.flags.writeable

    @pytest.mark.parametrize(("highest", "dtype"), [(127, "int8"), (128, "int16"), (32767, "int16"), (32768, "int32")])
    def test_the_narrowest_dtype_on_request(self, highest: int, dtype: str) -> None:
        encoded = encode_routed_experts(np.full((1, 1, 1), highest), dtype=None)
        assert encoded.split(":")[1] == dtype
        assert decode_routed_experts(encoded).item() == highest

    def test_any_memory_layout_is_written_in_c_order(self) -> None:
        routes = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
        for layout in (np.asfortranarray(routes), routes.astype(">i4"), routes.repeat(2, axis=0)[::2]):
            assert decode_routed_experts(encode_routed_experts(layout)).tolist() == routes.tolist()


ONE = struct.pack("<h", 1)

MALFORMED_SHAPE: dict[str, Any] = {
    "no text": "",
    "another magic": envelope("1x1x1", ONE, magic="nrlre2"),
    "no values": "nrlre1:int16:1x1x1",
    "unknown dtype": envelope("1x1x1", b"\1", dtype="uint8"),
    "zero tokens": envelope("0x1x1", b""),
    "zero layers": envelope("1x0x1", b""),
    "zero experts": envelope("1x1x0", b""),
    "negative tokens": envelope("-1x1x1", ONE),
    "dimensions that are no numbers": envelope("axbxc", ONE),
    "bytes short": envelope("2x1x1", ONE),
    "bytes over": envelope("1x1x1", ONE * 2),
    "padding short": "nrlre1:int16:1x1x1:AQA",
    "lists of nothing": [[[]]],
    "no rows": [],
}

MALFORMED_VALUES: dict[str, Any] = {
    "not base64": "nrlre1:int16:1x1x1:A*A=",
    "not ascii": "nrlre1:int16:1x1x1:AQä=",
    "padding in place of a value": "nrlre1:int8:2x1x1:AQ==",
    "ragged layers": [[[1]], [[1], [2]]],
    "ragged experts": [[[1], [1, 2]]],
    "a bool": [[[True]]],
    "a float": [[[1.0]]],
    "a numpy integer": [[[np.int64(1)]]],
}

MALFORMED = MALFORMED_SHAPE | MALFORMED_VALUES

MALFORMED_RANK: dict[str, Any] = {
    "two dimensions": envelope("1x1", ONE),
    "four dimensions": envelope("1x1x1x1", ONE),
    "a list of numbers": [1],
    "nested twice": [[1]],
    "a mapping": {"routes": [[[1]]]},
    "nothing": None,
    "nested four times": [[[[1]]]],
}


class TestMalformedEnvelopes:
    @pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
    def test_a_malformed_payload_is_a_typed_error_where_the_reference_refuses_it(self, payload: Any) -> None:
        with pytest.raises(ValueError):  # noqa: PT011 - the reference raises nothing narrower
            reference.decode_routed_experts(payload)
        with pytest.raises(InvalidRoutes):
            decode_routed_experts(payload)

    @pytest.mark.parametrize("payload", MALFORMED_RANK.values(), ids=MALFORMED_RANK.keys())
    def test_another_rank_has_its_own_code(self, payload: Any) -> None:
        with pytest.raises(ValueError):  # noqa: PT011 - the reference raises nothing narrower
            reference.decode_routed_experts(payload)
        with pytest.raises(InvalidRoutes) as refused:
            decode_routed_experts(payload)
        assert refused.value.code == INVALID_RANK

    @pytest.mark.parametrize("payload", [*MALFORMED_SHAPE.values(), *list(MALFORMED_RANK.values())[:-1]])
    def test_the_shape_alone_is_refused_too(self, payload: Any) -> None:
        with pytest.raises(InvalidRoutes):
            routed_experts_shape(payload)

    def test_a_shape_far_beyond_its_bytes_allocates_nothing(self) -> None:
        tracemalloc.start()
        for claimed in ("999999999x128x8", "999999999999999999x1x1", "1x1x999999999"):
            with pytest.raises(InvalidRoutes):
                decode_routed_experts(envelope(claimed, ONE))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100_000

    def test_a_token_cannot_claim_more_values_than_any_model_has(self) -> None:
        wide = np.zeros((1, 1, MAX_ROUTE_VALUES + 1), np.int8)
        with pytest.raises(InvalidRoutes, match="MAX_ROUTE_VALUES"):
            encode_routed_experts(wide, dtype="int8")
        with pytest.raises(InvalidRoutes, match="MAX_ROUTE_VALUES"):
            decode_routed_experts(envelope(f"1x1x{MAX_ROUTE_VALUES + 1}", wide.tobytes(), dtype="int8"))

    def test_an_expert_below_missing_is_refused(self) -> None:
        """Expert 200 written into a signed byte comes back as -56."""
        with pytest.raises(InvalidRoutes, match="-56"):
            decode_routed_experts(envelope("1x1x1", np.array([200], np.uint8).tobytes(), dtype="int8"))
        with pytest.raises(InvalidRoutes, match="-2"):
            decode_routed_experts([[[-2]]])
        with pytest.raises(InvalidRoutes, match="-2"):
            encode_routed_experts(np.full((1, 1, 1), -2))

    @pytest.mark.parametrize(
        ("routes", "dtype"),
        [
            (np.full((1, 1, 1), 128), "int8"),
            (np.full((1, 1, 1), 1 << 31), "int32"),
            (np.full((1, 1, 1), 1 << 31), None),
            (np.zeros((1, 1, 1)), "int16"),
            (np.zeros((1, 1, 1), bool), "int16"),
            (np.zeros((1, 1), np.int16), "int16"),
            (np.zeros((0, 1, 1), np.int16), "int16"),
            (np.zeros((1, 1, 1), np.int16), "uint8"),
            ([[[1 << 70]]], "int32"),
        ],
    )
    def test_what_does_not_fit_is_not_written(self, routes: Any, dtype: str | None) -> None:
        with pytest.raises(InvalidRoutes):
            encode_routed_experts(routes, dtype=dtype)

    @settings(max_examples=300)
    @given(st.text(alphabet="nrlre1:int86xAB=+ 0-", max_size=40) | st.text(max_size=20))
    def test_no_text_is_accepted_that_the_reference_refuses(self, payload: str) -> None:
        try:
            decoded = decode_routed_experts(payload)
        except InvalidRoutes:
            return
        assert decoded.tolist() == reference.decode_routed_experts(payload).values


class TestClassifyRouteSpan:
    @given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 14))
    def test_decides_as_the_reference(self, carry: int, generation: int, staged: int) -> None:
        lengths = {"carry_len": carry, "generation_len": generation, "staged_route_len": staged}
        assert classify_route_span(**lengths) == reference.classify_route_span(**lengths)

    @pytest.mark.parametrize("lengths", [(-1, 1, 1), (1, -1, 1), (1, 1, -1), (True, 1, 1), (1.0, 1, 1), (1, "1", 1)])
    def test_refuses_what_is_no_length(self, lengths: tuple[Any, ...]) -> None:
        names = ("carry_len", "generation_len", "staged_route_len")
        with pytest.raises(InvalidRoutes):
            classify_route_span(*lengths)
        with pytest.raises(ValueError, match="non-negative integer"):
            reference.classify_route_span(**dict(zip(names, lengths, strict=True)))


class TestProducer:
    def test_an_engine_that_routes_one_token_less_is_padded_never_shifted(self) -> None:
        engine = np.array([[[10, 11]], [[20, 21]]])
        assert pad_last_route(engine, 3).tolist() == [[[10, 11]], [[20, 21]], [[-1, -1]]]

    def test_a_dummy_last_row_becomes_missing(self) -> None:
        engine = np.array([[[10, 11]], [[20, 21]], [[0, 1]]])
        assert pad_last_route(engine, 3).tolist() == [[[10, 11]], [[20, 21]], [[-1, -1]]]

    @pytest.mark.parametrize("tokens", [1, 4, 17_804])
    def test_any_other_count_is_refused(self, tokens: int) -> None:
        with pytest.raises(InvalidRoutes, match="one a token, or one less"):
            pad_last_route(np.zeros((2, 1, 2), np.int16), tokens)

    def test_unsigned_routes_get_a_missing_row_below_zero(self) -> None:
        assert pad_last_route(np.full((1, 1, 1), 200, np.uint8), 2).tolist() == [[[200]], [[-1]]]

    def test_extras_hold_the_delta_and_the_parents_last_token(self) -> None:
        engine = np.array([[[10, 11]], [[20, 21]], [[30, 31]], [[40, 41]]])
        root = route_extras(engine[:2], prev_len=0, delta_len=3)
        child = route_extras(engine, prev_len=3, delta_len=2)
        assert decode_routed_experts(root[ROUTES_KEY]).tolist() == [[[10, 11]], [[20, 21]], [[-1, -1]]]
        assert BOUNDARY_KEY not in root
        assert decode_routed_experts(child[ROUTES_KEY]).tolist() == [[[40, 41]], [[-1, -1]]]
        assert decode_routed_experts(child[BOUNDARY_KEY]).tolist() == [[[30, 31]]]

    def test_extras_need_routes_for_the_whole_sequence(self) -> None:
        with pytest.raises(InvalidRoutes):
            route_extras(np.zeros((2, 1, 2), np.int16), prev_len=3, delta_len=2)
