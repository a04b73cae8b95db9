"""Ranks of a test as real processes that do not import torch and transformers again.

A process that multiprocessing spawns imports them for 6 s of CPU time before it does anything (two processes a test, a
dozen tests). Here one server process imports them once, and each rank is a fork of it: a process of its own, with
nothing of the test process in it but its environment variables.
"""

from __future__ import annotations

import gc
import multiprocessing
import os

import torch.multiprocessing as mp

# The server reads no sys.path of ours, so that it can know installed packages only, not the modules beside the tests.
IMPORTED_ONCE = (
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.profiler", "transformers", "trl",
    "datasets", "accelerate", "hf_speedkit.trainer.sft", "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


def start_ranks(function, *arguments, ranks: int = 2) -> None:
    """Run `function(rank, *arguments)` in so many processes and wait for all; an exception of one is raised here.

    Args:
        function: of the top level of a module, found again by its name.
        arguments: what can be pickled, and queues of `rank_queue`.
        ranks: number of processes.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the rank that failed first.
        torch.multiprocessing.ProcessExitedException: with the signal or exit code that ended a rank.
    """
    multiprocessing.set_forkserver_preload(list(IMPORTED_ONCE))
    environment = dict(os.environ)
    mp.start_processes(_rank, args=(function, environment, arguments), nprocs=ranks, start_method="forkserver")


def rank_queue() -> multiprocessing.queues.SimpleQueue:
    """A queue that ranks put what they found into."""
    return multiprocessing.get_context("forkserver").SimpleQueue()


def _rank(rank, function, environment, arguments):
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # every training collects garbage: not in what was imported (conftest.py)
    function(rank, *arguments)
