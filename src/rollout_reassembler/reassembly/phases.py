"""How long each phase of a group took, in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Adds up wall time by phase: `with phases("fetch"): …`, then `phases.timings()`."""

    def __init__(self) -> None:
        self._ms: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._ms[phase] = self._ms.get(phase, 0.0) + (time.perf_counter() - start) * 1e3

    def ms(self) -> dict[str, float]:
        return dict(self._ms)

    def timings(self) -> dict[str, float]:
        return {f"row_assembly/{phase}_ms": ms for phase, ms in self._ms.items()}
