"""`hf-speedkit doctor`: what a model would train on here, what that costs, and what to run about it."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_speedkit.cli.doctor_model import find_config

if TYPE_CHECKING:
    from hf_speedkit.core.errors import InstallationError
    from hf_speedkit.core.records import KernelCheck
    from hf_speedkit.kernels.compatibility import Stack

SUBJECT_IS_BAD = 1
WRONG_USE = 2

NO_COMPILER = (
    "causal-conv1d is not needed: with flash-linear-attention installed, SpeedSFTTrainer puts fla's Triton convolution "
    "in its place, which needs no compiler, once the probe has shown it right on the GPU. causal-conv1d has no wheel on"
    " PyPI: pip builds it from source, which needs nvcc of the CUDA version that torch was built for"
)

COMPILER = (
    "mamba-ssm and causal-conv1d are both needed: mamba-ssm calls causal-conv1d's compiled functions, and nothing can "
    "stand in for them. Neither has a wheel on PyPI: pip builds them from source, which takes minutes and needs nvcc "
    "of the CUDA version that torch was built for"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What a probe left in one compiler's folder; for the next process to find.

    Args:
        compiler, variable, path: see `hf_speedkit.kernels.caches.CacheFolder`.
        new_files: files that the probe added; 0 where all was there already.
    """

    compiler: str
    variable: str
    path: str
    new_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that doctor found.

    Args:
        model: as it was asked for.
        family: folder of its modeling file in transformers; None for remote code.
        stack: device and versions.
        checks: one per function.
        changed: what SpeedSFTTrainer would put in place by itself, one line each (with --probe).
        commands: what to run in a shell, in order.
        settings: what to change in the job instead, as Python would write it.
        remarks: paragraphs that explain.
        torch_without_cuda: torch cannot use a GPU, and one is there or asked about.
        probe_s: time of the whole probe, compilation included; None without one.
        caches: where the probe's kernels lie now; empty without one.
    """

    model: str
    family: str | None
    stack: Stack
    checks: tuple[KernelCheck, ...]
    changed: tuple[str, ...]
    commands: tuple[str, ...]
    settings: tuple[str, ...]
    remarks: tuple[str, ...]
    torch_without_cuda: bool = False
    probe_s: float | None = None
    caches: tuple[Cache, ...] = ()

    @property
    def good(self) -> bool:
        """Whether nothing would be slow or wrong."""
        return not self.torch_without_cuda and all(check.verdict.value == "FUSED" for check in self.checks)


def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id (local cache), folder or config.json.")],
    probe: Annotated[
        bool, typer.Option("--probe", help="Run the functions on the GPU and compare them with the reference.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(metavar="GPU", help="Judge for this GPU, e.g. h200 or sm90, where none is.")
    ] = None,
    tokens_per_batch: Annotated[int, typer.Option(min=2, help="Slots of a packed row.")] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what MODEL would train on here: kernels, versions, costs, and the commands that mend it.

    Loads no weights and needs no network: a hub id is looked up in the local cache.
    Exit 0: everything is fused. 1: something would be slow or wrong. 2: wrong use.
    """
    from hf_speedkit.cli.doctor_view import as_json as to_json
    from hf_speedkit.cli.doctor_view import broken_text, text_lines

    broken = _broken_import()
    if broken is not None:
        typer.echo(broken_text(broken, as_json=as_json))
        raise typer.Exit(SUBJECT_IS_BAD)
    config = find_config(model)
    if probe and not _has_gpu():
        raise typer.BadParameter("there is no GPU to probe on; without --probe doctor needs none", param_hint="--probe")
    if probe and gpu is not None:
        raise typer.BadParameter("a probe runs on the GPU that is here", param_hint="--gpu")
    diagnosis = diagnose_model(model, config, stack=_stack(gpu), slots=tokens_per_batch, probe=probe)
    typer.echo(to_json(diagnosis) if as_json else "\n".join(text_lines(diagnosis)))
    raise typer.Exit(0 if diagnosis.good else SUBJECT_IS_BAD)


def _broken_import() -> InstallationError | None:
    """Why a package that every job needs does not import, or is too old; None where all will do."""
    from hf_speedkit.core.errors import InstallationError
    from hf_speedkit.trainer.broken_installs import broken_install
    from hf_speedkit.trainer.installed_versions import require_versions

    try:
        require_versions()
    except InstallationError as stop:
        return stop
    for package in ("torch", "transformers", "pyarrow", "datasets", "accelerate", "trl"):
        try:
            importlib.import_module(package)
        except Exception as error:  # noqa: BLE001 (a missing library of CUDA is an OSError, an ImportError, anything)
            said = f"{package} does not import: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
            command = f"pip install --force-reinstall --no-cache-dir {package}"
            return broken_install(error) or InstallationError(said, mend=command)
    return None


def diagnose_model(
    name: str, config: Any, *, stack: Stack, slots: int, probe: bool = False, device: str = "cuda"
) -> Diagnosis:
    """Everything about one config on one machine.

    Args:
        name: to be printed.
        config: a transformers config.
        stack: device and versions.
        slots: of a packed row.
        probe: also build the layers at their sizes, with random weights, and run them on `device`.
        device: where a probe runs.
    """
    from hf_speedkit.kernels.fla_convolution import through_fla
    from hf_speedkit.kernels.inspection import check_kernels
    from hf_speedkit.kernels.requirements import family_of
    from hf_speedkit.kernels.verdicts import check_of, nothing_known
    from hf_speedkit.trainer.installed_versions import untested_versions

    checks = check_kernels(config, tokens_per_batch=slots, stack=stack)
    changed: tuple[str, ...] = ()
    caches: tuple[Cache, ...] = ()
    probe_s = None
    # A combination that is known to fail may end the process: it is not run.
    if probe and not any(check.verdict.value == "BLOCKED" for check in checks):
        from hf_speedkit.kernels.caches import cache_folders

        before = [(folder, folder.files()) for folder in cache_folders()]
        began = time.perf_counter()
        checks, changed = _probed(checks, config, stack=stack, slots=slots, device=device)
        probe_s = time.perf_counter() - began
        caches = tuple(
            Cache(compiler=f.compiler, variable=f.variable, path=str(f.path), new_files=f.files() - count)
            for f, count in before
            if f.files()
        )
    elif not any(check.function == "attention" for check in checks):
        attention = _packed_attention(config, stack, slots)
        checks = checks if attention is None else (*checks, attention)
    if not checks:
        checks = (check_of("layers", "no layer", 0, 0, nothing_known(f"a config of {config.model_type}")),)
    checks = through_fla(checks)
    missing_cuda = _lacks_cuda(stack)
    commands, remarks = _advice(checks, stack, missing_cuda)
    untested = untested_versions()
    return Diagnosis(
        model=name,
        family=family_of(config.get_text_config()),
        stack=stack,
        checks=checks,
        changed=changed,
        commands=tuple(command for command in commands if _is_for_a_shell(command)),
        settings=tuple(command for command in commands if not _is_for_a_shell(command)),
        remarks=remarks if untested is None else (*remarks, f"{untested}."),
        torch_without_cuda=missing_cuda,
        probe_s=probe_s,
        caches=caches,
    )


def _probed(
    checks: tuple[KernelCheck, ...], config: Any, *, stack: Stack, slots: int, device: str
) -> tuple[tuple[KernelCheck, ...], tuple[str, ...]]:
    """What running the layers showed, and what was put in their place; `checks` and why where it could not be run."""
    import torch

    from hf_speedkit.core.records import KernelVerdict
    from hf_speedkit.kernels.skeleton import probe_config
    from hf_speedkit.kernels.verdicts import Judgement, check_of

    try:
        return probe_config(
            config, device=torch.device(device), dtype=torch.bfloat16, tokens_per_batch=slots, stack=stack
        )
    except Exception as error:  # noqa: BLE001 (whatever the model's own code raises: the probe has shown nothing)
        why = f"the probe could not be run: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        unproven = Judgement(verdict=KernelVerdict.UNVERIFIED, evidence="nothing was run", reason=why)
        return (*checks, check_of("probe", "layers of its sizes", 0, 0, unproven)), ()


def _packed_attention(config: Any, stack: Stack, slots: int) -> KernelCheck | None:
    """What packed rows will attend by, for a config that leaves the choice to transformers; None without attention."""
    import torch

    from hf_speedkit.core.records import KernelCheck, KernelVerdict
    from hf_speedkit.kernels.attention import unsupported_reason
    from hf_speedkit.kernels.config_checks import attention_layers
    from hf_speedkit.kernels.model_checks import judge_attention
    from hf_speedkit.kernels.modeling_files import abilities_of

    text = config.get_text_config()
    layers = attention_layers(text)
    if not layers or not getattr(text, "num_attention_heads", None):
        return None
    can = abilities_of(config)
    check = KernelCheck(
        function="attention",
        verdict=KernelVerdict.FUSED,
        layer="attention layers",
        layers=layers,
        layers_total=layers,
        evidence="speedkit_varlen, torch variable-length attention, chosen by SpeedSFTTrainer for packed rows",
    )
    if can is None:
        unknown = "transformers has no causal language model of this type, so what would run is not known"
        return replace(check, verdict=KernelVerdict.UNVERIFIED, evidence=str(text.model_type), reason=unknown)
    device = torch.device("cpu")
    reason = unsupported_reason(text, dtype=torch.bfloat16, device=device, flash=can.flash, settable=can.settable)
    if reason is None and stack.capability is not None and stack.capability < (8, 0):
        reason = f"the kernel needs compute capability 8.0, {stack.architecture} has less"
    if reason is None:
        return check
    found = judge_attention("sdpa" if can.sdpa else "eager", text, slots, live=False, sdpa=can.sdpa)
    evidence = f"{found.evidence} (SpeedSFTTrainer's own is left out: {reason})"
    return replace(check, verdict=found.verdict, evidence=evidence, reason=found.reason, fix=found.fix)


def _is_built(check: KernelCheck) -> bool:
    """Whether a function's package has no wheels."""
    from hf_speedkit.kernels.requirements import FUNCTIONS

    return check.function in FUNCTIONS and FUNCTIONS[check.function].package in ("causal_conv1d", "mamba_ssm")


def _is_for_a_shell(command: str) -> bool:
    return command.startswith(("pip ", "export ", "hf ", "hf-speedkit "))


def _lacks_cuda(stack: Stack) -> bool:
    """Whether torch is a build without CUDA where a GPU is there or asked about. A ROCm build is another matter."""
    from hf_speedkit.measure.environment import visible_gpus

    return _has_no_cuda_build(stack) and (stack.capability is not None or bool(visible_gpus()))


def _has_no_cuda_build(stack: Stack) -> bool:
    return stack.cuda is None and "torch" in stack.versions and "rocm" not in stack.versions["torch"]


def _advice(checks: Sequence[KernelCheck], stack: Stack, missing_cuda: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to run or to set, in order, and paragraphs to read."""
    from hf_speedkit.kernels.requirements import stands_alone

    failing = [check for check in checks if check.verdict.value != "FUSED"]
    commands = [check.fix for check in failing if check.fix is not None]
    remarks = []
    built = [check for check in failing if check.verdict.value in ("FALLBACK", "BLOCKED") and _is_built(check)]
    if built:
        alone = stands_alone(check.function for check in checks)
        remarks.append(f"{NO_COMPILER if alone else COMPILER}{'' if stack.nvcc else ', and this machine has no nvcc'}.")
    if stack.capability is None:
        remarks.append(_why_no_gpu(stack))
    if missing_cuda or (failing and _has_no_cuda_build(stack)):
        torch = stack.versions["torch"]
        remarks.insert(0, f"First install a CUDA build of torch: {torch} has no CUDA, and kernels cannot run with it.")
        # The index by name: a pip that is set up for the CPU index would bring the same build again. PyPI holds CUDA
        # builds for Linux only.
        index = "https://pypi.org/simple" if sys.platform == "linux" else "https://download.pytorch.org/whl/cu130"
        commands.insert(0, f'pip install --force-reinstall --index-url {index} "torch=={torch.partition("+")[0]}"')
    # One of two commands for the same package may carry a pin of another: the longer says more.
    kept = [c for c in dict.fromkeys(commands) if not any(c != other and other.startswith(c) for other in commands)]
    return tuple(kept), tuple(dict.fromkeys(remarks))


def _why_no_gpu(stack: Stack) -> str:
    """What to say where torch shows no GPU: that there is none, or why torch cannot use the one that is there."""
    from hf_speedkit.measure.environment import visible_gpus

    gpus = visible_gpus()
    if not gpus or stack.cuda is None:
        return "No GPU was found: fused kernels need one. --gpu h200 judges for a GPU that is not here."
    import torch

    cuda: Any = torch.cuda
    try:
        cuda.init()
        why = "it does not say why"
    except Exception as error:  # noqa: BLE001 (whatever keeps torch from the GPU is what is to be told)
        why = " ".join(str(error).split())[:300]
    return (
        f"The driver shows {gpus[0].name}, and torch {stack.versions.get('torch', '?')} (CUDA {stack.cuda}) cannot use "
        f"it: {why}. Training would run on the CPU."
    )


def _stack(gpu: str | None) -> Stack:
    from hf_speedkit.kernels.stack import read_stack

    try:
        return read_stack(architecture=gpu)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from error


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
