"""What measuring costs: the same training run with and without all callbacks, in turns, in one process.

    python benchmarks/callback_overhead.py --out result.json [--workload 27b-8] [--runs 4] [--steps 26] [--commit HASH]

Runs go A B B A: A with every callback that SpeedSFTTrainer brings (metrics, GPU sampler, step log), B with
throughput=False, which leaves TRL's numbers alone. Both are timed from outside by one event on the device's clock at
each step's end, so logging counts: it is part of what measuring costs. Counting launches through CUPTI is off there,
since it comes once in a hundred steps; one more run with a count shows what that costs, and the sum is both together:
overhead of A over B, plus the count's excess over two plain steps, divided by a hundred steps.

About 2 minutes on one H200 with compiled kernels in the caches. `--workload tiny` runs it on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rung import SEED, build, settings_of, write
from rung import arguments as rung_arguments
from rungs import RUNGS, WORKLOADS
from transformers import TrainerCallback

WARM_UP = 6
COUNTED = 20
EVERY = 100


class OutsideClock(TrainerCallback):  # type: ignore[misc]
    """The end of every step, on the device's clock where there is one; the same in both arms."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._ends: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the end of a step."""
        if not self._cuda:
            self._ends.append(time.perf_counter())
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._ends.append(event)

    def steps_s(self) -> list[float]:
        """Seconds from each step's end to the next one's, logging in between included."""
        if not self._cuda:
            return [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        self._ends[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in zip(self._ends, self._ends[1:], strict=False)]


def one_run(given: argparse.Namespace, *, measured: bool, count: bool) -> tuple[list[float], Any]:
    """Step times of one run from outside, and its trainer."""
    rung, workload = RUNGS["speedkit"], WORKLOADS[given.workload]
    options = rung_arguments(["speedkit", "--out", "unused", "--steps", str(given.steps), "--logging-steps", "5"])
    with tempfile.TemporaryDirectory() as directory:
        settings = settings_of(rung, workload, options, str(Path(directory) / "run"))
        settings |= {"throughput": measured, "step_log": measured, "isolation_check": False, "kernel_assertion": "off"}
        settings |= {"activation_checkpointing_layers": "all", "count_launches_every": EVERY if count else 0}
        trainer = build(rung, workload, settings)
        clock = OutsideClock(workload.device)
        trainer.add_callback(clock)
        trainer.train()
        return clock.steps_s(), trainer


def environment_of(commit: str | None) -> Any:
    """Where this ran, with the commit that was given."""
    from dataclasses import replace

    from hf_speedkit.measure.environment import collect_environment

    found = collect_environment()
    return replace(found, commit=commit) if commit else found


def main() -> None:
    """Run in turns, compare, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, default="27b-8")
    parser.add_argument("--runs", type=int, default=4, help="runs with and without, together")
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--commit", help="commit of the tree, where git is not at hand")
    given = parser.parse_args()
    from datetime import UTC, datetime

    import torch

    from hf_speedkit.core.bench_records import BenchResult

    began, measured_at = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    means: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(given.runs):
        measured = turn % 4 in (0, 3)
        steps, trainer = one_run(given, measured=measured, count=False)
        # A whole number of logging intervals, so that both arms hold as many logs.
        steady = steps[WARM_UP - 1 :]
        steady = steady[: len(steady) // 5 * 5]
        means[measured].append(statistics.fmean(steady))
        print("with" if measured else "without", f"{means[measured][-1]:.5f} s a step", flush=True)
        parameters = trainer.model.num_parameters()
        del trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    with_s, without_s = statistics.fmean(means[True]), statistics.fmean(means[False])
    rates = {
        "step_time_with_callbacks_s": with_s,
        "step_time_without_callbacks_s": without_s,
        "overhead_percent": 100 * (with_s / without_s - 1),
        "spread_with_s": max(means[True]) - min(means[True]),
        "spread_without_s": max(means[False]) - min(means[False]),
    }
    steps, trainer = one_run(given, measured=True, count=True)
    totals = trainer.throughput.run_totals()
    if "speed/count_cost_s" in totals.rates and len(steps) > COUNTED + 3:
        usual = statistics.median(steps[WARM_UP:-1])
        excess = sum(steps[COUNTED - 3 : COUNTED]) - 3 * usual  # the warm-up step, the counted one, and the one after
        rates |= {key: value for key, value in totals.rates.items() if key.startswith("speed/")}
        rates["count_excess_s"] = excess
        # Whether CUPTI leaves launches slower behind: plain steps before the count against those after it.
        plain_before, plain_after = steps[WARM_UP : COUNTED - 4], steps[COUNTED:-1]
        rates["slower_after_count_percent"] = 100 * (
            statistics.median(plain_after) / statistics.median(plain_before) - 1
        )
        rates["overhead_with_counting_percent"] = rates["overhead_percent"] + 100 * excess / (EVERY * without_s)
    result = BenchResult(
        name="callback overhead",
        workload=given.workload,
        repetition=1,
        settings={
            "runs": given.runs,
            "steps": given.steps,
            "warm_up": WARM_UP,
            "order": "A B B A",
            "count_every": EVERY,
        },
        seeds={"weights": SEED, "data": SEED},
        measured_at=measured_at,
        environment=environment_of(given.commit),
        world_size=1,
        parameters=parameters,
        tokens=totals.session,
        rates=rates,
        steady_steps=totals.steady_steps,
        session_steps=totals.session_steps,
        train_call_s=time.perf_counter() - began,
        log=tuple(
            {key: float(value) for key, value in entry.items() if isinstance(value, (int, float))}
            for entry in trainer.state.log_history
            if "loss" in entry
        ),
    )
    write(given.out, result)


if __name__ == "__main__":
    main()
