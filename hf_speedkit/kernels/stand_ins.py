"""Puts the shape-only functions of `saved_tensors.py` where a model calls kernels, for the time of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

ATTENTION = "speedkit_sizes"
"""Name of the attention that allocates and saves what torch's variable-length kernel does, and computes nothing."""

DOCUMENT_SLOTS = 1024
"""Length of the documents in a traced row: only the count of chunks depends on it (every document's last is short)."""


def documents_of(slots: int) -> int:
    """Documents in a traced row."""
    return -(-slots // DOCUMENT_SLOTS)


def register_attention() -> str:
    """Make the shape-only attention known to transformers; returns its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)
    return ATTENTION


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    from hf_speedkit.kernels.saved_tensors import VarlenAttention

    queries, keys, values = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    output = _apply(VarlenAttention, queries.to(values.dtype), keys.to(values.dtype), values)
    return output.unsqueeze(0), None


@contextmanager
def stand_ins(model: nn.Module, *, fused: bool) -> Iterator[None]:
    """Put the shape-only functions where kernels are called, for the time of the context."""
    from hf_speedkit.kernels.layout import live_layers

    placed: list[tuple[dict[str, object], str, object]] = []
    try:
        for layer in live_layers(model):
            for function in layer.functions:
                replacement = _FUNCTIONS.get(function.function)
                if replacement is not None and layer.namespace[function.global_name] is not replacement:
                    placed.append((layer.namespace, function.global_name, layer.namespace[function.global_name]))
                    layer.namespace[function.global_name] = replacement
        if fused:
            _fuse(model)
        yield
    finally:
        for namespace, name, original in reversed(placed):
            namespace[name] = original


def _apply(function: Any, *inputs: Any) -> Any:
    return function.apply(*inputs)


def _delta_rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **_: Any) -> tuple[Any, None]:
    from hf_speedkit.kernels.saved_tensors import CHUNK, GatedDeltaRule

    slots = value.shape[1]
    chunks = -(-slots // CHUNK) + documents_of(slots)
    return _apply(GatedDeltaRule, query, key, value, g, beta, chunks), None


def _convolution(x: Any, weight: Any, *_: Any, **__: Any) -> Any:
    from hf_speedkit.kernels.saved_tensors import Convolution

    return _apply(Convolution, x, weight)


def _norm_and_rotate(queries: Any, keys: Any, norms: Any, *_: Any) -> tuple[Any, Any, Any]:
    from hf_speedkit.kernels.saved_tensors import NormAndRotate

    turned_q, turned_k, gate = _apply(NormAndRotate, queries, keys, norms.query_weight, norms.key_weight)
    return turned_q.transpose(1, 2), turned_k.transpose(1, 2), gate


_FUNCTIONS: Mapping[str, Any] = {"chunk_gated_delta_rule": _delta_rule, "causal_conv1d_fn": _convolution}


def _fuse(model: nn.Module) -> None:
    from hf_speedkit.kernels.fused_attention import QK_ROTARY, attention_forward
    from hf_speedkit.kernels.fused_forwards import GATED_NORM, RMS_NORM, SWIGLU, part_of
    from hf_speedkit.kernels.saved_tensors import GatedNorm, OutputGate, RmsNorm, SiluMultiply

    forwards: Mapping[str, Any] = {
        RMS_NORM: lambda self, x: _apply(RmsNorm, x, self.weight),
        GATED_NORM: lambda self, x, gate: _apply(GatedNorm, x, gate, self.weight),
        SWIGLU: lambda self, x: self.down_proj(_apply(SiluMultiply, self.gate_proj(x), self.up_proj(x))),
        QK_ROTARY: attention_forward(
            one_plus=False,
            norm_and_rotate=_norm_and_rotate,
            gated=lambda output, gate: _apply(OutputGate, output, gate),
        ),
    }
    for module in model.modules():
        forward = forwards.get(part_of(module) or "")
        if forward is not None:
            module.forward = MethodType(forward, module)
