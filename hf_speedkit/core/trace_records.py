"""What one profiler trace says, as frozen records: the form every table, rule and page reads.

Times are integer nanoseconds (`*_ns`). `None` means the file does not say; a device number is never 0 because nothing
was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_speedkit.core.trace_rows import CallRow, CpuOpRow, GroupRow, KernelRow, ModuleRow, RangeRow, SyncRow

IDLE_CAUSES = ("data", "sync", "launch calls", "CPU operations", "Python", "queued work")
"""Who owned the host while a device stood idle, in the order in which a moment is given to a cause.

data: the data loader was running. sync: the host sat in a blocking call when the device ran dry. launch calls: the
host was inside a runtime or driver call. CPU operations: inside an operator. Python: in nothing the profiler records,
i.e. the interpreter. queued work: the next kernel had been launched already and waited for a stream, rank or transfer.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSummary:
    """What one device did. Devices are never summed.

    Args:
        device: index as the trace names it.
        name: product name, where the trace holds it.
        streams: streams that ran anything.
        kernels: number of kernels.
        memcpy: number of copies.
        memset: number of memsets.
        busy_ns: union of all device work over the streams.
        span_ns: start of the first to end of the last device event.
        window_ns: the time `idle_ns` is measured in: first step mark to the last step's end on host and device.
        window_busy_ns: busy time inside the window.
        communication_ns: union of communication kernels.
        communication_overlap_ns: of it, covered by compute kernels.
        communication_exposed_ns: of it, covered by no other device work at all (copies and memsets count as work).
        idle_ns: idle time of the window by cause, one entry per `IDLE_CAUSES`; sums to window - window_busy.
    """

    device: str
    name: str | None
    streams: tuple[str, ...]
    kernels: int
    memcpy: int
    memset: int
    busy_ns: int
    span_ns: int
    window_ns: int
    window_busy_ns: int
    communication_ns: int
    communication_overlap_ns: int
    communication_exposed_ns: int
    idle_ns: Mapping[str, int]

    @property
    def launches(self) -> int:
        """Device events: kernels + memcpy + memset."""
        return self.kernels + self.memcpy + self.memset

    @property
    def idle_share(self) -> float:
        """Idle share of the window, 0..1."""
        return 1 - self.window_busy_ns / self.window_ns if self.window_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDevice:
    """One step on one device.

    Args:
        device: index as the trace names it.
        busy_ns: union of the work this step launched, whenever it ran.
        busy_in_window_ns: union of whatever ran during the step's host window: other steps' work when the device
            runs behind.
    """

    device: str
    busy_ns: int
    busy_in_window_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One marked step.

    Args:
        label: the profiler's own number for it, e.g. "ProfilerStep#15".
        start_ns: start after the first event of the file.
        duration_ns: length of the mark on the host.
        cpu_ops: operators begun in it.
        launch_calls: host calls in it that started device work.
        launches: device events those calls started, by correlation, whenever they ran.
        launches_in_window: device events that began during the step's host window. Differs from `launches` when the
            device runs behind; not a count of the step.
        sync_wait_ns: time in blocking calls.
        data_wait_ns: time in the data loader, waits in it excluded.
        host_ns: duration without the two waits: what the host needs to issue the step.
        devices: the step on each device that worked for it or during it.
    """

    label: str
    start_ns: int
    duration_ns: int
    cpu_ops: int
    launch_calls: int
    launches: int | None
    launches_in_window: int | None
    sync_wait_ns: int
    data_wait_ns: int
    host_ns: int
    devices: tuple[StepDevice, ...]

    @property
    def empty(self) -> bool:
        """Neither operators nor launches: the profiler's last mark, made just before it stopped."""
        return self.cpu_ops == 0 and self.launch_calls == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Device time by group over the window of one device, in equal bins: the picture of the step.

    Args:
        device: index as the trace names it.
        bin_ns: length of a bin.
        groups: per group, nanoseconds of each bin covered by it (union over streams).
    """

    device: str
    bin_ns: int
    groups: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What the recording job wrote into the file beside the events; every field None in a stranger's trace.

    Args:
        step: global step that was traced (the first of several).
        micro_batches: forward/backward passes per step.
        layers: decoder layers of the model.
        real_tokens: real tokens of one step, this rank.
        slots: positions computed by one step, this rank.
        untraced_step_time_s: median time of the steps before the profiler was on.
    """

    step: int | None = None
    micro_batches: int | None = None
    layers: int | None = None
    real_tokens: int | None = None
    slots: int | None = None
    untraced_step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """One trace file, read.

    Args:
        file: base name of the file.
        events: events in the file, all phases.
        complete_events: events with a duration.
        categories: number of complete events per category, as spelt in the file.
        dropped_events: events left out because they could not be read or made no sense.
        partial: why the file is not whole; empty when it is.
        notes: what a reader of the numbers should know.
        rank: rank that wrote it.
        world_size: ranks of the job.
        steps: marked steps; empty when the file has no marks (then the whole file counts as one step).
        cpu_ops: table 1, by self time. cpu_op_calls, cpu_self_ns: its sums.
        overlapping_ops: operators that overlap another of their thread without being inside it.
        kernels: table 2, by total time; None when device work is unknown. device_time_ns: its sum.
        device_unknown: why there is no device number; None when there are.
        idle_unknown: why nothing follows from the device's idle time; None where something does.
        launches: device events; None when unknown.
        launch_calls: host calls that started device work.
        launches_before_window: device events whose launch call is not in the file.
        launches_per_call_max: most device events one call started (> 1: CUDA graphs).
        launch_delay_ns: median time from the start of a launch call to the start of its kernel.
        runtime_calls: runtime and driver calls.
        annotations: named ranges on the host. device_annotations: those the profiler repeats on the device.
        devices: one entry per device that ran anything.
        groups: device time by what it is, of work that the marked steps launched; what was still queued from the step
            before is in the other tables only.
        syncs: blocking calls inside the steps by cause. sync_calls: blocking calls of the whole file.
        modules: time per module where the trace says.
        overhead_ns: union of the profiler's own recorded work.
        overhead: that work by name.
        longest_launch_call_ns: longest single launch call.
        timeline: the picture of the busiest device.
        facts: what the recording job wrote beside the events.
    """

    file: str = ""
    events: int = 0
    complete_events: int = 0
    categories: Mapping[str, int] | None = None
    dropped_events: int = 0
    partial: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    steps: tuple[StepSummary, ...] = ()
    cpu_ops: tuple[CpuOpRow, ...] = ()
    cpu_op_calls: int | None = None
    cpu_self_ns: int | None = None
    overlapping_ops: int = 0
    kernels: tuple[KernelRow, ...] | None = None
    device_time_ns: int | None = None
    device_unknown: str | None = None
    idle_unknown: str | None = None
    launches: int | None = None
    launch_calls: int | None = None
    launches_before_window: int = 0
    launches_per_call_max: int = 0
    launch_delay_ns: int | None = None
    runtime_calls: tuple[CallRow, ...] = ()
    annotations: tuple[RangeRow, ...] = ()
    device_annotations: tuple[CallRow, ...] = ()
    devices: tuple[DeviceSummary, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    syncs: tuple[SyncRow, ...] = ()
    sync_calls: tuple[CallRow, ...] = ()
    modules: tuple[ModuleRow, ...] = ()
    overhead_ns: int = 0
    overhead: tuple[CallRow, ...] = ()
    longest_launch_call_ns: int | None = None
    timeline: Timeline | None = None
    facts: StepFacts = StepFacts()

    @property
    def full_steps(self) -> tuple[StepSummary, ...]:
        """The marked steps that did anything."""
        return tuple(step for step in self.steps if not step.empty)

    @property
    def step_count(self) -> int:
        """Steps the tables cover: the marked ones, or 1 when nothing is marked."""
        return max(1, len(self.full_steps))
