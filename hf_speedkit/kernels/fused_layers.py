"""Fused norms, SwiGLU, convolutions, heads and adapters put into a live model where proven; taken out afterwards.

Each needs no compiler to install: Triton compiles at run time. What runs is an override of `forward` on the instance
(the convolution: of the modeling file's global), so weights, names, checkpoints and wrappers stay what they are.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.fused_attention import QK_ROTARY, norms_have_hooks, why_not_fused
from hf_speedkit.kernels.fused_forwards import (
    GATED_NORM,
    RMS_NORM,
    SPLIT_CONVOLUTION,
    SWIGLU,
    Candidate,
    Forward,
    candidates,
    part_of,
)
from hf_speedkit.kernels.gated_delta_forward import why_not_split
from hf_speedkit.kernels.imports import installed_version, is_installed
from hf_speedkit.kernels.layout import config_of
from hf_speedkit.kernels.lora_forward import LORA, why_not_adapted

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_speedkit.kernels.fused_parity import Parity

logger = logging.getLogger(__name__)

CONVOLUTION_PART = "convolution"
PARTS = (CONVOLUTION_PART, SPLIT_CONVOLUTION, RMS_NORM, GATED_NORM, SWIGLU, QK_ROTARY, LORA)
"""What can be fused, by the names that `exclude` takes."""

_MARK = "speedkit_fused"
_DEFAULT_SLOTS = 4096


@contextmanager
def fused_layers(
    model: nn.Module,
    *,
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    tokens_per_batch: int | None = None,
    devices: tuple[str, ...] = ("cuda",),
) -> Iterator[tuple[str, ...]]:
    """Run a model's small layers on fused kernels for the time of the context.

    Each kind of layer gets the first candidate that imports, agrees with the layer's own forward (output and every
    gradient, on the device; in float32 where it is another kernel) and keeps its dtype. What does not is logged with
    the reason and left as it was.

    Args:
        model: the model, prepared or not, wrapped or not.
        exclude: names from `PARTS` to leave alone.
        dtype: of the activations; the parameters' own if None. Give torch.bfloat16 under bf16 autocast.
        tokens_per_batch: slots of training's row; the proof then runs at training's sizes and doubles as the warm-up.
        devices: device types they may run on.

    Yields:
        One line per kind of layer that was changed; nothing where the model is not on such a device.

    Raises:
        ConfigurationError: a name in `exclude` that is not in `PARTS`.
    """
    unknown = sorted(set(exclude) - set(PARTS))
    if unknown:
        raise ConfigurationError(f"{', '.join(unknown)} cannot be excluded", mend=f"names are: {', '.join(PARTS)}")
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None or parameter.device.type not in devices:
        yield ()
        return
    settings = _Settings(
        device=parameter.device, dtype=dtype or parameter.dtype, slots=tokens_per_batch or _DEFAULT_SLOTS
    )
    with ExitStack() as stack:
        lines: list[str] = []
        if CONVOLUTION_PART not in exclude:
            lines += _fuse_convolution(model, settings, devices, stack)
        for group in _groups(model, exclude):
            try:
                line = _fuse(group, settings, stack)
            except Exception as error:  # noqa: BLE001 (any model's own code; a job is not to end for speed)
                logger.warning("%s of %s is left out: %s: %s", group.part, group.kind, type(error).__name__, error)
                continue
            lines += [line] if line else []
        for line in lines:
            logger.info("fused layers: %s", line)
        yield tuple(lines)


def fused_layer_checks(model: nn.Module) -> tuple[KernelCheck, ...]:
    """One check per part and class of layers that `fused_layers` changed: on how many of them a fused forward runs."""
    found: dict[tuple[str, str, str], int] = defaultdict(int)
    marks: dict[tuple[str, str, str], str] = {}
    totals: dict[tuple[str, str], int] = defaultdict(int)
    for module in model.modules():
        part = part_of(module)
        if part is None:
            continue
        kind = type(module).__name__
        totals[part, kind] += 1
        mark = _mark_of(module)
        if mark is not None:
            # By package: norms of another width are proven apart, with an error and a time of their own.
            key = (part, kind, mark.partition(",")[0])
            found[key] += 1
            marks.setdefault(key, mark)
    return tuple(
        KernelCheck(
            function=part,
            verdict=KernelVerdict.FUSED,
            layer=kind,
            layers=count,
            layers_total=totals[key[:2]],
            evidence=marks[key],
        )
        for key, count in found.items()
        for part, kind in (key[:2],)
    )


def is_fused(module: nn.Module) -> bool:
    """Whether `fused_layers` lies over a layer's forward now."""
    return _mark_of(module) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    device: torch.device
    dtype: torch.dtype
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Layers of one class that see rows of the same shape.

    Args:
        part: see `part_of`.
        kind: class name.
        heads: rows per position.
        modules: the layers.
    """

    part: str
    kind: str
    heads: int
    modules: list[nn.Module]


def _groups(model: nn.Module, exclude: Sequence[str]) -> list[_Group]:
    groups: dict[object, _Group] = {}
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for name, module in model.named_modules():
        part = part_of(module)
        # Something else put its own forward there (Liger, `kernels`, accelerate): leave it.
        if part is None or part in exclude or "forward" in module.__dict__:
            continue
        if part == QK_ROTARY and _norms_are_anothers(module):
            continue
        heads = _heads(name.rpartition(".")[2], part, parents.get(id(module)))
        shapes = tuple((key, tuple(value.shape), value.dtype) for key, value in module.named_parameters())
        # Attention layers of one class may differ in their window, or in whether they rotate at all.
        switches: tuple[object, ...] = _switches(module) if part == QK_ROTARY else ()
        if part == LORA and (reason := why_not_adapted(module)) is not None:
            shapes, switches = (), (reason,)  # said once
        group = _Group(part=part, kind=type(module).__name__, heads=heads, modules=[])
        groups.setdefault((type(module), heads, shapes, switches), group).modules.append(module)
    return list(groups.values())


def _heads(name: str, part: str, parent: Any) -> int:
    """How many rows a norm gets per position: one per head for those of single heads."""
    if part == GATED_NORM:
        heads = getattr(parent, "num_v_heads", 1)
    elif name in ("q_norm", "k_norm"):
        heads = getattr(config_of(parent), "num_attention_heads" if name == "q_norm" else "num_key_value_heads", 1)
    else:
        heads = 1
    return heads if isinstance(heads, int) else 1


def _norms_are_anothers(attention: Any) -> bool:
    changed = any("forward" in norm.__dict__ for norm in (attention.q_norm, attention.k_norm))
    return changed or norms_have_hooks(attention)


def _switches(module: Any) -> tuple[tuple[str, object], ...]:
    """What a layer may decide by: its own plain values, and its entry in each list of the config, one a layer."""
    plain = (bool, int, float, str, type(None))
    config, place = getattr(getattr(module, "config", None), "__dict__", {}), getattr(module, "layer_idx", None)
    lists = {key: x for key, x in config.items() if isinstance(x, list) and len(x) == config.get("num_hidden_layers")}
    entries = {key: x[place] for key, x in lists.items() if isinstance(place, int) and place < len(x)}
    settings = ((key, value) for key, value in [*sorted(vars(module).items()), *sorted(entries.items())])
    return tuple((key, value) for key, value in settings if isinstance(value, plain) and key != "layer_idx")


def _fuse(group: _Group, settings: _Settings, stack: ExitStack) -> str | None:
    from hf_speedkit.kernels.fused_parity import multiplies_by_one_plus_weight

    module = group.modules[0]
    against = {SPLIT_CONVOLUTION: why_not_split, QK_ROTARY: why_not_fused, LORA: why_not_adapted}.get(group.part)
    reason = against(module) if against is not None else None
    if reason is not None:
        logger.info("%s of %s is left out: %s", group.part, group.kind, reason)
        return None
    norm = {RMS_NORM: module, QK_ROTARY: getattr(module, "q_norm", None)}.get(group.part)
    zero_centred = norm is not None and multiplies_by_one_plus_weight(norm)
    for candidate in candidates(group.part, zero_centred=zero_centred, layer=module):
        proven = _prove(candidate, group, settings)
        if proven is None:
            continue
        forward, evidence = proven
        for layer in group.modules:
            bound = MethodType(forward, layer)
            layer.forward = bound
            stack.callback(_restore, layer, bound)
        return f"{group.part}: {evidence} on {len(group.modules)} {group.kind}"
    return None


def _prove(candidate: Candidate, group: _Group, settings: _Settings) -> tuple[Forward, str] | None:
    """The candidate's forward and its evidence, or None with the reason in the log."""
    what = f"{group.part} of {group.kind} from {candidate.package}"
    if not is_installed(candidate.package):
        logger.info("%s: not installed", what)
        return None
    try:
        forward = candidate.make()
    except Exception as error:  # noqa: BLE001 (a package that does not import raises anything)
        logger.warning("%s is left out: it fails to import: %s: %s", what, type(error).__name__, error)
        return None
    parity = _parity(group, forward, settings)
    if parity.problem is not None:
        logger.warning("%s is left out: %s", what, parity.problem)
        return None
    version = installed_version(candidate.package) or "(version unknown)"
    seconds = f"first call {parity.first_call_s:.1f} s"
    evidence = f"{candidate.package} {version}, largest error {parity.error:.1e}, {seconds}"
    setattr(forward, _MARK, evidence)
    return forward, evidence


def _parity(group: _Group, forward: Forward, settings: _Settings) -> Parity:
    from hf_speedkit.kernels.attention_parity import compare_attention
    from hf_speedkit.kernels.fused_parity import compare
    from hf_speedkit.kernels.gated_delta_parity import compare_split
    from hf_speedkit.kernels.lora_parity import compare_adapted

    module, device, dtype = group.modules[0], settings.device, settings.dtype
    if group.part == SPLIT_CONVOLUTION:
        return compare_split(module, forward, slots=settings.slots, device=device, dtype=dtype)
    if group.part == QK_ROTARY:
        return compare_attention(module, forward, slots=settings.slots, device=device, dtype=dtype)
    if group.part == LORA:
        return compare_adapted(module, forward, slots=settings.slots, device=device, dtype=dtype)
    return compare(module, forward, group.part, rows=settings.slots * group.heads, device=device, dtype=dtype)


def _restore(layer: nn.Module, bound: object) -> None:
    # Something bound on top of ours since then stays.
    if layer.__dict__.get("forward") is bound:
        del layer.__dict__["forward"]


def _mark_of(module: nn.Module) -> str | None:
    forward = module.__dict__.get("forward")
    mark = getattr(getattr(forward, "__func__", None), _MARK, None)
    return mark if isinstance(mark, str) else None


def _fuse_convolution(model: nn.Module, settings: _Settings, devices: tuple[str, ...], stack: ExitStack) -> list[str]:
    """Fla's convolution where causal-conv1d is missing, if the probe passes."""
    from hf_speedkit.kernels.fla_convolution import FlaConvolution, bind_fla_convolution
    from hf_speedkit.kernels.layout import live_layers

    layers = live_layers(model)
    if not any(f.function == "causal_conv1d_fn" and f.binding.value == "torch" for x in layers for f in x.functions):
        return []
    if not is_installed("fla"):
        return []
    try:
        binding = stack.enter_context(bind_fla_convolution(model, devices=devices))
    except Exception as error:  # noqa: BLE001 (a package that does not import raises anything)
        logger.warning("fla's convolution is left out: it fails to import: %s: %s", type(error).__name__, error)
        return []
    bound = [(x, f) for x in live_layers(model) for f in x.functions if isinstance(f.called, FlaConvolution)]
    layer, function = bound[0]
    problem, evidence = _probe_convolution(model.get_submodule(layer.name), function.called, settings)
    if problem is not None:
        binding.undo()
        logger.warning("fla's convolution is left out: %s", problem)
        return []
    version = installed_version("fla") or "(version unknown)"
    return [f"{CONVOLUTION_PART}: fla {version}, {evidence} on {len(bound)} {layer.kind}"]


def _probe_convolution(module: nn.Module, called: Any, settings: _Settings) -> tuple[str | None, str]:
    from hf_speedkit.kernels.probe import probe_function
    from hf_speedkit.kernels.probe_targets import function_target

    target = function_target("causal_conv1d_fn", called, module, settings.dtype, settings.slots)
    if target is None:
        return "the layer does not say its sizes", ""
    outcome = probe_function(target.called, target.make_example)
    if outcome.verdict is not KernelVerdict.FUSED:
        return f"{outcome.verdict.value}: {outcome.detail}", ""
    return None, f"{outcome.detail}, first call {outcome.first_call_s:.1f} s"
