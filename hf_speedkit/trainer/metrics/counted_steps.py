"""Which steps are counted through CUPTI, and what came of it: glue between the Trainer's events and `LaunchCounter`.

A count takes two steps, a warm-up step and the one that is counted; both stay out of all rates, on every rank alike.
It begins when the step before is over and everything that follows it (logging, evaluation, saving) is through, so that
fetching the batch belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import TrainerControl

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.step_parts import StepActivity
from hf_speedkit.measure.launches import LaunchCounter

FIRST = 20
"""Optimizer steps of a session before the first count: what compiles and tunes has done so. Ten are judged warm-up."""

EXCLUDED = "counted"


def checked_interval(every: int) -> int:
    """Steps between counts, if it is a number of them.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ConfigurationError(
            f"count_launches_every={every!r} is no number of steps", mend="count_launches_every=100, or 0 for never"
        )
    return every


class CountedSteps:
    """Decides when to count and keeps the result until it is taken.

    Which steps are kept out of the rates follows from their numbers alone, whether a count comes about or not: ranks
    whose steps differ would have no rates at all.

    Args:
        every: optimizer steps between counts, at least 2.
        counter: counts one step.
        say: takes one sentence about a count that did not come about; each reason is said once.
        alone: there is one rank, so that nothing has to be kept out once counting has turned out not to work.
    """

    def __init__(self, every: int, *, counter: LaunchCounter, say: Callable[[str], None], alone: bool) -> None:
        self._every = max(2, every)
        self._first = min(self._every, FIRST)
        self._counter = counter
        self._say = say
        self._alone = alone
        self._said: set[str] = set()
        self._awaiting: str | None = None
        self._held: str | None = None
        self._result: tuple[int, StepActivity] | None = None

    def hold(self, reason: str) -> None:
        """Do not warm up in the step that begins now: someone else records it or the next."""
        self._held = reason

    def step_begins(self, number: int, *, excluded: bool) -> str | None:
        """A step's batches are there; why it must stay out of the rates, or None.

        Args:
            number: of the step in this session, the first is 1.
            excluded: whether it is kept out of the rates already.
        """
        held, self._held = self._held, None
        kept_out = "the step is kept out of the rates" if excluded else None
        place = (number - self._first) % self._every
        if number < self._first - 1 or place not in (0, self._every - 1) or (self._alone and self._counter.broken):
            return None
        if place != 0:
            self._warm_up(held or kept_out)
        elif self._counter.counting and kept_out is None:
            self._counter.begin()
        elif self._counter.warm or self._counter.counting:
            self._give_up(kept_out or "the step before was not followed by what was expected")
        return EXCLUDED

    def step_ends(self, number: int, control: TrainerControl) -> bool:
        """A step was issued. True where a count has ended just now: the device is idle, and time went by.

        Args:
            number: the global step.
            control: says what follows.
        """
        if self._counter.counting:
            activity = self._counter.stop()
            if activity is not None:
                self._result = number, activity
            self._report(self._counter.reason)
            return True
        if self._counter.warm:
            # These follow in this order; the count begins behind the last of them.
            follows = (("save", control.should_save), ("eval", control.should_evaluate), ("log", control.should_log))
            self._awaiting = next((kind for kind, wanted in follows if wanted), "step_end")
        return False

    def through(self, event: str) -> bool:
        """A step's end, logging ("log"), evaluation ("eval") or saving ("save") is through.

        True where a count begins now: starting it took time that is no step's.
        """
        if self._counter.counting:
            self._give_up("the step was interrupted by evaluation, saving or logging")
        elif self._counter.warm and self._awaiting == event:
            self._awaiting = None
            self._counter.start()
            self._report(self._counter.reason)
            return self._counter.counting
        return False

    def take(self) -> tuple[int, StepActivity] | None:
        """The last count since the last call, with its global step."""
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """Training is over."""
        if self._counter.warm or self._counter.counting:
            self._counter.cancel("training ended")

    def _warm_up(self, held: str | None) -> None:
        if held is not None:
            self._report(held)
        elif not self._counter.broken and not self._counter.warm_up():
            self._report(self._counter.reason)

    def _give_up(self, reason: str) -> None:
        self._awaiting = None
        self._counter.cancel(reason)
        self._report(self._counter.reason)

    def _report(self, reason: str | None) -> None:
        if reason is not None and reason not in self._said:
            self._said.add(reason)
            self._say(
                f"{'no launches are counted' if self._counter.broken else 'a count of launches is left out'}: {reason}"
            )
