"""One measured run as a file that can be committed: `BenchResult`, its JSON form, and what it must hold to count."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hf_speedkit.core.errors import BenchError
from hf_speedkit.core.records import Environment, StepRecord, TokenCounts, to_dict
from hf_speedkit.core.step_log import read_environment, read_step

FORMAT = 1
"""The version of the files that this reader knows."""

TOKENS = (
    "real tokens: slots that hold a token of a document, counted from the batch on the host; padding is not counted. "
    "Rate: real tokens of steady steps over all ranks / their step time, data wait included, warm-up and traced steps "
    "left out"
)
FLOPS = (
    "model FLOPs: forward and backward of matrix products (multiply-add = 2), attention by the causal pairs of each "
    "document, 6 x K x V per token and head of the gated delta rule, head on target positions where TRL's fused head "
    "runs; no recompute, no padding (hf_speedkit/core/flops.py)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One run of a training job, measured: what ran, where, and what came of it.

    Args:
        name: what was varied: a rung of the ladder, a settings file.
        workload: what was trained. Results of one workload may be compared.
        repetition: 1, 2, ...; 0 is a run on a cold machine, which enters no table.
        settings: every setting that was given.
        seeds: by what they seed.
        measured_at: UTC, ISO 8601.
        environment: versions, GPUs, driver, and the commit of the code that ran.
        world_size: processes.
        parameters: of the model.
        kernels: what each kernel function was bound to, in words; empty where nothing looked.
        tokens: of the whole run.
        steps: optimizer steps of rank 0, as measured; empty in files made before these were kept.
        rates: rates and mean times of steady steps, by key of `hf_speedkit.core.metrics.METRICS`.
        steady_steps: how many steps those are of.
        session_steps: how many there were.
        train_call_s: time of `trainer.train()`, proofs and compilation included.
        startup_s: of it, before step 1, by what took it.
        peak_memory_gib: most memory allocated by torch. reserved_memory_gib: most memory it held.
        launches: device events (kernels, copies, memsets) that one optimizer step started.
        launches_from: how they were counted.
        host_waits: blocking calls of the traced step.
        device_groups_s: device time of the traced step by what it was spent on.
        log: what was logged, numbers by key.
        token_definition, flops_formula: what the numbers mean.
    """

    name: str
    workload: str
    repetition: int
    settings: Mapping[str, object]
    seeds: Mapping[str, int]
    measured_at: str
    environment: Environment
    world_size: int
    parameters: int
    kernels: tuple[str, ...] = ()
    tokens: TokenCounts
    steps: tuple[StepRecord, ...] = ()
    rates: Mapping[str, float]
    steady_steps: int
    session_steps: int
    train_call_s: float
    startup_s: Mapping[str, float] = field(default_factory=dict)
    peak_memory_gib: float | None = None
    reserved_memory_gib: float | None = None
    launches: int | None = None
    launches_from: str | None = None
    host_waits: int | None = None
    device_groups_s: Mapping[str, float] = field(default_factory=dict)
    log: tuple[Mapping[str, float], ...] = ()
    token_definition: str = TOKENS
    flops_formula: str = FLOPS


def document(result: BenchResult) -> dict[str, object]:
    """The JSON form of a result; of each step, what was measured."""
    values = to_dict(result)
    values["steps"] = [_known(to_dict(step)) for step in result.steps]
    return {"kind": "bench", "format": FORMAT, **values}


def as_text(result: BenchResult) -> str:
    """The JSON form as a file's text: a line for each field, step and log entry, so that files can be compared."""
    lines = []
    for key, value in document(result).items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(one, allow_nan=False) for one in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _known(step: Mapping[str, object]) -> dict[str, object]:
    pauses = ("eval_time_s", "save_time_s", "log_time_s")
    return {key: value for key, value in step.items() if value is not None and not (key in pauses and value == 0.0)}


def plain_name(name: str) -> str:
    """A name as part of a file's name: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def is_bench(values: object) -> bool:
    """Whether a JSON document says that it is a BenchResult."""
    return isinstance(values, Mapping) and values.get("kind") == "bench"


def bench_result(values: Mapping[str, Any], *, name: str = "the file") -> BenchResult:
    """The result that a JSON document holds.

    Args:
        values: the document.
        name: how messages call it.

    Raises:
        BenchError: it is no result, of another format, or lacks a field.
    """
    if not is_bench(values):
        raise BenchError(f"{name} is not the result of a bench", mend="give files that `hf-speedkit bench` wrote")
    if values.get("format") != FORMAT:
        raise BenchError(
            f"{name} has format {str(values.get('format'))[:40]!r}; this version reads format {FORMAT}",
            mend="use the hf-speedkit version that wrote it, or a newer one: pip install -U hf-speedkit",
        )
    known = {one.name for one in fields(BenchResult)}
    given = {key: value for key, value in values.items() if key in known}
    steps = [read_step(one) for one in given.get("steps", ()) if isinstance(one, Mapping)]
    environment = read_environment(given.get("environment"))
    try:
        if environment is None:
            raise TypeError("environment")
        return BenchResult(
            **{
                **given,
                "environment": environment,
                "tokens": TokenCounts(**given["tokens"]),
                "steps": tuple(step for step in steps if step is not None),
                "kernels": tuple(given.get("kernels", ())),
                "log": tuple(given.get("log", ())),
            }
        )
    except (TypeError, KeyError) as error:
        raise BenchError(f"{name} is damaged or incomplete: {error}", mend="measure it again") from error


def missing_provenance(result: BenchResult) -> tuple[str, ...]:
    """What a result lacks that a reader needs to trust or repeat it; empty when it can be committed."""
    on_gpu = bool(result.environment.devices)
    packages = result.environment.packages
    checks = {
        "commit": result.environment.commit,
        "date": result.measured_at,
        "seeds": result.seeds,
        "settings": result.settings,
        "versions of torch, transformers and trl": {"torch", "transformers", "trl"} <= set(packages),
        "driver": result.environment.driver or not on_gpu,
        "clock, power and utilisation of the GPU": not on_gpu or any("speed/gpu_sm_clock_mhz" in e for e in result.log),
        "token definition": result.token_definition,
        "FLOPs formula": result.flops_formula,
        "rates of steady steps": result.steady_steps and "speed/real_tokens_per_second" in result.rates,
    }
    return tuple(name for name, there in checks.items() if not there)
