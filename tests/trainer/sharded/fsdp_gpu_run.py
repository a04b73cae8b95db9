"""A rank of the two-GPU runs of test_fsdp_gpu.py, under torchrun: FSDP2 as accelerate does it, over NCCL.

torchrun --nproc_per_node 2 tests/trainer/sharded/fsdp_gpu_run.py accumulation FOLDER

The models are of full attention: FSDP2 is looked at, and fla's kernels are not made for fp32 heads of 8 numbers.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/trainer

import torch
from fsdp_run import Gradients, lone_head, losses
from support import tiny_llama, tiny_tokenizer, tokenized
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from two_process_run import LENGTHS
from unused_gathers_run import after_training, in_training, written_behind
from zero_copy_run import sharded

from hf_speedkit.trainer.launching import announce_sharding

FSDP = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "reshard_after_forward": True,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "FULL_STATE_DICT",
    },
}


class StepTimes(TrainerCallback):
    """Wall time of each step, the device waited for."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def median_s(self):
        return statistics.median(b - a for a, b in zip(self.ends[1:], self.ends[2:], strict=False))


def make(path, *, model=None, data=None, callbacks=(), sharded=True, **changes):
    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

    values = {
        "output_dir": str(path), "bf16": False, "tokens_per_batch": 32, "disable_tqdm": True,
        "activation_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "report_to": "none", "kernel_assertion": "off", "packed_attention": "keep",
        "fused_layers": False, "isolation_check": False, **(FSDP if sharded else {}),
    }  # fmt: skip
    return SpeedSFTTrainer(
        model=tiny_llama() if model is None else model,
        args=SpeedSFTConfig(**{**values, **changes}),
        train_dataset=tokenized(LENGTHS) if data is None else data,
        eval_dataset=tokenized([2, 2, 2, 30, 4, 25, 3], seed=7),
        processing_class=tiny_tokenizer(),
        callbacks=list(callbacks),
    )


def medium_llama():
    """About 170 M parameters: whole gradients are a third of a GB, enough to be seen."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).bfloat16()


def accumulation(path, rank):
    """V37: step time and peak memory with 1 micro-batch, with 4, and with 4 that reduce each."""
    each = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    said = {}
    for name, micro_batches, extra in (("1", 1, {}), ("4", 4, {}), ("4 reduced each", 4, each)):
        # Trainers are held by cycles: what the one before has left on the GPU would count as this one's.
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        held, times = torch.cuda.memory_allocated(), StepTimes()
        trainer = make(
            path / name, model=medium_llama(), data=tokenized([500] * 400), callbacks=[times], tokens_per_batch=2048,
            gradient_accumulation_steps=micro_batches, max_steps=8, **extra,
        )  # fmt: skip
        trainer.train()
        said[name] = {
            "step_s": times.median_s(),
            "peak_bytes": torch.cuda.max_memory_allocated() - held,
            "gradient_bytes": sum(p.numel() * 2 for p in trainer.model.parameters()),
            "rules": [finding.rule for finding in trainer.startup.findings],
        }
        del trainer
    return said


def evaluation(path, rank):
    """Evaluates and writes a checkpoint after every step."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make(path / "often", max_steps=3, **often)
    trainer.train()
    plain = make(path / "plain", max_steps=3)
    plain.train()
    return {"often": losses(trainer), "plain": losses(plain), "torch": torch.__version__}


def head(path, rank, sharded=True):
    """The gradient of a head that accelerate shards alone, or of the same rows on one GPU that shards nothing."""
    gradients = Gradients((1,))
    make(
        path / ("head" if sharded else "whole"), model=lone_head(tiny_llama()), max_steps=1, callbacks=[gradients],
        fused_optimizer=False, sharded=sharded, gradient_accumulation_steps=1 if sharded else 2,
    ).train()  # fmt: skip
    if rank == 0:
        torch.save({name: g.cpu() for name, g in gradients.kept[1].items()}, path / f"head{sharded}.pt")
    return {}


def whole(path, rank):
    return head(path, rank, sharded=False)


def unused(path, rank):
    """As test_zero_copy.py over gloo: here gathers run beside training, into memory that is let go of."""
    torch.distributed.init_process_group("nccl")
    how = {"device": "cuda", "model": {"width": 1024}}
    return {
        "copied": in_training(False, **how), "direct": in_training(True, **how), "after": after_training(**how),
        # Gathers of 268 MB a weight take a millisecond, and zeros are asked for as soon as the backward pass ends.
        "written behind": written_behind(sharded(device="cuda", model={"width": 8192})),
    }  # fmt: skip


class Dawdles(TrainerCallback):
    def __init__(self, path):
        self.path = path

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 2 and args.process_index == 1:
            (self.path / "began").touch()
            time.sleep(3600)


def stand(path, rank):
    make(path / "stand", max_steps=20, stuck_rank_timeout_s=10, callbacks=[Dawdles(path)]).train()
    return {}


if __name__ == "__main__":
    mode, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ.get("RANK", "0"))
    if mode != "whole":
        announce_sharding(FSDP)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    modes = [accumulation, evaluation, head, whole, unused, stand]
    result = {run.__name__: run for run in modes}[mode](folder, rank)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
