"""Says whether a job fits, on how many GPUs it would, and which activation checkpointing the memory left allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from hf_speedkit.core.memory import GIB
from hf_speedkit.core.memory_plan import MemoryPlan, plan_memory
from hf_speedkit.core.memory_sizes import MemoryJob, MemorySetting, ModelMemory

Sizes = Callable[[MemorySetting, MemoryJob], ModelMemory]
"""The model's sizes for a setting: the precision of the activations can depend on both."""

RESERVE_SHARE = 0.17
"""What torch's allocator held beyond live tensors, as a share of them, with every layer checkpointed: 124.6 against
106.7 GiB (benchmarks/results/2026-11-29_2xh200_27b_fsdp2_first_run.json; 0.06 to 0.13 in the one-GPU runs of
first_look/). Where layers are left alone it may hold more. It gives it back when memory runs out, at the price of a
stall."""
CONTEXT_GIB = 1.7
"""CUDA context and what else is on the device beside the allocator: NVML's figure less reserved, 1.3 to 1.7 GiB in the
one-GPU runs of first_look/."""
CONTEXT_WITH_NCCL_GIB = 2.8
"""The same with NCCL's buffers: 2.3 to 2.8 GiB in the runs on two GPUs (the first run, steps/ and ladder/)."""
MOST_GPUS = 1024

# What a driver shows is less than the name says: 139.8 GiB on an H200, 0.9915 of 141 (measured).
_SHOWN = 139.8 / 141
GPU_MEMORY_GIB = {
    name: gigabytes * _SHOWN
    for name, gigabytes in (
        ("a100-40gb", 40),
        ("a100-80gb", 80),
        ("h100", 80),
        ("h100-nvl", 94),
        ("h200", 141),
        ("gh200-96gb", 96),
        ("b200", 180),
        ("gb200", 186),
        ("mi300x", 192),
        ("mi325x", 256),
    )
}
"""Memory of GPUs by the name that `--gpu` takes; sizes by the vendors' pages named in core/devices.py."""


class Fit(StrEnum):
    """Whether a plan has room on a GPU."""

    FITS = "fits"
    TIGHT = "fits tightly"
    """Live tensors have room, the allocator's usual reserve has not: it will stall now and then, or fail."""
    TOO_BIG = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChoice:
    """One line of a plan.

    Args:
        plan: with every layer checkpointed, or as the job says.
        memory_gib: of one GPU; None where it is not known.
        fit: whether it has room; None where the memory is not known.
        smallest: the smallest number of GPUs on which it fits; None where no number up to `MOST_GPUS` does, the memory
            is not known, or the weights are not sharded and one GPU does not do.
        unchecked: how many layers, the last ones, could keep their activations on these GPUs; None where unknown.
        with_products: of how many layers, the last ones, the outputs of products could be kept instead, with all layers
            checkpointed; 0 where the model has none that can be.
        every_n_layers: the smallest such setting of transformers that fits: 1 is full checkpointing; None where
            unknown or nothing fits.
        gathered: FSDP could keep every layer's weights gathered from forward to backward
            (`reshard_after_forward: false`), which saves gathering them a second time; None where unknown or unsharded.
    """

    plan: MemoryPlan
    memory_gib: float | None
    fit: Fit | None
    smallest: int | None = None
    unchecked: int | None = None
    with_products: int = 0
    every_n_layers: int | None = None
    gathered: bool | None = None

    @property
    def checkpointing(self) -> str | None:
        """The lightest activation checkpointing that fits: "none", "selective" or "full"; None where nothing does."""
        if self.unchecked is None:
            return None
        return "full" if not self.unchecked else "none" if self.unchecked >= self.plan.layers else "selective"


def fit_of(plan: MemoryPlan, memory_gib: float) -> Fit:
    """Whether a GPU of so much memory has room for a plan."""
    outside = context_gib(plan.job.gpus)
    if plan.allocated / GIB + outside > memory_gib:
        return Fit.TOO_BIG
    roomy = plan.allocated * (1 + RESERVE_SHARE) / GIB + outside <= memory_gib
    return Fit.FITS if roomy else Fit.TIGHT


def context_gib(gpus: int) -> float:
    """What is on a GPU beside torch's allocator."""
    return CONTEXT_GIB if gpus == 1 else CONTEXT_WITH_NCCL_GIB


def choose(sizes: Sizes, setting: MemorySetting, job: MemoryJob, memory_gib: float | None) -> MemoryChoice:
    """Plan a job and say what fits.

    Args:
        sizes: the model's sizes for a setting and a job.
        setting: how states are kept.
        job: how the job is spread out.
        memory_gib: of one GPU; None where unknown.
    """
    model = sizes(setting, job)
    plan = plan_memory(model, setting, job)
    if memory_gib is None:
        return MemoryChoice(plan=plan, memory_gib=None, fit=None)
    fit = fit_of(plan, memory_gib)
    if fit is Fit.TOO_BIG:
        smallest = smallest_gpus(sizes, setting, job, memory_gib)
        return MemoryChoice(plan=plan, memory_gib=memory_gib, fit=fit, smallest=smallest)
    return MemoryChoice(
        plan=plan,
        memory_gib=memory_gib,
        fit=fit,
        smallest=job.gpus,
        unchecked=most_unchecked(model, setting, job, memory_gib),
        with_products=most_with_products(model, setting, job, memory_gib),
        every_n_layers=_every_n_layers(model, setting, job, memory_gib),
        gathered=_stays_gathered(model, setting, job, memory_gib),
    )


def smallest_gpus(sizes: Sizes, setting: MemorySetting, job: MemoryJob, memory_gib: float) -> int | None:
    """The smallest number of GPUs of this size on which a job fits; None where no number up to `MOST_GPUS` does."""
    if not job.fsdp or not setting.sharded:
        counts: tuple[int, ...] = (1,)
    else:
        counts = (*range(1, 64), *range(64, MOST_GPUS + 1, 8))
    for gpus in counts:
        spread = replace(job, gpus=gpus, shards=None)
        if fit_of(plan_memory(sizes(setting, spread), setting, spread), memory_gib) is Fit.FITS:
            return gpus
    return None


def most_unchecked(model: ModelMemory, setting: MemorySetting, job: MemoryJob, memory_gib: float) -> int:
    """How many layers, the last ones, can keep their activations with room for the allocator's reserve.

    The last ones, since theirs are gone again before the backward of the first layer, where memory is highest on few
    GPUs.
    """

    return _most(model, setting, replace(job, every_n_layers=1), memory_gib, "unchecked")


def most_with_products(model: ModelMemory, setting: MemorySetting, job: MemoryJob, memory_gib: float) -> int:
    """Of how many checkpointed layers, the last ones, the outputs of products can be kept; 0 where there are none."""
    if not any(layer.products for layer in model.layers):
        return 0
    return _most(model, setting, replace(job, unchecked=0, every_n_layers=1), memory_gib, "with_products")


def _most(model: ModelMemory, setting: MemorySetting, job: MemoryJob, memory_gib: float, name: str) -> int:
    def fits(layers: int) -> bool:
        changed = replace(job, **{name: layers})  # type: ignore[arg-type]
        return fit_of(plan_memory(model, setting, changed), memory_gib) is Fit.FITS

    low, high = 0, len(model.layers)
    while low < high:  # more layers that keep something never take less
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _stays_gathered(model: ModelMemory, setting: MemorySetting, job: MemoryJob, memory_gib: float) -> bool | None:
    if not (job.fsdp and job.gpus > 1 and setting.sharded):
        return None
    return fit_of(plan_memory(model, setting, replace(job, reshard=False)), memory_gib) is Fit.FITS


def _every_n_layers(model: ModelMemory, setting: MemorySetting, job: MemoryJob, memory_gib: float) -> int:
    """The largest step of transformers' `every_n_layers` up to 8 that fits."""
    for step in range(8, 1, -1):
        spread = replace(job, unchecked=0, every_n_layers=step)
        if fit_of(plan_memory(model, setting, spread), memory_gib) is Fit.FITS:
            return step
    return 1
