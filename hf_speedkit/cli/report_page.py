"""Runs and traces as one HTML page that opens anywhere: no script, no font, no picture from elsewhere.

Everything from a log or a trace passes through `report_charts.text`. The page's policy (Content-Security-Policy)
forbids scripts and every request, so nothing could run even if something slipped through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hf_speedkit.cli.report_charts import Chart, Curve, axis_range, axis_top, figure, text
from hf_speedkit.cli.report_style import STYLE
from hf_speedkit.cli.report_trace import table, trace_section
from hf_speedkit.core.plot import duration, number
from hf_speedkit.core.records import Environment
from hf_speedkit.core.run_report import Level, RunReport
from hf_speedkit.core.trace_records import TraceSummary

_FULL_PX, _HALF_PX = 1134, 546
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(runs: Sequence[RunReport], traces: Sequence[TraceSummary], *, remarks: Sequence[str] = ()) -> str:
    """The whole page.

    Args:
        runs: at least one.
        traces: shown after the runs.
        remarks: what the reader should know, e.g. of traces that could not be read.
    """
    names = ", ".join(run.name for run in runs)
    body = _one(runs[0]) if len(runs) == 1 else _several(runs)
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{text(names, width=120)}: hf_speedkit report</title><style>{STYLE}</style></head><body><main>",
            f"<h1>Training report: {text(names, width=200)}</h1>",
            _how_to_read(),
            *(f'<p class="soft">{text(remark)}</p>' for remark in remarks),
            body,
            *(trace_section(summary) for summary in traces),
            "</main></body></html>\n",
        )
    )


def _how_to_read() -> str:
    return (
        '<p class="soft">Levels are means of one logging window, over all ranks; nothing is drawn where nothing was '
        'measured. <span class="key"><i class="swatch-out"></i>steps left out of every rate</span> '
        '<span class="key"><i class="swatch-pause"></i>evaluation or saving</span> '
        '<span class="key"><i class="swatch-resumed"></i>resumed from a checkpoint</span></p>'
    )


def _one(run: RunReport) -> str:
    charts = _charts([run])
    wide = [figure(chart[0], run, wide_px=_FULL_PX, duration_s=run.duration_s) for chart in charts[:1]]
    pairs = [figure(chart[0], run, wide_px=_HALF_PX, duration_s=run.duration_s) for chart in charts[1:]]
    return f'<section>{_header(run)}{"".join(wide)}<div class="pair">{"".join(pairs)}</div>{_missing([run])}</section>'


def _several(runs: Sequence[RunReport]) -> str:
    """Runs side by side: one table, one chart of all, then chart by chart on the same scales."""
    longest = max(run.duration_s for run in runs)
    rows = "".join(
        f'<div class="runs">{"".join(_cell(chart, run, longest) for chart, run in zip(row, runs, strict=True))}</div>'
        for row in _charts(runs)
    )
    headers = "".join(f"<section><h2>{text(run.name)}</h2>{_header(run)}</section>" for run in runs)
    beside = f"{_comparison(runs)}{_together(runs, longest)}{rows}{_missing(runs)}"
    return f"<section><h2>Side by side</h2>{beside}</section>{headers}"


def _cell(chart: Chart, run: RunReport, longest: float) -> str:
    chart = replace(chart, title=f"{run.name}: {chart.title}")
    if not chart.curves and not chart.parts:
        return f'<figure><figcaption><b>{text(chart.title)}</b></figcaption><p class="soft">not measured</p></figure>'
    return figure(chart, run, wide_px=_HALF_PX, duration_s=longest)


def _together(runs: Sequence[RunReport], longest: float) -> str:
    curves = tuple(
        Curve(label=run.name, style=f"r{index % 8}", levels=run.curves["real_tokens"])
        for index, run in enumerate(runs)
        if "real_tokens" in run.curves
    )
    if not curves:
        return ""
    top = axis_top([value for curve in curves for value in _values(curve.levels)])
    chart = Chart(title="Real tokens per second, all runs", unit="tokens/s", curves=curves, top=top, named=True)
    return figure(chart, _unmarked(runs[0]), wide_px=_FULL_PX, duration_s=longest)


def _unmarked(run: RunReport) -> RunReport:
    return replace(run, excluded=(), pauses=(), resumed=())


def _charts(runs: Sequence[RunReport]) -> list[list[Chart]]:
    """Chart by chart, one of each run, those of a row on the same scale; rows without any value left out."""
    rows = [_speed(runs), _parts(runs)]
    rows += [
        _plain(runs, "FLOP utilisation (MFU, HFU, OFU)", "% of peak", _FLOPS),
        _plain(runs, "GPU memory in use", "GiB", ("memory",)),
        _plain(runs, "Loss", "nats", ("loss", "eval_loss"), from_zero=False),
        _plain(runs, "GPU power", "W", ("power",)),
    ]
    return [row for row in rows if any(chart.curves or chart.parts for chart in row)]


_FLOPS = ("mfu", "hfu", "ofu")


def _speed(runs: Sequence[RunReport]) -> list[Chart]:
    top = axis_top(_all(runs, ("real_tokens", "slots")))
    named = (
        ("slots", "slots per second", False),
        ("real_tokens", "real tokens per second", False),
        ("utilization", "GPU utilisation", True),
    )
    styles = {"slots": "slots", "real_tokens": "real", "utilization": "util"}
    return [
        Chart(
            title="Tokens per second" + (" and GPU utilisation" if "utilization" in run.curves else ""),
            unit="tokens/s",
            curves=tuple(
                Curve(label=label, style=styles[name], levels=run.curves[name], right=right)
                for name, label, right in named
                if name in run.curves
            ),
            top=top,
            right_unit="util. %",
            # Fixed: that it stays at 98 % while tokens per second change fourfold is the point of the picture.
            right_top=100.0 if "utilization" in run.curves else None,
            height=300 if len(runs) == 1 else 240,
        )
        for run in runs
    ]


def _parts(runs: Sequence[RunReport]) -> list[Chart]:
    values = [sum(one.parts) for run in runs for one in run.parts if one.parts is not None]
    top = axis_top([*values, *_all(runs, ("device_time", "step_time"))])
    return [
        Chart(
            title="Where a step's time goes",
            unit="s per step",
            curves=tuple(
                Curve(label="device span", style="device", levels=run.curves[name])
                for name in ("device_time",)
                if name in run.curves
            ),
            top=top,
            parts=run.parts if any(one.parts is not None for one in run.parts) else (),
        )
        for run in runs
    ]


def _plain(
    runs: Sequence[RunReport], title: str, unit: str, names: Sequence[str], *, from_zero: bool = True
) -> list[Chart]:
    values = _all(runs, names)
    bottom, top = (0.0, axis_top(values)) if from_zero else axis_range(values)
    styles = ("plain", "other", "third")
    return [
        Chart(
            title=title,
            unit=unit,
            curves=tuple(
                Curve(label=name.replace("_", " "), style=style, levels=run.curves[name])
                for name, style in zip(names, styles, strict=False)
                if name in run.curves
            ),
            bottom=bottom,
            top=top,
        )
        for run in runs
    ]


def _all(runs: Sequence[RunReport], names: Sequence[str]) -> list[float]:
    return [value for run in runs for name in names for value in _values(run.curves.get(name, ()))]


def _values(levels: Iterable[Level]) -> list[float]:
    return [level.value for level in levels if level.value is not None]


_MISSING = {
    "utilization": "GPU utilisation (needs an NVIDIA GPU and nvidia-ml-py)",
    "memory": "GPU memory (likewise)",
    "mfu": "MFU (needs a device whose peak is known, or peak_tflops)",
    "device_time": "device time (needs a GPU)",
    "loss": "loss",
    "real_tokens": "real tokens per second",
}


def _missing(runs: Sequence[RunReport]) -> str:
    absent = [words for name, words in _MISSING.items() if all(name not in run.curves for run in runs)]
    return f'<p class="soft">Not measured: {text("; ".join(absent))}.</p>' if absent else ""


# None: not measured. An empty text: measured, and there was none.
_FACTS: tuple[tuple[str, Callable[[RunReport], str | None]], ...] = (
    ("real tokens per second", lambda run: _rate(run, "speed/real_tokens_per_second", "")),
    ("slots per second", lambda run: _rate(run, "speed/slots_per_second", "")),
    ("target tokens per second", lambda run: _rate(run, "speed/target_tokens_per_second", "")),
    ("real tokens per second and device", lambda run: _rate(run, "speed/real_tokens_per_second_per_device", "")),
    ("packing efficiency", lambda run: _percent(run.packing_efficiency)),
    ("mean step time", lambda run: _rate(run, "speed/step_time_s", "s")),
    ("of it data wait", lambda run: _rate(run, "speed/data_wait_s", "s")),
    ("what limits a step", lambda run: _limits(run)),
    ("MFU", lambda run: _rate(run, "speed/mfu", "%")),
    ("HFU, recompute added", lambda run: _rate(run, "speed/hfu", "%")),
    ("OFU, by hardware counter", lambda run: _rate(run, "speed/ofu", "%")),
    ("launches a step", lambda run: _counted(run, "speed/launches", "")),
    ("device busy in a step", lambda run: _counted(run, "speed/device_busy_s", "s")),
    ("host waiting in a step", lambda run: _counted(run, "speed/host_wait_s", "s")),
    ("GPU utilisation", lambda run: _rate(run, "speed/gpu_utilization", "%")),
    ("GPU memory", lambda run: _rate(run, "speed/gpu_memory_gib", "GiB")),
    ("loss, first to last window", lambda run: _loss(run)),
    ("steps", lambda run: f"{run.steps:,}"),
    ("of them in the rates", lambda run: f"{run.steady_steps:,}" if run.steady_steps else None),
    ("left out", lambda run: _left_out(run)),
    ("steps with NaN", lambda run: _nonfinite(run)),
    ("ranks", lambda run: None if run.world_size is None else f"{run.world_size:,}"),
    ("training time", lambda run: duration(run.training_time_s)),
    ("pauses", lambda run: _pauses(run)),
    ("real tokens", lambda run: _tokens(run, run.tokens.real)),
    ("slots", lambda run: _tokens(run, run.tokens.slots)),
    ("target tokens", lambda run: _tokens(run, run.tokens.target)),
    ("documents", lambda run: _tokens(run, run.tokens.documents)),
)


def _header(run: RunReport) -> str:
    facts = [(name, value) for name, value in ((name, fact(run)) for name, fact in _FACTS) if value]
    cells = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts)
    said = [f"{one.message} {'; '.join(one.evidence)}" for one in (run.limits.last, run.limits.flop_gap) if one]
    notes = "".join(f'<p class="soft">{text(note)}</p>' for note in (*said, *run.notes))
    where = "".join(f'<p class="env">{text(_environment(one))}</p>' for one in run.environments)
    return f'<div class="card"><dl class="facts">{cells}</dl></div>{where}{notes}'


def _comparison(runs: Sequence[RunReport]) -> str:
    rows = [(name, [fact(run) for run in runs]) for name, fact in _FACTS]
    return table(
        "Steady rates and totals",
        ("", *(run.name for run in runs)),
        (
            (name, *("not measured" if value is None else value or "none" for value in values))
            for name, values in rows
            if any(values)
        ),
    )


def _environment(environment: Environment) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    devices = f"{len(environment.devices)} x {environment.devices[0]}" if environment.devices else "no GPU"
    parts = [devices]
    if len(set(environment.devices)) > 1:
        parts = [", ".join(environment.devices)]
    parts += [f"driver {environment.driver}"] if environment.driver else []
    parts += [f"{environment.cpu_count} CPU cores", f"Python {environment.python}", packages]
    parts += [f"commit {environment.commit}"] if environment.commit else []
    return "Ran on: " + "; ".join(parts)


def _rate(run: RunReport, key: str, unit: str) -> str | None:
    value = run.rates.get(key)
    return None if value is None else f"{number(value)} {unit}".rstrip()


def _counted(run: RunReport, key: str, unit: str) -> str | None:
    value = run.limits.counted.get(key)
    return None if value is None else f"{number(value)} {unit}".rstrip()


def _limits(run: RunReport) -> str | None:
    windows = sorted(run.limits.windows.items(), key=lambda pair: -pair[1])
    named = [
        f"{rule.replace('_bound', '').replace('_', ' ')} ({count:,} window{'s' if count != 1 else ''})"
        for rule, count in windows
    ]
    return ", ".join(named) or None


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{number(100 * share)} %"


def _loss(run: RunReport) -> str | None:
    if run.first_loss is None or run.last_loss is None:
        return None
    return f"{number(run.first_loss)} to {number(run.last_loss)}"


def _left_out(run: RunReport) -> str | None:
    return ", ".join(
        f"{count:,} {reason} ({duration(sum(mark.end - mark.start for mark in run.excluded if mark.what == reason))})"
        for reason, count in run.excluded_steps.items()
    )


def _pauses(run: RunReport) -> str | None:
    pauses = (("evaluation", run.eval_time_s), ("saving", run.save_time_s), ("logging", run.log_time_s))
    return ", ".join(f"{what} {duration(seconds)}" for what, seconds in pauses if seconds)


def _nonfinite(run: RunReport) -> str | None:
    return None if run.nonfinite_steps is None else f"{run.nonfinite_steps:,}" if run.nonfinite_steps else ""


def _tokens(run: RunReport, count: int | None) -> str | None:
    return None if count is None else f"{count:,}" + (" (rank 0)" if run.tokens_of_rank_0 else "")
