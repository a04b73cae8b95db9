"""What each device did: busy time, communication, idle gaps and who caused them, and the picture of the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_speedkit.core.trace_records import IDLE_CAUSES, DeviceSummary, Timeline
from hf_speedkit.measure.trace_columns import Columns
from hf_speedkit.measure.trace_intervals import Intervals, union
from hf_speedkit.measure.trace_work import Host, Mask, Steps, Work

Ints = npt.NDArray[np.int64]

LATENCY_NS = 20_000
"""A kernel launched at most this long before the device ran dry was not queued: the launch itself takes that long.

Launch call to kernel start takes 1.7 to 6.5 us (median) on devices that wait for the host and 600 us or more on
devices with a queue (16 public traces, V100 to MI300, of HTA, kineto, PARAM and TraceLens); 20 us lies well between.
"""

TIMELINE_BINS = 300


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of time in which idle time is measured."""

    start: int
    end: int


def window_of(columns: Columns, work: Work, steps: Steps, step_of_event: Ints, full: Mask) -> Window:
    """First mark of a step to the end of the last on host and device; without marks, everything recorded.

    Args:
        step_of_event: step per device event, by its launch call.
        full: per step, whether it did anything.
    """
    if full.any():
        ends = work.events.end[(step_of_event >= 0) & full[np.maximum(step_of_event, 0)]]
        return Window(int(steps.start[full].min()), int(max(steps.end[full].max(), ends.max(initial=0))))
    tables = [table for table in (columns.table("op"), columns.table("call"), work.events) if len(table)]
    if not tables:
        return Window(0, 0)
    return Window(min(int(table.start.min()) for table in tables), max(int(table.end.max()) for table in tables))


@dataclass(frozen=True, slots=True)
class DeviceIdle:
    """Idle time of one device by cause, and what each blocking call cost in idle time."""

    by_cause: Mapping[str, int]
    after_sync: Ints


def idle_causes(work: Work, host: Host, busy: Intervals, window: Window, on_device: Mask) -> DeviceIdle:
    """Give every idle gap of a device to a cause.

    A gap ends with a kernel. Launched before the gap (by more than `LATENCY_NS`), that kernel waited in a queue.
    Otherwise the host was late, and the gap is split by what the host was doing; if it sat in a blocking call when
    the device ran dry, the call owns the gap: a device that has caught up with its host waits for the next launch.
    A blocking call that begins on an idle device owns its own duration.
    """
    gaps = busy.gaps(window.start, window.end)
    after_sync = np.zeros(len(host.sync), dtype=np.int64)
    if not len(gaps) or not (work.call >= 0).any():  # without a single pair nobody knows what was queued
        return DeviceIdle(dict.fromkeys(IDLE_CAUSES, 0), after_sync)
    span = gaps.start, gaps.end
    length = gaps.end - gaps.start
    queued = _launched_before(work, gaps, on_device)
    length_host = np.where(queued, 0, length)
    data = np.where(queued, 0, host.data.overlap(*span))
    sync_index = _blocking_at(host, gaps.start)
    in_sync = (sync_index >= 0) & ~queued
    in_sync_calls = np.where(queued, 0, _joined(host.data, union(host.sync.start, host.sync.end)).overlap(*span))
    in_calls = np.where(queued, 0, _joined(host.data, host.calls).overlap(*span))
    in_operators = np.where(queued, 0, _joined(host.data, host.calls, host.operators).overlap(*span))
    sync = np.where(in_sync, length_host, in_sync_calls) - data
    np.add.at(after_sync, sync_index[in_sync], sync[in_sync])
    free = ~in_sync
    parts = (
        data,
        sync,
        np.where(free, in_calls - in_sync_calls, 0),
        np.where(free, in_operators - in_calls, 0),
        np.where(free, length_host - in_operators, 0),
        length - length_host,
    )
    return DeviceIdle({cause: int(part.sum()) for cause, part in zip(IDLE_CAUSES, parts, strict=True)}, after_sync)


def _launched_before(work: Work, gaps: Intervals, on_device: Mask) -> Mask:
    """Per gap, whether the kernel that ends it had been launched well before it began."""
    chosen = np.flatnonzero(on_device)
    chosen = chosen[np.lexsort((work.launched_at()[chosen], work.events.start[chosen]))]
    starts = work.events.start[chosen]
    at = np.searchsorted(starts, gaps.end, side="left")
    ends_with_kernel = (at < len(starts)) & (starts[np.minimum(at, len(starts) - 1)] == gaps.end)
    event = chosen[np.minimum(at, len(starts) - 1)]
    unknown = work.call[event] < 0  # launched before the recording began
    early = work.launched_at()[event] < gaps.start - LATENCY_NS
    return np.asarray(ends_with_kernel & (unknown | early))


def _blocking_at(host: Host, times: Ints) -> Ints:
    """Index of the blocking call the host was in (or had just left) at each time, -1 for none."""
    if not len(host.sync):
        return np.full(len(times), -1, dtype=np.int64)
    index = np.searchsorted(host.sync.start, times, side="right") - 1
    return np.where((index >= 0) & (host.sync.end[np.maximum(index, 0)] >= times - LATENCY_NS), index, -1)


def _joined(*intervals: Intervals) -> Intervals:
    return union(
        np.concatenate([one.start for one in intervals]),
        np.concatenate([one.end for one in intervals]),
    )


def device_summary(
    columns: Columns, work: Work, index: int, name: str | None, idle: DeviceIdle, busy: Intervals, window: Window
) -> DeviceSummary:
    """One device in numbers."""
    here = work.device == index
    communication = work.busy(here & work.communication)
    compute_kernels = work.busy(here & ~work.communication & (work.kind == 0))
    other_work = work.busy(here & ~work.communication)
    streams = {columns.places[place][1] for place in np.unique(work.events.place[here]).tolist()}
    counts = np.bincount(work.kind[here], minlength=3)
    return DeviceSummary(
        device=work.devices[index],
        name=name,
        streams=tuple(sorted(streams, key=lambda stream: (len(stream), stream))),
        kernels=int(counts[0]),
        memcpy=int(counts[1]),
        memset=int(counts[2]),
        busy_ns=busy.total,
        span_ns=int(work.events.end[here].max() - work.events.start[here].min()),
        window_ns=window.end - window.start,
        window_busy_ns=busy.clipped(window.start, window.end).total,
        communication_ns=communication.total,
        communication_overlap_ns=communication.overlap_total(compute_kernels),
        communication_exposed_ns=communication.total - communication.overlap_total(other_work),
        idle_ns=idle.by_cause,
    )


def timeline(work: Work, index: int, window: Window) -> Timeline:
    """Coverage of every bin of the window by each group on one device."""
    bin_ns = max(1, -(-(window.end - window.start) // TIMELINE_BINS))
    edges = window.start + np.arange(TIMELINE_BINS + 1, dtype=np.int64) * bin_ns
    here = work.device == index
    groups = {}
    for number, group in enumerate(work.groups):
        covered = np.diff(work.busy(here & (work.group == number)).covered_until(edges))
        if covered.any():
            groups[group] = tuple(covered.tolist())
    return Timeline(device=work.devices[index], bin_ns=bin_ns, groups=groups)
