"""What a trainer receives: padded and packed batches, with and without routes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from rollout_reassembler.contract.errors import ContractError, RowsMissing
from rollout_reassembler.contract.messages import KVBatchMeta
from rollout_reassembler.contract.model_shape import ModelShape
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.reassembly.route_plan import encode_route_plan
from rollout_reassembler.reassembly.routes import RouteFailure
from rollout_reassembler.trainer import rows
from rollout_reassembler.trainer.batch import TrainBatch
from rollout_reassembler.trainer.rows import iter_batches
from tests.captures import CANONICAL, chain, finalize, memory_plane, place_in, stage, staged_keys
from tests.route_captures import Turn, expected, made, planned, truth
from tests.route_captures import stage as stage_with_routes

PAD = 0
META = KVBatchMeta(CANONICAL, sample_ids=["g_g0"])


def put_row(plane: MemoryDataPlane, sample_id: str, ids: list[int], **changes: Any) -> None:
    """A canonical row of these tokens; the first one is its prompt, all others are sampled."""
    tokens = len(ids)
    row = {
        "input_ids": np.array(ids, np.int64),
        "input_lengths": np.int64(tokens),
        "token_mask": np.array([0.0] + [1.0] * (tokens - 1), np.float32),
        "generation_logprobs": np.array([0.0] + [-0.5] * (tokens - 1), np.float32),
        "sample_mask": np.float32(1.0),
        "prompt_ids_for_adv": np.array(ids[:1], np.int64),
        "total_reward": np.float32(0.25),
        "mask_sample": np.bool_(False),
        "truncated": np.bool_(False),
        "spans": b"",
    }
    tags = {"group_id": "g", "weight_version": 3, **changes.pop("tags", {})}
    plane.put_samples([sample_id], CANONICAL, {name: [value] for name, value in {**row, **changes}.items()}, [tags])


def batches(plane: MemoryDataPlane, *sample_ids: str, **options: Any) -> list[TrainBatch]:
    options = {"batch_size": 8, "pad_token_id": PAD, **options}
    return list(iter_batches(plane, list(sample_ids), CANONICAL, **options))


@pytest.fixture
def two_rows() -> MemoryDataPlane:
    plane = memory_plane()
    put_row(plane, "g_g0", [5, 6, 7])
    put_row(plane, "g_g1", [8], sample_mask=np.float32(0), mask_sample=np.bool_(True))
    return plane


class TestLayouts:
    def test_padded(self, two_rows: MemoryDataPlane) -> None:
        (batch,) = batches(two_rows, "g_g0", "g_g1")
        assert batch.input_ids.tolist() == [[5, 6, 7], [8, PAD, PAD]]
        assert batch.attention_mask.tolist() == [[True, True, True], [True, False, False]]
        assert batch.token_mask.tolist() == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
        assert batch.generation_logprobs.tolist() == [[0.0, -0.5, -0.5], [0.0, 0.0, 0.0]]
        assert batch.prompt_ids_for_adv.tolist() == [[5], [8]]

    def test_packed(self, two_rows: MemoryDataPlane) -> None:
        (batch,) = batches(two_rows, "g_g0", "g_g1", layout="packed")
        assert batch.input_ids.tolist() == [5, 6, 7, 8]
        assert batch.cu_seqlens.tolist() == [0, 3, 4]
        assert batch.token_mask.tolist() == [0.0, 1.0, 1.0, 0.0]
        assert batch.attention_mask.tolist() == [True] * 4
        assert batch.prompt_lengths.tolist() == [1, 1]

    @pytest.mark.parametrize("layout", ["padded", "packed"])
    def test_dtypes_are_those_of_the_columns(self, two_rows: MemoryDataPlane, layout: str) -> None:
        (batch,) = batches(two_rows, "g_g0", "g_g1", layout=layout)
        assert {name: getattr(batch, name).dtype for name in ("input_ids", "token_mask", "generation_logprobs")} == {
            "input_ids": torch.int64,
            "token_mask": torch.float32,
            "generation_logprobs": torch.float32,
        }
        assert (batch.input_lengths.dtype, batch.cu_seqlens.dtype) == (torch.int64, torch.int32)
        assert (batch.sample_mask.dtype, batch.total_reward.dtype) == (torch.float32, torch.float32)
        assert (batch.mask_sample.dtype, batch.truncated.dtype) == (torch.bool, torch.bool)
        assert batch.routed_experts is None

    def test_a_pad_token_that_is_a_real_token_is_still_data(self) -> None:
        plane = memory_plane()
        put_row(plane, "a", [5, PAD])
        put_row(plane, "b", [6, 7, PAD, PAD])
        (batch,) = batches(plane, "a", "b")
        assert batch.attention_mask.tolist() == [[True, True, False, False], [True] * 4]

    def test_rows_come_in_the_order_asked_with_their_tags(self, two_rows: MemoryDataPlane) -> None:
        (batch,) = batches(two_rows, "g_g1", "g_g0")
        assert batch.sample_ids == ["g_g1", "g_g0"]
        assert batch.sample_mask.tolist() == [0.0, 1.0]
        assert batch.mask_sample.tolist() == [True, False]
        assert [tags["weight_version"] for tags in batch.tags] == [3, 3]

    def test_batches_are_padded_each_to_its_own_longest_row(self) -> None:
        plane = memory_plane()
        for index, length in enumerate((1, 2, 9, 3, 4)):
            put_row(plane, f"r{index}", list(range(1, length + 1)))
        shapes = [tuple(b.input_ids.shape) for b in batches(plane, *(f"r{i}" for i in range(5)), batch_size=2)]
        assert shapes == [(2, 2), (2, 9), (1, 4)]

    def test_both_layouts_hold_the_same_tokens(self) -> None:
        plane = memory_plane()
        for index in range(4):
            put_row(plane, f"r{index}", list(range(1, 3 + 2 * index)))
        ids = [f"r{index}" for index in range(4)]
        (padded,), (packed,) = batches(plane, *ids), batches(plane, *ids, layout="packed")
        for name in ("input_ids", "token_mask", "generation_logprobs"):
            assert torch.equal(getattr(padded, name)[padded.attention_mask], getattr(packed, name))

    def test_tensors_are_writable_and_not_the_planes_own(self, two_rows: MemoryDataPlane) -> None:
        for layout in ("padded", "packed"):
            (batch,) = batches(two_rows, "g_g0", layout=layout)
            batch.input_ids.zero_()
            batch.sample_mask.zero_()
        (again,) = batches(two_rows, "g_g0")
        assert again.input_ids.tolist() == [[5, 6, 7]]
        assert again.sample_mask.tolist() == [1.0]


class TestRows:
    def test_a_finalized_group_by_its_meta_placeholders_included(self) -> None:
        plane, rollouts = memory_plane(), [chain("r0"), chain("r1", turns=1)]
        stage(plane, *rollouts)
        group = finalize(plane, rollouts, receipts=[rollouts[0].receipt(), None])
        (batch,) = iter_batches(plane, group.meta, batch_size=8, pad_token_id=PAD)
        assert batch.sample_ids == group.meta.sample_ids
        assert batch.input_ids[0].tolist() == rollouts[0].tokens()
        assert batch.input_lengths.tolist() == [len(rollouts[0].tokens()), 1]
        assert batch.sample_mask.tolist() == [1.0, 0.0]
        assert batch.token_mask[1].sum() == 0

    def test_a_missing_row_is_raised_by_name(self, two_rows: MemoryDataPlane) -> None:
        with pytest.raises(RowsMissing, match="g_g7"):
            batches(two_rows, "g_g0", "g_g7")

    @pytest.mark.parametrize("column", ["input_ids", "token_mask", "generation_logprobs"])
    def test_a_row_whose_columns_disagree_is_not_stretched(self, two_rows: MemoryDataPlane, column: str) -> None:
        dtype = np.int64 if column == "input_ids" else np.float32
        put_row(two_rows, "odd", [5, 6, 7], **{column: np.ones(1, dtype)})
        with pytest.raises(ContractError, match=f"'odd' has 1 values of {column}"):
            batches(two_rows, "odd")

    def test_nothing_asked_for_gives_no_batch(self, two_rows: MemoryDataPlane) -> None:
        assert batches(two_rows) == []

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (META, None),
            ([META], None),
            ([META, "g_g0"], "got KVBatchMeta at 0"),
            ("g_g0", "got the text 'g_g0': pass ['g_g0']"),
            (None, "got NoneType"),
            (["g_g0", 1], "got int at 1"),
            (iter(["g_g0"]), "got list_iterator"),
        ],
        ids=["a meta", "a list of metas", "a meta among ids", "a text", "nothing", "a number among ids", "an iterator"],
    )
    def test_what_names_no_rows_is_told_what_would(
        self, two_rows: MemoryDataPlane, rows: Any, message: str | None
    ) -> None:
        if message is None:
            (batch,) = iter_batches(two_rows, rows, batch_size=1, pad_token_id=PAD)
            assert batch.sample_ids == ["g_g0"]
            return
        with pytest.raises(TypeError) as raised:
            iter_batches(two_rows, rows, CANONICAL, batch_size=1, pad_token_id=PAD)
        assert str(raised.value) == (
            f"rows are a KVBatchMeta, a list of them, or a list of sample ids with their partition_id; {message}"
        )

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"pad_token_id": None}, "pad_token_id is a non-negative int, got None"),
            ({"pad_token_id": -1}, "pad_token_id is a non-negative int, got -1"),
            ({"pad_token_id": True}, "pad_token_id is a non-negative int, got True"),
            ({"pad_token_id": 2**63}, "pad_token_id must fit int64, as token ids do, got 9223372036854775808"),
            ({"batch_size": None}, "give batch_size (rows), max_tokens (tokens as they lie in memory) or both"),
            ({"max_tokens": 0}, "max_tokens must be 1 or more, got 0"),
            ({"loss_weight": "row"}, "loss_weight must be one of 'token', 'rollout', got 'row'"),
            ({"batch_size": 2.5}, "batch_size is a non-negative int, got 2.5"),
            ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
            ({"layout": None}, "layout must be one of 'padded', 'packed', got None"),
            (
                {"routes": "direct", "model_shape": 48},
                "routes='direct' needs model_shape, the model's (layers, experts a token), as (48, 8); got 48",
            ),
            ({"partition_id": "other"}, "partition_id is 'other', the KVBatchMeta's own is 'canonical'"),
        ],
        ids=str,
    )
    def test_an_option_that_cannot_be_is_named_with_what_came(
        self, two_rows: MemoryDataPlane, option: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            iter_batches(two_rows, META, **{"batch_size": 1, "pad_token_id": PAD, **option})

    def test_a_batch_beyond_int32_offsets_says_what_to_do(self) -> None:
        assert rows._cu_seqlens([3, 1]).tolist() == [0, 3, 4]
        with pytest.raises(ValueError, match="a batch of 3100000000 tokens is beyond int32 cu_seqlens: take a smaller"):
            rows._cu_seqlens([1_550_000_000, 1_550_000_000])

    def test_misuse_is_said_at_once(self, two_rows: MemoryDataPlane) -> None:
        with pytest.raises(ValueError, match="partition_id"):
            iter_batches(two_rows, ["g_g0"], batch_size=1, pad_token_id=PAD)
        with pytest.raises(ValueError, match="model_shape"):
            iter_batches(two_rows, ["g_g0"], CANONICAL, batch_size=1, pad_token_id=PAD, routes="direct")

    @pytest.mark.parametrize("choice", [{"layout": "pad"}, {"routes": "drect"}, {"on_failure": "rais"}], ids=str)
    def test_a_choice_that_there_is_not_is_said_at_once(self, two_rows: MemoryDataPlane, choice: Any) -> None:
        (name,) = choice
        with pytest.raises(ValueError, match=f"{name} must be one of '.*', got '{choice[name]}'"):
            iter_batches(two_rows, ["g_g0"], CANONICAL, batch_size=1, pad_token_id=PAD, **choice)

    def test_a_group_is_named_by_its_meta(self, two_rows: MemoryDataPlane) -> None:
        made = chain("r")
        stage(two_rows, made)
        with pytest.raises(TypeError, match=r"got a FinalizedGroup: pass its \.meta"):
            iter_batches(two_rows, finalize(two_rows, [made]), batch_size=1, pad_token_id=PAD)


class TestDirectRoutes:
    @pytest.fixture
    def plane(self) -> MemoryDataPlane:
        """A row with routes, one whose routes are not known, and one of another model."""
        plane = memory_plane(with_routes=True)
        put_row(plane, "known", [5, 6, 7], routed_experts=truth(3))
        put_row(plane, "unknown", [8, 9], routed_experts=np.empty((2, 0, 0), np.int16))
        put_row(plane, "other", [8, 9], routed_experts=truth(2, layers=3))
        return plane

    def read(self, plane: MemoryDataPlane, *ids: str, **options: Any) -> TrainBatch:
        (batch,) = batches(plane, *ids, routes="direct", model_shape=(2, 2), **options)
        assert batch.routed_experts is not None
        assert batch.routed_experts.dtype == torch.int16
        return batch

    def test_padded_routes_are_missing_where_there_is_no_token(self, plane: MemoryDataPlane) -> None:
        routes = self.read(plane, "known", "unknown").routed_experts
        assert routes.shape == (2, 3, 2, 2)
        assert np.array_equal(routes[0].numpy(), truth(3))
        assert (routes[1] == -1).all()

    def test_packed_routes_lie_beside_their_tokens(self, plane: MemoryDataPlane) -> None:
        routes = self.read(plane, "unknown", "known", layout="packed").routed_experts
        assert routes.shape == (5, 2, 2)
        assert (routes[:2] == -1).all()
        assert np.array_equal(routes[2:].numpy(), truth(3))

    def test_a_shape_may_come_with_all_that_is_known_of_the_model(self, plane: MemoryDataPlane) -> None:
        (batch,) = batches(plane, "known", routes="direct", model_shape=ModelShape(layers=2, experts=64, top_k=2))
        assert np.array_equal(batch.routed_experts[0].numpy(), truth(3))
        with pytest.raises(ValueError, match="needs model_shape"):
            batches(plane, "known", routes="direct", model_shape=ModelShape(vocab_size=7))

    def test_a_batch_of_unknown_routes_has_the_models_shape(self, plane: MemoryDataPlane) -> None:
        batch = self.read(plane, "unknown")
        assert batch.routed_experts.shape == (1, 2, 2, 2)
        assert (batch.route_report.rows_without_routes, batch.route_report.failures) == (1, {})

    def test_the_model_is_the_judge(self, plane: MemoryDataPlane) -> None:
        batch = self.read(plane, "known", "other")
        assert (batch.routed_experts[1] == -1).all()
        assert batch.route_report.failures == {"fragment_model_shape": 1}
        with pytest.raises(RouteFailure, match="row 'other'"):
            self.read(plane, "known", "other", on_failure="raise")

    def test_routes_of_another_length_than_the_tokens_fail(self, plane: MemoryDataPlane) -> None:
        put_row(plane, "odd", [5, 6, 7], routed_experts=truth(1))
        batch = self.read(plane, "odd")
        assert batch.route_report.failures == {"assembled_length_mismatch": 1}
        assert (batch.routed_experts == -1).all()


class TestDeferredRoutes:
    TURNS = (Turn(2, 2), Turn(1, 3))

    @pytest.fixture
    def plane(self) -> MemoryDataPlane:
        """Two published rows with plans, their fragments in staging, and a placeholder."""
        plane = memory_plane()
        for index in range(2):
            rollout = made(f"r{index}", self.TURNS)
            stage_with_routes(plane, rollout)
            tags = {"route_plan": encode_route_plan(planned(plane, rollout))}
            put_row(plane, f"g_g{index}", rollout.tokens(), tags=tags)
        put_row(plane, "g_g2", [PAD])
        return plane

    IDS = ("g_g0", "g_g1", "g_g2")

    def test_plans_are_executed_as_batches_are_made_and_staging_is_released(self, plane: MemoryDataPlane) -> None:
        made_batches = batches(plane, *self.IDS, batch_size=2, routes="deferred", model_shape=(2, 2))
        first, second = (batch.routed_experts for batch in made_batches)
        assert np.array_equal(first[0].numpy(), expected(self.TURNS))
        assert np.array_equal(first[1].numpy(), expected(self.TURNS))
        assert second.shape == (1, 1, 2, 2)
        assert (second == -1).all()
        assert [batch.route_report.rows_without_routes for batch in made_batches] == [0, 1]
        assert staged_keys(plane) == set()

    def test_the_tags_of_a_meta_are_not_relied_on(self, plane: MemoryDataPlane) -> None:
        """What crosses an RPC may leave the plans out."""
        meta = KVBatchMeta(CANONICAL, sample_ids=list(self.IDS), tags=[{"group_id": "g"}] * 3)
        options = {"batch_size": 3, "pad_token_id": PAD, "routes": "deferred", "model_shape": (2, 2)}
        (batch,) = iter_batches(plane, meta, layout="packed", **options)
        assert np.array_equal(batch.routed_experts[:8].numpy(), expected(self.TURNS))

    def test_several_readers_leave_staging_to_the_last(self, plane: MemoryDataPlane) -> None:
        for release in (False, False, True):
            (batch,) = batches(plane, *self.IDS, routes="deferred", model_shape=(2, 2), release=release)
            assert np.array_equal(batch.routed_experts[0].numpy(), expected(self.TURNS))
        assert staged_keys(plane) == set()

    def test_a_failure_is_raised_or_counted(self, plane: MemoryDataPlane) -> None:
        plane.clear_samples([place_in(plane, "r1/c0")], "staging")
        options = {"routes": "deferred", "model_shape": (2, 2)}
        with pytest.raises(RouteFailure, match="row 'g_g1'"):
            batches(plane, *self.IDS, **options, on_failure="raise")
        (batch,) = batches(plane, *self.IDS, **options)
        assert batch.route_report.failures == {"missing_fragment": 1}
        assert np.array_equal(batch.routed_experts[0].numpy(), expected(self.TURNS))
