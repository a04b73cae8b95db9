"""LoRA and QLoRA: the packages they need are there before anything is downloaded, and what is adapted. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.kernels.imports import is_installed
from hf_speedkit.trainer.hardware import is_on

if TYPE_CHECKING:
    from trl import ModelConfig

_QUANTIZED = ("load_in_4bit", "load_in_8bit")


def require_adapters(settings: Mapping[str, object]) -> None:
    """Refuse a job whose adapters cannot be made on this machine, before its model is downloaded.

    Args:
        settings: the job's settings by their names in the YAML file. Read here: `use_peft`, `load_in_4bit`,
            `load_in_8bit`, `random_weights`.

    Raises:
        ConfigurationError: peft or bitsandbytes is missing, or quantized weights would be trained or drawn.
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
    if adapted and not is_installed("peft"):
        raise ConfigurationError("use_peft is on, and the package 'peft' is not installed", mend="pip install peft")
    if quantized and not is_installed("bitsandbytes"):
        raise ConfigurationError(
            f"{quantized[0]} is on, and the package 'bitsandbytes' is not installed",
            mend="pip install bitsandbytes",
            regardless=f"{quantized[0]}: false trains the same adapters beside weights that are not quantized, if "
            "they fit",
        )


def adapter_config(model_args: ModelConfig) -> Any:
    """Give TRL's adapter config of a job, on all linear layers but the head unless it names others; None without."""
    if not model_args.use_peft:
        return None
    from trl import get_peft_config

    config = get_peft_config(model_args)
    # peft knows default layers for some families only and raises for the rest, after the model has been loaded.
    if config.target_modules is None and config.target_parameters is None:
        config.target_modules = "all-linear"
    return config


def below_adapters(model: Any) -> Any:
    """The transformers model itself, where peft has wrapped it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
