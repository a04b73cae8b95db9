"""Two gloo processes: a kernel that is refused on one rank stops both, without a hang."""

import os
import time
import types
from contextlib import nullcontext

import pytest
from kernel_models import tiny_model
from rank_processes import rank_queue, start_ranks

from hf_speedkit.core.errors import SpeedkitError
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.inspection import assert_kernels
from hf_speedkit.trainer.ranks.agreement import agree


def checks(rank):
    """Rank 1 sits on another GPU, where the combination is blocked."""
    verdict = KernelVerdict.BLOCKED if rank == 1 else KernelVerdict.FUSED
    fix = 'pip install "triton>=3.7.1"' if rank == 1 else None
    return [
        KernelCheck(
            function="chunk_gated_delta_rule",
            verdict=verdict,
            layer="Qwen3_5GatedDeltaNet",
            layers=48,
            layers_total=48,
            evidence="fla 0.6.0",
            fix=fix,
        )
    ]


def run(rank, port, queue, folder):
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        agree(lambda: assert_kernels(None, mode="strict", checks=checks(rank)))
    except SpeedkitError as error:
        queue.put((rank, type(error).__name__, str(error)))
    try:
        first_step(rank)
    except SpeedkitError as error:
        queue.put((rank + 2, type(error).__name__, str(error)))
    try:
        before_loading(rank, folder)
    except SpeedkitError as error:
        queue.put((rank + 4, type(error).__name__, str(error)))
    dist.destroy_process_group()


def before_loading(rank, folder):
    """Only one rank a host looks at the packages, and both stop."""
    from hf_speedkit.trainer.before_loading import require_kernels

    args = types.SimpleNamespace(
        local_process_index=rank, packing=False, kernel_assertion="strict", model_init_kwargs=None, fused_layers=False,
        parallelism_config=None,
    )  # fmt: skip
    require_kernels(folder, args)


def first_step(rank):
    """The hooks of a first step whose forward, on rank 1, calls something else than was proven; rank 0 is traced."""
    import torch
    from transformers import TrainerControl, TrainerState

    from hf_speedkit.kernels.ran import StepKernels
    from hf_speedkit.trainer.proof.first_step import FirstStep

    proof, model = FirstStep(), torch.nn.Linear(4, 4) if rank == 0 else torch.nn.Identity()
    check = KernelCheck(
        function="attention", verdict=KernelVerdict.FUSED, layer="L", layers=1, layers_total=1, evidence="linear"
    )
    proof.step_kernels, proof.expected_names = StepKernels("cpu"), {("attention", "linear"): ("addmm", "MmBackward")}
    proof.checks = (check,)
    proof.expect("strict")
    hooks = types.SimpleNamespace(device=torch.device("cpu")), TrainerState(), TrainerControl()
    x = torch.ones(2, 4, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if rank == 0 else nullcontext():
        proof.on_step_begin(*hooks, model=model)
        model(x).sum().backward()
        proof.on_pre_optimizer_step(*hooks)


@pytest.mark.two_process
def test_kernels_refused_on_one_rank_stop_both_at_once_with_the_command(free_port, tmp_path):
    tiny_model("qwen3_5").config.save_pretrained(tmp_path)
    queue = rank_queue()
    began = time.monotonic()
    start_ranks(run, free_port, queue, str(tmp_path))
    assert time.monotonic() - began < 150  # imports of two processes on a busy machine; a hang would take 30 minutes
    said = {}
    while not queue.empty():
        rank, kind, message = queue.get()
        said[rank] = (kind, message)
    assert said[1][0] == "KernelAssertionError"
    assert said[0][0] == "SpeedkitError"
    assert "rank 1 of 2 cannot train" in said[0][1]
    for _, message in (said[0], said[1]):
        assert "chunk_gated_delta_rule   BLOCKED" in message
        assert 'pip install "triton>=3.7.1"' in message
    assert said[3][0] == "KernelAssertionError"
    assert "attention   L   no forward kernel" in said[3][1]  # nothing is trained there: no backward is demanded
    assert "rank 1 of 2 cannot train" in said[2][1]
    assert [said[rank][0] for rank in (4, 5)] == ["KernelAssertionError", "SpeedkitError"]
    assert all("chunk_gated_delta_rule   FALLBACK" in said[rank][1] for rank in (4, 5))
