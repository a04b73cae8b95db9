"""The memory lines of `hf-speedkit plan`: what each way to train a model takes on each GPU, and whether that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_speedkit.core.memory import GIB
from hf_speedkit.core.memory_choice import GPU_MEMORY_GIB, Fit, MemoryChoice, choose, context_gib
from hf_speedkit.core.memory_sizes import SETTINGS, MemoryJob
from hf_speedkit.core.memory_words import checkpointing_line, choice_line, gathering_line, margin_line, parts_line


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGpu:
    """The GPU a job is planned for.

    Args:
        name: for the lines; None where nobody said.
        memory_gib: None where unknown.
    """

    name: str | None = None
    memory_gib: float | None = None


class UnknownGpuError(ValueError):
    """A name that `--gpu` does not know."""


def planned_gpu(name: str | None, memory_gib: float | None) -> PlannedGpu:
    """The GPU by its name or its memory, else the smallest one of this machine.

    Raises:
        UnknownGpuError: no GPU of that name is known and its memory is not given.
    """
    if name is not None:
        known = GPU_MEMORY_GIB.get(name.lower())
        if known is None and memory_gib is None:
            raise UnknownGpuError(f"{name} is not among {', '.join(GPU_MEMORY_GIB)}: give --gpu-memory GIB as well")
        return PlannedGpu(name=name.upper(), memory_gib=memory_gib or known)
    if memory_gib is not None:
        return PlannedGpu(name=f"{memory_gib:g} GiB", memory_gib=memory_gib)
    from hf_speedkit.measure.environment import visible_gpus

    here = min(visible_gpus(), key=lambda gpu: gpu.memory_gib, default=None)
    return PlannedGpu() if here is None else PlannedGpu(name=here.name, memory_gib=here.memory_gib)


def memory_result(config: Any, *, tokens: int, gpus: int, gpu: PlannedGpu, accumulation: int = 1) -> dict[str, Any]:
    """The memory part of a plan, as `--json` prints it.

    Args:
        config: the model's transformers configuration.
        tokens: slots of a row.
        gpus: number of GPUs.
        gpu: which.
        accumulation: micro-batches of a step; gradients are taken to be reduced after each.
    """
    from hf_speedkit.kernels.memory_trace import TracedSizes, UntraceableError

    # Adapters beside bf16 weights without autocast, as in recipes/qwen27b_lora.yaml.
    sizes = TracedSizes(config, tokens, mixed_precision=False)
    job = MemoryJob(gpus=gpus, accumulation=accumulation, sync_each_batch=True)
    result: dict[str, Any] = {"gpus": gpus, "gpu": gpu.name, "gpu_memory_gib": gpu.memory_gib, "error": None}
    try:
        choices = [choose(sizes, setting, job, gpu.memory_gib) for setting in SETTINGS]
        parameters = sizes(SETTINGS[0], job).parameters
    except UntraceableError as error:
        return result | {"settings": [], "notes": [], "fits": None, "error": str(error)}
    shown = next((choice for choice in choices if choice.fit is not Fit.TOO_BIG), choices[0])
    notes = [f"{shown.plan.setting.name}: {parts_line(shown.plan)}", checkpointing_line(shown), gathering_line(shown)]
    if gpus > 1:
        notes.append("8-bit AdamW: no optimizer here does it on bf16 weights that FSDP2 shards (docs/memory.md)")
    notes.append(margin_line(gpus))
    if gpu.memory_gib is None:
        notes[-1] = "whether it fits: say which GPU, --gpu h200 or --gpu-memory 80"
    return result | {
        "settings": [_as_dict(choice, parameters, gpu) for choice in choices],
        "notes": [note for note in notes if note is not None],
        "fits": None if gpu.memory_gib is None else any(choice.fit is not Fit.TOO_BIG for choice in choices),
    }


def _as_dict(choice: MemoryChoice, parameters: int, gpu: PlannedGpu) -> dict[str, Any]:
    plan = choice.plan
    return {
        "setting": plan.setting.name,
        "line": choice_line(choice, parameters, gpu.name),
        "allocated_gib": plan.allocated / GIB,
        "context_gib": context_gib(plan.job.gpus),
        "phase": plan.phase,
        "parts_gib": {name: size / GIB for name, size in plan.parts.items()},
        "fit": None if choice.fit is None else choice.fit.value,
        "smallest_gpus": choice.smallest,
        "checkpointing": choice.checkpointing,
        "unchecked_layers": choice.unchecked,
        "layers_with_products": choice.with_products,
        "every_n_layers": choice.every_n_layers,
        "stays_gathered": choice.gathered,
        "layers": plan.layers,
    }
