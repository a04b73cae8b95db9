"""Norms of queries and keys and their rotary positions in one read and one write, each way.

transformers takes queries out of a projection whose rows are [query | gate], so that a norm copies them first; it turns
a head by cutting it, joining it and joining it again, and its backward pass fills zeros for every cut. On a 27B that is
some 60 of the 3,098 ms of a step (benchmarks/NOTES.md). Here the projection is read as it lies, what attention gets is
written in the order [slots, heads] that it wants, and the gradient is written where the projection's lies.

On a device without the kernels (a CPU) the same maths runs in torch, which is what the tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_speedkit.kernels.output_gate import head_rows

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """The two norms of an attention layer.

    Args:
        query_weight, key_weight: [D].
        query_eps, key_eps: their epsilons.
        one_plus: whether they multiply by 1 + weight and round once, or round, then multiply by weight.
    """

    query_weight: Tensor
    key_weight: Tensor
    query_eps: float
    key_eps: float
    one_plus: bool


def norm_and_rotate(
    queries: Tensor, keys: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Normalise each head and rotate its first R columns by its slot's position.

    Args:
        queries: [B, T, H, D] as projected, or [B, T, H, 2 D] whose rows are [query | gate].
        keys: [B, T, H_kv, D] as projected, of the same dtype.
        norms: weights and settings.
        cos, sin: [B or 1, T, R], R even and at most D; columns i and i + R / 2 turn together. Without a gradient.

    Returns:
        (queries [B, H, T, D], keys [B, H_kv, T, D], the gate [B, T, H, D] or None). Both lie as [B, T, heads, D] in
        memory; the gate is a view of `queries`. Norms are computed in float32 and rounded where the model rounds;
        rotations are rounded once, where the model rounds three times.
    """
    settings = (norms.query_eps, norms.key_eps, norms.one_plus)
    turned_q, turned_k, gate = _NormAndRotate.apply(  # type: ignore[no-untyped-call]
        queries, keys, norms.query_weight, norms.key_weight, cos, sin, settings
    )
    return turned_q.transpose(1, 2), turned_k.transpose(1, 2), gate


class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
        settings: tuple[float, float, bool],
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        batch, slots = queries.shape[:2]
        head_dim = q_weight.shape[0]
        weights = (q_weight, k_weight)
        flat = (head_rows(queries), head_rows(keys))
        cos, sin = (table.expand(batch, slots, -1).reshape(batch * slots, -1).contiguous() for table in (cos, sin))
        normed_dtype = queries.dtype if settings[2] else torch.promote_types(q_weight.dtype, queries.dtype)
        dtype = torch.promote_types(normed_dtype, cos.dtype)
        out = tuple(queries.new_empty((*x.shape[:3], head_dim), dtype=dtype) for x in (queries, keys))
        rstd = tuple(queries.new_empty(x.shape[:2], dtype=torch.float32) for x in flat)
        run = _norm_and_rotate_kernel if queries.device.type == "cuda" else _norm_and_rotate_in_torch
        run(flat, weights, (cos, sin), tuple(map(head_rows, out)), rstd, settings, normed_dtype)
        # The projections' own memory, not a copy; the gate's half of it serves the gate too.
        ctx.save_for_backward(queries, keys, q_weight, k_weight, cos, sin, *rstd)
        ctx.one_plus = settings[2]
        return out[0], out[1], queries[..., head_dim:] if queries.shape[-1] > head_dim else None

    @staticmethod
    @once_differentiable  # a second derivative would be wrong in silence
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor, gate_grad: Tensor | None) -> Any:
        queries, keys, q_weight, k_weight, cos, sin, *rstd = ctx.saved_tensors
        weights = (q_weight, k_weight)
        gated = queries.shape[-1] > q_weight.shape[0]
        out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (queries, keys))
        q_out, k_out = out
        run = _gradients_kernel if queries.device.type == "cuda" else _gradients_in_torch
        sums = run(
            (head_rows(q_grad), head_rows(k_grad)),
            head_rows(gate_grad) if gated and gate_grad is not None else None,
            (head_rows(queries), head_rows(keys)),
            weights,
            (cos, sin),
            tuple(rstd),
            (head_rows(q_out), head_rows(k_out)),
            ctx.one_plus,
        )
        weight_grads = (total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True))
        return (q_out, k_out, *weight_grads, None, None, None)


def _norm_and_rotate_kernel(
    x: Pair, weights: Pair, tables: Pair, out: Any, rstd: Any, settings: tuple[float, float, bool], normed: torch.dtype
) -> None:
    from hf_speedkit.kernels import qk_rotary_triton

    qk_rotary_triton.norm_and_rotate(
        *x, weights, *tables, out, rstd, eps=settings[:2], one_plus=settings[2], normed_dtype=normed
    )


def _gradients_kernel(
    grads: Pair, gate_grad: Tensor | None, x: Pair, weights: Pair, tables: Pair, rstd: Any, out: Pair, one_plus: bool
) -> Pair:
    from hf_speedkit.kernels import qk_rotary_triton

    return qk_rotary_triton.gradients(grads, x, gate_grad, weights, *tables, rstd, out, one_plus=one_plus)


def _norm_and_rotate_in_torch(
    x: Pair, weights: Pair, tables: Pair, out: Any, rstd: Any, settings: tuple[float, float, bool], normed: torch.dtype
) -> None:
    cos, sin = (table[:, None].float() for table in tables)
    for rows, weight, eps, turned, factor in zip(x, weights, settings[:2], out, rstd, strict=True):
        head_dim, dtype = weight.shape[0], rows.dtype
        values = rows[..., :head_dim].float()
        factor.copy_(torch.rsqrt(values.square().mean(-1) + eps))
        values = values * factor[..., None]
        values = values * (1.0 + weight.float()) if settings[2] else values.to(dtype).float() * weight.float()
        turned.copy_(_rotated(values.to(normed).float(), cos, sin))


def _gradients_in_torch(
    grads: Pair, gate_grad: Tensor | None, x: Pair, weights: Pair, tables: Pair, rstd: Any, out: Pair, one_plus: bool
) -> Pair:
    cos, sin = (table[:, None].float() for table in tables)
    sums = []
    for grad, rows, weight, factor, into in zip(grads, x, weights, rstd, out, strict=True):
        head_dim = weight.shape[0]
        # The transpose of a rotation: the partner's sine, with the sign turned round.
        turned = _rotated(grad.float(), cos, -sin.roll(sin.shape[-1] // 2, dims=-1))
        normal = rows[..., :head_dim].float() * factor[..., None]
        sums.append((turned * normal).sum((0, 1)))
        scaled = turned * (weight.float() + one_plus)
        mean = (scaled * normal).mean(-1, keepdim=True)
        into[..., :head_dim] = factor[..., None] * (scaled - normal * mean)
    if gate_grad is not None:
        out[0][..., weights[0].shape[0] :] = gate_grad
    return sums[0], sums[1]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turns, half = x[..., : cos.shape[-1]], cos.shape[-1] // 2
    partner = torch.cat((-turns[..., half:], turns[..., :half]), dim=-1)
    return torch.cat((turns * cos + partner * sin, x[..., cos.shape[-1] :]), dim=-1)
