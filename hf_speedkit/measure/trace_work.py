"""Device work joined with the calls that launched it, and the moments that matter to both: steps and window."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hf_speedkit.core.kernel_groups import (
    COMMUNICATION,
    MASK_BUILDING,
    OTHER,
    blocks_host,
    builds_masks,
    kernel_group,
    loads_data,
    starts_work,
)
from hf_speedkit.measure.trace_columns import ABSENT, DEVICE_KINDS, STEP_PREFIX, Columns, Table, concatenated
from hf_speedkit.measure.trace_intervals import Intervals, Lanes, Nesting, union
from hf_speedkit.measure.trace_losses import cut_overruns

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Item = TypeVar("Item", bound=np.generic)

NAME_LIMIT = 20_000
"""Names kept apart in a table, largest first. A real step has some hundreds; a damaged file can have millions."""

STEP_LIMIT = 10_000
DEVICE_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Work:
    """Device events and their launch calls.

    Args:
        events: kernels, memcpy and memset in one table.
        kind: index into `DEVICE_KINDS` per event.
        group: index into `groups` per event.
        groups: group names.
        device: index into `devices` per event.
        devices: device names, in order of the number of events; those beyond the limit are left out (-1).
        calls: runtime and driver calls.
        call: index of its launch call per event, -1 for none in the file.
        launches: per call, whether it started device work.
        cut: events that were ended where the next of their stream begins (`trace_losses.cut_overruns`).
    """

    events: Table
    kind: Ints
    group: Ints
    groups: tuple[str, ...]
    device: Ints
    devices: tuple[str, ...]
    calls: Table
    call: Ints
    launches: Mask
    cut: int = 0

    @property
    def known(self) -> bool:
        """Whether the file says anything about a device."""
        return len(self.events) > 0

    @property
    def communication(self) -> Mask:
        """Per event, whether it is a communication kernel."""
        return (
            np.asarray(self.group == self.groups.index(COMMUNICATION))
            if COMMUNICATION in self.groups
            else self.kind < 0
        )

    def launched_at(self) -> Ints:
        """Start of its launch call per event; of the event itself where that call is not in the file."""
        return np.where(self.call >= 0, _take(self.calls.start, self.call), self.events.start)

    def busy(self, chosen: Mask) -> Intervals:
        """Union of the chosen events."""
        return union(self.events.start[chosen], self.events.end[chosen])


def join_work(columns: Columns) -> Work:
    """Pair device events with the calls that launched them, by correlation; name their groups."""
    events, cut = cut_overruns(columns.table(*DEVICE_KINDS), columns)
    kind = np.repeat(np.arange(len(DEVICE_KINDS)), [len(columns.table(one)) for one in DEVICE_KINDS]).astype(np.int64)
    calls = columns.table("call")
    call = _launch_calls(events, calls)
    named = np.array([starts_work(name) for name in columns.names], dtype=bool)
    started = np.zeros(len(calls), dtype=bool)
    started[call[call >= 0]] = True
    group, groups = _groups(columns, events, kind)
    group, groups = _mark_mask_building(columns, calls, call, group, groups)
    device, devices = _devices(columns, events)
    launches = started | named[calls.name] if len(calls) else started
    return Work(events, kind, group, groups, device, devices, calls, call, launches, cut)


def _launch_calls(events: Table, calls: Table) -> Ints:
    numbered = np.flatnonzero(calls.correlation != ABSENT)
    if not len(numbered) or not len(events):
        return np.full(len(events), -1, dtype=np.int64)
    # Of several calls with one number (merged files) the earliest counts.
    numbered = numbered[np.lexsort((calls.start[numbered], calls.correlation[numbered]))]
    keys = calls.correlation[numbered]
    at = np.minimum(np.searchsorted(keys, events.correlation), len(keys) - 1)
    return np.where((keys[at] == events.correlation) & (events.correlation != ABSENT), numbered[at], -1)


def _groups(columns: Columns, events: Table, kind: Ints) -> tuple[Ints, tuple[str, ...]]:
    numbers: dict[str, int] = {OTHER: 0}
    of_pair = {}
    pairs = kind * len(columns.names) + events.name
    distinct, counts = np.unique(pairs, return_counts=True)
    for pair in distinct[np.argsort(-counts, kind="stable")][:NAME_LIMIT].tolist():
        kind_index, name = divmod(pair, len(columns.names))
        group = kernel_group(columns.names[name], DEVICE_KINDS[kind_index])
        of_pair[pair] = numbers.setdefault(group, len(numbers))
    lookup = np.array([of_pair.get(pair, 0) for pair in distinct.tolist()], dtype=np.int64)
    return (lookup[np.searchsorted(distinct, pairs)] if len(pairs) else pairs), tuple(numbers)


def _mark_mask_building(
    columns: Columns, calls: Table, call: Ints, group: Ints, groups: tuple[str, ...]
) -> tuple[Ints, tuple[str, ...]]:
    """Kernels launched inside a range that builds attention masks form a group of their own (case V60)."""
    ranges = named_ranges(columns, builds_masks)
    if not len(ranges) or not len(calls):
        return group, groups
    lanes = Lanes(len(columns.places), ranges.start, ranges.end)
    nesting = Nesting(lanes.shift(ranges.place, ranges.start), lanes.shift(ranges.place, ranges.end))
    inside = nesting.enclosing(lanes.shift(calls.place, calls.start)) >= 0
    groups = (*groups, MASK_BUILDING)
    return np.where((call >= 0) & _take(inside, call), len(groups) - 1, group), groups


def _devices(columns: Columns, events: Table) -> tuple[Ints, tuple[str, ...]]:
    numbers: dict[str, int] = {}
    of_place = np.array([numbers.setdefault(device, len(numbers)) for device, _ in columns.places], dtype=np.int64)
    if not len(events):
        return np.empty(0, dtype=np.int64), ()
    raw = of_place[events.place]
    names = list(numbers)
    counts = np.bincount(raw, minlength=len(names))
    order = [index for index in np.argsort(-counts, kind="stable").tolist() if counts[index]][:DEVICE_LIMIT]
    order.sort(key=lambda index: (len(names[index]), names[index]))
    rank = np.full(len(names), -1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[raw], tuple(names[index] for index in order)


def named_ranges(columns: Columns, wanted: Callable[[str], bool]) -> Table:
    """Annotations, Python functions and operators whose name passes `wanted`."""
    passes = np.array([wanted(name) for name in columns.names], dtype=bool)
    return concatenated(
        [table.where(passes[table.name]) for table in map(columns.table, ("annotation", "python", "op")) if len(table)]
    )


_STEP = re.compile(re.escape(STEP_PREFIX) + r"\d+")


@dataclass(frozen=True, slots=True)
class Steps:
    """The marked steps of a file, by start. `cut_off` marks beyond the limit were left out."""

    label: tuple[str, ...]
    start: Ints
    end: Ints
    cut_off: int

    def __len__(self) -> int:
        return len(self.label)

    def of(self, times: Ints) -> Ints:
        """Index of the step each time falls into, -1 for none."""
        if not len(self):
            return np.full(len(times), -1, dtype=np.int64)
        index = np.searchsorted(self.start, times, side="right") - 1
        return np.where((index >= 0) & (times < _take(self.end, index)), index, -1)


def find_steps(columns: Columns, complete: int | None = None) -> Steps:
    """Step marks on the host. Their name also appears on the device (gpu_user_annotation), where it means nothing.

    Args:
        columns: the events.
        complete: marks that ended, where the recorder says so: a recording cut short ends inside its last mark.
    """
    marks = columns.table("annotation")
    is_step = np.array([_STEP.fullmatch(name) is not None for name in columns.names], dtype=bool)
    marks = marks.where(is_step[marks.name]) if len(marks) else marks
    order = np.argsort(marks.start, kind="stable")
    kept = marks.where(order[: STEP_LIMIT if complete is None else min(complete, STEP_LIMIT)])
    return Steps(
        label=tuple(columns.names[name] for name in kept.name.tolist()),
        start=kept.start,
        end=kept.end,
        cut_off=max(0, len(order) - STEP_LIMIT),
    )


@dataclass(frozen=True, slots=True)
class Host:
    """What the host did, as far as it matters to the device: on threads that launch or load data.

    Args:
        data: waits for batches.
        sync: blocking calls, as a table sorted by start.
        calls: all runtime and driver calls.
        operators: operators.
    """

    data: Intervals
    sync: Table
    calls: Intervals
    operators: Intervals


def host_activity(columns: Columns, work: Work) -> Host:
    """Host activity as unions over the threads that feed the device."""
    data = named_ranges(columns, loads_data)
    feeding = np.zeros(max(1, len(columns.places)), dtype=bool)
    feeding[work.calls.place[work.launches]] = True
    feeding[data.place] = True
    calls = work.calls.where(feeding[work.calls.place])
    blocking = np.array([blocks_host(name) for name in columns.names], dtype=bool)
    sync = calls.where(blocking[calls.name]) if len(calls) else calls
    operators = columns.table("op")
    operators = operators.where(feeding[operators.place])
    return Host(
        data=union(data.start, data.end),
        sync=sync.where(np.argsort(sync.start, kind="stable")),
        calls=union(calls.start, calls.end),
        operators=union(operators.start, operators.end),
    )


def _take(values: npt.NDArray[Item], index: Ints) -> npt.NDArray[Item]:
    """`values[index]` where -1 stands for "none": any value, to be masked by the caller."""
    return values[np.maximum(index, 0)] if len(values) else np.zeros(len(index), dtype=values.dtype)
