"""Which rank the others are waiting for, judged from what each rank last said about itself."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hf_speedkit.core.errors import SpeedkitError
from hf_speedkit.core.records import to_json

LOADING = "loading the next batches"
COMPUTING = "forward and backward"
UPDATING = "the optimizer step"
SAVING = "writing a checkpoint"
STARTING = "start-up checks"
FINISHING = "finishing the run"
LEFT = "has left training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What one rank says of itself, every few seconds, whatever its training thread does.

    Args:
        rank: its number.
        host: the machine it runs on.
        sent: how many beats it has sent; stands still when the whole process does.
        progress: how many parts of steps it has begun; stands still when training does.
        step: optimizer steps finished.
        warm: whether one of them was finished by this process; the first may compile for many minutes.
        doing: the part of a step it is in.
        still_s: seconds since it began that part.
        where: the line of code its training thread is at.
        waits: whether that line is one of torch.distributed.
    """

    rank: int
    host: str
    sent: int
    progress: int
    step: int
    warm: bool
    doing: str
    still_s: float
    where: str
    waits: bool

    def to_json(self) -> str:
        """One line, for the store that the ranks share."""
        return to_json(self)

    @classmethod
    def from_json(cls, line: str | bytes) -> Beat:
        """The record back.

        Raises:
            ValueError, TypeError: a line that is no beat.
        """
        return cls(**json.loads(line))

    def sentence(self) -> str:
        """Where this rank is, for a person."""
        if self.doing == LEFT:
            return f"rank {self.rank} on {self.host}: {LEFT} after step {self.step}"
        return (
            f"rank {self.rank} on {self.host}: {self.doing} after step {self.step}, "
            f"for {self.still_s:.0f} s, at {self.where}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The ranks the others wait for.

    Args:
        ranks: their numbers; empty where none stands out.
        message: who waits for whom, in one sentence.
        evidence: one line for each missing rank, and one for a rank that waits.
        may_end: whether ending the run loses nothing: every rank still in training has done its first step, none writes
            a checkpoint and none is through with training (the last upload takes as long as it takes).
    """

    ranks: tuple[int, ...]
    message: str
    evidence: tuple[str, ...]
    may_end: bool


def has_gone_past(beat: Beat, step: int) -> bool:
    """Whether a rank has begun the step behind `step`, or is through with training."""
    return beat.doing == LEFT or beat.step > step or (beat.step == step and beat.doing in (COMPUTING, UPDATING))


def missing_ranks(beats: Sequence[Beat], *, silent: Collection[int] = ()) -> Missing:
    """Find the ranks that the others wait for.

    Ranks that have left training come first; then a process that says nothing any more; then the ranks that have come
    less far than the others; then, where all are in the same part of a step, those that do not wait in a line of
    torch.distributed while others do.

    Args:
        beats: the last one of every rank, in any order; at least one.
        silent: ranks whose beats have stopped.
    """
    beats = sorted(beats, key=lambda beat: beat.rank)
    furthest = max(beat.progress for beat in beats)
    behind = (
        [beat for beat in beats if beat.doing == LEFT]
        or [beat for beat in beats if beat.rank in silent]
        or [beat for beat in beats if beat.progress < furthest]
        or [beat for beat in beats if not beat.waits]
    )
    if len(behind) == len(beats):
        behind = []
    waiting = [beat for beat in beats if beat not in behind]
    slowest = max(beats if not behind else waiting, key=lambda beat: beat.still_s)
    return Missing(
        ranks=tuple(beat.rank for beat in behind),
        message=_message(behind, waiting, slowest.still_s, silent),
        evidence=tuple(beat.sentence() for beat in (*behind[:4], slowest)),
        may_end=all(beat.doing == LEFT or (beat.warm and beat.doing not in (SAVING, FINISHING)) for beat in beats),
    )


def _message(behind: Sequence[Beat], waiting: Sequence[Beat], still_s: float, silent: Collection[int]) -> str:
    if not behind:
        return f"no rank has gone on for {still_s:.0f} s, and none of the {len(waiting)} stands out"
    names = ", ".join(str(beat.rank) for beat in behind[:8]) + (", ..." if len(behind) > 8 else "")
    who = f"{'rank' if len(behind) == 1 else 'ranks'} {names}"
    others = f"{len(waiting)} of {len(waiting) + len(behind)} ranks have waited {still_s:.0f} s for {who}"
    if behind[0].doing == LEFT:
        return f"{others}: training was ended there alone (control.should_training_stop must be set on all ranks)"
    if behind[0].rank in silent:
        return f"{others}, not heard of any more: the process is stopped or its machine is gone"
    return others


def ending(missing: Missing, timeout_s: float) -> str:
    """What a run is ended with, which no rank goes on in."""
    error = SpeedkitError(
        f"{missing.message}, so the run ends",
        evidence=missing.evidence,
        mend="look at what the missing rank does at that line; a step that is meant to take longer needs a longer "
        f"stuck_rank_timeout_s (now {timeout_s:.0f})",
        regardless="stuck_rank_timeout_s=0 waits for ddp_timeout and names nobody",
    )
    return str(error)
