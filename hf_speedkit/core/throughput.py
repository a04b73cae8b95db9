"""StepRecords -> what a session has counted: what may enter a rate, and totals. Pure arithmetic on records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from hf_speedkit.core.rates import rates
from hf_speedkit.core.records import NO_TOKENS, GpuUsage, StepRecord, TokenCounts
from hf_speedkit.core.step_parts import StepActivity, activity_metrics, activity_over_ranks
from hf_speedkit.core.stepsum import NO_STEPS, StepSum, gpu_over_ranks, over_ranks, total

EARLY_STEPS = 10
"""Steps at the start of a session that are judged one by one. TRL's packed rows tuned and compiled in steps 1, 2 and 9
of benchmarks/results/ladder/27b-8_trl_rep1.json."""

SLOW_FACTOR = 2.0
"""An early step is warm-up if it took more than this many times the usual. There: 0.8 s usual, 4 s when tuning."""

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
        activity: the step that was counted through CUPTI, over ranks; None where there was none.
        consistent: every rank had the same steps; if not, no rate can be made.
    """

    early: tuple[StepSum, ...]
    later: StepSum
    later_excluded: StepSum
    warm_up: tuple[bool, ...]
    ranks: tuple[StepSum, ...]
    gpu: GpuUsage | None = None
    activity: StepActivity | None = None
    consistent: bool = True

    @property
    def steady(self) -> StepSum:
        """The steps that count."""
        return total([self.later, *_where(self.early, self.warm_up, False)])

    @property
    def excluded(self) -> StepSum:
        """The steps that do not."""
        return total([self.later_excluded, *_where(self.early, self.warm_up, True)])

    @property
    def everything(self) -> StepSum:
        """All of its steps."""
        return total([self.steady, self.excluded])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a session has counted so far, over all ranks.

    Args:
        world_size: number of ranks.
        before: tokens of earlier sessions of the run; None where a resumed run's are unknown.
        early: the first steps of this session, each alone.
        later: the later steps that count.
        later_excluded: the later steps that do not.
        activity: the last step that was counted through CUPTI, over ranks.
    """

    world_size: int = 1
    before: TokenCounts | None = NO_TOKENS
    early: tuple[StepSum, ...] = ()
    later: StepSum = NO_STEPS
    later_excluded: StepSum = NO_STEPS
    activity: StepActivity | None = None

    def with_window(self, window: JobWindow) -> Ledger:
        """The ledger after `window`."""
        return replace(
            self,
            early=self.early + window.early,
            later=total([self.later, window.later]),
            later_excluded=total([self.later_excluded, window.later_excluded]),
            activity=window.activity or self.activity,
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
        rates: the steady rates and mean times of this session and its last counted step, by metric key.
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


def job_window(
    rows: Sequence[Sequence[StepSum]],
    ledger: Ledger,
    gpus: Sequence[GpuUsage | None] = (),
    activities: Sequence[StepActivity | None] = (),
) -> JobWindow:
    """Put the ranks' rows of one window together.

    Args:
        rows: `rank_rows(records, ledger.early_left)` of every rank, in rank order.
        ledger: the ledger before this window: earlier steps help to judge these.
        gpus: GPU usage of every rank.
        activities: the counted step of every rank.
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
        activity=activity_over_ranks(activities),
    )


def mark_warm_up(records: Sequence[StepRecord], window: JobWindow) -> tuple[StepRecord, ...]:
    """The records of a window, those found to be warm-up marked so. A reason that is already there stays."""
    found = dict(enumerate(window.warm_up))
    return tuple(
        replace(record, excluded=WARM_UP) if found.get(at) and record.excluded is None else record
        for at, record in enumerate(records)
    )


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
        rates={
            **rates(steady, world_size=ledger.world_size, peak_tflops=peak_tflops),
            **{key: value for key, value in activity_metrics(ledger.activity).items() if value is not None},
        },
    )


def _work_time(step: StepSum) -> float | None:
    if step.device_time_s is not None:
        return step.device_time_s
    return None if step.step_time_s is None else step.step_time_s - (step.data_wait_s or 0.0)


def _where(rows: Sequence[StepSum], flags: Sequence[bool], wanted: bool) -> list[StepSum]:
    return [row for row, flag in zip(rows, flags, strict=True) if flag is wanted]
