"""Outputs of a checkpointed layer's matrix products, kept from its forward pass for its recomputation.

Of what a layer computes twice under activation checkpointing, its products take most of the time and little of the
memory: an output of 1 GiB in bf16 costs `in_features` x 1.1 GFLOP, by estimate 8 ms on an H200 at 5,120, and all that a
layer would keep without checkpointing 5.4 ms a GiB. A step of a 27B on two H200 takes 5 % less time with the products
of 45 layers than with 22 layers left alone (benchmarks/NOTES.md). Norms, activations and attention are computed again.
The numbers are the same: what is kept is what would be computed.

TRL's selective checkpointing keeps the outputs of sdpa and flash-attn operations (trl 1.16). torch's own
(`create_selective_checkpoint_contexts`) looks at every operation from Python; here a few modules are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mode
from typing import Any

import torch
from torch import nn

from hf_speedkit.trainer.memory.layer_marks import recomputes

_FLOPS = "speedkit_kept_flops_per_token"

_Take = Callable[[], torch.Tensor | None]


class KeptProducts:
    """The plain linear maps of one checkpointed layer, whose outputs can be kept.

    Args:
        layer: the layer; each `torch.nn.Linear` in it without a bias counts, if nothing else overrides its forward. Not
            those of LoRA: of `lora_B` an output in fp32 is twice that of the map beside it, for a product of 16 inputs.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        linears = ((name, one) for name, one in layer.named_modules() if isinstance(one, nn.Linear) and _is_plain(one))
        self._maps = [_Map(module) for name, module in linears if not {"lora_A", "lora_B"} & set(name.split("."))]

    @property
    def bytes(self) -> int:
        """What the last forward pass that was recomputed would keep: products that recomputation never comes to, the
        layer's last, are not counted. 0 before."""
        return sum(one.bytes for one in self._maps if one.can_keep)

    def watch(self, *, compare: bool = False) -> None:
        """Note the sizes in the next pass, and give nothing of it to the recomputation.

        Args:
            compare: hold the outputs of that pass, and see whether the recomputation makes the same: a kernel that
                writes into a product without telling torch is found only so (`overwritten`).
        """
        for one in self._maps:
            one.watch(compare)

    @property
    def overwritten(self) -> frozenset[int]:
        """Which maps' outputs were found to be others than they were made; their places among the layer's maps."""
        return frozenset(place for place, one in enumerate(self._maps) if one.overwritten)

    def refuse(self, places: frozenset[int]) -> None:
        """Never keep these maps' outputs: in a layer of the same kind they were found overwritten."""
        for place in places:
            self._maps[place].overwritten = True

    def switch(self, on: bool) -> None:
        """Keep them from the next forward pass on, or do not. Belongs between two steps."""
        for one in self._maps:
            one.switch(on and one.can_keep)
        self._layer.__dict__.pop(_FLOPS, None)
        if on and (kept := [one for one in self._maps if one.can_keep]):
            # A map may see some of the rows, or more of them (heads): most of a layer's see what the layer sees.
            rows = mode(one.rows for one in self._maps if one.rows)
            self._layer.__dict__[_FLOPS] = 2.0 * sum(one.weights * one.rows for one in kept) / rows

    def begin_step(self) -> None:
        """Forget forward passes whose backward pass never came."""
        for one in self._maps:
            one.forget()


def kept_flops_per_token(layer: nn.Module) -> float:
    """FLOPs a token that a checkpointed layer does not compute again, since their outputs are kept."""
    return float(layer.__dict__.get(_FLOPS, 0.0))


def _is_plain(module: nn.Linear) -> bool:
    # Subclasses (quantised ones, adapters) compute something else, and so does what overrides the forward.
    return type(module) is nn.Linear and getattr(module, "bias", None) is None and "forward" not in vars(module)


class _Map:
    """One linear map.

    Args:
        module: it.
    """

    def __init__(self, module: nn.Linear) -> None:
        self._module = module
        self._keeps = False
        self._needed = False
        self._waits = False
        self._overlap = False
        self._run_again = False
        self._calls = 0
        self._often = False
        self._kept: tuple[torch.Tensor, int] | None = None
        self._compares = False
        self.overwritten = False
        self.weights = module.in_features * module.out_features
        self.bytes = self.rows = 0

    @property
    def can_keep(self) -> bool:
        """Whether a forward pass made what a recomputation asked for; neither autocast's nor a reentrant one's does.

        And made it once: of a map that was called again before its recomputation nothing is kept (`_put`).
        """
        return self._needed and self.bytes > 0 and not self.overwritten and not self._often

    def watch(self, compare: bool) -> None:
        self._keeps = self._needed = self._often = False
        self._calls = 0
        self._compares = compare
        self.forget()
        self._module.forward = self._forward  # type: ignore[method-assign]

    def switch(self, on: bool) -> None:
        self._keeps, self._compares = on, False
        self.forget()
        if on:
            self._module.forward = self._forward  # type: ignore[method-assign]
        elif self._module.__dict__.get("forward") == self._forward:
            del self._module.forward

    def forget(self) -> None:
        self._kept, self._waits, self._overlap = None, False, False

    def _forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's own name)
        weight = self._module.weight

        def make(take: _Take | None) -> torch.Tensor:
            if take is None:
                return nn.functional.linear(input, weight)
            output: torch.Tensor = _Product.apply(input, weight, take)  # type: ignore[no-untyped-call]
            return output

        return self.through(input, make)

    def through(
        self,
        input: torch.Tensor,  # noqa: A002
        make: Callable[[_Take | None], torch.Tensor],
        *,
        beside: int = 0,
    ) -> torch.Tensor:
        """What `make` makes of an input, kept; `make` is given what takes a kept output, or None where none is kept.

        A fused adapter (`kernels/lora_forward.py`) calls this in the place of the forward: what is kept is its sum,
        and `beside` the size of its own matrix that is not multiplied again either.
        """
        self.weights = self._module.in_features * self._module.out_features + beside
        weight = self._module.weight
        kind: type = type(weight.data)  # a DTensor where weights are split over ranks
        plain = kind is torch.Tensor and input.dtype == weight.dtype
        if not torch.is_grad_enabled() or not plain or torch.is_autocast_enabled(input.device.type):
            return make(None)
        if not self._keeps:
            return self._watched(make(None))
        output = make(self.take)
        if not recomputes():
            self._put(output)
        return output

    def _watched(self, output: torch.Tensor) -> torch.Tensor:
        if recomputes():  # of a layer's last product it wants the input: it ends before, and does not come here
            self._needed = True
            self._often, self._calls = self._often or self._calls > 1, 0
            if (made := self.take()) is not None and not torch.equal(made, output):  # waits for the device, in step 1
                self.overwritten = True  # Liger's rotary embedding does it, in a kernel: no version counter moves
        else:
            self._calls += 1
            self.bytes, self.rows = output.untyped_storage().nbytes(), output.numel() // output.shape[-1]
            if self._compares:
                self._put(output)
        return output

    def _put(self, output: torch.Tensor) -> None:
        # With two forward passes before a backward pass it is not known whose recomputation comes first.
        self._overlap = self._overlap or self._waits
        self._waits = True
        kept = output.detach()
        self._kept = None if self._overlap or self._run_again else (kept, kept._version)

    def take(self) -> torch.Tensor | None:
        """What the forward pass made; None where it is not there, or was written to since."""
        if not recomputes():
            return None
        found, self._kept = self._kept, None
        self._waits = False
        if torch._C._autograd._get_current_graph_task_keep_graph():
            self._run_again = True  # a graph that is kept may be run again when the output of another pass lies here
        if found is None or found[0]._version != found[1]:
            return None
        return found[0]


class _Product(torch.autograd.Function):
    """input @ weight.T, which in a recomputation takes what is kept.

    The same function in both passes: checkpointing compares what they save.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, take: _Take) -> torch.Tensor:  # noqa: A002
        # As torch does: what a gradient that nobody needs would be made of is not held (LoRA's frozen weights).
        for_input, for_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        ctx.save_for_backward(input if for_weight else None, weight if for_input else None)
        output = take()
        return nn.functional.linear(input, weight) if output is None else output.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors  # noqa: A001
        rows = gradient.reshape(-1, gradient.shape[-1])
        to_input = None if weight is None else (rows @ weight).view(*gradient.shape[:-1], weight.shape[1])
        to_weight = None if input is None else rows.t() @ input.reshape(-1, input.shape[-1])
        return to_input, to_weight, None
