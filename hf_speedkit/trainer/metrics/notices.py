"""What keeps metrics from being made or seen, and debugging that is still on: one line each, as a run begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import torch
from transformers import TrainingArguments
from transformers.debug_utils import DebugOption

from hf_speedkit.trainer.metrics.mfu_inputs import FlopsInputs

_DOUBTFUL = 1.5
"""Times the table's peak beyond which one given is another dtype's, or counts sparsity (twice the dense one)."""
_EMPTIED_TOO_OFTEN = 10

_SWITCHES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "CUDA_LAUNCH_BLOCKING": ("the host waits for every kernel", ()),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("the driver allocates every tensor, and waits for the device", ()),
    "TORCH_DISTRIBUTED_DEBUG": ("every collective is compared over all ranks first", ("info",)),
    "NCCL_P2P_DISABLE": ("the GPUs of a host exchange everything through host memory", ()),
    "NCCL_SHM_DISABLE": ("processes of one host talk through the network card", ()),
}
"""Environment variables by name: what they cost, and values that cost nothing."""


def notices(args: TrainingArguments, *, attached: bool, inputs: FlopsInputs) -> tuple[str, ...]:
    """Everything worth saying of a run's metrics and switches as it begins, a line each."""
    return (*missing_notices(args, attached=attached, inputs=inputs), *slowing_switches(args))


def missing_notices(args: TrainingArguments, *, attached: bool, inputs: FlopsInputs) -> tuple[str, ...]:
    """One line for each thing that keeps a metric from being made or seen, with what to do about it."""
    lines = []
    if not args.report_to:
        lines.append(
            'speed metrics go to console only; set report_to="wandb" (or another tracker; one that was given as a '
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
    if inputs.spread_over > 1:
        lines.append(
            f"the model's layers lie on {inputs.spread_over} devices (device_map), which work in turns: no MFU, "
            "and only one GPU's utilisation; leave device_map out, and shard it: accelerate launch with fsdp_version: 2"
        )
        return tuple(lines)
    if args.device.type == "cuda" and inputs.peak_tflops is None:
        name = torch.cuda.get_device_name(args.device)
        lines.append(f"no MFU: the dense peak of {name!r} is not known; pass peak_tflops=")
    if args.device.type == "cuda" and inputs.flops is None:
        lines.append("no MFU: the FLOPs of this model are not known; pass flops=")
    peak, dense = inputs.peak_tflops, inputs.table_tflops
    if peak is not None and dense is not None and not dense / _DOUBTFUL < peak < dense * _DOUBTFUL:
        lines.append(
            f"MFU is measured against {peak:,.0f} TFLOP/s, and the dense peak of this GPU in the training dtype is "
            f"{dense:,.0f}: data sheets often show twice as much, with sparsity; leave peak_tflops unset"
        )
    return tuple(lines)


def slowing_switches(args: TrainingArguments, environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """One line for each debugging switch that is on, with what it costs: utilisation shows none of it.

    Args:
        args: the Trainer's.
        environment: os.environ unless given.
    """
    environment = os.environ if environment is None else environment
    lines = []
    if torch.is_anomaly_enabled():
        lines.append("torch's anomaly detection is on: every operation is recorded and its gradient looked at for NaN")
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        lines.append('debug="underflow_overflow" is on: the host reads every output of every layer')
    if args.device.type != "cuda":
        return tuple(lines)
    every = args.torch_empty_cache_steps
    if every is not None and every < _EMPTIED_TOO_OFTEN:
        lines.append(
            f"torch_empty_cache_steps={every}: the device is drained and its memory allocated anew that often; leave "
            "it unset, or set 100"
        )
    if args.include_num_input_tokens_seen != "no":  # transformers 5.23, trainer.py:2740
        lines.append(
            "include_num_input_tokens_seen is on: every micro-batch ends in a gather and a read of the device; leave "
            "it out, speed/total_real_tokens says it without either"
        )
    lines += [
        f"{name}={environment[name]}: {what}; unset it unless you look for a fault"
        for name, (what, harmless) in _SWITCHES.items()
        if environment.get(name, "").strip().lower() not in {"", "0", "false", "off", *harmless}
    ]
    return tuple(lines)


def stray_run() -> str | None:
    """What to say on a rank that reports nothing and has a wandb run all the same; None elsewhere.

    A script that calls `wandb.init` before the Trainer does so on every rank: as many runs appear, all but one of them
    empty (V78; accelerate issue 644). Rank 1 speaks for all. wandb's shared mode means it.
    """
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None or os.environ.get("RANK", "1") != "1" or getattr(run.settings, "mode", None) == "shared":
        return None
    return (
        "wandb.init was called on ranks that report nothing: an empty run for each of them. Call it on world rank 0 "
        'only (if int(os.environ.get("RANK", 0)) == 0), or leave it to report_to="wandb"'
    )
