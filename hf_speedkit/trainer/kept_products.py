"""Outputs of a checkpointed layer's matrix products, kept from its forward pass for its recomputation.

Of what a layer computes twice under activation checkpointing, its products take most of the time and little of the
memory: an output of 1 GiB in bf16 costs `in_features` x 1.1 TFLOP, 8 ms on an H200 at 5,120, and all that a layer would
keep without checkpointing costs 5.4 ms a GiB. Norms, activations and attention are computed again. The numbers are the
same: what is kept is what would be computed.

TRL's selective checkpointing keeps the outputs of sdpa and flash-attn operations (trl 1.16). torch's own
(`create_selective_checkpoint_contexts`) looks at every operation from Python; here a few modules are looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_speedkit.trainer.layer_marks import recomputes

_FLOPS = "speedkit_kept_flops_per_token"


class KeptProducts:
    """The plain linear maps of one checkpointed layer, whose outputs can be kept.

    Args:
        layer: the layer; each `torch.nn.Linear` in it without a bias counts, if nothing else overrides its forward.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._maps = [_Map(module) for module in layer.modules() if isinstance(module, nn.Linear) and _is_plain(module)]
        self._on = False

    @property
    def bytes(self) -> int:
        """What the last forward pass that was recomputed would keep: products that recomputation never comes to, the
        layer's last, are not counted. 0 before."""
        return sum(one.bytes for one in self._maps if one.needed)

    def watch(self) -> None:
        """Note the sizes in the next pass, and keep nothing."""
        for one in self._maps:
            one.watch()

    def switch(self, on: bool) -> None:
        """Keep them from the next forward pass on, or do not. Belongs between two steps."""
        for one in self._maps:
            one.switch(on and one.needed)
        self._layer.__dict__.pop(_FLOPS, None)
        if on:
            self._layer.__dict__[_FLOPS] = 2.0 * sum(one.weights for one in self._maps if one.needed)

    def begin_step(self) -> None:
        """Forget forward passes whose backward pass never came."""
        for one in self._maps:
            one.forget()


def kept_flops_per_token(layer: nn.Module) -> float:
    """FLOPs a token that a checkpointed layer does not compute again, since their outputs are kept."""
    return float(layer.__dict__.get(_FLOPS, 0.0))


def _is_plain(module: nn.Linear) -> bool:
    # Subclasses (quantised ones, adapters) compute something else, and so does what overrides the forward.
    return type(module) is nn.Linear and "bias" not in dict(module.named_parameters()) and "forward" not in vars(module)


class _Map:
    """One linear map.

    Args:
        module: it.
    """

    def __init__(self, module: nn.Linear) -> None:
        self._module = module
        self._keeps = False
        self._open = 0
        self._overlap = False
        self._kept: tuple[torch.Tensor, int] | None = None
        self.weights = module.in_features * module.out_features
        self.bytes = 0
        self.needed = False

    def watch(self) -> None:
        self._keeps = self.needed = False
        self.forget()
        self._module.forward = self._forward  # type: ignore[method-assign]

    def switch(self, on: bool) -> None:
        self._keeps = on
        self.forget()
        if on:
            self._module.forward = self._forward  # type: ignore[method-assign]
        elif self._module.__dict__.get("forward") == self._forward:
            del self._module.forward

    def forget(self) -> None:
        self._kept, self._open, self._overlap = None, 0, False

    def _forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's own name)
        weight = self._module.weight
        self.needed = self.needed or recomputes()
        kind: type = type(weight.data)  # a DTensor where weights are split over ranks
        plain = kind is torch.Tensor and input.dtype == weight.dtype
        if not torch.is_grad_enabled() or not plain or torch.is_autocast_enabled(input.device.type):
            return nn.functional.linear(input, weight)
        output: torch.Tensor = _Product.apply(input, weight, self)  # type: ignore[no-untyped-call]
        if not recomputes():
            self._put(output)
        return output

    def _put(self, output: torch.Tensor) -> None:
        self.bytes = output.untyped_storage().nbytes()
        if not self._keeps:
            return
        self._open += 1
        # With two forward passes before a backward pass it is not known whose recomputation comes first.
        self._overlap = self._overlap or self._open > 1
        kept = output.detach()
        self._kept = None if self._overlap else (kept, kept._version)

    def take(self) -> torch.Tensor | None:
        """What the forward pass made; None where it is not there, or was written to since."""
        if not self._keeps or not recomputes():
            return None
        found, self._kept = self._kept, None
        self._open = max(0, self._open - 1)
        self._overlap = self._overlap and self._open > 0
        if found is None or found[0]._version != found[1]:
            return None
        return found[0]


class _Product(torch.autograd.Function):
    """input @ weight.T, which in a recomputation takes what is kept.

    The same function in both passes: checkpointing compares what they save.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, kept: _Map) -> torch.Tensor:  # noqa: A002
        ctx.save_for_backward(input, weight)
        output = kept.take()
        return nn.functional.linear(input, weight) if output is None else output.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors  # noqa: A001
        rows = gradient.reshape(-1, gradient.shape[-1])
        to_input = (rows @ weight).view_as(input) if ctx.needs_input_grad[0] else None
        to_weight = rows.t() @ input.reshape(-1, input.shape[-1]) if ctx.needs_input_grad[1] else None
        return to_input, to_weight, None
