"""`hf-speedkit trace`: one traced step as two tables and a verdict; compared, and as a gate for CI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_speedkit.core.records import Finding
    from hf_speedkit.core.trace_compare import Gate
    from hf_speedkit.core.trace_records import TraceSummary

SUBJECT_IS_BAD = 1
WRONG_USE = 2


def trace(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Trace of torch.profiler (.json, .json.gz).")],
    compare: Annotated[
        Path | None, typer.Option(metavar="BASE", help="An older trace: show what changed from it to FILE.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(metavar="EXPR", help="Exit 1 if true, e.g. 'launches>20000', 'device_idle>0.1'. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Rows per table.")] = 10,
    max_gib: Annotated[float, typer.Option(min=0.001, help="Largest file read, in GiB of JSON.")] = 4.0,
) -> None:
    """Read a trace: two tables, what limits the step, and what to do about it.

    Several FILEs are ranks of one job: each gets a verdict, and a table compares them.
    Exit 0: good. 1: a problem was found (with --fail-if only these expressions decide), or the file is damaged
    beyond reading. 2: wrong use.
    """
    from hf_speedkit.core.errors import SpeedkitError
    from hf_speedkit.core.trace_compare import parse_gate

    if compare is not None and len(files) > 1:
        raise typer.BadParameter("give one FILE to compare", param_hint="--compare")
    for path in [*files, *([compare] if compare else [])]:
        _require_file(path)
    try:
        gates = [parse_gate(text, comparing=compare is not None) for text in fail_if or ()]
    except SpeedkitError as error:
        raise typer.BadParameter(str(error), param_hint="--fail-if") from error
    try:
        summaries = [_read(path, max_gib) for path in files]
        base = _read(compare, max_gib) if compare is not None else None
    except SpeedkitError as error:
        from hf_speedkit.core.printable import printable

        typer.echo("\n".join(map(printable, str(error).splitlines())), err=True)
        raise typer.Exit(SUBJECT_IS_BAD) from error
    raise typer.Exit(_report(summaries, base, gates, as_json=as_json, top=top))


def _require_file(path: Path) -> None:
    if path.is_dir():
        # .trace.json: torch's own tensorboard_trace_handler
        names = [f"{place}*{end}" for place in ("", "traces/") for end in (".json.gz", ".trace.json")]
        inside = sorted(str(one) for name in names for one in path.glob(name))
        hint = f"traces in it: {', '.join(inside[:8])}" if inside else "there is no .json.gz or .trace.json in it"
        raise typer.BadParameter(f"{path} is a folder; {hint}", param_hint="FILE")
    if not path.is_file():
        raise typer.BadParameter(f"no such file: {path}", param_hint="FILE")


def _read(path: Path, max_gib: float) -> TraceSummary:
    from rich.console import Console

    from hf_speedkit import summarize_trace

    with Console(stderr=True).status(f"reading {path.name}") if path.stat().st_size > 1 << 24 else _Quiet():
        return summarize_trace(path, limit_bytes=round(max_gib * 2**30))


class _Quiet:
    """Stands for the progress line of a file that is read in no time."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _report(
    summaries: list[TraceSummary], base: TraceSummary | None, gates: list[Gate], *, as_json: bool, top: int
) -> int:
    from hf_speedkit.cli.trace_view import as_document, print_report
    from hf_speedkit.core.diagnosis import diagnose
    from hf_speedkit.core.trace_compare import compare_traces, gate_metrics

    judged = [(summary, diagnose(summary)) for summary in summaries]
    failures = [
        failure
        for summary in summaries
        for failure in (gate.judge(gate_metrics(summary, base)) for gate in gates)
        if failure is not None
    ]
    comparison = compare_traces(base, summaries[0]) if base is not None else None
    if as_json:
        typer.echo(as_document(judged, comparison, failures))
    else:
        print_report(judged, comparison, failures, top=top)
    bad = bool(failures) if gates else any(_is_problem(finding) for _, found in judged for finding in found)
    return SUBJECT_IS_BAD if bad else 0


def _is_problem(finding: Finding) -> bool:
    from hf_speedkit.core.records import Severity

    return finding.severity is Severity.PROBLEM
