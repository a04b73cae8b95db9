"""Pictures as arithmetic: scales, ticks, and SVG paths with gaps. Knows no page, no colour and no run.

Coordinates are rounded to 0.1 px: finer is not seen, and a page of 10,000 windows stays small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_speedkit.core.run_report import Level

_CLOCK_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear scale: `low`..`high` of the data become `start`..`end` in pixels (start > end turns it over)."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value; values outside end at the edge."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Round numbers (1, 2 or 5 times a power of ten) from low to high, about `count` of them."""
    if not high > low:
        return (low,)
    return _multiples(low, high, _step(high - low, count))


def time_ticks(high_s: float, count: int = 6) -> tuple[float, ...]:
    """Round times from 0: whole seconds, minutes, hours, days; below 6 s decimal ones."""
    raw = high_s / max(1, count)
    if raw <= 1:
        return ticks(0.0, high_s, count)
    step = next((float(one) for one in _CLOCK_STEPS_S if one >= raw), None)
    return _multiples(0.0, high_s, step if step is not None else 86400.0 * math.ceil(raw / 86400))


def rounded_up(high: float, count: int = 5) -> float:
    """The smallest round number that is not below `high`: the end of an axis from 0, so that its last tick is there."""
    if high <= 0:
        return 1.0
    step = _step(high, count)
    return step * max(1, math.ceil(high / step - 1e-8))


def number(value: float) -> str:
    """A number for an axis or a table: thousands apart, at most three digits after the point, no "-0"."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e15 or size < 1e-4:
        return f"{value:.2e}"
    digits = 0 if size >= 1000 else max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """A time in words: 0.25 s, 41 s, 3 min 5 s, 2 h 10 min, 1 d 4 h."""
    if seconds < 60:
        return f"{number(seconds)} s"
    for size, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            whole, rest = divmod(round(seconds / below), size // below)
            return f"{whole:,} {name}" + (f" {rest} {small}" if rest else "")
    return f"{number(seconds)} s"


def thin(levels: Sequence[Level], x: Scale, columns: int) -> tuple[tuple[Level, ...], ...]:
    """Levels as unbroken stretches, none with more than four levels a column of pixels.

    A gap ends a stretch. Of the levels in a column the first, least, largest and last stay: the picture is the same,
    peaks included.
    """
    stretches: list[tuple[Level, ...]] = []
    run: list[Level] = []
    for level in (*levels, Level(0.0, 0.0, None)):
        broken = bool(run) and level.start > run[-1].end + 1e-3 * (x.high - x.low)
        if run and (level.value is None or broken):
            stretches.append(_thin_stretch(run, x, columns))
            run = []
        if level.value is not None:
            run.append(level)
    return tuple(stretches)


def _thin_stretch(run: Sequence[Level], x: Scale, columns: int) -> tuple[Level, ...]:
    if len(run) <= 4 * columns:
        return tuple(run)
    width = abs(x.end - x.start) / columns
    kept: list[Level] = []
    column: list[Level] = []
    for level in run:
        if column and int(x(level.start) / width) != int(x(column[0].start) / width):
            kept += _extremes(column)
            column = []
        column.append(level)
    return (*kept, *_extremes(column))


def _extremes(column: Sequence[Level]) -> Iterable[Level]:
    values = [level.value or 0.0 for level in column]
    at = {0, len(column) - 1, values.index(min(values)), values.index(max(values))}
    return [column[index] for index in sorted(at)]


def level_path(stretches: Sequence[Sequence[Level]], x: Scale, y: Scale) -> str:
    """One SVG path: every stretch a staircase of its own, nothing between stretches."""
    parts: list[str] = []
    for stretch in stretches:
        for index, level in enumerate(stretch):
            height = pixel(y(level.value or 0.0))
            parts.append(f"V{height}" if index else f"M{pixel(x(level.start))} {height}")
            parts.append(f"H{pixel(x(level.end))}")
    return "".join(parts)


def bar_path(bars: Iterable[tuple[float, float, float, float]]) -> str:
    """One SVG path of rectangles (left, right, low, high, in pixels); those without height are left out."""
    return "".join(
        f"M{pixel(left)} {pixel(low)}V{pixel(high)}H{pixel(right)}V{pixel(low)}Z"
        for left, right, low, high in bars
        if pixel(low) != pixel(high)
    )


def pixel(value: float) -> str:
    """A coordinate, rounded to 0.1."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")


def _step(length: float, count: int) -> float:
    """The least of 1, 2, 5 times a power of ten that cuts a length into at most `count` parts."""
    raw = max(1e-300, length / max(1, count) * (1 - 1e-9))  # log10 needs more than 0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= raw)


def _multiples(low: float, high: float, step: float) -> tuple[float, ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(step * index for index in range(first, min(last, first + 100) + 1))
