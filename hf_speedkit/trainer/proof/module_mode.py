"""Training or evaluation mode for a while, each module put back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def in_mode(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode and back, each module as it was."""
    changed = [module for module in model.modules() if module.training is not training]
    model.train(training)
    try:
        yield
    finally:
        for module in changed:
            module.training = not training
