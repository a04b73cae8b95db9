"""Settings of the machine that a launcher leaves in a bad place. Light: torch is imported in the functions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainingArguments


def prepare_process() -> None:
    """Set what must be set before torch is imported; a setting that is already there is kept.

    OpenMP threads sleep where they wait. By default they spin, so that two threads on two cores that others use as well
    run several times slower: 8 to 46 s against 2 to 11 s for the same products beside two busy processes
    (benchmarks/NOTES.md).

    The GPU allocator grows its segments instead of adding new ones: memory that is reserved and of no use (18 of
    125 GiB in benchmarks/results/2026-11-29_2xh200_27b_fsdp2_first_run.json) then holds activations instead.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which torch still reads
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


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
