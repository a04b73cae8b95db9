"""What a config alone says about kernels: which functions its layers will call, and what importing those gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_speedkit.core.families import why_it_leaks
from hf_speedkit.core.records import KernelCheck, KernelRequirement, KernelVerdict
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.fla_convolution import CONVOLUTION, judge_stand_in
from hf_speedkit.kernels.hub import is_hub_name, judge_hub_kernel
from hf_speedkit.kernels.imports import ImportOutcome, import_outcomes
from hf_speedkit.kernels.model_checks import judge_attention
from hf_speedkit.kernels.requirements import (
    CALLS_ITSELF,
    FAMILIES,
    FUNCTIONS,
    family_of,
    stands_alone,
    training_requirements,
)
from hf_speedkit.kernels.verdicts import Judgement, check_of, judge_import, judge_what_it_calls


class Imports:
    """Outcomes of importing packages again, each package once and only when somebody asks."""

    def __init__(self) -> None:
        self._outcomes: dict[str, Mapping[str, ImportOutcome]] = {}

    def of(self, requirement: KernelRequirement) -> ImportOutcome:
        """Outcome for one function; the first question about a package imports all its functions."""
        package = requirement.package
        if package not in self._outcomes:
            names = [row.function for row in FUNCTIONS.values() if row.package == package]
            self._outcomes[package] = import_outcomes(package, names)
        return self._outcomes[package][requirement.function]


def with_what_it_calls(judgement: Judgement, requirement: KernelRequirement, imports: Imports) -> Judgement:
    """The judgement of a function, with that of the package that it calls by itself, if it does."""
    if requirement.function not in CALLS_ITSELF:
        return judgement
    called = next(row for row in FUNCTIONS.values() if row.package == CALLS_ITSELF[requirement.function])
    return judge_what_it_calls(judgement, called, imports.of(called))


def config_checks(config: Any, tokens_per_batch: int | None, stack: Stack) -> Iterator[KernelCheck]:
    """One check per function that training will call, as importing it says, and one for an attention that is named.

    Args:
        config: of transformers; of a multimodal one the text part counts.
        tokens_per_batch: slots of a packed row; None when rows are not packed.
        stack: this machine.
    """
    text_config = config.get_text_config()
    family = family_of(text_config)
    imports = Imports()
    if family is not None and family in FAMILIES and not getattr(text_config, "layer_types", None):
        yield check_of("layers", FAMILIES[family].layer, 0, 0, _without_layer_types(text_config))
    elif family is not None:
        layers = layers_of_family(text_config, family)
        requirements = training_requirements(family) if layers else ()
        replaceable = stands_alone(requirement.function for requirement in requirements)
        for requirement in requirements:
            judgement = judge_import(requirement, imports.of(requirement), FAMILIES[family].layer)
            judgement = with_what_it_calls(judgement, requirement, imports)
            if requirement.function == CONVOLUTION and judgement.verdict is KernelVerdict.FALLBACK and replaceable:
                judgement = judge_stand_in(judgement, imports.of(FUNCTIONS["chunk_gated_delta_rule"]), stack)
            yield check_of(requirement.function, FAMILIES[family].layer, layers, layers, judgement)
    implementation = getattr(text_config, "_attn_implementation", None)
    layers = attention_layers(text_config)
    if implementation is not None and layers:
        judgement = (
            judge_hub_kernel(implementation, stack)
            if is_hub_name(implementation)
            else judge_attention(implementation, text_config, tokens_per_batch, live=False)
        )
        yield check_of("attention", "attention layers", layers, layers, judgement)
    if tokens_per_batch is not None:
        yield from known_leak(text_config)


def known_leak(text_config: Any) -> Iterator[KernelCheck]:
    """Packed rows leak in some families although every kernel is there: a check of its own says so."""
    reason = why_it_leaks(str(text_config.model_type)) if family_of(text_config) is not None else None
    if reason is None:
        return
    judgement = Judgement(
        verdict=KernelVerdict.NO_BOUNDARIES,
        evidence="measured on transformers 5.23; no kernel package changes it",
        reason=f"packed documents of {text_config.model_type} are not kept apart: {reason}",
        fix="packing=False  # padded rows for this family",
    )
    layers = count_of_layers(text_config) or 1
    yield check_of("packed_rows", "decoder layers", layers, layers, judgement)


def _without_layer_types(text_config: Any) -> Judgement:
    return Judgement(
        verdict=KernelVerdict.UNVERIFIED,
        evidence=f"a config of {text_config.model_type} without layer_types",
        reason="which of its layers need kernels is not known",
    )


def layers_of_family(text_config: Any, family: str) -> int:
    """Decoder layers that call the functions of a family."""
    kinds = FAMILIES[family].layer_types if family in FAMILIES else ()
    layer_types = getattr(text_config, "layer_types", None) or ()
    return sum(kind in kinds for kind in layer_types)


def attention_layers(text_config: Any) -> int:
    """Decoder layers with attention over all positions, as far as a config says."""
    layer_types = getattr(text_config, "layer_types", None)
    if not layer_types:
        return int(getattr(text_config, "num_hidden_layers", 0))
    return sum(kind != "linear_attention" and ("attention" in kind or "hybrid" in kind) for kind in layer_types)


def count_of_layers(text_config: Any) -> int | None:
    """Decoder layers; None where the config does not say."""
    count = getattr(text_config, "num_hidden_layers", None)
    return count if isinstance(count, int) else None
