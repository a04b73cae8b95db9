"""AdamW and gradient clipping that read every gradient twice, not five times: the norm once, the update once.

Clipping multiplies all gradients by one number. Here that number is handed to the update kernel instead of being
written into the gradients, and both kernels run at the memory's speed (see adamw_triton). The arithmetic is that of
torch.optim.AdamW(fused=True) with the clipped gradient not rounded to its dtype in between.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class FusedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) whose update also clips; its state and checkpoints are torch's.

    `clip_grad_norm_` must be called on it in place of torch's, before `step`; the gradients themselves stay unclipped
    until then, and on a GPU afterwards as well.
    Where Triton or a GPU is missing, or a setting is asked for that the kernel does not know (amsgrad, maximize, a
    learning rate in a tensor, capturable), torch's own fused kernel does the update and takes the same scale.

    Args:
        params: as for torch.optim.AdamW.
        **settings: as for torch.optim.AdamW; `fused` is always on.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **{**settings, "fused": True, "foreach": False})
        # torch's GradScaler would hand its scale to the update, which knows only its own; so it unscales by itself.
        self._step_supports_amp_scaling = False
        self._scale: torch.Tensor | None = None
        self._kernel_takes_tensors: bool | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also a state that another AdamW has saved: its groups say `fused` is off, and its steps lie on the host."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, False
            for param in group["params"]:
                held = self.state.get(param, {})
                if "step" in held:
                    held["step"] = held["step"].to(device=param.device, dtype=torch.float32)
                for name in ("exp_avg", "exp_avg_sq"):
                    if name in held and not _local(held[name]).is_contiguous() and _local(param).is_contiguous():
                        held[name] = held[name].contiguous()

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Total gradient norm over all ranks; the next `step` scales gradients so that it is at most `max_norm`.

        Args:
            parameters: those whose gradients count; plain tensors, or DTensors that are sharded or replicated.
            max_norm: as for torch.nn.utils.clip_grad_norm_; inf only measures.

        Returns:
            The norm before clipping, a float32 scalar on the device. (torch's is rounded to the gradients' dtype.)

        Raises:
            ValueError: a gradient that is a DTensor of another placement; use torch's function there.
        """
        total = _sum_of_squares([p.grad for p in parameters if p.grad is not None])
        norm = total.sqrt()
        # The small number is torch's (clip_grad.py), so that both clip alike.
        self._scale = None if math.isinf(max_norm) else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update with the scale of the last `clip_grad_norm_`, which it uses up."""
        scale, self._scale = self._scale, None
        if not self._kernel_can():
            return self._torch_step(scale, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group, scale)
        return loss

    def _kernel_can(self) -> bool:
        if self._kernel_takes_tensors is None:  # at the first step: sharding replaces parameters, but before it
            self._kernel_takes_tensors = _takes([p for group in self.param_groups for p in group["params"]])
        return self._kernel_takes_tensors and not any(
            group["amsgrad"]
            or group["maximize"]
            or group["capturable"]
            or group["differentiable"]
            or isinstance(group["lr"], torch.Tensor)
            for group in self.param_groups
        )

    def _torch_step(self, scale: torch.Tensor | None, closure: Any) -> Any:
        step = torch.optim.AdamW.step
        # Hooks have run already, around `step` above: torch wraps the step of every optimizer class that is made.
        step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        if scale is None:
            return step(self, closure)
        # torch's kernel divides by `grad_scale` (torch/optim/adam.py, _fused_adam), which its own GradScaler sets too.
        self.grad_scale = 1.0 / scale
        try:
            return step(self, closure)
        finally:
            del self.grad_scale

    def _update(self, group: dict[str, Any], scale: torch.Tensor | None) -> None:
        from hf_speedkit.kernels.adamw_triton import adamw_

        lists: tuple[list[torch.Tensor], ...] = ([], [], [], [], [], [])
        params, grads, means, squares, _, steps = lists
        self._init_group(group, *lists)  # type: ignore[no-untyped-call]
        if not params:
            return
        torch._foreach_add_(steps, 1)
        settings: dict[str, Any] = {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "log_betas": tuple(math.log(beta) if beta > 0 else -1e9 for beta in group["betas"]),
            "one_minus_betas": tuple(1 - beta for beta in group["betas"]),
        }
        for param, grad, mean, square, step in zip(params, grads, means, squares, steps, strict=True):
            held = _local(param)
            if held.numel():  # a rank may hold no row of a small tensor
                adamw_(held, _local(grad).contiguous(), _local(mean), _local(square), _local(step), scale, **settings)


@torch.no_grad()
def fused_adamw_error(device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference between FusedAdamW and torch's fused AdamW after three clipped steps on random tensors.

    Relative to the length of an update, so that 0.01 is a hundredth of what a step changes. The gradients are clipped
    by a power of two, which rounds nothing. Also the kernel's warm-up: it is compiled here, not in step 1.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)

    def random() -> torch.Tensor:
        return torch.randn(10_007, generator=generator).to(device=device, dtype=dtype)

    start, gradients = random() * 2**-6, [random() for _ in range(3)]
    ours, theirs = start.clone(), start.clone()
    mine = FusedAdamW([ours], lr=2**-4, weight_decay=0.1)
    stock = torch.optim.AdamW([theirs], lr=2**-4, weight_decay=0.1, fused=True)
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient * 2**-3
        mine._scale = torch.tensor(2.0**-3, device=device)
        mine.step()
        stock.step()
    return ((ours.double() - theirs.double()).abs().max() / 2**-4).item()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _takes(parameters: list[torch.Tensor]) -> bool:
    """Whether the Triton kernel can update all of these: contiguous floating point on one GPU."""
    return (
        _has_triton()
        and len({p.device for p in parameters}) == 1
        and all(p.device.type == "cuda" and p.is_floating_point() and _local(p).is_contiguous() for p in parameters)
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_of_squares(grads: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares over all ranks, each element once: one all_reduce for each way of sharding."""
    by_layout: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else grad.device
        by_layout.setdefault(layout, []).append(_local(grad))
    if not by_layout:
        return torch.zeros(())
    totals = []
    for layout, tensors in by_layout.items():
        total = _local_sum(tensors)
        if isinstance(layout, tuple):
            mesh, placements = layout
            for dim, placement in enumerate(placements):
                if placement.is_partial():
                    raise ValueError(
                        f"a gradient placed as {placement} is a sum over ranks that nobody has taken yet, so it can be "
                        "neither clipped nor applied here; fused_optimizer=False leaves both to torch"
                    )
                if not placement.is_replicate():  # a strided shard (FSDP2 over tensor parallelism) is no Shard to torch
                    torch.distributed.all_reduce(total, group=mesh.get_group(dim))
        totals.append(total)
    return torch.stack([total.to(totals[0].device) for total in totals]).sum()


def _local_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), device=tensors[0].device)
    if filled[0].device.type == "cuda" and _has_triton():
        from hf_speedkit.kernels.adamw_triton import sums_of_squares

        return sums_of_squares([tensor.contiguous() for tensor in filled])
    return torch.stack([tensor.float().square().sum() for tensor in filled]).sum()
