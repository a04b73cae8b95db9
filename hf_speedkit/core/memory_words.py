"""A memory plan in words: one line a setting, what stands where, and what could be changed."""

from __future__ import annotations

from hf_speedkit.core.memory import GIB
from hf_speedkit.core.memory_choice import MOST_GPUS, RESERVE_SHARE, Fit, MemoryChoice, context_gib
from hf_speedkit.core.memory_plan import MemoryPlan


def choice_line(choice: MemoryChoice, parameters: int, gpu: str | None) -> str:
    """One setting: "27B full fine-tune, 2 x H200, pure bf16: 105 GiB per GPU, fits".

    Args:
        choice: what was found.
        parameters: of the model.
        gpu: name of the GPU; None where it is not known.
    """
    job, setting = choice.plan.job, choice.plan.setting
    what = "adapters" if setting.adapters else "full fine-tune"
    where = gpus_in_words(job.gpus, gpu)
    line = f"{size_in_words(parameters)} {what}, {where}, {setting.name}: {_sized(choice.plan.allocated)} per GPU"
    return line if choice.fit is None else f"{line}, {verdict(choice)}"


def verdict(choice: MemoryChoice) -> str:
    """What a line ends with: "fits", "fits tightly" or what it would take."""
    if choice.fit is not Fit.TOO_BIG:
        return "" if choice.fit is None else choice.fit.value
    if choice.smallest is not None:
        return f"needs {choice.smallest} GPUs" if choice.smallest > 1 else "needs 1 GPU"
    if choice.plan.job.fsdp and choice.plan.setting.sharded:
        return f"does not fit on {MOST_GPUS} either"
    return "does not fit"


def parts_line(plan: MemoryPlan) -> str:
    """Where the memory is highest, and what it is made of, in GiB; of a small model each part in a unit of its own."""
    if plan.allocated < GIB:
        small = ", ".join(f"{name} {bytes_in_words(size)}" for name, size in plan.parts.items())
        return f"highest in the {plan.phase}: {small}"
    parts = ", ".join(f"{name} {gib(size)}" for name, size in plan.parts.items())
    return f"highest in the {plan.phase}: {parts} GiB"


def checkpointing_line(choice: MemoryChoice) -> str | None:
    """Which activation checkpointing the memory allows; None where it is not known or nothing fits."""
    layers = choice.plan.layers
    if choice.checkpointing is None or choice.unchecked is None:
        return None
    if choice.checkpointing == "none":
        return "activation checkpointing: not needed"
    products = f"of the last {choice.with_products} the outputs of products can be kept, as auto does by measuring"
    if choice.checkpointing == "full":
        line = f"activation checkpointing: on all {layers} layers"
        return f"{line}; {products}" if choice.with_products else line
    line = f"activation checkpointing: the last {choice.unchecked} of {layers} layers can do without"
    line += f" (activation_checkpointing_layers: {layers - choice.unchecked}"
    if not choice.with_products:
        line += ", which auto finds by measuring"
    if choice.every_n_layers is not None and choice.every_n_layers > 1:
        line += f"; without hf_speedkit every_n_layers: {choice.every_n_layers}"
    return f"{line}); or, faster, {products}" if choice.with_products else f"{line})"


def gathering_line(choice: MemoryChoice) -> str | None:
    """Whether FSDP can gather weights once a step; None where it is off, shares nothing out, or is told so already."""
    if not choice.gathered or not choice.plan.job.reshard:
        return None
    return "reshard_after_forward: false would fit beside it as planned: weights gathered once a step, not twice"


def margin_line(gpus: int) -> str:
    """What "fits" leaves room for."""
    return (
        f'GiB of live tensors, as torch.cuda.max_memory_allocated() counts them; "fits" leaves {RESERVE_SHARE:.0%} '
        f"more for the allocator's reserve and {context_gib(gpus):g} GiB for CUDA{' and NCCL' if gpus > 1 else ''}"
    )


def gpus_in_words(gpus: int, gpu: str | None) -> str:
    """Number and kind: "2 x H200", "8 GPUs"."""
    if gpu is not None:
        return f"{gpus} x {gpu}"
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def size_in_words(parameters: int) -> str:
    """A model's size as people write it: 27B, 1.7B, 360M."""
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if parameters >= 0.95 * unit:
            scaled = parameters / unit
            return f"{scaled:.0f}{name}" if scaled >= 9.95 or name == "M" else f"{scaled:.1f}{name}"
    return f"{parameters / 1e3:.0f}k"


def bytes_in_words(size: float) -> str:
    """Bytes in the unit that shows three figures of them: 23.5 GiB, 412 MiB, 1.5 KiB, 900 bytes."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= 0.9995 * unit:
            value = size / unit
            return f"{value:,.0f} {name}" if value >= 99.95 else f"{value:.3g} {name}"
    return f"{size:.0f} bytes"


def _sized(size: float) -> str:
    return f"{gib(size)} GiB" if size >= GIB else bytes_in_words(size)


def gib(size: float) -> str:
    """Bytes in GiB, three figures: 105, 23.5, 0.06."""
    value = size / GIB
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"
