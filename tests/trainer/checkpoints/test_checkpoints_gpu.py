"""On two real GPUs: FSDP2 over NCCL is stopped by a signal to one rank, goes on, and leaves a model that loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_speedkit.trainer.checkpoints.export import export_checkpoint

pytestmark = [pytest.mark.multi_gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(580)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_gpus_stop_together_go_on_and_export(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29517"]
    ended = subprocess.run([*command, str(Path(__file__).parent / "checkpoint_gpu_run.py"), str(tmp_path)], check=False)
    assert ended.returncode == 0
    ranks = [json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in range(2)]
    print(json.dumps(ranks[0], indent=1))
    assert ranks[0]["stopped"] == [["a signal on another rank", 14]]
    assert ranks[1]["stopped"] == [["SIGTERM", 14]]
    for said in ranks:
        assert said["resumed_at"] == [[14, 14]]
        ((difference, steps),) = said["loss_difference"]
        assert steps == 24
        # bf16 weights, deterministic kernels: a resume on as many ranks should be bit-equal.
        assert difference <= 1e-4
    export_checkpoint(tmp_path / "run" / "checkpoint-24", tmp_path / "exported", dtype="bfloat16")
    states = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("final", "exported")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
