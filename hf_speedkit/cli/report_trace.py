"""A trace on the report's page: verdict, findings, the picture of the step, tables. Renders; computes nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_speedkit.cli.report_charts import NARROW_PX, text
from hf_speedkit.cli.report_style import TIMELINE_COLOURS
from hf_speedkit.core.diagnosis import diagnose, headline
from hf_speedkit.core.plot import Scale, bar_path, number, pixel, ticks
from hf_speedkit.core.printable import printable
from hf_speedkit.core.records import Finding
from hf_speedkit.core.timeline import StepPicture, step_picture
from hf_speedkit.core.trace_compare import METRICS, trace_metrics
from hf_speedkit.core.trace_records import DeviceSummary, TraceSummary
from hf_speedkit.core.trace_signals import ms, percent

ROWS = 12
_NAME_WIDTH = 90
_WIDE_PX = 1126
_HEIGHT_PX = 210


def trace_section(summary: TraceSummary) -> str:
    """Everything the page says of one trace."""
    findings = diagnose(summary)
    worst = findings[0].severity.value if findings else "note"
    return "".join(
        (
            f"<section><h2>Trace {text(summary.file)}</h2>",
            f'<p class="soft">{text(_about(summary))}</p>',
            *(f'<p class="soft">{text(note)}</p>' for note in summary.notes),
            f'<div class="card"><p class="verdict {worst}">{text(headline(findings))}</p>',
            *(_finding(one) for one in findings),
            "</div>",
            _picture(summary),
            *(_tables(summary)),
            "</section>",
        )
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of escaped cells; nothing when it has no rows."""
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
    if not body:
        return ""
    return (
        f'<div class="card scroll"><table><caption>{text(title)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _about(summary: TraceSummary) -> str:
    parts = [f"{summary.events:,} events"]
    parts += [f"device {one.device}" + (f" ({one.name})" if one.name else "") for one in summary.devices]
    if summary.rank is not None:
        parts.append(f"rank {summary.rank}" + (f" of {summary.world_size}" if summary.world_size else ""))
    if summary.facts.step is not None:
        parts.append(f"global step {summary.facts.step}")
    return ", ".join([*parts, *summary.partial])


def _finding(finding: Finding) -> str:
    evidence = "".join(f"<li>{text(line)}</li>" for line in finding.evidence)
    return (
        f'<div class="finding {finding.severity.value}"><p><span class="tag">{finding.severity.value}</span>'
        f"<b>{text(finding.rule)}</b>: {text(finding.message)}</p>"
        f"<ul>{evidence}</ul><p>What to do: {text(finding.advice)}</p></div>"
    )


def _picture(summary: TraceSummary) -> str:
    if summary.timeline is None:
        reason = summary.device_unknown or "the trace holds no device work inside a step"
        return f'<p class="soft">No picture of the step: {text(reason)}.</p>'
    drawings = "".join(
        f'<div class="{kind}">{_picture_svg(step_picture(summary.timeline, most_bins=bins), width)}</div>'
        for kind, width, bins in (("wide", _WIDE_PX, 300), ("narrow", NARROW_PX, 100))
    )
    picture = step_picture(summary.timeline, most_bins=300)
    keys = "".join(
        f'<span class="key"><i style="color:{_colour(group)}"></i>{text(group)} {ms(time)}</span>'
        for group, time in picture.totals.items()
    )
    idle = f'<span class="key"><i class="idle-key"></i>idle {ms(picture.idle_ns)}</span>'
    title = f"The step on device {summary.timeline.device}: what ran, {ms(picture.bin_ns)} a bar"
    return f"<figure><figcaption><b>{text(title)}</b>{keys}{idle}</figcaption>{drawings}</figure>"


def _picture_svg(picture: StepPicture, width: int) -> str:
    left, right, top, bottom = 46, width - 12, 20, _HEIGHT_PX - 34
    x, y = Scale(0, picture.length_ns, left, right), Scale(0.0, picture.top, bottom, top)
    parts = [
        f'<svg viewBox="0 0 {width} {_HEIGHT_PX}" role="img" aria-label="device time of the step by group">',
        # What no bar covers stays in this colour: up to one device second per second, the device is idle there.
        f'<rect class="idle" x="{left}" y="{pixel(y(1.0))}" width="{right - left}" height="{pixel(bottom - y(1.0))}"/>',
        '<text class="unit" x="4" y="12">% of the bar\'s time</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        parts.append(f'<text class="tick end" x="{left - 6}" y="{pixel(y(share) + 4)}">{round(100 * share)}</text>')
    for group, bars in picture.bars.items():
        path = bar_path(
            (x(index * picture.bin_ns), x((index + 1) * picture.bin_ns), y(low), y(high)) for index, low, high in bars
        )
        parts.append(f'<path d="{path}" fill="{_colour(group)}"><title>{text(group)}</title></path>')
    for value in ticks(0.0, picture.length_ns / 1e6, max(2, round((right - left) / 110))):
        at = pixel(x(value * 1e6))
        parts.append(f'<path class="grid" d="M{at} {bottom}v4"/>')
        parts.append(f'<text class="tick mid" x="{at}" y="{bottom + 17}">{number(value)}</text>')
    parts.append(f'<path class="frame" d="M{left} {bottom}H{right}"/>')
    middle = (left + right) / 2
    parts.append(f'<text class="unit mid" x="{pixel(middle)}" y="{bottom + 31}">ms after the step began</text></svg>')
    return "".join(parts)


def _colour(group: str) -> str:
    return TIMELINE_COLOURS.get(group, TIMELINE_COLOURS["other"])


def _tables(summary: TraceSummary) -> list[str]:
    cpu, device = summary.cpu_self_ns or 1, summary.device_time_ns or 1
    tables = [
        table(
            f"CPU operations, self time (launch calls inside): {summary.cpu_op_calls or 0:,} calls, {ms(cpu)}",
            ("operation", "calls", "mean", "total", "share"),
            (
                (_name(row.name), f"{row.calls:,}", ms(row.self_ns / row.calls), ms(row.self_ns),
                 percent(row.self_ns / cpu))
                for row in summary.cpu_ops[:ROWS]
            ),
        )
    ]  # fmt: skip
    if summary.kernels is None:
        reason = text(summary.device_unknown or "not given")
        return [*tables, f'<p class="soft">GPU kernels: unknown, {reason}.</p>', _per_step(summary)]
    tables.append(
        table(
            f"GPU kernels: {summary.launches or 0:,} launches, {ms(device)}",
            ("kernel", "calls", "mean", "total", "share", "group"),
            (
                (_name(row.name), f"{row.calls:,}", ms(row.total_ns / row.calls), ms(row.total_ns),
                 percent(row.total_ns / device), row.group)
                for row in summary.kernels[:ROWS]
            ),
        )
    )  # fmt: skip
    grouped = sum(row.total_ns for row in summary.groups) or 1
    groups = table(
        "Kernels by what they are",
        ("group", "launches", "total", "share"),
        ((row.group, f"{row.calls:,}", ms(row.total_ns), percent(row.total_ns / grouped)) for row in summary.groups),
    )
    where = "".join(_device(one) for one in summary.devices)
    return [*tables, f'<div class="pair"><div>{groups}</div><div>{where}{_per_step(summary)}</div></div>']


def _device(device: DeviceSummary) -> str:
    window = device.window_ns or 1
    rows = [("computing", max(0, device.window_busy_ns - device.communication_exposed_ns))]
    rows.append(("exposed communication", device.communication_exposed_ns))
    rows += [(f"idle, host in: {cause}", time) for cause, time in device.idle_ns.items()]
    return table(
        f"Device {device.device}: where {ms(device.window_ns)} went",
        ("what", "time", "share"),
        ((what, ms(time), percent(time / window)) for what, time in rows if time),
    )


def _per_step(summary: TraceSummary) -> str:
    metrics = trace_metrics(summary)
    return table(
        "Per step",
        ("meaning", "value"),
        ((METRICS[name], number(value)) for name, value in metrics.items() if value is not None),
    )


def _name(name: str) -> str:
    return printable(name, width=_NAME_WIDTH)
