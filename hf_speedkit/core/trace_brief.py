"""A trace in three lines: verdict and the top of both tables, for a log."""

from __future__ import annotations

from collections.abc import Iterable

from hf_speedkit.core.diagnosis import diagnose, headline
from hf_speedkit.core.printable import printable
from hf_speedkit.core.trace_records import TraceSummary
from hf_speedkit.core.trace_signals import ms

_NAME_WIDTH = 40


def brief(trace: TraceSummary, *, top: int = 5) -> tuple[str, ...]:
    """Verdict, largest CPU operations (self time) and largest kernels; names are made printable."""
    operations = _listed((row.name, row.calls, row.self_ns) for row in trace.cpu_ops[:top])
    lines = [f"verdict: {headline(diagnose(trace))}", f"CPU operations: {operations}"]
    if trace.kernels is not None:
        lines.append(f"kernels: {_listed((row.name, row.calls, row.total_ns) for row in trace.kernels[:top])}")
    return tuple(map(printable, lines))


def _listed(rows: Iterable[tuple[str, int, int]]) -> str:
    return "; ".join(f"{printable(name, width=_NAME_WIDTH)} {calls:,} x, {ms(time)}" for name, calls, time in rows)
