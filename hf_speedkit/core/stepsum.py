"""Steps added up: the form in which a rank's steps travel to the others, and how ranks are put together.

A rank's window is a few rows (`rank_rows`): one sum of the steps that may enter a rate, one of those that may not, and
one row for each of the first steps of a session, which have to be judged one by one (`throughput.warm_up`). Rows are
flat lists of floats, so that one all-gather of one float64 vector per logging step is all the traffic there is. Float64
holds token counts exactly up to 2**53.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hf_speedkit.core.records import NO_TOKENS, GpuUsage, StepRecord, TokenCounts
from hf_speedkit.core.step_parts import ACTIVITY_FIELDS, StepActivity


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSum:
    """Optimizer steps added up, of one rank or of all.

    Args:
        steps: how many.
        excluded: how many of them must not enter a rate.
        micro_batches: forward/backward passes.
        tokens: what they computed.
        step_time_s: training time; None where any step's is unknown, like every time below.
        data_wait_s: part of it spent waiting for batches.
        host_time_s: part of it spent issuing work.
        device_time_s: device spans of the steps.
        device_wait_s: part of step_time_s in which the host was seen waiting for the device.
        eval_time_s: pause for evaluation before these steps, not in step_time_s.
        save_time_s: pause for saving.
        log_time_s: pause for logging.
        flops: model FLOPs.
        recomputed_flops: FLOPs of what checkpointing computed once more.
        compiled: kernels and graphs compiled; None where that was not looked at.
        nonfinite: steps with a NaN or infinite loss or gradient; None where that was not looked at.
        nonfinite_losses: those of them with such a loss.
        first_nonfinite: the first such step; None where there is none.
    """

    steps: int = 0
    excluded: int = 0
    micro_batches: int = 0
    tokens: TokenCounts = NO_TOKENS
    step_time_s: float | None = 0.0
    data_wait_s: float | None = 0.0
    host_time_s: float | None = 0.0
    device_time_s: float | None = 0.0
    device_wait_s: float | None = 0.0
    eval_time_s: float = 0.0
    save_time_s: float = 0.0
    log_time_s: float = 0.0
    flops: float | None = 0.0
    recomputed_flops: float | None = 0.0
    compiled: int | None = 0
    nonfinite: int | None = 0
    nonfinite_losses: int | None = 0
    first_nonfinite: int | None = None


NO_STEPS = StepSum()

# How a quantity of one step becomes that of all ranks. Step time: the ranks run in step, so their times differ only
# where one of them paused (rank 0 writes a checkpoint and counts that as a pause, the others wait for it in their next
# step): the least is the one without foreign pauses. Pauses: the longest holds everyone up. The rest: means.
_OVER_RANKS: dict[str, Callable[[Sequence[float]], float]] = {
    "step_time_s": min,
    "data_wait_s": lambda values: sum(values) / len(values),
    "host_time_s": lambda values: sum(values) / len(values),
    "device_time_s": lambda values: sum(values) / len(values),
    "device_wait_s": lambda values: sum(values) / len(values),
    "eval_time_s": max,
    "save_time_s": max,
    "log_time_s": max,
    "flops": sum,
    "recomputed_flops": sum,
}
_TOKEN_FIELDS = tuple(field.name for field in fields(TokenCounts))
_GPU_FIELDS = tuple(field.name for field in fields(GpuUsage))
_COUNTS = ("steps", "excluded", "micro_batches")
_LAST = ("compiled", "nonfinite", "nonfinite_losses", "first_nonfinite")
_ROW_LENGTH = len(_COUNTS) + len(_TOKEN_FIELDS) + len(_OVER_RANKS) + len(_LAST)


def of_step(record: StepRecord) -> StepSum:
    """One step as a sum of one."""
    return StepSum(
        steps=1,
        excluded=int(record.excluded is not None),
        micro_batches=record.micro_batches,
        tokens=record.tokens,
        **{name: getattr(record, name) for name in _OVER_RANKS},
        compiled=record.compiled_kernels,
        nonfinite=None if record.nonfinite is None else int(record.nonfinite),
        nonfinite_losses=None if record.nonfinite_loss is None else int(record.nonfinite_loss),
        first_nonfinite=record.step if record.nonfinite else None,
    )


def total(sums: Iterable[StepSum]) -> StepSum:
    """Add sums of steps that followed one another on the same ranks. Unknown plus anything is unknown."""
    items = tuple(sums)
    tokens = NO_TOKENS
    for item in items:
        tokens = tokens + item.tokens
    parts: dict[str, Any] = {name: sum(getattr(item, name) for item in items) for name in _COUNTS}
    parts |= {name: _known(sum, [getattr(item, name) for item in items]) for name in _OVER_RANKS}
    return StepSum(
        **parts,
        tokens=tokens,
        compiled=_whole(_known(sum, [item.compiled for item in items])),
        nonfinite=_whole(_known(sum, [item.nonfinite for item in items])),
        nonfinite_losses=_whole(_known(sum, [item.nonfinite_losses for item in items])),
        first_nonfinite=_first(items),
    )


def over_ranks(sums: Sequence[StepSum]) -> StepSum:
    """Put the same steps of all ranks together: tokens and FLOPs add up, times follow the rules above."""
    tokens = NO_TOKENS
    for item in sums:
        tokens = tokens + item.tokens
    times: dict[str, Any] = {
        name: _known(rule, [getattr(item, name) for item in sums]) for name, rule in _OVER_RANKS.items()
    }
    return StepSum(
        steps=max(item.steps for item in sums),
        excluded=max(item.excluded for item in sums),
        micro_batches=sum(item.micro_batches for item in sums),
        tokens=tokens,
        **times,
        compiled=_whole(_known(max, [item.compiled for item in sums])),
        nonfinite=_whole(_known(max, [item.nonfinite for item in sums])),
        nonfinite_losses=_whole(_known(max, [item.nonfinite_losses for item in sums])),
        first_nonfinite=_first(sums),
    )


def rank_rows(records: Sequence[StepRecord], early: int) -> tuple[StepSum, ...]:
    """One rank's window as rows: later steps that count, later steps that do not, each of the first `early` alone.

    There are always 2 + early rows, the missing ones empty: an all-gather needs the same length on every rank, even
    if the ranks fell out of step.
    """
    first, later = records[:early], records[early:]
    return (
        total(of_step(record) for record in later if record.excluded is None),
        total(of_step(record) for record in later if record.excluded is not None),
        *(of_step(record) for record in first),
        *(NO_STEPS for _ in range(early - len(first))),
    )


def encode(rows: Sequence[StepSum], gpu: GpuUsage | None = None, activity: StepActivity | None = None) -> list[float]:
    """Rows, the window's GPU usage and its counted step as one flat list; None becomes NaN.

    Its length depends on len(rows) only.
    """
    flat: list[float | None] = []
    for row in rows:
        flat += [getattr(row, name) for name in _COUNTS]
        flat += [getattr(row.tokens, name) for name in _TOKEN_FIELDS]
        flat += [getattr(row, name) for name in (*_OVER_RANKS, *_LAST)]
    flat += [None if gpu is None else getattr(gpu, name) for name in _GPU_FIELDS]
    flat += [None if activity is None else getattr(activity, name) for name in ACTIVITY_FIELDS]
    return [math.nan if value is None else float(value) for value in flat]


def decode(vector: Sequence[float]) -> tuple[tuple[StepSum, ...], GpuUsage | None, StepActivity | None]:
    """Undo `encode`.

    Raises:
        ValueError: the length is not one that `encode` writes.
    """
    values = [None if math.isnan(value) else value for value in vector]
    tail = len(_GPU_FIELDS) + len(ACTIVITY_FIELDS)
    body, gpu, counted = values[:-tail], values[-tail : -len(ACTIVITY_FIELDS)], values[-len(ACTIVITY_FIELDS) :]
    if len(values) < tail or len(body) % _ROW_LENGTH:
        raise ValueError(f"{len(values)} numbers are not rows of {_ROW_LENGTH} and {tail} of a GPU")
    rows = tuple(_decode_row(body[at : at + _ROW_LENGTH]) for at in range(0, len(body), _ROW_LENGTH))
    samples = _whole(gpu[0])
    usage = None if samples is None else GpuUsage(samples=samples, **dict(zip(_GPU_FIELDS[1:], gpu[1:], strict=True)))
    known: dict[str, Any] = dict(zip(ACTIVITY_FIELDS, counted, strict=True))
    return rows, usage, None if known["launch_calls"] is None else StepActivity(**known)


def gpu_over_ranks(usages: Sequence[GpuUsage | None]) -> GpuUsage | None:
    """Mean of the ranks' usage (memory: the most); None where no rank measured any."""
    seen = [usage for usage in usages if usage is not None]
    if not seen:
        return None

    def mean(name: str) -> float | None:
        values = [value for value in (getattr(usage, name) for usage in seen) if value is not None]
        return sum(values) / len(values) if values else None

    memory = [usage.memory_gib for usage in seen if usage.memory_gib is not None]
    means = {name: mean(name) for name in _GPU_FIELDS if name != "samples"}
    return GpuUsage(
        samples=sum(usage.samples for usage in seen), **{**means, "memory_gib": max(memory) if memory else None}
    )


def _decode_row(row: Sequence[float | None]) -> StepSum:
    values = iter(row)
    counts = {name: int(next(values) or 0) for name in _COUNTS}
    tokens = {name: _whole(next(values)) for name in _TOKEN_FIELDS}
    rest: dict[str, Any] = {name: next(values) for name in _OVER_RANKS}
    rest |= {name: _whole(next(values)) for name in _LAST}
    return StepSum(
        **counts,
        tokens=TokenCounts(**tokens),  # type: ignore[arg-type]  # slots are always known
        **rest,
    )


def _known(rule: Callable[[Sequence[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return rule(known) if len(known) == len(values) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _first(sums: Sequence[StepSum]) -> int | None:
    return min((item.first_nonfinite for item in sums if item.first_nonfinite is not None), default=None)
