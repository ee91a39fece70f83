"""Values that no engine means are refused where they enter, each with what was found and where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import InvalidStagedCall
from rollout_reassembler.contract.model_shape import ModelShape
from rollout_reassembler.contract.records import StagedCall, seal_call
from rollout_reassembler.contract.routed_experts import BOUNDARY_KEY, ROUTES_KEY, encode_routed_experts

MODEL = ModelShape(vocab_size=100, layers=1, experts=8, top_k=2)


def routes(*rows: tuple[int, int]) -> dict[str, Any]:
    return {ROUTES_KEY: encode_routed_experts(np.array(rows, np.int16)[:, None, :])}


def sealed(**changes: Any) -> StagedCall:
    call = {
        "rollout_id": "r",
        "model_call_id": "c",
        "token_ids_delta": [7, 99],
        "token_mask_delta": [0, 1],
        "generation_log_probs_delta": [0, -0.5],
        "weight_version": 0,
        "model": MODEL,
    }
    return seal_call(**{**call, **changes})


@pytest.mark.parametrize("log_prob", [0.0, -0.0, 1e-6, -1e4, -9998.9, -745.0])
def test_a_log_probability_that_can_be_is_taken(log_prob: float) -> None:
    assert sealed(generation_log_probs_delta=[0, log_prob]).generation_log_probs_delta[1] == np.float32(log_prob)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation_log_probs_delta": [0, 0.7]}, "log probability 0.7 at 1 is above 0"),
        ({"generation_log_probs_delta": [0, -9999.0]}, "log probability -9999 at 1 is what engines say for none"),
        ({"token_ids_delta": [7, 100]}, "token id 100 at 1; the vocabulary has 100"),
        ({"token_ids_delta": [1_837_461_021, 9]}, "token id 1837461021 at 0; the vocabulary has 100"),
        (
            {"extras": routes((0, 1), (2, 9))},
            "routed_experts name expert 9 at token 1, layer 0; the model has 8",
        ),
        ({"extras": routes((0, 1), (5, 5))}, "routed_experts name expert 5 twice at token 1, layer 0"),
        (
            {"extras": {ROUTES_KEY: encode_routed_experts(np.full((2, 1, 2), 255, np.uint8))}},
            "routed_experts name expert 255 at token 0, layer 0; the model has 8",
        ),
        (
            {"extras": {ROUTES_KEY: encode_routed_experts(np.zeros((2, 2, 2), np.int16))}},
            "routed_experts have layers 2, the model has 1",
        ),
        (
            {"extras": {ROUTES_KEY: encode_routed_experts(np.zeros((2, 1, 3), np.int16))}},
            "routed_experts have top_k 3, the model has 2",
        ),
        (
            {"extras": {**routes((0, 1), (2, 3)), BOUNDARY_KEY: routes((4, 4))[ROUTES_KEY]}},
            "routed_experts_boundary name expert 4 twice at token 0, layer 0",
        ),
    ],
)
def test_an_impossible_value_is_refused_with_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidStagedCall) as raised:
        sealed(**changes)
    assert str(raised.value) == f"impossible_value: call 'c' of rollout 'r': {message}"


def test_missing_routes_are_no_expert_twice() -> None:
    assert sealed(extras=routes((0, 1), (-1, -1))).extras is not None


def test_what_is_not_known_of_a_model_is_not_checked() -> None:
    assert sealed(model=None, token_ids_delta=[7, 10**9], extras=routes((9, 9), (5, 5))).delta_len == 2
    assert sealed(model=ModelShape(vocab_size=100), extras=routes((9, 9), (5, 5))).delta_len == 2
    with pytest.raises(InvalidStagedCall, match="expert 5 twice"):
        sealed(model=ModelShape(top_k=2), extras=routes((9, 10), (5, 5)))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "8"])
def test_a_size_that_cannot_be_one_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="experts must be a positive int, or None where it is not known"):
        ModelShape(experts=size)
    with pytest.raises(ValueError, match="top_k 9 of 8 experts"):
        ModelShape(experts=8, top_k=9)
