"""Triton kernel of the loss head; imported only where a GPU is at hand."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _nll_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    targets_ptr,
    nll_ptr,
    entropy_ptr,
    correct_ptr,
    columns,
    HAS_GRADIENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # One program a row: statistics in one pass over its logits, softmax minus one-hot over them in a second.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row)
    # Before the reductions, whose barriers keep any thread from overwriting it while another still reads.
    target_z = tl.load(row_ptr + tl.maximum(target, 0)).to(tl.float32)
    highest = -float("inf")
    highest_before_target = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        z = tl.load(row_ptr + offsets, mask=offsets < columns, other=-float("inf")).to(tl.float32)
        highest_before_target = tl.maximum(
            highest_before_target, tl.max(tl.where(offsets < target, z, -float("inf")), axis=0)
        )
        new_highest = tl.maximum(highest, tl.max(z, axis=0))
        shrink = tl.exp(highest - new_highest)
        e = tl.exp(z - new_highest)
        total = total * shrink + tl.sum(e, axis=0)
        weighted = weighted * shrink + tl.sum(tl.where(offsets < columns, e * z, 0.0), axis=0)
        highest = new_highest
    log_z = highest + tl.log(total)
    counts = (target >= 0).to(tl.float32)
    tl.store(nll_ptr + row, (log_z - target_z) * counts)
    tl.store(entropy_ptr + row, (log_z - weighted / total) * counts)
    # argmax takes the first of equal logits.
    first = (target_z >= highest) & (target_z > highest_before_target)
    tl.store(correct_ptr + row, first.to(tl.float32) * counts)
    if HAS_GRADIENT:
        for start in range(0, columns, BLOCK_SIZE):
            offsets = start + tl.arange(0, BLOCK_SIZE)
            z = tl.load(row_ptr + offsets, mask=offsets < columns, other=-float("inf")).to(tl.float32)
            gradient = (tl.exp(z - log_z) - (offsets == target).to(tl.float32)) * counts
            tl.store(row_ptr + offsets, gradient.to(logits_ptr.dtype.element_ty), mask=offsets < columns)


def nll_rows_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    nll: torch.Tensor,
    entropy: torch.Tensor,
    correct: torch.Tensor,
    *,
    gradient: bool,
) -> None:
    """Fill nll, entropy, correct, float32 [n], from logits [n, V], which with `gradient` become d nll / d logits."""
    with torch.cuda.device(logits.device):
        _nll_kernel[(len(logits),)](
            logits, logits.stride(0), targets, nll, entropy, correct, logits.shape[1],
            HAS_GRADIENT=gradient, BLOCK_SIZE=_BLOCK, num_warps=8,
        )  # fmt: skip
