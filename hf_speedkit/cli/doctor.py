"""`hf-speedkit doctor`: what a model would train on here, what that costs, and what to run about it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_speedkit.core.records import KernelCheck
    from hf_speedkit.kernels.compatibility import Stack

SUBJECT_IS_BAD = 1
WRONG_USE = 2

NO_COMPILER = (
    "causal-conv1d has no wheel on PyPI: pip builds it from source, which needs nvcc of the CUDA version that torch "
    "was built for, and this machine has no nvcc. It is not needed: with flash-linear-attention installed, "
    "SpeedSFTTrainer puts fla's Triton convolution in its place, which needs no compiler, once the probe has shown it "
    "right on the GPU."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that doctor found.

    Args:
        model: as it was asked for.
        family: folder of its modeling file in transformers; None for remote code.
        stack: device and versions.
        checks: one per function.
        changed: what SpeedSFTTrainer would put in place by itself, one line each (with --probe).
        commands: what to run, in order.
        remarks: paragraphs that explain.
        probe_s: time of the whole probe, compilation included; None without one.
    """

    model: str
    family: str | None
    stack: Stack
    checks: tuple[KernelCheck, ...]
    changed: tuple[str, ...]
    commands: tuple[str, ...]
    remarks: tuple[str, ...]
    probe_s: float | None = None

    @property
    def good(self) -> bool:
        """Whether nothing would be slow or wrong."""
        return all(check.verdict.value == "FUSED" for check in self.checks)


def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id (local cache), folder or config.json.")],
    probe: Annotated[
        bool, typer.Option("--probe", help="Run the functions on the GPU and compare them with the reference.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(metavar="ARCH", help="Judge for this GPU, e.g. sm90, where none is (image builds).")
    ] = None,
    tokens_per_batch: Annotated[int, typer.Option(min=2, help="Slots of a packed row.")] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what MODEL would train on here: kernels, versions, costs, and the commands that mend it.

    Loads no weights and no network: a hub id is looked up in the local cache.
    Exit 0: everything is fused. 1: something would be slow or wrong. 2: wrong use.
    """
    config = _config(model)
    if probe and not _has_gpu():
        raise typer.BadParameter("there is no GPU to probe on; without --probe doctor needs none", param_hint="--probe")
    if probe and gpu is not None:
        raise typer.BadParameter("a probe runs on the GPU that is here", param_hint="--gpu")
    diagnosis = diagnose_model(model, config, stack=_stack(gpu), slots=tokens_per_batch, probe=probe)
    typer.echo(_as_json(diagnosis) if as_json else "\n".join(_lines(diagnosis)))
    raise typer.Exit(0 if diagnosis.good else SUBJECT_IS_BAD)


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
    from hf_speedkit.kernels.inspection import check_kernels
    from hf_speedkit.kernels.requirements import family_of

    checks = check_kernels(config, tokens_per_batch=slots, stack=stack)
    changed: tuple[str, ...] = ()
    probe_s = None
    # A combination that is known to fail may end the process: it is not run.
    if probe and not any(check.verdict.value == "BLOCKED" for check in checks):
        began = time.perf_counter()
        checks, changed = _probed(config, stack, slots, device)
        probe_s = time.perf_counter() - began
    elif not any(check.function == "attention" for check in checks):
        checks = (*checks, *_packed_attention(config, stack))
    commands, remarks = _advice(checks, stack)
    return Diagnosis(
        model=name,
        family=family_of(config.get_text_config()),
        stack=stack,
        checks=checks,
        changed=changed,
        commands=commands,
        remarks=remarks,
        probe_s=probe_s,
    )


def _probed(config: Any, stack: Stack, slots: int, device: str) -> tuple[tuple[KernelCheck, ...], tuple[str, ...]]:
    import torch

    from hf_speedkit.kernels.attention import register, unsupported_reason
    from hf_speedkit.kernels.fused_layers import fused_layers
    from hf_speedkit.kernels.inspection import check_kernels
    from hf_speedkit.kernels.skeleton import model_skeleton

    place, dtype = torch.device(device), torch.bfloat16
    model: Any = model_skeleton(config, device=place, dtype=dtype)
    if unsupported_reason(model.config, dtype=dtype, device=place) is None:
        model.set_attn_implementation(register())
    with fused_layers(model, dtype=dtype, tokens_per_batch=slots) as changed:
        checks = check_kernels(model, probe=True, tokens_per_batch=slots, dtype=dtype, stack=stack)
    return checks, changed


def _packed_attention(config: Any, stack: Stack) -> tuple[KernelCheck, ...]:
    """What packed rows will attend by, for a config that leaves the choice to transformers."""
    import torch

    from hf_speedkit.core.records import KernelCheck, KernelVerdict
    from hf_speedkit.kernels.attention import unsupported_reason

    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * int(getattr(text, "num_hidden_layers", 0))
    layers = sum("attention" in kind and kind != "linear_attention" for kind in kinds)
    if not layers or not getattr(text, "num_attention_heads", None):
        return ()
    reason = unsupported_reason(text, dtype=torch.bfloat16, device=torch.device("cpu"))
    if reason is None and stack.capability is not None and stack.capability < (8, 0):
        reason = f"the kernel needs compute capability 8.0, {stack.architecture} has less"
    evidence = "speedkit_varlen, torch variable-length attention, chosen by SpeedSFTTrainer for packed rows"
    if reason is not None:
        evidence = f"sdpa with a mask of every pair of slots ({reason})"
    return (
        KernelCheck(
            function="attention",
            verdict=KernelVerdict.FUSED,
            layer="attention layers",
            layers=layers,
            layers_total=layers,
            evidence=evidence,
        ),
    )


def _advice(checks: Sequence[KernelCheck], stack: Stack) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Commands to run and paragraphs to read."""
    failing = [check for check in checks if check.verdict.value != "FUSED"]
    commands, remarks = [], []
    for check in failing:
        is_convolution = check.function == "causal_conv1d_fn" and check.verdict.value == "FALLBACK"
        if is_convolution and not stack.nvcc:
            remarks.append(NO_COMPILER)
            commands.append('pip install "flash-linear-attention>=0.6,<0.7"')
        elif check.fix is not None:
            commands.append(check.fix)
    if failing and stack.capability is None:
        remarks.append("No GPU was found: fused kernels need one. --gpu sm90 judges for a GPU that is not here.")
    # One of two commands for the same package may carry a pin of another: the longer says more.
    kept = [c for c in dict.fromkeys(commands) if not any(c != other and other.startswith(c) for other in commands)]
    return tuple(kept), tuple(dict.fromkeys(remarks))


def _config(model: str) -> Any:
    """The config by any of its three names; ends with exit code 2 where there is none."""
    from transformers import AutoConfig

    path = Path(model)
    known = path.is_file() or (path / "config.json").is_file()
    if path.is_dir() and not known:
        raise typer.BadParameter(f"no config.json in {path}", param_hint="MODEL")
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "its config cannot be read" if known else "it is no file, no folder, and not in the local cache"
        hint = "" if known else f"\nGet it with:  hf download {model} config.json"
        raise typer.BadParameter(f"{model}: {where} ({first}){hint}", param_hint="MODEL") from error


def _stack(gpu: str | None) -> Stack:
    from hf_speedkit.kernels.stack import read_stack

    try:
        return read_stack(architecture=gpu)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from error


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _runnable(command: str) -> str:
    """The command for this interpreter: another pip would install for another Python."""
    return f"{sys.executable} -m {command}" if command.startswith("pip ") else command


def _lines(diagnosis: Diagnosis) -> list[str]:
    from hf_speedkit.core.printable import printable
    from hf_speedkit.kernels.refusal import cost_of, table

    lines = [f"{diagnosis.model}  ({diagnosis.family or 'a family that transformers does not hold'})", ""]
    lines += [*_environment_lines(diagnosis.stack), ""]
    for check, line in zip(diagnosis.checks, table(diagnosis.checks), strict=True):
        lines.append(line)
        cost = cost_of(check)
        lines += [f"    costs: {cost}"] if cost else []
    if not diagnosis.checks:
        lines.append("no function of this model needs a kernel package")
    lines += [f"put in place: {line}" for line in diagnosis.changed]
    if diagnosis.probe_s is not None:
        lines.append(f"the probe took {diagnosis.probe_s:.1f} s, compilation included")
    lines += ["", *diagnosis.remarks] if diagnosis.remarks else []
    if diagnosis.commands:
        lines += ["", "Run:", *(f"  {_runnable(command)}" for command in diagnosis.commands)]
    lines += ["", "good" if diagnosis.good else "something would be slow or wrong"]
    return [printable(line) for line in lines]


def _environment_lines(stack: Stack) -> list[str]:
    from hf_speedkit.kernels.known import notes

    versions = ", ".join(f"{name} {version}" for name, version in sorted(stack.versions.items()))
    lines = [
        f"Python {stack.python}, torch's CUDA {stack.cuda or 'none'}, GPU {stack.architecture or 'none'}, "
        f"nvcc {'found' if stack.nvcc else 'not found'}",
        f"{versions}",
    ]
    for note in notes(stack):
        decision = note.decision
        lines.append(f"{note.subject}: {decision.verdict.value}: {decision.reason} ({decision.source})")
    return lines


def _as_json(diagnosis: Diagnosis) -> str:
    from hf_speedkit.core.records import to_dict
    from hf_speedkit.kernels.known import notes
    from hf_speedkit.measure.environment import collect_environment

    stack = diagnosis.stack
    document = {
        "model": diagnosis.model,
        "family": diagnosis.family,
        "good": diagnosis.good,
        "environment": to_dict(collect_environment()),
        "gpu": stack.architecture,
        "cuda": stack.cuda,
        "nvcc": stack.nvcc,
        "checks": [to_dict(check) for check in diagnosis.checks],
        "known": [{"subject": note.subject, **to_dict(note.decision)} for note in notes(stack)],
        "changed": list(diagnosis.changed),
        "commands": [_runnable(command) for command in diagnosis.commands],
        "remarks": list(diagnosis.remarks),
        "probe_s": diagnosis.probe_s,
    }
    return json.dumps(document, allow_nan=False, sort_keys=True)
