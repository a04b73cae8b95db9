"""Whether a job will fit into its GPUs, planned from its settings in seconds, before any weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hf_speedkit.core.errors import HardwareError
from hf_speedkit.core.memory_choice import Fit, MemoryChoice, choose, smallest_gpus
from hf_speedkit.core.memory_sizes import (
    BF16_BYTES,
    EIGHT_BIT_ADAMW,
    FP32_BYTES,
    LORA,
    MemoryJob,
    MemorySetting,
)
from hf_speedkit.core.memory_words import choice_line, gathering_line, gib, gpus_in_words, parts_line, size_in_words
from hf_speedkit.trainer.memory.settings import PlannedJob, planned_job
from hf_speedkit.trainer.ranks.agreement import agree

logger = logging.getLogger(__name__)


def require_memory(
    model: str,
    args: Any,
    *,
    peft_config: Any = None,
    weight_bits: int = 16,
    dtype: Any = None,
    revision: str | None = None,
) -> MemoryChoice | None:
    """Refuse a job whose live tensors would not fit into its GPUs, in seconds and before anything is loaded.

    Args:
        model: hub id or folder; its configuration is read.
        args: a SpeedSFTConfig. `memory_check`: "strict" raises, "warn" logs, "off" plans nothing.
        peft_config: of the adapters that are trained; None trains everything.
        weight_bits: 4 or 8 where the model is loaded quantized.
        dtype: in which the weights are loaded; None takes it from `args.model_init_kwargs`.
        revision: of the model.

    Returns:
        The plan; None where nothing can be said: no GPU to look at, rows of no fixed size, states held in host memory,
        fp32 arithmetic, 8-bit weights, adapters other than LoRA, or a model that cannot be traced. The log says which.

    Raises:
        HardwareError: it does not fit, with what would.
    """
    from hf_speedkit.measure.environment import visible_gpus

    def check() -> MemoryChoice | None:
        gpus = visible_gpus()
        if not gpus:
            logger.info("memory is not planned: NVML shows no GPU (hf-speedkit plan takes --gpu or --gpu-memory)")
            return None
        planned = planned_job(
            model, args, peft_config=peft_config, weight_bits=weight_bits, dtype=dtype, revision=revision
        )
        if isinstance(planned, str):
            logger.info("memory is not planned: %s", planned)
            return None
        gpu = min(gpus, key=lambda gpu: gpu.memory_gib)
        return judge(planned, name=gpu.name, memory_gib=gpu.memory_gib, strict=args.memory_check == "strict")

    if args.memory_check == "off" or args.device.type != "cuda":
        return None
    return agree(check)


def require_memory_of(model_args: Any, args: Any) -> MemoryChoice | None:
    """`require_memory` for a recipe that parses TRL's ModelConfig.

    Args:
        model_args: a ModelConfig.
        args: a SpeedSFTConfig.

    Raises:
        HardwareError: it does not fit, with what would.
    """
    adapters = SimpleNamespace(r=model_args.lora_r, target_modules=model_args.lora_target_modules)
    return require_memory(
        model_args.model_name_or_path,
        args,
        peft_config=adapters if model_args.use_peft else None,
        weight_bits=bits_of(model_args),
        dtype=model_args.dtype,
        revision=model_args.model_revision,
    )


def bits_of(quantization: Any) -> int:
    """Bits of a weight by a ModelConfig or a quantization config; 16 without."""
    return (
        4 if getattr(quantization, "load_in_4bit", False) else 8 if getattr(quantization, "load_in_8bit", False) else 16
    )


def judge(planned: PlannedJob, *, name: str, memory_gib: float, strict: bool) -> MemoryChoice | None:
    """Plan, log the plan, and refuse what cannot fit.

    Args:
        planned: see `planned_job`.
        name, memory_gib: of the GPUs.
        strict: raise; else warn.

    Raises:
        HardwareError: it does not fit.
    """
    from hf_speedkit.kernels.memory_trace import UntraceableError

    try:
        choice = choose(planned.sizes, planned.setting, planned.job, memory_gib)
        parameters = planned.sizes(planned.setting, planned.job).parameters
        line = choice_line(choice, parameters, name)
        if choice.fit is not Fit.TOO_BIG:
            log = logger.warning if choice.fit is Fit.TIGHT else logger.info
            log("memory plan: %s; %s", line, "; ".join(filter(None, (parts_line(choice.plan), gathering_line(choice)))))
            return choice
        error = _too_big(planned, choice, parameters, name, memory_gib)
    except UntraceableError as reason:
        logger.info("memory is not planned: the model does not run on fake tensors (%s)", reason)
        return None
    if strict:
        raise error
    logger.warning("%s", error)
    return choice


def _too_big(planned: PlannedJob, choice: MemoryChoice, parameters: int, name: str, memory_gib: float) -> HardwareError:
    plan = choice.plan
    what = "training its adapters" if planned.setting.adapters else "a full fine-tune"
    where = gpus_in_words(planned.job.gpus, name)
    ways = _ways(planned, memory_gib, name)
    return HardwareError(
        f"{size_in_words(parameters)}, {what} in {planned.setting.name}, does not fit on {where}.",
        evidence=(
            f"needed:  {gib(plan.allocated)} GiB per GPU, found {memory_gib:,.1f} GiB",
            parts_line(plan),
            *(f"fits:    {way}: {gib(size)} GiB per GPU" for way, size in ways),
        ),
        mend=ways[0][0] if ways else "use a smaller model, shorter rows (tokens_per_batch) or larger GPUs",
        regardless='memory_check="warn"',
    )


def _ways(planned: PlannedJob, memory_gib: float, name: str) -> Sequence[tuple[str, int]]:
    """Changes after which the job fits, the smallest change first, with the bytes it then takes."""
    job, setting = planned.job, planned.setting
    lighter = replace(job, unchecked=0, every_n_layers=1, sync_each_batch=True, reshard=True)
    words = []
    if job.accumulation > 1 and not job.sync_each_batch and job.fsdp and job.gpus > 1:
        words.append("accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}")
    if job.unchecked or job.every_n_layers > 1:
        words.append("activation_checkpointing: true on all layers")
    if not job.reshard and job.fsdp and job.gpus > 1:
        words.append("fsdp_config: {reshard_after_forward: true}")
    beside = f" (with {' and '.join(words)})" if words else ""
    found = [(" and ".join(words), lighter, setting)] if words else []
    if setting.trained_bytes == FP32_BYTES and not setting.adapters:
        bf16 = replace(setting, trained_bytes=BF16_BYTES, moment_bytes=min(setting.moment_bytes, 2 * BF16_BYTES))
        found.append((f"bf16: false with dtype: bfloat16{beside}", lighter, bf16))
    if not setting.adapters and not (job.fsdp and job.gpus > 1):  # see launching.refuse_optimizer
        found.append((f"optim: adamw_8bit with bf16: false, dtype: bfloat16{beside}", lighter, EIGHT_BIT_ADAMW))
    if not job.fsdp:
        found.append((f"fsdp: true{beside}", replace(lighter, fsdp=True), setting))
    found += _more_gpus(planned, lighter, memory_gib, name, beside)
    if not setting.adapters:
        found.append((f"use_peft: true, LoRA on {job.gpus} x {name}{beside}", replace(lighter, fsdp=job.fsdp), LORA))
    ways = []
    for text, changed, kept in found:
        tried = choose(planned.sizes, kept, changed, memory_gib)
        if tried.fit is not Fit.TOO_BIG:
            ways.append((text, tried.plan.allocated))
    return ways


def _more_gpus(
    planned: PlannedJob, lighter: MemoryJob, memory_gib: float, name: str, beside: str
) -> list[tuple[str, MemoryJob, MemorySetting]]:
    count = smallest_gpus(planned.sizes, planned.setting, replace(lighter, fsdp=True), memory_gib)
    if count is None or count <= planned.job.gpus:
        return []
    spread = replace(lighter, gpus=count, shards=None, fsdp=True)
    return [(f"{count} x {name} with fsdp: true{beside}", spread, planned.setting)]
