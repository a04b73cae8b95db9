"""Rules that name the limit of a traced step: what the device waits for, or that it does not wait.

Thresholds rest on 16 public traces (V100 to MI300, of HTA, kineto, PARAM and TraceLens): between host-bound and queued
ones the median launch delay differs by two orders of magnitude, utilisation does not.
"""

from __future__ import annotations

from hf_speedkit.core.kernel_groups import COMMUNICATION
from hf_speedkit.core.records import Finding, Severity
from hf_speedkit.core.trace_causes import fallback_names
from hf_speedkit.core.trace_records import IDLE_CAUSES
from hf_speedkit.core.trace_signals import Signals, ms, percent

IDLE_MATTERS = 0.10
SHORT_DELAY_NS = 50_000
LONG_DELAY_NS = 1_000_000
SMALL_KERNEL_NS = 100_000

NAMES_A_LIMIT = frozenset({"unknown", "input_bound", "host_bound", "communication_bound", "stalled"})
"""Rules that say what limits the step. When none fires, the device does."""


def unknown(signals: Signals) -> Finding | None:
    """No device events: nothing can be said about the device, least of all 0 ms (cases V75)."""
    trace = signals.trace
    if trace.device_unknown is None and (trace.launches or trace.device_time_ns):
        return _idle_unknown(signals)
    return Finding(
        rule="unknown",
        severity=Severity.WARNING,
        message="Unknown: GPU timing unavailable, so nothing is said about what limits the step.",
        evidence=(trace.device_unknown or "no device numbers were given",),
        advice="record with CUDA activity, no other profiler attached, and the container allowed to use CUPTI "
        "(NVreg_RestrictProfilingToAdminUsers=0 or CAP_SYS_ADMIN)",
    )


def _idle_unknown(signals: Signals) -> Finding | None:
    """Device events, of which too many were lost, or none is paired: idle time then proves nothing."""
    trace, device = signals.trace, signals.device
    if trace.idle_unknown is None or device is None or device.idle_share < IDLE_MATTERS:
        return None
    return Finding(
        rule="unknown",
        severity=Severity.WARNING,
        message=f"Unknown: the device looks idle for {percent(device.idle_share)} of the step, and the file does not "
        "say why.",
        evidence=(trace.idle_unknown,),
        advice="record the step again, with CPU and CUDA activity, one warm-up step and no other profiler attached; "
        "read the file as it was written, not filtered or converted",
    )


def input_bound(signals: Signals) -> Finding | None:
    """The device waits for the data loader: 73 % of the idle time in a known case, 1.5 % once it was mended."""
    waiting, window = signals.idle("data"), signals.step_ns
    if signals.device is None or not window or not signals.idle_total:
        return None
    if waiting < 0.30 * signals.idle_total or waiting < 0.05 * window:
        return None
    return Finding(
        rule="input_bound",
        severity=Severity.PROBLEM,
        message=f"Input-bound: for {percent(waiting / window)} of the step the device waited for a batch.",
        evidence=(
            f"idle {ms(signals.idle_total)} of {ms(window)}, of it {ms(waiting)} in the data loader",
            f"device busy {percent(1 - signals.device.idle_share)}",
        ),
        advice="raise dataloader_num_workers and dataloader_prefetch_factor, tokenize before training, "
        "set dataloader_persistent_workers=True",
    )


def host_bound(signals: Signals) -> Finding | None:
    """The device waits for the host to issue work."""
    return _host_bound_by_tables(signals) if signals.device is None else _host_bound_by_gaps(signals)


def _host_bound_by_gaps(signals: Signals) -> Finding | None:
    device, delay, window = signals.device, signals.trace.launch_delay_ns, signals.step_ns
    if device is None or delay is None or not window or device.idle_share < IDLE_MATTERS or delay >= SHORT_DELAY_NS:
        return None
    issuing = sum(signals.idle(cause) for cause in ("launch calls", "CPU operations", "Python", "sync"))
    if issuing < 0.5 * signals.idle_total:
        return None
    # The profiler slows the host, not the device: what it cost may be all there is.
    left = max(0, signals.idle_total - signals.profiler_cost_ns) / max(1, window - signals.profiler_cost_ns)
    untraced = signals.trace.facts.untraced_step_time_s is not None
    real = signals.real_idle_share if untraced else left
    certain = real is not None and real >= IDLE_MATTERS
    return Finding(
        rule="host_bound",
        severity=Severity.PROBLEM if certain else Severity.WARNING,
        message=_host_bound_message(signals, percent(device.idle_share) + " of the step the device waits for the host")
        if certain
        else "Host-bound under the profiler, perhaps not without it: most of the idle time is what recording costs.",
        evidence=(
            f"device busy {ms(device.window_busy_ns)} of {ms(window)}",
            f"a kernel starts {ms(delay)} (median) after its launch call: there is no queue",
            f"idle time by host activity: CPU operations {ms(signals.idle('CPU operations'))}, launch calls "
            f"{ms(signals.idle('launch calls'))}, Python {ms(signals.idle('Python'))}, after syncs "
            f"{ms(signals.idle('sync'))}",
            f"recording cost the host about {ms(signals.profiler_cost_ns)} (2.3 us per CPU operation); "
            f"idle without it about {percent(real or 0.0)}",
        ),
        advice=_host_bound_advice(signals),
    )


def _host_bound_by_tables(signals: Signals) -> Finding | None:
    trace = signals.trace
    if not trace.cpu_self_ns or not trace.device_time_ns or not trace.launches:
        return None
    mean_kernel = trace.device_time_ns / trace.launches
    if trace.cpu_self_ns <= 1.1 * trace.device_time_ns or mean_kernel >= SMALL_KERNEL_NS:
        return None
    times = f"{ms(trace.cpu_self_ns)} of CPU operations against {ms(trace.device_time_ns)} of device time"
    return Finding(
        rule="host_bound",
        severity=Severity.PROBLEM,
        message=_host_bound_message(signals, times),
        evidence=(
            times,
            f"{trace.launches:,} launches of {ms(mean_kernel)} each, {ms(trace.cpu_self_ns / trace.launches)} of host "
            "time per launch",
        ),
        advice=_host_bound_advice(signals),
    )


def _host_bound_message(signals: Signals, numbers: str) -> str:
    names = fallback_names(signals)
    return f"Host-bound{' by a ' + ' and '.join(names) + ' fallback' if names else ''}: {numbers}."


def _host_bound_advice(signals: Signals) -> str:
    if fallback_names(signals):
        return "install the packages named by the fallback finding; nothing else comes near"
    return (
        "start fewer, larger kernels: fused norms, activations and optimizer, packing instead of small batches, "
        "torch.compile where it survives; a second GPU would wait as well"
    )


def communication_bound(signals: Signals) -> Finding | None:
    """Communication that no computation hides."""
    device = signals.device
    if device is None or not device.window_ns or device.communication_exposed_ns < 0.10 * device.window_ns:
        return None
    share = device.communication_exposed_ns / device.window_ns
    hidden = device.communication_overlap_ns / device.communication_ns if device.communication_ns else 0.0
    return Finding(
        rule="communication_bound",
        severity=Severity.WARNING,
        message=f"Communication-bound: {percent(share)} of the step is communication that nothing hides.",
        evidence=(
            f"communication {ms(device.communication_ns)}, {percent(hidden)} of it under compute kernels, "
            f"exposed {ms(device.communication_exposed_ns)} of {ms(device.window_ns)}",
            "a communication kernel also runs while it waits: this includes waiting for the slowest rank",
        ),
        advice="compare the ranks (hf-speedkit trace RANK0 RANK1 ...) for a straggler first; then prefetch (FSDP2), "
        "larger micro-batches, or gradient accumulation without reduction in between",
    )


def stalled(signals: Signals) -> Finding | None:
    """Idle although work is queued: a stream, another rank or a transfer is being waited for."""
    device, delay = signals.device, signals.trace.launch_delay_ns
    if device is None or delay is None or device.idle_share < IDLE_MATTERS or delay < LONG_DELAY_NS:
        return None
    if signals.idle("queued work") < 0.30 * signals.idle_total:
        return None
    return Finding(
        rule="stalled",
        severity=Severity.WARNING,
        message=f"Stalled: the device is idle for {percent(device.idle_share)} of the step although work is queued.",
        evidence=(
            f"a kernel starts {ms(delay)} (median) after its launch call: the host is ahead",
            f"idle with the next kernel already launched: {ms(signals.idle('queued work'))}",
        ),
        advice="it waits on another stream, rank or transfer: look for events waited on across streams, for copies "
        "from pageable memory, and for a slower rank",
    )


def unclear(signals: Signals) -> Finding:
    """Idle, and no rule explains it alone. Called when no limit is found and the device is idle."""
    device = signals.device
    shares = sorted(((cause, signals.idle(cause)) for cause in IDLE_CAUSES), key=lambda pair: -pair[1])
    largest = shares[0][0]
    idle = percent(device.idle_share) if device else "some"
    return Finding(
        rule="unclear",
        severity=Severity.WARNING,
        message=f"Mixed: the device is idle for {idle} of the step, most of it with the host in: {largest}.",
        evidence=tuple(f"{cause}: {ms(time)}" for cause, time in shares if time),
        advice="trace more than one step, with_stack=True; compare the ranks",
    )


def device_bound(signals: Signals) -> Finding:
    """Nothing keeps the device waiting: the healthy case, with what limits it next. Called when no other limit is."""
    device, trace = signals.device, signals.trace
    groups = [row for row in trace.groups if row.total_ns]
    total = sum(row.total_ns for row in groups) or 1
    shares = tuple(f"{row.group} {percent(row.total_ns / total)} of device time" for row in groups[:5])
    largest = groups[0].group if groups else None
    busy = (
        f"the device was busy {percent(1 - device.idle_share)} of the step" if device else "no rule found a host limit"
    )
    return Finding(
        rule="device_bound",
        severity=Severity.NOTE,
        message=f"Device-bound, as it should be: {busy}." + (f" The next limit is {largest}." if largest else ""),
        evidence=shares,
        advice=_next_step(largest),
    )


def _next_step(group: str | None) -> str:
    known = {
        "GEMM": "compare with the device's peak (MFU); beyond it: less recompute, fp8, or fewer padded slots",
        "attention": "packed varlen attention without a mask; check that key/value heads are not repeated",
        "linear attention": "check `hf-speedkit doctor` for a faster kernel of this device",
        "element-wise": "fuse: SwiGLU, rotary, residual and norm kernels, or torch.compile",
        "norm": "a fused RMSNorm kernel",
        "copy": "look for dtype casts, .contiguous() and concatenations around attention and loss",
        "optimizer": "fused AdamW; larger or more micro-batches per step",
        COMMUNICATION: "overlap: prefetch depth and reshard policy of FSDP2",
    }
    return known.get(group or "", "look at the kernel table for the largest name")
