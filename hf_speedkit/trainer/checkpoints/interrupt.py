"""Ctrl-C: what is saved of the run and how it goes on, below Python's traceback or in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_speedkit.trainer.checkpoints.files import numbered_checkpoints


@contextmanager
def interrupts_told(trainer: Any) -> Iterator[None]:
    """Add to a KeyboardInterrupt that leaves the context what is saved of the run; it is raised on.

    Args:
        trainer: whose training runs in the context.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(_what_is_left(trainer.args, trainer.state))
        raise


def _what_is_left(args: Any, state: Any) -> str:
    saved = numbered_checkpoints(args.output_dir)
    where = f"Interrupted after step {state.global_step} of {state.max_steps}"
    if not saved:
        return (
            f"{where}, and no checkpoint is in {args.output_dir}: nothing is saved. "
            'save_strategy="steps" with save_steps writes some; a signal of stop_signals (kill -TERM PID) writes one '
            "and then ends"
        )
    step, path = saved[0]
    lost = state.global_step - step
    unsaved = f"; {lost} step{'s' if lost > 1 else ''} behind it {'are' if lost > 1 else 'is'} lost" if lost > 0 else ""
    return f"{where}: {path.name} is complete{unsaved}. Go on with resume_from_checkpoint=True"
