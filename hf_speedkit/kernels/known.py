"""Puts what is known about versions and GPU into checks: what is blocked is not called fused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.compatibility import Compatibility, Decision, Stack, decide, install_pins
from hf_speedkit.kernels.imports import ImportOutcome, ImportStatus, import_outcomes, is_installed
from hf_speedkit.kernels.requirements import FUNCTIONS

# What `pip install flash-linear-attention` would choose today.
_BROUGHT: Mapping[str, Mapping[str, str]] = {"fla": {"fla-core": "0.6.0", "flash-linear-attention": "0.6.0"}}

ABORTING: Mapping[str, tuple[str, str]] = {"tilelang": ("fla", "jit"), "flash_qla": ("fla", "chunk_gated_delta_rule")}
"""Packages that fla loads by itself and that can end the process: who loads them, and a name that they hold."""


def with_known_combinations(checks: Iterable[KernelCheck], stack: Stack) -> tuple[KernelCheck, ...]:
    """Give checks the verdict BLOCKED where the table says that the combination fails, and the pins to install.

    Args:
        checks: what was found by looking at bindings and imports.
        stack: this machine.
    """
    return tuple(_with_known(check, stack) for check in checks)


def torch_check(stack: Stack, layers: int) -> Iterator[KernelCheck]:
    """A check that refuses a torch which was built without this GPU: its first kernel raises "no kernel image".

    Args:
        stack: this machine.
        layers: decoder layers of the model.
    """
    if not stack.torch_lacks:
        return
    # Measured on no such machine: CUDA 13 begins at 7.5 (Turing), and builds before 12.8 end below 10.0 (Blackwell).
    build = "cu126" if stack.capability is not None and stack.capability < (7, 5) else "cu130"
    yield KernelCheck(
        function="torch",
        verdict=KernelVerdict.BLOCKED,
        layer="decoder layers",
        layers=layers,
        layers_total=layers,
        evidence=f"torch {stack.versions.get('torch', '?')}, built for {', '.join(stack.torch_lacks)}",
        reason=f"this torch holds no kernels for {stack.architecture}: the first one it starts raises",
        fix=f'pip install --force-reinstall --index-url https://download.pytorch.org/whl/{build} "torch>=2.11"',
    )


def without_what_ends_the_process(checks: Iterable[KernelCheck]) -> tuple[KernelCheck, ...]:
    """Import what fla would load by itself, in processes of their own, and block fla where such a process ended badly.

    Costs some seconds per installed package; for use before a model is loaded.
    """
    checks = tuple(checks)
    packages = {FUNCTIONS[check.function].package for check in checks if check.function in FUNCTIONS}
    broken = {
        package: outcome
        for package, (loader, name) in ABORTING.items()
        if loader in packages and is_installed(package)
        if (outcome := import_outcomes(package, (name,))[name]).status is ImportStatus.FAILS
    }
    return tuple(_blocked_by_import(check, broken) for check in checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What the table says about one subject of this machine, for a person to read."""

    subject: str
    decision: Decision


def notes(stack: Stack) -> tuple[Note, ...]:
    """Every subject of the table that says something about this machine, BLOCKED first."""
    from hf_speedkit.kernels.compatibility_rows import ROWS

    found = [
        Note(subject=subject, decision=decide(subject, stack)) for subject in dict.fromkeys(r.subject for r in ROWS)
    ]
    order = (Compatibility.BLOCKED, Compatibility.UNKNOWN, Compatibility.OK)
    found = [note for note in found if note.decision.reason is not None and _is_used(note.subject, stack)]
    return tuple(sorted(found, key=lambda note: order.index(note.decision.verdict)))


def subject_of(check: KernelCheck) -> str | None:
    """What the table calls the thing that a check is about; None for what it has no rows for."""
    if check.function in FUNCTIONS:
        return FUNCTIONS[check.function].package
    # The evidence of an attention check begins with the name of the implementation.
    return check.evidence.partition(",")[0] if check.function == "attention" else None


def _with_known(check: KernelCheck, stack: Stack) -> KernelCheck:
    subject = subject_of(check)
    if subject is None:
        return check
    if check.verdict is KernelVerdict.FUSED and subject == "fla" and "triton" not in stack.versions:
        return check  # it imports, so triton is there under a name that nobody knows
    if check.verdict is KernelVerdict.FUSED and not _stands_in(check, subject):
        decision = decide(subject, stack)
        if decision.verdict is not Compatibility.BLOCKED:
            return check
        reason = f"{decision.reason} ({decision.source})"
        return replace(check, verdict=KernelVerdict.BLOCKED, reason=reason, fix=decision.fix)
    wanted = check.verdict is KernelVerdict.FALLBACK and stack.capability is not None and subject in _BROUGHT
    pins = install_pins(subject, stack, _BROUGHT[subject]) if wanted else ()
    new = [f'"{pin}"' for pin in pins if pin not in (check.fix or "")]
    if not new or not (check.fix or "").startswith("pip install"):
        return check
    return replace(check, fix=" ".join([str(check.fix), *new]))


def _stands_in(check: KernelCheck, subject: str) -> bool:
    """Another package's function in the place of the usual one: the usual one's rows do not concern it."""
    return check.function in FUNCTIONS and not check.evidence.startswith(subject)


def _blocked_by_import(check: KernelCheck, broken: Mapping[str, ImportOutcome]) -> KernelCheck:
    subject = subject_of(check)
    for package, outcome in broken.items():
        if check.verdict is KernelVerdict.FUSED and subject == ABORTING[package][0]:
            return replace(
                check,
                verdict=KernelVerdict.BLOCKED,
                reason=f"fla loads `{package}` by itself, and it fails to import: {outcome.detail}",
                fix=f"pip uninstall {package.replace('_', '-')}",
            )
    return check


def _is_used(subject: str, stack: Stack) -> bool:
    """Whether a row about `subject` matters here: flash attention that is not installed needs no note."""
    packages = {
        "flash_attention_2": "flash-attn",
        "flash_attention_3": "flash-attn-3",
        "flash_attention_4": "flash-attn-4",
        "causal_conv1d": "causal-conv1d",
        "fla": "fla-core",
        "liger_kernel": "liger-kernel",
        "kernels": "kernels",
    }
    return subject not in packages or packages[subject] in stack.versions
