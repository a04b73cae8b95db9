"""Boundary-aware torch implementations of the functions that hybrid layers call: the CPU path and the oracle.

Documents in a packed row are kept apart by masks that do not depend on the values in the row, so nothing here waits
for a device, and the contribution of one document to another is a product with an exact zero, forward and backward.
Half precision is computed in float32, under autocast too; float32 and float64 stay what they are.

Source of the mathematics: Gated Delta Networks, https://arxiv.org/abs/2412.06464 (recurrence: equation 10), and the
chunked form of the delta rule, https://arxiv.org/abs/2406.06484.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from hf_speedkit.kernels.full_precision import without_autocast

CHUNK_SLOTS = 32
"""Positions solved together. Of 16, 32, 64, 128 none took less CPU time (heads of 32, 64, 128; 1,024 positions)."""

_L2_NORM_EPSILON = 1e-6


@without_autocast
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    **_ignored: object,
) -> Tensor:
    """Depthwise causal convolution over the last dimension that does not look across document boundaries.

    Args:
        x: [B, C, T].
        weight: [C, W]; the last tap weighs the current position.
        bias: [C].
        activation: None, "silu" or "swish".
        seq_idx: [B, T], the number of the document that each position belongs to; None for one document per row.
        _ignored: whatever else the layer hands on (`cu_seq_lens_q`, `max_length_q`, ...).

    Returns:
        [B, C, T] in the dtype of `x`.

    Raises:
        ValueError: `seq_idx` does not fit `x`, or the activation is another one.

    Source: argument names and meaning of causal-conv1d 1.7, https://github.com/Dao-AILab/causal-conv1d.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation {activation!r} is not supported: use None, 'silu' or 'swish'")
    if seq_idx is not None and seq_idx.shape != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"seq_idx is {tuple(seq_idx.shape)} but x is {tuple(x.shape)}: it must be [B, T] of the same row. With a "
            f"cache the row grows; call the model with use_cache=False when it trains on packed rows"
        )
    dtype = _working_dtype(x)
    # [B, T, C]: the layers hand in a transposed view, so this is the layout in memory.
    rows, taps = x.transpose(1, 2).to(dtype), weight.to(dtype)
    slots, width = rows.shape[1], taps.shape[1]
    out = rows * taps[:, -1] if bias is None else torch.addcmul(bias.to(dtype), rows, taps[:, -1])
    # One product per tap, so that each stops at the edge of a document.
    for shift in range(1, min(width, slots)):
        shifted = functional.pad(rows[:, :-shift], (0, 0, shift, 0))
        if seq_idx is not None:
            same_document = functional.pad(seq_idx[:, shift:] == seq_idx[:, :-shift], (shift, 0))
            shifted = shifted * same_document.unsqueeze(-1)
        out = torch.addcmul(out, shifted, taps[:, -1 - shift])
    if activation is not None:
        out = functional.silu(out)
    return out.to(x.dtype).transpose(1, 2)


@without_autocast
def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK_SLOTS,
    **_ignored: object,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule, a chunk of positions at a time, with the state cleared at every document boundary.

    Args:
        query, key: [B, T, H, K]. H may divide the number of value heads (grouped heads).
        value: [B, T, HV, V].
        g: [B, T, HV], logarithm of the decay, <= 0.
        beta: [B, T, HV], how much of the new value is written.
        scale: factor of the query; K ** -0.5 if None.
        initial_state: [B, HV, K, V]; [N, HV, K, V] for N documents.
        output_final_state: return the state after the last position, of the shape of `initial_state`.
        use_qk_l2norm_in_kernel: normalise query and key first.
        cu_seqlens: [N + 1] ascending document borders from 0; needs B = 1. Positions after the last border count as
            one more document. None for one document per row.
        chunk_size: positions per chunk.
        _ignored: whatever else the layer hands on.

    Returns:
        Output [B, T, HV, V] in the dtype of `query`, and the final state (None unless asked for).

    Raises:
        ValueError: `cu_seqlens` with more than one row, or not a one-dimensional integer tensor; a number of initial
            states that is not the number of documents.

    Source: argument names and meaning of flash-linear-attention 0.6, `fla.ops.gated_delta_rule`. Waits for the device
    only where states go in or out together with `cu_seqlens`, which training never does.
    """
    _check_borders(cu_seqlens, query.shape[0])
    if cu_seqlens is not None and (initial_state is not None or output_final_state):
        return _each_document(
            query, key, value, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        )
    slots, dtype = query.shape[1], query.dtype
    query, key, value, g, beta = _prepare(query, key, value, g, beta, scale, use_qk_l2norm_in_kernel)
    # The last chunk is filled up with key 0 and beta 0, which write nothing, and g 0, which keeps the state.
    chunks = max(1, -(-slots // chunk_size))
    padding = chunks * chunk_size - slots
    query, key, value, g, beta = (_into_chunks(x, chunks, padding) for x in (query, key, value, g, beta))
    documents = _document_of_each_slot(cu_seqlens, slots + padding, query.device).view(chunks, chunk_size)

    transition, update, read, within = _chunk_terms(query, key, value, g, beta, documents)
    batch, heads, key_size, value_size = query.shape[0], query.shape[1], query.shape[-1], value.shape[-1]
    state = (
        value.new_zeros(batch, heads, key_size, value_size) if initial_state is None else initial_state.to(value.dtype)
    )
    states = []
    for chunk_transition, chunk_update in zip(transition.unbind(2), update.unbind(2), strict=True):
        states.append(state)
        state = chunk_transition @ state + chunk_update
    out = within + read @ torch.stack(states, dim=2)
    out = out.flatten(2, 3)[:, :, :slots].transpose(1, 2).to(dtype)
    return out, state if output_final_state else None


@without_autocast
def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_ignored: object,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule one token after the other: the definition itself, to check `chunk_gated_delta_rule` against.

    Args, Returns, Raises: those of `chunk_gated_delta_rule`, less `chunk_size`. Cost: T steps, so use it on short rows.

    Source: https://arxiv.org/abs/2412.06464, equation 10.
    """
    _check_borders(cu_seqlens, query.shape[0])
    dtype = query.dtype
    query, key, value, g, beta = _prepare(query, key, value, g, beta, scale, use_qk_l2norm_in_kernel)
    borders = _border_list(cu_seqlens, query.shape[2], initial_state)
    shape = (query.shape[0], query.shape[1], key.shape[-1], value.shape[-1])
    outputs, finals = [], []
    for document, (start, end) in enumerate(pairwise(borders)):
        state = value.new_zeros(shape)
        if initial_state is not None:
            state = (initial_state if cu_seqlens is None else initial_state[document : document + 1]).to(value.dtype)
        for t in range(start, end):
            k, v = key[:, :, t, :, None], value[:, :, t, None, :]
            state = state * g[:, :, t, None, None].exp()
            recalled = (k * state).sum(-2, keepdim=True)
            state = state + k * (beta[:, :, t, None, None] * (v - recalled))
            outputs.append((query[:, :, t, :, None] * state).sum(-2))
        finals.append(state)
    out = torch.stack(outputs, dim=1).to(dtype)
    return out, torch.cat(finals) if output_final_state else None


def causal_attention(
    _module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_ignored: object,
) -> tuple[Tensor, None]:
    """Softmax attention inside each document, with every score and mask written out: an oracle for short rows.

    Args:
        query: [B, H, T, D]; key, value: [B, H_kv, T, D], H a multiple of H_kv.
        scaling: factor of the scores; D ** -0.5 if None.
        sliding_window: positions that a query sees, its own included; None for all.
        cu_seq_lens_q: [N + 1] document borders; None for one document per row.

    Returns:
        [B, T, H, D] and None, as transformers wants it.
    """
    slots, group = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    documents = _document_of_each_slot(cu_seq_lens_q, slots, query.device)
    place = torch.arange(slots, device=query.device)
    distance = place[:, None] - place[None, :]
    seen = (distance >= 0) & (documents[:, None] == documents[None, :])
    if sliding_window is not None:
        seen &= distance < sliding_window
    scores = (query @ key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2), None


def _chunk_terms(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, documents: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Everything about a chunk that does not depend on the state that enters it, for all chunks at once.

    With S the state that enters, the chunk puts out `within + read @ S` and leaves the state `transition @ S + update`.

    Args:
        query, key, value: [B, H, N, C, K or V], N chunks of C positions.
        g, beta: [B, H, N, C].
        documents: [N, C], the document of each position.

    Returns:
        transition [B, H, N, K, K], update [B, H, N, K, V], read [B, H, N, C, K], within [B, H, N, C, V].
    """
    sizes = (value.shape[-1], key.shape[-1])
    visible = (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril()
    # The decay is summed inside each document by a masked product: a running sum over the chunk would carry the
    # earlier document's values, which cancel in exact arithmetic only.
    decay = (visible.to(g.dtype) @ g.unsqueeze(-1)).squeeze(-1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~visible, float("-inf")).exp()
    # A document that began in an earlier chunk is the only one to read the entering state, and the chunk's last
    # document the only one to write the leaving state.
    before = torch.cat((documents[:1, 0], documents[:-1, -1]))
    reads = documents == before.unsqueeze(-1)
    writes = documents == documents[:, -1:]
    from_start = decay.exp() * reads
    to_end = (decay[..., -1:] - decay).masked_fill(~writes, float("-inf")).exp()
    keeps = from_start[..., -1]

    weighted_key = key * beta.unsqueeze(-1)
    system = (weighted_key @ key.transpose(-1, -2)) * between
    right = torch.cat((value * beta.unsqueeze(-1), weighted_key * from_start.unsqueeze(-1)), dim=-1)
    # Unit lower triangular: the solver takes the diagonal as 1 and does not read what is stored there or above.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    within, taken = (((query @ key.transpose(-1, -2)) * between) @ solved).split(sizes, dim=-1)
    update, forgotten = ((key * to_end.unsqueeze(-1)).transpose(-1, -2) @ solved).split(sizes, dim=-1)
    identity = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
    transition = identity * keeps[..., None, None] - forgotten
    read = query * from_start.unsqueeze(-1) - taken
    return transition, update, read, within


def _each_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """One call per document, for calls that carry a state per document."""
    outputs, finals = [], []
    borders = _border_list(cu_seqlens, query.shape[1], initial_state)
    for document, (start, end) in enumerate(pairwise(borders)):
        out, final = chunk_gated_delta_rule(
            query[:, start:end],
            key[:, start:end],
            value[:, start:end],
            g[:, start:end],
            beta[:, start:end],
            scale,
            None if initial_state is None else initial_state[document : document + 1],
            True,
            use_qk_l2norm_in_kernel,
        )
        outputs.append(out)
        finals.append(final)
    return torch.cat(outputs, dim=1), torch.cat([x for x in finals if x is not None]) if output_final_state else None


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, scale: float | None, normalise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Working dtype, heads before positions, grouped heads repeated, query and key normalised and scaled."""
    dtype = _working_dtype(query)
    query, key, value, g, beta = (x.transpose(1, 2).to(dtype) for x in (query, key, value, g, beta))
    if normalise:
        query, key = (x * (x.square().sum(-1, keepdim=True) + _L2_NORM_EPSILON).rsqrt() for x in (query, key))
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    group = value.shape[1] // key.shape[1]
    if group > 1:
        query, key = (x.repeat_interleave(group, dim=1) for x in (query, key))
    return query, key, value, g, beta


def _into_chunks(x: Tensor, chunks: int, padding: int) -> Tensor:
    """[B, H, T, ...] filled up with zeros and cut into [B, H, N, C, ...]."""
    if padding:
        x = functional.pad(x, (0, 0) * (x.dim() - 3) + (0, padding))
    return x.reshape(*x.shape[:2], chunks, -1, *x.shape[3:])


def _document_of_each_slot(cu_seqlens: Tensor | None, slots: int, device: torch.device) -> Tensor:
    """[T] number of the document that each position belongs to, found without waiting for the device."""
    if cu_seqlens is None:
        return torch.zeros(slots, dtype=torch.long, device=device)
    positions = torch.arange(slots, dtype=cu_seqlens.dtype, device=device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


def _border_list(cu_seqlens: Tensor | None, slots: int, initial_state: Tensor | None) -> list[int]:
    if cu_seqlens is None:
        return [0, slots]
    # A device tensor makes the host wait here: only the token-by-token oracle and calls with states come this way.
    borders = [int(border) for border in cu_seqlens.tolist()]
    if borders[-1] < slots:
        borders.append(slots)
    if initial_state is not None and initial_state.shape[0] != len(borders) - 1:
        raise ValueError(f"initial_state holds {initial_state.shape[0]} states for {len(borders) - 1} documents")
    return borders


def _check_borders(cu_seqlens: Tensor | None, rows: int) -> None:
    if cu_seqlens is None:
        return
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be a one-dimensional integer tensor, got {tuple(cu_seqlens.shape)}")
    if rows != 1:
        raise ValueError(f"cu_seqlens describes one packed row, but the batch has {rows}: pack into one row [1, T]")


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
