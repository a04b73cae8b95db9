"""Rows of the tables of a trace: operators, kernels, calls, ranges, blocking calls, modules.

Times are integer nanoseconds (`*_ns`): a trace resolves 1 ns, and kernels of 1.7 us summed 270,000 times must not
lose theirs to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOpRow:
    """All calls of one CPU operation.

    Args:
        name: operator name.
        calls: how often it ran.
        total_ns: its durations, operators inside it included.
        self_ns: its durations without the operators inside it; launch calls stay in. Sums to the thread's time.
    """

    name: str
    calls: int
    total_ns: int
    self_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All device events of one name.

    Args:
        name: kernel, copy or memset name.
        calls: how often it ran.
        total_ns: sum of durations; two streams at once count twice.
        group: what it is, one of `kernel_groups.GROUPS`.
        kind: "kernel", "memcpy" or "memset".
    """

    name: str
    calls: int
    total_ns: int
    group: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """All calls of one runtime or driver function, or all device ranges of one name."""

    name: str
    calls: int
    total_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """All named ranges (annotations) of one name.

    Args:
        name: the annotation.
        calls: how often it was entered.
        total_ns: its durations.
        launches: device events started inside it by the same thread; None in a trace without device events.
        device_ns: sum of their durations.
    """

    name: str
    calls: int
    total_ns: int
    launches: int | None
    device_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """All device events of one group; `total_ns` is a sum of durations."""

    group: str
    calls: int
    total_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRow:
    """Blocking calls inside the steps that share a cause.

    Args:
        call: runtime call that blocked.
        cause: enclosing operators, outermost first, e.g. "aten::index > aten::nonzero"; None outside any.
        source: Python line that caused it, where the trace holds stacks.
        calls: how often.
        wait_ns: time blocked.
        idle_after_ns: device idle time that began during the wait: what the sync cost.
    """

    call: str
    cause: str | None
    source: str | None
    calls: int
    wait_ns: int
    idle_after_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """Time of one module, modules inside it included.

    Args:
        name: FSDP's qualified name, or class name with the instance number the profiler gave it.
        calls: forward calls.
        forward_host_ns: time of the forward call on the host.
        forward_launches: device events started inside it; None in a trace without device events.
        forward_device_ns: sum of their durations.
        backward_host_ns: the same for its backward; None where the trace cannot tell.
        backward_launches: the same.
        backward_device_ns: the same.
    """

    name: str
    calls: int
    forward_host_ns: int
    forward_launches: int | None
    forward_device_ns: int | None
    backward_host_ns: int | None
    backward_launches: int | None
    backward_device_ns: int | None
