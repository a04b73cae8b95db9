"""What transformers' and TRL's own numbers may be: most of them are otherwise told at step 1, cryptically, or never.

transformers 5.23 divides by gradient_accumulation_steps=0 after the model is loaded and the data is tokenized, takes
num_train_epochs=0 for a run that has ended, and cuts documents to max_length=-5 from their end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from inspect import signature
from numbers import Integral, Real
from typing import Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.hardware import word_of

logger = logging.getLogger(__name__)

_Fits = Callable[[Any], bool]


def whole(least: int, *, most: float = math.inf, none: bool = False) -> _Fits:
    """What tells a whole number from `least` to `most`, and None where that is allowed; True and 3.0 are none."""

    def fits(value: Any) -> bool:
        if value is None or isinstance(value, bool) or not isinstance(value, Integral):
            return value is None and none
        return bool(least <= int(value) <= most)

    return fits


def number(least: float, *, below: float = math.inf, above: bool = False, none: bool = False) -> _Fits:
    """What tells a number from `least` up (or `above` it) that stays `below`; never NaN."""

    def fits(value: Any) -> bool:
        if value is None or isinstance(value, bool) or not isinstance(value, Real):
            return value is None and none
        given = float(value)
        return (given > least if above else given >= least) and given < below

    return fits


def _steps(value: Any) -> bool:
    return number(0, above=True, none=True)(value) and (value is None or value < 1 or value == int(value))


_COUNT = "a whole number from 1 up"
_RULES: tuple[tuple[str, _Fits, str], ...] = (
    ("per_device_train_batch_size", whole(1), f"{_COUNT}; with packing tokens_per_batch is what sizes a batch"),
    ("per_device_eval_batch_size", whole(1), _COUNT),
    ("gradient_accumulation_steps", whole(1), _COUNT),
    ("max_length", whole(2, none=True), "a number of tokens from 2 up, or None; with packing set tokens_per_batch"),
    ("max_steps", whole(-(2**63)), "a whole number of optimizer steps, or -1 for num_train_epochs"),
    ("num_train_epochs", number(-math.inf), "a number of passes over the data, 3 for example"),
    ("learning_rate", number(0.0), "a number that is not negative, 2e-5 for example"),
    ("warmup_steps", number(0.0), "a number of steps, or a share of them below 1"),
    ("weight_decay", number(0.0), "a number that is not negative"),
    ("max_grad_norm", number(0.0), "the norm that gradients are clipped to, or 0 for no clipping"),
    ("adam_beta1", number(0.0, below=1.0), "a number from 0 up and below 1"),
    ("adam_beta2", number(0.0, below=1.0), "a number from 0 up and below 1"),
    ("adam_epsilon", number(0.0), "a number that is not negative, 1e-8 for example"),
    ("seed", whole(0, most=2**32 - 1), "a whole number from 0 to 4294967295"),
    ("data_seed", whole(0, most=2**32 - 1, none=True), "a whole number from 0 to 4294967295, or None"),
    ("dataloader_num_workers", whole(0), "a whole number, 0 for none"),
    ("dataset_num_proc", whole(1, none=True), f"{_COUNT}, or None"),
    ("neftune_noise_alpha", number(0.0, none=True), "a number that is not negative, or None"),
    ("label_smoothing_factor", number(0.0, below=1.0), "a number from 0 up and below 1"),
    ("save_total_limit", whole(-(2**63), none=True), "a whole number of checkpoints to keep, or None for all"),
    ("eval_accumulation_steps", whole(1, none=True), f"{_COUNT}, or None"),
    ("torch_empty_cache_steps", whole(1, none=True), f"{_COUNT}, or None"),
    ("ddp_timeout", number(0.0, above=True), "a number of seconds, 1800 for example"),
)
# Only read where the strategy is "steps".
_INTERVALS = (
    ("logging_steps", "logging_strategy", "no log"),
    ("save_steps", "save_strategy", "no checkpoints"),
    ("eval_steps", "eval_strategy", "no evaluation"),
)
_MIN_RATES = ("min_lr", "min_lr_rate")
_GIVEN_TO_SCHEDULES = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")


def check_numbers(config: Any) -> None:
    """Refuse numbers of transformers' and TRL's that cannot work; call it before they look at them.

    Args:
        config: a SpeedSFTConfig as its user gave it.

    Raises:
        ConfigurationError: names the setting and what it may be.
    """
    for name, fits, wanted in _RULES:
        value = getattr(config, name)
        if not fits(value):
            raise ConfigurationError(f"{name}={value!r} cannot be used", mend=f"{name} is {wanted}")
    if config.max_steps <= 0 and config.num_train_epochs <= 0:
        raise ConfigurationError(
            f"nothing would be trained: num_train_epochs={config.num_train_epochs!r} and max_steps={config.max_steps}",
            mend="num_train_epochs=1, or max_steps=100 for a number of steps",
        )
    for name, strategy, nothing in _INTERVALS:
        value = getattr(config, name)
        chosen = getattr(config, strategy)
        if word_of(chosen) == "steps" and not _steps(value):
            raise ConfigurationError(
                f"{name}={value!r} cannot be used",
                mend=f"{name} is {_COUNT}, or a share of all steps below 1",
                regardless=f'{strategy}="no" for {nothing}',
            )
    _check_schedule(config)


def _check_schedule(config: Any) -> None:
    kind = word_of(config.lr_scheduler_type)
    given = config.lr_scheduler_kwargs
    _check_schedule_kwargs(kind, given or {})
    if "with_min_lr" in kind and isinstance(given or {}, dict) and not set(_MIN_RATES) & set(given or {}):
        raise ConfigurationError(
            f"lr_scheduler_type={kind!r} needs the learning rate that it ends at",
            mend='lr_scheduler_kwargs={"min_lr_rate": 0.1} ends at a tenth of learning_rate',
        )


def _check_schedule_kwargs(kind: str, given: Any) -> None:
    """A schedule is made behind the model and the data; an argument that it has not got, or lacks, is told there."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    if not isinstance(given, dict):  # JSON of the command line, or what `check_choices` refuses
        return
    function = next(made for name, made in TYPE_TO_SCHEDULER_FUNCTION.items() if word_of(name) == kind)
    taken = {name: one for name, one in signature(function).parameters.items() if name not in _GIVEN_TO_SCHEDULES}
    open_ended = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    # A schedule that takes nothing ignores them, which is said where other idle settings are.
    unknown = [] if open_ended or not taken else [name for name in given if name not in taken]
    missing = [name for name, one in taken.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    if unknown:
        raise ConfigurationError(
            f"lr_scheduler_type={kind!r} takes no {', '.join(unknown)}",
            mend=f"lr_scheduler_kwargs takes: {', '.join(taken)}",
        )
    if not set(missing) <= set(given):
        raise ConfigurationError(
            f"lr_scheduler_type={kind!r} needs {', '.join(missing)}",
            mend=f"lr_scheduler_kwargs={{{', '.join(f'{name!r}: 100' for name in missing)}}}",
        )


def warn_of_long_warmup(args: Any, steps: int) -> None:
    """Say that a run ends before its learning rate is what was asked for.

    Args:
        args: TrainingArguments.
        steps: optimizer steps of the run.
    """
    warmup = args.get_warmup_steps(steps)
    schedule = word_of(args.lr_scheduler_type)
    if args.warmup_steps >= 1 and warmup >= steps > 0 and schedule != "constant":
        logger.warning(
            "warmup_steps=%d is all of this run of %d steps: its last step has a learning rate of %.3g, not %.3g; "
            "warmup_steps=%d would be a tenth", warmup, steps, args.learning_rate * (steps - 1) / warmup,
            args.learning_rate, max(1, steps // 10),
        )  # fmt: skip
