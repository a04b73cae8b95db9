"""Holds a fused forward against the layer's own forward in float32: outputs and every gradient, on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_speedkit.kernels.fused_forwards import GATED_NORM, SWIGLU, Forward
from hf_speedkit.kernels.probe import TOLERANCES, first_words

Found = TypeVar("Found")

COMPARED_ROWS = 16_384
"""Rows that are compared; further ones run, because some kernels are chosen by the number of rows."""

MLP_ROWS = 1_024
"""Rows for an MLP: no kernel of those is chosen by their number, and 8,192 rows of 34,816 would take gigabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What a comparison showed.

    Args:
        problem: what is wrong; None if nothing is.
        error: largest relative error of the output and the gradients; None where none was computed.
        first_call_s: time of the first forward and backward, compilation included.
    """

    problem: str | None = None
    error: float | None = None
    first_call_s: float | None = None


def compare(
    module: nn.Module, forward: Forward, part: str, *, rows: int, device: torch.device, dtype: torch.dtype
) -> Parity:
    """Run `forward` and the layer's own forward on the same random rows.

    Args:
        module: the layer; only its class, settings and sizes are used, never its weights, so sharded ones will do.
        forward: (module, inputs ...) -> output.
        part: what the layer is, see `fused_forwards.part_of`.
        rows: positions (times heads) that training hands it at once.
        device, dtype: of the activations.
    """
    generator = torch.Generator(device).manual_seed(0)
    rows = min(rows, MLP_ROWS) if part == SWIGLU else rows
    inputs = _inputs(module, part, rows, device, dtype, generator)
    weights = _weights(module, device, generator)
    examined = min(rows, COMPARED_ROWS)
    own = type(module).forward
    exact_inputs = [value[:, :examined].float() for value in inputs]
    exact_weights = {name: value.float() for name, value in weights.items()}
    incoming = torch.randn(own_shape(inputs, part), generator=generator, device=device).to(dtype)
    incoming[:, examined:] = 0
    expected, _ = _run(module, own, exact_inputs, exact_weights, incoming[:, :examined].float())
    plain_type = _run(module, own, [value[:, :1] for value in inputs], weights, incoming[:, :1])[0]["the output"].dtype
    outcome = first_run(lambda: _run(module, forward, inputs, weights, incoming), device)
    if isinstance(outcome, Parity):
        return outcome
    (found, _), seconds = outcome
    if found["the output"].dtype != plain_type:
        return Parity(problem=f"its output is {found['the output'].dtype}, the layer's is {plain_type}")
    return not_finite(found) or judge(found, expected, weights, examined, TOLERANCES[dtype], seconds)


def first_run(run: Callable[[], Found], device: torch.device) -> tuple[Found, float] | Parity:
    """What a forward that is to be proven gives, and the seconds of its first call; its problem where it raises."""
    began = time.perf_counter()
    try:
        found = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an asynchronous fault must show here
    except Exception as error:  # noqa: BLE001 (whatever a kernel raises is the finding)
        return Parity(problem=f"it raises {first_words(error)}")
    return found, time.perf_counter() - began


def not_finite(found: Mapping[str, Tensor]) -> Parity | None:
    """The problem where something has a number that is none, in rows that are not compared as well."""
    for name, value in found.items():
        if not bool(torch.isfinite(value).all()):
            return Parity(problem=f"{name} is not finite")
    return None


def other_dtype(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Parity | None:
    """The problem where something has another dtype than the layer's own, by name."""
    for name, wanted in expected.items():
        if found[name].dtype != wanted.dtype:
            return Parity(problem=f"{name} is {found[name].dtype}, the layer's is {wanted.dtype}")
    return None


def multiplies_by_one_plus_weight(module: nn.Module) -> bool:
    """Whether a norm is centred on zero: with a weight of 0 it lets its input through."""
    (weight,) = (value for value in module.parameters(recurse=False))
    size, dtype = weight.shape[0], torch.float32
    twin = plain_twin(module, {"weight": torch.zeros(size, dtype=dtype)})
    inputs = [torch.ones(1, 1, size, dtype=dtype)] * (2 if type(module).__name__.endswith("Gated") else 1)
    with torch.no_grad():
        return bool(type(module).forward(twin, *inputs).any())


def own_shape(inputs: list[Tensor], part: str) -> tuple[int, ...]:
    """Shape of the output: an MLP's two halves become one."""
    batch, rows, width = inputs[0].shape
    return (batch, rows, width // 2) if part == SWIGLU else (batch, rows, width)


def judge(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    whole: Container[str],
    examined: int,
    tolerance: float,
    seconds: float,
) -> Parity:
    """The largest relative error of what was found, or the first problem.

    Args:
        found, expected: outputs and gradients by name.
        whole: names of those without a dimension of rows; of all others, [1, rows ...], the first `examined` count.
        tolerance: largest relative error.
        seconds: of the first call.
    """
    worst = 0.0
    for name, wanted in expected.items():
        value = found[name].float()
        value = value if name in whole else value[:, :examined]
        error = float((value - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30))
        if not error <= tolerance:
            return Parity(problem=f"{name} is off by {error:.1%} (tolerance {tolerance:.1%})", error=error)
        worst = max(worst, error)
    return Parity(error=worst, first_call_s=seconds)


def _run(
    module: nn.Module, forward: Forward, inputs: list[Tensor], weights: Mapping[str, Tensor], incoming: Tensor
) -> tuple[dict[str, Tensor], nn.Module]:
    # Clones: Liger's SwiGLU writes its gradients into the tensors it was given.
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    twin = plain_twin(module, weights)
    parameters = dict(twin.named_parameters(recurse=False))
    with torch.enable_grad(), torch.autocast(incoming.device.type, enabled=False):
        output = forward(twin, *leaves)
        values = torch.autograd.grad(output, [*leaves, *parameters.values()], incoming.to(output.dtype))
    names = [*(f"the gradient of input {place + 1}" for place in range(len(leaves))), *parameters]
    return {"the output": output.detach(), **dict(zip(names, values, strict=True))}, twin


def plain_twin(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """The layer with other weights, sharing nothing that is written to."""
    # Not copy.copy: FSDP2 gives the layer a class whose __new__ makes a new layer, and fails (torch 2.13).
    classes = (c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))
    plain: type[nn.Module] = next(classes)
    twin = plain.__new__(plain)
    twin.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    twin._parameters = {name: nn.Parameter(value.detach().clone()) for name, value in weights.items()}
    if "gate_proj" in module._modules:
        halves = {"gate_proj": _Half(0), "up_proj": _Half(1), "down_proj": nn.Identity()}
        twin._modules = {**module._modules, **halves}
    return twin


class Given(nn.Module):
    """Stands for a projection: gives what was drawn, whatever comes in, so that no large product is made."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output
        self.out_features = output.shape[-1]

    def forward(self, _: Tensor) -> Tensor:
        """What was drawn."""
        # As of a linear layer: something computed, not a leaf.
        return self.output * 1


class _Half(nn.Module):
    """Stands for a projection: hands on one half of its input, so that no large product is made."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, dim=-1)[self.which].contiguous()


def _inputs(
    module: Any, part: str, rows: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    width = 2 * module.up_proj.out_features if part == SWIGLU else module.weight.shape[0]
    count = 2 if part == GATED_NORM else 1
    return [torch.randn(1, rows, width, generator=generator, device=device).to(dtype) for _ in range(count)]


def _weights(module: nn.Module, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        name: (0.5 * torch.randn(value.shape, generator=generator, device=device)).to(value.dtype)
        for name, value in module._parameters.items()
        if value is not None
    }
