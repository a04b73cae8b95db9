"""Results of benches as Markdown tables. Renders; the arithmetic is in core/bench_table.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hf_speedkit.core.bench_records import BenchResult
from hf_speedkit.core.bench_table import (
    MEDIAN_STEP,
    MINUS,
    OTHERS,
    OURS,
    SPEED,
    BenchRow,
    Shape,
    Share,
    Spread,
    by_workload,
    device_groups,
    rows,
    shapes,
    shares,
)


def markdown(results: Sequence[BenchResult], *, wide: bool = True) -> str:
    """The tables of results, and a line on where they were measured.

    A ladder for each workload, the slowest first; what each item of `OURS` gives, where it was measured without it; and
    where several workloads have `OURS`, one table over them. At a glance there is one ladder then, the longest, and not
    what each item gives.

    Args:
        results: what to show.
        wide: every column and table, versions and commits; else what a reader takes in at a glance.
    """
    found = rows(results)
    ladders = by_workload(found)
    several = shapes(ladders)
    long = {several[0].ours.place} if several and not wide else set(ladders)
    given = {where: shares(ladder) for where, ladder in ladders.items()}
    parts = [_ladder(where, ladder, given[where], wide) for where, ladder in ladders.items() if where in long]
    parts += [_shares(where, ladders[where], of) for where, of in given.items() if of and wide]
    parts += [_shapes(several, wide)] if several else []
    if wide:
        parts += [_groups(where, of) for where, of in device_groups(results).items()]
    parts.append(_footer(results, found, wide))
    return "\n\n".join(parts) + "\n"


def _of(column: str, digits: int, *, factor: float = 1.0) -> Callable[[BenchRow], str]:
    return lambda row: _number(row.values.get(column), digits, factor)


def _median_steps(row: BenchRow) -> str:
    return _number(row.values.get(MEDIAN_STEP), 0, 1 / row.ranks)


_TABLE: Mapping[str, Callable[[BenchRow], str]] = {
    "median step's": _median_steps,
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
_AT_A_GLANCE = ("median step's", "MFU %", "real / slots", "GPU util. %")


def _speed_head(found: Sequence[BenchRow]) -> str:
    """What a speed is called: of one GPU, where any of the rows had several."""
    several = next((row for row in found if row.ranks > 1), None)
    return "real tokens/s" if several is None else f"real tokens/s per {several.device}"


def _ladder(where: str, ladder: Sequence[BenchRow], items: Sequence[Share], wide: bool) -> str:
    """All rows but those that the table of shares has."""
    apart = {share.without.name for share in items}
    found = [row for row in ladder if row.name not in apart]
    heads = [f"`{where}`", "runs", _speed_head(found), "times the slowest"]
    first = found[0].speed
    cells = [[row.name, str(row.runs), _speed(row), f"{row.speed / first:.2f}" if first else ""] for row in found]
    return _with_columns(heads, cells, found, [head for head in _TABLE if wide or head in _AT_A_GLANCE])


_BESIDE = ("MFU %", "HFU %", "launches a step", "device ms", "real / slots", "peak GiB", "GPU util. %", "W")


def _shares(where: str, ladder: Sequence[BenchRow], items: Sequence[Share]) -> str:
    """What each item gives, the largest first, below the row with all of them."""
    ours = next(row for row in ladder if row.name == OURS)
    heads = [f"`{where}`, {MINUS.strip()}", "runs", _speed_head([ours]), "time saved by the item %", "told apart"]
    cells = [["nothing", str(ours.runs), _speed(ours), "", ""]]
    for share in items:
        saved, apart = f"{round(share.time_saved * 100, 1) + 0.0:.1f}", "yes" if share.apart else "no"
        cells.append([share.item, str(share.without.runs), _speed(share.without), saved, apart])
    return _with_columns(heads, cells, [ours, *(share.without for share in items)], _BESIDE)


def _shapes(several: Sequence[Shape], wide: bool) -> str:
    """A line for each workload: the speeds that several have, and what `OURS` did."""
    ours = [shape.ours for shape in several]
    beside = list(dict.fromkeys(name for shape in several for name in shape.beside))
    times = {
        f"times {OTHERS}": [shape.times_others for shape in several],
        f"times {OTHERS} in median steps": [shape.times_others_median for shape in several],
    }
    times = {head: column for head, column in times.items() if any(column) and (wide or head == f"times {OTHERS}")}
    heads = [_speed_head(ours), "runs", *beside, OURS, *times]
    cells = []
    for at, shape in enumerate(several):
        speeds = [_speed(shape.beside[name], bold=False) if name in shape.beside else "" for name in beside]
        line = [f"`{shape.ours.place}`", str(shape.ours.runs), *speeds, _speed(shape.ours)]
        cells.append([*line, *(f"{column[at]:.2f}" if column[at] else "" for column in times.values())])
    return _with_columns(heads, cells, ours, _BESIDE if wide else ("MFU %", "GPU util. %"))


def _with_columns(
    heads: Sequence[str], cells: Sequence[Sequence[str]], found: Sequence[BenchRow], columns: Sequence[str]
) -> str:
    """A table, with those columns of `_TABLE` that anything was measured for."""
    more = {head: [_TABLE[head](row) for row in found] for head in columns}
    more = {head: column for head, column in more.items() if any(column)}
    lines = [" | ".join([*heads, *more]), " | ".join(["---", *("--:" for _ in [*heads[1:], *more])])]
    lines += [" | ".join([*line, *(column[at] for column in more.values())]) for at, line in enumerate(cells)]
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


def _speed(row: BenchRow, *, bold: bool = True) -> str:
    """Of one GPU: the median, and least and most where there was more than one run."""
    spread = row.values.get(SPEED)
    if spread is None:
        return ""
    median, low, high = (f"{value / row.ranks:,.0f}" for value in (spread.median, spread.low, spread.high))
    shown = f"**{median}**" if bold else median
    return shown if spread.runs == 1 else f"{shown} ({low} - {high})"


def _number(spread: Spread | None, digits: int, factor: float) -> str:
    return "" if spread is None else f"{spread.median * factor:,.{digits}f}"


def _footer(results: Sequence[BenchResult], found: Sequence[BenchRow], wide: bool) -> str:
    """Where it was measured, once, and whether that was the same for all."""
    machines: dict[str, dict[str, None]] = {}
    for result in results:
        devices, rest = _machine(result, wide)
        machines.setdefault(rest, {})[devices] = None
    per_job = {(result.workload, result.world_size, _machine(result, True)) for result in results}
    commits = dict.fromkeys(commit[:10] + commit[40:] for row in found for commit in row.commits)
    lines = [
        "Medians over runs, each in a process of its own; least and most in brackets. Real tokens/s: tokens of "
        "documents in all steady steps over their time; the median step's: what a step does when nothing compiles.",
        "; ".join(" and ".join(devices) + rest for rest, devices in machines.items())
        + (f". Commit {', '.join(commits) or 'unknown'}." if wide else "."),
    ]
    if wide and any(row.name.startswith(MINUS) for row in found):
        lines.insert(
            1,
            "Time saved by an item: share of the time per token without it; not told apart: runs with and without it "
            "overlap, or one of them ran once.",
        )
    if len(per_job) > len({job[:2] for job in per_job}):
        lines.append("The runs of a table are not of one machine: compare with care.")
    return " ".join(lines)


def _machine(result: BenchResult, wide: bool) -> tuple[str, str]:
    """Its devices, and what else it is."""
    where, packages = result.environment, result.environment.packages
    devices = f"{len(where.devices)} x {where.devices[0]}" if where.devices else f"{where.cpu_count} CPU cores"
    driver = f", driver {where.driver}" if where.driver and wide else ""
    names: tuple[str, ...] = ("torch", "transformers", "trl")
    names += ("triton", "flash-linear-attention", "causal-conv1d", "liger-kernel") if wide else ()
    return devices, f"{driver}, " + ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
