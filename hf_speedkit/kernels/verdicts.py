"""From what a function is bound to, to a verdict in words: pure rules, no model and no device."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from hf_speedkit.core.records import KernelCheck, KernelRequirement, KernelVerdict
from hf_speedkit.kernels.faults import way_to_the_driver
from hf_speedkit.kernels.imports import ImportOutcome, ImportStatus, installed_version
from hf_speedkit.kernels.layout import BoundTo, LiveFunction
from hf_speedkit.kernels.requirements import CALLED_WITH, CALLED_WITH_BY

REFERENCE_EVIDENCE = "hf_speedkit reference"
FALLBACK_EVIDENCE = "transformers' torch fallback"

_LAYER_NAMES_SHOWN = 3

# Packages whose source builds need the torch that is installed, not a fresh one in an isolated environment.
_BUILT_FROM_SOURCE = ("causal_conv1d", "mamba_ssm")
# The functions lie in a distribution of their own, which --no-deps would leave as it is.
_HELD_BY = {"fla": "fla-core>=0.6,<0.7"}
# Modules that an import was seen to miss and that pip knows by this name. Of others nothing is guessed: the first to
# register a name can put anything there. fla 0.6.0 refuses its backward on Hopper with triton [3.4.0, 3.7.1): fla
# pull request 983, met on an H200.
_REQUIREMENTS = {
    "triton": "triton>=3.7.1",
    "einops": "einops",
    "packaging": "packaging",
    "ninja": "ninja",
    "tilelang": "tilelang==0.1.13",
    "tvm_ffi": "apache-tvm-ffi>=0.1.11,<0.1.13",
    "causal_conv1d": "causal-conv1d>=1.7",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The part of a `KernelCheck` that does not depend on which layers it is about."""

    verdict: KernelVerdict
    evidence: str
    reason: str | None = None
    fix: str | None = None


def judge(
    function: LiveFunction,
    requirement: KernelRequirement,
    version: str | None,
    outcome: ImportOutcome | None,
    layer: str = "",
) -> Judgement:
    """What a bound function means for training.

    Args:
        function: as a live layer calls it.
        requirement: its row in the tables.
        version: of the package's distribution; None where not known.
        outcome: of repeating the import; needed for a fallback or a reference only.
        layer: class that calls it.
    """
    if function.binding is BoundTo.PACKAGE and function.implementation is not None:
        return _judge_signature(function.implementation, requirement, _described(function, version), layer)
    if function.binding is BoundTo.HUB and function.implementation is not None:
        return _judge_hub(function, requirement)
    if outcome is None or function.binding in (BoundTo.UNKNOWN, BoundTo.PACKAGE, BoundTo.HUB):
        return unknown_layout(function.global_name)
    return Judgement(
        verdict=KernelVerdict.FALLBACK,
        evidence=REFERENCE_EVIDENCE if function.binding is BoundTo.REFERENCE else _fallback_evidence(function),
        reason=why_not_bound(requirement.package, outcome),
        fix=command_that_mends(requirement, outcome),
    )


def judge_import(requirement: KernelRequirement, outcome: ImportOutcome, layer: str = "") -> Judgement:
    """What importing a function, without a model, says about a model of such layers that would be loaded now."""
    if outcome.status is ImportStatus.WORKS:
        evidence = f"{requirement.package} {outcome.version or '(version unknown)'} imports"
        parameters = outcome.parameters or ()
        problem = _dropped(parameters, requirement, layer)
        if problem is not None:
            return Judgement(
                verdict=KernelVerdict.BROKEN, evidence=evidence, reason=problem, fix=upgrade_command(requirement)
            )
        missing = [name for name in requirement.boundary_arguments if name not in parameters]
        if missing:
            return _without_boundaries(requirement, missing, evidence)
        return Judgement(verdict=KernelVerdict.FUSED, evidence=evidence)
    return Judgement(
        verdict=KernelVerdict.FALLBACK,
        evidence=FALLBACK_EVIDENCE,
        reason=why_not_bound(requirement.package, outcome),
        fix=command_that_mends(requirement, outcome),
    )


def check_of(
    function: str, layer: str, layers: int, total: int, judgement: Judgement, names: Sequence[str] = ()
) -> KernelCheck:
    """A judgement as a check of `layers` of `total` layers; where it is some of them, their names are shown."""
    evidence = judgement.evidence
    if layers < total and names:
        shown = ", ".join(names[:_LAYER_NAMES_SHOWN]) + (" ..." if len(names) > _LAYER_NAMES_SHOWN else "")
        evidence = f"{evidence} (on {shown})"
    return KernelCheck(
        function=function,
        verdict=judgement.verdict,
        layer=layer,
        layers=layers,
        layers_total=total,
        evidence=evidence,
        reason=judgement.reason,
        fix=judgement.fix,
    )


def unknown_layout(name: str) -> Judgement:
    """Nothing is claimed about a binding that this version cannot read."""
    return Judgement(
        verdict=KernelVerdict.UNVERIFIED,
        evidence=f"{name} is bound in a way this version of hf_speedkit does not know",
        reason="other code has put a function of its own there, or the layout of transformers differs from 5.23, which "
        "it was checked against",
        fix=None
        if (installed_version("transformers") or "").startswith(("5.23.", "5.24."))
        else 'pip install "transformers>=5.23,<5.24"',
    )


def nothing_known(what: str) -> Judgement:
    """Nothing is claimed about a model of which no function and no attention was recognised.

    Args:
        what: the model, and where its code is from.
    """
    return Judgement(
        verdict=KernelVerdict.UNVERIFIED,
        evidence=f"{what}: no kernel, no attention and no experts that this version knows",
        reason="its layers have code of their own, and what that runs cannot be read",
    )


def why_not_bound(package: str, outcome: ImportOutcome) -> str:
    """One sentence: the real cause of a fallback."""
    if outcome.status is ImportStatus.ABSENT:
        return f"`{package}` is not installed"
    if outcome.status is ImportStatus.FAILS:
        return f"`{package}` is installed but fails to import: {outcome.detail}"
    if outcome.shadow is not None:
        return f"{outcome.shadow} is imported in the place of `{package}`, and has no {outcome.detail}"
    if outcome.status is ImportStatus.LACKS:
        return f"`{package}` {outcome.version or '(version unknown)'} imports but has no {outcome.detail}"
    return (
        f"`{package}` imports now, but did not when transformers' modeling file was imported, and that import decides"
    )


def command_that_mends(requirement: KernelRequirement, outcome: ImportOutcome) -> str:
    """The exact command for the cause that `why_not_bound` names."""
    flags = "--no-build-isolation " if requirement.package in _BUILT_FROM_SOURCE else ""
    wanted = f'"{requirement.distribution}"'
    if outcome.status is ImportStatus.WORKS:
        return "start a new process"
    if outcome.status is ImportStatus.ABSENT:
        return f"pip install {flags}{wanted}"
    if outcome.shadow is not None:
        return f"rename {outcome.shadow}: its name is taken by a package"
    if outcome.status is ImportStatus.LACKS:
        return upgrade_command(requirement)
    driver = way_to_the_driver(outcome.detail or "")
    if driver is not None:
        return driver
    missing = re.search(r"No module named '([\w.]+)'", outcome.detail or "")
    module = missing.group(1).partition(".")[0] if missing else ""
    if module in _REQUIREMENTS:
        flags = "--no-build-isolation " if module in _BUILT_FROM_SOURCE else ""
        return f'pip install {flags}"{_REQUIREMENTS[module]}"'
    if module and not _is_compiled(module):
        return f"pip install {flags}{wanted}"  # with what it requires, where that is missing
    # Built for another torch or CUDA ("undefined symbol", "cannot open shared object file"), or half installed.
    also = f' "{_HELD_BY[requirement.package]}"' if requirement.package in _HELD_BY else ""
    return f"pip install --force-reinstall --no-deps --no-cache-dir {flags}{wanted}{also}"


def _is_compiled(module: str) -> bool:
    """Whether a module is the package's own compiled part (`selective_scan_cuda`, `_C`), which no other package has."""
    return module.startswith("_") or module.endswith(("_cuda", "_C", "_ext"))


def judge_what_it_calls(judgement: Judgement, requirement: KernelRequirement, outcome: ImportOutcome) -> Judgement:
    """Block a function that would be fused but calls another package by itself that is not there (`CALLS_ITSELF`).

    Args:
        judgement: of the function itself.
        requirement: of the function that it calls.
        outcome: of importing that one.
    """
    if judgement.verdict is not KernelVerdict.FUSED or outcome.status is ImportStatus.WORKS:
        return judgement
    return Judgement(
        verdict=KernelVerdict.BLOCKED,
        evidence=judgement.evidence,
        reason=f"it calls `{requirement.package}` by itself and raises without it: "
        f"{why_not_bound(requirement.package, outcome)}",
        fix=command_that_mends(requirement, outcome),
    )


def _fallback_evidence(function: LiveFunction) -> str:
    """Whose torch function runs: a model with code of its own brings its own, or holds None."""
    home = str(getattr(function.implementation, "__module__", None) or "the model's own code")
    if home.startswith("transformers."):
        return FALLBACK_EVIDENCE
    return f"{home}, {getattr(function.called, '__name__', function.called)}"


def _judge_hub(function: LiveFunction, requirement: KernelRequirement) -> Judgement:
    """A hub kernel gets the layer's arguments as they are: nothing is dropped, and what does not fit raises (V47)."""
    evidence = f"hub kernel {getattr(function.implementation, '__module__', 'of an unknown place')}"
    problem = None
    with contextlib.suppress(ValueError):  # a signature that cannot be read is left to the probe
        signature = inspect.signature(getattr(function.called, "forward", function.called))
        problem = _bind_problem(signature, requirement)
    if problem is None:
        return Judgement(verdict=KernelVerdict.FUSED, evidence=evidence)
    return Judgement(
        verdict=KernelVerdict.BROKEN, evidence=evidence, reason=problem, fix="use_kernels=False  # the package itself"
    )


def _judge_signature(
    implementation: Callable[..., object], requirement: KernelRequirement, evidence: str, layer: str
) -> Judgement:
    try:
        signature = inspect.signature(implementation)
    except (TypeError, ValueError) as error:
        return Judgement(
            verdict=KernelVerdict.UNVERIFIED, evidence=evidence, reason=f"its signature cannot be read: {error}"
        )
    problem = _call_problem(signature, requirement, layer)
    if problem is not None:
        return Judgement(
            verdict=KernelVerdict.BROKEN, evidence=evidence, reason=problem, fix=upgrade_command(requirement)
        )
    missing = [name for name in requirement.boundary_arguments if name not in signature.parameters]
    if missing:
        return _without_boundaries(requirement, missing, evidence)
    return Judgement(verdict=KernelVerdict.FUSED, evidence=evidence)


def _dropped(parameters: Container[str], requirement: KernelRequirement, layer: str) -> str | None:
    """What is lost on the way to an implementation that does not name a keyword the layer needs."""
    _, needed = CALLED_WITH.get(requirement.function, (0, ()))
    more = CALLED_WITH_BY.get(layer, {}).get(requirement.function, ())
    dropped = [name for name in (*needed, *more) if name not in parameters]
    if not dropped:
        return None
    return f"it has no parameter {', '.join(dropped)}, which the layer needs and transformers drops silently"


def _call_problem(signature: inspect.Signature, requirement: KernelRequirement, layer: str) -> str | None:
    return _dropped(signature.parameters, requirement, layer) or _bind_problem(signature, requirement)


def _bind_problem(signature: inspect.Signature, requirement: KernelRequirement) -> str | None:
    if requirement.function not in CALLED_WITH:
        return None
    positional, needed = CALLED_WITH[requirement.function]
    keywords = [*needed, *(name for name in requirement.boundary_arguments if name in signature.parameters)]
    try:
        signature.bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError as error:
        return f"it cannot be called the way the layer calls it: {error}"
    return None


def _without_boundaries(requirement: KernelRequirement, missing: list[str], evidence: str) -> Judgement:
    return Judgement(
        verdict=KernelVerdict.NO_BOUNDARIES,
        evidence=evidence,
        reason=f"it has no parameter {', '.join(missing)}; transformers drops the boundaries silently",
        fix=upgrade_command(requirement),
    )


def upgrade_command(requirement: KernelRequirement) -> str:
    """The command for a package that is there and cannot do what the layer needs, or does it wrong."""
    flags = "--no-build-isolation " if requirement.package in _BUILT_FROM_SOURCE else ""
    return f'pip install --upgrade {flags}"{requirement.distribution}"'


def _described(function: LiveFunction, version: str | None) -> str:
    implementation = function.implementation
    place = getattr(implementation, "speedkit_place", None) or getattr(implementation, "__module__", None)
    place = place or type(implementation).__module__
    return f"{function.package} {version or '(version unknown)'}: {place}"
