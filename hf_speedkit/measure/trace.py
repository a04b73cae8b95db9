"""Read a trace file of any origin: `summarize_trace`. Recording one is in `trace_recorder`, cutting in `trace_trim`.

Reads what torch.profiler writes (Chrome trace JSON, 2021 to 2026 schemas, CUDA and ROCm, plain or gzip). Nothing in a
trace is executed, resolved or fetched; names are data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hf_speedkit.core.errors import TraceError
from hf_speedkit.core.kernel_groups import blocks_host, starts_work
from hf_speedkit.core.trace_records import DeviceSummary, StepFacts, TraceSummary
from hf_speedkit.measure.trace_bytes import DEFAULT_LIMIT_BYTES
from hf_speedkit.measure.trace_columns import ABSENT, KIND_OF_CATEGORY, Columns, read_columns
from hf_speedkit.measure.trace_device import Window, device_summary, idle_causes, timeline, window_of
from hf_speedkit.measure.trace_intervals import union
from hf_speedkit.measure.trace_losses import lost_launches, processes_with_steps, why_lost
from hf_speedkit.measure.trace_modules import module_rows, range_rows
from hf_speedkit.measure.trace_reader import TraceStream, device_names, whole_number
from hf_speedkit.measure.trace_steps import step_of_events, step_summaries, steps_that_did_something, sync_rows
from hf_speedkit.measure.trace_tables import call_rows, group_rows, kernel_rows, nest_operators, operator_rows
from hf_speedkit.measure.trace_work import Host, Ints, Mask, Steps, Work, find_steps, host_activity, join_work


def summarize_trace(path: str | Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> TraceSummary:
    """Read one trace file into tables, steps, devices and causes.

    Cost: linear in events; a million take 2 s of CPU time and 0.2 GB (benchmarks/results/trace_reading.json).

    Args:
        path: a trace written by torch.profiler, `.json` or `.json.gz`.
        limit_bytes: JSON read at most, decompressed.

    Returns:
        The summary. A damaged file gives what could be read, with the reason in `partial`.

    Raises:
        TraceError: the file is absent, empty, no trace, or longer than the limit.
    """
    path = Path(path)
    stream = TraceStream(path, limit_bytes=limit_bytes)
    columns = read_columns(stream)
    work = join_work(columns)
    steps = find_steps(columns, _complete_steps(stream.metadata))
    host = host_activity(columns, work)
    operators = nest_operators(columns)
    step_of_event = step_of_events(work, steps)
    if stream.dropped and not stream.count:
        raise TraceError(
            f"{path.name} is no trace: none of its {stream.dropped:,} entries is an event that can be read",
            mend="give a file written by torch.profiler's export_chrome_trace (.json or .json.gz)",
        )
    full = steps_that_did_something(columns, work, steps)
    window = window_of(columns, work, steps, step_of_event, full)
    devices, after_sync = _devices(columns, work, host, window, stream.metadata)
    overhead = columns.table("overhead")
    mixed = processes_with_steps(columns)
    lost = why_lost(*lost_launches(columns, work, steps)) if mixed < 2 else None
    return TraceSummary(
        file=path.name,
        events=stream.count,
        complete_events=columns.complete_events,
        categories=columns.categories,
        dropped_events=stream.dropped + columns.dropped,
        partial=(*_partial(stream, columns), *([lost] if lost else [])),
        notes=_notes(work, steps, operators.overlapping),
        rank=_distributed(stream.metadata, "rank"),
        world_size=_distributed(stream.metadata, "world_size"),
        steps=step_summaries(columns, work, steps, host, step_of_event, _origin(columns)),
        cpu_ops=operator_rows(columns, operators),
        cpu_op_calls=len(operators.table),
        cpu_self_ns=int(operators.self_ns.sum()),
        overlapping_ops=operators.overlapping,
        kernels=kernel_rows(columns, work) if work.known else None,
        device_time_ns=int(work.events.duration.sum()) if work.known else None,
        device_unknown=_why_unknown(stream, columns, work),
        idle_unknown=lost or _why_not_said(work, mixed),
        launches=len(work.events) if work.known else None,
        launch_calls=int(work.launches.sum()) if work.known or work.launches.any() else None,
        launches_before_window=int((work.call < 0).sum()),
        launches_per_call_max=_most_per_call(work),
        launch_delay_ns=_launch_delay(work),
        runtime_calls=call_rows(columns, work.calls),
        annotations=range_rows(columns, work),
        device_annotations=call_rows(columns, columns.table("device_annotation")),
        devices=devices,
        groups=group_rows(work, _of_the_steps(work, step_of_event)),
        syncs=sync_rows(columns, operators, host, steps, after_sync),
        sync_calls=tuple(row for row in call_rows(columns, work.calls) if blocks_host(row.name)),
        modules=module_rows(columns, work, operators),
        overhead_ns=union(overhead.start, overhead.end).total,
        overhead=call_rows(columns, overhead),
        longest_launch_call_ns=_longest_launch_call(columns, work),
        timeline=_timeline(work, devices, window),
        facts=_facts(stream.metadata),
    )


def _devices(
    columns: Columns, work: Work, host: Host, window: Window, metadata: Mapping[str, Any]
) -> tuple[tuple[DeviceSummary, ...], Any]:
    names = device_names(metadata)
    after_sync = np.zeros(len(host.sync), dtype=np.int64)
    summaries = []
    for index, device in enumerate(work.devices):
        here = work.device == index
        busy = work.busy(here)
        idle = idle_causes(work, host, busy, window, here)
        # Per device, never summed: a sync is charged with the worst it did to any one of them.
        after_sync = np.maximum(after_sync, idle.after_sync)
        summaries.append(device_summary(columns, work, index, names.get(device), idle, busy, window))
    return tuple(summaries), after_sync


def _of_the_steps(work: Work, step_of_event: Ints) -> Mask:
    """All events but those launched before or between the marked steps; all where the steps launched none.

    Numbers of launch calls ascend, so one below all calls of the file was given before the recording began.
    A host that runs ahead leaves up to a step of queued work, which the device does while the next step is recorded:
    0.7 s of device time in a recording of a 0.4 s step (benchmarks/results/steps/2026-11-29_h200_27b-8_speedkit.json).
    """
    if not ((step_of_event >= 0) & (work.call >= 0)).any():
        return np.ones(len(work.events), dtype=bool)
    number, numbers = work.events.correlation, work.calls.correlation
    before = (work.call < 0) & (number != ABSENT) & (number < numbers[numbers != ABSENT].min())
    return np.asarray(~before & ~((work.call >= 0) & (step_of_event < 0)))


def _partial(stream: TraceStream, columns: Columns) -> tuple[str, ...]:
    reasons = list(stream.partial)
    dropped = stream.dropped + columns.dropped
    if dropped:
        reasons.append(f"{dropped:,} events could not be read or have impossible times, and are left out")
    own = stream.metadata.get("hf_speedkit")
    if isinstance(own, dict) and isinstance(own.get("partial"), str):
        reasons.append(f"partial: {own['partial'][:200]}")
    return tuple(reasons)


def _notes(work: Work, steps: Steps, overlapping: int) -> tuple[str, ...]:
    notes = []
    if work.cut:
        notes.append(f"{work.cut:,} device events ran on beyond the next of their stream, a fault of ROCm's: cut there")
    if not len(steps):
        notes.append("no ProfilerStep marks: the whole file counts as one step")
    if steps.cut_off:
        notes.append(f"{steps.cut_off:,} step marks beyond the first {len(steps):,} are left out")
    if overlapping:
        notes.append(f"{overlapping:,} CPU operations overlap others of their thread without lying inside them")
    return tuple(notes)


_OF_OTHER_KINDS = frozenset({"cuda_sync", "trace", "ac2g", "fwdbwd", "cpu_instant_event", "collective_comm"})


def _why_unknown(stream: TraceStream, columns: Columns, work: Work) -> str | None:
    if work.known:
        return None
    if stream.count and not columns.complete_events:
        return f"none of the file's {stream.count:,} events has a duration (phase X): it is not torch.profiler's"
    unknown = [name for name in columns.categories if name.lower() not in {*KIND_OF_CATEGORY, *_OF_OTHER_KINDS, ""}]
    others = f" Its categories {', '.join(sorted(unknown)[:4])} are not ones this reader knows." if unknown else ""
    if work.launches.any():
        return (
            "the file holds launch calls but no device events: CUPTI was refused or taken (a second profiler, missing "
            f"privileges in the container, or a file cut off before them).{others}"
        )
    if any(category.lower().startswith("mtia_") for category in columns.categories):
        return "the device events of this accelerator are not ones this reader knows"
    return f"the file holds no device events: a CPU run, or the profiler was not asked for CUDA activity.{others}"


def _why_not_said(work: Work, processes: int) -> str | None:
    """Why nothing follows from idle time: events that no call is known of, or files of several ranks in one."""
    if processes > 1:
        return f"{processes} processes marked steps: files of several ranks in one; read each rank's own file"
    if not work.known or (work.call >= 0).any():
        return None
    return "no device event is paired with the call that launched it (the correlation is missing)"


def _distributed(metadata: Mapping[str, Any], key: str) -> int | None:
    info = metadata.get("distributedInfo")
    return whole_number(info.get(key)) if isinstance(info, dict) else None


def _origin(columns: Columns) -> int:
    return min((int(table.start.min()) for table in columns.tables.values() if len(table)), default=0)


def _most_per_call(work: Work) -> int:
    matched = work.call[work.call >= 0]
    return int(np.bincount(matched).max()) if len(matched) else 0


def _launch_delay(work: Work) -> int | None:
    """Median over launch calls; of a CUDA graph the first kernel counts. Clock skew below 0 counts as 0."""
    matched = np.flatnonzero(work.call >= 0)
    if not len(matched):
        return None
    matched = matched[np.lexsort((work.events.start[matched], work.call[matched]))]
    calls, first = np.unique(work.call[matched], return_index=True)
    delays = work.events.start[matched[first]] - work.calls.start[calls]
    return int(np.median(np.maximum(delays, 0)))


def _longest_launch_call(columns: Columns, work: Work) -> int | None:
    """Of calls that launch kernels: a copy that blocks is a sync, not a sign of compilation."""
    named = np.array([starts_work(name) for name in columns.names], dtype=bool)
    durations = work.calls.duration[named[work.calls.name]] if len(work.calls) else work.calls.duration
    return int(durations.max()) if len(durations) else None


def _timeline(work: Work, devices: tuple[DeviceSummary, ...], window: Window) -> Any:
    if not devices or window.end <= window.start:
        return None
    busiest = max(range(len(devices)), key=lambda index: devices[index].window_busy_ns)
    return timeline(work, busiest, window)


def _complete_steps(metadata: Mapping[str, Any]) -> int | None:
    own = metadata.get("hf_speedkit")
    return whole_number(own.get("complete_steps")) if isinstance(own, dict) else None


def _facts(metadata: Mapping[str, Any]) -> StepFacts:
    """What our own recorder wrote; a stranger's value that is not a plain positive number counts as unknown."""
    own = metadata.get("hf_speedkit")
    if not isinstance(own, dict):
        return StepFacts()
    whole = {key: whole_number(own.get(key)) for key in ("step", "micro_batches", "layers", "real_tokens", "slots")}
    seconds = own.get("untraced_step_time_s")
    usable = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < math.inf
    return StepFacts(**whole, untraced_step_time_s=float(seconds) if usable and seconds is not None else None)
