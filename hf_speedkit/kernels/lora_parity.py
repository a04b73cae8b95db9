"""Holds a fused adapter's forward against peft's own in float32: the output and every gradient, on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_speedkit.kernels.fused_forwards import Forward
from hf_speedkit.kernels.fused_parity import (
    MLP_ROWS,
    Parity,
    first_run,
    judge,
    not_finite,
    other_dtype,
    plain_twin,
)
from hf_speedkit.kernels.lora_forward import active_adapters
from hf_speedkit.kernels.probe import TOLERANCES, first_words

_WIDEST = 32_768
"""Channels of a side: an adapted output layer of 248,320 words would take gigabytes, and shows no more."""


def compare_adapted(layer: Any, forward: Forward, *, slots: int, device: torch.device, dtype: torch.dtype) -> Parity:
    """Run `forward` and the layer's own forward on the same random rows, with random weights of like size.

    Args:
        layer: one that `why_not_adapted` has nothing against; only its class, settings and sizes are used.
        forward: (layer, x) -> output.
        slots: of training's row; at most `MLP_ROWS` run.
        device, dtype: of the activations, which the frozen weight is in when it is used.
    """
    values = _values(layer, min(slots, MLP_ROWS), device, dtype)
    incoming = values.pop("the output's gradient")
    exact = {name: value.float() for name, value in values.items()}
    own = type(layer).forward
    try:
        expected = _run(layer, own, exact, incoming.float())
        plain = _run(layer, own, {**values, "x": values["x"][:, :1]}, incoming[:, :1])
    except Exception as error:  # noqa: BLE001 (a layer that cannot be called like this cannot be compared)
        return Parity(problem=f"the layer's own forward raises {first_words(error)}")
    outcome = first_run(lambda: _run(layer, forward, values, incoming), device)
    if isinstance(outcome, Parity):
        return outcome
    found, seconds = outcome
    problem = other_dtype(found, plain) or not_finite(found)
    return problem or judge(found, expected, expected, 0, TOLERANCES[dtype], seconds)


def _values(layer: Any, rows: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Input and weights by name, such that map and adapter give as much of the output and of each gradient."""
    (name,) = active_adapters(layer)
    generator = torch.Generator(device).manual_seed(0)
    down, up, scaling = layer.lora_A[name], layer.lora_B[name], float(layer.scaling[name])
    wide, out, rank = min(layer.in_features, _WIDEST), min(layer.out_features, _WIDEST), down.out_features

    def draw(*shape: int, std: float = 1.0, kind: torch.dtype = dtype) -> Tensor:
        return (std * torch.randn(shape, generator=generator, device=device)).to(kind)

    # FSDP2, whose weights have a mesh, hands them over in the dtype of the activations.
    kinds = [dtype if hasattr(map_.weight, "device_mesh") else map_.weight.dtype for map_ in (down, up)]
    values = {
        "x": draw(1, rows, wide),
        "weight": draw(out, wide, std=wide**-0.5),
        "lora_A": draw(rank, wide, std=wide**-0.5, kind=kinds[0]),
        "lora_B": draw(out, rank, std=rank**-0.5 / max(abs(scaling), 1e-6), kind=kinds[1]),
        "the output's gradient": draw(1, rows, out),
    }
    return values if layer.base_layer.bias is None else {**values, "bias": draw(out)}


def _run(layer: Any, forward: Forward, values: Mapping[str, Tensor], incoming: Tensor) -> dict[str, Tensor]:
    leaves = {key: values[key].detach().clone().requires_grad_() for key in ("x", "lora_A", "lora_B")}
    twin = _twin(layer, {**values, **leaves})
    (name,) = twin.lora_A
    trained = {"lora_A": twin.lora_A[name].weight, "lora_B": twin.lora_B[name].weight}
    with torch.enable_grad(), torch.autocast(incoming.device.type, enabled=False):
        output = forward(twin, leaves["x"])
        gradients = torch.autograd.grad(output, [leaves["x"], *trained.values()], incoming.to(output.dtype))
    named = {f"the gradient of {key}": value for key, value in zip(("x", *trained), gradients, strict=True)}
    return {"the output": output.detach(), **named}


def _twin(layer: Any, values: Mapping[str, Tensor]) -> Any:
    """The layer with other weights and one adapter, sharing nothing that is written to."""
    (name,) = active_adapters(layer)
    twin = plain_twin(layer, {})
    base = _map(values["weight"], values.get("bias")).requires_grad_(False)
    adapters = {key: nn.ModuleDict({name: _map(values[key])}) for key in ("lora_A", "lora_B")}
    twin._modules = {**layer._modules, "base_layer": base, **adapters}
    return twin


def _map(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach())
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made
