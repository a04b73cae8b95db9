"""GatedDeltaNet as transformers ran it without kernels before 5.23, row by row: for the rung `seed` only.

A published trace of such a run shows 20 batched products per 64-token chunk and 8 per layer, with recompute (its
31,105 = 48 layers x (20 x 32 + 8) + 1). That is this order of work: the triangular system of a chunk is solved by one
row after the other, each reading slices of the rows above it, and each chunk then does five products: scores inside the
chunk, what the old state says of the new values, what it says of the output, the output inside the chunk, the new
state. Transformers 5.23 solves the system in one call and makes the scores of all chunks together.

Written from the mathematics (Gated Delta Networks, arXiv 2412.06464, section 3.3) and from those counts;
tests/benchmarks/test_seed_fallback.py compares it with today's fallback and with the counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = CHUNK,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_ignored: object,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule with the old order of work; arguments and shapes are those of transformers 5.23's fallback.

    Raises:
        ValueError: packed documents (`cu_seqlens`), which it cannot keep apart.
    """
    if _ignored.get("cu_seqlens") is not None:
        raise ValueError("the seed's fallback knows no documents: pad instead of packing")
    slots, given = query.shape[1], query.dtype
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    groups = value.shape[2] // key.shape[2]
    if groups > 1:
        query, key = query.repeat_interleave(groups, dim=2), key.repeat_interleave(groups, dim=2)
    # [B, H, T, ...] in fp32, filled up to whole chunks.
    query, key, value, beta, g = (x.transpose(1, 2).contiguous().float() for x in (query, key, value, beta, g))
    short = -slots % chunk_size
    query, key, value = (functional.pad(x, (0, 0, 0, short)) for x in (query, key, value))
    beta, g = functional.pad(beta, (0, short)), functional.pad(g, (0, short))
    query = query * query.shape[-1] ** -0.5
    weighted_key, weighted_value = key * beta.unsqueeze(-1), value * beta.unsqueeze(-1)
    query, key, weighted_key, weighted_value = (
        x.unflatten(2, (-1, chunk_size)) for x in (query, key, weighted_key, weighted_value)
    )
    decay = g.unflatten(2, (-1, chunk_size)).cumsum(-1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).tril().exp().tril()
    inverse = _inverse_row_by_row(weighted_key, key, between)
    new = inverse @ weighted_value
    from_state = inverse @ (weighted_key * decay.exp().unsqueeze(-1))
    state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    if initial_state is not None:
        state = initial_state.to(state)
    out = torch.zeros_like(new)
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device).triu(1)
    for at in range(query.shape[2]):
        q, k, d = query[:, :, at], key[:, :, at], decay[:, :, at]
        scores = ((q @ k.transpose(-1, -2)) * between[:, :, at]).masked_fill(later, 0)
        written = new[:, :, at] - from_state[:, :, at] @ state
        out[:, :, at] = (q * d.exp().unsqueeze(-1)) @ state + scores @ written
        kept = (k * (d[..., -1:] - d).exp().unsqueeze(-1)).transpose(-1, -2)
        state = state * d[..., -1, None, None].exp() + kept @ written
    out = out.flatten(2, 3)[:, :, :slots].transpose(1, 2).contiguous().to(given)
    return out, state if output_final_state else None


def _inverse_row_by_row(weighted_key: Tensor, key: Tensor, between: Tensor) -> Tensor:
    """[..., C, C]: the inverse of the unit lower triangular system of each chunk, by forward substitution."""
    size = key.shape[-2]
    not_below = torch.ones(size, size, dtype=torch.bool, device=key.device).triu()
    rows = -((weighted_key @ key.transpose(-1, -2)) * between).masked_fill(not_below, 0)
    for at in range(1, size):
        row, above = rows[..., at, :at].clone(), rows[..., :at, :at].clone()
        rows[..., at, :at] = row + (row.unsqueeze(-1) * above).sum(-2)
    return rows + torch.eye(size, dtype=rows.dtype, device=rows.device)


@contextmanager
def bound() -> Iterator[None]:
    """Let Qwen3.5's layers run this instead of today's fallback: they look the global up at every call."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    today = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = today
