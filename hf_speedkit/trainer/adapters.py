"""LoRA and QLoRA: the packages they need are there before anything is downloaded, and what is adapted. Light."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.hardware import is_on
from hf_speedkit.trainer.installed_versions import lacking, wanted

if TYPE_CHECKING:
    from trl import ModelConfig

_QUANTIZED = ("load_in_4bit", "load_in_8bit")


def require_adapters(settings: Mapping[str, object]) -> None:
    """Refuse a job whose adapters cannot be made on this machine, before its model is downloaded.

    Args:
        settings: the job's settings by their names in the YAML file. Read here: `use_peft`, `load_in_4bit`,
            `load_in_8bit`, `random_weights`, and whether `lora_...` settings stand alone.

    Raises:
        ConfigurationError: peft or bitsandbytes is missing or too old, quantized weights would be trained or drawn, or
            settings of adapters are there that nobody asks for.
    """
    quantized = [name for name in _QUANTIZED if is_on(settings.get(name))]
    adapted = is_on(settings.get("use_peft"))
    if quantized and not adapted:
        raise ConfigurationError(
            f"{quantized[0]} without use_peft: quantized weights are frozen, so nothing would be trained",
            mend=f"set use_peft: true (QLoRA), or leave {quantized[0]} out",
        )
    if quantized and is_on(settings.get("random_weights")):
        raise ConfigurationError(
            f"{quantized[0]} with random_weights: weights are quantized while a checkpoint is read",
            mend=f"set random_weights: false, or leave {quantized[0]} out",
        )
    lone = [name for name in settings if name.startswith("lora_")] if "use_peft" not in settings else []
    if lone:
        raise ConfigurationError(
            f"{', '.join(lone)} without use_peft: no adapter would be made, and every weight trained",
            mend="set use_peft: true",
            regardless="use_peft: false says that it is meant so",
        )
    if adapted:
        require_peft("use_peft is on")
    if quantized:
        without = f"{quantized[0]}: false trains the same adapters beside weights that are not quantized, if they fit"
        _require("bitsandbytes", f"{quantized[0]} is on", without)


def require_peft(asked: str) -> None:
    """Refuse adapters without peft, or with one that is too old.

    Args:
        asked: what asks for them, the beginning of a sentence.

    Raises:
        ConfigurationError: with the pip command.
    """
    _require("peft", asked)


def _require(package: str, asked: str, regardless: str | None = None) -> None:
    lacks = lacking(package)
    if lacks is not None:
        raise ConfigurationError(
            f"{asked}, and the package {package!r} {lacks}",
            mend=f"pip install {wanted(package)}",
            regardless=regardless,
        )


def require_targets(model_args: ModelConfig, config: Any) -> None:
    """Refuse adapters on layers that the model has not got: peft says so once the weights are there, or of some never.

    Args:
        model_args: TRL's. Read here: `use_peft`, `lora_target_modules`, `lora_r`, `lora_dropout`.
        config: of the model, as transformers loads it.

    Raises:
        ConfigurationError: the names, and those of the model's linear layers; a rank or a dropout that is none.
    """
    if not model_args.use_peft:
        return
    if model_args.lora_r < 1 or not 0 <= model_args.lora_dropout < 1:
        raise ConfigurationError(
            f"lora_r={model_args.lora_r} with lora_dropout={model_args.lora_dropout} makes no adapter",
            mend="lora_r is a whole number from 1 up (16), lora_dropout a number from 0 up and below 1 (0.05)",
        )
    targets = _targets(model_args.lora_target_modules)
    if not targets:
        return
    modules = _module_names(config)
    # Layers by number, and what is written as a pattern, may be beyond the few layers that are looked at.
    absent = [name for name in targets if re.fullmatch(r"[a-z_]\w*", name) and name not in modules]
    if modules and absent:
        raise ConfigurationError(
            f"lora_target_modules names {', '.join(absent)}, and the model has no such layer",
            evidence=(f"its linear layers: {', '.join(sorted(name for name, linear in modules.items() if linear))}",),
            mend="leave lora_target_modules out: all linear layers but the head are adapted",
        )


def _targets(given: list[str] | str | None) -> list[str]:
    """Names as a list. TRL 1.16 takes a list of one apart, and peft then reads the name as a pattern of whole paths."""
    if isinstance(given, str):
        return [given] if re.fullmatch(r"\w+", given) else []
    return list(given or ())


def _module_names(config: Any) -> dict[str, bool]:
    """Last parts of the model's module names, and whether they are linear layers; empty where none can be made."""
    import torch

    from hf_speedkit.kernels.skeleton import model_skeleton

    try:
        model = model_skeleton(config, device=torch.device("meta"), dtype=torch.bfloat16)
    except Exception:  # noqa: BLE001 (configs raise what they like; peft looks at the model itself)
        return {}
    head = {"lm_head": False}  # not where the text part alone was made
    return head | {name.rpartition(".")[2]: isinstance(m, torch.nn.Linear) for name, m in model.named_modules() if name}


def adapter_config(model_args: ModelConfig) -> Any:
    """Give TRL's adapter config of a job, on all linear layers but the head unless it names others; None without."""
    if not model_args.use_peft:
        return None
    from trl import get_peft_config

    config = get_peft_config(model_args)
    # peft knows default layers for some families only and raises for the rest, after the model has been loaded.
    if config.target_modules is None and config.target_parameters is None:
        config.target_modules = "all-linear"
    one = _targets(model_args.lora_target_modules)
    if isinstance(config.target_modules, str) and len(one) == 1:
        config.target_modules = set(one)
    return config


def below_adapters(model: Any) -> Any:
    """The transformers model itself, where peft has wrapped it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def complete_head(model: Any) -> None:
    """Give the output layer a bias of None where peft's wrapper for single tokens of tied embeddings has none at all.

    TRL's loss head (1.16) reads weight and bias of the output layer: its first forward pass would end in an
    AttributeError, although the wrapper's weight is the right one, new tokens included.

    Args:
        model: with adapters or without.
    """
    head = below_adapters(model).get_output_embeddings()
    wrapped = getattr(getattr(head, "token_adapter", None), "base_layer", None)
    if wrapped is not None and not hasattr(head, "bias") and getattr(wrapped, "bias", None) is None:
        head.bias = None
