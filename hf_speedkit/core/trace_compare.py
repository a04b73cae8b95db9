"""Two traces side by side, and expressions over the numbers of one: the regression gate of `hf-speedkit trace`.

Everything is per step, so files with different numbers of steps compare. Unknown stays None.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.trace_records import TraceSummary
from hf_speedkit.core.trace_signals import Signals

METRICS = {
    "step_time_ms": "length of a step mark on the host",
    "host_time_ms": "step time without waits for data and syncs",
    "data_wait_ms": "wait for batches",
    "sync_wait_ms": "time in blocking calls",
    "cpu_time_ms": "CPU operations, self time, all threads",
    "device_time_ms": "sum of device events",
    "device_busy_ms": "union of device events, busiest device",
    "device_idle": "idle share of the busiest device, 0..1",
    "exposed_communication": "share of the step that is communication nothing hides, 0..1",
    "launches": "kernels + memcpy + memset",
    "launch_calls": "host calls that start device work",
    "launch_delay_us": "median time from launch call to kernel start",
    "syncs": "blocking calls",
    "compilations": "modules loaded",
    "real_tokens_per_second": "real tokens of the step over the untraced step time (the traced one if unknown)",
    "packing_efficiency": "real tokens / slots",
}
"""Names that `--fail-if` and `--compare` know, all per step. `NAME_change` is the relative change against --compare."""


def trace_metrics(trace: TraceSummary) -> dict[str, float | None]:
    """Every metric of `METRICS`; None where the file does not say."""
    signals, steps, device = Signals(trace), trace.full_steps, Signals(trace).device
    count = trace.step_count
    step_ns = _mean(step.duration_ns for step in steps)
    facts = trace.facts
    seconds = facts.untraced_step_time_s or (step_ns / 1e9 if step_ns else None)
    launched = [step.launches for step in steps if step.launches is not None]
    launches = _mean(launched) if launched else _scaled(trace.launches, 1 / count)
    # Events lost, unpaired or of several ranks: what the device did is then a number, and no measurement.
    sound = trace.idle_unknown is None
    device = device if sound else None
    return {
        "step_time_ms": _scaled(step_ns, 1e-6),
        "host_time_ms": _scaled(_mean(step.host_ns for step in steps), 1e-6),
        "data_wait_ms": _scaled(_mean(step.data_wait_ns for step in steps), 1e-6),
        "sync_wait_ms": _scaled(_mean(step.sync_wait_ns for step in steps), 1e-6),
        "cpu_time_ms": _scaled(trace.cpu_self_ns, 1e-6 / count),
        "device_time_ms": _scaled(trace.device_time_ns, 1e-6 / count),
        "device_busy_ms": device.window_busy_ns * 1e-6 / count if device else None,
        "device_idle": device.idle_share if device else None,
        "exposed_communication": _exposed(signals) if sound else None,
        "launches": launches if sound else None,
        "launch_calls": _mean(step.launch_calls for step in steps) if steps else _scaled(trace.launch_calls, 1),
        "launch_delay_us": _scaled(trace.launch_delay_ns, 1e-3),
        "syncs": sum(row.calls for row in trace.syncs) / count if trace.runtime_calls else None,
        "compilations": signals.compilations[0] / count if trace.runtime_calls else None,
        "real_tokens_per_second": facts.real_tokens / seconds if facts.real_tokens is not None and seconds else None,
        "packing_efficiency": facts.real_tokens / facts.slots
        if facts.real_tokens is not None and facts.slots
        else None,
    }


def _exposed(signals: Signals) -> float | None:
    device = signals.device
    return device.communication_exposed_ns / device.window_ns if device and device.window_ns else None


def _mean(values: Iterable[int]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One number before and after.

    Args:
        name: metric, group, kernel or operator.
        before: value before; None when unknown or absent.
        after: value after; likewise.
        calls_before: calls per step before, where it is a row of a table.
        calls_after: likewise after.
    """

    name: str
    before: float | None
    after: float | None
    calls_before: float | None = None
    calls_after: float | None = None

    @property
    def difference(self) -> float | None:
        """After less before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def relative(self) -> float | None:
        """Relative change; None when unknown or before is 0."""
        return None if self.difference is None or not self.before else self.difference / self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceComparison:
    """What changed from one trace to another, largest first. Times in ns per step.

    Args:
        before: file name of the base.
        after: file name of the subject.
        metrics: every metric known to both, by relative change.
        groups: device time by group.
        kernels: kernels in both.
        operators: CPU operations in both, self time.
        appeared: kernels only in `after`.
        vanished: kernels only in `before`.
    """

    before: str
    after: str
    metrics: tuple[Change, ...]
    groups: tuple[Change, ...]
    kernels: tuple[Change, ...]
    operators: tuple[Change, ...]
    appeared: tuple[Change, ...]
    vanished: tuple[Change, ...]


def compare_traces(before: TraceSummary, after: TraceSummary) -> TraceComparison:
    """What changed, largest first."""
    kernels = _changes(_kernels(before), _kernels(after))
    old, new = trace_metrics(before), trace_metrics(after)
    metrics = [Change(name=name, before=old[name], after=new[name]) for name in METRICS]
    metrics = [change for change in metrics if change.difference]
    return TraceComparison(
        before=before.file,
        after=after.file,
        metrics=tuple(sorted(metrics, key=_by_relative)),
        groups=tuple(change for change in _changes(_groups(before), _groups(after)) if change.difference),
        kernels=tuple(c for c in kernels if c.calls_before and c.calls_after and _differs(c)),
        operators=tuple(change for change in _changes(_operators(before), _operators(after)) if _differs(change)),
        appeared=tuple(change for change in kernels if not change.calls_before),
        vanished=tuple(change for change in kernels if not change.calls_after),
    )


_Table = dict[str, tuple[float, float]]


def _kernels(trace: TraceSummary) -> _Table:
    return _table(((row.name, row.calls, row.total_ns) for row in trace.kernels or ()), trace.step_count)


def _groups(trace: TraceSummary) -> _Table:
    return _table(((row.group, row.calls, row.total_ns) for row in trace.groups), trace.step_count)


def _operators(trace: TraceSummary) -> _Table:
    return _table(((row.name, row.calls, row.self_ns) for row in trace.cpu_ops), trace.step_count)


def _table(rows: Iterable[tuple[str, int, int]], steps: int) -> _Table:
    found: _Table = {}
    for name, calls, time in rows:
        known = found.get(name, (0.0, 0.0))
        found[name] = (known[0] + calls / steps, known[1] + time / steps)
    return found


def _changes(before: _Table, after: _Table) -> list[Change]:
    rows = []
    for name in {**before, **after}:
        old, new = before.get(name, (0.0, 0.0)), after.get(name, (0.0, 0.0))
        rows.append(Change(name=name, before=old[1], after=new[1], calls_before=old[0], calls_after=new[0]))
    return sorted(rows, key=lambda change: (-abs(change.difference or 0.0), change.name))


def _differs(change: Change) -> bool:
    return bool(change.difference) or change.calls_before != change.calls_after


def _by_relative(change: Change) -> tuple[float, str]:
    return -abs(change.relative) if change.relative is not None else -float("inf"), change.name


_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_EXPRESSION = re.compile(
    r"\s*([a-z_]+)\s*(>=|<=|==|!=|>|<)\s*([-+]?[0-9]+(?:_?[0-9])*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A `--fail-if` expression, e.g. `launches>20000`. Build with `parse_gate`."""

    text: str
    metric: str
    compare: str
    limit: float

    def judge(self, metrics: Mapping[str, float | None]) -> str | None:
        """Why the subject fails, or None. An unknown number fails: a gate that cannot be read is not passed."""
        value = metrics.get(self.metric)
        if value is None:
            return f"{self.text}: {self.metric} is unknown in this trace"
        return f"{self.text}: {self.metric} is {value:,.6g}" if _OPERATORS[self.compare](value, self.limit) else None


def parse_gate(text: str, *, comparing: bool = False) -> Gate:
    """Read one expression: a metric, a comparison, a number.

    Args:
        text: e.g. `device_idle>0.1`.
        comparing: `NAME_change` may be used (`launches_change>0.05`).

    Raises:
        ConfigurationError: no such metric or not of that form. Nothing is evaluated as code.
    """
    match = _EXPRESSION.fullmatch(text)
    names = [*METRICS, *(f"{name}_change" for name in METRICS if comparing)]
    if match is None or match[1] not in names:
        raise ConfigurationError(
            f"cannot read --fail-if {text[:80]!r}",
            evidence=(f"metrics: {', '.join(METRICS)}", "with --compare also each with _change, a relative change"),
            mend="--fail-if 'launches>20000' (metric, one of > >= < <= == !=, number)",
        )
    return Gate(text=text.strip(), metric=match[1], compare=match[2], limit=float(match[3].replace("_", "")))


def gate_metrics(trace: TraceSummary, base: TraceSummary | None = None) -> dict[str, float | None]:
    """The metrics of a trace, with their relative changes against a base as `NAME_change`."""
    metrics = trace_metrics(trace)
    if base is None:
        return metrics
    old = trace_metrics(base)
    changes = {
        f"{name}_change": Change(name=name, before=old[name], after=value).relative for name, value in metrics.items()
    }
    return {**metrics, **changes}
