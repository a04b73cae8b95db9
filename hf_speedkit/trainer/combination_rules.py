"""Settings that need another one: transformers says so in its own terms, behind the data and the model, or never."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.hardware import word_of
from hf_speedkit.trainer.setting_names import nearest

_EVALUATE = 'eval_strategy="steps" with eval_steps and an eval_dataset'
# Setting, when it is on, what it needs.
_NEED_EVALUATION = (
    ("load_best_model_at_end", True, "there is no best model to load"),
    ("save_strategy", "best", "no checkpoint would be written"),
    ("lr_scheduler_type", "reduce_lr_on_plateau", "nothing tells when the rate is to fall"),
    ("lr_scheduler_type", "greedy", "nothing tells when the rate is to fall"),
)
_NEED_WORKERS = ("dataloader_persistent_workers", "dataloader_prefetch_factor")


def check_combinations(config: Any) -> None:
    """Refuse settings that cannot work without another one that is not there.

    Args:
        config: a SpeedSFTConfig as its user gave it.

    Raises:
        ConfigurationError: both, and what to write.
    """
    evaluates = word_of(config.eval_strategy) != "no"
    for name, on, nothing in _NEED_EVALUATION:
        value = getattr(config, name)
        if (value is True if on is True else word_of(value) == on) and not evaluates:
            raise ConfigurationError(
                f"{name}={word_of(value)} without an evaluation: {nothing}",
                mend=f"{_EVALUATE}, or leave {name} out",
            )
    _check_best(config)
    for name in _NEED_WORKERS:
        if getattr(config, name) and config.dataloader_num_workers == 0:
            raise ConfigurationError(
                f"{name}={getattr(config, name)} without workers", mend=f"dataloader_num_workers=2, or leave {name} out"
            )
    _check_accelerator_config(config.accelerator_config)


def _check_best(config: Any) -> None:
    saves, evaluates = word_of(config.save_strategy), word_of(config.eval_strategy)
    if saves == "best":
        if config.metric_for_best_model is None:
            raise ConfigurationError(
                'save_strategy="best" does not say by which metric', mend='metric_for_best_model="loss"'
            )
        return
    if not config.load_best_model_at_end:
        return
    if saves != evaluates:
        raise ConfigurationError(
            f"load_best_model_at_end with save_strategy={saves} and eval_strategy={evaluates}: the best step would "
            "have no checkpoint",
            mend=f'save_strategy="{evaluates}" as well, or save_strategy="best" with metric_for_best_model="loss"',
        )
    every = config.logging_steps if config.eval_steps is None else config.eval_steps
    # Shares of all steps are whole numbers of them only once the data is counted: transformers compares those.
    if saves == "steps" and min(config.save_steps, every) >= 1 and config.save_steps % every:
        raise ConfigurationError(
            f"load_best_model_at_end with save_steps={config.save_steps} and eval_steps={every}: a checkpoint would be "
            "written where nothing was evaluated",
            mend=f"save_steps={every} or a multiple of it",
        )


def _check_accelerator_config(given: Any) -> None:
    """A key that there is not is an unexpected keyword argument to Python."""
    from transformers.trainer_pt_utils import AcceleratorConfig

    known = [setting.name for setting in fields(AcceleratorConfig)]
    unknown = [key for key in given if key not in known] if isinstance(given, dict) else []
    if unknown:
        near = nearest(unknown[0], known)
        raise ConfigurationError(
            f"accelerator_config has no key {', '.join(unknown)}",
            mend=(f"did you mean {near}? " if near else "") + f"There are: {', '.join(known)}",
        )
