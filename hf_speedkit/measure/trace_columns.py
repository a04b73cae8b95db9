"""Events sorted into columns: one numpy table per kind of event, 24 to 48 bytes an event.

Every schema from 2021 on is mapped here and nowhere else (facts: traces.md section 2). Only complete events (`ph` X
with a duration) are kept; counters, flows, instants and metadata rows carry nothing the tables need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
_NONE = np.iinfo(np.int64).min
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


ABSENT = int(_NONE)


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
            if kind == "op":
                self._add_operators(events)
            elif kind is not None:
                self._append(kind, events)

    def _add_operators(self, events: list[Any]) -> None:
        # Before 2021-10 annotations were operators; the step marks are the ones that must not count as work.
        marks = [event for event in events if type(event.name) is str and event.name.startswith(STEP_PREFIX)]
        if marks:
            self._append("annotation", marks)
            events = [event for event in events if not (type(event.name) is str and event.name.startswith(STEP_PREFIX))]
        self._append("op", events)

    def _append(self, kind: str, events: list[Any]) -> None:
        if not events:
            return
        start, start_valid = _nanoseconds([event.ts for event in events])
        duration, duration_valid = _nanoseconds([event.dur for event in events])
        valid = start_valid & duration_valid & (duration >= 0)
        names = self._names
        args = [event.args for event in events]
        on_device = kind in DEVICE_KINDS
        table = Table(
            name=_column([names[_text(event.name)] for event in events]),
            place=_column(self._places_of(events, on_device)),
            start=start,
            duration=duration,
            correlation=_whole(args, "correlation") if on_device or kind == "call" else _nothing(len(events)),
            sequence=_whole(args, "sequence") if kind == "op" else _nothing(len(events)),
            stack=self._stacks(args) if kind == "op" else _nothing(len(events)),
        )
        if not valid.all():
            self._dropped += int(len(events) - valid.sum())
            table = table.where(valid)
        self._parts[kind].append(table)

    def _places_of(self, events: list[Any], on_device: bool) -> list[int]:
        places = self._places
        if not on_device:
            return [places[event.pid, event.tid] for event in map(_hashable, events)]
        return [places[_device_place(event)] for event in events]

    def _stacks(self, args: list[Any]) -> Ints:
        names = self._names
        return _column(
            [ABSENT if one is None or not one.stack else names[scalar_text(one.stack, limit=1 << 16)] for one in args]
        )

    def finish(self) -> Columns:
        """The tables, with threads spelt one way (2021 files mix 25738 and "25738")."""
        places: _Numbering = _Numbering()
        merged = _column([places[str(first), str(second)] for first, second in self._places])
        tables = {}
        for kind, parts in self._parts.items():
            table = concatenated(parts)
            tables[kind] = Table(
                table.name,
                merged[table.place] if len(table) else table.place,
                *(getattr(table, column) for column in Table.__slots__[2:]),
            )
        return Columns(
            tables=tables,
            names=list(self._names),
            places=list(places),
            categories=dict(self._categories),
            complete_events=sum(self._categories.values()),
            dropped=self._dropped,
        )


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
    try:
        if any(type(value) is not float and type(value) is not int for value in values):
            raise TypeError  # text, Decimal, bool, None
        micro = np.array(values, dtype=np.float64)
    except (TypeError, OverflowError):
        exact = [exact_ns(value) for value in values]
        return _column([ABSENT if one is None else one for one in exact]), np.array([one is not None for one in exact])
    with np.errstate(invalid="ignore"):
        valid = np.abs(micro) <= _LIMIT_US  # False for NaN
    micro = np.where(valid, micro, 0.0)
    whole = np.floor(micro)
    # Whole and fraction apart: the product of the whole number with 1000 would round once more, by up to 0.5 ns.
    return whole.astype(np.int64) * 1000 + np.rint((micro - whole) * 1000.0).astype(np.int64), valid


def _whole(args: list[Any], attribute: str) -> Ints:
    """An integer argument as a column; anything that is not one is `ABSENT`."""
    get: Callable[[Any], Any] = lambda one: None if one is None else getattr(one, attribute)  # noqa: E731
    values = [get(one) for one in args]
    return _column([value if type(value) is int and -(1 << 62) < value < 1 << 62 else ABSENT for value in values])


def _text(name: Any) -> str:
    return name if type(name) is str and len(name) <= 4096 and name.isascii() else scalar_text(name)


def _hashable(event: Any) -> Any:
    if type(event.tid) is list or type(event.pid) is list or isinstance(event.tid, dict) or isinstance(event.pid, dict):
        event.pid, event.tid = str(event.pid)[:64], str(event.tid)[:64]
    return event


def _device_place(event: Any) -> tuple[str, str]:
    args = event.args
    device = args.device if args is not None and args.device is not None else event.pid
    stream = args.stream if args is not None and args.stream is not None else event.tid
    return str(device)[:64], str(stream)[:64].removeprefix("stream ")


def _column(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _nothing(length: int) -> Ints:
    return np.full(length, _NONE, dtype=np.int64)


def concatenated(parts: list[Table]) -> Table:
    """The rows of all parts; an empty table for none."""
    if not parts:
        return Table(*(np.empty(0, dtype=np.int64) for _ in Table.__slots__))
    return Table(*(np.concatenate([getattr(part, column) for part in parts]) for column in Table.__slots__))
