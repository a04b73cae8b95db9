"""What keeps a metric from being made, or from reaching a tracker: one line each, at the beginning of a run."""

from __future__ import annotations

import os

import torch
from transformers import TrainingArguments

from hf_speedkit.trainer.metrics.mfu_inputs import FlopsInputs


def missing_notices(args: TrainingArguments, *, attached: bool, inputs: FlopsInputs) -> tuple[str, ...]:
    """One line for each thing that keeps a metric from being made or seen, with what to do about it."""
    lines = []
    if not args.report_to:
        lines.append(
            'speed metrics go to the console only; set report_to="wandb" (or another tracker; one that was given as a '
            "callback gets them all the same)"
        )
    elif not attached:
        lines.append(
            f"speed metrics will not reach {', '.join(args.report_to)}: callbacks given to the Trainer run after its "
            "trackers; use attach(trainer, ThroughputCallback())"
        )
    if "wandb" in args.report_to and os.environ.get("WANDB_MODE") == "disabled":
        lines.append("WANDB_MODE=disabled: nothing reaches wandb; unset it, or use offline to keep the run in a file")
    if args.n_gpu > 1:
        lines.append(
            f"one process drives {args.n_gpu} GPUs by DataParallel: no MFU, and only the first GPU's utilisation; "
            f"start it with accelerate launch --num_processes {args.n_gpu}, which is faster as well"
        )
        return tuple(lines)
    if args.device.type == "cuda" and inputs.peak_tflops is None:
        name = torch.cuda.get_device_name(args.device)
        lines.append(f"no MFU: the dense peak of {name!r} is not known; pass peak_tflops=")
    if args.device.type == "cuda" and inputs.flops is None:
        lines.append("no MFU: the FLOPs of this model are not known; pass flops=")
    return tuple(lines)
