"""Which optimised functions a model family needs, and from which package: facts about transformers' modeling files.

One row per family whose modeling file uses transformers' fallback decorator
(`use_kernel_func_from_hub_with_fallback`). Checked against transformers 5.23.0; tests/kernels/test_requirements.py
reads the installed modeling files and fails when a name, a package or a layer class changes upstream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hf_speedkit.core.records import KernelRequirement

_FLA, _CONV, _MAMBA = "flash-linear-attention>=0.6,<0.7", "causal-conv1d>=1.7", "mamba-ssm"

_REQUIREMENTS = (
    KernelRequirement(
        function="causal_conv1d_fn", package="causal_conv1d", distribution=_CONV, boundary_arguments=("seq_idx",)
    ),
    KernelRequirement(function="causal_conv1d_update", package="causal_conv1d", distribution=_CONV, training=False),
    KernelRequirement(
        function="chunk_gated_delta_rule", package="fla", distribution=_FLA, boundary_arguments=("cu_seqlens",)
    ),
    KernelRequirement(function="fused_recurrent_gated_delta_rule", package="fla", distribution=_FLA, training=False),
    KernelRequirement(function="chunk_kda", package="fla", distribution=_FLA, boundary_arguments=("cu_seqlens",)),
    KernelRequirement(function="fused_recurrent_kda", package="fla", distribution=_FLA, training=False),
    KernelRequirement(
        function="mamba_split_conv1d_scan_combined",
        package="mamba_ssm",
        distribution=_MAMBA,
        boundary_arguments=("seq_idx",),
    ),
    KernelRequirement(
        function="mamba_chunk_scan_combined",
        package="mamba_ssm",
        distribution=_MAMBA,
        boundary_arguments=("seq_idx",),
    ),
    # The two of Mamba 1 take no boundaries at all: mamba_ssm has no such parameter.
    KernelRequirement(function="mamba_inner_fn", package="mamba_ssm", distribution=_MAMBA),
    KernelRequirement(function="selective_scan_fn", package="mamba_ssm", distribution=_MAMBA),
    KernelRequirement(function="selective_state_update", package="mamba_ssm", distribution=_MAMBA, training=False),
)

FUNCTIONS: Mapping[str, KernelRequirement] = MappingProxyType({row.function: row for row in _REQUIREMENTS})
"""Every function behind the fallback decorator, by the name its package gives it."""

CALLS_ITSELF: Mapping[str, str] = MappingProxyType(
    {"mamba_inner_fn": "causal_conv1d", "mamba_split_conv1d_scan_combined": "causal_conv1d"}
)
"""Function -> package whose compiled functions it calls by itself and raises without (mamba_ssm imports them in a
`try`: ops/selective_scan_interface.py, ops/triton/ssd_combined.py). Nothing can stand in for that package there."""

CALLED_WITH: Mapping[str, tuple[int, tuple[str, ...]]] = MappingProxyType(
    {
        "causal_conv1d_fn": (3, ("activation",)),
        "chunk_gated_delta_rule": (3, ("g", "beta", "use_qk_l2norm_in_kernel")),
        "chunk_kda": (3, ("g", "beta", "use_qk_l2norm_in_kernel")),
        "mamba_split_conv1d_scan_combined": (
            5,
            (
                *("D", "chunk_size", "activation", "rmsnorm_weight", "rmsnorm_eps", "outproj_weight", "outproj_bias"),
                *("headdim", "ngroups", "norm_before_gate", "dt_limit"),
            ),
        ),
        "mamba_chunk_scan_combined": (5, ("chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit")),
        "mamba_inner_fn": (11, ("delta_bias", "delta_softplus")),
        "selective_scan_fn": (5, ("D", "z", "delta_bias", "delta_softplus")),
    }
)
"""How layers call a function for training: positional arguments, and keywords that change what it computes.
transformers drops a keyword that the implementation's signature does not name, without a word."""

CALLED_WITH_BY: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        # mamba_ssm as it was before state-spaces/mamba pull request 543 leaves out three norms: "complete gibberish"
        # (transformers pull request 33195).
        "FalconMambaMixer": {"mamba_inner_fn": ("b_rms_weight", "c_rms_weight", "dt_rms_weight", "b_c_dt_rms_eps")}
    }
)
"""Layer class -> function -> keywords beside those of `CALLED_WITH`."""

INTERNAL_PATHS: Mapping[str, str] = MappingProxyType(
    {
        "chunk_gated_delta_rule": "ops.gated_delta_rule",
        "fused_recurrent_gated_delta_rule": "ops.gated_delta_rule",
        "chunk_kda": "ops.kda",
        "fused_recurrent_kda": "ops.kda",
        "mamba_split_conv1d_scan_combined": "ops.triton.ssd_combined",
        "mamba_chunk_scan_combined": "ops.triton.ssd_combined",
        "selective_state_update": "ops.triton.selective_state_update",
        "mamba_inner_fn": "ops.selective_scan_interface",
        "selective_scan_fn": "ops.selective_scan_interface",
    }
)
"""Where inside its package transformers looks for a function; the package itself if not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one of transformers' modeling files asks for.

    Args:
        layer: class whose forward calls the functions.
        functions: names in `FUNCTIONS`.
        layer_types: entries of `config.layer_types` for the decoder layers that hold such a layer.

    Whether packed rows of a family stay apart is another question: `hf_speedkit.core.families`.
    """

    layer: str
    functions: tuple[str, ...]
    layer_types: tuple[str, ...] = ("linear_attention",)


_CONVOLUTION = ("causal_conv1d_fn", "causal_conv1d_update")
_DELTA_NET = (*_CONVOLUTION, "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
_KIMI_DELTA = (*_CONVOLUTION, "chunk_kda", "fused_recurrent_kda")
_MAMBA_1 = (*_CONVOLUTION, "selective_scan_fn", "selective_state_update")
_MAMBA_1_FUSED = (*_MAMBA_1, "mamba_inner_fn")
_MAMBA_2 = (
    *_CONVOLUTION,
    "mamba_split_conv1d_scan_combined",
    "mamba_chunk_scan_combined",
    "selective_state_update",
)
_EVERY_LAYER = ("hybrid", "hybrid_sliding")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bailing_hybrid": Family(layer="BailingHybridDeltaAttention", functions=_KIMI_DELTA),
        "bamba": Family(layer="BambaMixer", functions=_MAMBA_2),
        "falcon_h1": Family(layer="FalconH1Mixer", functions=_MAMBA_2, layer_types=("hybrid",)),
        "falcon_mamba": Family(layer="FalconMambaMixer", functions=_MAMBA_1_FUSED),
        "glm5_next": Family(layer="Glm5NextTextLinearAttention", functions=_KIMI_DELTA),
        "granitemoehybrid": Family(layer="GraniteMoeHybridMambaLayer", functions=_MAMBA_2),
        "inkling": Family(
            layer="InklingShortConvolution",
            functions=_CONVOLUTION,
            layer_types=_EVERY_LAYER,
        ),
        "inkling2": Family(
            layer="Inkling2ShortConvolution",
            functions=_CONVOLUTION,
            layer_types=_EVERY_LAYER,
        ),
        "inkling2_loop": Family(
            layer="Inkling2LoopShortConvolution",
            functions=_CONVOLUTION,
            layer_types=_EVERY_LAYER,
        ),
        "jamba": Family(layer="JambaMambaMixer", functions=_MAMBA_1),
        "kimi_linear": Family(layer="KimiLinearDeltaAttention", functions=_KIMI_DELTA),
        "lara_mini": Family(layer="LaraMiniGatedDeltaNet", functions=_DELTA_NET),
        "lfm2": Family(layer="Lfm2ShortConv", functions=_CONVOLUTION, layer_types=("conv",)),
        "lfm2_moe": Family(layer="Lfm2MoeShortConv", functions=_CONVOLUTION, layer_types=("conv",)),
        "mamba": Family(layer="MambaMixer", functions=_MAMBA_1_FUSED),
        "mamba2": Family(layer="Mamba2Mixer", functions=_MAMBA_2),
        "nemotron_h": Family(layer="NemotronHMamba2Mixer", functions=_MAMBA_2),
        "olmo_hybrid": Family(layer="OlmoHybridGatedDeltaNet", functions=_DELTA_NET),
        "qwen3_5": Family(layer="Qwen3_5GatedDeltaNet", functions=_DELTA_NET),
        "qwen3_5_moe": Family(layer="Qwen3_5MoeGatedDeltaNet", functions=_DELTA_NET),
        "qwen3_next": Family(layer="Qwen3NextGatedDeltaNet", functions=_DELTA_NET),
        "qwen4_exp": Family(layer="Qwen4ExpTextGatedDeltaNet", functions=_DELTA_NET),
        "zamba": Family(layer="ZambaMambaMixer", functions=_MAMBA_1, layer_types=("linear_attention", "hybrid")),
        "zamba2": Family(
            layer="Zamba2MambaMixer",
            functions=_MAMBA_2,
            layer_types=("linear_attention", "hybrid"),
        ),
    }
)
"""The 22 families of transformers 5.23.0 and two that 5.24 added (inkling2_loop, lara_mini), by the name of their
folder under `transformers/models`."""


def family_of(config: object) -> str | None:
    """Name of the modeling folder a config belongs to ("qwen3_5"), None for remote code or another library.

    The folder and not `model_type`, because a text config has a type of its own ("qwen3_5_text").
    """
    for kind in type(config).__mro__:
        parts = kind.__module__.split(".")
        if parts[:2] == ["transformers", "models"] and len(parts) > 2:
            return parts[2]
    return None


def stands_alone(functions: Iterable[str]) -> bool:
    """Whether another convolution can take causal-conv1d's place beside these functions: see `CALLS_ITSELF`."""
    return not any(CALLS_ITSELF.get(function) == "causal_conv1d" for function in functions)


def training_requirements(family: str) -> tuple[KernelRequirement, ...]:
    """The functions that training `family` calls; empty for a family without such layers.

    Functions that only run when one token is decoded at a time are left out.
    """
    if family not in FAMILIES:
        return ()
    rows = (FUNCTIONS[name] for name in FAMILIES[family].functions)
    return tuple(row for row in rows if row.training)
