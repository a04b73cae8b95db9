"""What the settings of SpeedSFTConfig may be, and what packing makes of them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.kernels.fused_layers import PARTS
from hf_speedkit.trainer.combination_rules import check_combinations
from hf_speedkit.trainer.hardware import is_on, word_of
from hf_speedkit.trainer.launcher_rules import check_fsdp_config, check_launcher
from hf_speedkit.trainer.launching import refuse_split_rows
from hf_speedkit.trainer.number_rules import check_numbers, number, whole
from hf_speedkit.trainer.optional_packages import require_deepspeed
from hf_speedkit.trainer.precision_rules import require_accelerator
from hf_speedkit.trainer.setting_names import check_words

logger = logging.getLogger(__name__)

STRATEGIES = ("auto", "fifo_close", "best_fit_decreasing", "next_fit")
OVERLONG = ("error", "split", "truncate", "drop")
VERIFICATIONS = ("checksums", "sizes")
EXPORTS = ("auto", "stored", "bfloat16", "float16", "float32")
ASSERTIONS = ("auto", "strict", "warn", "off")
# SFTConfig's defaults of max_length and per_device_train_batch_size: nobody has asked for them.
_TRLS_LENGTH, _TRLS_BATCH = 1024, 8
_PROBED_SLOTS = 6  # three documents of two tokens, see StartupProof
# TRL's names for what we do as well, so that an SFTConfig can be moved over unchanged.
TRL_STRATEGIES = {"bfd": "best_fit_decreasing", "bfd_split": "best_fit_decreasing"}


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_dict(value: object) -> bool:
    return value is None or isinstance(value, dict)


def _are_signals(value: object) -> bool:
    names = set(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP"}  # which no process is asked about
    return value is None or (isinstance(value, (list, tuple)) and all(name in names for name in value))


_DICTS = ("chat_template_kwargs", "lr_scheduler_kwargs", "activation_checkpointing_kwargs", "model_init_kwargs",
          "dataset_kwargs")  # fmt: skip
_SWITCHES = ("packing", "fused_layers", "fused_lora", "fused_optimizer", "isolation_check", "throughput", "step_log",
             "allow_existing_output", "exclude_generation_prompt", "fsdp_zero_copy")  # fmt: skip
_BOOLS = (bool, bool | None, "bool", "bool | None")
# Text such as "false" is true to Python, and a wrong number would be found after the model is loaded, or never.
_VALUES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    *((name, _is_bool, "True or False") for name in _SWITCHES),
    *((name, _is_dict, f'a dict, {name}={{"a": 1}} for example, or its JSON on the command line') for name in _DICTS),
    (
        "stop_signals",
        _are_signals,
        'a list of signals that can be caught, ["SIGTERM", "SIGUSR1"] for example; [] for none',
    ),
    ("eval_packing", lambda value: value is None or _is_bool(value), "True, False or None"),
    # Its size is judged where packing is settled; text is what a wrong YAML line gives.
    ("tokens_per_batch", whole(-(2**63), none=True), "a whole number of slots"),
    ("cost_window_steps", whole(1, none=True), "a whole number of steps from 1 up"),
    ("count_launches_every", whole(0), "a whole number of steps, or 0"),
    ("peak_tflops", number(0.0, above=True, none=True), "a number of TFLOP/s"),
    ("stuck_rank_timeout_s", number(0.0), "a number of seconds, or 0"),
    ("fsdp_prefetch_layers", whole(0, none=True), "a whole number of layers"),
    (
        "fused_layers_exclude",
        lambda value: value is None or (isinstance(value, (list, tuple)) and set(value) <= set(PARTS)),
        f"a list of names out of: {', '.join(PARTS)}",
    ),
    (
        "trace_steps",
        lambda value: value is None or (isinstance(value, (list, tuple)) and all(map(whole(1), value))),
        "a list of optimizer steps, [20] for example",
    ),
)


def check_given(config: Any) -> None:
    """Refuse what transformers, TRL and accelerate would refuse later in their own terms, or take without a word.

    Args:
        config: a SpeedSFTConfig as its user gave it, before transformers looks at it.

    Raises:
        ConfigurationError, HardwareError: with the setting, or the launcher's variable, to change.
    """
    for check in (
        check_words,
        check_switches,
        check_numbers,
        check_combinations,
        check_launcher,
        check_fsdp_config,
        require_deepspeed,
        require_accelerator,
    ):
        check(config)


def check_switches(config: Any) -> None:
    """Refuse words where True or False is meant, of transformers and TRL as well: "false" would be on.

    Raises:
        ConfigurationError: names the setting.
    """
    for setting in fields(config):
        value = getattr(config, setting.name)
        # The default too: transformers' parser writes another type into fields that take a word or a bool.
        if setting.type in _BOOLS and setting.default in (True, False, None) and value not in (True, False, None):
            words = "True, False or None" if "None" in str(setting.type) else "True or False"
            raise ConfigurationError(
                f"{setting.name}={value!r} is not a choice", mend=f"{setting.name} is {words}, without quotes"
            )


def check_choices(config: Any) -> None:
    """Refuse settings of this package that are of another type, out of range, or none of the choices there are.

    Raises:
        ConfigurationError: names the setting and what it may be.
    """
    for name, fits, wanted in _VALUES:
        value = getattr(config, name)
        if not fits(value):
            raise ConfigurationError(f"{name}={value!r} is not a choice", mend=f"{name} is {wanted}")
    for name, choices in (
        ("overlong", OVERLONG),
        ("kernel_assertion", ASSERTIONS),
        ("packed_attention", ("auto", "keep")),
        ("loss_head", ("auto", "trl")),
        ("activation_checkpointing_keep", ("auto", "nothing", "products")),
        ("checkpoint_verification", VERIFICATIONS),
        ("export_dtype", EXPORTS),
        ("nonfinite", ("strict", "warn")),
        ("template_check", ("strict", "warn", "off")),
        ("memory_check", ("strict", "warn", "off")),
        ("packing_strategy", (*STRATEGIES, *TRL_STRATEGIES, "wrapped")),
    ):
        value = getattr(config, name)
        if value not in choices:
            raise ConfigurationError(
                f"{name}={value!r} is not a choice", mend=f"{name} is one of: {', '.join(choices)}"
            )

    import torch

    if config.activation_offloading and not torch.accelerator.is_available():
        raise ConfigurationError(  # TRL 1.16: AttributeError: 'NoneType' object has no attribute 'type'
            "activation_offloading moves activations from a GPU to the host, and there is no GPU",
            mend="leave activation_offloading out",
        )
    for name, words in (
        ("activation_checkpointing_layers", ("auto", "all")),
        ("activation_offloading_layers", ("none", "auto")),
    ):
        layers = str(getattr(config, name))
        if layers not in words and not layers.isdecimal():
            raise ConfigurationError(
                f"{name}={layers!r} is not a choice", mend=f"{name} is {', '.join(words)}, or a number of layers"
            )


# Settings that do nothing where a switch is off.
_NEEDS_PACKING = ("tokens_per_batch", "cost_window_steps", "overlong", "packing_strategy", "packed_attention")
_NEEDS_EVALUATION = ("do_eval", "eval_steps", "eval_delay", "metric_for_best_model")
_NEEDS_HUB = ("hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision")
_NEEDS_LAYERS = (
    "activation_checkpointing_layers",
    "activation_checkpointing_keep",
    "activation_offloading_layers",
)


def say_what_is_idle(config: Any) -> None:
    """Say, in one line a switch, which settings do nothing because it is off; call it before packing is settled."""
    if config.local_process_index != 0:
        return
    sharded = bool(config.fsdp) or is_on(os.environ.get("ACCELERATE_USE_FSDP"))
    inside = config.fsdp_config if isinstance(config.fsdp_config, dict) else {}
    recomputed = config.activation_checkpointing or inside.get("activation_checkpointing")
    evaluates, optimizer = word_of(config.eval_strategy) != "no", word_of(config.optim)
    schedule = word_of(config.lr_scheduler_type)
    for on, switch, names in (
        (config.packing, "packing=True", _NEEDS_PACKING),
        (config.throughput, "throughput=True", ("peak_tflops",)),
        (config.fused_layers, "fused_layers=True", ("fused_layers_exclude",)),
        (recomputed, "activation_checkpointing=True", _NEEDS_LAYERS),
        (sharded, "fsdp=True", ("fsdp_prefetch_layers",)),
        # Beside a launcher's FSDP too: its own settings count then.
        (config.fsdp, "fsdp=True", ("fsdp_config",)),
        (evaluates, 'eval_strategy="steps"', _NEEDS_EVALUATION),
        (not schedule.startswith("constant"), "a schedule other than constant", ("lr_scheduler_kwargs",)),
        (config.push_to_hub, "push_to_hub=True", _NEEDS_HUB),
        (config.use_liger_kernel, "use_liger_kernel=True", ("liger_kernel_config",)),
        (optimizer.startswith(("galore", "apollo")), 'optim="galore_adamw"', ("optim_target_modules",)),
        # Betas, epsilon and decay have settings of their own; of AdamW those in 4 and 8 bits have arguments.
        (not optimizer.startswith("adamw_torch") or "bit" in optimizer, "an optim other than AdamW", ("optim_args",)),
    ):
        idle = [] if on else [name for name in names if not _is_default(config, name)]
        if idle:
            given = ", ".join(f"{name}={getattr(config, name)!r}" for name in idle)
            logger.warning("without %s these do nothing: %s", switch, given)


def _is_default(config: Any, name: str) -> bool:
    default = next(setting.default for setting in fields(config) if setting.name == name)
    # TRL's own default, which an SFTConfig brings along.
    return getattr(config, name) in (default, "bfd") if name == "packing_strategy" else getattr(config, name) == default


def settle_batches(config: Any) -> None:
    """Let every rank read batches of its own, also of a stream.

    With `dispatch_batches`, accelerate's default for streams, rank 0 reads for all and puts the ranks' batches into one
    tensor: rows of unequal length end in a RuntimeError (case V36). TRL 1.16 turns it off for training streams alone.
    """
    accelerator = config.accelerator_config
    if accelerator.dispatch_batches and not config.packing and config.local_process_index == 0:
        logger.warning(
            "dispatch_batches=True is turned off: rank 0 would put the batches of all ranks into one, and their rows "
            "have unequal lengths"
        )
    if not (accelerator.dispatch_batches and config.packing):  # refused there, where the data are known
        accelerator.dispatch_batches = False


def refuse_without_packing(config: Any) -> None:
    """Refuse packed evaluation, and rows without padding that `max_length` would not cut (TRL 1.16 does so late).

    Raises:
        ConfigurationError: names the fixes.
    """
    if config.eval_packing:
        raise ConfigurationError(
            "eval_packing=True without packing: packed rows need the collator that packing=True brings",
            mend="set packing=True as well, or leave eval_packing unset",
        )
    if config.padding_free and config.max_length is not None:
        raise ConfigurationError(
            f"padding_free=True without packing: max_length={config.max_length} would not be applied to its rows",
            mend="packing=True, tokens_per_batch=8192: packed rows hold no padding either, and have one shape",
            regardless="max_length=None, where the longest document fits into memory",
        )


def settle_packing(config: Any) -> None:
    """Settle the shape of a packed row in place, and refuse settings that packing cannot follow.

    Raises:
        ConfigurationError: names the setting to change.
    """
    if config.packing_strategy == "wrapped":
        raise ConfigurationError(
            'packing_strategy="wrapped" cuts documents anywhere and lets them attend to one another',
            mend='packing_strategy="auto" packs whole documents at more than 99 % of the row',
        )
    if config.packing_strategy == "bfd_split":
        config.overlong = "split"
    config.packing_strategy = TRL_STRATEGIES.get(config.packing_strategy, config.packing_strategy)
    refuse_split_rows(config.parallelism_config)
    if config.padding_free:
        raise ConfigurationError(
            "padding_free=True is part of packing here and must not be set beside it",
            evidence=("TRL would replace the collator, and the rows would have a new shape every step",),
            mend="leave padding_free unset; packing=True is enough",
        )
    given = config.tokens_per_batch is not None
    if not given:
        if config.max_length is None:
            raise ConfigurationError(
                "the length of a packed row is not set",
                mend="set tokens_per_batch, for example tokens_per_batch=8192",
            )
        config.tokens_per_batch = int(config.max_length * config.per_device_train_batch_size)
    elif config.max_length not in (None, _TRLS_LENGTH, config.tokens_per_batch):
        logger.warning(
            "max_length=%s cuts nothing where documents are packed: they may fill a row (tokens_per_batch=%s); "
            "cut or filter longer ones before", config.max_length, config.tokens_per_batch,
        )  # fmt: skip
    if given and config.per_device_train_batch_size not in (1, _TRLS_BATCH):
        logger.warning(
            "per_device_train_batch_size=%d does nothing beside tokens_per_batch=%d: a micro-batch is one row of that "
            "many slots; for more tokens a step raise either of tokens_per_batch and gradient_accumulation_steps",
            config.per_device_train_batch_size, config.tokens_per_batch,
        )  # fmt: skip
    shortest = _PROBED_SLOTS if config.isolation_check else 2
    config.tokens_per_batch = int(config.tokens_per_batch)  # numpy's passes too, and JSON does not know it
    if config.tokens_per_batch < shortest:
        raise ConfigurationError(
            f"tokens_per_batch={config.tokens_per_batch} leaves no token to predict, or no documents to compare",
            evidence=("a document needs two tokens, and the isolation proof three documents in a row",),
            mend="set tokens_per_batch to at least the longest document",
        )
    if config.per_device_eval_batch_size != 1 and config.eval_packing is not False:
        raise ConfigurationError(
            f"per_device_eval_batch_size={config.per_device_eval_batch_size} with packing",
            evidence=("a forward pass takes one row of tokens_per_batch slots; more rows would be a new shape",),
            mend="per_device_eval_batch_size=1 (or eval_packing=False to evaluate on padded batches)",
        )
    if config.auto_find_batch_size:
        raise ConfigurationError(
            "auto_find_batch_size cannot shrink a packed row",
            mend="lower tokens_per_batch instead, or raise gradient_accumulation_steps",
        )
    if config.truncation_mode != "keep_start":
        raise ConfigurationError(
            f"truncation_mode={config.truncation_mode!r} is not known to packing",
            evidence=('overlong="truncate" keeps the beginning of a document',),
            mend='cut documents before they are passed, or overlong="drop" or "split"',
        )
    if (config.dataset_kwargs or {}).get("skip_prepare_dataset"):
        # Tokenized rows pass TRL's preparation as they are; documents must be checked and counted in any case.
        config.dataset_kwargs = {**config.dataset_kwargs, "skip_prepare_dataset": False}
    config.per_device_train_batch_size = 1
    # TRL would cut every document at max_length (1,024 by default) without a word.
    config.max_length = None
