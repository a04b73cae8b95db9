"""One rank of test_checkpoints_gpu.py: FSDP2 over NCCL by TrainingArguments, stopped, resumed, exported.

torchrun --nproc_per_node 2 tests/trainer/checkpoints/checkpoint_gpu_run.py OUT       # rank 0 writes OUT/said.json
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]  # tests/trainer, tests

STEPS = 24


def model():
    """170 million parameters in bf16: a checkpoint of 1 GB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10, num_attention_heads=16,
        num_key_value_heads=16, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    # Eager: the backward passes of sdpa's kernels add up in any order, and two runs of one curve drift apart (2e-4).
    return LlamaForCausalLM._from_config(config, attn_implementation="eager").to(torch.bfloat16)


def trainer_for(path, callbacks=(), **changes):
    from support import tiny_tokenizer, tokenized

    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

    values = {
        "output_dir": str(path), "bf16": False, "tokens_per_batch": 2048, "disable_tqdm": True,
        "save_strategy": "steps", "save_steps": 10, "logging_steps": 1, "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "report_to": "none", "max_steps": STEPS, "isolation_check": False,
        "kernel_assertion": "off", "packed_attention": "keep", "fused_layers": False, "allow_existing_output": True,
        "fsdp": True, "fsdp_config": {
            "version": 2, "reshard_after_forward": True, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    }  # fmt: skip
    lengths = [1500, 700, 300, 1900, 900, 400, 1200, 100] * 30
    return SpeedSFTTrainer(
        model=model(),
        args=SpeedSFTConfig(**{**values, **changes}),
        train_dataset=tokenized(lengths),
        processing_class=tiny_tokenizer(),
        callbacks=list(callbacks),
    )


def timed(trainer):
    """Seconds that each step's question for the flags took."""
    waits, ask = [], trainer.stop_signal.agreed

    def agreed(**options):
        began = time.perf_counter()
        answer = ask(**options)
        waits.append(time.perf_counter() - began)
        return answer

    trainer.stop_signal.agreed = agreed
    return waits


def scenarios(path, rank):
    import torch
    from checkpoint_run import SignalAt, losses

    from hf_speedkit.trainer.checkpoints.files import read_manifest

    # Logging every step would hide a wait: the host waits at a log anyway.
    for name, changes in (("listening", {}), ("deaf", {"stop_signals": []})):
        trainer = trainer_for(path / "speed", save_strategy="no", logging_steps=8, **changes)
        waits = timed(trainer)
        trainer.train()
        yield f"step_time_s {name}", [e["speed/step_time_s"] for e in trainer.state.log_history if "loss" in e][1:]
        yield f"wait_s {name}", [median(waits), max(waits[2:])]

    # Curves of bf16 weights are compared: sums by atomics, as in attention's backward, would drive them apart.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    whole = trainer_for(path / "whole", save_strategy="no")
    whole.train()
    callbacks = [SignalAt(12, signal.SIGTERM)] if rank == 1 else []
    stopped = trainer_for(path / "run", callbacks)
    stopped.train()
    yield "stopped", [stopped.stopped_by, stopped.state.global_step]
    at = stopped.state.global_step
    checkpoint = path / "run" / f"checkpoint-{at}"
    yield "checkpoint_bytes", read_manifest(checkpoint).size_bytes
    began = time.perf_counter()
    stopped._save_checkpoint(stopped.model, None)
    yield "save_s", time.perf_counter() - began
    resumed = trainer_for(path / "run")
    began = time.perf_counter()
    resumed.train(resume_from_checkpoint=True)
    yield "resumed_at", [resumed.startup.resumed_at, at]
    difference = [abs(losses(whole)[step] - loss) for step, loss in losses(resumed).items()]
    yield "loss_difference", [max(difference), len(difference)]
    began = time.perf_counter()
    resumed.save_model(str(path / "final"))
    yield "final_s", time.perf_counter() - began


if __name__ == "__main__":
    out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    out.mkdir(parents=True, exist_ok=True)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before CUDA starts: what deterministic products need
    said = {}
    for key, value in scenarios(out, rank):
        said.setdefault(key, []).append(value)
        # After each: what was measured stays where a later part fails.
        (out / f"said{rank}.json").write_text(json.dumps(said, indent=1))
    from torch.distributed import destroy_process_group

    destroy_process_group()
