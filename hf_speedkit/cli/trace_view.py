"""How a trace looks in a terminal and as JSON. Renders; computes nothing.

Names come from the file and are strangers' text: control characters are replaced, and nothing is taken for markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_speedkit.core.diagnosis import headline
from hf_speedkit.core.printable import printable
from hf_speedkit.core.records import Finding, Severity, to_dict
from hf_speedkit.core.trace_compare import METRICS, Change, TraceComparison, trace_metrics
from hf_speedkit.core.trace_ranks import compare_ranks, slowest_rank
from hf_speedkit.core.trace_records import DeviceSummary, TraceSummary
from hf_speedkit.core.trace_signals import ms, percent

Judged = tuple[TraceSummary, Sequence[Finding]]

NAME_WIDTH = 78
_OPERATORS = "CPU operations"
_LEAST_NAME = 21  # "cudaStreamSynchronize"; less of a name says nothing
_PADDING = 2  # rich's, between columns
_NAMESPACES = re.compile(r"^(?:\w+::)+")
_STYLES = {Severity.PROBLEM: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "green"}


def as_document(judged: Sequence[Judged], comparison: TraceComparison | None, failures: Sequence[str]) -> str:
    """Everything as one JSON object: `traces`, `comparison`, `failures`."""
    traces = [
        {
            "verdict": headline(findings),
            "findings": [to_dict(finding) for finding in findings],
            "metrics": trace_metrics(summary),
            "summary": to_dict(summary),
        }
        for summary, findings in judged
    ]
    document = {
        "traces": traces,
        "ranks": [to_dict(row) for row in compare_ranks([summary for summary, _ in judged])] if len(judged) > 1 else [],
        "comparison": to_dict(comparison) if comparison is not None else None,
        "failures": list(failures),
    }
    return json.dumps(document, indent=1, allow_nan=False)


def print_report(
    judged: Sequence[Judged], comparison: TraceComparison | None, failures: Sequence[str], *, top: int
) -> None:
    """Print tables, verdicts, comparison and failed gates."""
    console = Console(highlight=False, soft_wrap=True)
    for summary, findings in judged:
        _heading(console, summary)
        _verdict(console, findings)
        if len(judged) == 1:
            _tables(console, summary, top)
    if len(judged) > 1:
        _ranks(console, [summary for summary, _ in judged])
    if comparison is not None:
        _comparison(console, comparison, top)
    for failure in failures:
        console.print(Text(f"FAILED  {printable(failure)}", style="bold red"))


def _heading(console: Console, summary: TraceSummary) -> None:
    parts = [printable(summary.file), f"{summary.events:,} events"]
    parts += [f"device {one.device}" + (f" ({printable(one.name)})" if one.name else "") for one in summary.devices]
    if summary.rank is not None:
        parts.append(f"rank {summary.rank}" + (f" of {summary.world_size}" if summary.world_size else ""))
    steps = summary.full_steps
    parts.append(f"{len(steps)} step{'s' if len(steps) != 1 else ''}" if steps else "no step marks")
    if summary.facts.step is not None:
        parts.append(f"global step {summary.facts.step}")
    console.print(Text("  ".join(parts), style="bold"))
    for note in summary.notes:
        console.print(Text(f"  {printable(note)}", style="dim"))


def _verdict(console: Console, findings: Sequence[Finding]) -> None:
    console.print(Text(f"Verdict: {printable(headline(findings))}", style="bold"))
    for finding in findings:
        line = Text("  ")
        line.append(f"{finding.severity.value:<8}", style=_STYLES[finding.severity])
        line.append(f"{finding.rule}: {printable(finding.message)}")
        console.print(line)
        for evidence in finding.evidence:
            console.print(Text(f"           {printable(evidence)}", style="dim"))
        console.print(Text(f"           -> {printable(finding.advice)}"))


def _tables(console: Console, summary: TraceSummary, top: int) -> None:
    _table(
        console,
        "Per step",
        ("metric", "value", "meaning"),
        ((name, _number(value), METRICS[name]) for name, value in trace_metrics(summary).items() if value is not None),
    )
    total = summary.cpu_self_ns or 1
    _table(
        console,
        f"CPU operations, self time (launch calls inside): {summary.cpu_op_calls or 0:,} calls, {ms(total)}",
        ("operation", "calls", "mean", "total", "share"),
        (
            (printable(row.name, width=NAME_WIDTH), f"{row.calls:,}", ms(row.self_ns / row.calls), ms(row.self_ns),
             percent(row.self_ns / total))
            for row in summary.cpu_ops[:top]
        ),
    )  # fmt: skip
    if summary.kernels is None:
        console.print(Text(f"GPU kernels: unknown, {printable(summary.device_unknown or 'not given')}"))
        return
    total, grouped = summary.device_time_ns or 1, sum(row.total_ns for row in summary.groups) or 1
    _table(
        console,
        f"GPU kernels: {summary.launches or 0:,} launches, {ms(total)}",
        ("kernel", "calls", "mean", "total", "share", "group"),
        (
            (_kernel(row.name), f"{row.calls:,}", ms(row.total_ns / row.calls), ms(row.total_ns),
             percent(row.total_ns / total), row.group)
            for row in summary.kernels[:top]
        ),
    )  # fmt: skip
    _table(
        console,
        "Kernels by what they are",
        ("group", "calls", "total", "share"),
        ((row.group, f"{row.calls:,}", ms(row.total_ns), percent(row.total_ns / grouped)) for row in summary.groups),
    )
    for device in summary.devices:
        _device(console, device)
    _where(console, summary, top)


def _device(console: Console, device: DeviceSummary) -> None:
    window = device.window_ns or 1
    rows = [("computing", max(0, device.window_busy_ns - device.communication_exposed_ns))]
    rows.append(("exposed communication", device.communication_exposed_ns))
    rows += [(f"idle: {cause}", time) for cause, time in device.idle_ns.items()]
    _table(
        console,
        f"Device {printable(device.device)}: where {ms(device.window_ns)} went",
        ("what", "time", "share"),
        ((what, ms(time), percent(time / window)) for what, time in rows if time),
    )


def _where(console: Console, summary: TraceSummary, top: int) -> None:
    _table(
        console,
        "Host syncs inside the steps",
        ("call", "cause", "line", "calls", "waited", "device idle after"),
        (
            (printable(row.call), printable(row.cause or ""), printable(row.source or ""), f"{row.calls:,}",
             ms(row.wait_ns), ms(row.idle_after_ns))
            for row in summary.syncs[:top]
        ),
    )  # fmt: skip
    _table(
        console,
        "Modules (with the modules inside)",
        ("module", "calls", "forward host", "forward device", "backward host", "backward device"),
        (
            (printable(row.name, width=NAME_WIDTH), f"{row.calls:,}", ms(row.forward_host_ns),
             _time(row.forward_device_ns), _time(row.backward_host_ns), _time(row.backward_device_ns))
            for row in summary.modules[:top]
        ),
    )  # fmt: skip


def _ranks(console: Console, summaries: Sequence[TraceSummary]) -> None:
    rows = compare_ranks(summaries)
    slowest = slowest_rank(rows)
    _table(
        console,
        "Ranks, per step",
        ("rank", "file", "step ms", "own work ms", "exposed communication ms", "idle", "launches"),
        (
            ("?" if row.rank is None else str(row.rank), printable(row.file), _number(row.step_time_ms),
             _number(row.compute_busy_ms), _number(row.exposed_communication_ms),
             "?" if row.device_idle is None else percent(row.device_idle), _number(row.launches))
            for row in rows
        ),
    )  # fmt: skip
    if slowest is not None:
        console.print(Text(f"Most work of its own: rank {slowest.rank} ({printable(slowest.file)})"))


def _comparison(console: Console, comparison: TraceComparison, top: int) -> None:
    console.print(Text(f"From {printable(comparison.before)} to {printable(comparison.after)}", style="bold"))
    _table(
        console,
        "What changed, per step",
        ("metric", "before", "after", "change"),
        ((c.name, _number(c.before), _number(c.after), _relative(c)) for c in comparison.metrics),
    )
    for title, changes in (
        ("Groups", comparison.groups),
        ("Kernels that appeared", comparison.appeared),
        ("Kernels that vanished", comparison.vanished),
        ("Kernels", comparison.kernels),
        (_OPERATORS, comparison.operators),
    ):
        _table(
            console,
            f"{title}, per step",
            ("name", "calls before", "after", "time before", "after", "change"),
            (
                (c.name if title == _OPERATORS else _kernel(c.name), _number(c.calls_before), _number(c.calls_after),
                 _time(c.before), _time(c.after), _relative(c))
                for c in changes[:top]
            ),
        )  # fmt: skip


def _table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table, or nothing when it has no rows. Cells are Text: a name like "[red]" is a name, not markup.

    A row is a line where the first cell, mostly the long name of a kernel, can be shortened until it is.
    """
    listed = list(rows)
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    others = [max(map(len, cells)) + _PADDING for cells in zip(columns, *listed, strict=True)][1:]
    room = max(_LEAST_NAME, console.width - sum(others))
    names = [printable(name, width=room) for name, *_ in listed]
    for index, column in enumerate(columns):
        # Where another cell is too long as well, it is that one which is folded: a name that was shortened fits.
        least = max(map(len, names), default=0) if index == 0 else None
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold", min_width=least)
    for name, (_, *cells) in zip(names, listed, strict=True):
        table.add_row(Text(name), *map(Text, cells))
    if table.row_count:
        console.print()
        console.print(table)


def _kernel(name: str) -> str:
    """A kernel's name without what it returns and takes: what tells two kernels apart stands between."""
    bare = _NAMESPACES.sub("", name.removeprefix("void ").replace("(anonymous namespace)::", ""))
    at = bare.find("(")
    # "Memcpy HtoD (Pinned -> Device)" takes nothing.
    return printable(bare[:at] if at > 0 and bare[at - 1] != " " else bare, width=NAME_WIDTH)


def _number(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:,.3g}"


def _time(nanoseconds: float | None) -> str:
    return "?" if nanoseconds is None else ms(nanoseconds)


def _relative(change: Change) -> str:
    return "new" if change.relative is None else f"{100 * change.relative:+.1f} %"
