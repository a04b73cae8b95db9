"""What a recording got wrong by itself: device events that were lost or run on too long, ranks mixed in one file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hf_speedkit.core.kernel_groups import starts_work
from hf_speedkit.measure.trace_columns import STEP_PREFIX, Columns, Table

if TYPE_CHECKING:
    from hf_speedkit.measure.trace_work import Steps, Work

LOST_SHARE, LOST_LEAST = 0.10, 10
"""Launch calls without a device event that make a file unusable for a verdict. In 17 public traces and six of ours
(H200, H100, V100, MI250, MI300; 22,000 launches) there is not one such call inside the steps, but for one trace that
was cut by hand to two calls."""


def lost_launches(columns: Columns, work: Work, steps: Steps) -> tuple[int, int]:
    """Launch calls of the steps whose device event is not in the file, and launch calls of the steps.

    CUPTI drops records when its buffers or clocks fail it (pytorch issue 192021, TraceLens issue 972), and a file that
    was cut off keeps the calls and loses the kernels: the device then looks idle.
    """
    if not (work.call >= 0).any():  # nothing is paired at all: no sign of a loss
        return 0, 0
    named = np.array([starts_work(name) for name in columns.names], dtype=bool)[work.calls.name]
    if len(steps):
        named &= steps.of(work.calls.start) >= 0
    answered = np.zeros(len(work.calls), dtype=bool)
    answered[work.call[work.call >= 0]] = True
    return int((named & ~answered).sum()), int(named.sum())


def why_lost(lost: int, calls: int) -> str | None:
    """The sentence about lost device events; None where they are too few to matter."""
    if lost < LOST_LEAST or lost < LOST_SHARE * calls:
        return None
    return (
        f"{lost:,} of {calls:,} launch calls in the steps have no device event: the profiler lost them, so idle time "
        "is not known"
    )


def cut_overruns(events: Table, columns: Columns) -> tuple[Table, int]:
    """End events of a ROCm file where the next of their stream begins, if they run on beyond its end.

    A stream runs one after the other; ROCm's tracer now and then gives a kernel the end of a much later one, seconds
    instead of milliseconds (TraceLens issue 669). Kernels on NVIDIA GPUs overlap a little by design and are left alone.

    Returns:
        The events, and how many were cut.
    """
    if len(events) < 2 or not any(name.startswith("hip") for name in columns.names):
        return events, 0
    order = np.lexsort((events.start, events.place))
    start, end = events.start[order], events.end[order]
    overruns = np.zeros(len(order), dtype=bool)
    same_stream = events.place[order][1:] == events.place[order][:-1]
    overruns[:-1] = same_stream & (end[1:] < end[:-1]) & (start[1:] > start[:-1])
    if not overruns.any():
        return events, 0
    at = np.flatnonzero(overruns)
    duration = events.duration.copy()
    duration[order[at]] = start[at + 1] - start[at]
    return replace(events, duration=duration), len(at)


def processes_with_steps(columns: Columns) -> int:
    """Processes that marked steps: more than one where the files of several ranks were merged."""
    marks = columns.table("annotation")
    is_step = np.array([name.startswith(STEP_PREFIX) for name in columns.names], dtype=bool)
    places = np.unique(marks.place[is_step[marks.name]]).tolist() if len(marks) else []
    return len({columns.places[place][0] for place in places})
