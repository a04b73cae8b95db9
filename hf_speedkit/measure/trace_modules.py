"""Device work by the host range that launched it: annotations, and modules where a trace names them.

Modules come from FSDP2's own annotations, or from stacks (`with_stack=True`).

FSDP2 names modules in forward and backward (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). Stacks name
`nn.Module: Class_n` in the forward only; its backward is found through autograd's sequence numbers: an operator of
the forward and the operator that computes its gradient carry the same one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hf_speedkit.core.trace_rows import ModuleRow, RangeRow
from hf_speedkit.measure.trace_columns import ABSENT, Columns, Table
from hf_speedkit.measure.trace_intervals import Lanes, Nesting
from hf_speedkit.measure.trace_tables import Operators
from hf_speedkit.measure.trace_work import Work

Ints = npt.NDArray[np.int64]

MODULE_PREFIX = "nn.Module: "
_FSDP = re.compile(r"FSDP::(pre_forward|post_forward|pre_backward|post_backward_accumulate) \((.+)\)")
_ROW_LIMIT = 2_000

_LEVELS = 32
"""Modules around an operator that are followed outwards."""


@dataclass(slots=True)
class _Sums:
    calls: int = 0
    host_ns: int = 0
    launches: int = 0
    device_ns: int = 0


@dataclass(slots=True)
class _Module:
    forward: _Sums = field(default_factory=_Sums)
    backward: _Sums | None = None


class _LaunchedWork:
    """Device events by the moment and thread of their launch call, for sums over stretches of host time."""

    def __init__(self, columns: Columns, work: Work) -> None:
        self.known = work.known
        self._count = len(columns.places)
        launched = np.flatnonzero(work.call >= 0)
        self._place = work.calls.place[work.call[launched]]
        self._time = work.calls.start[work.call[launched]]
        self._duration = work.events.duration[launched]

    def inside(self, place: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Events launched in each stretch, and the sum of their durations."""
        lanes = Lanes(self._count, self._time, start, end)
        times = lanes.shift(self._place, self._time)
        order = np.argsort(times, kind="stable")
        first = np.searchsorted(times[order], lanes.shift(place, start))
        last = np.searchsorted(times[order], lanes.shift(place, end))
        before = np.concatenate([[0], np.cumsum(self._duration[order])])
        return np.asarray(last - first, dtype=np.int64), np.asarray(before[last] - before[first], dtype=np.int64)


def range_rows(columns: Columns, work: Work) -> tuple[RangeRow, ...]:
    """Annotations by name with the work launched inside them, by total time."""
    table = columns.table("annotation")
    launches, device = _LaunchedWork(columns, work).inside(table.place, table.start, table.end)
    width = len(columns.names)
    sums = [np.bincount(table.name, weights=column, minlength=width) for column in (table.duration, launches, device)]
    calls = np.bincount(table.name, minlength=width)
    present = np.flatnonzero(calls)
    present = present[np.argsort(-sums[0][present], kind="stable")][:_ROW_LIMIT]
    return tuple(
        RangeRow(
            name=columns.names[name],
            calls=int(calls[name]),
            total_ns=round(sums[0][name]),
            launches=round(sums[1][name]) if work.known else None,
            device_ns=round(sums[2][name]) if work.known else None,
        )
        for name in present.tolist()
    )


def module_rows(columns: Columns, work: Work, operators: Operators) -> tuple[ModuleRow, ...]:
    """Modules by device time (by host time where there is none); empty where the file names none."""
    launched = _LaunchedWork(columns, work)
    found = _from_fsdp(columns, launched) or _from_stacks(columns, launched, operators)
    rows = [_row(name, module, launched.known) for name, module in found.items()]
    rows.sort(key=lambda row: -((row.forward_device_ns or 0) + (row.backward_device_ns or 0) or row.forward_host_ns))
    return tuple(rows[:_ROW_LIMIT])


def _row(name: str, module: _Module, known: bool) -> ModuleRow:
    forward, backward = module.forward, module.backward
    return ModuleRow(
        name=name,
        calls=forward.calls,
        forward_host_ns=forward.host_ns,
        forward_launches=forward.launches if known else None,
        forward_device_ns=forward.device_ns if known else None,
        backward_host_ns=backward.host_ns if backward else None,
        backward_launches=backward.launches if backward and known else None,
        backward_device_ns=backward.device_ns if backward and known else None,
    )


def _from_fsdp(columns: Columns, launched: _LaunchedWork) -> dict[str, _Module]:
    """From `pre_` to the next `post_` annotation of the same module."""
    marks = [_FSDP.fullmatch(name) for name in columns.names]
    table = columns.table("annotation")
    table = table.where(np.array([mark is not None for mark in marks], dtype=bool)[table.name])
    table = table.where(np.argsort(table.start, kind="stable"))
    opened: dict[tuple[str, str], int] = {}
    stretches: list[tuple[str, str, int, int]] = []
    for i, name in enumerate(table.name.tolist()):
        mark = marks[name]
        assert mark is not None
        before_or_after, _, phase = mark[1].partition("_")
        phase, module = phase.partition("_")[0], mark[2]
        if before_or_after == "pre":
            opened[phase, module] = i
        elif (phase, module) in opened:
            stretches.append((phase, module, opened.pop((phase, module)), i))
    if not stretches:
        return {}
    first = np.array([one[2] for one in stretches], dtype=np.int64)
    last = np.array([one[3] for one in stretches], dtype=np.int64)
    launches, device = launched.inside(table.place[first], table.start[first], table.end[last])
    host = table.end[last] - table.start[first]
    modules: dict[str, _Module] = {}
    for i, (phase, name, _, _) in enumerate(stretches):
        module = modules.setdefault(name, _Module())
        if phase == "backward" and module.backward is None:
            module.backward = _Sums()
        sums = module.forward if phase == "forward" else module.backward
        assert sums is not None
        _add(sums, int(host[i]), int(launches[i]), int(device[i]))
    return modules


def _from_stacks(columns: Columns, launched: _LaunchedWork, operators: Operators) -> dict[str, _Module]:
    is_module = np.array([name.startswith(MODULE_PREFIX) for name in columns.names], dtype=bool)
    table = columns.table("python")
    table = table.where(is_module[table.name]) if len(table) else table
    if not len(table):
        return {}
    launches, device = launched.inside(table.place, table.start, table.end)
    modules: dict[str, _Module] = {}
    for i, name in enumerate(table.name.tolist()):
        module = modules.setdefault(columns.names[name].removeprefix(MODULE_PREFIX), _Module())
        _add(module.forward, int(table.duration[i]), int(launches[i]), int(device[i]))
    _add_backward(columns, launched, operators, table, modules)
    return modules


def _add_backward(
    columns: Columns, launched: _LaunchedWork, operators: Operators, modules: Table, sums: dict[str, _Module]
) -> None:
    """Outermost backward operators go to the modules around the forward operator of the same sequence number."""
    table = operators.table
    lanes = Lanes(len(columns.places), modules.start, modules.end)
    nesting = Nesting(lanes.shift(modules.place, modules.start), lanes.shift(modules.place, modules.end))
    around = nesting.enclosing(lanes.shift(table.place, table.start))
    numbered = table.sequence != ABSENT
    forward = np.flatnonzero(numbered & (around >= 0))
    backward = np.flatnonzero(numbered & (around < 0) & (operators.nesting.depth == 0))
    if not len(forward) or not len(backward):
        return
    forward = forward[np.lexsort((table.start[forward], table.sequence[forward]))]
    keys = table.sequence[forward]
    index = np.searchsorted(keys, table.sequence[backward], side="right") - 1
    matched = (index >= 0) & (keys[np.maximum(index, 0)] == table.sequence[backward])
    backward, module = backward[matched], around[forward[index[matched]]]
    launches, device = launched.inside(table.place[backward], table.start[backward], table.end[backward])
    for i in range(len(backward)):
        at_module = int(module[i])
        for _ in range(_LEVELS):
            name = columns.names[modules.name[at_module]].removeprefix(MODULE_PREFIX)
            target = sums[name]
            if target.backward is None:
                target.backward = _Sums()
            _add(target.backward, int(table.duration[backward[i]]), int(launches[i]), int(device[i]))
            at_module = int(nesting.parent[at_module])
            if at_module < 0:
                break


def _add(sums: _Sums, host_ns: int, launches: int, device_ns: int) -> None:
    sums.calls += 1
    sums.host_ns += host_ns
    sums.launches += launches
    sums.device_ns += device_ns
