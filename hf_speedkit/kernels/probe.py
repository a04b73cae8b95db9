"""Runs each fused function forward and backward, as its layer calls it, and compares it with the reference.

Importable is not trainable: fla 0.6.0 on Hopper with triton below 3.7.1 runs forward and raises in the first backward.
So every function is called with the dtype, head sizes, strides and boundaries that training uses, on one packed row of
documents whose lengths lie round the edges of its chunks, and the outputs and all gradients are held against
kernels/reference.py in float64. One row and not one call per length: another length would be other kernels to compile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.faults import way_out_of
from hf_speedkit.kernels.layer_probe import LayerOutcome, probe_layer
from hf_speedkit.kernels.layout import LiveLayer, live_layers
from hf_speedkit.kernels.model_checks import model_config
from hf_speedkit.kernels.patience import said_if_slow
from hf_speedkit.kernels.probe_inputs import Example
from hf_speedkit.kernels.probe_targets import Target, attention_target, function_target
from hf_speedkit.kernels.requirements import FUNCTIONS
from hf_speedkit.kernels.stack import read_stack
from hf_speedkit.kernels.verdicts import upgrade_command

EDGE_LENGTHS = (1, 33, 63, 64, 65, 95, 127, 129, 130)
"""Lengths on both sides of chunks of 32, 64 and 128 positions, and a document of one token."""

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-4,  # Some kernels compute in float32 inside, whatever comes in.
    torch.float32: 2e-3,  # Triton multiplies float32 in TF32: 10 bits, 2 ** -11 = 5e-4 a product.
    torch.float16: 5e-3,  # 10 bits again, several roundings between input and gradient.
    torch.bfloat16: 2e-2,  # 7 bits, 2 ** -8 = 4e-3 a rounding, several of them (V49 in the public reports).
}
"""Largest relative error (norm of the difference / norm of the reference) of an output or a gradient, per document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """What running one function showed.

    Args:
        verdict: FUSED, or what is wrong.
        detail: why, or how well.
        first_call_s: time of the first forward and backward, compilation and tuning included.
        call_s: time of a later one; None where it was not taken (on a CPU nothing is compiled).
    """

    verdict: KernelVerdict
    detail: str
    first_call_s: float | None = None
    call_s: float | None = None


def probe_model(
    model: nn.Module,
    checks: Sequence[KernelCheck],
    *,
    dtype: torch.dtype | None = None,
    tokens_per_batch: int | None = None,
) -> tuple[KernelCheck, ...]:
    """Run what `checks` calls FUSED, and give each such check the verdict it earned.

    Functions without a reference of ours (Mamba, Kimi delta attention) are held against transformers' torch functions,
    as parts of their layer (`layer_probe.py`); torch's own sdpa is not run. On a GPU a function's row has
    `tokens_per_batch` slots and the layer's own heads, so that the kernels compiled here are those of step 1.

    Args:
        model: the live model the checks are about; functions run on the device of their layer.
        checks: from `check_kernels`.
        dtype: of the activations; the dtype of the layer's parameters if None.
        tokens_per_batch: slots of training's row; None for a short row.

    Returns:
        The checks, in the same order.
    """
    bindings = _bindings(model)
    layers = _Layers(model=model, dtype=dtype, packed=tokens_per_batch is not None)
    probed = []
    for check in checks:
        waiting = bindings.get((check.layer, check.function))
        layer, called = waiting.pop(0) if waiting else (None, None)
        if check.verdict is not KernelVerdict.FUSED:
            probed.append(check)
            continue
        target: Target | None = None
        with said_if_slow(f"{check.function} of {check.layer}"):
            if check.function == "attention":
                target = attention_target(check, model, dtype, tokens_per_batch)
            elif layer is not None and called is not None:
                module = model.get_submodule(layer.name)
                target = function_target(check.function, called, module, dtype, tokens_per_batch)
                if target is None:
                    check = layers.probed(check, layer, module)
            probed.append(check if target is None else _probed(check, target))
    return tuple(probed)


def _bindings(model: nn.Module) -> dict[tuple[str, str], list[tuple[LiveLayer, Callable[..., object]]]]:
    """What is called for each layer class and function, in the order in which `check_kernels` made its checks.

    More than one where layers of a class are bound to different objects: each is a check of its own, and is run.
    """
    found: dict[tuple[str, str], list[tuple[LiveLayer, Callable[..., object]]]] = {}
    for layer in live_layers(model):
        for function in layer.functions:
            waiting = found.setdefault((layer.kind, function.function), [])
            if all(called is not function.called for _, called in waiting):
                waiting.append((layer, function.called))
    return found


class _Layers:
    """Probes layers whose functions have no reference: once a layer, whatever number of functions ask."""

    def __init__(self, *, model: nn.Module, dtype: torch.dtype | None, packed: bool) -> None:
        self.model = model
        self.dtype = dtype
        self.packed = packed
        self._outcomes: dict[str, LayerOutcome] = {}

    def probed(self, check: KernelCheck, layer: LiveLayer, module: nn.Module) -> KernelCheck:
        """The check with what running its layer showed."""
        again = layer.name in self._outcomes
        outcome = (
            self._outcomes[layer.name] if again else self._outcomes.setdefault(layer.name, self._run(layer, module))
        )
        if outcome.verdict is KernelVerdict.UNVERIFIED:
            return replace(check, evidence=f"{check.evidence}; not run: {outcome.detail}")
        where = place(next(module.parameters()).device)
        if outcome.verdict is not KernelVerdict.FUSED:
            reason = f"on {where}, as a part of its layer: {outcome.detail}"
            leaks = outcome.verdict is KernelVerdict.NO_BOUNDARIES  # whatever the package, the layer drops them
            fix = "packing=False  # padded rows for this family" if leaks else _way_out(check, outcome.detail)
            return replace(check, verdict=outcome.verdict, reason=reason, fix=fix)
        evidence = f"{check.evidence}; ran both ways on {where} as a part of its layer, {outcome.detail}"
        return replace(check, evidence=evidence, first_call_s=None if again else outcome.first_call_s)

    def _run(self, layer: LiveLayer, module: nn.Module) -> LayerOutcome:
        config = model_config(self.model)
        weight = next(module.parameters(), None)
        if config is None or weight is None:
            return LayerOutcome(verdict=KernelVerdict.UNVERIFIED, detail="the layer has no weights or no config")
        return probe_layer(
            layer,
            module,
            hidden_size=config.get_text_config().hidden_size,
            lengths=EDGE_LENGTHS,
            tolerance=TOLERANCES.get(self.dtype or weight.dtype, TOLERANCES[torch.bfloat16]),
            dtype=self.dtype,
            packed=self.packed,
        )


def probe_function(
    function: Callable[..., Any], make_example: Callable[[tuple[int, ...], int], Example]
) -> ProbeOutcome:
    """Hold one function against its reference on a packed row.

    Args:
        function: called as `Example.call` says.
        make_example: (document lengths, seed) -> inputs of one packed row.

    Returns:
        FUSED with the largest error, or the first thing that is wrong: BROKEN, FORWARD_ONLY, NO_BOUNDARIES.
    """
    row = make_example(EDGE_LENGTHS, 0)
    began = time.perf_counter()
    run = _run(function, row)
    first_call_s = time.perf_counter() - began
    if isinstance(run, ProbeOutcome):
        return run
    output, found = run
    expected_output, expected = row.reference()
    missing = [name for name, value in found.items() if value is None or (not value.any() and expected[name].any())]
    if missing:
        return _no_gradient(missing)
    # A leak makes the numbers wrong as well; the leak is the more useful thing to say, so it goes first.
    problem = _leak(function, row, make_example(EDGE_LENGTHS, 7), output)
    worst = _compared(row, {"the output": output, **found}, {"the output": expected_output, **expected})
    if problem is not None or isinstance(worst, ProbeOutcome):
        return problem or worst  # type: ignore[return-value]
    call_s = None
    if row.device.type == "cuda":
        began = time.perf_counter()
        _run(function, row)
        call_s = time.perf_counter() - began
    return ProbeOutcome(
        verdict=KernelVerdict.FUSED, detail=f"largest error {worst:.1e}", first_call_s=first_call_s, call_s=call_s
    )


def _probed(check: KernelCheck, target: Target) -> KernelCheck:
    outcome = probe_function(target.called, target.make_example)
    where = f"{place(target.device)} in {str(target.dtype).removeprefix('torch.')}"
    if outcome.verdict is not KernelVerdict.FUSED:
        reason = f"on {where}: {outcome.detail}"
        return replace(check, verdict=outcome.verdict, reason=reason, fix=_way_out(check, outcome.detail))
    evidence = f"{check.evidence}; ran both ways on {where}, {outcome.detail}"
    if outcome.call_s is not None and outcome.first_call_s is not None:
        evidence += f", first call {outcome.first_call_s:.1f} s, then {1e3 * outcome.call_s:.1f} ms"
    return replace(check, evidence=evidence, first_call_s=outcome.first_call_s, call_s=outcome.call_s)


def _way_out(check: KernelCheck, detail: str) -> str | None:
    """What to do about a kernel that ran and was wrong: the machine's part of it, or another version of its package."""
    of_the_machine = way_out_of(detail)
    if of_the_machine is not None:
        return of_the_machine
    if check.function == "attention":
        return 'attn_implementation="sdpa", packed_attention="keep"'
    requirement = FUNCTIONS.get(check.function)
    own = requirement is not None and check.evidence.startswith(requirement.package)
    return upgrade_command(requirement) if requirement is not None and own else None


def place(device: torch.device, stack: Stack | None = None) -> str:
    """Where something ran: of a GPU its name, architecture and compiler, which a report of a fault needs."""
    if device.type != "cuda":
        return device.type
    stack = stack or read_stack()
    made = ", ".join(f"{name} {stack.versions[name]}" for name in ("triton", "torch") if name in stack.versions)
    return f"{torch.cuda.get_device_name(device)} ({stack.architecture}, {made})"


def _run(function: Callable[..., Any], row: Example) -> tuple[Tensor, dict[str, Tensor | None]] | ProbeOutcome:
    """Output and gradients, waited for; or what went wrong."""
    stage = "the forward"
    try:
        with torch.enable_grad(), torch.autocast(row.device.type, enabled=False):
            output = row.call(function)
            if not output.requires_grad:
                return _no_gradient(row.gradient_names)
            stage = "the forward runs, the backward"
            found = row.gradients(output)
        if row.device.type == "cuda":
            torch.cuda.synchronize(row.device)  # an asynchronous fault must show here, and the clock must see the end
    except Exception as error:  # noqa: BLE001 (whatever a foreign kernel raises is the finding)
        return _broken(f"{stage} raises {first_words(error)}")
    return output.detach(), found


def _compared(row: Example, found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor]) -> ProbeOutcome | float:
    """The largest relative error, or the first tensor that is wrong."""
    tolerance, worst = TOLERANCES[row.dtype], 0.0
    for name, wanted in expected.items():
        value = found[name]
        if value is None:
            continue
        what = name if name == "the output" else f"the gradient of {name}"
        if not torch.isfinite(value).all():  # of the whole row, the part that nobody compares included
            part = row.compared_part(name, value)
            return _broken(f"{what} is not finite{_at_lengths(row, name, _wrong(row, name, ~torch.isfinite(part)))}")
        errors = _errors(row, name, row.compared_part(name, value), wanted)
        wrong = [error > tolerance for error in errors]
        if any(wrong):
            where = _at_lengths(row, name, wrong)
            return _broken(f"{what} is off by {max(errors):.1%} (tolerance {tolerance:.1%}){where}")
        worst = max(worst, *errors)
    return worst


def _errors(row: Example, name: str, value: Tensor, wanted: Tensor) -> list[float]:
    """Relative error of each document; of the whole for a tensor without positions."""
    # Some gradients vanish in short documents (the decay of a single token has no effect): there the rounding of the
    # kernel is held against the size that the tensor has in the whole row.
    floor = max((wanted.norm() / wanted.numel() ** 0.5).item(), 1e-30)
    if name in row.shared:
        return [((value - wanted).norm() / wanted.numel() ** 0.5).item() / floor]
    errors = []
    for start, end in row.documents:
        own, difference = wanted[:, start:end], value[:, start:end] - wanted[:, start:end]
        root = own.numel() ** 0.5
        errors.append((difference.norm() / root).item() / max((own.norm() / root).item(), floor))
    return errors


def _wrong(row: Example, name: str, places: Tensor) -> list[bool]:
    if name in row.shared:
        return [bool(places.any())]
    return [bool(places[:, start:end].any()) for start, end in row.documents]


def _at_lengths(row: Example, name: str, wrong: Sequence[bool]) -> str:
    """Names the documents concerned when it is some of them: a fault at a chunk's edge."""
    if name in row.shared or all(wrong) or not any(wrong):
        return ""
    lengths = [end - start for (start, end), bad in zip(row.documents, wrong, strict=True) if bad]
    return f" at length {', '.join(str(length) for length in lengths)}"


def _leak(function: Callable[..., Any], row: Example, other: Example, first: Tensor) -> ProbeOutcome | None:
    """Replace every second document and see whether the others notice; and whether the same twice is the same."""
    mixed = row.with_documents_of(other, range(0, len(row.borders) - 1, 2))
    with torch.no_grad(), torch.autocast(row.device.type, enabled=False):
        outputs = [row.compared_part("the output", each.call(function)) for each in (row, mixed)]
    before, after = outputs
    again = row.compared_part("the output", first)
    tolerance = TOLERANCES[row.dtype]
    for document, (start, end) in enumerate(row.documents):
        own = before[:, start:end]
        if not torch.isfinite(own).all():
            continue
        size = own.norm().clamp_min(1e-30)
        if not ((own - again[:, start:end]).norm() / size).item() <= tolerance:
            return _broken("two runs on the same inputs differ: a race in the kernel")
        change = ((own - after[:, start:end]).norm() / size).item()
        if document % 2 and not change <= tolerance:
            return ProbeOutcome(
                verdict=KernelVerdict.NO_BOUNDARIES,
                detail=f"a document changes by {change:.1%} when its neighbours in the row are replaced",
            )
    return None


def _no_gradient(names: Sequence[str]) -> ProbeOutcome:
    return ProbeOutcome(verdict=KernelVerdict.FORWARD_ONLY, detail=f"no gradient reaches {', '.join(names)}")


def _broken(detail: str) -> ProbeOutcome:
    return ProbeOutcome(verdict=KernelVerdict.BROKEN, detail=detail)


def first_words(error: Exception) -> str:
    """Class and first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
