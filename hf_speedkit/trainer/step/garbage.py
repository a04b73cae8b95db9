"""Python's garbage collector kept from walking over everything a training process holds.

A full collection visits every object of torch, transformers and the model, at a moment of its own on every rank; the
host stands still meanwhile, and a device without a queue does too. What is there behind step 1 stays until the end, so
it is taken out of the collector's sight; what a step makes is collected as before. Costs nothing; no gain was seen on a
27B (benchmarks/NOTES.md).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transformers import TrainerCallback

_FROZEN_BY_PYTHON = 1_000
"""Objects at most that Python has frozen by itself: 3.12.1 starts with 375. With asyncio imported there are 15,272."""


class QuietGarbage(TrainerCallback):  # type: ignore[misc]
    """Freezes what lives behind step 1 (`gc.freeze`) until training ends or fails.

    Args:
        until_trained: enters a context that is left then.
    """

    def __init__(self, until_trained: Callable[[AbstractContextManager[Any]], Any]) -> None:
        self._until_trained = until_trained
        self._waits = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the first step, unless someone froze objects already and so looks after this."""
        self._waits = gc.isenabled() and gc.get_freeze_count() <= _FROZEN_BY_PYTHON

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Once, behind the first step: it has made what the others keep."""
        if self._waits:
            self._waits = False
            self._until_trained(_frozen())


@contextmanager
def _frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # a model that is dropped later must be freed
