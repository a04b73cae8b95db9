"""Results of benches as a Markdown table and a bar picture. Renders; the arithmetic is in core/bench_table.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from hf_speedkit.core.bench_records import BenchResult, bench_result, is_bench, missing_provenance
from hf_speedkit.core.bench_table import SPEED, UTILIZATION, BenchRow, Spread, by_workload, device_groups, rows
from hf_speedkit.core.errors import BenchError
from hf_speedkit.core.plot import Scale, number, pixel, rounded_up, ticks

BEGIN, END = "<!-- bench-table: begin, made by `make bench-table` -->", "<!-- bench-table: end -->"
_WIDTH, _BAR, _GAP = 800, 20, 12
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


def markdown(results: Sequence[BenchResult], *, wide: bool = True) -> str:
    """A table for each workload, the slowest first, and a line on where it was measured.

    Args:
        results: what to show.
        wide: every column, as on a terminal; else those that a document has room for.
    """
    found = rows(results)
    parts = [_table(workload, of, wide) for workload, of in by_workload(found).items()]
    if wide:
        parts += [_groups(workload, of) for workload, of in device_groups(results).items()]
    parts.append(_footer(results, found))
    return "\n\n".join(parts) + "\n"


def into(document: str, table: str) -> str:
    """A document with the table between its two markers.

    Raises:
        BenchError: a marker is missing.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchError("the document has no place for the table", mend=f"put two lines into it: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def provenance_gaps(results: Sequence[BenchResult]) -> list[str]:
    """A line for each result that must not be committed, and what it lacks."""
    gaps = ((result, missing_provenance(result)) for result in results)
    return [f"{one.workload}, {one.name}, run {one.repetition}: no {', no '.join(gap)}" for one, gap in gaps if gap]


def _of(column: str, digits: int, *, factor: float = 1.0) -> Callable[[BenchRow], str]:
    return lambda row: _number(row.values.get(column), digits, factor)


_TABLE: Mapping[str, Callable[[BenchRow], str]] = {
    "median step's": _of("median_step_tokens_per_second", 0),
    "MFU %": _of("mfu", 1),
    "HFU %": _of("hfu", 1),
    "launches a step": _of("launches", 0),
    "host waits a step": _of("host_waits", 0),
    "step ms": _of("step_time_s", 0, factor=1000),
    "host ms": _of("host_time_s", 0, factor=1000),
    "device ms": _of("device_time_s", 0, factor=1000),
    "data wait ms": _of("data_wait_s", 1, factor=1000),
    "real / slots": _of("packing_efficiency", 2),
    "start-up s": _of("startup_s", 1),
    "first step s": _of("first_step_s", 1),
    "peak GiB": _of("peak_memory_gib", 1),
    "GPU util. %": _of("gpu_utilization", 0),
    "W": _of("gpu_power_w", 0),
}
_LEFT_OUT = ("step ms", "data wait ms", "host waits a step", "start-up s", "first step s")


def _table(workload: str, found: Sequence[BenchRow], wide: bool) -> str:
    shown = {head: [of(row) for row in found] for head, of in _TABLE.items() if wide or head not in _LEFT_OUT}
    shown = {head: cells for head, cells in shown.items() if any(cells)}
    heads = [f"`{workload}`", "runs", "real tokens/s", "times the first", *shown]
    lines = [" | ".join(heads), " | ".join(["---", *("--:" for _ in heads[1:])])]
    first = found[0].speed
    for index, row in enumerate(found):
        times = f"{row.speed / first:.2f}" if first else ""
        cells = [row.name, str(row.runs), _speed(row), times, *(column[index] for column in shown.values())]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def _groups(workload: str, by_name: Mapping[str, Mapping[str, float]]) -> str:
    """Where the device's time goes: groups of kernels by row, what was measured by column."""
    totals = {group: 0.0 for groups in by_name.values() for group in groups}
    for groups in by_name.values():
        for group, seconds in groups.items():
            totals[group] += seconds
    heads = [f"`{workload}`: device ms of the traced step", *by_name]
    lines = [" | ".join(heads), " | ".join(["---", *("--:" for _ in by_name)])]
    for group in sorted(totals, key=lambda one: -totals[one]):
        cells = (f"{groups[group] * 1000:,.1f}" if group in groups else "" for groups in by_name.values())
        lines.append(" | ".join([group, *cells]))
    return "\n".join(f"| {line} |" for line in lines)


def _speed(row: BenchRow) -> str:
    spread = row.values.get(SPEED)
    if spread is None:
        return ""
    median = f"**{spread.median:,.0f}**"
    return median if spread.runs == 1 else f"{median} ({spread.low:,.0f} - {spread.high:,.0f})"


def _number(spread: Spread | None, digits: int, factor: float) -> str:
    return "" if spread is None else f"{spread.median * factor:,.{digits}f}"


def _footer(results: Sequence[BenchResult], found: Sequence[BenchRow]) -> str:
    """Where it was measured, once, and whether that was the same for all."""
    machines = dict.fromkeys(f"{_machine(result)}" for result in results)
    commits = dict.fromkeys(commit[:10] + commit[40:] for row in found for commit in row.commits)
    lines = [
        "Medians over runs, each in a process of its own; least and most in brackets. Real tokens/s: tokens of "
        "documents in all steady steps over their time; the median step's: what a step does when nothing compiles.",
        "; ".join(machines) + f". Commit {', '.join(commits) or 'unknown'}.",
    ]
    if len(machines) > 1:
        lines.append("The runs are not of one machine: compare with care.")
    return " ".join(lines)


def _machine(result: BenchResult) -> str:
    where, packages = result.environment, result.environment.packages
    devices = f"{len(where.devices)} x {where.devices[0]}" if where.devices else f"{where.cpu_count} CPU cores"
    driver = f", driver {where.driver}" if where.driver else ""
    names = ("torch", "triton", "transformers", "trl", "flash-linear-attention", "causal-conv1d", "liger-kernel")
    return f"{devices}{driver}, " + ", ".join(f"{name} {packages[name]}" for name in names if name in packages)


def bars(results: Sequence[BenchResult]) -> str:
    """Real tokens per second as an SVG picture: a group of bars for each workload, a line from least to most run.

    A ring on each bar's line is GPU utilisation, 0 to 100 % over the same width: it says little about the bar.
    """
    groups = by_workload(rows(results))
    top = rounded_up(1.02 * max((_high(row) for of in groups.values() for row in of), default=1.0))
    names = 20 + _LETTER_PX * max((len(row.name) for of in groups.values() for row in of), default=0)
    x = Scale(0.0, top, names, _WIDTH - 70)
    drawn, y = [], 8.0
    for workload, of in groups.items():
        y += 22
        drawn.append(f'<text x="8" y="{pixel(y - 7)}" font-weight="600">{escape(workload)}</text>')
        fastest = max(row.speed for row in of)
        for row in of:
            drawn += _bar(row, x, y, fastest)
            y += _BAR + _GAP
    lines = [
        f'<path d="M{pixel(x(at))} 8V{pixel(y)}" stroke="#dfe4ea"/>'
        f'<text x="{pixel(x(at))}" y="{pixel(y + 16)}" text-anchor="middle" fill="#5b6675">{number(at)}</text>'
        for at in ticks(0.0, top)
    ]
    rings = any(UTILIZATION in row.values for of in groups.values() for row in of)
    legend = "bars: real tokens per second, median of the runs"
    legend += "; rings: GPU utilisation, 0 to 100 % over the same width" if rings else ""
    caption = f'<text x="8" y="{pixel(y + 34)}" fill="#5b6675">{legend}</text>'
    height = pixel(y + 44)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="#1c2430">'
        f'<title>Real tokens per second</title><rect width="100%" height="100%" fill="#fff"/>'
        + "".join([*lines, *drawn, caption])
        + "</svg>\n"
    )


def _high(row: BenchRow) -> float:
    return row.values[SPEED].high if SPEED in row.values else 0.0


def _bar(row: BenchRow, x: Scale, y: float, fastest: float) -> list[str]:
    middle, end = pixel(y + _BAR / 2), x(row.speed)
    colour = "#1f5fbf" if row.name.startswith("speedkit") else "#9aa5b1"
    weight = ' font-weight="600"' if row.speed == fastest else ""
    parts = [
        f'<text x="{pixel(x.start - 8)}" y="{pixel(y + 14)}" text-anchor="end">{escape(row.name)}</text>',
        f'<rect x="{pixel(x.start)}" y="{pixel(y)}" width="{pixel(end - x.start)}" height="{_BAR}" fill="{colour}"/>',
    ]
    spread = row.values.get(SPEED)
    if spread is not None and spread.runs > 1:
        parts.append(f'<path d="M{pixel(x(spread.low))} {middle}H{pixel(x(spread.high))}" stroke="#1c2430"/>')
        end = max(end, x(spread.high))
    utilization = row.values.get(UTILIZATION)
    ring = x(x.low + utilization.median / 100 * (x.high - x.low)) if utilization is not None else None
    # The number stands clear of the ring.
    label = end + 6 if ring is None or not end - 8 < ring < end + 60 else max(end, ring + 6) + 6
    parts.append(f'<text x="{pixel(label)}" y="{pixel(y + 14)}"{weight}>{row.speed:,.0f}</text>')
    if ring is not None:
        parts.append(f'<circle cx="{pixel(ring)}" cy="{middle}" r="5" fill="#fff" stroke="#d9780b" stroke-width="2"/>')
    return parts
