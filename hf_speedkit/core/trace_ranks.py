"""The traces of several ranks of one job side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_speedkit.core.trace_compare import trace_metrics
from hf_speedkit.core.trace_records import TraceSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank's step.

    Args:
        rank: rank, from the file; None when it does not say.
        file: its trace.
        step_time_ms: mean step time on the host.
        compute_busy_ms: device busy time per step without exposed communication: the rank's own work.
        exposed_communication_ms: communication nothing hides, per step: mostly waiting for slower ranks.
        device_idle: idle share, 0..1.
        launches: device events per step.
    """

    rank: int | None
    file: str
    step_time_ms: float | None
    compute_busy_ms: float | None
    exposed_communication_ms: float | None
    device_idle: float | None
    launches: float | None


def compare_ranks(traces: Sequence[TraceSummary]) -> tuple[RankRow, ...]:
    """One row per trace, by rank. Clocks of hosts differ, so only durations are compared, never moments."""
    return tuple(sorted(map(_row, traces), key=lambda row: (row.rank is None, row.rank or 0, row.file)))


def slowest_rank(rows: Sequence[RankRow]) -> RankRow | None:
    """The rank with most work of its own (host steps of one job end together); None without two known ones."""
    known = [row for row in rows if row.compute_busy_ms is not None]
    return max(known, key=lambda row: row.compute_busy_ms or 0.0) if len(known) > 1 else None


def _row(trace: TraceSummary) -> RankRow:
    metrics = trace_metrics(trace)
    device = max(trace.devices, key=lambda one: one.busy_ns, default=None)
    exposed = device.communication_exposed_ns / trace.step_count / 1e6 if device else None
    busy = metrics["device_busy_ms"]
    return RankRow(
        rank=trace.rank,
        file=trace.file,
        step_time_ms=metrics["step_time_ms"],
        compute_busy_ms=busy - exposed if busy is not None and exposed is not None else None,
        exposed_communication_ms=exposed,
        device_idle=metrics["device_idle"],
        launches=metrics["launches"],
    )
