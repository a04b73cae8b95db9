"""Runs a training script and ends it after a few measured steps: the process behind `hf-speedkit bench`.

    python -m hf_speedkit.trainer.bench_child '{"result": "out.json", "steps": 20, ...}' train.py --config settings.yaml

The script runs as it would by itself until it calls `train()`. There the number of steps, logging, saving, evaluation
and trackers are set for a bench, training runs, rank 0 writes the result, and the process ends: nothing after `train()`
runs, so no weights are saved. There is no official way to put a bound on a script that somebody else wrote, so
`transformers.Trainer.train` is replaced in this process, which does nothing else.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_speedkit.core.bench_records import as_text
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.benchmark import BenchLabel, measured, result_of
from hf_speedkit.trainer.trace_callback import TraceCallback

NO_TRAINING = 4
"""Exit code of a script that never trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTask:
    """What to measure; the JSON of the first argument.

    Args:
        result: file to write.
        steps: optimizer steps.
        name, workload, repetition, settings: see `BenchResult`.
        trace_step: optimizer step to trace; None for none.
    """

    result: str
    steps: int
    name: str
    workload: str
    repetition: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)
    trace_step: int | None = None


def bounded(task: BenchTask, train: Callable[..., object]) -> Callable[..., object]:
    """`Trainer.train` that measures `task.steps` steps, writes the result and ends the process."""

    def train_and_end(trainer: Any, *_: object, **__: object) -> None:
        prepare(trainer, task)
        throughput = measured(trainer)
        if task.trace_step is not None:
            attach(trainer, TraceCallback(task.trace_step))
        began = time.perf_counter()
        train(trainer)
        if trainer.is_world_process_zero():
            label = BenchLabel(
                name=task.name, workload=task.workload, repetition=task.repetition, settings=task.settings
            )
            result = result_of(trainer, throughput, label, train_call_s=time.perf_counter() - began)
            Path(task.result).write_text(as_text(result), encoding="utf-8")
        raise SystemExit(0)  # what follows would save, evaluate or upload

    return train_and_end


def prepare(trainer: Any, task: BenchTask) -> None:
    """Set what a bench needs: steps and logging; no saving, evaluation or tracker."""
    args = trainer.args
    args.max_steps = task.steps
    args.logging_strategy, args.logging_steps = IntervalStrategy.STEPS, max(2, task.steps // 4)
    args.save_strategy, args.eval_strategy = SaveStrategy.NO, IntervalStrategy.NO
    args.load_best_model_at_end = False
    trackers = tuple(INTEGRATION_TO_CALLBACK.values())
    handler = trainer.callback_handler
    handler.callbacks = [callback for callback in handler.callbacks if not isinstance(callback, trackers)]
    args.report_to = []


def main(argv: list[str]) -> int:
    """Run the script; see the module."""
    task, script = BenchTask(**json.loads(argv[0])), argv[1]
    Trainer.train = bounded(task, Trainer.train)
    sys.argv = argv[1:]
    # As `python script.py` does: modules beside the script can be imported.
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    print(f"{script} ended without calling train()", file=sys.stderr)  # noqa: T201  # the parent shows it
    return NO_TRAINING


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
