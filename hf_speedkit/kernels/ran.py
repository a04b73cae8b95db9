"""Which of the expected kernels a traced step really ran, by the names of its device kernels.

The probe shows that a function can run; this shows that training called it. fla, for one, picks its backend anew at
every call, by shapes and flags, and says so in an info line only.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.refusal import GO_ON

# Names: fla 0.6.0, liger-kernel 0.8.5, causal-conv1d 1.7.0, mamba-ssm 2.2 and torch 2.11 sources. TileLang calls the
# function that fla writes for it "kernel_kernel".
_CONVOLUTION = (r"causal_conv1d\w*fwd", r"causal_conv1d\w*bwd")
_RULE = (
    r"chunk_gated_delta_rule_fwd|chunk_fwd_kernel_o",
    r"chunk_gated_delta_rule_bwd|chunk_bwd_kernel|prepare_wy_repr_bwd|^kernel_kernel$",
)
_KIMI_RULE = (r"chunk_kda_fwd_kernel", r"chunk_kda_bwd_kernel|prepare_wy_repr_bwd_kda|^kernel_kernel$")
_CHUNK_SCAN = (r"chunk_scan_fwd_kernel", r"chunk_scan_chunk_state_bwd_dx_kernel|chunk_scan_bwd")
_SELECTIVE_SCAN = (r"selective_scan_fwd_kernel", r"selective_scan_bwd_kernel")
# cuDNN, which torch may choose for the same call, says fprop and bprop.
_FLASH = (r"(flash|fmha).*(fwd|forward|fprop)", r"(flash|fmha).*(bwd|backward|bprop)|dot_do_o")
EXPECTED_NAMES: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType(
    {
        ("causal_conv1d_fn", "causal_conv1d"): _CONVOLUTION,
        ("causal_conv1d_fn", "fla"): _CONVOLUTION,
        ("split_convolution", "hf_speedkit"): _CONVOLUTION,
        ("chunk_gated_delta_rule", "fla"): _RULE,
        ("chunk_kda", "fla"): _KIMI_RULE,
        ("mamba_split_conv1d_scan_combined", "mamba_ssm"): _CHUNK_SCAN,
        ("mamba_chunk_scan_combined", "mamba_ssm"): _CHUNK_SCAN,
        ("mamba_inner_fn", "mamba_ssm"): _SELECTIVE_SCAN,
        ("selective_scan_fn", "mamba_ssm"): _SELECTIVE_SCAN,
        ("attention", "speedkit_varlen"): _FLASH,
        ("attention", "flash_attention"): _FLASH,
        ("rms_norm", "liger_kernel"): (r"rms_norm_forward", r"rms_norm_backward"),
        ("rms_norm", "fla"): (r"layer_norm_fwd", r"layer_norm_bwd"),
        ("gated_norm", "fla"): (r"layer_norm_gated_fwd", r"layer_norm_gated_bwd"),
        ("swiglu", "liger_kernel"): (r"swiglu_forward", r"swiglu_backward"),
        ("swiglu", "fla"): (r"swiglu_fwd", r"swiglu_fwdbwd"),
        ("qk_rotary", "hf_speedkit"): (r"qk_rotary_forward", r"qk_rotary_backward"),
    }
)
"""(function, beginning of the evidence) -> patterns of the forward's and the backward's device kernels."""

STEPS_ASIDE = frozenset({"qk_rotary"})
"""Functions whose layer goes on with its own forward where it must: hooks on a norm, torch.compile, other positions.
That is as right, and what transformers runs; no reason to stop a job."""

_HANDED_ON: Mapping[str, Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        # flash-qla 0.1.3, as a trace of an H200 has them (benchmarks/results/steps/
        # 2026-11-30_h200_27b-8_speedkit-flashqla_rep1.json).
        "chunk_gated_delta_rule": {"FlashQLA": (r"tilelang_fused_chunk_gdr_fwd", r"tilelang_fused_chunk_gdr_bwd")},
        "chunk_kda": {},
    }
)
"""Function of fla -> the backends it may hand a call on to, with their kernels' names, forward and backward."""

_OTHER_BACKENDS = re.compile(r"flash_?qla|flash_?kda|gdr_|gdn_", re.IGNORECASE)
"""Kernels of such a backend whose names are not known: its rule is neither seen nor missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """Whether one function's kernels were among those that ran.

    Args:
        function: the check's function.
        layer: the check's layer class.
        forward, backward: whether such a kernel ran; None where its names are not known.
        kernels: the names that were recognised, in order.
        backend: whose kernels they are, where the package that was called hands the call on; "" for its own.
    """

    function: str
    layer: str
    forward: bool | None
    backward: bool | None
    kernels: tuple[str, ...] = ()
    backend: str = ""


def functions_that_ran(
    kernel_names: Iterable[str],
    checks: Sequence[KernelCheck],
    *,
    expected: Mapping[tuple[str, str], tuple[str, str]] = EXPECTED_NAMES,
) -> tuple[KernelRun, ...]:
    """Hold the kernels of a step against what its checks promise.

    Args:
        kernel_names: names of the device kernels of one micro-batch or more (forward and backward), in any order.
        checks: from `check_kernels`; only FUSED ones promise anything.
        expected: names by function and evidence.

    Returns:
        One entry per FUSED check, in order.
    """
    names = sorted(set(kernel_names))
    return tuple(_run(check, names, expected) for check in checks if check.verdict is KernelVerdict.FUSED)


def with_runs(checks: Sequence[KernelCheck], runs: Sequence[KernelRun], step: int) -> tuple[KernelCheck, ...]:
    """The checks, with "its kernels ran in step N" in the evidence of those that were seen both ways."""
    seen = {(run.function, run.layer): run.backend for run in runs if run.forward and run.backward}
    return tuple(
        replace(check, evidence=f"{check.evidence}; {_whose(seen[check.function, check.layer])} ran in step {step}")
        if check.verdict is KernelVerdict.FUSED and (check.function, check.layer) in seen
        else check
        for check in checks
    )


def _whose(backend: str) -> str:
    return f"kernels of {backend}, which it hands on to," if backend else "its kernels"


def never_ran(runs: Sequence[KernelRun]) -> KernelAssertionError | None:
    """The refusal for functions whose kernels were expected and did not run; None if there are none."""
    missing = [run for run in _not_seen(runs) if run.function not in STEPS_ASIDE]
    if not missing:
        return None
    return KernelAssertionError(
        f"{len(missing)} of {len(runs)} fused functions did not run in the first training step.",
        evidence=tuple(
            f"{run.function}   {run.layer}   no {_which(run)} kernel among those of the step" for run in missing
        ),
        mend="hf-speedkit doctor MODEL --probe  # what runs at these sizes; TraceCallback shows the step itself",
        regardless=GO_ON,
    )


def stepped_aside(runs: Sequence[KernelRun]) -> tuple[str, ...]:
    """One sentence for each function that did not run because its layers went on with their own forward."""
    return tuple(
        f"{run.function} of {run.layer}: no {_which(run)} kernel among those of the step, so these layers run their "
        "own forward: right, and as fast as transformers. Hooks on q_norm or k_norm and torch.compile lead there."
        for run in _not_seen(runs)
        if run.function in STEPS_ASIDE
    )


def _not_seen(runs: Sequence[KernelRun]) -> list[KernelRun]:
    return [run for run in runs if run.forward is False or run.backward is False]


class StepKernels:
    """Collects the names of the device kernels between `begin` and `end`: one micro-batch or one step.

    Costs one CUPTI session and one wait for the device, once; outside it costs nothing.

    Args:
        device: "cuda", or "cpu" for the names of torch's operators.

    Do not begin beside another profiler, not even one that warms up: torch ends the process then. What is known here
    is only whether one records (`begin` returns False).
    """

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._profile: Any = None

    def begin(self) -> bool:
        """Start collecting; False where that is not possible now (no GPU, or another profiler records)."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        missing = self.device == "cuda" and not torch.cuda.is_available()
        if self._profile is not None or missing or torch._C._autograd._profiler_enabled():
            return False
        session = profile(activities=[getattr(ProfilerActivity, self.device.upper())])
        session.start()
        self._profile = session
        return True

    def end(self) -> frozenset[str] | None:
        """Stop and return the names, none of them where CUPTI gave nothing; None if nothing was begun."""
        if self._profile is None:
            return None
        import torch

        session, self._profile = self._profile, None
        if self.device == "cuda":
            torch.cuda.synchronize()  # the last kernels of the step must have ended to be seen; once in a run
        session.stop()
        events = session.events() or ()
        return frozenset(event.name for event in events if event.device_type.name == self.device.upper())

    def cancel(self) -> None:
        """Drop what a step that failed has left open."""
        session, self._profile = self._profile, None
        if session is not None:
            with contextlib.suppress(RuntimeError):  # the device's own error, which the step has raised already
                session.stop()


def _run(check: KernelCheck, names: Sequence[str], expected: Mapping[tuple[str, str], tuple[str, str]]) -> KernelRun:
    known = next(
        (
            patterns
            for (function, begins), patterns in expected.items()
            if function == check.function and check.evidence.startswith(begins)
        ),
        None,
    )
    if known is None:
        return KernelRun(function=check.function, layer=check.layer, forward=None, backward=None)
    handed_on = _HANDED_ON.get(check.function, {})
    ways = {"": known, **handed_on}
    found = {backend: _recognised(names, patterns) for backend, patterns in ways.items()}
    backend = max(found, key=lambda one: sum(map(bool, found[one])))  # fla's own at a tie
    forward, backward = found[backend]
    unknown = check.function in _HANDED_ON and not backend and any(_OTHER_BACKENDS.search(name) for name in names)
    return KernelRun(
        function=check.function,
        layer=check.layer,
        forward=bool(forward) or (None if unknown else False),
        backward=bool(backward) or (None if unknown else False),
        kernels=(*forward, *backward),
        backend=backend,
    )


def _recognised(names: Sequence[str], patterns: tuple[str, str]) -> tuple[list[str], list[str]]:
    forward, backward = ([name for name in names if re.search(one, name, re.IGNORECASE)] for one in patterns)
    return forward, backward


def _which(run: KernelRun) -> str:
    return " and no ".join(name for name, ran in (("forward", run.forward), ("backward", run.backward)) if ran is False)
