"""What a bench measures, as plain dataclasses: `dataclasses.asdict` of a `BenchReport` is the JSON.

Milliseconds and bytes are those of one group. A `Spread` over five groups has a 99th percentile that
is nearly their maximum; it says how much the machine's other work disturbed the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """The middle and the far end of some measurements."""

    median: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        median, p99 = np.percentile(np.asarray(values, float), [50, 99])
        return cls(float(median), float(p99))


@dataclass(frozen=True)
class GroupRun:
    """One group through one arm. `phases_ms` need not add up to `ms`: what is between them counts too."""

    ms: float
    cpu_s: float
    phases_ms: dict[str, float]


@dataclass(frozen=True)
class Traffic:
    """What a healthy group asks of the data plane. `calls` by kind, `bytes_read` and `bytes_written` of values."""

    calls: dict[str, int]
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class ArmFigures:
    """One arm over all measured groups.

    `cpu_s` is this process's, all threads. `peak_growth_bytes` is how far resident memory rose above
    where it stood before the group (`None` where the system does not tell), measured on a group of its own.
    `staging_rows_per_s` by the number of concurrent `stage` calls.
    """

    ms: Spread
    runs_ms: list[float]
    phases_ms: dict[str, Spread]
    tokens_per_s: float
    cpu_s: Spread
    calls: dict[str, int]
    bytes_read: int
    bytes_written: int
    peak_growth_bytes: int | None
    staging_rows_per_s: dict[str, float]


@dataclass(frozen=True)
class HashLimit:
    """How near the work from packed values to linearized rows, on one thread, comes to SHA-256 alone.

    Every token is hashed as 32 bytes, so `sha256_tokens_per_s` is what the machine's SHA-256 allows.
    `decode_ms` (prove each call to be what its manifest row lists) is timed alone, `verify_ms` (chain, row) is
    the rest of the work, both for a whole group; `fraction` is the median of hashing time over that of the
    work, in each round.
    """

    sha256_gb_per_s: float
    sha256_tokens_per_s: float
    decode_ms: float
    verify_ms: float
    tokens_per_s: float
    fraction: float


@dataclass(frozen=True)
class MachineFacts:
    """Where this was measured, and how busy the machine was before the run."""

    cpus: int
    processor: str
    python: str
    versions: dict[str, str]
    load_average: list[float]
    sha256_gb_s: float


@dataclass(frozen=True)
class Workload:
    """The shape in numbers. `group_bytes` are the packed staged values of a group."""

    rollouts: int
    calls: int
    prompt: int
    tool: int
    generated: int
    tokens: int
    group_bytes: int


@dataclass(frozen=True)
class BenchReport:
    """One run of one shape. `ratio` is the reference's median milliseconds a group over ours.

    `reference_tuned` is the reference arm as somebody who knows torch's nested tensors well would write it, and
    `ratio_tuned` its ratio. `reference_note` says what the reference arms ran on, or why they did not run.
    """

    shape: str
    plane: str
    repeat: int
    workload: Workload
    ours: ArmFigures
    reference: ArmFigures | None
    ratio: float | None
    reference_tuned: ArmFigures | None
    ratio_tuned: float | None
    staging_ratio: dict[str, float] | None
    reference_note: str
    hash_limit: HashLimit
    machine: MachineFacts
