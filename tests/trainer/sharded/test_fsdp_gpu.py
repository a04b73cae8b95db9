"""FSDP2 on two GPUs over NCCL, with the torch of that machine: what gloo on a CPU cannot show."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]


def ended(command, **environment):
    job = subprocess.run(
        [sys.executable, *command], env={**os.environ, "OMP_NUM_THREADS": "4", **environment},
        capture_output=True, text=True, timeout=380,
    )  # fmt: skip
    return job.returncode, job.stdout + job.stderr


def torchrun(mode, folder, port):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    return ended([*launcher, str(HERE / "fsdp_gpu_run.py"), mode, str(folder)])


def results(mode, folder, port):
    code, said = torchrun(mode, folder, port)
    assert code == 0, said[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_v37_accumulation_on_two_gpus_prints_step_times_and_peaks(tmp_path, free_port):
    said = results("accumulation", tmp_path, free_port)[0]
    print("V37", json.dumps(said))
    one, four, each = said["1"], said["4"], said["4 reduced each"]
    assert 1 < four["step_s"] / one["step_s"] < 8
    assert "kept_gradients" in four["rules"]
    assert "kept_gradients" not in each["rules"]
    # Whole gradients against half of them; activations and buffers are the same in both.
    assert four["peak_bytes"] - each["peak_bytes"] > 0.3 * four["gradient_bytes"]


def test_training_goes_on_after_evaluations_and_checkpoints(tmp_path, free_port):
    for said in results("evaluation", tmp_path, free_port):
        print("torch", said["torch"])
        assert said["often"] == pytest.approx(said["plain"], abs=1e-5)


def test_a_head_alone_in_its_group_gets_the_mean_gradient_of_all_ranks(tmp_path, free_port):
    results("head", tmp_path, free_port)
    code, said = ended([str(HERE / "fsdp_gpu_run.py"), "whole", str(tmp_path)], CUDA_VISIBLE_DEVICES="0")
    assert code == 0, said[-4000:]
    whole = torch.load(tmp_path / "headFalse.pt")
    for name, gradient in torch.load(tmp_path / "headTrue.pt").items():
        # fp32 on both sides, the same kernels: only the order of a sum differs. Measured over gloo: 2e-7.
        torch.testing.assert_close(gradient, whole[name], atol=1e-5, rtol=1e-4, msg=name)


def test_what_was_gathered_for_layers_that_did_not_run_is_neither_held_nor_used(tmp_path, free_port):
    for said in results("unused", tmp_path, free_port):
        for how in ("copied", "direct"):
            assert all(case == [[], []] for case in said[how].values()), said[how]
        for held, as_before, *wrong in said["after"].values():
            assert (held, as_before, wrong) == ([], True, [[], [], []])
        assert said["written behind"] == [0.0] * 5


def test_a_rank_that_stands_still_ends_the_run_under_nccl(tmp_path, free_port):
    code, said = torchrun("stand", tmp_path, free_port)
    seconds = time.time() - (tmp_path / "began").stat().st_mtime
    print(f"ended {seconds:.0f} s after rank 1 stood still (timeout 10 s)")
    assert code != 0
    assert seconds < 45
    assert "for rank 1" in said, said[-4000:]
    assert "fsdp_gpu_run.py:" in said
    assert "so the run ends" in said
