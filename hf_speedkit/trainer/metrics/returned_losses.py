"""The losses that a Trainer logs, heard where it gets them: from its own `training_step`.

A model's output is not always the loss that is logged (a `compute_loss` or `training_step` of a subclass), and the
Trainer's filter (`logging_nan_inf_filter`, on by default) turns a NaN into 0 before any callback could see it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from transformers import Trainer


class ReturnedLosses:
    """Hears every loss that one trainer's `training_step` returns, from `hear` to `stop`.

    Args:
        trainer: None where the callback was not attached: nothing is heard then.
    """

    def __init__(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        self._wrapper: Any = None
        self._former: Any = None
        self.heard = False

    def hear(self, listen: Callable[[object], None]) -> None:
        """Put a wrapper on this one trainer's method; `listen` gets each loss and must not wait for the device."""
        trainer = self._trainer
        if trainer is None:
            return
        self.stop()
        step = trainer.training_step
        self._former = vars(trainer).get("training_step")  # somebody else's wrapper, or none

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            if self.heard:
                listen(loss)
            return loss

        trainer.training_step = self._wrapper = training_step
        self.heard = True

    def stop(self) -> None:
        """Take the wrapper off again; one that somebody has wrapped since stays and hears nothing."""
        if self.heard and vars(self._trainer).get("training_step") is self._wrapper:
            if self._former is None:
                del vars(self._trainer)["training_step"]
            else:
                vars(self._trainer)["training_step"] = self._former
        self.heard = False

    def forget_nonfinite(self) -> None:
        """Let the next window begin at 0: the Trainer subtracts its sum from itself, and NaN - NaN is NaN for good.

        transformers 5.23, trainer.py:2252; without the filter every later log would show NaN.
        """
        forget_sum(self._trainer)


def forget_sum(trainer: object) -> None:
    """Set the Trainer's sum of losses to 0; call it when it has been logged."""
    total = getattr(trainer, "_tr_loss", None)
    if isinstance(total, torch.Tensor):
        total.zero_()
