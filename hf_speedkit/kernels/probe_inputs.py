"""Random inputs for the probe, laid out in memory the way the layers lay them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hf_speedkit.kernels import reference

MAX_HEADS = 4
"""Value heads of a probe: kernels treat heads alike, and the float64 reference pays for each."""

MAX_CHANNELS = 1024
"""Channels of a convolution probe, for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Inputs of one packed row, how a layer calls a function with them, and what should come out.

    Args:
        inputs: named tensors. The first ("row") is [1, T, C]: what the layer splits into views.
        shared: names of the inputs without a position (weights), which belong to no document.
        borders: document borders, from 0 to T.
        incoming: gradient of the output, [1, T, ...].
        layer_call: (function, inputs, borders as int32) -> output [1, T, ...].
        parts: name -> width, the parts of "row" whose gradients are looked at one by one.
        oracle: the reference, called like the function.
    """

    inputs: dict[str, Tensor]
    shared: tuple[str, ...]
    borders: tuple[int, ...]
    incoming: Tensor
    layer_call: Callable[[Callable[..., Any], dict[str, Tensor], Tensor], Tensor]
    parts: dict[str, int]
    oracle: Callable[..., Any]

    @property
    def device(self) -> torch.device:
        """Where the function runs."""
        return self.incoming.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        return self.incoming.dtype

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Every input that must get a gradient, the parts of the row by their own names."""
        return (*self.parts, *(name for name in self.inputs if name != "row"))

    def call(self, function: Callable[..., Any]) -> Tensor:
        """Output of `function` on these inputs, called as the layer calls it."""
        borders = torch.tensor(self.borders, dtype=torch.int32, device=self.device)
        return self.layer_call(function, self.inputs, borders)

    def gradients(self, output: Tensor) -> dict[str, Tensor | None]:
        """Gradient of every input by name; None where none arrives."""
        # Through a split, so that the gradient comes in the way it does in the layer: put together from views (V54).
        half = max(1, output.shape[2] // 2)
        pieces = zip(torch.split(output, half, dim=2), torch.split(self.incoming, half, dim=2), strict=True)
        loss = torch.stack([(piece * weight).sum() for piece, weight in pieces]).sum()
        values = torch.autograd.grad(loss, list(self.inputs.values()), allow_unused=True)
        named: dict[str, Tensor | None] = dict(zip(self.inputs, values, strict=True))
        row = named.pop("row")
        if row is None:
            return {**dict.fromkeys(self.parts), **named}
        return {**dict(zip(self.parts, torch.split(row, list(self.parts.values()), dim=-1), strict=True)), **named}

    def reference(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Output and gradients of the oracle, from the same rounded inputs, in float64 on the CPU."""
        exact = replace(
            self,
            inputs={
                name: value.detach().to("cpu", torch.float64).requires_grad_() for name, value in self.inputs.items()
            },
            incoming=self.incoming.to("cpu", torch.float64),
        )
        with torch.enable_grad():
            output = exact.call(self.oracle)
            gradients = exact.gradients(output)
        return output.detach(), {name: value for name, value in gradients.items() if value is not None}

    def with_documents_of(self, other: Example, documents: Iterable[int]) -> Example:
        """The same row, with some documents taken from `other`; weights stay."""
        inputs = {name: value.detach().clone() for name, value in self.inputs.items()}
        for document in documents:
            place = slice(self.borders[document], self.borders[document + 1])
            for name, value in inputs.items():
                if name not in self.shared:
                    value[:, place] = other.inputs[name].detach()[:, place]
        return replace(self, inputs=inputs)


def convolution_example(
    lengths: Sequence[int],
    *,
    channels: int,
    width: int,
    activation: str | None,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> Example:
    """Inputs for `causal_conv1d_fn` as the layers call it: x is [1, C, T], a transposed view of the projection."""
    draw = _Draw(seed, device, dtype)
    slots, channels = sum(lengths), min(channels, MAX_CHANNELS)

    def layer_call(function: Callable[..., Any], inputs: dict[str, Tensor], borders: Tensor) -> Tensor:
        positions = torch.arange(slots, dtype=torch.int32, device=borders.device)
        seq_idx = torch.searchsorted(borders[1:].contiguous(), positions, right=True).to(torch.int32)[None]
        x, weight = inputs["row"].transpose(1, 2), inputs["weight"]
        output: Tensor = function(x, weight, None, activation=activation, seq_idx=seq_idx)
        return output.transpose(1, 2)

    return Example(
        inputs={"row": draw.normal(1, slots, channels), "weight": draw.normal(channels, width)},
        shared=("weight",),
        borders=(0, *accumulate(lengths)),
        incoming=draw.normal(1, slots, channels).detach(),
        layer_call=layer_call,
        parts={"x": channels},
        oracle=reference.causal_conv1d_fn,
    )


def delta_rule_example(
    lengths: Sequence[int], *, sizes: Sequence[int], device: torch.device, dtype: torch.dtype, seed: int
) -> Example:
    """Inputs for `chunk_gated_delta_rule` as the layers call it: q, k and v are views of one row.

    The decay is slow (at most 2 % a position): with the decay of a fresh model a leak dies out below bfloat16 noise
    before it is seen (V04 in the public reports).

    Args:
        lengths: of the documents.
        sizes: key heads, value heads, key head size, value head size.
        device, dtype, seed: as usual.
    """
    draw = _Draw(seed, device, dtype)
    slots, (key_heads, value_heads, key_size, value_size) = sum(lengths), sizes
    group = max(1, value_heads // key_heads)
    key_heads = max(1, min(key_heads, MAX_HEADS // group))
    value_heads = key_heads * group
    widths = {"q": key_heads * key_size, "k": key_heads * key_size, "v": value_heads * value_size}

    def layer_call(function: Callable[..., Any], inputs: dict[str, Tensor], borders: Tensor) -> Tensor:
        q, k, v = torch.split(inputs["row"], list(widths.values()), dim=-1)
        output: Tensor = function(
            q.reshape(1, slots, -1, key_size),
            k.reshape(1, slots, -1, key_size),
            v.reshape(1, slots, -1, value_size),
            g=inputs["g"],
            beta=inputs["beta"],
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=borders,
        )[0]
        return output

    return Example(
        inputs={
            "row": draw.normal(1, slots, sum(widths.values())),
            # The layers compute the decay in float32 whatever the dtype of the activations.
            "g": draw.uniform(-0.02, 0.0, 1, slots, value_heads, dtype=torch.promote_types(dtype, torch.float32)),
            "beta": draw.uniform(0.1, 1.0, 1, slots, value_heads, dtype=dtype),
        },
        shared=(),
        borders=(0, *accumulate(lengths)),
        incoming=draw.normal(1, slots, value_heads, value_size).detach(),
        layer_call=layer_call,
        parts=widths,
        oracle=reference.chunk_gated_delta_rule,
    )


class _Draw:
    """Random leaves from a generator of their own: the job's random state stays as it is."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device
        self._dtype = dtype

    def normal(self, *shape: int) -> Tensor:
        value = torch.randn(shape, generator=self._generator)
        return value.to(self._device, self._dtype).requires_grad_()

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype) -> Tensor:
        value = low + (high - low) * torch.rand(shape, generator=self._generator)
        return value.to(self._device, dtype).requires_grad_()
