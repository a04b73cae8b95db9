"""Attention's output times the sigmoid of its gate, in one read and one write each way.

The gate is read where the query projection wrote it; transformers copies it, and keeps its sigmoid for the backward.
On a device without the kernel (a CPU) the same maths runs in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gated(output: Tensor, gate: Tensor) -> Tensor:
    """Product of output and sigmoid(gate), computed in float32 and rounded once.

    Args:
        output, gate: [B, T, H, D] in any memory order.

    Returns:
        [B, T, H, D], contiguous, in output's dtype.
    """
    product: Tensor = _Gated.apply(output, gate)  # type: ignore[no-untyped-call]
    return product


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(output, gate)
        product = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        if output.device.type == "cuda":
            from hf_speedkit.kernels.output_gate_triton import multiply_by_sigmoid

            multiply_by_sigmoid(head_rows(output), head_rows(gate), head_rows(product))
        else:
            product.copy_(output.float() * gate.float().sigmoid())
        return product

    @staticmethod
    @once_differentiable  # a second derivative would be wrong in silence
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        output, gate = ctx.saved_tensors
        output_grad = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        gate_grad = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if output.device.type == "cuda":
            from hf_speedkit.kernels.output_gate_triton import multiply_by_sigmoid

            rows = (head_rows(output), head_rows(gate), head_rows(output_grad))
            multiply_by_sigmoid(*rows, grad=head_rows(grad), gate_grad=head_rows(gate_grad))
        else:
            factor = gate.float().sigmoid()
            output_grad.copy_(grad.float() * factor)
            gate_grad.copy_(grad.float() * output.float() * factor * (1.0 - factor))
        return output_grad, gate_grad


def head_rows(x: Tensor) -> Tensor:
    """[B, T, H, D] as [B * T, H, D]: a view where it can be one, with the last dimension together in memory."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, *x.shape[2:])
