"""One SpeedSFTTrainer run of the 27B geometry: the proofs, then real steps, then the numbers as JSON.

    python benchmarks/depth_cut.py --out result.json [--layers 8] [--steps 40] [--accumulation 1]
    torchrun --nproc_per_node 2 benchmarks/depth_cut.py --out result.json --layers 64 --steps 12    # FSDP2, whole model

Random weights made on the device, bf16, AdamW, rows of 8,192, documents of chat lengths, activation checkpointing on
every layer. The figures are those that ThroughputCallback logs; warm-up is excluded by its rule, not by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from geometry import chat_dataset, qwen27b_config, random_model
from transformers import PreTrainedTokenizerFast

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.records import to_dict
from hf_speedkit.measure.environment import collect_environment
from hf_speedkit.trainer.summary import print_summary

FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "reshard_after_forward": True,
        "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"],
        "cpu_ram_efficient_loading": False,  # the weights are made on the device, the same on every rank
    },
}


def stub_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that is never asked to tokenize: the documents are token ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    """Run, print the closing table, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--checkpointing", type=int, default=1)
    parser.add_argument("--logging-steps", type=int, default=5)
    parser.add_argument("--commit", help="commit of the tree, where git is not at hand")
    given = parser.parse_args()

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    config = qwen27b_config(given.layers)
    # The same seed on every rank: FSDP2 shards what is there, so each rank must hold the same weights.
    model = random_model(config, device="cuda", dtype=torch.bfloat16)
    documents = int(given.steps * given.accumulation * world * given.tokens_per_batch / 1258.9 * 1.1) + 10
    dataset = chat_dataset(documents, vocabulary=config.vocab_size, longest=given.tokens_per_batch)
    with tempfile.TemporaryDirectory() as directory:
        args = SpeedSFTConfig(
            output_dir=directory,
            tokens_per_batch=given.tokens_per_batch,
            max_steps=given.steps,
            gradient_accumulation_steps=given.accumulation,
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            bf16=False,
            activation_checkpointing=bool(given.checkpointing),
            activation_checkpointing_kwargs={"use_reentrant": False},
            packed_attention=given.attention,
            logging_steps=given.logging_steps,
            save_strategy="no",
            accelerator_config={"non_blocking": True},
            dataloader_num_workers=2,
            disable_tqdm=True,
            report_to="none",
            **(FSDP2 if world > 1 else {}),
        )
        trainer = SpeedSFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=stub_tokenizer())
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    if rank != 0:
        return
    print_summary(trainer.summary())
    totals = trainer.throughput.run_totals()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "what": "SpeedSFTTrainer on the depth-cut 27B",
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "world_size": world,
        "startup_s": dict(trainer.startup.seconds),
        "commit": given.commit,
        "environment": to_dict(collect_environment()),
        "train_call_s": seconds,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "rates": dict(totals.rates),
        "steady_steps": totals.steady_steps,
        "session_steps": totals.session_steps,
        "kernels": [to_dict(check) for check in trainer.summary().kernels],
        "isolation": to_dict(trainer.summary().isolation),
        "log": steps,
    }
    given.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(json.dumps(result["rates"], indent=1))


if __name__ == "__main__":
    main()
