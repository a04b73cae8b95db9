"""Which attention and which experts implementation a live model runs, and what that costs with packed rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.hub import is_hub_name, judge_hub_kernel
from hf_speedkit.kernels.imports import installed_version, is_installed
from hf_speedkit.kernels.layout import effective_forward, names_used
from hf_speedkit.kernels.verdicts import Judgement, check_of

if TYPE_CHECKING:
    from torch import nn

SDPA_WARNING_SLOTS = 4096
"""Rows longer than this make the mask worth a word: 16 MiB at 4,096 slots, four times as much for each doubling."""

_FLASH_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    # Its import name is flash-attn's folder; the distribution tells the two apart.
    "flash_attention_4": "flash-attn-4",
}
_EXPERTS = ("grouped_mm", "batched_mm", "deepgemm", "sonicmoe")


def model_config(model: nn.Module) -> Any:
    """Config of the transformers model inside `model` (PEFT, DDP and FSDP wrappers are looked through), or None."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            return config
    return None


def attention_checks(model: nn.Module, tokens_per_batch: int | None) -> Iterator[KernelCheck]:
    """One check per attention class and implementation among the layers of the text model."""
    config = model_config(model)
    text_config: Any = config.get_text_config() if config is not None else None
    modules: list[Any] = [module for module in model.modules() if _dispatches_attention(module)]
    attention = [(type(module).__name__, module.config) for module in modules if hasattr(module, "config")]
    # Towers for images and sound have configs of their own; their rows are not the packed ones.
    of_text = [(layer, own) for layer, own in attention if own is text_config]
    found = Counter((layer, str(own._attn_implementation)) for layer, own in of_text or attention)
    totals: Counter[str] = Counter()
    for (layer, _), count in found.items():
        totals[layer] += count
    for (layer, implementation), count in sorted(found.items()):
        judgement = judge_attention(implementation, text_config, tokens_per_batch, live=True, sdpa=_takes_sdpa(model))
        yield check_of("attention", layer, count, totals[layer], judgement)


def asked_attention_checks(model: nn.Module, asked: str | None, stack: Stack) -> Iterator[KernelCheck]:
    """A check where a Hub kernel was asked for and another attention was loaded in its place (V46).

    Args:
        model: the live model.
        asked: the implementation that was asked for; None where nobody knows.
        stack: this machine.
    """
    config = model_config(model)
    if asked is None or config is None or not is_hub_name(asked):
        return
    loaded = str(config.get_text_config()._attn_implementation)
    # Ours takes the place of sdpa for packed rows, by choice; a revision is no part of the repository.
    if _is_ours(loaded) or loaded.partition("@")[0] == asked.partition("@")[0]:
        return
    layers = sum(_dispatches_attention(module) for module in model.modules())
    yield check_of("attention", "attention layers", layers, layers, judge_hub_kernel(asked, stack, loaded=loaded))


def experts_checks(model: nn.Module) -> Iterator[KernelCheck]:
    """One check per class of mixture-of-experts layers that transformers dispatches."""
    found: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        forward = getattr(type(module), "forward", None)
        if "experts_interface" in getattr(getattr(forward, "__code__", None), "co_freevars", ()):
            found[type(module).__name__, str(getattr(module.config, "_experts_implementation", None))] += 1
    totals: Counter[str] = Counter()
    for (layer, _), count in found.items():
        totals[layer] += count
    for (layer, implementation), count in sorted(found.items()):
        yield check_of("experts", layer, count, totals[layer], _judge_experts(implementation))


def _dispatches_attention(module: nn.Module) -> bool:
    forward = effective_forward(module)
    return forward is not None and "ALL_ATTENTION_FUNCTIONS" in names_used(forward, type(module))


def _takes_sdpa(model: nn.Module) -> bool:
    """Whether transformers' class inside a model (or any of them) lists sdpa among what it can run."""
    flags = [flag for module in model.modules() if isinstance(flag := getattr(module, "_supports_sdpa", None), bool)]
    return any(flags) or not flags


def judge_attention(
    implementation: str, config: Any, tokens_per_batch: int | None, *, live: bool, sdpa: bool = True
) -> Judgement:
    """What an attention implementation means for packed rows of `tokens_per_batch` slots (None: not packed).

    Args:
        implementation: its name in transformers' AttentionInterface.
        config: text config, for the number of heads.
        tokens_per_batch: slots of a packed row.
        live: a model was built with it, so that its package was importable; False for a config alone.
        sdpa: the model's class can run sdpa, so that eager attention can be mended by it.
    """
    if implementation == "eager":
        return Judgement(
            verdict=KernelVerdict.FALLBACK,
            evidence="eager attention",
            reason="it builds the scores of every head"
            + _score_bytes(config, tokens_per_batch)
            + ("" if sdpa else "; transformers has no sdpa for this class"),
            fix='attn_implementation="sdpa"' if sdpa else None,
        )
    if implementation == "sdpa":
        return _judge_sdpa(tokens_per_batch)
    if implementation in _FLASH_PACKAGES:
        package = _FLASH_PACKAGES[implementation]
        if not live and not is_installed(package) and installed_version(package) is None:
            return Judgement(
                verdict=KernelVerdict.BLOCKED,
                evidence=implementation,
                reason=f"`{package}` is not installed, and the model will not load without it",
                fix='attn_implementation="sdpa"',
            )
        version = installed_version(package)
        return Judgement(
            verdict=KernelVerdict.FUSED, evidence=f"{implementation}, {package} {version or 'from the hub'}"
        )
    if implementation == "flex_attention":
        return Judgement(verdict=KernelVerdict.FUSED, evidence="torch flex_attention")
    if is_hub_name(implementation):
        return Judgement(verdict=KernelVerdict.FUSED, evidence=f"{implementation}, loaded from the Hub")
    if _is_ours(implementation):
        return Judgement(
            verdict=KernelVerdict.FUSED,
            evidence=f"{implementation}: torch variable-length attention (on a CPU sdpa, document by document)",
        )
    return Judgement(
        verdict=KernelVerdict.UNVERIFIED,
        evidence=f"attention implementation {implementation!r}",
        reason="it is not one this version knows, so nothing is claimed about packed rows",
        fix='attn_implementation="sdpa"',
    )


def _judge_sdpa(tokens_per_batch: int | None) -> Judgement:
    evidence = "torch scaled_dot_product_attention"
    if tokens_per_batch is None:
        return Judgement(verdict=KernelVerdict.FUSED, evidence=evidence)
    mask = f"a boolean mask of {_readable(tokens_per_batch**2)} a row of {tokens_per_batch:,} slots"
    reason = None
    if tokens_per_batch > SDPA_WARNING_SLOTS:
        reason = (
            f"sdpa needs {mask} to keep packed documents apart, and attends over all of it; attention that takes the "
            f"boundaries instead needs no mask and computes the documents only"
        )
    return Judgement(verdict=KernelVerdict.FUSED, evidence=f"{evidence}, {mask}", reason=reason)


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


def _is_ours(implementation: str) -> bool:
    from transformers import AttentionInterface

    registered = AttentionInterface().get(implementation)
    return getattr(registered, "__module__", "").startswith("hf_speedkit.")


def _score_bytes(config: Any, tokens_per_batch: int | None) -> str:
    # A config whose layers differ raises for what they do not share.
    heads = None if getattr(config, "is_heterogeneous", False) else getattr(config, "num_attention_heads", None)
    if tokens_per_batch is None or not isinstance(heads, int):
        return ""
    # softmax runs in float32: 4 bytes per score (eager_attention_forward in each modeling file).
    return f": {_readable(4 * heads * tokens_per_batch**2)} per layer for a row of {tokens_per_batch:,} slots"


def _readable(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
