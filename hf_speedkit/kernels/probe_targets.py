"""What the probe runs for one check: the object that the layer calls, and inputs of the layer's own sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_speedkit.core.records import KernelCheck
from hf_speedkit.kernels.layout import config_of, effective_forward, names_used
from hf_speedkit.kernels.probe_inputs import Example, attention_example, convolution_example, delta_rule_example

_RULE_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
_TORCH_ITSELF = ("sdpa", "eager", "flex_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One function to probe.

    Args:
        called: what the layer calls.
        make_example: (document lengths, seed) -> inputs of one packed row.
        device, dtype: where and in what it runs.
    """

    called: Callable[..., Any]
    make_example: Callable[[tuple[int, ...], int], Example]
    device: torch.device
    dtype: torch.dtype


def function_target(
    function: str, called: Callable[..., Any], module: nn.Module, dtype: torch.dtype | None, slots: int | None
) -> Target | None:
    """What to run for a function of a layer, or None without a reference or where the layer does not say its sizes."""
    parameter = next(module.parameters(), None)
    if parameter is None:
        return None
    device, kind = parameter.device, dtype or parameter.dtype
    slots = _row_slots(device, slots)
    convolution = next((child for child in module.children() if isinstance(child, nn.Conv1d)), None)
    if function == "causal_conv1d_fn" and convolution is not None:
        channels, width = convolution.weight.shape[0], convolution.weight.shape[-1]
        activation = getattr(module, "activation", None)
        # Autocast leaves the weight as it is; FSDP2, whose weights have a mesh, hands it over in its own dtype.
        weight_dtype = kind if hasattr(convolution.weight, "device_mesh") else convolution.weight.dtype

        def convolve(lengths: tuple[int, ...], seed: int) -> Example:
            return convolution_example(
                lengths,
                channels=channels,
                width=width,
                bias=convolution.bias is not None,
                activation=activation,
                device=device,
                dtype=kind,
                seed=seed,
                slots=slots,
                weight_dtype=weight_dtype,
            )

        return Target(called=called, make_example=convolve, device=device, dtype=kind)
    sizes = [size for name in _RULE_SIZES if isinstance(size := getattr(module, name, None), int)]
    if function != "chunk_gated_delta_rule" or len(sizes) != len(_RULE_SIZES):
        return None

    def rule(lengths: tuple[int, ...], seed: int) -> Example:
        return delta_rule_example(lengths, sizes=sizes, device=device, dtype=kind, seed=seed, slots=slots)

    return Target(called=called, make_example=rule, device=device, dtype=kind)


def attention_target(
    check: KernelCheck, model: nn.Module, dtype: torch.dtype | None, slots: int | None
) -> Target | None:
    """What to run for an attention check; None for torch's own, and for layers whose sizes are not known."""
    from transformers import AttentionInterface

    layer = next((module for module in model.modules() if _is_attention(module, check.layer)), None)
    implementation = getattr(getattr(layer, "config", None), "_attn_implementation", None)
    called = AttentionInterface().get(implementation) if implementation not in (None, *_TORCH_ITSELF) else None
    parameter = next(layer.parameters(), None) if layer is not None else None
    sizes = _attention_sizes(layer)
    if layer is None or called is None or parameter is None or sizes is None:
        return None
    device, kind = parameter.device, dtype or parameter.dtype
    slots = _row_slots(device, slots)
    settings = {"scaling": getattr(layer, "scaling", None), "sliding_window": getattr(layer, "sliding_window", None)}

    def attend(lengths: tuple[int, ...], seed: int) -> Example:
        return attention_example(
            lengths, module=layer, sizes=sizes, settings=settings, device=device, dtype=kind, seed=seed, slots=slots
        )

    return Target(called=called, make_example=attend, device=device, dtype=kind)


def _row_slots(device: torch.device, slots: int | None) -> int | None:
    # On a CPU nothing is compiled, and a row as long as training's would only take time.
    return slots if device.type == "cuda" else None


def _is_attention(module: nn.Module, kind: str) -> bool:
    forward = effective_forward(module)
    if type(module).__name__ != kind or forward is None:
        return False
    return "ALL_ATTENTION_FUNCTIONS" in names_used(forward, type(module))


def _attention_sizes(layer: Any) -> tuple[int, int, int] | None:
    config = config_of(layer)
    heads, key_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    size = getattr(layer, "head_dim", None)
    if not isinstance(heads, int) or not isinstance(key_heads, int) or not isinstance(size, int):
        return None
    return heads, key_heads, size
