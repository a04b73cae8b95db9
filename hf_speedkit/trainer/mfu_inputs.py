"""What MFU is measured against: the model's FLOPs and the device's dense peak, found where the user gives neither."""

from __future__ import annotations

import torch
from transformers import TrainingArguments

from hf_speedkit.core.devices import peak_tflops
from hf_speedkit.core.flops import ModelFlops, model_flops


def flops_of(model: torch.nn.Module) -> ModelFlops | None:
    """FLOPs of a transformers model, LoRA included; None for a family or a way of training that is not known.

    The head is counted on every real token, as transformers' own forward computes it.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if not frozen:
        return model_flops(config.to_dict())
    if getattr(model, "peft_config", None) is None:
        return None  # some weights are frozen, and which gradients that saves depends on where they are
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return model_flops(config.to_dict(), frozen=True, adapter_parameters=trained)


def training_dtype(args: TrainingArguments, model: torch.nn.Module) -> str:
    """The dtype matrix products run in, as a key of the peak table."""
    if args.bf16:
        return "bfloat16"
    if args.fp16:
        return "float16"
    dtype = str(next(iter(model.parameters())).dtype).removeprefix("torch.")
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return dtype


def device_peak_tflops(args: TrainingArguments, model: torch.nn.Module) -> float | None:
    """Dense peak of this rank's device; None on a CPU and for a GPU that is not in the table."""
    if args.device.type != "cuda":
        return None
    return peak_tflops(torch.cuda.get_device_name(args.device), training_dtype(args, model))


def missing_notices(
    args: TrainingArguments, *, attached: bool, peak: float | None, flops: object | None
) -> tuple[str, ...]:
    """One line for each thing that keeps a metric from being made or seen, with what to do about it."""
    lines = []
    if not args.report_to:
        lines.append('speed metrics go to the console only; set report_to="wandb" (or another tracker)')
    elif not attached:
        lines.append(
            f"speed metrics will not reach {', '.join(args.report_to)}: callbacks given to the Trainer run after its "
            "trackers; use attach(trainer, ThroughputCallback())"
        )
    if args.device.type == "cuda" and peak is None:
        name = torch.cuda.get_device_name(args.device)
        lines.append(f"no MFU: the dense peak of {name!r} is not known; pass peak_tflops=")
    if args.device.type == "cuda" and flops is None:
        lines.append("no MFU: the FLOPs of this model are not known; pass flops=")
    return tuple(lines)
