"""Whether a loss of the user's own is divided by the targets of the whole step, as gradients that are summed must be.

transformers 5.23 sums the gradients of a step's micro-batches, and multiplies what a `compute_loss_func` returns by the
number of ranks, whose gradients are averaged: right for a sum divided by `num_items_in_batch`, and as many times too
much for a mean over the micro-batch. Nothing says so; the loss in the log is that many times larger as well (case V25).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)


def summands(trainer: Any) -> int:
    """How many losses a step adds up: one, where a mean over the micro-batch is right too."""
    if trainer.loss_is_scaled_for_ga is False:  # the user has said that it is a mean
        return 1
    args = trainer.args
    # A subclass's own `compute_loss` takes the place of the code that multiplies.
    multiplied = trainer.compute_loss_func is not None and args.average_tokens_across_devices
    return int(args.gradient_accumulation_steps * (args.world_size if multiplied else 1))


@contextmanager
def asked(trainer: Any) -> Iterator[None]:
    """Call the trainer's `compute_loss_func` twice for one micro-batch, the second time with twice the targets."""
    compute = trainer.compute_loss_func

    def computed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = compute(outputs, labels, num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is not None:
            with torch.no_grad():
                other = compute(outputs, labels, num_items_in_batch=num_items_in_batch * 2)
            warn_of_a_mean(trainer, loss, other)
        return loss

    trainer.compute_loss_func = computed
    try:
        yield
    finally:
        trainer.compute_loss_func = compute


def warn_of_a_mean(trainer: Any, loss: torch.Tensor, of_twice_the_targets: torch.Tensor) -> None:
    """Warn, on rank 0, of a loss that stays what it is when it is to be divided by twice the targets."""
    if trainer.args.process_index != 0:
        return
    summed = summands(trainer)
    # A host read, once a run: in the first micro-batch, which waits for kernels to be loaded in any case.
    if bool(loss.detach() == of_twice_the_targets) and bool(loss != 0):
        logger.warning(
            "your loss does not depend on num_items_in_batch, the targets of the whole step: %d losses a step are "
            "added up (gradient_accumulation_steps, ranks), so a mean over its micro-batch makes gradients %d times "
            "too large (and NaN where a row holds no documents). Divide a sum by num_items_in_batch, or, on one rank, "
            "set trainer.loss_is_scaled_for_ga = False",
            summed, summed,
        )  # fmt: skip
