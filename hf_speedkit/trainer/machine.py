"""Settings of the machine that a launcher leaves in a bad place."""

from __future__ import annotations

import os

from transformers import TrainingArguments


def use_all_cores(args: TrainingArguments) -> int:
    """Let a single CPU process use every core it may run on; returns the number of threads.

    `accelerate launch` sets OMP_NUM_THREADS=1 for every kind of run (utils/launch.py:195), so that a CPU run trains on
    one core. Several processes, and runs on a GPU, are left as they are.
    """
    import torch

    if args.device.type == "cpu" and args.world_size == 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        torch.set_num_threads(cores)
    return torch.get_num_threads()
