"""One metric as a record, and the ways in which metrics are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class By(NamedTuple):
    """How something is measured: what is read, and what that costs per step, in words."""

    source: str
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One logged number.

    Args:
        key: name in the log; trackers of the Trainer put "train/" before it.
        unit: what it is counted in.
        formula: how it follows from the steps.
        by: how it is measured.
    """

    key: str
    unit: str
    formula: str
    by: By


COUNTED = By(
    "the batch: the collator's counts, else its mask, boundaries and labels",
    "none: host integers from the collator, else one small device kernel per micro-batch, read when logging",
)
CLOCK = By("time.perf_counter at the Trainer's callbacks", "two host clock readings a step")
EVENTS = By("CUDA events", "two CUDA events a step, read when logging")
NVML = By("NVML by nvidia-ml-py", "one NVML poll a second in a thread")
REDUCTION = By("the ranks' own values", "part of the one all-gather per logging step")
ARITHMETIC = By(
    "hf_speedkit/core/flops.py on the batch's counts, hf_speedkit/core/devices.py",
    "none: host arithmetic when logging",
)
MARKS = By("the steps' own marks", "none")
LOOK = By(
    "the loss and the gradient",
    "a look at the loss and at the gradient's norm (plain Trainer: the smallest gradient) on the device, read when "
    "logging",
)
COMPILERS = By(
    "Triton's compilation listener, torch._dynamo's counters", "a listener that Triton calls when it compiles"
)
CUPTI = By(
    "CUPTI through torch.profiler, CUDA activities only",
    "a recording of one step in count_launches_every and of the step before; both are kept out of the rates",
)


def all_by(by: By, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    """Metrics (key without its prefix, unit, formula) that are measured in one way."""
    return tuple(Metric(key=f"speed/{key}", unit=unit, formula=formula, by=by) for key, unit, formula in rows)
