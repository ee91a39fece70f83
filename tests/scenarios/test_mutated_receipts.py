"""10,000 mutated receipts through the whole group pipeline: a rejection by reason or a proven row, quickly."""

from __future__ import annotations

import copy
import math
import time
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rollout_reassembler.contract.errors import RpcPayloadError
from rollout_reassembler.contract.rpc_guard import assert_metadata_only
from tests.captures import MadeRollout, chain, collect, memory_plane, reassembler, stage, staged_keys

pytestmark = pytest.mark.exhaustive

ROUNDS = 10_000

REASONS = {
    "missing_receipt",
    "invalid_receipt",
    "identity_mismatch",
    "rollout_failed",
    "capture_poisoned",
    "duplicate_staging_key",
    "missing_staging_row",
    "staging_key_mismatch",
    "foreign_staging_key",
    "rebuild_failed",
}


def nested(depth: int) -> Any:
    value: Any = "x"
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    return value


def cycle() -> Any:
    value: dict[str, Any] = {}
    value["manifest"] = [value]
    return value


ODD = [
    *(None, True, False, 0, 1, -1, 2**63, 2**64, 10**5000, 0.0, -0.5, math.nan, math.inf),
    *("", "r", "s/c0", "\ud800", "x" * 100_000, "0" * 64, b"bytes", bytearray(5)),
    *([], {}, set(), (), [None] * 5000, ["x"] * 10, {"x": "y"}, {5: 6}, nested(40), nested(5000), cycle()),
    *(object(), dict, np.zeros(3), np.float64(1.5), np.int64(3), 1j, iter([]), range(10)),
]
"""What a field may turn into: every kind of value, size claims, depth, cycles."""


def flip_character(rng: np.random.Generator, text: str) -> str:
    if not text:
        return "x"
    at = int(rng.integers(len(text)))
    if len(text) == 64:
        return text[:at] + "0123456789abcdef"[int(rng.integers(16))] + text[at + 1 :]
    return text[:at] + chr((ord(text[at]) ^ 1 << int(rng.integers(7))) or 1) + text[at + 1 :]


def mutate(rng: np.random.Generator, receipt: dict[str, Any]) -> Any:
    """One to three of: a field of another type, a flipped bit, a field dropped, added or moved, rows cut or doubled."""
    for _ in range((1, 1, 1, 2, 3)[int(rng.integers(5))]):
        manifest = receipt.get("manifest")
        rows = [row for row in manifest if isinstance(row, dict)] if isinstance(manifest, list) else []
        where = rows[int(rng.integers(len(rows)))] if rows and rng.integers(3) else receipt
        names = list(where)
        if not names:
            break
        name = names[int(rng.integers(len(names)))]
        value = where[name]
        match int(rng.integers(10)):
            case 0:
                where[name] = ODD[int(rng.integers(len(ODD)))]
            case 1 | 2 | 3 if type(value) is str:
                where[name] = flip_character(rng, value)
            case 1 | 2 | 3 if type(value) is int:
                where[name] = value ^ 1 << int(rng.integers(70))
            case 1 | 2 | 3 if type(value) is bool:
                where[name] = not value
            case 4:
                del where[name]
            case 5:
                where[("token_ids", "extra", "\ud800", "x" * 5000)[int(rng.integers(4))]] = ODD[
                    int(rng.integers(len(ODD)))
                ]
            case 6 if isinstance(manifest, list):
                del manifest[int(rng.integers(len(manifest) + 1)) :]
            case 7 if rows:
                manifest.append(copy.copy(rows[int(rng.integers(len(rows)))]))
            case _:
                other = names[int(rng.integers(len(names)))]
                where[name], where[other] = where[other], where[name]
    if not rng.integers(200):
        return ODD[int(rng.integers(len(ODD)))]
    return receipt


def test_mutated_receipts_are_rejected_by_reason_or_proven_within_a_second():
    rng = np.random.default_rng(30)
    branched = MadeRollout("r")
    root = branched.call([1, 2], [3])
    branched.call([4], [5], parent=root, call_id="abandoned")
    branched.call([4], [6], parent=root)
    plane = memory_plane()
    stage(plane, branched, chain("s"))
    before = staged_keys(plane)
    finalizer = reassembler(plane)
    sound = branched.receipt()
    verdicts: Counter[str] = Counter()
    stopped = 0
    slowest = 0.0
    for _ in range(ROUNDS):
        receipt = mutate(rng, copy.deepcopy(sound))
        begun = time.thread_time()
        try:
            assert_metadata_only(receipt)
        except RpcPayloadError:
            stopped += 1
        rollout = finalizer.finalize_rollout("r", receipt, reward=1.0)
        slowest = max(slowest, time.thread_time() - begun)
        if rollout.valid:
            assert rollout.token_ids.tolist() in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
            verdicts["proven"] += 1
        else:
            reason = rollout.rejection_reason.partition(":")[0]
            assert reason in REASONS
            assert len(rollout.rejection_detail) < 200_000
            verdicts[reason] += 1
    print(
        f"\n{ROUNDS} mutated receipts: {dict(verdicts)}; {stopped} stopped at the RPC; slowest {slowest * 1e3:.1f} ms"
    )
    assert verdicts.total() == ROUNDS
    assert len(verdicts) >= 8
    assert slowest < 1.0
    assert staged_keys(plane) == before


def test_a_group_of_mutated_receipts_is_published_whole_and_clears_only_its_own():
    rng = np.random.default_rng(31)
    verdicts: Counter[bool] = Counter()
    for round_ in range(200):
        rollouts = [chain(f"r{index}", 2) for index in range(4)]
        good, stranger = chain("good"), chain("stranger")
        plane = memory_plane()
        stage(plane, *rollouts, good, stranger)
        receipts = [mutate(rng, made.receipt()) for made in rollouts]
        answer = reassembler(plane).finalize_group(
            f"g{round_}",
            [*(made.rollout_id for made in rollouts), "good"],
            [*receipts, good.receipt()],
            [1.0] * 5,
            mask_sample=None,
            fallback_weight_version=0,
            prompt_idx=0,
        )
        verdicts.update(made.rollout_id not in answer.rejections for made in rollouts)
        assert answer.total_row_count == 5
        assert "good" not in answer.rejections
        collect(plane)
        assert {call.staging_key for call in stranger.calls} <= staged_keys(plane)
        left = {key for key in staged_keys(plane) if not key.startswith("stranger/")}
        liars = {name for name, reason in answer.rejections.items() if reason == "foreign_staging_key"}
        assert {key.rpartition("/")[0] for key in left} == liars
    print(f"\n200 groups of four mutated receipts: {verdicts[True]} rows proven, {verdicts[False]} rejected")
    assert verdicts[False] > 400


def test_mutated_receipts_cost_bounded_memory():
    rng = np.random.default_rng(32)
    sound = chain("r", 3).receipt()
    finalizer = reassembler(memory_plane())
    tracemalloc.start()
    try:
        for _ in range(500):
            finalizer.finalize_rollout("r", mutate(rng, copy.deepcopy(sound)), reward=1.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
