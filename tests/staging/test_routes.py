"""What a sink says of a call's routes, and how a reader opens them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_reassembler.contract.digests import encode_extras, encoded_extras_digest, extras_digest
from rollout_reassembler.contract.errors import InvalidRoutes, InvalidStagedCall
from rollout_reassembler.contract.routed_experts import BOUNDARY_KEY, ROUTES_KEY, encode_routed_experts
from rollout_reassembler.staging.codec import NO_ROUTES, RouteShape
from rollout_reassembler.staging.extras import decode_extras
from rollout_reassembler.staging.places import place, place_of
from rollout_reassembler.staging.routes import open_routes, route_shape
from rollout_reassembler.staging.sink import StagingSink
from rollout_reassembler.staging.source import StagingSource
from tests.captures import STAGING, MadeRollout, memory_plane

ROWS = encode_routed_experts(np.ones((3, 2, 4), np.int16))
ROW = encode_routed_experts(np.ones((1, 2, 4), np.int16))


def child(extras: dict[str, Any] | None) -> Any:
    rollout = MadeRollout("r")
    root = rollout.call([1], [2])
    return rollout.call([3], [4, 5], parent=root, extras=extras)


class TestRouteShape:
    def test_tells_rows_layers_experts_and_boundary(self) -> None:
        assert route_shape(child({ROUTES_KEY: ROWS})) == RouteShape(3, 2, 4)
        assert route_shape(child({ROUTES_KEY: ROWS, BOUNDARY_KEY: ROW})) == RouteShape(3, 2, 4, boundary=True)
        assert route_shape(child({ROUTES_KEY: [[[1, 2]], [[3, 4]]]})) == RouteShape(2, 1, 2)

    @pytest.mark.parametrize("extras", [None, {}, {"other": 1}, {ROUTES_KEY: None}])
    def test_no_routes(self, extras: dict[str, Any] | None) -> None:
        assert route_shape(child(extras)) == NO_ROUTES

    @pytest.mark.parametrize(
        "extras",
        [
            {ROUTES_KEY: "nonsense"},
            {ROUTES_KEY: []},
            {ROUTES_KEY: 7},
            {BOUNDARY_KEY: ROW},
            {ROUTES_KEY: ROWS, BOUNDARY_KEY: ROWS},
            {ROUTES_KEY: ROWS, BOUNDARY_KEY: [[[1]]]},
            {ROUTES_KEY: ROWS, BOUNDARY_KEY: "nonsense"},
        ],
    )
    def test_malformed_routes_are_not_staged(self, extras: dict[str, Any]) -> None:
        with pytest.raises(InvalidRoutes):
            route_shape(child(extras))
        result = StagingSink(memory_plane(), staging_partition=STAGING, route_shape=route_shape).stage(child(extras))
        assert not result.ok

    def test_a_root_has_no_parent_whose_token_it_could_route(self) -> None:
        root = MadeRollout("r").call([1], [2], extras={ROUTES_KEY: ROWS, BOUNDARY_KEY: ROW})
        with pytest.raises(InvalidRoutes, match="no parent"):
            route_shape(root)

    def test_the_shape_is_read_with_the_tokens_alone(self) -> None:
        plane = memory_plane()
        calls = [child({ROUTES_KEY: ROWS, BOUNDARY_KEY: ROW}), MadeRollout("s").call([1], [2])]
        StagingSink(plane, staging_partition=STAGING, route_shape=route_shape).stage_all(calls)
        source = StagingSource(plane, staging_partition=STAGING)
        fetched = source.fetch_packed(list(map(place_of, calls)))
        assert [call.routes for call in fetched.calls.values()] == [RouteShape(3, 2, 4, boundary=True), NO_ROUTES]
        routed, plain = map(place_of, calls)
        gone = place("s/c1", calls[1].digest)
        extras, missing = source.fetch_extras([routed, plain, gone])
        assert (len(extras[routed]) > 100, extras[plain], missing) == (True, b"", {gone})


def payload(value: Any) -> Any:
    return bytes(value).decode() if isinstance(value, memoryview) else value


class TestOpenRoutes:
    @given(
        st.dictionaries(
            st.sampled_from([ROUTES_KEY, BOUNDARY_KEY, "a", "z", "ü"]),
            st.text(max_size=5) | st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3),
        )
    )
    def test_finds_what_the_general_decoder_finds(self, extras: dict[str, Any]) -> None:
        encoded, digest = encode_extras(extras), extras_digest(extras)
        decoded = decode_extras(encoded, digest)
        opened = open_routes(encoded, digest)
        assert payload(opened.rows) == decoded.get(ROUTES_KEY)
        assert payload(opened.boundary) == decoded.get(BOUNDARY_KEY)

    def test_no_extras_hold_no_routes(self) -> None:
        assert open_routes(b"", extras_digest(None)) == (None, None)

    def test_another_digest_is_refused(self) -> None:
        with pytest.raises(InvalidStagedCall):
            open_routes(encode_extras({ROUTES_KEY: ROWS}), extras_digest({ROUTES_KEY: ROW}))

    @given(st.data())
    def test_garbled_extras_under_their_own_digest_are_refused_as_by_the_general_decoder(
        self, data: st.DataObject
    ) -> None:
        encoded = bytearray(encode_extras({ROUTES_KEY: "abc", "z": "d"}))
        for _ in range(data.draw(st.integers(1, 3))):
            encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
        garbled = bytes(encoded[: data.draw(st.integers(1, len(encoded)))])
        digest = encoded_extras_digest(garbled)
        try:
            decoded: dict[str, Any] | None = decode_extras(garbled, digest)
        except InvalidStagedCall:
            decoded = None
        try:
            opened = open_routes(garbled, digest)
        except InvalidStagedCall:
            assert decoded is None
            return
        if decoded is not None:
            assert payload(opened.rows) == decoded.get(ROUTES_KEY)
