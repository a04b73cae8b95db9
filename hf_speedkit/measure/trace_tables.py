"""The tables of a trace: operators by self time, kernels, groups, calls and ranges by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_speedkit.core.trace_rows import CallRow, CpuOpRow, GroupRow, KernelRow
from hf_speedkit.measure.trace_columns import DEVICE_KINDS, Columns, Table
from hf_speedkit.measure.trace_intervals import Lanes, Nesting
from hf_speedkit.measure.trace_work import NAME_LIMIT, Mask, Work

Ints = npt.NDArray[np.int64]

OTHER_NAMES = "(other names)"


@dataclass(frozen=True, slots=True)
class Operators:
    """Operators with their nesting: who called whom.

    Args:
        table: the operators.
        nesting: over all threads at once, in `lanes`.
        lanes: what moved the threads apart.
        self_ns: duration without the operators inside, per operator.
        overlapping: operators that stick out of the one around them.
    """

    table: Table
    nesting: Nesting
    lanes: Lanes
    self_ns: Ints
    overlapping: int

    def around(self, place: Ints, times: Ints) -> Ints:
        """Index of the innermost operator around each moment of a thread, -1 for none."""
        return self.nesting.enclosing(self.lanes.shift(place, times))


def nest_operators(columns: Columns) -> Operators:
    """Nest the operators of every thread and take their self time."""
    table = columns.table("op")
    lanes = Lanes(len(columns.places), table.start, table.end)
    nesting = Nesting(lanes.shift(table.place, table.start), lanes.shift(table.place, table.end))
    parent = nesting.parent
    inside = np.flatnonzero(parent >= 0)
    above = parent[inside]
    shared = np.minimum(table.end[inside], table.end[above]) - table.start[inside]
    # Sums in float64 are exact below 2**53 ns, 104 days; none of these comes near.
    within = np.bincount(above, weights=shared, minlength=len(table))
    return Operators(
        table=table,
        nesting=nesting,
        lanes=lanes,
        self_ns=np.maximum(table.duration - np.rint(within).astype(np.int64), 0) if len(table) else table.duration,
        overlapping=int((table.end[inside] > table.end[above]).sum()),
    )


def operator_rows(columns: Columns, operators: Operators) -> tuple[CpuOpRow, ...]:
    """Table 1, by self time."""
    table = operators.table
    names, calls, total = _by_name(table.name, table.duration, len(columns.names))
    _, _, own = _by_name(table.name, operators.self_ns, len(columns.names))
    order = np.argsort(-own, kind="stable")
    rows = [
        CpuOpRow(name=columns.names[names[i]], calls=int(calls[i]), total_ns=int(total[i]), self_ns=int(own[i]))
        for i in order[:NAME_LIMIT].tolist()
    ]
    rest = order[NAME_LIMIT:]
    if len(rest):
        sums = (int(column[rest].sum()) for column in (calls, total, own))
        rows.append(CpuOpRow(name=OTHER_NAMES, **dict(zip(("calls", "total_ns", "self_ns"), sums, strict=True))))
    return tuple(rows)


def kernel_rows(columns: Columns, work: Work) -> tuple[KernelRow, ...]:
    """Table 2, by total time."""
    events = work.events
    # A kernel launched from two places can be in two groups (mask building): one row each.
    width, groups = len(columns.names), len(work.groups)
    keys = (work.kind * groups + work.group) * width + events.name
    distinct, index = np.unique(keys, return_inverse=True)
    _, calls, total = _by_name(index, events.duration, len(distinct))
    order = np.argsort(-total, kind="stable")
    rows = []
    for i in order[:NAME_LIMIT].tolist():
        rest, name = divmod(int(distinct[i]), width)
        kind, group = divmod(rest, groups)
        rows.append(
            KernelRow(
                name=columns.names[name],
                calls=int(calls[i]),
                total_ns=int(total[i]),
                group=work.groups[group],
                kind=DEVICE_KINDS[kind],
            )
        )
    return tuple(rows)


def group_rows(work: Work, chosen: Mask) -> tuple[GroupRow, ...]:
    """Device time of the chosen events by what it is, largest first."""
    numbers, calls, total = _by_name(work.group[chosen], work.events.duration[chosen], len(work.groups))
    rows = [
        GroupRow(group=work.groups[number], calls=int(count), total_ns=int(time))
        for number, count, time in zip(numbers, calls, total, strict=True)
    ]
    return tuple(sorted(rows, key=lambda row: -row.total_ns))


def call_rows(columns: Columns, table: Table) -> tuple[CallRow, ...]:
    """Events of the host by name, by total time."""
    names, calls, total = _by_name(table.name, table.duration, len(columns.names))
    order = np.argsort(-total, kind="stable")[:NAME_LIMIT]
    return tuple(
        CallRow(name=columns.names[names[i]], calls=int(calls[i]), total_ns=int(total[i])) for i in order.tolist()
    )


def _by_name(name: Ints, time: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    """Names that occur, their number of events and their summed time."""
    calls = np.bincount(name, minlength=size)
    total = np.rint(np.bincount(name, weights=time, minlength=size)).astype(np.int64)
    present = np.flatnonzero(calls)
    return present, calls[present], total[present]
