"""`hf-speedkit report`: runs and traces as one HTML page that opens offline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from hf_speedkit.core.run_report import RunReport
    from hf_speedkit.core.trace_records import TraceSummary

SUBJECT_IS_BAD = 1
STEP_LOG = "speedkit_steps.jsonl"
MOST_TRACES = 8
_HOMES = {"home", "Users"}


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="Run directories, step logs (.jsonl), or results of benches (.json)."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page (default: speedkit_report.html). Of benches: a picture (.svg), or a document (.md) whose "
            "table is brought up to date (default: the table is printed).",
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A trace to explain. Repeatable; default: RUN/traces.")
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(metavar="ENTITY/PROJECT", help="Also save the same view in Weights & Biases (wandb-workspaces)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and write no page.")] = False,
) -> None:
    """Turn step logs into one self-contained page: speed beside utilisation, step parts, loss, what a trace says.

    Results of benches become a table in Markdown, or a bar picture.
    Exit 0: the page is written. 1: a log or a trace given cannot be read, or a view not be saved. 2: wrong use.
    """
    from hf_speedkit.core.errors import SpeedkitError

    if wandb is not None:
        _check_target(wandb)

    if _is_bench(runs):
        _report_bench(runs, out, as_json=as_json)
        return
    out = Path("speedkit_report.html") if out is None else out
    logs = [_step_log(path) for path in runs]
    for path in trace or ():
        if not path.is_file():
            raise typer.BadParameter(f"no such file: {path}", param_hint="--trace")
    if not as_json:
        _check_out(out, [*logs, *(trace or ())])
    try:
        reports = [_read(log, name) for log, name in zip(logs, _names(logs), strict=True)]
        summaries = [_summary(path) for path in trace or ()]
    except SpeedkitError as error:
        _fail(str(error))
    found, remarks = ([], []) if trace else _found_traces(logs)
    summaries += found
    if as_json:
        typer.echo(_document(reports, summaries, remarks))
        return
    _write(out, reports, summaries, remarks)
    if wandb is not None:
        _save_view(wandb)


def _check_target(target: str) -> None:
    from hf_speedkit.cli.report_wandb import split_target
    from hf_speedkit.core.errors import ConfigurationError

    try:
        split_target(target)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error), param_hint="--wandb") from error


def _save_view(target: str) -> None:
    """After the page: what wandb refuses must not cost the page."""
    from hf_speedkit.cli.report_wandb import save_view
    from hf_speedkit.core.errors import SpeedkitError

    try:
        typer.echo(f"view saved: {save_view(target)}")
    except SpeedkitError as error:
        _fail(str(error))


def _is_bench(runs: Sequence[Path]) -> bool:
    from hf_speedkit.cli.report_bench import bench_files
    from hf_speedkit.core.errors import BenchError

    try:
        return bench_files(runs) is not None
    except BenchError as error:
        _fail(str(error))


def _report_bench(runs: Sequence[Path], out: Path | None, *, as_json: bool) -> None:
    import json

    from hf_speedkit.cli.report_bench import bars, bench_files, into, provenance_gaps, read
    from hf_speedkit.cli.report_tables import markdown
    from hf_speedkit.core.bench_table import rows
    from hf_speedkit.core.errors import BenchError
    from hf_speedkit.core.records import to_dict

    if out is not None and out.suffix not in (".svg", ".md"):
        raise typer.BadParameter(f"of benches a picture (.svg) or a document (.md): {out}", param_hint="--out")
    try:
        results = read(bench_files(runs) or ())
        if as_json:
            typer.echo(json.dumps([to_dict(row) for row in rows(results)], allow_nan=False))
        elif out is None:
            typer.echo(markdown(results), nl=False)
        elif out.suffix == ".svg":
            out.write_text(bars(results), encoding="utf-8")
        else:
            out.write_text(into(out.read_text(encoding="utf-8"), results), encoding="utf-8")
    except BenchError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{out} cannot be written: {error.strerror or error}")
    for gap in provenance_gaps(results):
        typer.echo(gap, err=True)


def _step_log(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise typer.BadParameter(f"no such run: {path}", param_hint="RUNS")
    log = path / STEP_LOG
    if not log.is_file():
        below = sorted(str(one.parent) for one in path.glob(f"*/{STEP_LOG}"))
        if below:
            raise typer.BadParameter(f"{path} is no run; runs in it: {', '.join(below[:8])}", param_hint="RUNS")
        raise typer.BadParameter(
            f"no {STEP_LOG} in {path}: SpeedSFTTrainer writes one (step_log=True, the default); with another Trainer: "
            f"from hf_speedkit import JsonlSink, and attach(trainer, "
            f'ThroughputCallback(sinks=[JsonlSink("{path / STEP_LOG}")]))',
            param_hint="RUNS",
        )
    return log


def _check_out(out: Path, inputs: Sequence[Path]) -> None:
    if out.is_dir() or not out.resolve().parent.is_dir():
        raise typer.BadParameter(f"not a file in a directory that exists: {out}", param_hint="--out")
    if any(out.resolve() == path.resolve() for path in inputs):
        raise typer.BadParameter(f"would overwrite what it reads: {out}", param_hint="--out")
    if out.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"of runs a page (.html): {out}", param_hint="--out")


def _names(logs: Sequence[Path]) -> list[str]:
    """A name for each run: its directory's, with the one above where two are alike; never a user's, never a path."""
    plain = [Path(os.path.abspath(log)) for log in logs]  # noqa: PTH100  # links keep the name the user gave them
    places = [log.parent if log.name == STEP_LOG else log.with_suffix("") for log in plain]
    names = [place.name for place in places]
    if len(set(names)) == len(names):
        return names
    users = {Path.home(), *(one for place in places for one in place.parents if one.parent.name in _HOMES)}
    above = ["" if place.parent in users or place.parent.name in _HOMES else place.parent.name for place in places]
    names = [f"{parent}/{name}" if parent else name for parent, name in zip(above, names, strict=True)]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({index})" for index, name in enumerate(names, start=1)]


def _read(log: Path, name: str) -> RunReport:
    from hf_speedkit.core.errors import StepLogError
    from hf_speedkit.core.run_report import run_report
    from hf_speedkit.core.step_log import parse_step_log

    try:
        with log.open(encoding="utf-8-sig", errors="replace") as lines:
            return run_report(parse_step_log(lines, name=log.name), name=name)
    except OSError as error:
        raise StepLogError(f"{log.name} cannot be read: {error.strerror or error}.") from error


def _summary(path: Path) -> TraceSummary:
    from hf_speedkit import summarize_trace

    return summarize_trace(path)


def _found_traces(logs: Sequence[Path]) -> tuple[list[TraceSummary], list[str]]:
    """Traces beside the logs. One that cannot be read is a remark: nobody asked for it by name."""
    from hf_speedkit.core.errors import SpeedkitError

    paths = [path for log in logs for path in sorted((log.parent / "traces").glob("*.json*")) if path.is_file()]
    summaries, remarks = [], []
    for path in paths[:MOST_TRACES]:
        try:
            summaries.append(_summary(path))
        except SpeedkitError as error:
            remarks.append(f"Trace left out: {str(error).splitlines()[0]}")
    if len(paths) > MOST_TRACES:
        remarks.append(f"{len(paths) - MOST_TRACES} more traces are in the runs' folders: name those to see by --trace")
    return summaries, remarks


def _write(out: Path, runs: list[RunReport], traces: list[TraceSummary], remarks: list[str]) -> None:
    from hf_speedkit.cli.report_page import page
    from hf_speedkit.core.printable import printable

    text = page(runs, traces, remarks=remarks)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        _fail(f"{out} cannot be written: {error.strerror or error}")
    for run in runs:
        for note in run.notes:
            typer.echo(printable(f"{run.name}: {note}"), err=True)
    for remark in remarks:
        typer.echo(printable(remark), err=True)
    counted = f"{len(runs)} run{'s' if len(runs) != 1 else ''}, {len(traces)} trace{'s' if len(traces) != 1 else ''}"
    typer.echo(printable(f"{out}: {counted}, {len(text.encode()) / 1000:,.0f} kB"))


def _document(runs: list[RunReport], traces: list[TraceSummary], remarks: list[str]) -> str:
    import json

    from hf_speedkit.core.diagnosis import diagnose, headline
    from hf_speedkit.core.records import to_dict
    from hf_speedkit.core.trace_compare import trace_metrics

    document = {
        "runs": [to_dict(run) for run in runs],
        "traces": [
            {
                "file": summary.file,
                "verdict": headline(findings),
                "findings": [to_dict(finding) for finding in findings],
                "metrics": trace_metrics(summary),
            }
            for summary, findings in ((summary, diagnose(summary)) for summary in traces)
        ],
        "remarks": remarks,
    }
    return json.dumps(document, allow_nan=False)


def _fail(message: str) -> NoReturn:
    from hf_speedkit.core.printable import printable

    typer.echo("\n".join(map(printable, message.splitlines())), err=True)
    raise typer.Exit(SUBJECT_IS_BAD)
