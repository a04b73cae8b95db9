"""Triton kernels of the optimizer step; imported only where a GPU is at hand.

One launch per tensor, as many programs as the tensor needs. torch's fused AdamW and its foreach norm start launches of
at most 320 blocks of 65,536 elements each (torch 2.11, aten/src/ATen/native/cuda/MultiTensorApply.cuh), which reaches
about 1.2 TB/s of the 4.3 TB/s an H200 copies at (benchmarks/NOTES.md, a first look).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_kernel(  # type: ignore[no-untyped-def]
    param_ptr,
    grad_ptr,
    mean_ptr,
    square_ptr,
    step_ptr,
    scale_ptr,
    lr,
    weight_decay,
    eps,
    log_beta1,
    log_beta2,
    one_minus_beta1,
    one_minus_beta2,
    elements,
    HAS_SCALE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # In float64: 1 - beta2 ** step is 0.001 at the first step, and float32 would lose three digits of it.
    step = tl.load(step_ptr).to(tl.float64)
    correction1 = (1.0 - tl.exp(step * log_beta1.to(tl.float64))).to(tl.float32)
    correction2 = tl.sqrt(1.0 - tl.exp(step * log_beta2.to(tl.float64))).to(tl.float32)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < elements
    grad = tl.load(grad_ptr + offsets, mask=inside).to(tl.float32)
    if HAS_SCALE:
        grad = grad * tl.load(scale_ptr)
    param = tl.load(param_ptr + offsets, mask=inside).to(tl.float32)
    mean = tl.load(mean_ptr + offsets, mask=inside).to(tl.float32)
    square = tl.load(square_ptr + offsets, mask=inside).to(tl.float32)
    param -= lr * weight_decay * param
    mean += one_minus_beta1 * (grad - mean)
    square += one_minus_beta2 * (grad * grad - square)
    param -= (lr / correction1) * mean / (tl.sqrt(square) / correction2 + eps)
    tl.store(param_ptr + offsets, param.to(param_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + offsets, mean.to(mean_ptr.dtype.element_ty), mask=inside)
    tl.store(square_ptr + offsets, square.to(square_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_squares_kernel(values_ptr, sums_ptr, elements, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    values = tl.load(values_ptr + offsets, mask=offsets < elements, other=0.0).to(tl.float32)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(values * values, axis=0))


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    step: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    lr: float,
    weight_decay: float,
    eps: float,
    log_betas: tuple[float, float],
    one_minus_betas: tuple[float, float],
) -> None:
    """One AdamW update of one tensor in place, in float32 whatever the dtypes; all four of one shape and contiguous.

    Args:
        param, grad, mean, square: the weight, its gradient and its two running averages.
        step: number of this step, a scalar on the device.
        scale: multiplies the gradient, a float32 scalar on the device; None for 1.
        lr, weight_decay, eps: as for torch.optim.AdamW.
        log_betas, one_minus_betas: of the two betas.
    """
    elements = param.numel()
    with torch.cuda.device(param.device):
        _adamw_kernel[(triton.cdiv(elements, BLOCK),)](
            param,
            grad,
            mean,
            square,
            step,
            step if scale is None else scale,
            lr,
            weight_decay,
            eps,
            *log_betas,
            *one_minus_betas,
            elements,
            HAS_SCALE=scale is not None,
            BLOCK_SIZE=BLOCK,
        )


def sums_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of contiguous tensors of one device: a float32 scalar there."""
    blocks = [triton.cdiv(tensor.numel(), BLOCK) for tensor in tensors]
    sums = torch.empty(sum(blocks), dtype=torch.float32, device=tensors[0].device)
    first = 0
    with torch.cuda.device(sums.device):
        for tensor, count in zip(tensors, blocks, strict=True):
            _sum_of_squares_kernel[(count,)](tensor, sums[first:], tensor.numel(), BLOCK_SIZE=BLOCK)
            first += count
    return sums.sum()
