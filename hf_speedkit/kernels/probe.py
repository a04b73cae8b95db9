"""Runs each fused function forward and backward, as its layer calls it, and compares it with the reference.

Importable is not trainable: fla 0.6.0 on Hopper with triton below 3.7.1 runs forward and raises in the first backward.
So every function is called with the dtype, head sizes, strides and boundaries that training uses, at lengths round the
edges of its chunks, and the outputs and all gradients are held against kernels/reference.py in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.layout import LiveFunction, LiveLayer, live_layers
from hf_speedkit.kernels.probe_inputs import Example, convolution_example, delta_rule_example

EDGE_LENGTHS = (1, 33, 63, 64, 65, 95, 127, 129, 130)
"""Lengths on both sides of chunks of 32, 64 and 128 positions, and a document of one token."""

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-4,  # Some kernels compute in float32 inside, whatever comes in.
    torch.float32: 2e-3,  # Triton multiplies float32 in TF32: 10 bits, 2 ** -11 = 5e-4 a product.
    torch.float16: 5e-3,  # 10 bits again, several roundings between input and gradient.
    torch.bfloat16: 2e-2,  # 7 bits, 2 ** -8 = 4e-3 a rounding, several of them (V49 in the public reports).
}
"""Largest relative error (norm of the difference / norm of the reference) of an output or a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """What running one function showed: a verdict, and why or how well."""

    verdict: KernelVerdict
    detail: str


def probe_model(
    model: nn.Module, checks: Sequence[KernelCheck], *, dtype: torch.dtype | None = None
) -> tuple[KernelCheck, ...]:
    """Run what `checks` calls FUSED, and give each such check the verdict it earned.

    Functions without a reference (Mamba, Kimi delta attention) keep their verdict and say that they were not run.

    Args:
        model: the live model the checks are about; functions run on the device of their layer.
        checks: from `check_kernels`.
        dtype: of the activations; the dtype of the layer's parameters if None.

    Returns:
        The checks, in the same order.
    """
    found = {(layer.kind, f.function): (layer, f) for layer in live_layers(model) for f in layer.functions}
    probed = []
    for check in checks:
        layer_and_function = found.get((check.layer, check.function))
        if check.verdict is not KernelVerdict.FUSED or layer_and_function is None:
            probed.append(check)
            continue
        probed.append(_probed(check, model, *layer_and_function, dtype))
    return tuple(probed)


def probe_function(
    function: Callable[..., Any], make_example: Callable[[tuple[int, ...], int], Example]
) -> ProbeOutcome:
    """Hold one function against its reference, packed and at single lengths.

    Args:
        function: called as `Example.call` says.
        make_example: (document lengths, seed) -> inputs of one packed row.

    Returns:
        FUSED with the largest error, or the first thing that is wrong: BROKEN, FORWARD_ONLY, NO_BOUNDARIES.
    """
    rows = [make_example(EDGE_LENGTHS, 0), *(make_example((length,), 1) for length in EDGE_LENGTHS)]
    worst, scales = 0.0, None
    for row in rows:
        result = _probe_row(function, row, scales)
        if result.ran and scales is None:
            # A leak makes the numbers wrong as well; the leak is the more useful thing to say, so it goes first.
            leak = _leak(function, row, make_example(EDGE_LENGTHS, 7))
            if leak is not None:
                return leak
        if result.problem is not None:
            return result.problem
        worst, scales = max(worst, result.error), scales or result.scales
    return ProbeOutcome(verdict=KernelVerdict.FUSED, detail=f"largest error {worst:.1e}")


def _probed(
    check: KernelCheck, model: nn.Module, layer: LiveLayer, function: LiveFunction, dtype: torch.dtype | None
) -> KernelCheck:
    module = model.get_submodule(layer.name)
    maker = _example_maker(check.function, module, dtype)
    if maker is None:
        return replace(check, evidence=f"{check.evidence}; not run: no reference to compare with")
    example = maker((1,), 0)
    outcome = probe_function(function.called, maker)
    where = f"{example.device} in {str(example.dtype).removeprefix('torch.')}"
    if outcome.verdict is KernelVerdict.FUSED:
        return replace(check, evidence=f"{check.evidence}; ran both ways on {where}, {outcome.detail}")
    return replace(check, verdict=outcome.verdict, reason=f"on {where}: {outcome.detail}", fix=check.fix)


def _example_maker(
    function: str, module: nn.Module, dtype: torch.dtype | None
) -> Callable[[tuple[int, ...], int], Example] | None:
    """Builds inputs of the size of `module`, or None for a function without a reference or a layer without sizes."""
    parameter = next(module.parameters(), None)
    if parameter is None:
        return None
    device, kind = parameter.device, dtype or parameter.dtype
    convolution = next((child for child in module.children() if isinstance(child, nn.Conv1d)), None)
    if function == "causal_conv1d_fn" and convolution is not None:
        channels, width = convolution.weight.shape[0], convolution.weight.shape[-1]
        activation = getattr(module, "activation", None)
        return lambda lengths, seed: convolution_example(
            lengths, channels=channels, width=width, activation=activation, device=device, dtype=kind, seed=seed
        )
    names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    sizes = [size for name in names if isinstance(size := getattr(module, name, None), int)]
    if function == "chunk_gated_delta_rule" and len(sizes) == len(names):
        return lambda lengths, seed: delta_rule_example(lengths, sizes=sizes, device=device, dtype=kind, seed=seed)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowResult:
    """What one row showed.

    Args:
        problem: what is wrong; None if nothing.
        ran: forward and backward ended and every input got a gradient, so that numbers could be compared.
        error: the largest relative error.
        scales: root mean square of each expected tensor.
    """

    problem: ProbeOutcome | None = None
    ran: bool = False
    error: float = 0.0
    scales: Mapping[str, float] | None = None


def _probe_row(function: Callable[..., Any], row: Example, scales: Mapping[str, float] | None) -> _RowResult:
    """Run one row and compare it; `scales` are those of the packed row, None while that row itself is probed."""
    stage = "the forward"
    try:
        with torch.enable_grad(), torch.autocast(row.device.type, enabled=False):
            output = row.call(function)
            if not output.requires_grad:
                return _RowResult(problem=_no_gradient(row.gradient_names))
            stage = "the forward runs, the backward"
            found = row.gradients(output)
    except Exception as error:  # noqa: BLE001 (whatever a foreign kernel raises is the finding)
        return _RowResult(problem=_broken(f"{stage} raises {type(error).__name__}: {_first_line(error)}"))
    expected_output, expected = row.reference()
    missing = [name for name, value in found.items() if value is None or (not value.any() and expected[name].any())]
    if missing:
        return _RowResult(problem=_no_gradient(missing))
    return _compared(row, {"the output": output, **found}, {"the output": expected_output, **expected}, scales)


def _compared(
    row: Example,
    found: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor],
    scales: Mapping[str, float] | None,
) -> _RowResult:
    tolerance, worst = TOLERANCES[row.dtype], 0.0
    own_scales = {name: (wanted.norm() / wanted.numel() ** 0.5).item() for name, wanted in expected.items()}
    for name, wanted in expected.items():
        value = found[name]
        if value is None:
            continue
        value = value.detach().to("cpu", torch.float64)
        what = name if name == "the output" else f"the gradient of {name}"
        if not torch.isfinite(value).all():
            problem = _broken(f"{what} is not finite{_at_length(row, ~torch.isfinite(value))}")
            return _RowResult(problem=problem, ran=True)
        # Some gradients vanish on short rows (the decay of a single token has no effect): there the rounding of the
        # kernel is held against the size that the tensor has in a long row.
        scale = max(own_scales[name], (scales or {}).get(name, 0.0), 1e-30)
        difference = (value - wanted).abs() / scale
        error = (difference.norm() / difference.numel() ** 0.5).item()
        if error > tolerance:
            where = _at_length(row, difference > 10 * tolerance)
            problem = _broken(f"{what} is off by {error:.1%} (tolerance {tolerance:.1%}){where}")
            return _RowResult(problem=problem, ran=True)
        worst = max(worst, error)
    return _RowResult(ran=True, error=worst, scales=own_scales)


def _leak(function: Callable[..., Any], row: Example, other: Example) -> ProbeOutcome | None:
    """Replace every second document and see whether the others notice."""
    mixed = row.with_documents_of(other, range(0, len(EDGE_LENGTHS), 2))
    with torch.no_grad():
        before, after = (each.call(function).to("cpu", torch.float64) for each in (row, mixed))
    for document, (start, end) in enumerate(pairwise(row.borders)):
        own = before[:, start:end]
        if document % 2 == 0 or not torch.isfinite(own).all():
            continue
        change = ((own - after[:, start:end]).norm() / own.norm().clamp_min(1e-30)).item()
        if not change <= TOLERANCES[row.dtype]:
            return ProbeOutcome(
                verdict=KernelVerdict.NO_BOUNDARIES,
                detail=f"a document changes by {change:.1%} when its neighbours in the row are replaced",
            )
    return None


def _at_length(row: Example, wrong: Tensor) -> str:
    """Names the documents concerned when it is some of them: a fault at a chunk's edge."""
    if wrong.dim() < 2 or wrong.shape[1] != row.borders[-1]:
        return ""
    lengths = [end - start for start, end in pairwise(row.borders)]
    concerned = [n for n, (a, b) in zip(lengths, pairwise(row.borders), strict=True) if wrong[:, a:b].any()]
    if len(concerned) == len(lengths) and len(lengths) > 1:
        return ""
    return f" at length {', '.join(str(length) for length in concerned)}"


def _no_gradient(names: Sequence[str]) -> ProbeOutcome:
    return ProbeOutcome(verdict=KernelVerdict.FORWARD_ONLY, detail=f"no gradient reaches {', '.join(names)}")


def _broken(detail: str) -> ProbeOutcome:
    return ProbeOutcome(verdict=KernelVerdict.BROKEN, detail=detail)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
