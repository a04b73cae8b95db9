"""Holds a GatedDeltaNet's split forward against its own on one packed row: the output and every gradient.

Both call the same convolution and the same rule in the same dtype, so they have to agree but for the order of sums; how
right those functions are is the probe's matter. Only class, settings and sizes of the live layer are used: projections
are stood in for by what they would give, so sharded, adapted and quantised ones will do, and no large product is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hf_speedkit.kernels.fused_forwards import Forward
from hf_speedkit.kernels.fused_parity import (
    COMPARED_ROWS,
    Given,
    Parity,
    first_run,
    judge,
    other_dtype,
    plain_twin,
)
from hf_speedkit.kernels.gated_delta_forward import projection_widths
from hf_speedkit.kernels.probe import EDGE_LENGTHS, first_words
from hf_speedkit.kernels.probe_batch import Draw, batch_keys

SAME = 1e-5
"""Largest relative error in float32. In half precision it is half a unit in the last place, 0.4 % in bfloat16: the
convolution's kernel adds up the gradient of its weight in whatever order blocks end, and rounds the sum once."""


def compare_split(layer: Any, forward: Forward, *, slots: int, device: torch.device, dtype: torch.dtype) -> Parity:
    """Run `forward` and the layer's own forward on the same packed row.

    Args:
        layer: the layer; its weights are not read.
        forward: (module, hidden_states, ...) -> output.
        slots: of training's row. On a CPU the row is as long as its documents.
        device, dtype: of the activations.
    """
    borders = _borders(slots, device)
    draw = Draw(0, device, dtype)
    leaves = _leaves(layer, borders[-1], draw, dtype)
    incoming = draw.normal(1, borders[-1], layer.value_dim).detach()
    tolerance = max(SAME, torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0.0)
    twin = _twin(layer, leaves)
    try:
        expected = _run(twin, type(layer).forward, leaves, borders, incoming)
    except Exception as error:  # noqa: BLE001 (a layer that cannot be called like this cannot be compared)
        return Parity(problem=f"the layer's own forward raises {first_words(error)}")
    outcome = first_run(lambda: _run(twin, forward, leaves, borders, incoming), device)
    if isinstance(outcome, Parity):
        return outcome
    found, seconds = outcome
    return other_dtype(found, expected) or judge(found, expected, expected, 0, tolerance, seconds)


def _borders(slots: int, device: torch.device) -> tuple[int, ...]:
    """Documents of every awkward length, and one that fills the row where kernels are chosen by its length."""
    borders = (0, *accumulate(EDGE_LENGTHS))
    slots = min(slots, COMPARED_ROWS)
    return (*borders, slots) if device.type == "cuda" and slots > borders[-1] else borders


def _leaves(layer: Any, slots: int, draw: Draw, dtype: torch.dtype) -> dict[str, Tensor]:
    """What gets a gradient, by name: outputs of the projections [1, T, channels] and the layer's small weights."""
    leaves = {name: draw.normal(1, slots, width) for name, width in projection_widths(layer).items()}
    exact = torch.float32
    weights = {
        "A_log": (layer.A_log, draw.uniform(0.0, 2.0, *layer.A_log.shape, dtype=exact)),
        "dt_bias": (layer.dt_bias, draw.uniform(-4.0, -1.0, *layer.dt_bias.shape, dtype=exact)),
        "conv1d.weight": (layer.conv1d.weight, draw.normal(*layer.conv1d.weight.shape, dtype=exact)),
    }
    if layer.conv1d.bias is not None:
        weights["conv1d.bias"] = layer.conv1d.bias, draw.normal(*layer.conv1d.bias.shape, dtype=exact)
    for name, (own, value) in weights.items():
        # FSDP2, whose weights have a mesh, hands them over in the dtype of the activations.
        kind = dtype if hasattr(own, "device_mesh") else own.dtype
        leaves[name] = value.detach().to(kind).requires_grad_()
    return leaves


def _twin(layer: nn.Module, leaves: Mapping[str, Tensor]) -> nn.Module:
    twin = plain_twin(layer, {})
    twin.__dict__.update(A_log=leaves["A_log"], dt_bias=leaves["dt_bias"])
    convolution = _Weights(leaves["conv1d.weight"], leaves.get("conv1d.bias"))
    given = {name: Given(leaves[name]) for name in projection_widths(layer)}
    twin._modules = {"conv1d": convolution, "norm": _Gate(), "out_proj": nn.Identity(), **given}
    return twin


class _Weights(nn.Module):
    """Stands for the convolution, of which a GatedDeltaNet only reads the weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias


class _Gate(nn.Module):
    """Stands for the gated norm: neither of its inputs can take the other's place."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return hidden_states * gate.sigmoid()


def _run(
    twin: nn.Module, forward: Forward, leaves: Mapping[str, Tensor], borders: tuple[int, ...], incoming: Tensor
) -> dict[str, Tensor]:
    hidden_states = incoming[..., :1]  # only its shape is read
    with torch.enable_grad(), torch.autocast(incoming.device.type, enabled=False):
        output = forward(twin, hidden_states, **batch_keys(borders, incoming.device))
        gradients = torch.autograd.grad(output, list(leaves.values()), incoming.to(output.dtype))
    named = {f"the gradient of {name}": value for name, value in zip(leaves, gradients, strict=True)}
    return {"the output": output.detach(), **named}
