"""Triton kernels of `qk_rotary.py`; imported only where a GPU is at hand.

A row is one head of one slot. Its columns come in three pieces, the two halves that are rotated with each other and the
rest, so that every element is read once and no element of one thread is needed in another. Bound by memory: a program
reads 4 KiB of a bf16 tensor at a time, several programs to a multiprocessor.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64}
_ELEMENTS = 2048
"""Of a tensor that a program holds at a time: 80 registers a thread forward, 128 backward at head_dim 256, sm_90."""

_ITERATIONS = 8
"""Blocks of rows of one program in the backward pass: its partial sum is 1/64 of what it reads at head_dim 256."""


@triton.jit  # type: ignore[untyped-decorator]
def _pieces(  # type: ignore[no-untyped-def]
    row_ptr, inside, HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr
):
    """First half, second half and rest of rows [R] of pointers, in float32 [R, columns], 0 outside."""
    half = tl.arange(0, HALF_BLOCK)
    half_mask = inside[:, None] & (half < HALF)[None, :]
    first = tl.load(row_ptr[:, None] + half[None, :], mask=half_mask, other=0.0).to(tl.float32)
    second = tl.load(row_ptr[:, None] + (half + HALF)[None, :], mask=half_mask, other=0.0).to(tl.float32)
    rest = first  # stands for nothing where everything is rotated
    if REST > 0:
        columns = tl.arange(0, REST_BLOCK)
        rest_mask = inside[:, None] & (columns < REST)[None, :]
        rest = tl.load(row_ptr[:, None] + (columns + 2 * HALF)[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    return first, second, rest


@triton.jit  # type: ignore[untyped-decorator]
def _store_pieces(  # type: ignore[no-untyped-def]
    row_ptr, inside, first, second, rest, HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):  # fmt: skip
    half = tl.arange(0, HALF_BLOCK)
    half_mask = inside[:, None] & (half < HALF)[None, :]
    dtype = row_ptr.dtype.element_ty
    tl.store(row_ptr[:, None] + half[None, :], first.to(dtype), mask=half_mask)
    tl.store(row_ptr[:, None] + (half + HALF)[None, :], second.to(dtype), mask=half_mask)
    if REST > 0:
        columns = tl.arange(0, REST_BLOCK)
        rest_mask = inside[:, None] & (columns < REST)[None, :]
        tl.store(row_ptr[:, None] + (columns + 2 * HALF)[None, :], rest.to(dtype), mask=rest_mask)


@triton.jit  # type: ignore[untyped-decorator]
def _times_weight(x, weight, ONE_PLUS: tl.constexpr, X_TYPE: tl.constexpr, NORMED_TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A norm's last step, rounded where the model rounds: after the product, or before and after it."""
    product = x * (1.0 + weight) if ONE_PLUS else x.to(X_TYPE).to(tl.float32) * weight
    return product.to(NORMED_TYPE).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _forward_rows(  # type: ignore[no-untyped-def]
    block, x_ptr, x_slot, x_head, out_ptr, weight_ptr, rstd_ptr, cos_ptr, sin_ptr, slots, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, ROWS: tl.constexpr, ONE_PLUS: tl.constexpr, X_TYPE: tl.constexpr,
    NORMED_TYPE: tl.constexpr,
):  # fmt: skip
    dim: tl.constexpr = 2 * HALF + REST
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < slots * HEADS
    slot = (row // HEADS).to(tl.int64)
    x_row = x_ptr + slot * x_slot + (row % HEADS) * x_head
    first, second, rest = _pieces(x_row, inside, HALF, REST, HALF_BLOCK, REST_BLOCK)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if REST > 0:
        squares += tl.sum(rest * rest, axis=1)
    rstd = tl.rsqrt(squares / dim + eps)
    tl.store(rstd_ptr + row, rstd, mask=inside)
    columns = tl.arange(0, 1)
    weight1, weight2, weight3 = _pieces(weight_ptr + columns, columns < 1, HALF, REST, HALF_BLOCK, REST_BLOCK)
    scale = rstd[:, None]
    first = _times_weight(first * scale, weight1, ONE_PLUS, X_TYPE, NORMED_TYPE)
    second = _times_weight(second * scale, weight2, ONE_PLUS, X_TYPE, NORMED_TYPE)
    if REST > 0:
        rest = _times_weight(rest * scale, weight3, ONE_PLUS, X_TYPE, NORMED_TYPE)
    cos1, cos2, _ = _pieces(cos_ptr + slot * (2 * HALF), inside, HALF, 0, HALF_BLOCK, REST_BLOCK)
    sin1, sin2, _ = _pieces(sin_ptr + slot * (2 * HALF), inside, HALF, 0, HALF_BLOCK, REST_BLOCK)
    rotated1 = first * cos1 - second * sin1
    rotated2 = second * cos2 + first * sin2
    out_row = out_ptr + row.to(tl.int64) * dim
    _store_pieces(out_row, inside, rotated1, rotated2, rest, HALF, REST, HALF_BLOCK, REST_BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _qk_rotary_forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, q_slot, q_head, q_out_ptr, q_weight_ptr, q_rstd_ptr, k_ptr, k_slot, k_head, k_out_ptr, k_weight_ptr,
    k_rstd_ptr, cos_ptr, sin_ptr, slots, q_blocks, q_eps, k_eps, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ONE_PLUS: tl.constexpr, X_TYPE: tl.constexpr, NORMED_TYPE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < q_blocks:
        _forward_rows(
            block, q_ptr, q_slot, q_head, q_out_ptr, q_weight_ptr, q_rstd_ptr, cos_ptr, sin_ptr, slots, q_eps,
            Q_HEADS, HALF, REST, HALF_BLOCK, REST_BLOCK, ROWS, ONE_PLUS, X_TYPE, NORMED_TYPE,
        )  # fmt: skip
    else:
        _forward_rows(
            block - q_blocks, k_ptr, k_slot, k_head, k_out_ptr, k_weight_ptr, k_rstd_ptr, cos_ptr, sin_ptr, slots,
            k_eps, K_HEADS, HALF, REST, HALF_BLOCK, REST_BLOCK, ROWS, ONE_PLUS, X_TYPE, NORMED_TYPE,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _through_norm(d, x, rstd, weight, mean, ONE_PLUS: tl.constexpr):  # type: ignore[no-untyped-def]
    if ONE_PLUS:
        weight = 1.0 + weight
    return rstd[:, None] * (d * weight - x * mean[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_sum(d, x, weight, ONE_PLUS: tl.constexpr):  # type: ignore[no-untyped-def]
    if ONE_PLUS:
        weight = 1.0 + weight
    return tl.sum(d * weight * x, axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_rows(  # type: ignore[no-untyped-def]
    program, grad_ptr, grad_slot, grad_head, x_ptr, x_slot, x_head, gate_ptr, gate_slot, gate_head, dx_ptr,
    sums_ptr, weight_ptr, rstd_ptr, cos_ptr, sin_ptr, slots, HEADS: tl.constexpr, GATED: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr, ITERATIONS: tl.constexpr, ONE_PLUS: tl.constexpr,
):  # fmt: skip
    dim: tl.constexpr = 2 * HALF + REST
    width: tl.constexpr = 2 * dim if GATED else dim
    one = tl.arange(0, 1)
    weight1, weight2, weight3 = _pieces(weight_ptr + one, one < 1, HALF, REST, HALF_BLOCK, REST_BLOCK)
    sums1 = tl.zeros((ROWS, HALF_BLOCK), dtype=tl.float32)
    sums2 = tl.zeros((ROWS, HALF_BLOCK), dtype=tl.float32)
    sums3 = tl.zeros((ROWS, REST_BLOCK), dtype=tl.float32)
    for iteration in range(ITERATIONS):
        row = (program * ITERATIONS + iteration) * ROWS + tl.arange(0, ROWS)
        inside = row < slots * HEADS
        slot = (row // HEADS).to(tl.int64)
        head = row % HEADS
        grad_row = grad_ptr + slot * grad_slot + head * grad_head
        x_row = x_ptr + slot * x_slot + head * x_head
        dx_row = dx_ptr + row.to(tl.int64) * width
        grad1, grad2, d3 = _pieces(grad_row, inside, HALF, REST, HALF_BLOCK, REST_BLOCK)
        x1, x2, x3 = _pieces(x_row, inside, HALF, REST, HALF_BLOCK, REST_BLOCK)
        rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)
        cos1, cos2, _ = _pieces(cos_ptr + slot * (2 * HALF), inside, HALF, 0, HALF_BLOCK, REST_BLOCK)
        sin1, sin2, _ = _pieces(sin_ptr + slot * (2 * HALF), inside, HALF, 0, HALF_BLOCK, REST_BLOCK)
        d1 = grad1 * cos1 + grad2 * sin2
        d2 = grad2 * cos2 - grad1 * sin1
        x1 = x1 * rstd[:, None]
        x2 = x2 * rstd[:, None]
        total = _weighted_sum(d1, x1, weight1, ONE_PLUS) + _weighted_sum(d2, x2, weight2, ONE_PLUS)
        sums1 += d1 * x1
        sums2 += d2 * x2
        if REST > 0:
            x3 = x3 * rstd[:, None]
            total += _weighted_sum(d3, x3, weight3, ONE_PLUS)
            sums3 += d3 * x3
        mean = total / dim
        dx1 = _through_norm(d1, x1, rstd, weight1, mean, ONE_PLUS)
        dx2 = _through_norm(d2, x2, rstd, weight2, mean, ONE_PLUS)
        dx3 = d3
        if REST > 0:
            dx3 = _through_norm(d3, x3, rstd, weight3, mean, ONE_PLUS)
        _store_pieces(dx_row, inside, dx1, dx2, dx3, HALF, REST, HALF_BLOCK, REST_BLOCK)
        if GATED:
            columns = tl.arange(0, DIM_BLOCK)
            mask = inside[:, None] & (columns < dim)[None, :]
            gate_row = gate_ptr + slot * gate_slot + head * gate_head
            gate = tl.load(gate_row[:, None] + columns[None, :], mask=mask, other=0.0)
            gate = gate.to(dx_ptr.dtype.element_ty)
            tl.store((dx_row + dim)[:, None] + columns[None, :], gate, mask=mask)
    half = tl.arange(0, HALF_BLOCK)
    sums_row = sums_ptr + program * dim
    tl.store(sums_row + half, tl.sum(sums1, axis=0), mask=half < HALF)
    tl.store(sums_row + HALF + half, tl.sum(sums2, axis=0), mask=half < HALF)
    if REST > 0:
        rest = tl.arange(0, REST_BLOCK)
        tl.store(sums_row + 2 * HALF + rest, tl.sum(sums3, axis=0), mask=rest < REST)


@triton.jit  # type: ignore[untyped-decorator]
def _qk_rotary_backward_kernel(  # type: ignore[no-untyped-def]
    q_grad_ptr, q_grad_slot, q_grad_head, q_ptr, q_slot, q_head, gate_ptr, gate_slot, gate_head, q_dx_ptr,
    q_sums_ptr, q_weight_ptr, q_rstd_ptr, k_grad_ptr, k_grad_slot, k_grad_head, k_ptr, k_slot, k_head,
    k_dx_ptr, k_sums_ptr, k_weight_ptr, k_rstd_ptr, cos_ptr, sin_ptr, slots, q_programs, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, GATED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ITERATIONS: tl.constexpr, ONE_PLUS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < q_programs:
        _backward_rows(
            program, q_grad_ptr, q_grad_slot, q_grad_head, q_ptr, q_slot, q_head, gate_ptr, gate_slot, gate_head,
            q_dx_ptr, q_sums_ptr, q_weight_ptr, q_rstd_ptr, cos_ptr, sin_ptr, slots,
            Q_HEADS, GATED, HALF, REST, HALF_BLOCK, REST_BLOCK, DIM_BLOCK, ROWS, ITERATIONS, ONE_PLUS,
        )  # fmt: skip
    else:
        _backward_rows(
            program - q_programs, k_grad_ptr, k_grad_slot, k_grad_head, k_ptr, k_slot, k_head, k_ptr, k_slot, k_head,
            k_dx_ptr, k_sums_ptr, k_weight_ptr, k_rstd_ptr, cos_ptr, sin_ptr, slots,
            K_HEADS, False, HALF, REST, HALF_BLOCK, REST_BLOCK, DIM_BLOCK, ROWS, ITERATIONS, ONE_PLUS,
        )  # fmt: skip


def _sizes(head_dim: int, rotary_dim: int) -> dict[str, int]:
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    blocks = {"HALF_BLOCK": triton.next_power_of_2(half), "REST_BLOCK": triton.next_power_of_2(max(rest, 1))}
    return {"HALF": half, "REST": rest, **blocks}


def _rows(head_dim: int) -> int:
    return max(1, _ELEMENTS // int(triton.next_power_of_2(head_dim)))


def norm_and_rotate(
    queries: torch.Tensor,
    keys: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    rstd: tuple[torch.Tensor, torch.Tensor],
    *,
    eps: tuple[float, float],
    one_plus: bool,
    normed_dtype: torch.dtype,
) -> None:
    """Fill `out`, contiguous [N, heads, D], and `rstd`, float32 [N, heads], of queries and keys in one launch.

    Args:
        queries, keys: [N, heads, D or more]; the first D of a row count; the last dimension lies together in memory.
        weights: of the two norms, [D]. eps: of the two norms.
        cos, sin: contiguous [N, R], R even and at most D.
        one_plus: whether a norm multiplies by 1 + weight.
        normed_dtype: what a norm's output is rounded to before it is rotated.
    """
    head_dim, slots = out[0].shape[-1], len(queries)
    rows = _rows(head_dim)
    q_blocks, k_blocks = (triton.cdiv(slots * x.shape[1], rows) for x in (queries, keys))
    with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]
        _qk_rotary_forward_kernel[(q_blocks + k_blocks,)](
            queries, *queries.stride()[:2], out[0], weights[0], rstd[0],
            keys, *keys.stride()[:2], out[1], weights[1], rstd[1],
            cos, sin, slots, q_blocks, *eps,
            Q_HEADS=queries.shape[1], K_HEADS=keys.shape[1], **_sizes(head_dim, cos.shape[-1]), ROWS=rows,
            ONE_PLUS=one_plus, X_TYPE=_TYPES[queries.dtype], NORMED_TYPE=_TYPES[normed_dtype], num_warps=4,
        )  # fmt: skip


def gradients(
    grads: tuple[torch.Tensor, torch.Tensor],
    inputs: tuple[torch.Tensor, torch.Tensor],
    gate_grad: torch.Tensor | None,
    weights: tuple[torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    rstd: tuple[torch.Tensor, torch.Tensor],
    out: tuple[torch.Tensor, torch.Tensor],
    *,
    one_plus: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill `out` with the gradients of queries and keys; returns those of the two weights, float32 [D].

    Args:
        grads: of queries and keys as they went to attention, [N, heads, D]; the last dimension together in memory.
        inputs, weights, cos, sin, rstd, one_plus: as in `norm_and_rotate`.
        gate_grad: [N, heads, D], copied behind each row of the queries' gradient; None if there is no gate.
        out: contiguous [N, heads, D], the queries' [N, heads, 2 D] with a gate.

    The weights' gradients are sums of one row a program, in an order that does not change from run to run.
    """
    (queries, keys), (head_dim, slots) = inputs, (grads[0].shape[-1], len(inputs[0]))
    rows = _rows(head_dim)
    programs = [triton.cdiv(slots * x.shape[1], rows * _ITERATIONS) for x in inputs]
    sums = queries.new_empty((sum(programs), head_dim), dtype=torch.float32)
    q_sums, k_sums = sums[: programs[0]], sums[programs[0] :]
    gate: Any = grads[0] if gate_grad is None else gate_grad
    with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]
        _qk_rotary_backward_kernel[(sum(programs),)](
            grads[0], *grads[0].stride()[:2], queries, *queries.stride()[:2], gate, *gate.stride()[:2],
            out[0], q_sums, weights[0], rstd[0],
            grads[1], *grads[1].stride()[:2], keys, *keys.stride()[:2], out[1], k_sums, weights[1], rstd[1],
            cos, sin, slots, programs[0],
            Q_HEADS=queries.shape[1], K_HEADS=keys.shape[1], GATED=gate_grad is not None,
            **_sizes(head_dim, cos.shape[-1]), DIM_BLOCK=triton.next_power_of_2(head_dim), ROWS=rows,
            ITERATIONS=_ITERATIONS, ONE_PLUS=one_plus, num_warps=4,
        )  # fmt: skip
    return q_sums.sum(0), k_sums.sum(0)
