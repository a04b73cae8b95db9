"""StepRecords -> metrics: what may enter a rate, rates, totals. Pure arithmetic on records.

Tokens per second = tokens of steady steps, over all ranks / their step time. Sums come first and one division last:
never a mean of rates, never a batch size times a length, never an accumulation factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from hf_speedkit.core.records import NO_TOKENS, GpuUsage, StepRecord, TokenCounts
from hf_speedkit.core.stepsum import NO_STEPS, StepSum, gpu_over_ranks, over_ranks, rank_rows, total

EARLY_STEPS = 10
"""Steps at the start of a session that are judged one by one. On one H200 autotuning showed up to step 5."""

SLOW_FACTOR = 2.0
"""An early step is warm-up if it took more than this many times the usual. There: 0.8 s usual, 3.4 s when tuning."""

SLOW_MARGIN_S = 0.2
"""And at least this much longer: no compilation takes less, and steps of milliseconds vary by a factor of two alone."""

WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWindow:
    """The steps since the last reduction, of all ranks.

    Args:
        early: those that belong to the first steps of the session, each alone, over ranks.
        later: the other steps that may enter a rate, added up, over ranks.
        later_excluded: the other steps that may not.
        warm_up: for each of `early`, whether it must stay out of the rates.
        ranks: the steps that count, added up, rank by rank.
        gpu: GPU usage over ranks.
        consistent: every rank had the same steps; if not, no rate can be made.
    """

    early: tuple[StepSum, ...]
    later: StepSum
    later_excluded: StepSum
    warm_up: tuple[bool, ...]
    ranks: tuple[StepSum, ...]
    gpu: GpuUsage | None = None
    consistent: bool = True

    @property
    def steady(self) -> StepSum:
        """The steps that count."""
        return total([self.later, *_where(self.early, self.warm_up, False)])

    @property
    def excluded(self) -> StepSum:
        """The steps that do not."""
        return total([self.later_excluded, *_where(self.early, self.warm_up, True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a session has counted so far, over all ranks.

    Args:
        world_size: number of ranks.
        before: tokens of earlier sessions of the run; None where a resumed run's are unknown.
        early: the first steps of this session, each alone.
        later: the later steps that count.
        later_excluded: the later steps that do not.
    """

    world_size: int = 1
    before: TokenCounts | None = NO_TOKENS
    early: tuple[StepSum, ...] = ()
    later: StepSum = NO_STEPS
    later_excluded: StepSum = NO_STEPS

    def with_window(self, window: JobWindow) -> Ledger:
        """The ledger after `window`."""
        return replace(
            self,
            early=self.early + window.early,
            later=total([self.later, window.later]),
            later_excluded=total([self.later_excluded, window.later_excluded]),
        )

    @property
    def early_left(self) -> int:
        """How many of the next steps still count as the first of the session."""
        return max(0, EARLY_STEPS - len(self.early))

    @property
    def session(self) -> StepSum:
        """Every step of this session."""
        return total([self.later, self.later_excluded, *self.early])

    @property
    def steady(self) -> StepSum:
        """The steps of this session that count, its early ones judged by all that is known now."""
        return total([self.later, *_where(self.early, warm_up(self.early), False)])

    @property
    def run_tokens(self) -> TokenCounts | None:
        """Tokens of the whole run, earlier sessions included; None where those are unknown."""
        return None if self.before is None else self.before + self.session.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """What a run came to, for a summary.

    Args:
        tokens: the whole run over all ranks; None where earlier sessions are unknown.
        session: this session only.
        session_steps: optimizer steps of this session.
        steady_steps: those that the rates are made of.
        training_time_s: step times of this session, warm-up included.
        eval_time_s: time of evaluation, not in training_time_s.
        save_time_s: time of saving.
        log_time_s: time of logging.
        nonfinite_steps: steps with a NaN or infinite gradient.
        rates: the steady rates and mean times of this session, by metric key.
    """

    tokens: TokenCounts | None
    session: TokenCounts
    session_steps: int
    steady_steps: int
    training_time_s: float | None
    eval_time_s: float
    save_time_s: float
    log_time_s: float
    nonfinite_steps: int | None
    rates: Mapping[str, float] = field(default_factory=dict)


def warm_up(early: Sequence[StepSum]) -> tuple[bool, ...]:
    """Which of the first steps of a session must stay out of the rates.

    Always the first one (compilation, allocator growth), and those someone excluded. Of the others, a step that took
    more than SLOW_FACTOR times the low median of these steps, both in time and in time per slot (so that a large batch
    is not mistaken for compilation), and at least SLOW_MARGIN_S longer. Waiting for data is not warm-up: it is left out
    of the comparison, which is of device spans where those were measured.
    """
    flags = [index == 0 or bool(step.excluded) for index, step in enumerate(early)]
    judged = [index for index in range(1, len(early)) if not flags[index]]
    times = {index: _work_time(early[index]) for index in judged}
    known = [time for time in times.values() if time is not None]
    if not known:
        return tuple(flags)
    per_slot = {index: time / max(1, early[index].tokens.slots) for index, time in times.items() if time is not None}
    usual, usual_per_slot = median_low(known), median_low(per_slot.values())
    for index, slot_time in per_slot.items():
        time = times[index]
        slow = time is not None and time > max(SLOW_FACTOR * usual, usual + SLOW_MARGIN_S)
        flags[index] = slow and slot_time > SLOW_FACTOR * usual_per_slot
    return tuple(flags)


def job_window(rows: Sequence[Sequence[StepSum]], ledger: Ledger, gpus: Sequence[GpuUsage | None] = ()) -> JobWindow:
    """Put the ranks' rows of one window together.

    Args:
        rows: `rank_rows(records, ledger.early_left)` of every rank, in rank order.
        ledger: the ledger before this window: earlier steps help to judge these.
        gpus: GPU usage of every rank.
    """
    layout = [[(row.steps, row.excluded) for row in rank] for rank in rows]
    consistent = all(other == layout[0] for other in layout)
    if not consistent:
        # Rates would divide tokens of some steps by the time of others; the tokens themselves still add up.
        everything = over_ranks([total(rank) for rank in rows])
        unrated = replace(everything, excluded=everything.steps)
        return JobWindow(early=(), later=NO_STEPS, later_excluded=unrated, warm_up=(), ranks=(), consistent=False)
    later, later_excluded, *alone = (over_ranks(row) for row in zip(*rows, strict=True))
    early = [step for step in alone if step.steps]  # fewer than were looked for at the first logging steps
    flags = warm_up([*ledger.early, *early])[len(ledger.early) :]
    return JobWindow(
        early=tuple(early),
        later=later,
        later_excluded=later_excluded,
        warm_up=flags,
        ranks=tuple(total([rank[0], *_where(rank[2 : 2 + len(early)], flags, False)]) for rank in rows),
        gpu=gpu_over_ranks(gpus),
    )


def mark_warm_up(records: Sequence[StepRecord], window: JobWindow) -> tuple[StepRecord, ...]:
    """The records of a window, those found to be warm-up marked so. A reason that is already there stays."""
    found = dict(enumerate(window.warm_up))
    return tuple(
        replace(record, excluded=WARM_UP) if found.get(at) and record.excluded is None else record
        for at, record in enumerate(records)
    )


def window_metrics(window: JobWindow, ledger: Ledger, *, peak_tflops: float | None = None) -> dict[str, float]:
    """The metrics of one window, by key (`hf_speedkit.core.metrics.METRICS`); what is unknown is left out.

    Args:
        window: the window.
        ledger: the ledger with this window in it.
        peak_tflops: dense peak of one device for the training dtype.
    """
    everything = total([window.steady, window.excluded])
    values: dict[str, float | None] = {
        **rates(window.steady, world_size=ledger.world_size, peak_tflops=peak_tflops),
        "speed/packing_efficiency": _ratio(everything.tokens.real, everything.tokens.slots),
        "speed/target_share": _ratio(everything.tokens.target, everything.tokens.real),
        "speed/steady_steps": window.steady.steps,
        "speed/excluded_steps": window.excluded.steps,
        "speed/nonfinite_steps": everything.nonfinite,
        # A pause that did not happen is not a measurement of 0 s.
        "speed/eval_time_s": everything.eval_time_s or None,
        "speed/save_time_s": everything.save_time_s or None,
        "speed/log_time_s": everything.log_time_s or None,
        **_totals(ledger.run_tokens),
        **_spread(window.ranks),
        **_gpu(window.gpu),
    }
    return _known_only(values)


def rates(steady: StepSum, *, world_size: int = 1, peak_tflops: float | None = None) -> dict[str, float]:
    """Rates and mean times of steps that count, added up over ranks; what is unknown is left out."""
    seconds = steady.step_time_s
    values: dict[str, float | None] = {}
    for name, tokens in (
        ("slots", steady.tokens.slots),
        ("real_tokens", steady.tokens.real),
        ("target_tokens", steady.tokens.target),
    ):
        rate = _ratio(tokens, seconds)
        values[f"speed/{name}_per_second"] = rate
        values[f"speed/{name}_per_second_per_device"] = _ratio(rate, world_size)
    for name in ("step_time_s", "data_wait_s", "host_time_s", "device_time_s", "device_wait_s"):
        values[f"speed/{name}"] = _ratio(getattr(steady, name), steady.steps)
    achieved = _ratio(steady.flops, None if seconds is None else seconds * world_size * 1e12)
    values["speed/model_tflops_per_device"] = achieved
    values["speed/mfu"] = _ratio(None if achieved is None else 100 * achieved, peak_tflops)
    return _known_only(values)


def metrics_of(ranks: Sequence[Sequence[StepRecord]], *, peak_tflops: float | None = None) -> dict[str, float]:
    """The metrics of a whole session from its records, rank by rank, as if it were one window.

    Args:
        ranks: the records of every rank, in rank order; the first is the session's first step.
        peak_tflops: dense peak of one device for the training dtype.
    """
    ledger = Ledger(world_size=len(ranks))
    window = job_window([rank_rows(records, ledger.early_left) for records in ranks], ledger)
    return window_metrics(window, ledger.with_window(window), peak_tflops=peak_tflops)


def run_totals(ledger: Ledger, *, peak_tflops: float | None = None) -> RunTotals:
    """The totals and steady rates of a session."""
    session, steady = ledger.session, ledger.steady
    return RunTotals(
        tokens=ledger.run_tokens,
        session=session.tokens,
        session_steps=session.steps,
        steady_steps=steady.steps,
        training_time_s=session.step_time_s,
        eval_time_s=session.eval_time_s,
        save_time_s=session.save_time_s,
        log_time_s=session.log_time_s,
        nonfinite_steps=session.nonfinite,
        rates=rates(steady, world_size=ledger.world_size, peak_tflops=peak_tflops),
    )


def _totals(tokens: TokenCounts | None) -> dict[str, float | None]:
    if tokens is None:
        return {}
    return {
        "speed/total_slots": tokens.slots,
        "speed/total_real_tokens": tokens.real,
        "speed/total_target_tokens": tokens.target,
        "speed/total_documents": tokens.documents,
    }


def _spread(ranks: Sequence[StepSum]) -> dict[str, float | None]:
    if len(ranks) < 2:
        return {}
    values: dict[str, float | None] = {}
    for name, unit, per_rank in (
        ("step_time", "_s", [_ratio(rank.step_time_s, rank.steps) for rank in ranks]),
        ("data_wait", "_s", [_ratio(rank.data_wait_s, rank.steps) for rank in ranks]),
        ("target_tokens", "", [_ratio(rank.tokens.target, rank.steps) for rank in ranks]),
    ):
        known = [value for value in per_rank if value is not None]
        if len(known) == len(ranks):
            values[f"speed/{name}_min{unit}"] = min(known)
            values[f"speed/{name}_max{unit}"] = max(known)
            values[f"speed/{name}_max_rank"] = known.index(max(known))
    return values


def _gpu(usage: GpuUsage | None) -> dict[str, float | None]:
    if usage is None:
        return {}
    return {
        "speed/gpu_utilization": usage.utilization_percent,
        "speed/gpu_power_w": usage.power_w,
        "speed/gpu_sm_clock_mhz": usage.sm_clock_mhz,
        "speed/gpu_memory_gib": usage.memory_gib,
        "speed/gpu_throttled": usage.throttled_percent,
    }


def _work_time(step: StepSum) -> float | None:
    if step.device_time_s is not None:
        return step.device_time_s
    return None if step.step_time_s is None else step.step_time_s - (step.data_wait_s or 0.0)


def _where(rows: Sequence[StepSum], flags: Sequence[bool], wanted: bool) -> list[StepSum]:
    return [row for row, flag in zip(rows, flags, strict=True) if flag is wanted]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _known_only(values: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in values.items() if value is not None}
