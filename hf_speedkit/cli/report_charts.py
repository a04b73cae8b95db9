"""The curves of the report as SVG. Renders; the arithmetic is in `core/plot.py` and `core/run_report.py`.

Every chart is drawn twice, wide and narrow, and the page's style shows the one that fits: scaling one drawing would
make its text too small for a phone or its lines too thick for a desk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hf_speedkit.core.plot import Scale, bar_path, duration, level_path, number, pixel, rounded_up, thin, ticks
from hf_speedkit.core.plot import time_ticks as x_ticks
from hf_speedkit.core.printable import printable
from hf_speedkit.core.run_report import PARTS, Level, Mark, PartsLevel, RunReport, merged_parts

NARROW_PX = 350
_Y_TICKS = 4
_RIGHT_MARGIN_PX = 14
_MOST_HINTS = 160
_MOST_BARS = 240
_PART_CLASSES = ("p0", "p1", "p2", "p3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve: what the legend calls it, its class in the style sheet, its levels, its axis."""

    label: str
    style: str
    levels: tuple[Level, ...]
    right: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart of one run.

    Args:
        title: what it shows.
        unit: of the left axis. right_unit: of the right one.
        curves: what is drawn, in order.
        top: end of the left axis. bottom: its begin. right_top: end of the right axis; None for none.
        parts: stacked bars instead of levels.
        height: in pixels.
        named: the legend is shown for a single curve as well.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    top: float
    bottom: float = 0.0
    right_unit: str = ""
    right_top: float | None = None
    parts: tuple[PartsLevel, ...] = ()
    height: int = 220
    named: bool = False


def text(words: object, *, width: int | None = None) -> str:
    """A stranger's text for the page: no control characters, no markup."""
    return escape(printable(str(words), width=width))


def figure(chart: Chart, run: RunReport, *, wide_px: int, duration_s: float) -> str:
    """A chart with title and legend, wide and narrow.

    Args:
        chart: what to draw.
        run: whose marks are drawn behind it.
        wide_px: width of the wide drawing.
        duration_s: end of the time axis.
    """
    drawings = "".join(
        f'<div class="{kind}">{_svg(chart, run, width, duration_s, hints=kind == "wide")}</div>'
        for kind, width in (("wide", wide_px), ("narrow", NARROW_PX))
    )
    return f"<figure><figcaption><b>{text(chart.title)}</b>{_legend(chart)}</figcaption>{drawings}</figure>"


def axis_top(values: Sequence[float]) -> float:
    """End of an axis from 0 that holds these values, with a little room above."""
    return rounded_up(1.04 * max(values, default=0.0), _Y_TICKS)


def axis_range(values: Sequence[float]) -> tuple[float, float]:
    """Begin and end of an axis that need not begin at 0 (a loss): round numbers around the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high <= low:
        return low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    marks = ticks(low, high, _Y_TICKS)
    step = marks[1] - marks[0] if len(marks) > 1 else high - low
    return (min(marks[0], low) if marks[0] <= low else marks[0] - step), max(
        marks[-1] + (step if marks[-1] < high else 0), high
    )


def _legend(chart: Chart) -> str:
    if len(chart.curves) == 1 and not chart.parts and not chart.named:
        return ""  # the title says it
    entries = [(curve.style, curve.label) for curve in chart.curves]
    entries += list(zip(_PART_CLASSES, PARTS, strict=True)) if chart.parts else []
    return "".join(f'<span class="key"><i class="{style}"></i>{text(label)}</span>' for style, label in entries)


def _svg(chart: Chart, run: RunReport, width: int, duration_s: float, *, hints: bool) -> str:
    left, right = 58, width - (46 if chart.right_top is not None else _RIGHT_MARGIN_PX)
    top, bottom = 20, chart.height - 34
    x = Scale(0.0, duration_s, left, right)
    y = Scale(chart.bottom, chart.top, bottom, top)
    percent = Scale(0.0, chart.right_top or 1.0, bottom, top)
    parts = [
        f'<svg viewBox="0 0 {width} {chart.height}" role="img" aria-label="{text(chart.title)}">',
        *_marks(run, x, top, bottom),
        *_axes(chart, x, y, percent),
        *_bars(chart, x, y),
        *(
            f'<path class="line {curve.style}" d="'
            f'{level_path(thin(curve.levels, x, right - left), x, percent if curve.right else y)}"/>'
            for curve in chart.curves
        ),
        *(_hints(chart, x, top, bottom) if hints else ()),
        "</svg>",
    ]
    return "".join(parts)


def _marks(run: RunReport, x: Scale, top: int, bottom: int) -> list[str]:
    drawn = []
    for mark, style in (*((one, "out") for one in run.excluded), *((one, "pause") for one in run.pauses)):
        # At least 2 px, so that one step of ten thousand is seen.
        width = max(2.0, x(mark.end) - x(mark.start))
        drawn.append(
            f'<rect class="{style}" x="{pixel(x(mark.start))}" y="{top}" width="{pixel(width)}" '
            f'height="{bottom - top}"><title>{_mark_words(mark, style)}</title></rect>'
        )
    for at, step in run.resumed:
        words = f"resumed after step {step:,}"
        drawn.append(f'<path class="resumed" d="M{pixel(x(at))} {top}V{bottom}"><title>{words}</title></path>')
    return drawn


def _mark_words(mark: Mark, style: str) -> str:
    length = duration(mark.end - mark.start)
    return f"{text(mark.what)}, {length}" + (": in no rate" if style == "out" else "")


def _axes(chart: Chart, x: Scale, y: Scale, percent: Scale) -> list[str]:
    bottom, top = y.start, y.end
    drawn = [f'<text class="unit" x="4" y="12">{text(chart.unit)}</text>']
    for value in ticks(chart.bottom, chart.top, _Y_TICKS):
        at = pixel(y(value))
        drawn.append(f'<path class="grid" d="M{pixel(x.start)} {at}H{pixel(x.end)}"/>')
        drawn.append(
            f'<text class="tick end" x="{pixel(x.start - 6)}" y="{pixel(y(value) + 4)}">{number(value)}</text>'
        )
    if chart.right_top is not None:
        drawn.append(f'<text class="unit end util-text" x="{pixel(x.end + 44)}" y="12">{text(chart.right_unit)}</text>')
        for value in ticks(0.0, chart.right_top, _Y_TICKS):
            at, height = pixel(x.end + 6), pixel(percent(value) + 4)
            drawn.append(f'<text class="tick util-text" x="{at}" y="{height}">{number(value)}</text>')
    for seconds in x_ticks(x.high, max(2, round((x.end - x.start) / 110))):
        at = pixel(x(seconds))
        words = "0" if seconds == 0 else duration(seconds)
        drawn.append(f'<path class="grid" d="M{at} {pixel(bottom)}v4"/>')
        # About 7 px a character: a label in the middle of the last tick must not run out of the picture.
        fits = x(seconds) + 3.5 * len(words) < x.end + _RIGHT_MARGIN_PX
        place = f'class="tick mid" x="{at}"' if fits else f'class="tick end" x="{pixel(x.end + _RIGHT_MARGIN_PX - 2)}"'
        drawn.append(f'<text {place} y="{pixel(bottom + 17)}">{words}</text>')
    drawn.append(f'<path class="frame" d="M{pixel(x.start)} {pixel(bottom)}H{pixel(x.end)}"/>')
    middle = pixel((x.start + x.end) / 2)
    drawn.append(f'<text class="unit mid" x="{middle}" y="{pixel(bottom + 31)}">elapsed time of the run</text>')
    return drawn if top < bottom else []


def _bars(chart: Chart, x: Scale, y: Scale) -> list[str]:
    levels = [one for one in merged_parts(chart.parts, _MOST_BARS) if one.parts is not None] if chart.parts else []
    drawn = []
    for index, style in enumerate(_PART_CLASSES if levels else ()):
        bars = [
            (x(one.start), x(one.end), y(sum(one.parts[:index])), y(sum(one.parts[: index + 1])))
            for one in levels
            if one.parts is not None
        ]
        drawn.append(f'<path class="bar {style}" d="{bar_path(bars)}"/>')
    return drawn


def _hints(chart: Chart, x: Scale, top: int, bottom: int) -> list[str]:
    """Invisible columns that say the values under the pointer; none where they would be too narrow to hit."""
    rows = [curve.levels for curve in chart.curves]
    if not rows or len(rows[0]) > _MOST_HINTS:
        return []
    drawn = []
    for values in zip(*rows, strict=False):
        known = [
            f"{curve.label} {number(level.value)} {chart.right_unit if curve.right else chart.unit}"
            for curve, level in zip(chart.curves, values, strict=False)
            if level.value is not None
        ]
        width = x(values[0].end) - x(values[0].start)
        if known and width > 0:
            words = text(f"{duration(values[0].start)} to {duration(values[0].end)}: " + ", ".join(known))
            drawn.append(
                f'<rect class="hint" x="{pixel(x(values[0].start))}" y="{top}" width="{pixel(width)}" '
                f'height="{bottom - top}"><title>{words}</title></rect>'
            )
    return drawn
