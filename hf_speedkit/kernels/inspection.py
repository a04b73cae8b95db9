"""What a model's layers will really run, layer by layer, and the refusal when that is slow or wrong."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hf_speedkit.core.errors import ConfigurationError, KernelAssertionError
from hf_speedkit.core.records import KernelCheck
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.config_checks import (
    Imports,
    config_checks,
    count_of_layers,
    known_leak,
    layers_of_family,
    with_what_it_calls,
)
from hf_speedkit.kernels.demands import Requirement, demanded
from hf_speedkit.kernels.experts import experts_checks
from hf_speedkit.kernels.fused_layers import fused_layer_checks
from hf_speedkit.kernels.hub import inference_only_checks
from hf_speedkit.kernels.imports import installed_version
from hf_speedkit.kernels.known import torch_check, with_known_combinations, without_what_ends_the_process
from hf_speedkit.kernels.layout import BoundTo, LiveFunction, LiveLayer, held_functions, live_layers
from hf_speedkit.kernels.liger import liger_check
from hf_speedkit.kernels.model_checks import (
    asked_attention_checks,
    attention_checks,
    judge_replaced,
    model_config,
    unread_layers,
)
from hf_speedkit.kernels.refusal import refusal, warnings_in
from hf_speedkit.kernels.requirements import (
    FAMILIES,
    FUNCTIONS,
    family_of,
    training_requirements,
)
from hf_speedkit.kernels.stack import read_stack
from hf_speedkit.kernels.verdicts import Judgement, check_of, judge, nothing_known, unknown_layout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Mode = Literal["strict", "warn", "off"]


def check_kernels(
    model_or_config: Any,
    *,
    probe: bool = False,
    tokens_per_batch: int | None = None,
    dtype: torch.dtype | None = None,
    stack: Stack | None = None,
    liger: bool = False,
    asked_attention: str | None = None,
) -> tuple[KernelCheck, ...]:
    """Say for every optimised function that training calls what it is bound to, and on how many layers.

    Looks at the objects that the live layers will call; `is_*_available()` and `model.use_kernels` are not evidence. A
    package that is installed but unused is imported once more in a process of its own, for the real exception. What is
    bound is held against the table of known combinations (`compatibility.py`). Reads only; with `probe` it also runs
    each fused function forward and backward on random tensors.

    Args:
        model_or_config: a live model (wrapped or not), or a config, for which only the packages can be checked.
        probe: run the fused functions on the model's device and compare outputs and gradients with the reference.
        tokens_per_batch: slots of a packed row; None when rows are not packed. Adds the checks that packing needs.
        dtype: what the activations will have; the parameters' own if None. Used by the probe.
        stack: device and versions; read from this machine if None.
        liger: Liger was asked for (`use_liger_kernel`): also check that it patched something in a live model.
        asked_attention: the `attn_implementation` that was asked for: also check that a live model got it.

    Returns:
        One check per function, layer class and binding. Empty only for a config whose family needs nothing.

    Raises:
        ConfigurationError: `probe` with a config; something that is neither a model nor a config.
    """
    from torch import nn

    if isinstance(model_or_config, nn.Module):
        return _live_checks(
            model_or_config,
            probe=probe,
            slots=tokens_per_batch,
            dtype=dtype,
            stack=stack or read_stack(),
            liger=liger,
            asked=asked_attention,
        )
    if not hasattr(model_or_config, "get_text_config"):
        raise ConfigurationError(
            f"expected a model or a transformers config, got {type(model_or_config).__name__}",
            mend="pass the loaded model, or transformers.AutoConfig.from_pretrained(...)",
        )
    if probe:
        raise ConfigurationError(
            "a probe runs the functions a live model is bound to, and this is a config",
            mend="load the model first, or leave probe=False",
        )
    stack = stack or read_stack()
    layers = _decoder_layers(model_or_config) or 1
    checks = with_known_combinations(config_checks(model_or_config, tokens_per_batch, stack), stack)
    return (*torch_check(stack, layers), *without_what_ends_the_process(checks))


def assert_kernels(
    model_or_config: Any,
    *,
    mode: Mode = "strict",
    checks: Sequence[KernelCheck] | None = None,
    requirements: Sequence[Requirement] | None = None,
    probe: bool = False,
    tokens_per_batch: int | None = None,
    dtype: torch.dtype | None = None,
    stack: Stack | None = None,
    liger: bool = False,
    say: Callable[[str], object] | None = None,
) -> tuple[KernelCheck, ...]:
    """Refuse to train on kernels that are slow, wrong or not known, unless told otherwise.

    Args:
        model_or_config: as in `check_kernels`.
        mode: "strict" raises; "warn" logs what is wrong and what mends it, and goes on; "off" checks nothing.
        checks: checks made before; None makes them.
        requirements: functions that must be fused, by name ("chunk_gated_delta_rule", "attention", "rms_norm"); the
            others are warned about, unless they are wrong and not only slow. None: every function that training calls.
        probe, tokens_per_batch, dtype, stack, liger: as in `check_kernels`.
        say: takes each warning; the log of this module if None.

    Returns:
        The checks, when training may go on.

    Raises:
        KernelAssertionError: mode "strict", and a function that must be fused is not, or is nowhere called.
        ConfigurationError: an unknown mode.
    """
    if mode not in ("strict", "warn", "off"):
        raise ConfigurationError(f"kernel_assertion is {mode!r}", mend='use "strict", "warn" or "off"')
    if mode == "off":
        return tuple(checks or ())
    if checks is None:
        checks = check_kernels(
            model_or_config, probe=probe, tokens_per_batch=tokens_per_batch, dtype=dtype, stack=stack, liger=liger
        )
    say = say or logger.warning
    for line in warnings_in(checks):
        say(line)
    held, others = demanded(checks, requirements)
    error = refusal(held, decoder_layers=_decoder_layers(model_or_config))
    if error is not None and mode == "strict":
        raise error
    for remark in (error, refusal(others, decoder_layers=_decoder_layers(model_or_config))):
        if remark is not None:  # without the way to go on: it goes on
            say(str(KernelAssertionError(remark.what, evidence=remark.evidence, mend=remark.mend)))
    return tuple(checks)


def _live_checks(
    model: Any,
    *,
    probe: bool,
    slots: int | None,
    dtype: torch.dtype | None,
    stack: Stack,
    liger: bool,
    asked: str | None,
) -> tuple[KernelCheck, ...]:
    checks = with_known_combinations(_check_model(model, slots), stack)
    checks = (*torch_check(stack, _decoder_layers(model) or 1), *checks)
    if liger:
        checks = (*checks, liger_check(model))
    checks = (*checks, *asked_attention_checks(model, asked, stack))
    if not probe:
        return checks
    from hf_speedkit.kernels.probe import probe_model

    return probe_model(model, checks, dtype=dtype, tokens_per_batch=slots)


def _check_model(model: Any, tokens_per_batch: int | None) -> tuple[KernelCheck, ...]:
    config = model_config(model)
    family = family_of(config.get_text_config()) if config is not None else None
    layers = live_layers(model)
    trained = [name for name, requirement in FUNCTIONS.items() if requirement.training]
    held = held_functions(model, trained)
    checks = [
        *_function_checks([*layers, *held]),
        *_missing_functions(layers, family, config),
        *experts_checks(model),
        *attention_checks(model, tokens_per_batch),
        *fused_layer_checks(model),
        *inference_only_checks(model),
    ]
    checks += unread_layers(model, config, [layer.name for layer in (*layers, *held)])
    if not checks:
        kind = type(model)
        judgement = nothing_known(f"{kind.__name__} of {kind.__module__.partition('.')[0]}")
        checks.append(check_of("layers", kind.__name__, 1, 1, judgement))
    if tokens_per_batch is not None and config is not None:
        checks += known_leak(config.get_text_config())
    return tuple(checks)


def _function_checks(layers: Sequence[LiveLayer]) -> Iterator[KernelCheck]:
    """One check per function, layer class and binding, in the order the layers come."""
    totals: dict[str, set[str]] = defaultdict(set)  # a layer may be given twice, by its global and by what it holds
    groups: dict[tuple[str, str, object], tuple[LiveFunction | str, list[str]]] = {}
    for layer in layers:
        totals[layer.kind].add(layer.name)
        if layer.replaced_by is not None:
            groups.setdefault((layer.kind, "forward", layer.replaced_by), (layer.replaced_by, []))[1].append(layer.name)
        for function in layer.functions:
            requirement = FUNCTIONS.get(function.function)
            if requirement is None or requirement.training:
                key = (layer.kind, function.function, id(function.called))
                groups.setdefault(key, (function, []))[1].append(layer.name)
    imports = Imports()
    for (kind, name, _), (found, names) in groups.items():
        judgement = judge_replaced(found) if isinstance(found, str) else _judge(found, imports, kind)
        yield check_of(name, kind, len(names), len(totals[kind]), judgement, names)


def _judge(function: LiveFunction, imports: Imports, layer: str) -> Judgement:
    requirement = FUNCTIONS.get(function.function)
    if requirement is None:
        return unknown_layout(function.global_name)
    if function.binding in (BoundTo.TORCH, BoundTo.REFERENCE):
        return judge(function, requirement, None, imports.of(requirement))
    version = installed_version(function.package or requirement.package)
    judgement = judge(function, requirement, version, None, layer)
    return judgement if function.binding is BoundTo.HUB else with_what_it_calls(judgement, requirement, imports)


def _missing_functions(layers: Sequence[LiveLayer], family: str | None, config: Any) -> Iterator[KernelCheck]:
    """Functions that the tables demand and no live layer was seen to call."""
    if family is None or family not in FAMILIES:
        return
    kind, expected = FAMILIES[family].layer, layers_of_family(config.get_text_config(), family)
    if not expected or any(layer.kind == kind and layer.replaced_by is not None for layer in layers):
        return
    seen = {function.function for layer in layers if layer.kind == kind for function in layer.functions}
    for requirement in training_requirements(family):
        if requirement.function not in seen:
            yield check_of(requirement.function, kind, expected, expected, unknown_layout(requirement.function))


def _decoder_layers(model_or_config: Any) -> int | None:
    config = model_or_config if hasattr(model_or_config, "get_text_config") else None
    if config is None and hasattr(model_or_config, "modules"):
        config = model_config(model_or_config)
    return count_of_layers(config.get_text_config()) if config is not None else None
