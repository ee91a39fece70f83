"""What an actor tells Prometheus, through Ray's metrics agent: groups, rows, rejections, time, leaks."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

from rollout_reassembler.contract.messages import FinalizedGroup

_MS_BOUNDARIES: list[float] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]


class GroupMetrics:
    """The metrics of one actor; every series is tagged with the canonical partition."""

    def __init__(self, partition_id: str) -> None:
        name = "rollout_reassembler"
        self._tags = {"partition": partition_id}
        keys = ("partition",)
        self._groups = Counter(f"{name}_groups", "Groups finalized", (*keys,))
        self._rows = Counter(f"{name}_rows", "Rows published", (*keys, "valid"))
        self._tokens = Counter(f"{name}_generated_tokens", "Generated tokens in valid rows", keys)
        self._rejections = Counter(f"{name}_rejections", "Rollouts rejected", (*keys, "reason"))
        self._phase_ms = Histogram(
            f"{name}_phase_ms", "Milliseconds a phase of a group", _MS_BOUNDARIES, (*keys, "phase")
        )
        self._leaked = Gauge(f"{name}_cleanup_pending", "Staged rows that the last groups left uncleared", keys)
        self._leaked_rows = 0

    def observe(self, group: FinalizedGroup) -> None:
        """Count one answer."""
        self._groups.inc(1, self._tags)
        invalid = group.total_row_count - group.valid_row_count
        for valid, count in (("true", group.valid_row_count), ("false", invalid)):
            if count:
                self._rows.inc(count, {**self._tags, "valid": valid})
        if group.canonical_output_tokens:
            self._tokens.inc(group.canonical_output_tokens, self._tags)
        for reason in group.rejections.values():
            self._rejections.inc(1, {**self._tags, "reason": reason})
        for phase, ms in group.timings.items():
            self._phase_ms.observe(ms, {**self._tags, "phase": phase})
        self._leaked_rows += len(group.cleanup_pending)
        self._leaked.set(self._leaked_rows, self._tags)
