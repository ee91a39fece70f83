"""Every bit of a staged value is proven: a flipped one gives a code, or the row that was there without the flip.

Calls of all kinds are finalized with one bit of their staged row changed: each bit of the header and of the
extras, and some of what the digest hashes (`tests/staging/test_codec.py` has them all). Without router replay,
with routes read by the actor, and with routes left to the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rollout_reassembler.contract.digests import encode_extras
from rollout_reassembler.data_plane.memory import MemoryDataPlane
from rollout_reassembler.staging.codec import pack_call
from rollout_reassembler.staging.places import place_of
from rollout_reassembler.staging.routes import route_shape
from rollout_reassembler.trainer.rows import iter_batches
from tests.captures import CANONICAL, STAGING, MadeRollout, finalize, memory_plane
from tests.route_captures import Turn, made
from tests.staging.unchecked import HEADER_BYTES

SHAPE = (1, 2)
MODES = {
    "text only": {},
    "direct": {"router_replay_enabled": True},
    "deferred": {"router_replay_enabled": True, "defer_routed_experts_to_policy": True},
}
CODES = ("invalid_staging_row", "route_assembly:fragment_integrity")


def rollouts() -> list[MadeRollout]:
    """Twenty calls: roots and children, with routes of each kind, with other extras, and with none."""
    staged = ["full", "dummy_last", "tail", "tail_dummy", "too_few", "none"]
    found = [
        made(f"r{at}", [Turn(1, 2, kind), Turn(1, 1, "full")], layers=SHAPE[0], topk=SHAPE[1])
        for at, kind in enumerate(staged)
    ]
    for at, extras in enumerate([None, {}, {"note": "x"}, {"a": [1, True, None, 0.5]}]):
        other = MadeRollout(f"x{at}")
        parent = other.call([7], [8], extras=extras)
        other.call([9], [10], parent=parent, extras=extras)
        found.append(other)
    return found


def planes_with_a_flip(plane: MemoryDataPlane, rollout: MadeRollout) -> Iterator[str]:
    """Each bit of each row in turn: flipped while the caller looks, and put back."""
    for call in rollout.calls:
        columns = {
            "call": pack_call(call, route_shape(call)),
            "extras": encode_extras(call.extras) if call.extras is not None else b"",
        }
        for name, sound in columns.items():
            for bit in _bits(name, len(sound)):
                flipped = bytearray(sound)
                flipped[bit // 8] ^= 1 << bit % 8
                plane.put_samples([place_of(call)], STAGING, {name: [bytes(flipped)]})
                yield f"{name} of {place_of(call)}, bit {bit}"
            plane.put_samples([place_of(call)], STAGING, {name: [sound]})


def _bits(name: str, size: int) -> list[int]:
    """All bits of a header and of extras. Of what the digest hashes, each eleventh: every byte, and every column."""
    if name == "extras":
        return list(range(8 * size))
    return [*range(8 * HEADER_BYTES), *range(8 * HEADER_BYTES, 8 * size, 11)]


def row_of(plane: MemoryDataPlane, rollout: MadeRollout, mode: str) -> dict[str, bytes] | str:
    """The published row as bytes, with its routes as the trainer has them, or the code of what was refused."""
    answer = finalize(plane, [rollout], options=dict(MODES[mode]))
    if answer.rejections:
        return answer.rejections[rollout.rollout_id]
    routed = {} if mode == "text only" else {"routes": mode, "model_shape": SHAPE, "release": False}
    (batch,) = iter_batches(plane, answer.meta, batch_size=1, pad_token_id=0, layout="packed", **routed)
    if batch.route_report is not None and batch.route_report.failures:
        (code,) = batch.route_report.failures
        return f"route_assembly:{code}"
    names = ("input_ids", "token_mask", "generation_logprobs", "sample_mask", "routed_experts")
    return {name: np.asarray(column).tobytes() for name in names if (column := getattr(batch, name)) is not None}


@pytest.mark.parametrize("mode", MODES)
def test_a_flipped_bit_gives_a_code_or_the_same_row(mode: str) -> None:
    codes = dict.fromkeys(CODES, 0)
    same = 0
    for rollout in rollouts():
        plane = _WithoutClears()
        expected = row_of(plane.staged(rollout), rollout, mode)
        assert isinstance(expected, dict)
        for flip in planes_with_a_flip(plane, rollout):
            found = row_of(plane.forgetful(), rollout, mode)
            if isinstance(found, str):
                assert found in CODES, flip
                codes[found] += 1
            else:
                assert found == expected, flip
                assert flip.startswith("extras"), f"{flip}: a value that differs was taken"
                same += 1
    print(f"\n{mode}: {codes}, {same} flips of extras that nobody reads")
    assert codes["invalid_staging_row"] > 0


class _WithoutClears(MemoryDataPlane):
    """Keeps its staged rows, and forgets its groups between two looks."""

    def staged(self, rollout: MadeRollout) -> _WithoutClears:
        template = memory_plane(with_routes=True)
        self.tables.partitions = template.tables.partitions
        self.put_samples(
            [place_of(call) for call in rollout.calls],
            STAGING,
            {
                "call": [pack_call(call, route_shape(call)) for call in rollout.calls],
                "extras": [encode_extras(call.extras) if call.extras is not None else b"" for call in rollout.calls],
            },
            [{"rollout_id": rollout.rollout_id}] * len(rollout.calls),
        )
        return self

    def forgetful(self) -> _WithoutClears:
        for partition in (CANONICAL, f"{CANONICAL}.groups"):
            MemoryDataPlane.clear_samples(self, None, partition)
        return self

    def clear_samples(self, sample_ids, partition_id) -> None:
        if partition_id != STAGING:
            super().clear_samples(sample_ids, partition_id)
