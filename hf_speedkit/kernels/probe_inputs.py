"""Random inputs for the probe, laid out in memory the way the layers lay them out.

Triton compiles and tunes a kernel anew for other head counts, head sizes, dtypes and, for some, other row lengths. So a
probe on a GPU runs at the layer's own sizes, on a row as long as training's, with the keys of training's batch: what it
compiles is what step 1 needs, and nothing else. Only a part of it is compared: the first documents of the row, and some
of the heads or channels, which kernels treat alike. The rest of the row is one long document without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hf_speedkit.kernels import reference
from hf_speedkit.kernels.probe_batch import Draw, batch_keys

MAX_HEADS = 4
"""Value heads that are compared: the float64 reference on the CPU pays for each."""

MAX_CHANNELS = 1024
"""Channels of a convolution that are compared, for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Inputs of one packed row, how a layer calls a function with them, and what should come out.

    Args:
        inputs: named tensors. The first ("row") is [1, T, C]: what the layer splits into views.
        shared: names of the inputs without a position (weights), which belong to no document.
        borders: document borders, from 0 to T.
        examined: how many documents, from the first, are compared.
        incoming: gradient of the output, [1, T, ...]; zero behind the documents that are compared.
        layer_call: (function, inputs, keys of the batch) -> output [1, T, ...].
        parts: name -> width, the parts of "row" whose gradients are looked at one by one.
        compared: parts, other inputs and "the output" -> how many of their columns (heads) are compared.
        smaller: the layer_call for the compared columns.
        oracle: the reference, called like the function.
    """

    inputs: dict[str, Tensor]
    shared: tuple[str, ...]
    borders: tuple[int, ...]
    examined: int
    incoming: Tensor
    layer_call: Callable[[Callable[..., Any], dict[str, Tensor], dict[str, Any]], Tensor]
    parts: dict[str, int]
    compared: dict[str, int]
    smaller: Callable[[Callable[..., Any], dict[str, Tensor], dict[str, Any]], Tensor]
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
    def documents(self) -> tuple[tuple[int, int], ...]:
        """Start and end of the documents that are compared."""
        return tuple(pairwise(self.borders[: self.examined + 1]))

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Every input that must get a gradient, the parts of the row by their own names."""
        return (*self.parts, *(name for name in self.inputs if name != "row"))

    def call(self, function: Callable[..., Any]) -> Tensor:
        """Output of `function` on these inputs, called as the layer calls it."""
        return self.layer_call(function, self.inputs, batch_keys(self.borders, self.device))

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

    def compared_part(self, name: str, value: Tensor) -> Tensor:
        """What is compared of an output or a gradient, as float64 on the CPU."""
        count = self.compared[name]
        part = value.detach()[:count] if name in self.shared else value.detach()[:, : self.documents[-1][1], :count]
        return part.to("cpu", torch.float64)

    def reference(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Output and gradients of the oracle for what is compared, from the same rounded inputs, in float64."""
        pieces = dict(zip(self.parts, torch.split(self.inputs["row"], list(self.parts.values()), dim=-1), strict=True))
        row = torch.cat([self.compared_part(name, piece) for name, piece in pieces.items()], dim=-1)
        others = {name: self.compared_part(name, value) for name, value in self.inputs.items() if name != "row"}
        exact = replace(
            self,
            inputs={name: value.requires_grad_() for name, value in {"row": row, **others}.items()},
            borders=self.borders[: self.examined + 1],
            incoming=self.compared_part("the output", self.incoming),
            layer_call=self.smaller,
            parts={name: self.compared[name] for name in self.parts},
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
    slots: int | None = None,
    weight_dtype: torch.dtype | None = None,
    bias: bool = False,
) -> Example:
    """Inputs for `causal_conv1d_fn` as the layers call it: x is [1, C, T], a transposed view of the projection.

    Args:
        lengths: of the documents that are compared.
        channels, width, activation: of the layer.
        device, dtype, seed: as usual.
        slots: length of the row; the sum of `lengths` if None or less.
        weight_dtype: of weight and bias, which autocast leaves in float32; `dtype` if None.
        bias: the layer has one.
    """
    draw, borders = Draw(seed, device, dtype), _borders(lengths, slots)

    def layer_call(function: Callable[..., Any], inputs: dict[str, Tensor], keys: dict[str, Any]) -> Tensor:
        x, weight = inputs["row"].transpose(1, 2), inputs["weight"]
        output: Tensor = function(x, weight, inputs.get("bias"), activation=activation, **keys)
        return output.transpose(1, 2)

    few = min(channels, MAX_CHANNELS)
    weights = {"weight": draw.normal(channels, width, dtype=weight_dtype)}
    if bias:
        weights["bias"] = draw.normal(channels, dtype=weight_dtype)
    return Example(
        inputs={"row": draw.normal(1, borders[-1], channels), **weights},
        shared=tuple(weights),
        borders=borders,
        examined=len(lengths),
        incoming=draw.incoming(sum(lengths), borders[-1], channels),
        layer_call=layer_call,
        parts={"x": channels},
        compared={"x": few, "the output": few, **dict.fromkeys(weights, few)},
        smaller=layer_call,
        oracle=reference.causal_conv1d_fn,
    )


def delta_rule_example(
    lengths: Sequence[int],
    *,
    sizes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    slots: int | None = None,
) -> Example:
    """Inputs for `chunk_gated_delta_rule` as the layers call it: q, k and v are views of one row.

    The decay is slow (at most 2 % a position) in every other value head: with the decay of a fresh model a leak dies
    out below bfloat16 noise before it is seen (V04 in the public reports). In the others it is strong, for which wrong
    gradients were reported (FlashQLA pull request 28).

    Args:
        lengths: of the documents that are compared.
        sizes: key heads, value heads, key head size, value head size.
        device, dtype, seed: as usual.
        slots: length of the row; the sum of `lengths` if None or less.
    """
    draw, borders = Draw(seed, device, dtype), _borders(lengths, slots)
    total, (key_heads, value_heads, key_size, value_size) = borders[-1], sizes
    group = max(1, value_heads // key_heads)
    few_keys = max(1, min(key_heads, MAX_HEADS // group))
    few_values = few_keys * group

    def call_with(heads: int) -> Callable[[Callable[..., Any], dict[str, Tensor], dict[str, Any]], Tensor]:
        widths = _rule_widths(heads, heads * group, key_size, value_size)

        def layer_call(function: Callable[..., Any], inputs: dict[str, Tensor], keys: dict[str, Any]) -> Tensor:
            q, k, v = torch.split(inputs["row"], list(widths.values()), dim=-1)
            others = {name: value for name, value in keys.items() if name != "cu_seq_lens_q"}
            output: Tensor = function(
                q.reshape(1, q.shape[1], -1, key_size),
                k.reshape(1, k.shape[1], -1, key_size),
                v.reshape(1, v.shape[1], -1, value_size),
                g=inputs["g"],
                beta=inputs["beta"],
                initial_state=None,
                output_final_state=False,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=keys["cu_seq_lens_q"],
                **others,
            )[0]
            return output

        return layer_call

    widths = _rule_widths(key_heads, value_heads, key_size, value_size)
    return Example(
        inputs={
            "row": draw.normal(1, total, sum(widths.values())),
            # The layers compute the decay in float32 whatever the dtype of the activations.
            "g": draw.decay(1, total, value_heads, dtype=torch.promote_types(dtype, torch.float32)),
            "beta": draw.uniform(0.1, 1.0, 1, total, value_heads, dtype=dtype),
        },
        shared=(),
        borders=borders,
        examined=len(lengths),
        incoming=draw.incoming(sum(lengths), total, value_heads, value_size),
        layer_call=call_with(key_heads),
        parts=widths,
        compared={
            **_rule_widths(few_keys, few_values, key_size, value_size),
            **dict.fromkeys(("g", "beta", "the output"), few_values),
        },
        smaller=call_with(few_keys),
        oracle=reference.chunk_gated_delta_rule,
    )


def attention_example(
    lengths: Sequence[int],
    *,
    module: torch.nn.Module,
    sizes: Sequence[int],
    settings: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    slots: int | None = None,
) -> Example:
    """Inputs for an attention implementation of transformers as the layers call it: [1, H, T, D], transposed views.

    Args:
        lengths: of the documents that are compared.
        module: the live layer, which implementations look at.
        sizes: query heads, key heads, head size.
        settings: keywords of the layer (`scaling`, `sliding_window`).
        device, dtype, seed: as usual.
        slots: length of the row; the sum of `lengths` if None or less.
    """
    draw, borders = Draw(seed, device, dtype), _borders(lengths, slots)
    query_heads, key_heads, size = sizes
    group = query_heads // key_heads
    few_keys = max(1, min(key_heads, MAX_HEADS // group))

    def call_with(heads: int) -> Callable[[Callable[..., Any], dict[str, Tensor], dict[str, Any]], Tensor]:
        widths = [heads * group * size, heads * size, heads * size]

        def layer_call(function: Callable[..., Any], inputs: dict[str, Tensor], keys: dict[str, Any]) -> Tensor:
            parts = torch.split(inputs["row"], widths, dim=-1)
            q, k, v = (part.reshape(1, part.shape[1], -1, size).transpose(1, 2) for part in parts)
            output: Tensor = function(module, q, k, v, None, dropout=0.0, **settings, **keys)[0]
            return output

        return layer_call

    widths = {"q": query_heads * size, "k": key_heads * size, "v": key_heads * size}
    few = {"q": few_keys * group * size, "k": few_keys * size, "v": few_keys * size}
    return Example(
        inputs={"row": draw.normal(1, borders[-1], sum(widths.values()))},
        shared=(),
        borders=borders,
        examined=len(lengths),
        incoming=draw.incoming(sum(lengths), borders[-1], query_heads, size),
        layer_call=call_with(key_heads),
        parts=widths,
        compared={**few, "the output": few_keys * group},
        smaller=call_with(few_keys),
        oracle=reference.causal_attention,
    )


def _rule_widths(key_heads: int, value_heads: int, key_size: int, value_size: int) -> dict[str, int]:
    return {"q": key_heads * key_size, "k": key_heads * key_size, "v": value_heads * value_size}


def _borders(lengths: Sequence[int], slots: int | None) -> tuple[int, ...]:
    borders = (0, *accumulate(lengths))
    return (*borders, slots) if slots is not None and slots > borders[-1] else borders
