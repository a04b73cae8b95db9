"""Holds a whole layer's fused functions against the layer's own torch fallbacks, where no reference of ours exists.

For Mamba's scans and Kimi delta attention: a copy of the live layer, with random weights, runs forward and backward on
its fused functions and, in float32 and one document at a time, on the functions that transformers would fall back to.
It sees what a probe of one function cannot: an adapter that a fused function reads past, a keyword that gets lost.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels.layout import LiveLayer, torch_fallback
from hf_speedkit.kernels.probe_batch import Draw, batch_keys

SLACK = 5.0
"""A layer rounds more often than one function: its projections, norms and gates come on top. Tiny layers of thirteen
families, in bf16 against themselves in float32 and without any kernel: outputs off by up to 1.1 %, gradients of the
input by up to 4.3 %. A tolerance of 2 % per function becomes 10 %."""

ROW_SLACK = 12.5
"""The same for the row of a weight that is worst: off by up to 10.2 % there, so 2 % becomes 25 %. A gradient that is
half as large again is off by 50 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutcome:
    """What running one layer showed.

    Args:
        verdict: FUSED, or what is wrong; UNVERIFIED where it could not be compared.
        detail: how well, why, or why not.
        first_call_s: time of the first forward and backward, compilation included; None where it was not taken.
    """

    verdict: KernelVerdict
    detail: str
    first_call_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Outputs and gradients of the inputs, [1, T, hidden] over all documents, and the gradients of the weights."""

    output: Tensor
    inputs: Tensor
    weights: Mapping[str, Tensor | None]


def probe_layer(
    layer: LiveLayer,
    module: nn.Module,
    *,
    hidden_size: int,
    lengths: tuple[int, ...],
    tolerance: float,
    dtype: torch.dtype | None,
    packed: bool,
) -> LayerOutcome:
    """Run a copy of one layer both ways and compare outputs and every gradient.

    Args:
        layer, module: the live layer; only a copy of it runs.
        hidden_size: of the model.
        lengths: of the documents.
        tolerance: of one function in this dtype.
        dtype: of the activations; the weights' own if None.
        packed: training hands the documents over as one row, with boundaries; otherwise one by one.
    """
    reason = _why_not(layer, module)
    if reason is not None:
        return _unknown(reason)
    weight = next(module.parameters())
    kind = dtype or weight.dtype
    draw = Draw(0, weight.device, torch.float32)
    values = draw.normal(1, sum(lengths), hidden_size).detach().to(kind)
    incoming = draw.normal(1, sum(lengths), hidden_size).detach().to(kind)
    tested = _copy_of(module, draw)
    exact = copy.deepcopy(tested).float()
    try:
        with _fallbacks_of(layer):
            wanted = _run(exact, values.float(), incoming.float(), lengths, packed=False, autocast=None)
    except Exception as error:  # noqa: BLE001 (a layer that cannot be called like this says nothing about its kernels)
        return _unknown(f"the layer raises with transformers' own functions: {_words(error)}")
    del exact
    autocast = kind if kind != weight.dtype else None
    began = time.perf_counter()
    try:
        found = _run(tested, values, incoming, lengths, packed=packed, autocast=autocast)
        if weight.device.type == "cuda":
            torch.cuda.synchronize(weight.device)  # an asynchronous fault must show here
        seconds = time.perf_counter() - began
        outcome = _judge(found, wanted, lengths, SLACK * tolerance)
        if packed and outcome.verdict is KernelVerdict.BROKEN:
            alone = _run(tested, values, incoming, lengths, packed=False, autocast=autocast)
            if _judge(alone, wanted, lengths, SLACK * tolerance).verdict is KernelVerdict.FUSED:
                return LayerOutcome(
                    verdict=KernelVerdict.NO_BOUNDARIES,
                    detail=f"documents alone agree with transformers' own functions, packed in one row "
                    f"{outcome.detail}",
                )
    except Exception as error:  # noqa: BLE001 (whatever a foreign kernel raises is the finding)
        return LayerOutcome(verdict=KernelVerdict.BROKEN, detail=f"the layer raises {_words(error)}")
    return LayerOutcome(verdict=outcome.verdict, detail=outcome.detail, first_call_s=seconds)


def _why_not(layer: LiveLayer, module: nn.Module) -> str | None:
    parameters = list(module.parameters())
    if not parameters or any(hasattr(parameter, "device_mesh") for parameter in parameters):
        return "its weights are sharded"
    if any(not parameter.is_floating_point() for parameter in parameters):
        return "its weights are quantised"
    if any(torch_fallback(function.called) is None for function in layer.functions):
        return "transformers' own function is not to be found"
    return None


def _copy_of(module: nn.Module, draw: Draw) -> nn.Module:
    """A copy in which every part of the layer matters: with weights as small as a fresh model's, a wrong gradient of
    the state would vanish beside the rest."""
    twin = copy.deepcopy(module).train()
    for name, parameter in twin.named_parameters():
        own = name.rpartition(".")[2]
        if own == "A_log":
            value = draw.uniform(0.0, 2.0, *parameter.shape, dtype=torch.float32)
        elif own in ("dt_bias", "dt_proj_bias") or name.endswith("dt_proj.bias"):
            value = draw.uniform(-4.0, -1.0, *parameter.shape, dtype=torch.float32)  # steps of 0.02 to 0.3
        elif parameter.dim() > 1:
            value = draw.normal(*parameter.shape, dtype=torch.float32) / parameter[0].numel() ** 0.5
        else:
            value = 0.1 * draw.normal(*parameter.shape, dtype=torch.float32) + (0.0 if own == "bias" else 1.0)
        parameter.data = value.detach().to(parameter.dtype)
        parameter.requires_grad_()  # also what the job has frozen: a gradient has to pass it
    return twin


@contextmanager
def _fallbacks_of(layer: LiveLayer) -> Iterator[None]:
    """Put transformers' torch functions where the layer looks its functions up."""
    before = {function.global_name: layer.namespace[function.global_name] for function in layer.functions}
    layer.namespace.update({function.global_name: torch_fallback(function.called) for function in layer.functions})
    try:
        yield
    finally:
        layer.namespace.update(before)


def _run(
    module: nn.Module,
    values: Tensor,
    incoming: Tensor,
    lengths: tuple[int, ...],
    *,
    packed: bool,
    autocast: torch.dtype | None,
) -> _Run:
    leaf = values.clone().requires_grad_()
    borders = (0, *accumulate(lengths))
    call: Callable[..., Any] = module
    with torch.enable_grad(), torch.autocast(leaf.device.type, dtype=autocast, enabled=autocast is not None):
        if packed:
            outputs = [_tensor(call(leaf, **batch_keys(borders, leaf.device)))]
        else:
            outputs = [_tensor(call(leaf[:, start:end])) for start, end in pairwise(borders)]
        output = torch.cat(outputs, dim=1)
        parameters = dict(module.named_parameters())
        leaves = [leaf, *parameters.values()]
        inputs, *weights = torch.autograd.grad(output, leaves, incoming.to(output.dtype), allow_unused=True)
    inputs = torch.zeros_like(leaf) if inputs is None else inputs
    gradients = dict(zip(parameters, weights, strict=True))
    return _Run(output=output.detach().float(), inputs=inputs.float(), weights=gradients)


def _tensor(output: Any) -> Tensor:
    value: Tensor = output[0] if isinstance(output, tuple) else output
    return value


def _judge(found: _Run, wanted: _Run, lengths: tuple[int, ...], tolerance: float) -> LayerOutcome:
    """The largest relative error, or the first thing that is wrong."""
    missing = [
        name for name, value in wanted.weights.items() if _is_there(value) and not _is_there(found.weights[name])
    ]
    if _is_there(wanted.inputs) and not _is_there(found.inputs):
        missing.insert(0, "the layer's input")
    if missing:
        return LayerOutcome(verdict=KernelVerdict.FORWARD_ONLY, detail=f"no gradient reaches {', '.join(missing[:8])}")
    pairs = {"its output": (found.output, wanted.output), "the gradient of its input": (found.inputs, wanted.inputs)}
    worst = 0.0
    for what, (value, exact) in pairs.items():
        floor = exact.norm() / exact.numel() ** 0.5
        for start, end in pairwise((0, *accumulate(lengths))):
            part, own = value[:, start:end], exact[:, start:end]
            size = torch.maximum(own.norm() / own.numel() ** 0.5, floor) * own.numel() ** 0.5
            error = float((part - own).norm() / size.clamp_min(1e-30))  # once, before training
            if not error <= tolerance:
                return _broken(f"{what} {_off(error, tolerance)} at length {end - start}")
            worst = max(worst, error)
    for name, exact_gradient in wanted.weights.items():
        gradient = found.weights[name]
        if exact_gradient is None or gradient is None:
            continue
        error, allowed = _worst_row(gradient.float(), exact_gradient), tolerance * ROW_SLACK / SLACK
        if not error <= allowed:
            return _broken(f"the gradient of {name} {_off(error, allowed)}")
        worst = max(worst, error)
    return LayerOutcome(verdict=KernelVerdict.FUSED, detail=f"largest error {worst:.1e}")


def _worst_row(value: Tensor, exact: Tensor) -> float:
    """Largest relative error of a row: those of one projection feed different inputs of a kernel."""
    rows, wanted = (tensor[None] if tensor.dim() < 2 else tensor.flatten(1) for tensor in (value, exact))
    sizes = wanted.norm(dim=1)
    # A row with hardly any gradient is all rounding: it is held against a tenth of the usual size.
    floor = (0.1 * sizes.norm() / sizes.numel() ** 0.5).clamp_min(1e-30)
    return float(((rows - wanted).norm(dim=1) / sizes.clamp_min(floor)).max())


def _is_there(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def _off(error: float, tolerance: float) -> str:
    return "is not finite" if error != error else f"is off by {error:.1%} (tolerance {tolerance:.1%})"


def _broken(detail: str) -> LayerOutcome:
    return LayerOutcome(verdict=KernelVerdict.BROKEN, detail=detail)


def _unknown(reason: str) -> LayerOutcome:
    return LayerOutcome(verdict=KernelVerdict.UNVERIFIED, detail=reason)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
