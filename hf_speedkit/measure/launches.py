"""Count what one training step starts on the device, through CUPTI: a sample every so many steps, not a trace.

torch.profiler runs with CUDA activities only, which records launch calls and device work but no operators, and the
events are read by the same reader that reads traces. One warm-up step comes first, as in `trace_recorder`. Between two
marks, each an event recorded on the current stream (visible to CUPTI as a call), host clock and CUPTI's clock are
compared, so that waiting for data, which CUPTI does not see, can be put on the device's time line.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_speedkit.core.errors import TraceError
from hf_speedkit.core.step_parts import StepActivity
from hf_speedkit.measure.profilers import another_profiler_runs
from hf_speedkit.measure.trace_columns import Columns, Table, read_columns
from hf_speedkit.measure.trace_intervals import Intervals, union
from hf_speedkit.measure.trace_reader import TraceStream
from hf_speedkit.measure.trace_work import Host, Work, host_activity, join_work

QUEUE_FULL_NS = 200_000
"""A launch takes 2 to 10 us; one that takes longer than this under a busy device waited for room in its queue."""

CLOCKS_AGREE = 0.01
"""Largest relative difference between the two clocks, over the step, at which they count as comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMarks:
    """When the host did what in a counted step, in nanoseconds of one clock.

    Args:
        start: the step before is over, the loop goes on; the first mark was recorded here.
        begin: the batches are there.
        end: the step was issued; the last mark was recorded here.
    """

    start: int
    begin: int
    end: int


class LaunchCounter:
    """Counts one step at a time: `warm_up` a step ahead, `start`, `begin`, `stop`.

    Never raises into its user: what cannot be counted is None, with a sentence in `reason`.

    Args:
        profiler: makes an object with `prepare_trace`, `start_trace`, `stop_trace` and `export_chrome_trace`; torch's
            own with CUDA activities by default.
        mark: records an event on the current stream.
        now_ns: a clock in nanoseconds.
    """

    def __init__(
        self,
        *,
        profiler: Callable[[], Any] | None = None,
        mark: Callable[[], object] | None = None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._make = profiler if profiler is not None else _cuda_profiler
        self._mark = mark if mark is not None else _record_event
        self._now = now_ns
        self._profiler: Any = None
        self._started = False
        self._start = self._begin = self._cost = 0
        self.reason: str | None = None
        """Why the last step that was to be counted was not; None while there is nothing to explain."""
        self.broken = False
        """Whether counting will not work later either."""

    @property
    def warm(self) -> bool:
        """Whether a warm-up step runs or ran, and counting may start."""
        return self._profiler is not None and not self._started

    @property
    def counting(self) -> bool:
        """Whether a step is being counted."""
        return self._started

    def warm_up(self) -> bool:
        """Begin a warm-up step; False, with a reason, where another profiler runs or CUPTI cannot be used."""
        began = self._now()
        self.reason = None
        if another_profiler_runs(within_steps=2):
            return self._give_up("another profiler is running or about to begin by its schedule, and only one can")
        try:
            self._profiler = self._make()
            self._profiler.prepare_trace()
        except (RuntimeError, ValueError, AssertionError, AttributeError, OSError) as error:
            return self._give_up(f"CUPTI cannot be used ({_first_line(error)})", for_good=True)
        self._cost = self._now() - began
        return True

    def start(self) -> None:
        """The step before is over and the loop goes on: what is launched from here on is counted."""
        if not self.warm:
            return
        began = self._now()
        try:
            self._profiler.start_trace()
        except RuntimeError as error:
            self._give_up(f"the profiler did not start ({_first_line(error)})")
            return
        self._started = True
        self._mark()
        self._start = self._begin = self._now()
        self._cost += self._start - began

    def begin(self) -> None:
        """The batches are there."""
        if self._started:
            self._begin = self._now()

    def stop(self) -> StepActivity | None:
        """The step was issued. Waits for the device, reads what CUPTI saw and counts it."""
        if not self._started:
            return None
        self._mark()
        end = self._now()
        profiler, self._profiler, self._started = self._profiler, None, False
        marks = HostMarks(start=self._start, begin=self._begin, end=end)
        try:
            profiler.stop_trace()
            activity = step_activity(_columns_of(profiler), marks)
        except (RuntimeError, OSError, TraceError, AttributeError, ValueError, LookupError) as error:
            self._give_up(f"the profiler gave nothing that can be read ({_first_line(error)})")
            return None
        if activity is None:
            self._give_up("CUPTI recorded no device work (no permission, or another tool has it)", for_good=True)
            return None
        self._cost += self._now() - end
        return replace(activity, cost_s=self._cost / 1e9)

    def cancel(self, reason: str) -> None:
        """Stop without a result."""
        profiler, started = self._profiler, self._started
        self._give_up(reason)
        if profiler is None:
            return
        try:
            if not started:
                profiler.start_trace()  # torch 2.11 to 2.13 cannot leave a prepared trace otherwise
            profiler.stop_trace()
        except RuntimeError as error:
            self._give_up(f"{reason}; the profiler did not stop ({_first_line(error)})", for_good=True)

    def _give_up(self, reason: str, *, for_good: bool = False) -> bool:
        self._profiler, self._started = None, False
        self.reason, self.broken = reason, self.broken or for_good
        return False


def step_activity(columns: Columns, marks: HostMarks) -> StepActivity | None:
    """What the recorded events say of the step between two marks. Pure.

    Launches belong to the step of their call. Kernels that calls before the first mark started keep the device busy
    when the step begins, so its time on the device begins when they end.

    Args:
        columns: events of a recording with CUDA activities; other events are ignored.
        marks: the host's times; its clock need not be CUPTI's.

    Returns:
        None where the recording holds no device work. Without the two marks among the calls, or where the clocks
        disagree, the parts of the step are None.
    """
    work = join_work(columns)
    if not work.known:
        return None
    host = host_activity(columns, work)
    offset = _clock_offset(columns, work, marks)
    mine = work.call >= 0
    if offset is not None:
        mine &= work.launched_at() >= marks.start + offset
    counts = np.bincount(work.kind[mine], minlength=3)
    busy = work.busy(mine)
    waits = _host_waits(work, host, busy)
    counted = StepActivity(
        launch_calls=len(np.unique(work.call[mine])),
        kernels=int(counts[0]),
        memcpy=int(counts[1]),
        memset=int(counts[2]),
        device_busy_s=busy.total / 1e9,
        communication_s=work.busy(mine & work.communication).total / 1e9,
        host_wait_s=waits.total / 1e9,
    )
    if offset is None:
        return counted
    start, begin, end = (moment + offset for moment in (marks.start, marks.begin, marks.end))
    waits = waits.clipped(start, end)  # the profiler waits for the device itself, behind the last mark
    counted = replace(counted, host_wait_s=waits.total / 1e9)
    before = work.events.end[~mine]
    first = max(start, int(before.max(initial=start)))
    last = max(end, int(work.events.end[mine].max(initial=first)))
    return _with_parts(counted, work, waits.clipped(begin, end), (first, last), (start, begin, end))


def _with_parts(
    counted: StepActivity, work: Work, waits: Intervals, step: tuple[int, int], host: tuple[int, int, int]
) -> StepActivity:
    """Cut the step's time on the device's clock into its parts (`hf_speedkit.core.step_parts`)."""
    first, last = step
    start, begin, end = host
    everything = np.ones(len(work.events), dtype=bool)
    busy = work.busy(everything).clipped(first, last)
    compute = work.busy(~work.communication).clipped(first, last)
    working = waits.gaps(max(begin, first), min(max(end, first), last))
    idle = busy.gaps(first, last)
    data = _one(start, begin).clipped(first, last)
    overlapped, data_wait = compute.overlap_total(working), idle.overlap_total(data)
    return replace(
        counted,
        step_time_s=(last - first) / 1e9,
        exposed_comm_s=(busy.total - compute.total) / 1e9,
        overlapped_s=overlapped / 1e9,
        device_only_s=(compute.total - overlapped) / 1e9,
        data_wait_s=data_wait / 1e9,
        host_only_s=(idle.total - data_wait) / 1e9,
    )


def _host_waits(work: Work, host: Host, busy: Intervals) -> Intervals:
    """When the host stood in a call that waits for the device: blocking ones, and launches into a full queue."""
    calls = work.calls.where(work.launches)
    long = calls.where(calls.duration > QUEUE_FULL_NS)
    if len(long):
        # Under an idle device a long launch is work of the host's: loading or compiling a kernel.
        long = long.where(busy.overlap(long.start, long.end) * 2 > long.duration)
    return union(np.concatenate([host.sync.start, long.start]), np.concatenate([host.sync.end, long.end]))


def _clock_offset(columns: Columns, work: Work, marks: HostMarks) -> int | None:
    """CUPTI's clock less the host's, from the first and the last event recorded; None where they cannot be compared."""
    is_mark = np.array([name.startswith(("cudaEventRecord", "hipEventRecord")) for name in columns.names], dtype=bool)
    recorded: Table = work.calls.where(is_mark[work.calls.name]) if len(work.calls) else work.calls
    if len(recorded) < 2:
        return None
    # The host reads its clock right after the mark's call.
    first, last = int(recorded.end.min()), int(recorded.end.max())
    ours, theirs = marks.end - marks.start, last - first
    if ours <= 0 or abs(theirs - ours) > CLOCKS_AGREE * ours + 100_000:
        return None
    return first - marks.start


def _one(start: int, end: int) -> Intervals:
    return union(np.array([start], dtype=np.int64), np.array([end], dtype=np.int64))


def _columns_of(profiler: Any) -> Columns:
    with tempfile.TemporaryDirectory(prefix="hf_speedkit-") as folder:
        path = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(path))
        return read_columns(TraceStream(path))


def _cuda_profiler() -> Any:
    import torch

    profiler: Any = torch.profiler
    activity = profiler.ProfilerActivity.CUDA
    if not torch.cuda.is_available() or activity not in profiler.supported_activities():
        raise RuntimeError("this torch records no CUDA activity here")
    # The class without a schedule, so that prepare, start and stop are ours to call: documented, in spite of its name.
    return profiler._KinetoProfile(activities=[activity])


def _record_event() -> None:
    import torch

    torch.cuda.Event().record()  # type: ignore[no-untyped-call]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
