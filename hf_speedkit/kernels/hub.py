"""Kernels that are loaded from the Hub by name: asked for against loaded, and why one did not load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.layout import effective_forward
from hf_speedkit.kernels.verdicts import Judgement, check_of

if TYPE_CHECKING:
    from torch import nn


def is_hub_name(implementation: str) -> bool:
    """Whether an attention implementation is a repository ("kernels-community/flash-attn3", with or without more)."""
    return "/" in implementation


def inference_only_checks(model: nn.Module) -> Iterator[KernelCheck]:
    """One check per class of layers whose forward a hub kernel without a backward has taken.

    `kernels` marks such a layer `has_backward = False` and leaves it out where it is told that the model trains; a
    model that was prepared for inference keeps it (V55 in the public reports).
    """
    found: Counter[tuple[str, str]] = Counter()
    totals: Counter[str] = Counter()
    for module in model.modules():
        kind, forward = type(module).__name__, effective_forward(module)
        totals[kind] += 1
        if forward is not None and "forward" in vars(module):
            owner = forward.__globals__.get(forward.__qualname__.partition(".")[0])
            if getattr(owner, "has_backward", True) is False:
                found[kind, f"{forward.__module__}.{forward.__qualname__}"] += 1
    for (kind, place), count in found.items():
        judgement = Judgement(
            verdict=KernelVerdict.FORWARD_ONLY,
            evidence=f"hub kernel {place}",
            reason="it is marked has_backward=False, and the model was prepared with it for inference",
            fix="load the model without use_kernels=True, or kernelize it with mode=Mode.TRAINING",
        )
        yield check_of("hub_layer", kind, count, totals[kind], judgement)


def judge_hub_kernel(
    implementation: str, stack: Stack, *, loaded: str | None = None, resolve: Callable[[str], Any] | None = None
) -> Judgement:
    """Say whether a Hub kernel is what runs.

    Hub kernels are built for exact versions of torch; one without a build for this torch fails, or another attention
    is taken silently (V46 in the public reports).

    Args:
        implementation: the repository asked for.
        stack: this machine.
        loaded: the implementation that a live model has in the end; None to try loading it now.
        resolve: loads a kernel by name; transformers' own loader if None.
    """
    if loaded is not None:
        if loaded == implementation:
            return Judgement(verdict=KernelVerdict.FUSED, evidence=f"{implementation}, loaded from the Hub")
        return Judgement(
            verdict=KernelVerdict.FALLBACK,
            evidence=loaded,
            reason=f"{implementation} was asked for and {loaded} was loaded",
            fix=_three_ways(stack),
        )
    try:
        (resolve or _resolve)(implementation.partition(":")[0].partition("@")[0])
    except Exception as error:  # noqa: BLE001 (whatever the loader raises is the finding)
        return Judgement(
            verdict=KernelVerdict.BLOCKED,
            evidence=implementation,
            reason=f"it does not load with {_described(stack)}: {type(error).__name__}: {error}",
            fix=_three_ways(stack),
        )
    return Judgement(verdict=KernelVerdict.FUSED, evidence=f"{implementation}, loaded from the Hub")


def _resolve(name: str) -> Any:
    from transformers.integrations.hub_kernels import get_kernel

    return get_kernel(name)


def _described(stack: Stack) -> str:
    return f"torch {stack.versions.get('torch', '?')}, CUDA {stack.cuda or 'none'}, Python {stack.python}"


def _three_ways(stack: Stack) -> str:
    return (
        "pin torch to a version the kernel was built for; or ask for a branch of the kernel that has a build for torch "
        f"{stack.versions.get('torch', '?')} (name@branch); or install the package itself and name that "
        '(attn_implementation="flash_attention_2", or "sdpa", which needs nothing)'
    )
