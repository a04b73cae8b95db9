"""The layers of a model without its weights: what a probe needs of a model that is not there."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.records import KernelCheck
from hf_speedkit.kernels.compatibility import Stack

if TYPE_CHECKING:
    import torch
    from torch import nn

_VOCABULARY = 256


def model_skeleton(config: Any, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A model of as few layers as show every kind that the config has, at its real sizes, with random weights.

    The vocabulary is cut to 256 entries. For Qwen3.5-27B these are 4 of 64 layers.

    Args:
        config: of any language model that transformers can build; of a multimodal one the text part is taken.
        device, dtype: of the weights.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    text = copy.deepcopy(config.get_text_config())
    layers = _layers_needed(text)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    text.vocab_size = _VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, 0)  # in the small vocabulary; some configs take no None
    # The text part of some vision-language models is no causal language model by itself: its layers are what counts.
    builder = AutoModelForCausalLM if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    with torch.device(device):
        model: nn.Module = builder.from_config(text, dtype=dtype)
    return model.to(device).train()


def _layers_needed(text_config: Any) -> int:
    """How many layers from the first hold every kind of layer."""
    total = int(text_config.num_hidden_layers)
    # Some write down the first layer with experts, others what each MLP is.
    needed = 1 + int(getattr(text_config, "first_k_dense_replace", None) or 0)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(getattr(text_config, name, None) or [])
        needed = max([needed, *(kinds.index(kind) + 1 for kind in set(kinds))])
    return min(total, needed)


def probe_config(
    config: Any, *, device: torch.device, dtype: torch.dtype, tokens_per_batch: int, stack: Stack | None = None
) -> tuple[tuple[KernelCheck, ...], tuple[str, ...]]:
    """Prove the kernels of a model that is not there: on a skeleton, with what SpeedSFTTrainer would put in place.

    Compiles and tunes what step 1 needs, so it is also what fills the caches of a node. The job's random state and the
    device's memory are afterwards as they were.

    Args:
        config: see `model_skeleton`.
        device: a GPU; on a CPU only the packed attention has anything to run.
        dtype: of weights and activations.
        tokens_per_batch: slots of training's row.
        stack: device and versions; read from this machine if None.

    Returns:
        (one check per function, what was put in place in words).
    """
    import gc

    import torch

    from hf_speedkit.kernels.attention import attention_flags, register, unsupported_reason
    from hf_speedkit.kernels.fused_layers import fused_layers
    from hf_speedkit.kernels.inspection import check_kernels

    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        model: Any = model_skeleton(config, device=device, dtype=dtype)
        flash, settable = attention_flags(model)
        reason = unsupported_reason(model.config, dtype=dtype, device=device, flash=flash, settable=settable)
        if reason is None:
            model.set_attn_implementation(register())
        with fused_layers(model, dtype=dtype, tokens_per_batch=tokens_per_batch) as changed:
            checks = check_kernels(model, probe=True, tokens_per_batch=tokens_per_batch, dtype=dtype, stack=stack)
        del model
    if on_gpu and not any("CUDA error" in (check.reason or "") for check in checks):  # it would raise the same again
        gc.collect()
        torch.cuda.empty_cache()
    return checks, changed
