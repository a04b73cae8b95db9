"""What fused kernels keep for backward and hold while they run, as functions of shapes: nothing is computed.

A trace of memory on a CPU runs the model's own code with these in the place of the kernels, so that it counts what the
kernels save and not what the torch reference would (the reference of GatedDeltaNet keeps a state per chunk and more).
Each was read off the named lines of fla 0.6.0, causal-conv1d 1.7.0, liger-kernel 0.8.5 and torch 2.13; a `del` stands
where the original lets go of a tensor. `tests/kernels/test_memory_trace.py` holds the sums, the gpu test the truth.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64
"""Slots of a chunk of fla's gated delta rule."""


class GatedDeltaRule(torch.autograd.Function):
    """fla.ops.gated_delta_rule.chunk.ChunkGatedDeltaRuleFunction (chunk.py:240-381), q, k normalised in the kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: int) -> Tensor:
        """q, k [1, T, H, K]; v [1, T, HV, V]; g, beta [1, T, HV]; `chunks` in all documents together."""
        q, k, v, g, beta = (tensor.contiguous() for tensor in (q, k, v, g, beta))  # @input_guard
        slots, heads = q.shape[1:3]
        value_heads = v.shape[2]
        normal_q, normal_k = torch.empty_like(q), torch.empty_like(k)
        q_scale, k_scale = (q.new_empty(1, slots, heads, dtype=torch.float32) for _ in range(2))
        g = torch.empty_like(g, dtype=torch.float32)  # chunk_local_cumsum
        inverse = k.new_empty(1, slots, value_heads, CHUNK)  # A, chunk_fwd.py:385
        transient = _states(k, v, chunks)
        out = torch.empty_like(v)
        del transient
        ctx.save_for_backward(normal_q, q_scale, normal_k, k_scale, v, g, beta, inverse)  # chunk.py:310
        ctx.chunks = chunks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Allocates as chunk.py:111-229 does."""
        grad = grad.contiguous()
        q, _, k, _, v, g, beta, _ = ctx.saved_tensors
        w, u, states, new_values = _states(k, v, ctx.chunks)
        local = torch.empty_like(grad)  # chunk_bwd_dv_local
        state_grads, du = torch.empty_like(states), torch.empty_like(local)  # chunk_delta_h.py:792-796
        del local
        wide = (*q.shape[:2], v.shape[2], q.shape[3])  # chunk_o.py:753: per value head, summed afterwards
        dq, dk, dw = q.new_empty(wide), k.new_empty(wide), torch.empty_like(w)
        dg = torch.empty_like(g)
        dq, dk = _per_key_head(dq, q), _per_key_head(dk, k)
        dk_second, dv, dbeta = k.new_empty(wide), torch.empty_like(v), torch.empty_like(beta)  # wy_fast.py:318-321
        dk_second = _per_key_head(dk_second, k)
        del u, states, new_values, state_grads, du, dw, w, dk_second
        return torch.empty_like(dq), torch.empty_like(dk), dv, dg, dbeta, None  # l2norm_bwd


def _states(k: Tensor, v: Tensor, chunks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w, u, the state of every chunk, and the new values (wy_fast.py:273-274, chunk_delta_h.py:719-725)."""
    w = k.new_empty(*k.shape[:2], v.shape[2], k.shape[3])
    u = torch.empty_like(v)
    states = k.new_empty(1, chunks, v.shape[2], k.shape[3], v.shape[3])
    return w, u, states, torch.empty_like(u)


def _per_key_head(grad: Tensor, like: Tensor) -> Tensor:
    heads = like.shape[2]
    return grad if grad.shape[2] == heads else grad.view(*like.shape[:3], -1, like.shape[3]).sum(3)


class Convolution(torch.autograd.Function):
    """causal_conv1d.CausalConv1dFn (causal_conv1d_interface.py:56): its input alone; fla's saves the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """X [1, channels, T], channels last in memory; weight [channels, width]."""
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of input and weight, the latter fp32 in the kernel."""
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class RmsNorm(torch.autograd.Function):
    """liger_kernel LigerRMSNormFunction (rms_norm.py:674): its input and one fp32 factor a row; fla's too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """X [..., H], weight [H]."""
        x = x.contiguous()
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Not in place: a gradient of the input's size."""
        grad = grad.contiguous()
        return torch.empty_like(grad), torch.empty_like(ctx.saved_tensors[1])


class GatedNorm(torch.autograd.Function):
    """fla LayerNormGatedFunction (fused_norm_gate.py:667): input, gate, one fp32 factor a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """x, gate [..., V], weight [V]."""
        x, gate = x.contiguous(), gate.contiguous()
        ctx.save_for_backward(x, gate, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of input and gate (fused_norm_gate.py:554-555)."""
        x, gate, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(gate), torch.empty_like(weight)


class SiluMultiply(torch.autograd.Function):
    """liger_kernel LigerSiLUMulFunction (swiglu.py:272): both inputs, overwritten by their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., F]."""
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Allocates nothing."""
        gate, up = ctx.saved_tensors
        return gate, up


class NormAndRotate(torch.autograd.Function):
    """Our qk_rotary: both projections, the gate's half included, and one fp32 factor a head."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor) -> Any:
        """Queries [B, T, H, D or 2 D], keys [B, T, H_kv, D], weights [D]."""
        head_dim = q_weight.shape[0]
        factors = [x.new_empty(x.shape[0] * x.shape[1], x.shape[2], dtype=torch.float32) for x in (queries, keys)]
        ctx.save_for_backward(queries, keys, q_weight, k_weight, *factors)
        gate = queries[..., head_dim:] if queries.shape[-1] > head_dim else None
        return queries.new_empty(*queries.shape[:3], head_dim), torch.empty_like(keys), gate

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients in the projections' own shapes."""
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:4])


class OutputGate(torch.autograd.Function):
    """Our output_gate: attention's output, which attention keeps too, and the gate, a view of the projection."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gate: Tensor) -> Tensor:
        """Both [B, T, H, D]."""
        ctx.save_for_backward(output, gate)
        return torch.empty_like(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of both."""
        return torch.empty_like(grad), torch.empty_like(grad)


class VarlenAttention(torch.autograd.Function):
    """torch.nn.attention.varlen (varlen.py:474): query, key, value, output, one fp32 number a head and slot."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query [T, H, D]; key [T, H_kv, D]; value [T, H_kv, V], V mostly D."""
        out = query.new_empty(*query.shape[:2], value.shape[2])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """FlashAttention 2 sums dq in fp32 and, with shared heads, makes dk and dv for every query head first."""
        query, key, value, _, _ = ctx.saved_tensors
        held = [query.new_empty(query.shape, dtype=torch.float32)]
        if key.shape[1] != query.shape[1]:
            held += [query.new_empty(query.shape) for _ in range(2)]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del held
        return grads


class FourBitLinear(torch.autograd.Function):
    """bitsandbytes' MatMul4Bit: the weight is unpacked to the input's precision in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outputs: int, inputs: int) -> Tensor:
        """X [..., inputs] -> [..., outputs]; nothing is saved, the weight is packed elsewhere."""
        ctx.sizes = (outputs, inputs)
        unpacked = x.new_empty(outputs, inputs)
        out = x.new_empty(*x.shape[:-1], outputs)
        del unpacked
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient of the input only."""
        unpacked = grad.new_empty(ctx.sizes)
        out = grad.new_empty(*grad.shape[:-1], ctx.sizes[1])
        del unpacked
        return out, None, None
