"""The packages behind transformers' names for flash attention: whether they are there, and whether they import."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels.imports import ImportStatus, import_outcomes, installed_version, is_installed
from hf_speedkit.kernels.verdicts import Judgement, why_not_bound

FLASH_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    # Its import name is flash-attn's folder; the distribution tells the two apart.
    "flash_attention_4": "flash-attn-4",
}
_FUNCTION = "flash_attn_varlen_func"
_IMPORTED = ("flash_attention_2", "flash_attention_3")
"""Those that are imported to see. flash-attn-4 lies in a folder of flash-attn's, which need not be a package."""


def judge_flash(implementation: str, *, live: bool) -> Judgement:
    """What a flash attention of a package of its own means.

    Args:
        implementation: a key of `FLASH_PACKAGES`.
        live: a model was built with it. False for a config alone: the function is then imported in a process of its
            own, because transformers 5.23 looks at the version only and the first forward pass, with all weights
            loaded, is what finds a wheel for another torch.
    """
    package = FLASH_PACKAGES[implementation]
    version = installed_version(package)
    if not live and not is_installed(package) and version is None:
        instead = _from_the_hub(implementation)
        if instead is not None:
            return Judgement(
                verdict=KernelVerdict.UNVERIFIED,
                evidence=f"{implementation}: {instead} from the Hub",
                reason=f"`{package}` is not installed, so transformers loads that, and shows then whether it has a "
                "build for this torch",
                fix='attn_implementation="sdpa"',
            )
        return _blocked(implementation, f"`{package}` is not installed, and the model will not load without it")
    if not live and implementation in _IMPORTED:
        outcome = import_outcomes(package, (_FUNCTION,))[_FUNCTION]
        if outcome.status is not ImportStatus.WORKS:
            return _blocked(implementation, why_not_bound(package, outcome))
    return Judgement(verdict=KernelVerdict.FUSED, evidence=f"{implementation}, {package} {version or 'from the hub'}")


def _from_the_hub(implementation: str) -> str | None:
    """What transformers 5.23 loads in a package's place where the client for the Hub's kernels is there."""
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK
    from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION

    client, taken = installed_version("kernels"), SpecifierSet(f">={KERNELS_MIN_VERSION},<{KERNELS_MAX_VERSION}")
    if client is None or not taken.contains(client, prereleases=True):
        return None
    return str(FLASH_ATTN_KERNEL_FALLBACK[implementation])


def _blocked(implementation: str, reason: str) -> Judgement:
    return Judgement(
        verdict=KernelVerdict.BLOCKED, evidence=implementation, reason=reason, fix='attn_implementation="sdpa"'
    )
