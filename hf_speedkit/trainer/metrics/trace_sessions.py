"""Which steps a run traces: what was asked for, as sessions of consecutive steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from hf_speedkit.core.errors import ConfigurationError

LONG_SESSION = 10
"""Consecutive steps beyond which it is said what they cost; a verdict needs one."""


def checked_steps(steps: Any) -> tuple[int, ...]:
    """Steps to trace in order, each once.

    Args:
        steps: a step, or several: whole numbers from 1 up, numpy's included.

    Raises:
        ConfigurationError: anything else, or none at all.
    """
    wanted = tuple(steps) if isinstance(steps, Iterable) and not isinstance(steps, str) else (steps,)
    if not wanted or any(isinstance(step, bool) or not isinstance(step, Integral) or step < 1 for step in wanted):
        raise ConfigurationError(
            f"steps to trace must be positive integers, got {steps!r}", mend="TraceCallback(steps=(20,))"
        )
    return tuple(sorted({int(step) for step in wanted}))


def sessions_of(steps: Iterable[int]) -> list[range]:
    """Consecutive steps together; one step apart, too: there is no room for another warm-up step in between."""
    found: list[range] = []
    for step in sorted(steps):
        if found and step == found[-1][-1] + 1:
            found[-1] = range(found[-1][0], step + 1)
        else:
            found.append(range(step, step + 1))
    return found


def named(session: range) -> str:
    """A session in words."""
    return f"step {session[0]}" if len(session) == 1 else f"steps {session[0]} to {session[-1]}"


def remarks(sessions: Iterable[range], last_step: int) -> tuple[str, ...]:
    """What to say of sessions as training begins, hours before it is seen: steps that never come, long recordings.

    Args:
        sessions: see `sessions_of`.
        last_step: with which training ends; 0 where that is not known.
    """
    said = []
    for session in sessions:
        if 0 < last_step < session[-1]:
            said.append(f"{named(session)} cannot be traced in full: training ends with step {last_step:,}")
        elif len(session) > LONG_SESSION:
            said.append(
                f"{named(session)} are traced as one recording: its events stay in host memory until the last of "
                f"them, and one file holds them all. One step answers most questions: steps=({session[0]},)"
            )
    return tuple(said)
