"""`measured_run`: train with a Trainer that is built already, and return what came of it as a BenchResult."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from trl import SFTTrainer

from hf_speedkit.core.bench_records import BenchResult
from hf_speedkit.core.errors import BenchError, SpeedkitError, StepLogError
from hf_speedkit.core.records import KernelCheck, StepRecord
from hf_speedkit.core.step_log import parse_step_log
from hf_speedkit.kernels.inspection import check_kernels
from hf_speedkit.measure.environment import collect_environment
from hf_speedkit.trainer.attach import attach, detach
from hf_speedkit.trainer.metrics.mfu_inputs import flops_of
from hf_speedkit.trainer.output import STEP_LOG_NAME
from hf_speedkit.trainer.sinks import JsonlSink
from hf_speedkit.trainer.throughput_callback import ThroughputCallback
from hf_speedkit.trainer.trace_callback import TraceCallback

if TYPE_CHECKING:
    from hf_speedkit.core.trace_records import TraceSummary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLabel:
    """What a run is called in its result; the arguments are those of `BenchResult`."""

    name: str
    workload: str
    repetition: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    commit: str | None = None


def measured(trainer: Any) -> ThroughputCallback:
    """The trainer's own ThroughputCallback, or a new one that writes the step log `result_of` reads."""
    own = getattr(trainer, "throughput", None)
    if isinstance(own, ThroughputCallback):
        return own
    flops = flops_of(trainer.model)
    if flops is not None and isinstance(trainer, SFTTrainer) and trainer.args.device.type == "cuda":
        # TRL's fused head scores target positions only on a GPU, and makes its product again in backward.
        flops = replace(flops, head_on="target", head_again=True)
    for other in [one for one in trainer.callback_handler.callbacks if isinstance(one, ThroughputCallback)]:
        detach(trainer, other)  # the script's own, which may write nothing
    callback = ThroughputCallback(flops=flops, sinks=[JsonlSink(Path(trainer.args.output_dir) / STEP_LOG_NAME)])
    attach(trainer, callback)
    return callback


def measured_run(trainer: Any, label: BenchLabel, *, trace_step: int | None = None) -> BenchResult:
    """Train, and return the result.

    Call it on every rank; each gets the numbers of all ranks, memory and steps being its own.

    Args:
        trainer: any transformers Trainer, ready to train, with an output_dir of its own. One without a
            ThroughputCallback gets one.
        label: what the result says of itself. Its `seeds` are completed from the Trainer's arguments.
        trace_step: trace this optimizer step, for its launches, waits and groups of device time; it enters no rate.

    Raises:
        BenchError: not one step was steady.
    """
    throughput = measured(trainer)
    if trace_step is not None:
        attach(trainer, TraceCallback(trace_step))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    trainer.train()
    return result_of(trainer, throughput, label, train_call_s=time.perf_counter() - began)


def result_of(trainer: Any, throughput: ThroughputCallback, label: BenchLabel, *, train_call_s: float) -> BenchResult:
    """The result of a trainer that has trained.

    Args:
        trainer: the trainer.
        throughput: its callback.
        label: what the result says of itself.
        train_call_s: how long `train()` took.

    Raises:
        BenchError: not one step was steady.
    """
    totals = throughput.run_totals()
    if not totals.steady_steps:
        raise BenchError(
            f"none of the {totals.session_steps} steps was steady: there is no rate",
            mend="measure more steps: the first one is always warm-up",
        )
    model, args = trainer.model, trainer.args
    environment = collect_environment()
    startup = getattr(trainer, "startup", None)
    trace = _trace(Path(args.output_dir))
    log = tuple(_numbers(entry) for entry in trainer.state.log_history if "loss" in entry)
    cuda = args.device.type == "cuda"
    return BenchResult(
        name=label.name,
        workload=label.workload,
        repetition=label.repetition,
        settings=label.settings,
        seeds={"trainer": args.seed, **label.seeds},
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=replace(environment, commit=label.commit or environment.commit),
        world_size=args.world_size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        kernels=tuple(dict.fromkeys(map(_words, getattr(startup, "kernels", ()) or check_kernels(model)))),
        tokens=totals.session,
        steps=_steps(Path(args.output_dir)),
        rates=dict(totals.rates),
        steady_steps=totals.steady_steps,
        session_steps=totals.session_steps,
        train_call_s=train_call_s,
        startup_s=dict(getattr(startup, "seconds", {})),
        peak_memory_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        reserved_memory_gib=torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        log=log,
        **_launches(log, trace),
    )


def _launches(log: Sequence[Mapping[str, float]], trace: TraceSummary | None) -> dict[str, Any]:
    """What one step started, from the traced step where there is one, else from the last counted one."""
    counted = next((entry["speed/launches"] for entry in reversed(log) if "speed/launches" in entry), None)
    if trace is None:
        return {} if counted is None else {"launches": round(counted), "launches_from": "a counted step"}
    found = [step.launches for step in trace.full_steps if step.launches is not None]
    traced = {"launches": round(fmean(found)), "launches_from": "the traced step"} if found else {}
    return {
        **({} if counted is None else {"launches": round(counted), "launches_from": "a counted step"}),
        **traced,
        "host_waits": sum(row.calls for row in trace.syncs) if trace.runtime_calls else None,
        "device_groups_s": {row.group: row.total_ns / 1e9 / trace.step_count for row in trace.groups},
    }


def _trace(directory: Path) -> TraceSummary | None:
    from hf_speedkit.measure.trace import summarize_trace

    for path in sorted((directory / "traces").glob("trace_rank0_*.json.gz")):
        try:
            return summarize_trace(path)
        except SpeedkitError as error:
            logger.warning("the traced step says nothing: %s", error.what)
    return None


def _steps(directory: Path) -> tuple[StepRecord, ...]:
    path = directory / STEP_LOG_NAME
    if not path.is_file():  # other ranks write none, and a trainer may have been told not to
        return ()
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_step_log(lines, name=path.name).steps
    except StepLogError as error:
        logger.warning("no single steps in the result: %s", error.what)
        return ()


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in entry.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def _words(check: KernelCheck) -> str:
    return f"{check.function} {check.verdict.value}: {check.evidence}"
