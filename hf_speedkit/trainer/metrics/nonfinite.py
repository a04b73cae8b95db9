"""What is done about losses and gradients that are NaN or infinite: counted, the step named, training stopped.

Decided at logging steps only, from the sums that all ranks share, so that every rank comes to the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_speedkit.core.errors import ConfigurationError, NonFiniteError
from hf_speedkit.core.stepsum import StepSum

Mode = Literal["strict", "warn"]
MODES = ("strict", "warn")


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Steps of a window with a loss or gradient that is not finite.

    Args:
        steps: how many; at least one.
        of: steps of the window.
        first: the first of them; None where only the window's mean loss tells.
        losses: those of them whose loss was seen to be so; the others' loss may be as well, where a trainer makes it
            outside the model.
    """

    steps: int
    of: int
    first: int | None
    losses: int = 0

    def sentence(self) -> str:
        """One sentence on what was found."""
        first = f", the first was step {self.first}" if self.first is not None else ""
        return f"{self.steps} of the last {self.of} steps had a NaN or infinite loss or gradient{first}"


def checked_mode(mode: str) -> Mode:
    """The mode, if it is one.

    Raises:
        ConfigurationError: it is not.
    """
    if mode not in MODES:
        raise ConfigurationError(f"nonfinite={mode!r} is not a choice", mend=f"nonfinite is one of: {', '.join(MODES)}")
    return mode  # type: ignore[return-value]


def find_nonfinite(everything: StepSum, logs: Mapping[str, Any], step: int) -> NonFinite | None:
    """What the steps and the Trainer's own log say; None where all is finite.

    Args:
        everything: the steps, over all ranks.
        logs: what the Trainer is about to log.
        step: the logging step: the gradient norm in `logs` is this step's, the loss the window's mean.
    """
    if everything.nonfinite:
        return NonFinite(
            steps=everything.nonfinite,
            of=everything.steps,
            first=everything.first_nonfinite,
            losses=everything.nonfinite_losses or 0,
        )
    if not _finite(logs.get("grad_norm")):
        return NonFinite(steps=1, of=everything.steps, first=step)
    if not _finite(logs.get("loss")):
        return NonFinite(steps=1, of=everything.steps, first=step if everything.steps == 1 else None, losses=1)
    return None


def refusal(found: NonFinite, logs: Mapping[str, Any]) -> NonFiniteError:
    """The error that stops training.

    Args:
        found: what was found.
        logs: what is logged at this step.
    """
    return _refusal(found.sentence(), f" before step {found.first}" if found.first is not None else "", logs)


def log_refusal(logs: Mapping[str, Any], step: int) -> NonFiniteError | None:
    """The error of a log that shows a NaN or infinite loss or norm, where nothing else counts steps; None if none does.

    Args:
        logs: what the Trainer is about to log: means over the window and over all ranks.
        step: the logging step.
    """
    if _finite(logs.get("loss")) and _finite(logs.get("grad_norm")):
        return None
    return _refusal(f"a step up to step {step} had a NaN or infinite loss or gradient", "", logs)


def _refusal(what: str, before: str, logs: Mapping[str, Any]) -> NonFiniteError:
    shown = {key: logs[key] for key in ("loss", "grad_norm", "learning_rate") if key in logs}
    return NonFiniteError(
        f"{what}, so training stops.",
        evidence=(
            *([", ".join(f"{key} {value}" for key, value in shown.items())] if shown else []),
            "one such step makes every weight NaN: what follows trains nothing",
        ),
        mend=f"go on from a checkpoint{before} (resume_from_checkpoint=...) with a lower learning rate or without the "
        "documents of that step; max_grad_norm=1.0 keeps a large gradient from becoming an infinite one",
        regardless='nonfinite="warn"',
    )


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
