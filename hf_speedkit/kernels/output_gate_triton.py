"""Triton kernels of `output_gate.py`; imported only where a GPU is at hand. A row is one head of one slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _output_gate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_slot, x_head, gate_ptr, gate_slot, gate_head, grad_ptr, grad_slot, grad_head, out_ptr, gate_grad_ptr, rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM_BLOCK)[None, :]
    mask = (row < rows)[:, None] & (column < DIM)
    slot = (row // HEADS).to(tl.int64)
    head = row % HEADS
    x = tl.load((x_ptr + slot * x_slot + head * x_head)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    gate_row = gate_ptr + slot * gate_slot + head * gate_head
    factor = tl.sigmoid(tl.load(gate_row[:, None] + column, mask=mask, other=0.0).to(tl.float32))
    out = (row.to(tl.int64) * DIM)[:, None] + column
    dtype = out_ptr.dtype.element_ty
    if BACKWARD:
        grad_row = grad_ptr + slot * grad_slot + head * grad_head
        grad = tl.load(grad_row[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        gate_grad = grad * x * factor * (1.0 - factor)
        tl.store(gate_grad_ptr + out, gate_grad.to(gate_grad_ptr.dtype.element_ty), mask=mask)
        tl.store(out_ptr + out, (grad * factor).to(dtype), mask=mask)
    else:
        tl.store(out_ptr + out, (x * factor).to(dtype), mask=mask)


def multiply_by_sigmoid(
    x: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
    *,
    grad: torch.Tensor | None = None,
    gate_grad: torch.Tensor | None = None,
) -> None:
    """Fill `out` with x * sigmoid(gate); with `grad`, `out` and `gate_grad` with the gradients of both.

    Args:
        x, gate, grad: [N, heads, D]; the last dimension lies together in memory.
        out, gate_grad: contiguous [N, heads, D].
    """
    slots, heads, head_dim = x.shape
    block = triton.next_power_of_2(head_dim)
    rows = max(1, _ELEMENTS // block)
    incoming = x if grad is None else grad
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _output_gate_kernel[(triton.cdiv(slots * heads, rows),)](
            x, *x.stride()[:2], gate, *gate.stride()[:2], incoming, *incoming.stride()[:2], out,
            out if gate_grad is None else gate_grad, slots * heads,
            HEADS=heads, DIM=head_dim, DIM_BLOCK=block, ROWS=rows, BACKWARD=grad is not None, num_warps=4,
        )  # fmt: skip
