"""The loss of a Trainer that is not ours: whether the targets of a whole step weigh the same in it (case V25).

transformers 5.23 hands the number of a step's targets to models that take it and to losses of the user's own, and then
adds up what they return. Four micro-batches whose mean is returned made a loss of 16.7 out of 4.18, and gradients 5.7
times as large (huggingface/transformers#37110). Classes with images (Qwen3.5's and Gemma 3's among them) take no such
number: their micro-batches weigh the same, however few targets one has.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

from transformers import Trainer

from hf_speedkit.trainer.adapters import below_adapters
from hf_speedkit.trainer.launching import sharded_states
from hf_speedkit.trainer.metrics.observation import LabelRule
from hf_speedkit.trainer.step.own_loss import OWN_LOGITS, asked, summands, warn_of_a_mean

logger = logging.getLogger(__name__)

_TOKEN_LOSSES = ("transformers.trainer", "trl.trainer.sft_trainer")
"""Whose `compute_loss` is the model's own, or that of a `compute_loss_func`."""
_PACKAGES = ("transformers.", "trl.")
_WATCHED = "_speedkit_watches_loss"


def watch_loss(trainer: Trainer) -> None:
    """Say where targets weigh otherwise than in one large batch; ask a loss of the user's own in its first micro-batch.

    Args:
        trainer: any, before `train()`. Ours sees to its loss by itself. Once a trainer; a step of one micro-batch on
            one rank needs no look.
    """
    kinds = type(trainer).__mro__
    if _WATCHED in vars(trainer) or any(kind.__module__.startswith("hf_speedkit.") for kind in kinds):
        return
    vars(trainer)[_WATCHED] = True
    owner, stepping = (
        next(kind.__module__ for kind in kinds if name in vars(kind)) for name in ("compute_loss", "training_step")
    )
    if not stepping.startswith(_PACKAGES):
        return  # adds up and divides as it likes
    model = below_adapters(getattr(trainer.model, "_orig_mod", trainer.model))  # without torch.compile
    own = callable(trainer.compute_loss_func) or not owner.startswith(_PACKAGES)
    if not own and owner in _TOKEN_LOSSES and not trainer.model_accepts_loss_kwargs:
        _warn_of_equal_weights(trainer, model)
        return
    if not own and owner == "transformers.trainer":
        _warn_of_added_balance(trainer, model)
    if own or (owner in _TOKEN_LOSSES and not type(model).__module__.startswith("transformers.")):
        _ask_once(trainer, function=owner in _TOKEN_LOSSES and trainer.compute_loss_func is not None)


def _warn_of_equal_weights(trainer: Trainer, model: Any) -> None:
    count = trainer.args.gradient_accumulation_steps * trainer.args.world_size
    predicts = getattr(model, "get_output_embeddings", lambda: None)() is not None and LabelRule.of(model).shifted
    if count > 1 and predicts and trainer.loss_is_scaled_for_ga is None and trainer.is_world_process_zero():
        logger.warning(
            "a %s divides its loss by the targets of each micro-batch: the %d of a step (gradient_accumulation_steps, "
            "ranks) weigh the same however few they hold, so loss and gradients depend on how a step is split. A loss "
            "over all targets of the step: Trainer(%s)",
            type(model).__name__, count, OWN_LOGITS,
        )  # fmt: skip


def _warn_of_added_balance(trainer: Trainer, model: Any) -> None:
    """A mixture of experts adds its balancing loss, a mean, to each micro-batch's share of the step's: with 4 of them a
    loss of 6.19 was logged as 12.28. TRL's trainer divides it."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = getattr(config, "router_aux_loss_coef", 0.0) if getattr(config, "output_router_logits", False) else 0.0
    args = trainer.args
    count = args.gradient_accumulation_steps * (args.world_size if args.average_tokens_across_devices else 1)
    if weight and count > 1 and trainer.is_world_process_zero():
        logger.warning(
            "the loss that balances experts counts %d times: it is added in every micro-batch of a step "
            "(gradient_accumulation_steps, ranks), and only the loss of the tokens is divided by all of them. "
            "from_pretrained(..., router_aux_loss_coef=%s) makes up for it",
            count, f"{weight / count:g}",
        )  # fmt: skip


def _ask_once(trainer: Trainer, *, function: bool) -> None:
    if summands(trainer) == 1 or (sharded_states(trainer.args) and not function):
        return  # where weights are gathered all ranks must call the model as often
    code = getattr(trainer.compute_loss_func if function else type(trainer).compute_loss, "__code__", None)
    if code is not None and any(name.endswith("gradient_accumulation_steps") for name in code.co_names):
        return  # a mean that is divided by them
    compute, answered = trainer.compute_loss, False  # perhaps a function that somebody has put there: it stays

    @wraps(compute)
    def asking(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal answered
        number = kwargs.get("num_items_in_batch")
        if answered or number is None or not model.training:
            return compute(model, inputs, *args, **kwargs)
        answered = True
        if function:
            with asked(trainer):
                return compute(model, inputs, *args, **kwargs)
        again = dict(inputs)  # a loss may take labels out
        loss = compute(model, inputs, *args, **kwargs)
        warn_of_a_mean(trainer, loss, lambda: compute(model, again, num_items_in_batch=2 * number))
        return loss

    trainer.compute_loss = asking
