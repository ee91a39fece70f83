"""10,000 mutated staged values: one typed error or a sound call, never anything else, and quickly."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections import Counter
from contextlib import suppress

import numpy as np

from rollout_reassembler.contract.errors import InvalidStagedCall
from rollout_reassembler.contract.records import CallRecord
from rollout_reassembler.staging.codec import pack_call, unpack_call, unpack_listed
from tests.captures import MadeRollout, chain
from tests.staging.unchecked import HEADER_BYTES, signed

ROUNDS = 10_000
COUNTS = (0, 1, 2, 7, 255, 2**16, 2**31, 2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 1)


def mutated(rng: np.random.Generator, value: bytes, other: bytes) -> bytes:
    """One to three of: a flipped bit, a cut, a size claim, bytes of another row, zeros, more bytes."""
    changed = bytearray(value)
    for _ in range(int(rng.integers(1, 4))):
        if not changed:
            break
        at = int(rng.integers(len(changed)))
        match int(rng.integers(7)):
            case 0 | 1:
                changed[at] ^= 1 << int(rng.integers(8))
            case 2:
                del changed[at:]
            case 3:
                changed[at : at + 8] = struct.pack(">Q", int(rng.choice(np.array(COUNTS, object))))
            case 4:
                changed[at : at + 40] = other[at : at + 40]
            case 5:
                changed[at : at + 8] = bytes(len(changed[at : at + 8]))
            case _:
                changed[at:at] = changed[:at]
    return bytes(changed)


def test_mutated_values_give_a_call_or_a_typed_error_within_a_second():
    rng = np.random.default_rng(20)
    made = MadeRollout("группа/0")
    calls = [*chain("r", 3).calls, made.call(range(200), range(300), call_id="é" * 40)]
    values = [pack_call(call) for call in calls]
    records = [CallRecord.of(call, response_id="chatcmpl") for call in calls]
    verdicts: Counter[str] = Counter()
    slowest = 0.0
    for round_ in range(ROUNDS):
        value = mutated(rng, values[round_ % len(values)], values[(round_ + 1) % len(values)])
        is_signed = bool(rng.integers(2))
        if is_signed:
            value = signed(value[HEADER_BYTES:])
        begun = time.thread_time()
        try:
            call = unpack_call(value)
        except InvalidStagedCall:
            verdicts["refused, signed" if is_signed else "refused"] += 1
        else:
            verdicts["sound, signed" if is_signed else "sound"] += 1
            # All but the header's hint of routes, which nobody signs.
            assert pack_call(call.to_call())[16:] == value[16:]
        expected = records[round_ % len(values)]
        with suppress(InvalidStagedCall):
            (listed,) = unpack_listed([value], calls[round_ % len(values)].rollout_id, [expected])
            assert listed is None or (listed == unpack_call(value) and listed.digest == expected.digest)
            verdicts["as listed"] += listed is not None
        slowest = max(slowest, time.thread_time() - begun)
    print(f"\n{ROUNDS} mutated staged values: {dict(verdicts)}, slowest {slowest * 1e3:.1f} ms")
    assert verdicts.total() - verdicts["as listed"] == ROUNDS
    assert verdicts["as listed"] > 10
    assert verdicts["refused, signed"] > 1000
    assert slowest < 1.0


def test_a_size_claim_costs_no_memory():
    """Whatever a value claims, reading it takes no more than a few times its own size."""
    rng = np.random.default_rng(21)
    sound = pack_call(chain("r", 3).calls[2])
    tracemalloc.start()
    try:
        for _ in range(2000):
            value = bytearray(sound)
            at = int(rng.integers(HEADER_BYTES, len(value) - 8))
            value[at : at + 8] = struct.pack(">Q", int(rng.choice(np.array(COUNTS, object))))
            with suppress(InvalidStagedCall):
                unpack_call(signed(bytes(value[HEADER_BYTES:])))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
