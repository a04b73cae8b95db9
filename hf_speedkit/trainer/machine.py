"""Settings of the machine that a launcher leaves in a bad place. Light: torch is imported in the functions."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)


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


def slow_imports(packages: Sequence[str] = ("torch", "transformers", "trl")) -> str | None:
    """Say that Python compiles packages anew in every process, if it does; call it when they are imported.

    Containers often set PYTHONDONTWRITEBYTECODE, and pip compiles nothing under --no-compile or where a build copied
    the packages. Importing transformers, trl and this package then takes 18 s of CPU instead of 6 (a first look, two
    cores), on every rank, in every worker that is started afresh, at every start.

    Args:
        packages: import names.

    Returns:
        The sentence, with the command that mends it; None where compiled modules are there.
    """
    found = {package: find_spec(package) for package in packages}
    sources = {name: spec.origin for name, spec in found.items() if spec is not None and spec.origin is not None}
    again = [
        name
        for name, origin in sources.items()
        if origin.endswith(".py") and not Path(cache_from_source(origin)).exists()
    ]
    if not again:
        return None
    folder = Path(sources[again[0]]).parent.parent
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else f"{folder} cannot be written"
    return (
        f"Python compiles {', '.join(again)} anew in every process, which takes each of them 10 s or more: {why}. "
        f"Once, or in the image: {sys.executable} -m compileall -q {folder}"
    )


def tell_slow_imports() -> None:
    """Log what `slow_imports` says, if it says anything."""
    sentence = slow_imports()
    if sentence is not None:
        logger.warning("%s", sentence)
