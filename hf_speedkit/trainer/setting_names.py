"""Names that transformers and TRL once had, or never had: a setting, or one of the words it takes. Light."""

from __future__ import annotations

import difflib
import multiprocessing
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.hardware import word_of

# As tutorials and scripts of earlier versions have them (transformers 4, TRL before 0.20).
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "group_by_length": "nothing: packed rows have one length, and are dealt out by cost",
    "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
    "max_seq_length": "tokens_per_batch (max_length without packing)",
    "no_cuda": "use_cpu",
    "num_of_sequences": "tokens_per_batch",
    "overwrite_output_dir": "allow_existing_output",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "tokenizer": "processing_class, which SpeedSFTTrainer takes",
    "torch_dtype": 'model_init_kwargs={"dtype": "bfloat16"}',
    "dtype": 'model_init_kwargs={"dtype": "bfloat16"}',
    "warmup_ratio": "warmup_steps, a share of all steps below 1: warmup_steps=0.03",
}


COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")
"""Of torch.compile (torch 2.13, torch._inductor.list_mode_options)."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that a misspelt name is nearest to; None where none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def nearest_path(path: str | Path) -> str | None:
    """What lies beside a path where there is nothing, and has nearly its name; None where nothing has."""
    given = Path(path)
    folder = given.parent
    if not folder.is_dir():
        return None
    near = nearest(given.name, sorted(other.name for other in folder.iterdir()))
    return None if near is None else str(folder / near)


def meant_by(name: str, known: Iterable[str]) -> str | None:
    """What a name of a setting is called now, or the nearest there is; None where nothing is near.

    Args:
        name: unknown.
        known: all settings.
    """
    return _RENAMED.get(name) or nearest(name, known)


def what_was_meant(unknown: Sequence[str], known: Iterable[str]) -> str:
    """The sentences that name what unknown settings are called now; empty where nothing is near.

    Args:
        unknown: names.
        known: all settings.
    """
    known = list(known)
    said = []
    for name, new in ((name, meant_by(name, known)) for name in unknown):
        if new is not None:
            idle = new.startswith("nothing: ")
            sentence = f"leave it out: {new.removeprefix('nothing: ')}" if idle else f"did you mean {new}?"
            said.append(sentence if len(unknown) == 1 else f"{name}: {sentence}")
    return " ".join(said)


def refuse_unknown_settings(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse settings that there are not, which Python calls unexpected keyword arguments.

    Args:
        given, known: names.

    Raises:
        ConfigurationError: what it is called now, or the nearest name.
    """
    known = list(known)
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    raise ConfigurationError(
        f"there is no setting {', '.join(unknown)}",
        mend=what_was_meant(unknown, known) or "leave it out; docs/settings.md lists all",
    )


def refuse_unknown_arguments(given: Iterable[str], known: Iterable[str], settings: Iterable[str]) -> None:
    """Refuse arguments that a trainer has not got; what is a setting belongs into its config.

    Args:
        given, known: names of arguments.
        settings: names of settings.

    Raises:
        ConfigurationError: where each belongs.
    """
    known, settings = list(known), list(settings)
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    lines = []
    for name in unknown:
        near = nearest(name, known)
        meant = name if name in settings else None if near else meant_by(name, settings)
        if name == "tokenizer":
            lines.append("processing_class=tokenizer")
        elif meant is not None:
            lines.append(f"{name} belongs into args=SpeedSFTConfig(...), there called {meant}")
        elif near:
            lines.append(f"did you mean {near}?")
    raise ConfigurationError(
        f"the trainer has no argument {', '.join(unknown)}", mend="; ".join(lines) or f"it has {', '.join(known)}"
    )


def check_words(config: Any) -> None:
    """Refuse words that transformers does not know; its own refusal names no setting.

    Args:
        config: a SpeedSFTConfig as its user gave it.

    Raises:
        ConfigurationError: the setting, and the nearest of its words.
    """
    from accelerate.utils import DynamoBackend
    from transformers import SchedulerType
    from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy
    from transformers.training_args import OptimizerNames, trainer_log_levels

    kinds: tuple[tuple[str, Iterable[Any]], ...] = (
        ("optim", OptimizerNames),
        ("lr_scheduler_type", SchedulerType),
        ("logging_strategy", IntervalStrategy),
        ("eval_strategy", IntervalStrategy),
        ("save_strategy", SaveStrategy),
        ("log_level", trainer_log_levels),
        ("log_level_replica", trainer_log_levels),
        ("loss_type", ("nll", "dft")),  # TRL 1.16, sft_trainer.py:1042, where the model is loaded already
        ("hub_strategy", HubStrategy),
        ("torch_compile_backend", [backend.value.lower() for backend in DynamoBackend]),
        ("torch_compile_mode", COMPILE_MODES),
        ("dataloader_multiprocessing_context", multiprocessing.get_all_start_methods()),
        # What is a choice on the command line alone is one in a script as well.
        *((setting.name, setting.metadata["choices"]) for setting in fields(config) if "choices" in setting.metadata),
    )
    optional = {setting.name for setting in fields(config) if setting.default is None}
    for name, kind in kinds:
        value = getattr(config, name)
        words = [word_of(one) for one in kind]
        if getattr(value, "value", value) in words or (value is None and name in optional):
            continue
        near = nearest(str(value), words)
        first = f'{name}="{near}"; ' if near else ""
        if value is False and "no" in words:
            first = 'write "no" in quotes, which YAML reads as False without them; '
        raise ConfigurationError(
            f"{name}={value!r} is not a choice", mend=f"{first}{name} is one of: {', '.join(words)}"
        )
