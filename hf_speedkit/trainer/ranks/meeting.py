"""What all ranks must do at the same step: the rank that does it alone is told so, before its first collective.

A callback that says `control.should_save = True` (or `should_evaluate`, `should_training_stop`) on one rank sends that
rank into collectives which the others answer with those of their next step: gloo aborts or mixes the two up, NCCL waits
for `ddp_timeout`. So before each of these the ranks say in the launcher's store what they are about to do, and one that
waits looks where the others are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from transformers import IntervalStrategy, TrainerControl, TrainerState, TrainingArguments

from hf_speedkit.core.errors import SpeedkitError
from hf_speedkit.core.ranks import LOADING, Beat, has_gone_past

logger = logging.getLogger(__name__)

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.001, 0.5
_LOOKED_EVERY_S = 1.0

_NO_LOG = "leave out a log"

FLAGS: Mapping[str, tuple[str, ...]] = {
    "log": ("should_log",),
    _NO_LOG: ("should_log",),
    "evaluate": ("should_evaluate",),
    "save": ("should_save",),
    "end training": ("should_training_stop", "should_epoch_stop"),
}
"""What ranks meet for, and the flags of `TrainerControl` that bring it about."""


def wanted(args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logged: int = -1) -> list[str]:
    """What this rank is about to do behind a step, keys of `FLAGS`.

    A log that the settings bring about is left out: it comes often, and all ranks have the same settings. One that the
    settings bring about and a callback has called off is not.

    Args:
        args: the Trainer's.
        state: the Trainer's.
        control: the Trainer's, behind its callbacks.
        logged: the step that was logged last.
    """
    step = state.global_step
    by_steps = args.logging_strategy == IntervalStrategy.STEPS and step % max(1, state.logging_steps) == 0
    by_settings = by_steps or step >= state.max_steps or (step == 1 and args.logging_first_step)
    asked = [what for what, flags in FLAGS.items() if what != _NO_LOG and any(getattr(control, flag) for flag in flags)]
    called_off = by_steps and not control.should_log and logged != step
    kept = [what for what in asked if what != "log" or not by_settings]
    return [_NO_LOG, *kept] if called_off else kept


class Meetings:
    """The meetings of one training. Every rank counts its own.

    Args:
        store: the ranks' common one.
        rank: this process, of `ranks`.
        beat_of: what a rank last said about itself (`RankWatch`).
        clock: seconds.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        *,
        beat_of: Callable[[int], Beat],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._beat_of, self._clock = beat_of, clock
        self._calls = 0

    def meet(self, wants: Sequence[str], *, step: int, timeout_s: float) -> None:
        """Wait until all ranks have come to do the same. A store that does not answer is not waited for.

        Args:
            wants: what this rank is about to do, keys of `FLAGS`.
            step: optimizer steps finished here.
            timeout_s: how long to wait for a rank that has not gone past.

        Raises:
            SpeedkitError: a rank goes on with the next step instead, does something else, or did not come in time.

        Cost: a few small questions to the store, and what the slowest rank is behind; the collectives that follow
        would wait for it as well.
        """
        self._calls += 1
        call = f"meeting/{self._calls}"
        said = " and ".join(wants)
        try:
            self._store.set(f"{call}/{self._rank}", said)
            self._store.add(call, 1)
            self._wait(call, said, step, timeout_s)
            others = {rank: self._store.get(f"{call}/{rank}").decode() for rank in range(self._ranks)}
        except RuntimeError as error:  # DistStoreError is one
            logger.debug("the ranks' store did not answer: %s", error)
            return
        different = {rank: other for rank, other in others.items() if other != said}
        if different:
            raise _apart(self._rank, said, step, tuple(f"rank {rank}: {other}" for rank, other in different.items()))

    def _wait(self, call: str, said: str, step: int, timeout_s: float) -> None:
        began = looked = self._clock()
        pause_s = _SHORTEST_POLL_S
        between_steps: dict[int, int] = {}
        while self._store.add(call, 0) < self._ranks:
            now = self._clock()
            if now - looked >= _LOOKED_EVERY_S:
                looked = now
                missing = [rank for rank in range(self._ranks) if not self._store.check([f"{call}/{rank}"])]
                beats = [self._beat_of(rank) for rank in missing]
                past = [beat for beat in beats if _is_past(beat, step, between_steps)]
                if past or (beats and now - began > timeout_s):
                    raise _apart(self._rank, said, step, _sentences(past or beats))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)


def _is_past(beat: Beat, step: int, between_steps: dict[int, int]) -> bool:
    """Whether a rank goes on without this. Of one that waits for others between two steps two beats must say so: a
    callback of its own may yet ask for the same."""
    if beat.doing == LOADING and beat.step == step and beat.waits:
        return beat.sent > between_steps.setdefault(beat.rank, beat.sent)
    return has_gone_past(beat, step)


def _sentences(beats: Collection[Beat]) -> tuple[str, ...]:
    return tuple(beat.sentence() for beat in beats)


def _apart(rank: int, said: str, step: int, others: Sequence[str]) -> SpeedkitError:
    flags = " or ".join(f"control.{flag}" for want in said.split(" and ") for flag in FLAGS[want])
    return SpeedkitError(
        f"rank {rank} was told to {said} after step {step}, and not all ranks were: they would wait for one another in "
        "calls that do not match",
        evidence=(*others[:4], *(("...",) if len(others) > 4 else ())),
        mend=f"let every rank decide alike: a callback that sets {flags} must go by what all ranks know "
        "(state.log_history, metrics, a file that all see), without `if state.is_world_process_zero`",
    )
