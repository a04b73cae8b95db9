"""The ladder: every rung in a process of its own, on the same data, repetitions interleaved, results as they come.

    python benchmarks/ladder.py --out RESULTS [--workloads 27b-8 27b-8-ga4] [--rungs ladder one-off]
                                [--repetitions 3] [--budget-seconds 560] [--done RESULTS ...] [--commit HASH]

Rungs, groups of rungs (ladder, one-off, choices) and workloads: benchmarks/rungs.py. A call that is killed loses the
run under way and nothing else; the next one goes on where it stopped: a result that lies in --out or --done is not
measured again. Repetition 1 of each rung has a traced step (launches, waits, groups of device time). Where Triton's
cache is empty, `speedkit` and `trl` first run once as repetition 0: they compile for those after them, in no table.
`hf-speedkit report RESULTS` makes the table.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rung import UNKNOWN_SETTING, steps_of
from rungs import GROUPS, RUNGS, WORKLOADS, Rung, Workload, selected

from hf_speedkit.core.bench_records import plain_name
from hf_speedkit.measure.environment import collect_environment
from hf_speedkit.measure.interleaved import Job, Outcome, holds_result, run_jobs

START_S = 35.0
"""Starting Python, importing, making 5.6 B weights, the proofs from a warm cache: 20-40 s on one H200."""

COLD_S = 180.0
"""The same where no kernel is compiled yet: 100-135 s more, measured."""

# Seconds a step of 8,192 slots, only to plan a call before anything is known (benchmarks/results/2026-11-29_*).
STEP_S = {"seed": 2.5, "stock-fallback": 1.1, "kernels": 1.0, "trl": 1.25, "speedkit": 0.6}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--workloads", nargs="+", default=["27b-8"], choices=WORKLOADS)
    parser.add_argument("--rungs", nargs="+", default=["ladder"], help="names of rungs and groups")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, help="optimizer steps of every rung")
    parser.add_argument("--budget-seconds", type=float, help="end in this time")
    parser.add_argument("--done", nargs="*", type=Path, default=[], help="folders whose results are not measured again")
    parser.add_argument("--no-cold", action="store_true", help="no repetition 0, though kernels are not compiled yet")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings for every rung")
    parser.add_argument("--commit", help="commit of the tree, where git is not at hand")
    given = parser.parse_args(argv)
    unknown = [name for name in given.rungs if name not in RUNGS and name not in GROUPS]
    if unknown:
        parser.error(f"no rung or group of that name: {', '.join(unknown)}; rungs are: {', '.join(RUNGS)}")
    return given


def planned(given: argparse.Namespace) -> list[tuple[Workload, Rung, int]]:
    """What to measure, in order: the first repetition of everything, then the second."""
    workloads = [WORKLOADS[name] for name in given.workloads]
    return [
        (workload, rung, repetition)
        for repetition in range(1, given.repetitions + 1)
        for workload in workloads
        for rung in selected(given.rungs, workload)
    ]


def compiling(given: argparse.Namespace) -> list[tuple[Workload, Rung, int]]:
    """The runs that compile kernels for those after them; none where Triton's cache holds some already."""
    workload = WORKLOADS[given.workloads[0]]
    if given.no_cold or workload.device == "cpu" or is_compiled():
        return []
    names = {rung.name for rung in selected(given.rungs, workload)}
    # speedkit first: it compiles before step 1, so that TRL's run meets warm kernels where both use the same.
    return [(workload, RUNGS[name], 0) for name in ("speedkit", "trl") if name in names]


def is_compiled() -> bool:
    """Whether Triton's cache on this machine holds anything; a machine that was started afresh has none."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return folder.is_dir() and next(folder.iterdir(), None) is not None


def file_name(workload: Workload, rung: Rung, repetition: int) -> str:
    """A result's file: a plain name, the same in every call."""
    return f"{workload.name}_{plain_name(rung.name)}_rep{repetition}.json"


def job(given: argparse.Namespace, workload: Workload, rung: Rung, repetition: int) -> Job:
    """The process for one run."""
    out = given.out / file_name(workload, rung, repetition)
    steps = steps_of(rung, workload, given.steps)
    command = [sys.executable, str(Path(__file__).with_name("rung.py")), rung.name, "--workload", workload.name]
    command += ["--out", str(out), "--steps", str(steps), "--repetition", str(repetition)]
    command += ["--logging-steps", str(max(2, steps // 4))]
    command += ["--trace", str(steps - 2)] if repetition == 1 and steps >= 8 else []
    command += ["--set", *given.set] if given.set else []
    command += ["--commit", given.commit] if given.commit else []
    step_s = STEP_S[rung.way] * workload.slots / 8192 * workload.accumulation
    start_s = COLD_S if repetition == 0 and rung.name == "speedkit" else START_S
    expected = 20.0 if workload.device == "cpu" else start_s + steps * step_s
    # A cold run takes minutes longer: it says nothing about how long the others take.
    name = f"{workload.name} {rung.name}" + (", cold" if repetition == 0 else "")
    return Job(name=name, command=tuple(command), out=out, expected_s=expected)


def measure(given: argparse.Namespace) -> list[Outcome]:
    """Everything that is planned and not done yet."""
    plan, folders = planned(given), [given.out, *given.done]
    todo = [item for item in plan if not any(holds_result(folder / file_name(*item)) for folder in folders)]
    print(f"{len(todo)} runs to measure, {len(plan) - len(todo)} are there", flush=True)
    jobs = [job(given, *item) for item in (*(compiling(given) if todo else ()), *todo)]
    return run_jobs(jobs, budget_s=given.budget_seconds, say=lambda line: print(line, flush=True))


def main(argv: list[str] | None = None) -> int:
    """Measure; 1 where a run failed for another reason than time or a setting this version does not have."""
    given = arguments(argv)
    given.commit = given.commit or collect_environment().commit
    if given.commit is None:
        print(
            "the commit is not known here, and a result without one cannot be committed: give --commit", file=sys.stderr
        )
        return 2
    outcomes = measure(given)
    bad = [
        one
        for one in outcomes
        if one.failure and one.failure.startswith("failed") and f"code {UNKNOWN_SETTING}" not in one.failure
    ]
    print(f"{sum(one.failure is None for one in outcomes)} measured, {len(bad)} failed, "
          f"{sum(one.failure is not None for one in outcomes) - len(bad)} left for another call")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
