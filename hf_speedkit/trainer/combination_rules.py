"""Settings that need another one: transformers says so in its own terms, behind the data and the model, or never."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import signature
from pathlib import Path
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
# What Trainer and TRL's SFTTrainer return of one evaluation without compute_metrics (transformers 5.23, trl 1.16).
_EVALUATED = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "aux_loss", "runtime")
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
    _check_precision_words(config)
    _check_insides(config)


def require_best_metric(trainer: Any) -> None:
    """Refuse a metric_for_best_model that no evaluation of this training returns.

    Trainer looks it up behind the first evaluation (transformers 5.23, `Trainer._determine_best_metric`), hours into a
    training that then ends with a KeyError. Of several evaluation sets each has names of its own, and none is "loss".

    Args:
        trainer: the SpeedSFTTrainer, with all its callbacks: one of them may add what it measures.

    Raises:
        ConfigurationError: the metric, and one that there is.
    """
    config, sets = trainer.args, trainer.eval_dataset
    metric = config.metric_for_best_model
    off = metric is None or sets is None or word_of(config.eval_strategy) == "no"
    if off or any(map(_is_users, (trainer.evaluate, trainer.log, *_hooks(trainer)))):
        return
    several = isinstance(sets, dict)
    prefixes = [f"{name}_" for name in sets] if several else [""]
    asked = metric.removeprefix("eval_")
    names = [asked.removeprefix(prefix) for prefix in prefixes if asked.startswith(prefix)]
    if any(trainer.compute_metrics is not None or name in _EVALUATED for name in names):
        return
    evaluated = (
        f"the evaluation sets are {', '.join(map(str, sets))}, each with a loss of its own"
        if several
        else f"without compute_metrics it returns {', '.join(_EVALUATED)}"
    )
    raise ConfigurationError(
        f"metric_for_best_model={metric!r} is nothing that an evaluation of this training returns: it would end there",
        evidence=(evaluated,),
        mend=f'metric_for_best_model="eval_{prefixes[0]}{_meant((names or [asked])[0])}"',
    )


def _meant(metric: str) -> str:
    return next((name for name in _EVALUATED if metric.endswith(name)), nearest(metric, _EVALUATED) or "loss")


def _hooks(trainer: Any) -> list[Any]:
    """Methods of callbacks that are handed what was measured, and may add to it."""
    names = ("on_evaluate", "on_log")
    return [getattr(callback, name) for callback in trainer.callback_handler.callbacks for name in names]


def _is_users(method: Any) -> bool:
    return not method.__module__.startswith(("hf_speedkit.", "transformers.", "trl."))


def _check_best(config: Any) -> None:
    saves, evaluates = word_of(config.save_strategy), word_of(config.eval_strategy)
    if saves == "best":
        # transformers takes the loss where the best one is to be loaded as well, or the rate follows a metric (5.23,
        # training_args.py:1586).
        by_loss = config.load_best_model_at_end or word_of(config.lr_scheduler_type) == "reduce_lr_on_plateau"
        if config.metric_for_best_model is None and not by_loss:
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


def _check_precision_words(config: Any) -> None:
    from transformers.utils import is_torch_tf32_available

    for one, other in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if getattr(config, one) and getattr(config, other):
            raise ConfigurationError(
                f"{one}=True beside {other}=True: one of them computes",
                mend=f"{other}=True alone, or {one}=True alone for GPUs before Ampere (V100, T4)",
            )
    if config.tf32 and not is_torch_tf32_available():
        raise ConfigurationError(
            "tf32=True, and there is no GPU that has it (Ampere or newer)", mend="leave tf32 out on this machine"
        )


def _check_insides(config: Any) -> None:
    """Keys that there are not are unexpected keyword arguments to Python, where a Trainer or step 1 is made of them."""
    from accelerate import ParallelismConfig
    from accelerate.utils import GradientAccumulationPlugin
    from torch.utils.checkpoint import checkpoint
    from transformers.trainer_pt_utils import AcceleratorConfig

    if config.output_dir == "":
        raise ConfigurationError('output_dir="" names no folder', mend='output_dir="runs/mine"')
    if config.parallelism_config is not None and not isinstance(config.parallelism_config, ParallelismConfig):
        raise ConfigurationError(
            f"parallelism_config={config.parallelism_config!r} is none",
            mend="parallelism_config=accelerate.ParallelismConfig(dp_replicate_size=2, dp_shard_size=8)",
        )
    words = (config.optim_args or "").replace(" ", "")
    if words and not all(part.count("=") == 1 for part in words.split(",")):
        raise ConfigurationError(f"optim_args={config.optim_args!r} cannot be read", mend='optim_args="a=1,b=2"')
    own = config.accelerator_config
    if not isinstance(own, AcceleratorConfig | type):
        own = as_dict(own, "accelerator_config", "{non_blocking: true}")
        _refuse_unknown_keys("accelerator_config", own, [setting.name for setting in fields(AcceleratorConfig)])
        inner = own.get("gradient_accumulation_kwargs") or {}
        known = [setting.name for setting in fields(GradientAccumulationPlugin)]
        _refuse_unknown_keys("gradient_accumulation_kwargs", inner, known)
    given = config.activation_checkpointing_kwargs
    if isinstance(given, dict):
        taken = [name for name, one in signature(checkpoint).parameters.items() if one.kind is one.KEYWORD_ONLY]
        # The rest are transformers' own (5.23, trainer.py:1508) and what torch takes as `**kwargs`.
        more = ("use_reentrant", "context_fn", "preserve_rng_state", "every_n_layers", "offload")
        taken += [name for name in more if name not in taken]
        _refuse_unknown_keys("activation_checkpointing_kwargs", given, taken)


def _refuse_unknown_keys(name: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        near = nearest(unknown[0], known)
        raise ConfigurationError(
            f"{name} has no key {', '.join(unknown)}",
            mend=(f"did you mean {near}? " if near else "") + f"There are: {', '.join(known)}",
        )


def as_dict(given: Any, name: str, example: str) -> Mapping[str, Any]:
    """A setting that may be a dict, its JSON, or the path of a JSON file; empty where it is None.

    Args:
        given: as it was given.
        name: of the setting.
        example: what it may look like.

    Raises:
        ConfigurationError: it is none of these.
    """
    if given is None or isinstance(given, Mapping):
        return given or {}
    text = str(given)
    try:
        read = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        read = error
    if isinstance(read, Mapping):
        return read
    raise ConfigurationError(
        f"{name}={given!r} is no dict, and no JSON file with one",
        evidence=(f"{type(read).__name__}: {' '.join(str(read).split())[:200]}",),
        mend=f"{name}: {example}, or the path of a JSON file",
    )
