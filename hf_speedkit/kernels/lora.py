"""A frozen linear map and its low-rank adapter in one function: no copy in fp32, no scaling and no sum of their own.

peft keeps adapters in fp32, so it casts the input, multiplies twice in fp32, scales, adds in fp32 and casts back: on an
8-layer cut of a 27B 86 of the 366 ms of a step are copies and element-wise kernels (benchmarks/NOTES.md), and a copy of
each input in fp32 is held for backward. Here both matrices are rounded to the input's dtype, as bf16 autocast does, the
scaling is an argument of a product, and sums are made by the products that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Take = Callable[[], Tensor | None]


class Adapter(NamedTuple):
    """A low-rank adapter.

    Args:
        down: [rank, in], lora_A.
        up: [out, rank], lora_B.
        scaling: what their product is multiplied by.
    """

    down: Tensor
    up: Tensor
    scaling: float


def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapter: Adapter, *, kept: Take | None = None
) -> Tensor:
    """Give x @ (weight + scaling * up @ down).T + bias, with gradients for `x`, `down` and `up`.

    Args:
        x: [..., in].
        weight: [out, in], of x's dtype; gets no gradient.
        bias: [out], of x's dtype, or None; gets no gradient.
        adapter: of any floating-point dtype; it is rounded to x's for the products.
        kept: gives the output that an earlier pass made from the same arguments, or None; asked once.

    Returns:
        [..., out] in x's dtype, in memory of its own. Gradients of the adapter come in its own dtype; on a GPU they are
        summed in fp32 and, where the adapter is fp32, never rounded to less.
    """
    down, up = (value.detach().to(x.dtype) for value in (adapter.down, adapter.up))
    # Two nodes: the first holds what the gradients are made of before the second multiplies. So a recomputation under
    # activation checkpointing, which ends with the last tensor that it has to hold, ends before a layer's last product.
    ahead, narrow = _Gradients.apply(x, weight, adapter.down, adapter.up, down, up, adapter.scaling)  # type: ignore[no-untyped-call]
    values = x.detach(), weight.detach(), None if bias is None else bias.detach(), narrow, up
    output: Tensor = _Output.apply(ahead, values, kept)  # type: ignore[no-untyped-call]
    return output


class _Gradients(torch.autograd.Function):
    """What the output's gradient is handed on to; gives (a tensor of the output's shape without memory, x @ down.T)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, own_down: Tensor, own_up: Tensor, down: Tensor, up: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        narrow = _product(_rows(x), down.t(), scaling)
        for_x, _, for_down, for_up = ctx.needs_input_grad[:4]
        ctx.save_for_backward(
            x if for_down else None,
            *((weight, down) if for_x else (None, None)),
            up if for_x or for_down else None,
            narrow if for_up else None,
        )
        ctx.shape, ctx.scaling, ctx.dtypes = x.shape, scaling, (own_down.dtype, own_up.dtype)
        ctx.mark_non_differentiable(narrow)
        ctx.set_materialize_grads(False)
        shape = (*x.shape[:-1], weight.shape[0])
        return torch.empty_strided(shape, (0,) * len(shape), dtype=x.dtype, device=x.device), narrow

    @staticmethod
    @once_differentiable  # a second derivative would be wrong in silence
    def backward(ctx: Any, grad: Tensor | None, _: None) -> Any:
        x, weight, down, up, narrow = ctx.saved_tensors
        if grad is None:
            return (None,) * 7
        for_x = for_down = for_up = None
        with _without_autocast(grad.device.type):
            rows = _rows(grad)
            if narrow is not None:
                for_up = _product_as(rows.t(), narrow, ctx.dtypes[1])
            back = None if up is None else _product(rows, up, ctx.scaling)
            if x is not None and back is not None:
                for_down = _product_as(back.t(), _rows(x), ctx.dtypes[0])
            if weight is not None and back is not None:
                for_x = torch.mm(rows, weight).addmm_(back, down).view(ctx.shape)
        return for_x, None, for_down, for_up, None, None, None


class _Output(torch.autograd.Function):
    """The output itself; holds nothing for backward."""

    @staticmethod
    def forward(ctx: Any, ahead: Tensor, values: Any, kept: Take | None) -> Tensor:
        made = None if kept is None else kept()
        if made is not None:
            return made.detach()
        x, weight, bias, narrow, up = values
        # In place: nobody else has seen it, and out of place addmm would copy it first.
        output: Tensor = torch.nn.functional.linear(_rows(x), weight, bias).addmm_(narrow, up.t())
        return output.view(ahead.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Scale * a @ b, scaled before the one rounding and without a kernel for it."""
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)  # at beta = 0 the first argument is not read


def _product_as(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A @ b in `dtype`, on a GPU without rounding to that of `a` first."""
    if a.device.type == "cuda" and a.dtype.itemsize == 2 and dtype is torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def _without_autocast(device_type: str) -> Any:
    """Backward passes belong outside of autocast; where one is inside, products stay what their dtypes say."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
