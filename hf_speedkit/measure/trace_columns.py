"""Events sorted into columns: one numpy table per kind of event, 24 to 48 bytes an event.

Every schema from 2021 on is mapped here and nowhere else (kineto's output_json.cpp, and files in the wild). Only
complete events (`ph` X with a duration) are kept; counters, flows, instants and metadata rows carry nothing the tables
need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_speedkit.measure.trace_events import exact_ns, scalar_text
from hf_speedkit.measure.trace_reader import Piece

Ints = npt.NDArray[np.int64]

KIND_OF_CATEGORY = {
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "annotation",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "hip_runtime": "call",
    "hip_driver": "call",
    "xpu_runtime": "call",
    "xpu_driver": "call",
    "mtia_runtime": "call",
    "privateuse1_runtime": "call",
    "privateuse1_driver": "call",
    "runtime": "call",
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "gpu_user_annotation": "device_annotation",
    "python_function": "python",
    "overhead": "overhead",
}
"""Kind per lower-case category. Absent: cuda_sync (waiting, on device rows), Trace, counters, mtia_* device rows."""

DEVICE_KINDS = ("kernel", "memcpy", "memset")
KINDS = ("op", "annotation", "call", *DEVICE_KINDS, "device_annotation", "python", "overhead")

STEP_PREFIX = "ProfilerStep#"
_FRACTIONS_SAFE_US = float(1 << 43)  # below, a double holds a microsecond's thousandths to better than 0.5 ns
_LIMIT_US = float(1 << 52)
ABSENT = int(np.iinfo(np.int64).min)
"""Stands for an absent number in a column."""


@dataclass(frozen=True, slots=True)
class Table:
    """Complete events of one kind, in file order. All columns have one entry per event, in int64.

    Args:
        name: index into `Columns.names`.
        place: index into `Columns.places`: (pid, tid) of a host event, (device, stream) of a device event.
        start: start in ns.
        duration: length in ns, >= 0.
        correlation: number that pairs a launch call with its device events; `ABSENT` where there is none.
        sequence: autograd's number that pairs a forward operator with its backward; `ABSENT` likewise.
        stack: index into `Columns.names` of the call stack (2021 files); `ABSENT` likewise.
    """

    name: Ints
    place: Ints
    start: Ints
    duration: Ints
    correlation: Ints
    sequence: Ints
    stack: Ints

    @property
    def end(self) -> Ints:
        """End in ns."""
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)

    def where(self, chosen: npt.NDArray[Any]) -> Table:
        """The rows of a mask or of indices."""
        return Table(*(getattr(self, column)[chosen] for column in Table.__slots__))


@dataclass(frozen=True, slots=True)
class Columns:
    """All complete events of a file: a table per kind, with the names and places they point to."""

    tables: dict[str, Table]
    names: list[str]
    places: list[tuple[str, str]]
    categories: dict[str, int]
    complete_events: int
    dropped: int

    def table(self, *kinds: str) -> Table:
        """The rows of one or several kinds."""
        if len(kinds) == 1:
            return self.tables[kinds[0]]
        return concatenated([self.tables[kind] for kind in kinds])


class _Numbering(dict[Any, int]):
    """Consecutive numbers for keys, in order of appearance."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def read_columns(pieces: Iterable[Piece]) -> Columns:
    """Sort all events of a file into columns."""
    builder = _Builder()
    for piece in pieces:
        builder.add(piece)
        piece.events.clear()  # else two pieces are alive at once, and the allocator returns and fetches their pages
    return builder.finish()


class _Builder:
    """Collects column parts piece by piece."""

    def __init__(self) -> None:
        self._names = _Numbering()
        self._places = _Numbering()
        self._parts: dict[str, list[Table]] = {kind: [] for kind in KINDS}
        self._categories: Counter[str] = Counter()
        self._dropped = 0

    def add(self, piece: Piece) -> None:
        """Take the events of one piece."""
        by_category = _complete_by_category(piece.events)
        if any(_needs_exact(events) for events in by_category.values()):
            by_category = _complete_by_category(piece.exactly())
        for category, events in by_category.items():
            self._categories[category] += len(events)
            kind = KIND_OF_CATEGORY.get(category.lower())
            if category.lower() == "operator":
                # Until 2021-10 annotations were operators; the step marks are the ones that must not count as work.
                marks = [event for event in events if _is_step_mark(event)]
                self._append("annotation", marks)
                events = [event for event in events if not _is_step_mark(event)] if marks else events
            if kind is not None:
                self._append(kind, events)

    def _append(self, kind: str, events: list[Any]) -> None:
        if not events:
            return
        start, start_valid = _nanoseconds([event.ts for event in events])
        duration, duration_valid = _nanoseconds([event.dur for event in events])
        valid = start_valid & duration_valid & (duration >= 0)
        on_device = kind in DEVICE_KINDS
        table = Table(
            name=self._numbered_names(events),
            place=self._numbered_places(events, on_device),
            start=start,
            duration=duration,
            correlation=_whole(events, "correlation") if on_device or kind == "call" else _nothing(len(events)),
            sequence=_whole(events, "sequence") if kind == "op" else _nothing(len(events)),
            stack=self._stacks(events) if kind == "op" else _nothing(len(events)),
        )
        if not valid.all():
            self._dropped += int(len(events) - valid.sum())
            table = table.where(valid)
        self._parts[kind].append(table)

    def _numbered_names(self, events: list[Any]) -> Ints:
        names = self._names
        try:
            return _column([names[event.name] for event in events])
        except TypeError:  # a name that is a list or an object
            return _column([names[scalar_text(event.name)] for event in events])

    def _numbered_places(self, events: list[Any], on_device: bool) -> Ints:
        places = self._places
        if on_device:
            return _column([places[_device_place(event)] for event in events])
        try:
            return _column([places[event.pid, event.tid] for event in events])
        except TypeError:
            return _column(
                [places[scalar_text(event.pid, limit=64), scalar_text(event.tid, limit=64)] for event in events]
            )

    def _stacks(self, events: list[Any]) -> Ints:
        stacks = [None if event.args is None else event.args.stack for event in events]
        if not any(stacks):
            return _nothing(len(events))
        names = self._names
        return _column([names[scalar_text(stack, limit=1 << 16)] if stack else ABSENT for stack in stacks])

    def finish(self) -> Columns:
        """The tables, with names and threads spelt one way (2021 files mix 25738 and "25738")."""
        names, places = _Numbering(), _Numbering()
        # A call stack is longer than any name; what is in `_names` as text of that kind stays whole.
        name_of = _column([names[scalar_text(name, limit=1 << 16)] for name in self._names])
        place_of = _column([places[str(first), str(second)] for first, second in self._places])
        kinds = list(self._parts)
        return Columns(
            # Popped, so that the parts of one kind are gone before the next is joined.
            tables={kind: _renumbered(concatenated(self._parts.pop(kind)), name_of, place_of) for kind in kinds},
            names=list(names),
            places=list(places),
            categories=dict(self._categories),
            complete_events=sum(self._categories.values()),
            dropped=self._dropped,
        )


def _renumbered(table: Table, name_of: Ints, place_of: Ints) -> Table:
    if not len(table):
        return table
    stack = table.stack
    if (stack != ABSENT).any():
        stack = np.where(stack == ABSENT, ABSENT, name_of[np.maximum(stack, 0)])
    return Table(
        name=name_of[table.name],
        place=place_of[table.place],
        start=table.start,
        duration=table.duration,
        correlation=table.correlation,
        sequence=table.sequence,
        stack=stack,
    )


def _is_step_mark(event: Any) -> bool:
    return isinstance(event.name, str) and event.name.startswith(STEP_PREFIX)


def _complete_by_category(events: list[Any]) -> dict[str, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for event in events:
        if event.ph == "X" and event.dur is not None:
            try:
                found[event.cat].append(event)
            except KeyError:
                found[event.cat] = [event]
            except TypeError:  # a category that is a list or an object
                found.setdefault("", []).append(event)
    return {scalar_text(category, limit=64) if category is not None else "": same for category, same in found.items()}


def _needs_exact(events: list[Any]) -> bool:
    """Whether times are fractions that a double cannot hold (absolute times, written between 2024-01 and 2024-05).

    One writer wrote the whole file, so its first event tells.
    """
    first = events[0].ts
    return type(first) is float and _FRACTIONS_SAFE_US <= first < _LIMIT_US


def _nanoseconds(values: list[Any]) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Microseconds of a file as ns, and which of them are usable."""
    micro = _numeric(values)
    if micro is None:  # text, Decimal, None, numbers beyond 64 bits
        exact = [exact_ns(value) for value in values]
        return _column([0 if one is None else one for one in exact]), np.array([one is not None for one in exact])
    micro = micro.astype(np.float64)
    with np.errstate(invalid="ignore"):
        valid = np.abs(micro) <= _LIMIT_US  # False for NaN
    micro = np.where(valid, micro, 0.0)
    whole = np.floor(micro)
    # Whole and fraction apart: the product of the whole number with 1000 would round once more, by up to 0.5 ns.
    return whole.astype(np.int64) * 1000 + np.rint((micro - whole) * 1000.0).astype(np.int64), valid


def _whole(events: list[Any], argument: str) -> Ints:
    """An integer argument as a column; anything that is not one is `ABSENT`."""
    get = attrgetter("args." + argument)
    try:
        values = [get(event) for event in events]
    except AttributeError:  # an event without arguments
        values = [None if event.args is None else getattr(event.args, argument) for event in events]
    if values.count(None) == len(values):
        return _nothing(len(values))
    array = _numeric(values)
    if array is not None and array.dtype == np.int64:
        return array
    numbers = [
        int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value for value in values
    ]
    return _column([value if type(value) is int and -(1 << 62) < value < 1 << 62 else ABSENT for value in numbers])


def _numeric(values: list[Any]) -> npt.NDArray[Any] | None:
    """The values as an array of int64 or float64, or None when they are anything else."""
    try:
        array = np.array(values)
    except ValueError:  # lists of unequal length among them
        return None
    return array if array.ndim == 1 and array.dtype in (np.int64, np.float64) else None


def _device_place(event: Any) -> tuple[str, str]:
    args = event.args
    device = args.device if args is not None and args.device is not None else event.pid
    stream = args.stream if args is not None and args.stream is not None else event.tid
    return str(device)[:64], str(stream)[:64].removeprefix("stream ")


def _column(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _nothing(length: int) -> Ints:
    """A column without a value: one number, seen `length` times."""
    return np.broadcast_to(np.int64(ABSENT), (length,))


def concatenated(parts: list[Table]) -> Table:
    """The rows of all parts; an empty table for none."""
    if not parts:
        return Table(*(np.empty(0, dtype=np.int64) for _ in Table.__slots__))
    return Table(*(_joined([getattr(part, column) for part in parts]) for column in Table.__slots__))


def _joined(columns: list[Ints]) -> Ints:
    if all(column.strides == (0,) for column in columns):
        return _nothing(sum(map(len, columns)))
    return np.concatenate(columns)
