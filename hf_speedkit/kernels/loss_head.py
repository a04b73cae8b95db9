"""Next-token loss from hidden states: no [T, vocabulary] logits, no host read, no second projection in the backward.

TRL 1.16's fused head picks target positions with a boolean mask, for whose length the host waits for the device three
times a micro-batch (trl/trainer/utils.py:1645-1655), and computes all logits twice. Here the positions come from the
collator, which knows them before the batch is on the device, and a chunk of logits is turned into its own gradient
while it is there: three matrix products instead of four.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

# Bytes of the one buffer of logits. 4,324 rows at 248,320 tokens in bf16: enough rows to fill a GPU's matrix units.
LOGITS_BYTES = 2**31


class TargetSums(NamedTuple):
    """Sums over the targets of a micro-batch, scalars on the device; only `nll` carries a gradient."""

    targets: torch.Tensor
    nll: torch.Tensor
    entropy: torch.Tensor
    correct: torch.Tensor


def target_sums(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> TargetSums:
    """Sums of negative log-likelihood, entropy and correct top-1 predictions.

    Args:
        hidden: [N, H], the hidden state before each target, floating point.
        weight: [V, H], the output embedding; no bias.
        targets: int64 [N], each in [0, V), or negative for a row that counts nowhere. N may be 0: the sums are 0 and
            the backward pass gives zeros.

    The products run in the autocast dtype if autocast is on, else in hidden's; sums and the weight's gradient are
    float32 until the end. The gradient exists once: a second backward pass through it raises RuntimeError.
    """
    if not torch.is_grad_enabled():
        # A Function is told that they need a gradient here too: a second product in every evaluated row, and a float32
        # gradient of the weight, 5 GB at 248,320 x 5,120.
        hidden, weight = hidden.detach(), weight.detach()
    nll, entropy, correct = _TargetSums.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    return TargetSums(targets.ge(0).sum(), nll, entropy, correct)


@torch.no_grad()
def loss_head_error(device: torch.device, dtype: torch.dtype, *, vocabulary: int) -> float:
    """Largest error of the head's gradients on random tensors, relative to the largest gradient; inf for a wrong sum.

    Compared with torch's cross-entropy in float32. Also the kernel's warm-up: it is compiled here, not in step 1.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    # Logits of about 1: at 30, where products of unscaled numbers go, bf16 rounds a probability by a tenth.
    hidden = (torch.randn(48, 64, generator=generator) / 8).to(device=device, dtype=dtype)
    weight = torch.randn(vocabulary, 64, generator=generator).to(device=device, dtype=dtype)
    targets = torch.randint(vocabulary, (48,), generator=generator).to(device)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        sums = target_sums(ours[0], ours[1], targets)
        sums.nll.backward()  # type: ignore[no-untyped-call]
        plain = [hidden.float().requires_grad_(), weight.float().requires_grad_()]
        loss = torch.nn.functional.cross_entropy(plain[0] @ plain[1].t(), targets, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
    if not torch.isclose(sums.nll, loss, rtol=1e-2):
        return math.inf
    return max(
        ((a.grad.float() - b.grad).abs().max() / b.grad.abs().max()).item()
        for a, b in zip(ours, plain, strict=True)
        if a.grad is not None and b.grad is not None
    )


class _TargetSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        count, vocabulary = len(hidden), len(weight)
        inputs, matrix = hidden.to(dtype), weight.to(dtype)
        rows = max(1, min(count, LOGITS_BYTES // (vocabulary * dtype.itemsize)))
        buffer = inputs.new_empty(rows, vocabulary)
        nll, entropy, correct = torch.empty(3, count, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(inputs) if needs_hidden else None
        grad_weight = torch.empty_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            logits = buffer[: part.stop - part.start]
            torch.mm(inputs[part], matrix.t(), out=logits)
            _nll_rows_(
                logits, targets[part], nll[part], entropy[part], correct[part], gradient=needs_hidden or needs_weight
            )
            if grad_hidden is not None:
                torch.mm(logits, matrix, out=grad_hidden[part])
            if grad_weight is not None:
                _accumulate(grad_weight, logits.t(), inputs[part], first=start == 0)
        if grad_weight is not None and count == 0:
            grad_weight.zero_()
        # Attributes, not save_for_backward: hooks on saved tensors (offloading) must not move these results.
        ctx.gradients = (grad_hidden, grad_weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        sums = (nll.sum(), entropy.sum(), correct.sum())
        ctx.mark_non_differentiable(*sums[1:])
        ctx.set_materialize_grads(False)
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_nll: torch.Tensor | None, *_: Any) -> Any:
        if grad_nll is None:
            return None, None, None
        if ctx.gradients is None:
            raise RuntimeError("the loss head's gradient was used up by the first backward pass; run the forward again")
        gradients, ctx.gradients = ctx.gradients, None
        return (*(_scaled(g, grad_nll, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)), None)


def _scaled(gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Scale a gradient in one pass: multiplied in float32, rounded on the way out."""
    if gradient is None:
        return None
    if gradient.dtype == dtype:
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: bool) -> None:
    """Add left @ right to a float32 total without rounding the product to the inputs' dtype first."""
    if left.device.type == "cuda" and left.dtype != torch.float32:
        if first:
            torch.mm(left, right, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif first:
        torch.mm(left.float(), right.float(), out=total)
    else:
        total.addmm_(left.float(), right.float())


def _nll_rows_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    nll: torch.Tensor,
    entropy: torch.Tensor,
    correct: torch.Tensor,
    *,
    gradient: bool,
) -> None:
    """Statistics of each row of logits; with `gradient`, logits become softmax minus one-hot in place."""
    if logits.device.type == "cuda":
        from hf_speedkit.kernels.loss_head_triton import nll_rows_

        nll_rows_(logits, targets, nll, entropy, correct, gradient=gradient)
        return
    log_p = torch.log_softmax(logits.float(), dim=-1)
    counts = targets.ge(0).float()
    index = targets.clamp(min=0)[:, None]
    torch.mul(log_p.gather(1, index)[:, 0], -counts, out=nll)
    p = log_p.exp()
    torch.mul((p * log_p).sum(-1), -counts, out=entropy)
    correct.copy_(logits.argmax(-1) == targets)
    if gradient:
        p.scatter_add_(1, index, p.new_full((len(p), 1), -1.0))
        logits.copy_(p * counts[:, None])
