"""A job's settings as what a memory plan needs to know of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.memory_sizes import (
    EIGHT_BIT_ADAMW,
    FP32_MASTER,
    LORA,
    PURE_BF16,
    QLORA,
    MemoryJob,
    MemorySetting,
)
from hf_speedkit.trainer.hardware import MOMENT_BYTES, is_on, word_of

if TYPE_CHECKING:
    from hf_speedkit.kernels.memory_trace import TracedSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """What a plan is made from.

    Args:
        setting: how states are kept.
        job: how the job is spread out.
        sizes: the model's.
    """

    setting: MemorySetting
    job: MemoryJob
    sizes: TracedSizes


def planned_job(
    model: str, args: Any, *, peft_config: Any, weight_bits: int, dtype: Any, revision: str | None
) -> PlannedJob | str:
    """What to plan from a job's settings, or why nothing can be planned; see `require_memory`."""
    from transformers import AutoConfig

    from hf_speedkit.kernels.memory_trace import TracedSizes

    if not args.packing or not args.row_slots:
        return "without packing rows have no fixed size"
    if args.deepspeed or _fsdp_config(args).get("cpu_offload") or is_on(os.environ.get("FSDP_OFFLOAD_PARAMS")):
        return "states are held in host memory"
    if weight_bits == 8:
        return "8-bit weights are not modelled"
    setting = setting_of(args, lora=peft_config is not None, quantized=weight_bits == 4, dtype=dtype)
    if isinstance(setting, str):
        return setting
    adapters = None
    if peft_config is not None:
        adapters = _adapters(peft_config, fused=bool(args.fused_layers and args.fused_lora))
        if adapters is None:
            return f"{type(peft_config).__name__} with these targets is not modelled"
    loading = args.model_init_kwargs or {}
    # None would ask on the terminal, on every rank.
    trusted = loading.get("trust_remote_code", False)
    try:
        config = AutoConfig.from_pretrained(
            model, revision=revision or loading.get("revision"), trust_remote_code=trusted
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        return f"no configuration can be read from {model!r} ({type(error).__name__})"
    sizes = TracedSizes(
        config,
        args.row_slots,
        adapters=adapters,
        mixed_precision=bool(args.bf16 or args.fp16),
        fused=bool(args.fused_layers) and _has_fused_kernels(),
    )
    return PlannedJob(setting=setting, job=job_of(args, config), sizes=sizes)


def setting_of(args: Any, *, lora: bool, quantized: bool, dtype: Any) -> MemorySetting | str:
    """How a job keeps its states, or why that is not known.

    Args:
        args: the job's settings. Read here: `bf16`, `fp16`, `optim`, `model_init_kwargs`.
        lora: adapters are trained.
        quantized: the model is loaded in 4 bits.
        dtype: of the weights; None takes `model_init_kwargs`' (fp32 without one: trl 1.16 utils.py:1332).
    """
    given = dtype if dtype is not None else (args.model_init_kwargs or {}).get("dtype", "float32")
    loaded = {"auto": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(
        name := str(given).removeprefix("torch."), name
    )
    mixed = bool(args.bf16 or args.fp16)
    if loaded == "float32" and not mixed:
        return "arithmetic is fp32"
    if lora and loaded == "float32" and not quantized:
        return "a frozen model in fp32 is not modelled"
    sharded = _is_sharded(args)
    if lora:
        setting = QLORA if quantized else LORA
    elif loaded == "float32" or (mixed and sharded):  # accelerate upcasts: fsdp_utils.py:815
        setting = FP32_MASTER
    else:
        setting = PURE_BF16
    optimizer = word_of(args.optim)
    moment = MOMENT_BYTES.get(optimizer, 0.0)  # of an unknown optimizer nothing is counted
    if moment is not None:
        name = EIGHT_BIT_ADAMW.name if moment == 1.0 and setting is PURE_BF16 else f"{setting.name}, {optimizer}"
        return replace(setting, name=name, moment_bytes=2 * moment)
    foreach = optimizer == "adamw_torch"  # torch's default: a copy of the second moment while it steps
    return replace(setting, step_bytes=setting.trained_bytes if foreach else 0.0)


def job_of(args: Any, config: Any) -> MemoryJob:
    """How a job is spread out, by its settings and the launcher's."""
    layers = config.get_text_config().num_hidden_layers
    kwargs = args.activation_checkpointing_kwargs or {}
    fsdp = _fsdp_config(args)
    asked = str(args.activation_checkpointing_layers)
    checkpointing = args.activation_checkpointing or is_on(fsdp.get("activation_checkpointing"))
    kept = layers - min(layers, int(asked)) if asked.isdecimal() else 0
    accumulation = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    reshard = fsdp.get("reshard_after_forward", os.environ.get("FSDP_RESHARD_AFTER_FORWARD", True))
    shards = os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE") or getattr(
        args.parallelism_config, "dp_shard_size", None
    )
    return MemoryJob(
        gpus=args.world_size,
        fsdp=_is_sharded(args),
        shards=int(shards) if shards and int(shards) > 1 else None,
        unchecked=kept if checkpointing else layers,
        every_n_layers=int(kwargs.get("every_n_layers", 1)),
        reshard=is_on(reshard),
        accumulation=args.gradient_accumulation_steps,
        sync_each_batch=is_on(accumulation.get("sync_each_batch")),
        head="trl" if args.loss_head == "trl" else "speedkit",
        zero_copy=args.fsdp_zero_copy and not kwargs.get("use_reentrant"),  # see sharded/ahead.reentrant
    )


def _is_sharded(args: Any) -> bool:
    return is_on(args.fsdp) or is_on(os.environ.get("ACCELERATE_USE_FSDP"))


def _fsdp_config(args: Any) -> Mapping[str, Any]:
    config = args.fsdp_config if isinstance(args.fsdp_config, Mapping) else {}
    return {str(key).removeprefix("fsdp_"): value for key, value in config.items()}


def _adapters(peft_config: Any, *, fused: bool) -> Any:
    from hf_speedkit.kernels.traced_adapters import Adapters

    targets = getattr(peft_config, "target_modules", None)
    rank = getattr(peft_config, "r", None)
    if not isinstance(rank, int) or (isinstance(targets, str) and targets != "all-linear"):
        return None
    names = () if targets is None or isinstance(targets, str) else tuple(sorted(targets))
    return Adapters(rank=rank, targets=names, fused=fused)


def _has_fused_kernels() -> bool:
    from hf_speedkit.kernels.imports import is_installed

    return is_installed("fla") or is_installed("liger_kernel")
