"""The layers of a model without its weights: what a probe needs of a model that is not there."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_VOCABULARY = 256


def model_skeleton(config: Any, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A model of as few layers as show every kind that the config has, at its real sizes, with random weights.

    The vocabulary is cut to 256 entries. For Qwen3.5-27B these are 4 of 64 layers.

    Args:
        config: of any causal language model that transformers can build; of a multimodal one the text part is taken.
        device, dtype: of the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    text = copy.deepcopy(config.get_text_config())
    layers = _layers_needed(text)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    text.vocab_size = _VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(text, dtype=dtype)
    return model.to(device).train()


def _layers_needed(text_config: Any) -> int:
    """How many layers from the first hold every kind of layer."""
    total = int(text_config.num_hidden_layers)
    kinds = getattr(text_config, "layer_types", None)
    if not kinds:
        return min(total, 1)
    return max(list(kinds).index(kind) for kind in set(kinds)) + 1
