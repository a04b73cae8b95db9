"""What accelerate's environment variables and the keys of `fsdp_config` may be, which say the same of FSDP twice.

accelerate 1.15 and transformers 5.23 read them when a Trainer is made, behind the data and the model, and answer a bad
one with what Python says of it: "KeyError: 'WHOLE'", "invalid truth value maybe". A key of `fsdp_config` that there is
not is left out without a word. Light: accelerate is imported where it is asked.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.combination_rules import as_dict
from hf_speedkit.trainer.hardware import is_on, word_of
from hf_speedkit.trainer.setting_names import COMPILE_MODES, nearest

logger = logging.getLogger(__name__)

_Rule = tuple[Callable[[str], bool], str]


def _words(*words: str, any_case: bool = True) -> _Rule:
    def fits(text: str) -> bool:
        return text in words or (any_case and text.lower() in [word.lower() for word in words])

    return fits, f"one of: {', '.join(words)}"


def _count(least: int) -> _Rule:
    return lambda text: text.strip().isdecimal() and int(text) >= least, f"a whole number from {least} up"


_OFF = ("n", "no", "f", "false", "off", "0")
_FLAG: _Rule = (_words("y", "yes", "t", "true", "on", "1", *_OFF)[0], "true or false")
# Read by accelerate as `.lower() == "true"` in one place and as any word for yes in another: "1" is half on.
_TRUTH: _Rule = (_words("true", *_OFF)[0], "one of: true, false")
_STRATEGY = _words("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", *"12345")
_VERSION = _words("1", "2")

_ALWAYS: dict[str, _Rule] = {
    "ACCELERATE_MIXED_PRECISION": _words("no", "fp16", "bf16", "fp8", any_case=False),
    **dict.fromkeys(
        (
            "ACCELERATE_USE_DEEPSPEED",
            "ACCELERATE_USE_FSDP",
            "ACCELERATE_USE_MEGATRON_LM",
            "ACCELERATE_USE_PARALLELISM_CONFIG",
        ),
        _TRUTH,
    ),
    **dict.fromkeys(("ACCELERATE_USE_CPU", "ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY"), _FLAG),
    **dict.fromkeys(
        [f"ACCELERATE_DYNAMO_USE_{name}" for name in ("FULLGRAPH", "DYNAMIC", "REGIONAL_COMPILATION")], _FLAG
    ),
    "ACCELERATE_DYNAMO_MODE": _words(*COMPILE_MODES, any_case=False),
    "ACCELERATE_FP8_BACKEND": _words("TE", "MSAMP", "AO", "NO", any_case=False),
    "RANK": _count(0),
    "LOCAL_RANK": (lambda text: text == "-1" or _count(0)[0](text), _count(0)[1]),
    "WORLD_SIZE": _count(1),
}
# The name after FSDP_, the key of fsdp_config (None where transformers reads none), and what either may be.
_FSDP: tuple[tuple[str, str | None, _Rule], ...] = (
    ("VERSION", "version", _VERSION),
    ("STATE_DICT_TYPE", "state_dict_type", _words("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")),
    ("OFFLOAD_PARAMS", "cpu_offload", _TRUTH),
    ("AUTO_WRAP_POLICY", "auto_wrap_policy", _words("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")),
    ("BACKWARD_PREFETCH", "backward_prefetch", _words("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")),
    ("MIN_NUM_PARAMS", "min_num_params", _count(0)),
    ("FORWARD_PREFETCH", "forward_prefetch", _FLAG),
    ("USE_ORIG_PARAMS", "use_orig_params", _FLAG),
    ("SYNC_MODULE_STATES", "sync_module_states", _FLAG),
    ("CPU_RAM_EFFICIENT_LOADING", "cpu_ram_efficient_loading", _FLAG),
    ("ACTIVATION_CHECKPOINTING", "activation_checkpointing", _FLAG),
    ("ACTIVATION_CHECKPOINTING_OFFLOAD", None, _FLAG),
)
_OTHER_KEYS = ("reshard_after_forward", "limit_all_gathers", "transformer_layer_cls_to_wrap", "xla", "xla_fsdp_v2",
               "xla_fsdp_grad_ckpt", "xla_fsdp_settings")  # fmt: skip
# As accelerate's own config files call them.
_THEIRS = {"offload_params": "cpu_offload", "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
           "sharding_strategy": "reshard_after_forward"}  # fmt: skip
_OF_VERSION_1 = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")
_SIZES = ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE", "CP_SIZE", "SP_SIZE")
# What the job's own settings say instead, without a word (transformers 5.23, trainer.py:806 and the optimizer's step).
_IDLE = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
         "ACCELERATE_GRADIENT_CLIPPING": "max_grad_norm"}  # fmt: skip


def check_launcher(config: Any, environment: Mapping[str, str] | None = None) -> None:
    """Refuse what a launcher, or a shell, has left in the environment and accelerate cannot take.

    Args:
        config: a SpeedSFTConfig as its user gave it. Read here: `fsdp`, `use_cpu`.
        environment: os.environ unless given.

    Raises:
        ConfigurationError: the variable, and what it may be.
    """
    environment = os.environ if environment is None else environment
    for name, rule in _rules(config, environment):
        text = environment.get(name)
        if text is not None and not rule[0](text):
            raise ConfigurationError(
                f"{name}={text!r} in the environment cannot be used",
                mend=f"{name} is {rule[1]}; accelerate launch sets it from its options and its config file",
                regardless=f"unset {name}",
            )
    if is_on(environment.get("ACCELERATE_USE_MEGATRON_LM")):
        raise ConfigurationError(
            "the launcher asks for Megatron-LM, which trains models and loops of its own",
            mend="accelerate launch --config_file accelerate_configs/fsdp2.yaml, or unset ACCELERATE_USE_MEGATRON_LM",
        )
    offloads, checkpoints = "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "FSDP_ACTIVATION_CHECKPOINTING"
    launched = is_on(environment.get("ACCELERATE_USE_FSDP")) and not config.fsdp
    if launched and is_on(environment.get(offloads)) and not is_on(environment.get(checkpoints)):
        raise ConfigurationError(
            f"{offloads} without {checkpoints}: there is nothing to offload",
            mend="fsdp_activation_checkpointing: true in accelerate's config file, or leave the offload out",
        )
    _check_sizes(environment)
    _say_what_is_idle(config, environment)


def _rules(config: Any, environment: Mapping[str, str]) -> Iterator[tuple[str, _Rule]]:
    """The variables that will be read, as far as that can be known."""
    yield from _ALWAYS.items()
    if environment.get("WORLD_SIZE", "1") != "1":  # alone nobody reads it: Kubernetes makes one for a service "master"
        yield "MASTER_PORT", _count(0)
    if "ACCELERATE_DYNAMO_BACKEND" in environment:
        from accelerate.utils import DynamoBackend

        yield "ACCELERATE_DYNAMO_BACKEND", _words(*(backend.value.lower() for backend in DynamoBackend))
    if config.fsdp or is_on(environment.get("ACCELERATE_USE_FSDP")):
        yield from ((f"FSDP_{name}", rule) for name, _, rule in _FSDP)
        first = environment.get("FSDP_VERSION", "1") == "1"
        yield "FSDP_RESHARD_AFTER_FORWARD", _either(_STRATEGY, _FLAG) if first else _FLAG
        yield "FSDP_SHARDING_STRATEGY", _STRATEGY
    if is_on(environment.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        yield from ((f"PARALLELISM_CONFIG_{name}", _count(1)) for name in _SIZES)
        yield "PARALLELISM_CONFIG_CP_BACKEND", _words("torch", any_case=False)
        yield "PARALLELISM_CONFIG_SP_BACKEND", _words("deepspeed", any_case=False)


def _either(one: _Rule, other: _Rule) -> _Rule:
    return lambda text: one[0](text) or other[0](text), one[1]


def _check_sizes(environment: Mapping[str, str]) -> None:
    """Told here, where no process waits for another one yet; accelerate counts them when the Trainer is made."""
    if not is_on(environment.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        return
    sizes = {name: int(environment.get(f"PARALLELISM_CONFIG_{name}", "1")) for name in _SIZES}
    product, world = math.prod(sizes.values()), int(environment.get("WORLD_SIZE", "1"))
    if product not in (1, world):
        said = " x ".join(f"{name.lower()} {size}" for name, size in sizes.items() if size > 1)
        raise ConfigurationError(
            f"the launcher's parallelism_config is for {product} processes, and there are {world}",
            evidence=(said,),
            mend=f"make the product of its sizes {world}, or start {product} processes",
        )


def _say_what_is_idle(config: Any, environment: Mapping[str, str]) -> None:
    if environment.get("LOCAL_RANK", "0") not in ("0", "-1"):
        return
    if not is_on(environment.get("ACCELERATE_USE_DEEPSPEED")):
        for name, setting in _IDLE.items():
            if name in environment:
                logger.warning("%s=%s does nothing: %s=%s of the job's own settings counts",
                               name, environment[name], setting, getattr(config, setting))  # fmt: skip
    # accelerate's simple launcher (1.15, utils/launch.py:161) names the place where processes meet, and starts one.
    on_cpu = is_on(environment.get("ACCELERATE_USE_CPU")) and "KMP_BLOCKTIME" in environment
    if on_cpu and "MASTER_PORT" in environment and not {"RANK", "WORLD_SIZE", "PMI_RANK"} & set(environment):
        logger.warning(
            "accelerate launch was asked for several processes and started this one alone: with --cpu (or distributed "
            "type MULTI_CPU) it starts others through MPI only. Two on this machine: accelerate launch --config_file "
            "accelerate_configs/cpu.yaml ... (hf-speedkit recipe writes that file)"
        )


def check_fsdp_config(config: Any) -> None:
    """Refuse keys of `fsdp_config` that there are not, and values that they cannot have.

    Args:
        config: a SpeedSFTConfig as its user gave it. Read here: `fsdp` and `fsdp_config`, which is a dict, JSON or the
            path of a JSON file.

    Raises:
        ConfigurationError: the key, and what it may be.
    """
    if not config.fsdp:
        return
    _check_strategies(config.fsdp)
    known = {key: rule for _, key, rule in _FSDP if key is not None}
    names = (*known, *_OTHER_KEYS)
    given = {
        str(key).removeprefix("fsdp_"): value
        for key, value in as_dict(config.fsdp_config, "fsdp_config", "{version: 2}").items()
    }
    for key, value in given.items():
        if key.startswith("xla"):
            continue
        if key not in names:
            meant = _THEIRS.get(key) or nearest(key, names)
            raise ConfigurationError(
                f"fsdp_config has no key {key}, and nothing would read it",
                mend=(f"did you mean {meant}? " if meant else "") + f"There are: {', '.join(sorted(names))}",
            )
        rule = known.get(key)
        # `cpu_offload: "false"` is on: transformers asks whether there is something.
        fits = isinstance(value, bool) if key == "cpu_offload" else rule is None or rule[0](str(value))
        if not fits and rule is not None:
            raise ConfigurationError(
                f"fsdp_config: {key}: {value!r} cannot be used", mend=f"{key} is {rule[1]}, without quotes"
            )
    first = str(given.get("version", 2)) == "1"
    reshard = given.get("reshard_after_forward", True)
    if not (_STRATEGY if first else _FLAG)[0](str(reshard)) and not (first and reshard is True):
        raise ConfigurationError(
            f"fsdp_config: reshard_after_forward: {reshard!r} cannot be used",
            mend=f"reshard_after_forward is {(_STRATEGY if first else _FLAG)[1]}",
        )
    idle = [] if first else [key for key in given if key in _OF_VERSION_1]
    if idle and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning("FSDP2 does not read these keys of fsdp_config, which do nothing: %s", ", ".join(idle))


def _check_strategies(fsdp: Any) -> None:
    """The older spelling, which transformers still takes: fsdp="full_shard auto_wrap"."""
    from transformers.trainer_utils import FSDPOption

    words = [word_of(option) for option in FSDPOption]
    for given in fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else ():
        if word_of(given).lower() not in words:
            near = nearest(word_of(given), words)
            raise ConfigurationError(
                f"fsdp={word_of(given)!r} is not a choice",
                mend="fsdp: true, with version, reshard_after_forward and cpu_offload in fsdp_config"
                + (f" (or fsdp: {near})" if near else ""),
            )
