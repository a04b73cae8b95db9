"""Whether Liger, where it was asked for, patched anything: 0 patched modules are only an info line there (V56)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.layout import effective_forward

if TYPE_CHECKING:
    from torch import nn


def liger_check(model: nn.Module) -> KernelCheck:
    """Count what Liger replaced in a model that was to be patched by it.

    Looks at the forward that each module will run: one from liger_kernel counts, whether the class was replaced or the
    instance. Candidates are the norms, the gated MLPs and the model itself (the fused loss).
    """
    patched = candidates = 0
    for module in model.modules():
        is_patched = _runs_liger(module)
        if is_patched or _is_candidate(module):
            candidates += 1
            patched += is_patched
    kind = type(model).__name__
    if patched:
        return KernelCheck(
            function="liger",
            verdict=KernelVerdict.FUSED,
            layer=kind,
            layers=patched,
            layers_total=candidates,
            evidence=f"liger_kernel patched {patched} of {candidates} modules",
        )
    return KernelCheck(
        function="liger",
        verdict=KernelVerdict.FALLBACK,
        layer=kind,
        layers=candidates,
        layers_total=candidates,
        evidence="transformers' own modules",
        reason=f"use_liger_kernel was asked for, and 0 of {candidates} modules are patched: Liger has no entry for "
        "this model type, or is not installed, and says so in an info line only",
        fix="use_liger_kernel=False",
    )


def _runs_liger(module: nn.Module) -> bool:
    forward = effective_forward(module)
    places = (type(module).__module__, getattr(forward, "__module__", ""))
    return any(place.partition(".")[0] == "liger_kernel" for place in places)


def _is_candidate(module: nn.Module) -> bool:
    is_mlp = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    return is_mlp or type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
