"""`hf-speedkit bench`: a few measured steps of one's own job, or of two settings of it, taken in turns."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_speedkit.core.bench_records import BenchResult
    from hf_speedkit.measure.interleaved import Job

SUBJECT_IS_BAD = 1
RECIPE = "qwen27b_sft.py"
_TRACED_FROM_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Settings that take their turn: a file, and what is changed in it."""

    name: str
    config: Path
    workload: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)


def bench(
    configs: Annotated[list[Path], typer.Argument(metavar="SETTINGS.yaml...", help="Settings of the job.")],
    script: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help=f"The job, which takes --config FILE. Default: {RECIPE} beside it."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Also measure the first SETTINGS with this one changed. Repeatable."),
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps of a run.")] = 20,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each, taken in turns.")] = 2,
    launch: Annotated[
        str, typer.Option(metavar="COMMAND", help="What starts a process, e.g. 'accelerate launch --num_processes 8'.")
    ] = "",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("bench_results"),
    resume: Annotated[bool, typer.Option(help="Keep results that are there instead of measuring again.")] = False,
    budget_seconds: Annotated[float | None, typer.Option(min=1, help="Start no run that would end later.")] = None,
    fail_under: Annotated[
        float | None, typer.Option(metavar="TOKENS/S", help="Exit 1 if the first SETTINGS are slower (real tokens/s).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure a few steps of your own job: real tokens per second, MFU, where the step's time goes.

    Each run is a process of its own, with a folder of its own that is deleted; nothing is saved or logged to a tracker.
    Several SETTINGS, or --vary, are measured in turns and compared.
    Exit 0: measured. 1: a run failed, or is slower than --fail-under. 2: wrong use.
    """
    from hf_speedkit.cli.report_bench import read
    from hf_speedkit.measure.interleaved import holds_result, run_jobs
    from hf_speedkit.trainer.installed_versions import require_versions
    from hf_speedkit.trainer.machine import prepare_process

    require_versions()
    prepare_process()  # for the children: there torch is imported before the job can say so itself

    job = _script(script, configs)
    _check_launch(launch)
    contestants = _contestants(configs, vary or [])
    with tempfile.TemporaryDirectory(prefix="speedkit_bench_") as work:
        jobs = [
            _job(one, job, repetition, launch, out, Path(work), steps)
            for repetition in range(1, repetitions + 1)
            for one in contestants
        ]
        todo = [one for one in jobs if not (resume and holds_result(one.out))]
        names = {one.name for one in todo}
        # The first is about to run and says it itself; a misspelt setting of another one would cost that run first.
        others = [_job(one, job, 0, launch, out, Path(work), steps) for one in contestants[1:] if one.name in names]
        _rehearse(others)
        for one in todo:
            one.out.unlink(missing_ok=True)
        outcomes = run_jobs(todo, budget_s=budget_seconds, say=lambda line: typer.echo(line, err=True))
    results = read([one.out for one in jobs if holds_result(one.out)])
    typer.echo(_json(results) if as_json else _text(results, out), nl=as_json)
    failed = any(outcome.failure is not None and outcome.seconds is not None for outcome in outcomes)
    if failed or not results or _is_slow(results, contestants[0], fail_under):
        raise typer.Exit(SUBJECT_IS_BAD)


def _script(script: Path | None, configs: Sequence[Path]) -> Path:
    for config in configs:
        if not config.is_file():
            raise typer.BadParameter(f"no such file: {config}", param_hint="SETTINGS")
    found = configs[0].parent / RECIPE if script is None else script
    if not found.is_file():
        raise typer.BadParameter(f"no such file: {found}; name the script that trains", param_hint="--script")
    return found


def _check_launch(launch: str) -> None:
    try:
        words = shlex.split(launch)
    except ValueError as error:
        raise typer.BadParameter(f"{launch!r}: {error}", param_hint="--launch") from error
    if words and shutil.which(words[0]) is None:
        raise typer.BadParameter(
            f"there is no program {words[0]!r} here; e.g. 'accelerate launch'", param_hint="--launch"
        )


def _contestants(configs: Sequence[Path], vary: Sequence[str]) -> list[Contestant]:
    names = [config.stem for config in configs]
    if len(set(names)) < len(names):
        names = [f"{config.parent.name}/{config.stem}" for config in configs]
    workload = names[0] if len(configs) == 1 else ""  # several files have their script in common
    found = [
        Contestant(name=name, config=config, workload=workload) for name, config in zip(names, configs, strict=True)
    ]
    for change in vary:
        key, given, value = change.partition("=")
        if not given or not key.isidentifier():
            raise typer.BadParameter(f"not KEY=VALUE: {change}", param_hint="--vary")
        found.append(
            Contestant(name=f"{names[0]}, {change}", config=configs[0], workload=workload, changed={key: value})
        )
    if len({one.name for one in found}) < len(found):
        raise typer.BadParameter("the same settings are given twice", param_hint="SETTINGS")
    return found


def _settings(config: Path, options: Sequence[str]) -> dict[str, object]:
    from hf_speedkit.core.errors import SpeedkitError
    from hf_speedkit.trainer.job_settings import settings

    try:
        return settings(config, options)
    except SpeedkitError as error:
        raise typer.BadParameter(str(error), param_hint="SETTINGS") from error


def _job(one: Contestant, script: Path, repetition: int, launch: str, out: Path, work: Path, steps: int) -> Job:
    """One run; of repetition 0 the settings alone are parsed."""
    from hf_speedkit.core.bench_records import plain_name
    from hf_speedkit.measure.interleaved import Job

    name = f"{plain_name(one.name)}_{f'rep{repetition}' if repetition else 'settings'}"
    options = [word for key, value in one.changed.items() for word in (f"--{key}", value)]
    task = {
        "result": str((out / f"{name}.json").resolve()),
        "steps": steps,
        "name": one.name,
        "workload": one.workload or script.stem,
        "repetition": repetition,
        "settings": _settings(one.config, options),
        # The first run says where the launches and the device's time go; a traced step enters no rate.
        "trace_step": steps - 2 if repetition == 1 and steps >= _TRACED_FROM_STEPS else None,
        "rehearse": not repetition,
    }
    start = [*shlex.split(launch), "-m"] if launch else [sys.executable, "-m"]
    command = [*start, "hf_speedkit.trainer.bench_child", json.dumps(task, default=str), str(script)]
    command += ["--config", str(one.config), *options, "--output_dir", str(work / name)]
    return Job(name=one.name, command=tuple(command), out=out / f"{name}.json", expected_s=0.0)


def _rehearse(jobs: Sequence[Job]) -> None:
    """Let jobs parse their settings, before anything is measured; what one of them refuses ends the bench."""
    from hf_speedkit.measure.interleaved import run_jobs

    outcomes = run_jobs(jobs, say=lambda _: None)
    for outcome in outcomes:
        outcome.job.out.unlink(missing_ok=True)
        if outcome.failure is not None:
            typer.echo(f"{outcome.job.name}: its settings are not taken, and nothing was measured: {outcome.failure}",
                       err=True)  # fmt: skip
    if any(outcome.failure is not None for outcome in outcomes):
        raise typer.Exit(SUBJECT_IS_BAD)


def _text(results: Sequence[BenchResult], out: Path) -> str:
    from hf_speedkit.cli.report_tables import markdown
    from hf_speedkit.core.bench_table import gain, rows

    if not results:
        return "nothing was measured\n"
    found = rows(results)
    lines = [markdown(results)]
    for row in found[1:]:
        compared = gain(row, found[0])
        if compared is not None:
            doubt = "" if compared.apart else " (not told apart: the runs overlap, or one ran only once)"
            lines.append(f"{compared.name}: {compared.ratio:.3f} times {compared.base}{doubt}\n")
    lines.append(f"results: {out}\n")
    return "\n".join(lines)


def _json(results: Sequence[BenchResult]) -> str:
    from hf_speedkit.core.bench_table import gain, rows
    from hf_speedkit.core.records import to_dict

    found = rows(results)
    gains = [one for one in (gain(row, found[0]) for row in found[1:]) if one is not None]
    return json.dumps({"rows": [to_dict(row) for row in found], "gains": [to_dict(one) for one in gains]})


def _is_slow(results: Sequence[BenchResult], first: Contestant, fail_under: float | None) -> bool:
    from hf_speedkit.core.bench_table import rows

    if fail_under is None:
        return False
    speed = next((row.speed for row in rows(results) if row.name == first.name), 0.0)
    if speed < fail_under:
        typer.echo(f"{first.name}: {speed:,.0f} real tokens/s, less than the {fail_under:,.0f} asked for", err=True)
    return speed < fail_under
