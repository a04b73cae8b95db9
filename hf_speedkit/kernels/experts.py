"""Which implementation a live model's mixture-of-experts layers run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.verdicts import Judgement, check_of

if TYPE_CHECKING:
    from torch import nn

_EXPERTS = ("grouped_mm", "batched_mm", "deepgemm", "sonicmoe")


def experts_checks(model: nn.Module) -> Iterator[KernelCheck]:
    """One check per class of mixture-of-experts layers that transformers dispatches."""
    found: Counter[tuple[str, str]] = Counter()
    looped: set[str] = set()
    for module in model.modules():
        forward = getattr(type(module), "forward", None)
        if "experts_interface" in getattr(getattr(forward, "__code__", None), "co_freevars", ()):
            implementation = str(getattr(module.config, "_experts_implementation", None))
            found[type(module).__name__, implementation] += 1
            if implementation == "grouped_mm" and _loops_all_the_same(module):
                looped.add(type(module).__name__)
    totals: Counter[str] = Counter()
    for (layer, _), count in found.items():
        totals[layer] += count
    for (layer, implementation), count in sorted(found.items()):
        judgement = _LOOPED if layer in looped and implementation == "grouped_mm" else _judge_experts(implementation)
        yield check_of("experts", layer, count, totals[layer], judgement)


_LOOPED = Judgement(
    verdict=KernelVerdict.FALLBACK,
    evidence="experts implementation grouped_mm",
    reason="transformers loops over the experts under that name where torch's grouped product cannot run: a GPU below "
    "compute capability 8.0, or a torch before 2.9 (5.23, integrations/moe.py:301)",
    fix="a GPU from compute capability 8.0 on, and torch>=2.9",
)


def _loops_all_the_same(experts: Any) -> bool:
    """Whether transformers' own test sends these weights to its loop; private there, so an unknown one says no."""
    from transformers.integrations import moe

    test = getattr(moe, "_can_use_grouped_mm", None)
    weight = next((parameter for parameter in experts.parameters() if parameter.dim() == 3), None)
    return test is not None and weight is not None and not test(weight, weight, None)


def _judge_experts(implementation: str) -> Judgement:
    if implementation == "eager":
        return Judgement(
            verdict=KernelVerdict.FALLBACK,
            evidence="eager experts",
            reason="it loops over the experts; transformers takes it without a word where grouped_mm cannot be used "
            "(5.23, modeling_utils.py:1883)",
            fix='experts_implementation="grouped_mm"',
        )
    if implementation in _EXPERTS:
        return Judgement(verdict=KernelVerdict.FUSED, evidence=f"experts implementation {implementation}")
    return Judgement(
        verdict=KernelVerdict.UNVERIFIED,
        evidence=f"experts implementation {implementation!r}",
        reason="it is not one this version knows",
        fix='experts_implementation="grouped_mm"',
    )
