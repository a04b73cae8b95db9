"""Runs jobs one after the other, each in a process of its own, within a time budget; what fails does not end the rest.

Stands on the standard library: a bench's parent must not hold a GPU, and starts in no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hf_speedkit.core.bench_records import is_bench

_TAIL_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process that writes one file.

    Args:
        name: jobs of one name take the same time; after a failure, the others of that name are left out.
        command: the process.
        out: the file it writes; its output is kept beside it, as `.failed.txt`, where it fails.
        expected_s: how long it takes, as far as is known before the first of its name ran.
        environment: variables to set.
    """

    name: str
    command: tuple[str, ...]
    out: Path
    expected_s: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job.

    Args:
        job: the job.
        seconds: how long it ran; None where it did not.
        failure: why there is no file; None where there is.
    """

    job: Job
    seconds: float | None = None
    failure: str | None = None


def run_jobs(
    jobs: Sequence[Job],
    *,
    budget_s: float | None = None,
    say: Callable[[str], object] = print,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run jobs in order, as far as the budget goes.

    A job that is not expected to end in time is left out, and one that has not ended in time is ended with all its
    children. Ctrl-C ends the job under way and passes on; files that are there stay.

    Args:
        jobs: in the order to run them in; interleave repetitions (A B C A B C), so that drift meets all alike.
        budget_s: seconds for all of them; None for as long as it takes.
        say: gets one line for each job.
        clock: seconds, monotonic.

    Returns:
        One outcome for each job.
    """
    began, taken, failed, outcomes = clock(), dict[str, float](), set[str](), list[Outcome]()
    for number, job in enumerate(jobs, start=1):
        left = None if budget_s is None else budget_s - (clock() - began)
        expected = taken.get(job.name, job.expected_s)
        if job.name in failed:
            outcome = Outcome(job=job, failure="left out: it failed before")
        elif left is not None and expected > left:
            outcome = Outcome(job=job, failure=f"left out: needs about {expected:.0f} s, {left:.0f} s are left")
        else:
            outcome = _run(job, left, clock)
            if outcome.failure is None:
                taken[job.name] = outcome.seconds or expected
            else:
                failed.add(job.name)
        outcomes.append(outcome)
        time_s = "" if outcome.seconds is None else f" after {outcome.seconds:.1f} s"
        # The time first: the last line of a failure may be a command that somebody copies.
        say(f"[{number}/{len(jobs)}] {job.out.name}{time_s}: {outcome.failure or 'measured'}")
    return outcomes


def holds_result(path: Path) -> bool:
    """Whether a file is there and holds a whole result: one that was cut off is to be measured again."""
    try:
        return is_bench(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def _run(job: Job, limit_s: float | None, clock: Callable[[], float]) -> Outcome:
    job.out.parent.mkdir(parents=True, exist_ok=True)
    output, began = job.out.with_suffix(".failed.txt"), clock()
    with output.open("wb") as file:
        # A session of its own: loader workers and ranks end with it.
        process = subprocess.Popen(
            job.command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **job.environment},
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = clock() - began
    if code == 0 and job.out.is_file():
        output.unlink()
        return Outcome(job=job, seconds=seconds)
    if code is None:
        return Outcome(job=job, seconds=seconds, failure="ended: the time budget is used up")
    what = f"exit code {code}" if code else "it wrote no result"
    return Outcome(job=job, seconds=seconds, failure=f"failed, {what}; {output.name} ends with:\n{_tail(output)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended, as it should
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(path: Path) -> str:
    """The last lines, and before them a refusal that a launcher's own report has pushed out of them."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    last = lines[-_TAIL_LINES:]
    told = next((number for number, line in enumerate(lines) if line.startswith("Mend it:")), None)
    if told is not None and lines[told] not in last:
        began = max((number for number in range(told) if not lines[number].strip()), default=-1) + 1
        goes_on = lines[told + 1 : told + 2] if lines[told + 1].startswith("Go on all the same:") else []
        last = [*lines[began : told + 1][-_TAIL_LINES:], *goes_on, "...", *last]
    return "\n".join(f"    {line[:400]}" for line in last)
