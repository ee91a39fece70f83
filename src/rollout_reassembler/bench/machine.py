"""The machine's part in a figure: what it is, how fast it hashes, how much memory a group takes."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from rollout_reassembler.bench.figures import HashLimit, MachineFacts
from rollout_reassembler.bench.shapes import MadeGroup
from rollout_reassembler.contract.bounds import parse_receipt
from rollout_reassembler.reassembly.verify import prove_rollout
from rollout_reassembler.staging.codec import pack_call, unpack_listed

HASHED_BYTES_A_TOKEN = 32
_PACKAGES = ("rollout-reassembler", "numpy", "ray", "tensordict", "torch", "TransferQueue", "nemo-gym")
_HASH_BUFFER = bytes(256 << 10)
_HASH_ROUNDS = 15


def machine_facts(sha256_gb_s: float, load_average: Sequence[float]) -> MachineFacts:
    """What to print beside the figures."""
    return MachineFacts(
        cpus=len(os.sched_getaffinity(0)),
        processor=_processor(),
        python=platform.python_version(),
        versions={name: found for name in _PACKAGES if (found := _version(name))},
        load_average=[round(load, 2) for load in load_average],
        sha256_gb_s=sha256_gb_s,
    )


def measure_hash_limit(group: MadeGroup) -> HashLimit:
    """Time packed values → linearized rows, and SHA-256 of as many bytes as that hashes, in turns on this thread.

    What is compared is always a pair of neighbours in time, so that a machine that slows down does so for both.
    """
    receipts = [parse_receipt(receipt) for receipt in group.receipts]
    rollouts = [
        (receipt, [pack_call(call) for call in calls]) for receipt, calls in zip(receipts, group.calls, strict=True)
    ]
    hashed_bytes = HASHED_BYTES_A_TOKEN * group.shape.tokens
    hash_s, decode_s, work_s = [], [], []
    for _ in range(_HASH_ROUNDS):
        start = time.perf_counter()
        _hash(hashed_bytes)
        hashed = time.perf_counter()
        for receipt, staged in rollouts:
            prove_rollout(receipt, staged)
        proven = time.perf_counter()
        for receipt, staged in rollouts:
            unpack_listed(staged, receipt.rollout_id, receipt.manifest)
        decoded = time.perf_counter()
        hash_s.append(hashed - start)
        work_s.append(proven - hashed)
        decode_s.append(decoded - proven)
    hashing, work, decode = (float(np.median(seconds)) for seconds in (hash_s, work_s, decode_s))
    return HashLimit(
        sha256_gb_per_s=hashed_bytes / hashing / 1e9,
        sha256_tokens_per_s=group.shape.tokens / hashing,
        decode_ms=decode * 1e3,
        verify_ms=max(0.0, work - decode) * 1e3,
        tokens_per_s=group.shape.tokens / work,
        fraction=float(np.median(np.divide(hash_s, work_s))),
    )


def _hash(size: int) -> None:
    """SHA-256 over `size` bytes that stay in the cache, as a call's do."""
    whole, rest = divmod(size, len(_HASH_BUFFER))
    for _ in range(whole):
        hashlib.sha256(_HASH_BUFFER).digest()
    hashlib.sha256(memoryview(_HASH_BUFFER)[:rest]).digest()


def peak_growth_bytes(work: Callable[[], object]) -> int | None:
    """Run `work`; how far this process's resident memory rose above where it was, `None` if nobody can say.

    Linux keeps the high-water mark itself and sets it back on request, so nothing has to sample.
    What the allocator holds free is given back first, or it would hide what `work` needs.
    """
    gc.collect()
    if not _reset_high_water_mark():
        work()
        return None
    before = _status_bytes("VmRSS")
    work()
    return max(0, _status_bytes("VmHWM") - before)


def _reset_high_water_mark() -> bool:
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return False
    return True


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {name}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
