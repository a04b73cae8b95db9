"""Runs a training script and ends it after a few measured steps: the process behind `hf-speedkit bench`.

    python -m hf_speedkit.trainer.bench_child '{"result": "out.json", "steps": 20, ...}' train.py --config settings.yaml

The script runs as it would by itself until it calls `train()`. There the number of steps, logging, saving, evaluation
and trackers are set for a bench, training runs, rank 0 writes the result, and the process ends: nothing after `train()`
runs, so no weights are saved. There is no official way to put a bound on a script that somebody else wrote, so
`transformers.Trainer.train` is replaced in this process, which does nothing else.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import HfArgumentParser, PreTrainedModel, Trainer
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import TrlParser

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
        rehearse: run the script no further than its settings are taken, and write an empty result.
    """

    result: str
    steps: int
    name: str
    workload: str
    repetition: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)
    trace_step: int | None = None
    rehearse: bool = False


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
        _leave()  # what follows would save, evaluate or upload

    return train_and_end


def _leave() -> NoReturn:
    """End this process well. One of several skips Python's way out, on which gloo's threads end it by SIGABRT."""
    if torch.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    raise SystemExit(0)


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


def stop_when_settings_are_taken(task: BenchTask) -> None:
    """End this process well as soon as the script's settings have been parsed, or where it goes on to load or train.

    What parsers refuse is refused here as it would be in the run: unknown names, and values that a config rejects.
    """

    def ended(*_: object, **__: object) -> None:
        Path(task.result).write_text("{}", encoding="utf-8")
        _leave()

    def parsed(parse: Callable[..., object], *, of_trl: bool) -> Callable[..., object]:
        def parse_and_end(parser: Any, *args: object, **more: object) -> object:
            result = parse(parser, *args, **more)
            # TRL's own parser calls the other one, and looks at unknown names behind it.
            if of_trl or not isinstance(parser, TrlParser):
                ended()
            return result

        return parse_and_end

    HfArgumentParser.parse_args_into_dataclasses = parsed(HfArgumentParser.parse_args_into_dataclasses, of_trl=False)
    TrlParser.parse_args_and_config = parsed(TrlParser.parse_args_and_config, of_trl=True)
    PreTrainedModel.from_pretrained = ended
    Trainer.train = ended


def main(argv: list[str]) -> int:
    """Run the script; see the module."""
    task, script = BenchTask(**json.loads(argv[0])), argv[1]
    if task.rehearse:
        stop_when_settings_are_taken(task)
    else:
        Trainer.train = bounded(task, Trainer.train)
    sys.argv = argv[1:]
    # As `python script.py` does: modules beside the script can be imported.
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    print(f"{script} ended without calling train()", file=sys.stderr)  # noqa: T201  # the parent shows it
    return NO_TRAINING


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
