"""A checkpoint whose weights are stored quantized (FP8, MXFP4, AWQ, GPTQ, bitsandbytes): whether it can be trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.kernels.imports import is_installed
from hf_speedkit.trainer.hardware import word_of

_IN_16_BITS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""Methods that transformers can load in 16 bits, and the config that asks for it."""
_NO_ADAPTERS = ("mxfp4", "nvfp4", "fbgemm_fp8")
"""Methods whose quantizer says `is_trainable` False (transformers 5.23)."""
_OWN_TRAINING = ("torchao", "compressed-tensors", "bitnet")
"""Methods that may train what they store (`is_qat_trainable`)."""


def refuse_stored_quantized(
    config: Any, *, adapted: bool, given: bool, capability: Callable[[], tuple[int, int] | None]
) -> None:
    """Refuse a checkpoint in 8 or 4 bits that transformers would load in full and then refuse to train.

    Model cards offer `Qwen3-8B-FP8` beside `Qwen3-8B`; with the first, Trainer raises behind the download and the
    loading (transformers issues 37927, 41516 and 46736).

    Args:
        config: the model's.
        adapted: adapters are trained, and the stored weights stay as they are.
        given: the job brings a quantization_config of its own.
        capability: gives the GPU's, asked for only where it counts; None for a CPU, where transformers loads FP8 and
            MXFP4 in 16 bits by itself.

    Raises:
        ConfigurationError: with the model, or the setting, that trains.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None or given:
        return
    told = stored if isinstance(stored, dict) else vars(stored)
    method = word_of(told.get("quant_method"))
    if told.get("dequantize") or (method in _IN_16_BITS and _is_loaded_in_16_bits(method, capability())):
        return
    if method in _OWN_TRAINING or (adapted and method not in _NO_ADAPTERS):
        return
    ways = ["name the model in 16 bits (without -FP8, -AWQ, -bnb-4bit ... in its name)"]
    if method in _IN_16_BITS:
        ways.append(f"quantization_config={_IN_16_BITS[method]}(dequantize=True)")
    if method not in _NO_ADAPTERS:
        ways.append("train adapters (peft_config; in a YAML file use_peft: true)")
    raise ConfigurationError(
        f"the checkpoint's weights are stored in {method}, and transformers trains no such weights"
        + (", nor adapters beside them" if adapted else ""),
        evidence=("quantization_config in its config.json",),
        mend=", or ".join(ways),
    )


def _is_loaded_in_16_bits(method: str, capability: tuple[int, int] | None) -> bool:
    """Whether transformers does so by itself (quantizer_finegrained_fp8.py:57, quantizer_mxfp4.py:101)."""
    if capability is None:
        return True
    return capability < (8, 9) if method == "fp8" else not is_installed("kernels")
