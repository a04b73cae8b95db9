"""Whether a loss of the user's own is divided by the targets of the whole step, as gradients that are summed must be.

transformers 5.23 sums the gradients of a step's micro-batches, and multiplies what a `compute_loss_func` returns by the
number of ranks, whose gradients are averaged: right for a sum divided by `num_items_in_batch`, and as many times too
much for a mean over the micro-batch. Nothing says so; the loss in the log is that many times larger as well (case V25).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

OWN_LOGITS = (
    "compute_loss_func=lambda outputs, labels, num_items_in_batch: "
    "transformers.loss.loss_utils.ForCausalLMLoss(outputs.logits, labels, outputs.logits.shape[-1], num_items_in_batch)"
)
"""The setting by which a loss is made of the logits that the model gives, over all targets of a step."""

_STAYS = 0.1
"""The change that is none: a loss that is divided as it should be changes by 0.5."""


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
            twice = num_items_in_batch * 2
            warn_of_a_mean(trainer, loss, lambda: compute(outputs, labels, num_items_in_batch=twice))
        return loss

    trainer.compute_loss_func = computed
    try:
        yield
    finally:
        trainer.compute_loss_func = compute


def warn_of_a_mean(trainer: Any, loss: torch.Tensor, of_twice_the_targets: Callable[[], torch.Tensor]) -> None:
    """Warn, on rank 0, of a loss that stays about what it is when it is to be divided by twice the targets.

    A loss that cannot be computed once more, without gradients, is not judged; random numbers are drawn as without.
    """
    device = loss.device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            other = of_twice_the_targets()
    except Exception as error:  # noqa: BLE001 - anybody's code: one that differentiates inside, or fills the memory
        logger.info("your loss is not asked how it is divided: %s: %s", type(error).__name__, error)
        return
    if trainer.args.process_index != 0:
        return
    summed = summands(trainer)
    # A host read, once a run: in the first micro-batch, which waits for kernels to be loaded in any case.
    # Dropout is drawn anew, and other sums come in another order.
    if bool((other / loss.detach() - 1).abs() < _STAYS):
        logger.warning(
            "your loss does not depend on num_items_in_batch, the targets of the whole step: %d losses a step are "
            "added up (gradient_accumulation_steps, ranks), so a mean over its micro-batch makes gradients %d times "
            "too large (and NaN where a row holds no documents). Divide a sum by num_items_in_batch, or, on one rank, "
            "set trainer.loss_is_scaled_for_ga = False",
            summed, summed,
        )  # fmt: skip
