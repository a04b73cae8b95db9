"""Fused forwards for layers, from Liger, fla and here: what they can stand in for, and how they are called.

Checked against liger-kernel 0.8.5 and fla 0.6.0 by their sources; each is compared with the layer's own forward on the
device before it is used (`fused_parity.py` and its likes): a changed package is not bound rather than wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_speedkit.kernels.fused_attention import QK_ROTARY, attention_forward, has_head_norms
from hf_speedkit.kernels.gated_delta_forward import is_gated_delta_net, split_forward
from hf_speedkit.kernels.lora_forward import LORA, adapted_forward, has_adapters

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]

RMS_NORM, GATED_NORM, SWIGLU, SPLIT_CONVOLUTION = "rms_norm", "gated_norm", "swiglu", "split_convolution"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One fused forward.

    Args:
        package: import name of the package it is from.
        make: imports it and gives a forward (module, inputs ...); raises what the import raises.
    """

    package: str
    make: Callable[[], Forward]


def part_of(module: nn.Module) -> str | None:
    """Which of the parts a layer is, by its structure; None for a layer that nothing here can stand in for."""
    try:
        return _part_of(module)
    except Exception as error:  # noqa: BLE001 (any model's own code: configs raise for what layers do not share)
        logger.debug("%s is left alone: it does not say what it is: %s", type(module).__name__, error)
        return None


def _part_of(module: nn.Module) -> str | None:
    name = type(module).__name__
    weight = module._parameters.get("weight")
    is_norm = weight is not None and weight.ndim == 1 and epsilon(module) is not None and not module._modules
    if name.endswith("RMSNorm") and is_norm:
        return RMS_NORM
    if name.endswith("RMSNormGated") and is_norm and getattr(module, "activation", "silu") in ("silu", "swish"):
        return GATED_NORM
    projections = {"gate_proj", "up_proj", "down_proj"}
    if name.endswith("MLP") and projections <= set(module._modules) <= projections | {"act_fn"}:
        is_silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        return SWIGLU if is_silu else None
    if has_adapters(module):
        return LORA
    if is_gated_delta_net(module):
        return SPLIT_CONVOLUTION
    return QK_ROTARY if has_head_norms(module) else None


def candidates(part: str, *, zero_centred: bool = False, layer: nn.Module | None = None) -> Sequence[Candidate]:
    """What can stand in, best first; of Liger's and fla's the norms and SwiGLU were not timed against one another.

    Args:
        part: what `part_of` says.
        zero_centred: whether a norm, or the norms of an attention layer, multiply by 1 + weight.
        layer: one of the layers, for `SPLIT_CONVOLUTION`: the forward is that of its class, put together anew.
    """
    if part == SPLIT_CONVOLUTION:
        return (Candidate(package="hf_speedkit", make=lambda: split_forward(layer)),)
    if part == QK_ROTARY:
        return (Candidate(package="hf_speedkit", make=lambda: attention_forward(one_plus=zero_centred)),)
    if part == LORA:
        return (Candidate(package="hf_speedkit", make=adapted_forward),)
    if part == RMS_NORM:
        return (
            Candidate(package="liger_kernel", make=lambda: _liger_rms_norm(zero_centred)),
            Candidate(package="fla", make=lambda: _fla_rms_norm(zero_centred)),
        )
    if part == GATED_NORM:
        return (Candidate(package="fla", make=_fla_gated_norm),)
    return (Candidate(package="liger_kernel", make=_liger_swiglu), Candidate(package="fla", make=_fla_swiglu))


def epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm, by either name that transformers gives it."""
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(value) if isinstance(value, (int, float)) else None


def _liger_rms_norm(zero_centred: bool) -> Forward:
    normalise = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction.apply

    # "gemma" multiplies in float32 and rounds once, "llama" rounds before it multiplies, as those models do.
    offset, casting = (1.0, "gemma") if zero_centred else (0.0, "llama")

    def forward(self: Any, hidden_states: Tensor) -> Any:
        # In place it would write into the incoming gradient, which a residual connection still needs.
        return normalise(hidden_states, self.weight, epsilon(self), offset, casting, False, None)

    return forward


def _fla_rms_norm(zero_centred: bool) -> Forward:
    from fla.modules.norm.layernorm import rms_norm

    def forward(self: Any, hidden_states: Tensor) -> Any:
        # In float32: 1 + weight would lose the last bits of a small weight in bfloat16.
        weight = 1.0 + self.weight.float() if zero_centred else self.weight
        return rms_norm(hidden_states, weight, None, eps=epsilon(self))

    return forward


def _fla_gated_norm() -> Forward:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    def forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Any:
        return rms_norm_gated(hidden_states, gate, self.weight, None, "swish", eps=epsilon(self))

    return forward


def _liger_swiglu() -> Forward:
    multiply = import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply

    def forward(self: Any, x: Tensor) -> Any:
        return self.down_proj(multiply(self.gate_proj(x), self.up_proj(x)))

    return forward


def _fla_swiglu() -> Forward:
    from fla.modules.activations import swiglu

    def forward(self: Any, x: Tensor) -> Any:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

    return forward
