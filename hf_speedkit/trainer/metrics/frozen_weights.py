"""What a full fine-tune with some frozen weights does not compute: their gradients, and backward before the first.

A product with a frozen weight has no gradient of it: two passes of three. Of layers before the first trained weight
nothing in backward is needed at all, unless the embedding's output asks for a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_SHARED = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeights:
    """Which products of a model have no gradient of their weight.

    Args:
        reach: the first layer that backward runs through.
        untrained_per_token: forward FLOPs of products with frozen weights from there on, a token.
    """

    reach: int
    untrained_per_token: float


def frozen_weights(
    model: Any, layers: Sequence[torch.nn.Module], products: Mapping[str, torch.nn.Parameter], ends: Collection[int]
) -> FrozenWeights | None:
    """What is saved in a model of which some layers' weights are frozen; None where that cannot be told.

    Args:
        model: without adapters.
        layers: its decoder layers, first layer first.
        products: the weights that text is multiplied with, by name.
        ends: ids of the weights of embedding and head.
    """
    config = model.config.get_text_config()
    if getattr(model, "peft_config", None) or config.num_hidden_layers != len(layers):
        return None
    place = {id(weight): index for index, layer in enumerate(layers) for weight in layer.parameters()}
    # A hook that makes the embedding's output ask for a gradient (transformers 5.23, `enable_input_require_grads`).
    asked = bool(getattr(model, "_require_grads_hooks", None) or getattr(model, "_require_grads_hook", None))
    before = asked or any(weight.requires_grad for weight in model.get_input_embeddings().parameters())
    trained = [place[id(w)] for w in model.parameters() if w.requires_grad and id(w) in place]
    if not before and not trained:
        return None  # the head alone, or nothing
    reach = 0 if before else min(trained)
    untrained = 0.0
    for name, weight in products.items():
        if weight.requires_grad or id(weight) in ends or place.get(id(weight), -1) < reach:
            continue
        share = _share_of_experts(config, weight) if "experts" in name.split(".") else 1.0
        if share is None or not weight.numel():  # DeepSpeed keeps nothing of a weight between its uses
            return None
        untrained += 2.0 * weight.numel() * share
    return FrozenWeights(reach=reach, untrained_per_token=untrained)


def _share_of_experts(config: Any, weight: torch.Tensor) -> float | None:
    """The share of all experts' weights that a token is multiplied with; None where they are no one tensor."""
    experts = next((getattr(config, name) for name in _SHARED if getattr(config, name, None)), None)
    if weight.dim() != 3 or experts is None or weight.shape[0] != experts:
        return None
    return float(config.num_experts_per_tok / experts)
