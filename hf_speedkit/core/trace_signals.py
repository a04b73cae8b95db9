"""Numbers the rules of `diagnosis` look at, taken from a TraceSummary: per step, and of the busiest device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from hf_speedkit.core.trace_records import DeviceSummary, TraceSummary

PROFILER_COST_PER_OP_NS = 2_300
"""What recording one CPU operation costs: 7.6 us unrecorded, 9.9 us recorded per aten::add (torch 2.13,
a CPU, a first look)."""

_FUSED_GATED_DELTA = re.compile(
    r"gated_delta|chunk_fwd_kernel_o|recompute_w_u|wy_repr|flash_?qla|delta_rule|tilelang", re.IGNORECASE
)
_FUSED_SCAN = re.compile(r"chunk_scan|chunk_state|selective_scan|ssd_|state_passing|mamba", re.IGNORECASE)
_COMPILING = re.compile(r"ModuleLoad|LibraryLoad|Lazy Function Loading|Runtime Triggered Module Loading|cuLink")

FUSED_FAMILIES = {"GatedDeltaNet": _FUSED_GATED_DELTA, "Mamba": _FUSED_SCAN}
"""Kernel (or operator) names that only an optimised implementation has."""


@dataclass(frozen=True)
class Signals:
    """A summary with the derived numbers the rules share."""

    trace: TraceSummary

    @cached_property
    def device(self) -> DeviceSummary | None:
        """The device with most work: the one that sets the pace."""
        return max(self.trace.devices, key=lambda device: device.busy_ns, default=None)

    @property
    def steps(self) -> int:
        """Steps the file holds."""
        return self.trace.step_count

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all steps; 1 per step where the file does not say."""
        return self.steps * (self.trace.facts.micro_batches or 1)

    @cached_property
    def step_ns(self) -> int | None:
        """Time all steps took: the device's window, or the marks where there is no device."""
        if self.device is not None and self.device.window_ns:
            return self.device.window_ns
        return sum(step.duration_ns for step in self.trace.full_steps) or None

    @cached_property
    def real_idle_share(self) -> float | None:
        """Idle share of the device without the profiler: from the untraced step time, else as recorded."""
        if self.device is None:
            return None
        untraced = self.trace.facts.untraced_step_time_s
        if untraced is not None and self.trace.full_steps:
            busy_per_step = self.device.window_busy_ns / self.steps
            return max(0.0, 1 - busy_per_step / (untraced * 1e9))
        return self.device.idle_share

    @property
    def profiler_cost_ns(self) -> int:
        """Host time that recording the CPU operations cost, estimated."""
        return PROFILER_COST_PER_OP_NS * (self.trace.cpu_op_calls or 0)

    def idle(self, cause: str) -> int:
        """Idle time of the device by cause."""
        return self.device.idle_ns.get(cause, 0) if self.device is not None else 0

    @property
    def idle_total(self) -> int:
        """Idle time of the device."""
        return self.device.window_ns - self.device.window_busy_ns if self.device is not None else 0

    @cached_property
    def _calls_by_op(self) -> dict[str, int]:
        return {row.name: row.calls for row in self.trace.cpu_ops}

    def op_calls(self, *names: str) -> int:
        """Calls of the named operators, all steps together."""
        return sum(self._calls_by_op.get(name, 0) for name in names)

    def ops_like(self, pattern: str) -> int:
        """Calls of the operators whose name matches a pattern."""
        compiled = re.compile(pattern)
        return sum(row.calls for row in self.trace.cpu_ops if compiled.search(row.name))

    @cached_property
    def table_is_whole(self) -> bool:
        """Whether table 1 names every operator; a published excerpt does not."""
        return self.trace.cpu_op_calls is not None and self.trace.cpu_op_calls == sum(self._calls_by_op.values())

    def has_fused(self, family: str) -> bool:
        """Whether any kernel or operator belongs to the optimised implementation of a family."""
        pattern = FUSED_FAMILIES[family]
        names = [row.name for row in self.trace.kernels or ()] + [row.name for row in self.trace.cpu_ops]
        return any(pattern.search(name) for name in names)

    @property
    def on_a_device(self) -> bool:
        """Whether the job used a device at all; a CPU run is meant to use reference implementations."""
        return bool(self.trace.launches or self.trace.launch_calls)

    def group_share(self, group: str) -> float:
        """Share of device time of one group."""
        total = sum(row.total_ns for row in self.trace.groups)
        return sum(row.total_ns for row in self.trace.groups if row.group == group) / total if total else 0.0

    @cached_property
    def compilations(self) -> tuple[int, int]:
        """Calls that load freshly compiled code, and their time."""
        rows = [row for row in (*self.trace.runtime_calls, *self.trace.overhead) if _COMPILING.search(row.name)]
        return sum(row.calls for row in rows), sum(row.total_ns for row in rows)


def ms(nanoseconds: float) -> str:
    """A time in words: us, ms or s, whichever reads best."""
    if nanoseconds >= 1e9:
        return f"{nanoseconds / 1e9:,.2f} s"
    if nanoseconds >= 1e6:
        return f"{nanoseconds / 1e6:,.1f} ms"
    return f"{nanoseconds / 1e3:,.1f} us"


def percent(share: float) -> str:
    """A share in words."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
