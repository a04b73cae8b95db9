"""The dense peak of a rank's device, in the dtype that its products run in."""

from __future__ import annotations

import torch
from accelerate.state import AcceleratorState
from transformers import TrainingArguments

from hf_speedkit.core.devices import peak_tflops, tensor_clock_mhz


def device_tensor_clock_mhz(args: TrainingArguments) -> float | None:
    """SM clock at which this rank's device has its peak; None on a CPU and for a GPU that is not in the table."""
    return None if args.device.type != "cuda" else tensor_clock_mhz(torch.cuda.get_device_name(args.device))


def training_dtype(args: TrainingArguments, model: torch.nn.Module) -> str:
    """The dtype matrix products run in, as a key of the peak table."""
    if AcceleratorState._shared_state.get("_mixed_precision") == "fp8":
        return "float8"
    if args.bf16:
        return "bfloat16"
    if args.fp16:
        return "float16"
    dtype = str(next(iter(model.parameters())).dtype).removeprefix("torch.")
    # However it was set: `torch.get_float32_matmul_precision` raises behind transformers' `tf32=True` (torch 2.13).
    if dtype == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return dtype


def device_peak_tflops(args: TrainingArguments, model: torch.nn.Module) -> float | None:
    """Dense peak of this rank's device; None on a CPU and for a GPU that is not in the table."""
    if args.device.type != "cuda":
        return None
    return peak_tflops(torch.cuda.get_device_name(args.device), training_dtype(args, model))
