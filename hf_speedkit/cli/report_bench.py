"""Files of results of benches, their table's place in a document, and the bar picture.

Renders; the arithmetic is in core/bench_table.py, the tables are in report_tables.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from hf_speedkit.cli.report_tables import markdown
from hf_speedkit.core.bench_records import BenchResult, bench_result, is_bench, missing_provenance
from hf_speedkit.core.bench_table import SPEED, UTILIZATION, BenchRow, by_workload, rows, shares
from hf_speedkit.core.errors import BenchError
from hf_speedkit.core.plot import Scale, number, pixel, rounded_up, ticks

BEGIN = "<!-- bench-table: begin, made by `make bench-table` -->"
BEGIN_WIDE = "<!-- bench-table: begin, every column, made by `make bench-table` -->"
END = "<!-- bench-table: end -->"
_WIDTH, _BAR, _GAP, _TOP = 800, 20, 12, 8.0
_RING, _RING_TEXT = "#d9780b", "#a1580a"
"""Of the rings, and darker for letters: 4.5 to 1 against white."""
_LETTER_PX = 6.7
"""Width of a letter of 12 px, a little more than the mean: names must fit before the bars."""


def bench_files(paths: Sequence[Path]) -> list[Path] | None:
    """The files that hold results of benches, folders searched; None where `paths` are something else.

    Raises:
        BenchError: some are results and some are not.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path] if path.suffix == ".json" else []
        found += [one for one in inside if is_bench(_values(one))]
        if found and not any(one.is_relative_to(path) for one in found):
            raise BenchError(f"{path} holds no result of a bench, and others do", mend="report them apart")
    return found or None


def read(paths: Iterable[Path]) -> list[BenchResult]:
    """Read results.

    Raises:
        BenchError: one cannot be read.
    """
    return [bench_result(_values(path) or {}, name=path.name) for path in paths]


def _values(path: Path) -> Mapping[str, object] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return None  # somebody else's file; one that was asked for by name is refused as no result
    return values if isinstance(values, dict) else None


def into(document: str, results: Sequence[BenchResult]) -> str:
    """A document with the tables of `results` between its two markers; the first says whether with every column.

    Raises:
        BenchError: a marker is missing.
    """
    marker = BEGIN_WIDE if BEGIN_WIDE in document else BEGIN
    before, begin, rest = document.partition(marker)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchError("the document has no place for the table", mend=f"put two lines into it: {BEGIN} and {END}")
    return f"{before}{marker}\n\n{markdown(results, wide=marker == BEGIN_WIDE)}\n{END}{after}"


def provenance_gaps(results: Sequence[BenchResult]) -> list[str]:
    """A line for each result that must not be committed, and what it lacks."""
    gaps = ((result, missing_provenance(result)) for result in results)
    return [f"{one.workload}, {one.name}, run {one.repetition}: no {', no '.join(gap)}" for one, gap in gaps if gap]


def bars(results: Sequence[BenchResult]) -> str:
    """Real tokens per second as an SVG picture: a group of bars for each workload, a line from least to most run.

    A ring on each bar's line is GPU utilisation, by the scale above, over the same width: it says little about the bar.
    """
    groups = {where: _without_items(ladder) for where, ladder in by_workload(rows(results)).items()}
    top = rounded_up(1.02 * max((_high(row) for of in groups.values() for row in of), default=1.0))
    names = 20 + _LETTER_PX * max((len(row.name) for of in groups.values() for row in of), default=0)
    x = Scale(0.0, top, names, _WIDTH - 70)
    rings = any(UTILIZATION in row.values for of in groups.values() for row in of)
    above = _TOP + (22 if rings else 0)
    drawn, y = [], above
    for workload, of in groups.items():
        y += 22
        drawn.append(f'<text x="8" y="{pixel(y - 7)}" font-weight="600">{escape(workload)}</text>')
        fastest = max(row.speed_per_device for row in of)
        for row in of:
            drawn += _bar(row, x, y, fastest)
            y += _BAR + _GAP
    lines = [
        f'<path d="M{pixel(x(at))} {pixel(above)}V{pixel(y)}" stroke="#dfe4ea"/>'
        f'<text x="{pixel(x(at))}" y="{pixel(y + 16)}" text-anchor="middle" fill="#5b6675">{number(at)}</text>'
        for at in ticks(0.0, top)
    ]
    lines += _percent_scale(x) if rings else []
    each = " and GPU" if any(row.ranks > 1 for of in groups.values() for row in of) else ""
    caption = (
        f'<text x="{pixel((x.start + x.end) / 2)}" y="{pixel(y + 34)}" text-anchor="middle" fill="#5b6675">'
        f"bars: real tokens per second{each}, median of the runs</text>"
    )
    height = pixel(y + 44)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="#1c2430">'
        f'<title>Real tokens per second</title><rect width="100%" height="100%" fill="#fff"/>'
        + "".join([*lines, *drawn, caption])
        + "</svg>\n"
    )


def _percent_scale(x: Scale) -> list[str]:
    """The rings' scale, above the bars and in their colour."""
    at = {percent: x.start + percent / 100 * (x.end - x.start) for percent in (0, 25, 50, 75, 100)}
    marks = [
        f'<text x="{pixel(where)}" y="28" text-anchor="middle" fill="{_RING_TEXT}">{percent}%</text>'
        for percent, where in at.items()
    ]
    title = f'<text x="{pixel(at[50])}" y="13" text-anchor="middle" fill="{_RING_TEXT}">rings: GPU utilisation</text>'
    return [title, *marks]


def _high(row: BenchRow) -> float:
    return row.values[SPEED].high / row.ranks if SPEED in row.values else 0.0


def _without_items(ladder: Sequence[BenchRow]) -> tuple[BenchRow, ...]:
    """Rows less one item each have a table of their own, and are close to one another: no picture for them."""
    apart = {share.without.name for share in shares(ladder)}
    return tuple(row for row in ladder if row.name not in apart)


def _bar(row: BenchRow, x: Scale, y: float, fastest: float) -> list[str]:
    middle, end = pixel(y + _BAR / 2), x(row.speed_per_device)
    colour = "#1f5fbf" if row.name.startswith("speedkit") else "#9aa5b1"
    weight = ' font-weight="600"' if row.speed_per_device == fastest else ""
    parts = [
        f'<text x="{pixel(x.start - 8)}" y="{pixel(y + 14)}" text-anchor="end">{escape(row.name)}</text>',
        f'<rect x="{pixel(x.start)}" y="{pixel(y)}" width="{pixel(end - x.start)}" height="{_BAR}" fill="{colour}"/>',
    ]
    spread = row.values.get(SPEED)
    if spread is not None and spread.runs > 1:
        parts.append(
            f'<path d="M{pixel(x(spread.low / row.ranks))} {middle}H{pixel(x(_high(row)))}" stroke="#1c2430"/>'
        )
        end = max(end, x(_high(row)))
    utilization = row.values.get(UTILIZATION)
    ring = x(x.low + utilization.median / 100 * (x.high - x.low)) if utilization is not None else None
    # The number stands clear of the ring.
    label = end + 6 if ring is None or not end - 8 < ring < end + 60 else max(end, ring + 6) + 6
    parts.append(f'<text x="{pixel(label)}" y="{pixel(y + 14)}"{weight}>{row.speed_per_device:,.0f}</text>')
    if ring is not None:
        parts.append(f'<circle cx="{pixel(ring)}" cy="{middle}" r="5" fill="#fff" stroke="{_RING}" stroke-width="2"/>')
    return parts
