"""A step log -> what a page shows of a run: curves over elapsed time, step parts, marks, totals. Pure arithmetic.

A curve is a row of levels: the mean of one logging window, over the time that the window took. A window in which a
metric was not measured has no level; nothing is drawn over it. Elapsed time is what rank 0's steps took, with their
pauses for evaluation, saving and logging, one after another: the log holds no clock time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_speedkit.core.rates import ratio
from hf_speedkit.core.records import Environment, StepRecord, TokenCounts
from hf_speedkit.core.run_limits import RunLimits, run_limits
from hf_speedkit.core.run_means import run_means, run_tokens, world_sizes
from hf_speedkit.core.step_log import LoggedWindow, StepLog

CURVES: Mapping[str, str] = {
    "real_tokens": "speed/real_tokens_per_second",
    "slots": "speed/slots_per_second",
    "utilization": "speed/gpu_utilization",
    "mfu": "speed/mfu",
    "hfu": "speed/hfu",
    "ofu": "speed/ofu",
    "memory": "speed/gpu_memory_gib",
    "loss": "loss",
    "eval_loss": "eval_loss",
    "step_time": "speed/step_time_s",
    "device_time": "speed/device_time_s",
    "power": "speed/gpu_power_w",
}
"""Curves of a page, and the metric each one is."""

PARTS = ("data wait", "host", "waiting for the device", "rest")
"""Parts of a step, from below. They are host times: rest is step time that is none of the three."""

_SHORTEST_PAUSE = 0.004
"""Share of the run below which a pause is not marked: less than a pixel or two."""


@dataclass(frozen=True, slots=True)
class Level:
    """One value that holds from `start` to `end`, in seconds of elapsed time; None: not measured."""

    start: float
    end: float
    value: float | None


@dataclass(frozen=True, slots=True)
class Mark:
    """A stretch of elapsed time with a reason: excluded steps, or a pause."""

    start: float
    end: float
    what: str


@dataclass(frozen=True, slots=True)
class PartsLevel:
    """Seconds of a mean step by part, in the order of `PARTS`; None: not measured."""

    start: float
    end: float
    parts: tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a page shows of one run. `None` = not measured.

    Args:
        name: how the page calls it.
        duration_s: elapsed time, pauses included.
        steps: number of steps shown. first_step, last_step: their range.
        world_size: number of ranks, the last one where it changed; None where the log does not let it be seen.
        curves: levels by the names of `CURVES`; only those with any value.
        parts: parts of a step, window by window.
        excluded: stretches of steps that enter no rate.
        pauses: stretches of evaluation and saving long enough to be seen.
        resumed: (elapsed time, step) at which later sessions begin.
        excluded_steps: number of steps by reason.
        tokens: of the whole run over all ranks where the log says, else of rank 0 (`tokens_of_rank_0`).
        training_time_s: sum of step times. eval_time_s, save_time_s, log_time_s: pauses.
        steady_steps: steps that the rates are made of.
        rates: run means by metric key, weighted by the time of the windows.
        first_loss, last_loss: of the first and last window.
        nonfinite_steps: steps with a NaN or infinite gradient.
        environments: where the sessions ran, in order, repeats left out.
        limits: what limited the steps, and the last counted step.
        notes: what a reader should know.
    """

    name: str
    duration_s: float
    steps: int
    first_step: int
    last_step: int
    world_size: int | None
    curves: Mapping[str, tuple[Level, ...]]
    parts: tuple[PartsLevel, ...]
    excluded: tuple[Mark, ...]
    pauses: tuple[Mark, ...]
    resumed: tuple[tuple[float, int], ...]
    excluded_steps: Mapping[str, int]
    tokens: TokenCounts
    tokens_of_rank_0: bool
    training_time_s: float
    eval_time_s: float
    save_time_s: float
    log_time_s: float
    steady_steps: int
    rates: Mapping[str, float]
    first_loss: float | None
    last_loss: float | None
    nonfinite_steps: int | None
    environments: tuple[Environment, ...]
    limits: RunLimits
    notes: tuple[str, ...]

    @property
    def packing_efficiency(self) -> float | None:
        """Real tokens / slots of the run, 0..1."""
        return ratio(self.tokens.real, self.tokens.slots)


def run_report(log: StepLog, *, name: str) -> RunReport:
    """What a page shows of a run."""
    spans = _spans(log.steps)
    duration = spans[-1][1]
    edges = _window_edges(log, spans)
    curves = {curve: _levels(log.windows, edges, _of(key)) for curve, key in CURVES.items()}
    tokens = run_tokens(log.windows)
    sizes = world_sizes(log.windows)
    losses = [window.metrics["loss"] for window in log.windows if "loss" in window.metrics]
    known = [step.nonfinite for step in log.steps if step.nonfinite is not None]
    return RunReport(
        name=name,
        duration_s=duration,
        steps=len(log.steps),
        first_step=log.steps[0].step,
        last_step=log.steps[-1].step,
        world_size=sizes[-1] if sizes else None,
        curves={curve: levels for curve, levels in curves.items() if any(one.value is not None for one in levels)},
        parts=tuple(
            PartsLevel(start, end, _parts(window.metrics))
            for window, (start, end) in zip(log.windows, edges, strict=True)
        ),
        excluded=_excluded(log.steps, spans),
        pauses=_pauses(log.steps, spans),
        resumed=tuple(
            (spans[at][0], session.step)
            for session in log.sessions[1:]
            if (at := bisect_right([step.step for step in log.steps], session.step)) < len(spans)
        ),
        excluded_steps=dict(Counter(step.excluded for step in log.steps if step.excluded is not None)),
        tokens=tokens if tokens is not None else _sum(log.steps),
        tokens_of_rank_0=tokens is None,
        training_time_s=sum(step.step_time_s for step in log.steps),
        eval_time_s=sum(step.eval_time_s for step in log.steps),
        save_time_s=sum(step.save_time_s for step in log.steps),
        log_time_s=sum(step.log_time_s for step in log.steps),
        steady_steps=sum(int(window.metrics.get("speed/steady_steps", 0)) for window in log.windows),
        rates=run_means(log.windows),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        nonfinite_steps=sum(known) if known else None,
        environments=_different([session.environment for session in log.sessions]),
        limits=run_limits(log.windows),
        notes=(*log.notes, *_rank_notes(sizes)),
    )


def _rank_notes(sizes: Sequence[int]) -> tuple[str, ...]:
    if len(sizes) < 2:
        return ()
    return (
        f"the number of ranks changed: {', then '.join(map(str, sizes[:6]))}; rates per device are means over them",
    )


def merged_parts(parts: Sequence[PartsLevel], most: int) -> tuple[PartsLevel, ...]:
    """At most about `most` levels: neighbours put together as means by time, those without a value left as gaps."""
    size = -(-len(parts) // most)
    if size <= 1:
        return tuple(parts)
    merged: list[PartsLevel] = []
    group: list[PartsLevel] = []
    for one in parts:
        if group and (len(group) == size or (one.parts is None) != (group[0].parts is None)):
            merged.append(_together(group))
            group = []
        group.append(one)
    merged.append(_together(group))
    return tuple(merged)


def _together(group: Sequence[PartsLevel]) -> PartsLevel:
    weights = [max(one.end - one.start, 1e-12) for one in group]
    means = None
    if group[0].parts is not None:
        columns = zip(*(one.parts for one in group if one.parts is not None), strict=True)
        means = tuple(sum(w * v for w, v in zip(weights, column, strict=True)) / sum(weights) for column in columns)
    return PartsLevel(group[0].start, group[-1].end, means)


def _different(environments: Sequence[Environment | None]) -> tuple[Environment, ...]:
    kept: list[Environment] = []
    for one in environments:
        if one is not None and one not in kept:
            kept.append(one)
    return tuple(kept)


def _spans(steps: Sequence[StepRecord]) -> list[tuple[float, float]]:
    """Begin and end of each step in elapsed time; its pauses come before its begin."""
    spans, now = [], 0.0
    for step in steps:
        begin = now + step.eval_time_s + step.save_time_s + step.log_time_s
        now = begin + step.step_time_s
        spans.append((begin, now))
    return spans


def _window_edges(log: StepLog, spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Begin and end of each window. A window begins after the one before, and never before its session."""
    numbers = [step.step for step in log.steps]
    starts = {session.step for session in log.sessions}
    edges, previous = [], log.sessions[0].step
    for window in log.windows:
        begin = max([previous, *(start for start in starts if start < window.step)])
        first, last = bisect_right(numbers, begin), bisect_right(numbers, window.step) - 1
        if first <= last:
            edges.append((spans[first][0], spans[last][1]))
        else:  # its steps are not in the file
            at = spans[last][1] if last >= 0 else 0.0
            edges.append((at, at))
        previous = window.step
    return edges


def _of(key: str) -> Callable[[Mapping[str, float]], float | None]:
    return lambda metrics: metrics.get(key)


def _levels(
    windows: Sequence[LoggedWindow],
    edges: Sequence[tuple[float, float]],
    value: Callable[[Mapping[str, float]], float | None],
) -> tuple[Level, ...]:
    return tuple(Level(start, end, value(window.metrics)) for window, (start, end) in zip(windows, edges, strict=True))


def _parts(metrics: Mapping[str, float]) -> tuple[float, ...] | None:
    step, host = metrics.get("speed/step_time_s"), metrics.get("speed/host_time_s")
    if step is None or host is None:
        return None
    data, device = metrics.get("speed/data_wait_s", 0.0), metrics.get("speed/device_wait_s", 0.0)
    return data, host, device, max(0.0, step - data - host - device)


def _excluded(steps: Sequence[StepRecord], spans: Sequence[tuple[float, float]]) -> tuple[Mark, ...]:
    marks: list[Mark] = []
    last = None
    for step, (start, end) in zip(steps, spans, strict=True):
        if step.excluded is not None:
            if marks and last == step.step - 1 and marks[-1].what == step.excluded:
                marks[-1] = Mark(marks[-1].start, end, step.excluded)
            else:
                marks.append(Mark(start, end, step.excluded))
            last = step.step
    return tuple(marks)


def _pauses(steps: Sequence[StepRecord], spans: Sequence[tuple[float, float]]) -> tuple[Mark, ...]:
    marks, shortest = [], _SHORTEST_PAUSE * spans[-1][1]
    for step, (begin, _) in zip(steps, spans, strict=True):
        at = begin - step.log_time_s
        for what, length in (("saving", step.save_time_s), ("evaluation", step.eval_time_s)):
            if length > shortest:
                marks.append(Mark(at - length, at, what))
            at -= length
    return tuple(marks)


def _sum(steps: Sequence[StepRecord]) -> TokenCounts:
    total = steps[0].tokens
    for step in steps[1:]:
        total = total + step.tokens
    return total
