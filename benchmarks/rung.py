"""One rung of the ladder in a process of its own: a real Trainer run of the 27B geometry, its numbers as JSON.

    python benchmarks/rung.py speedkit --out result.json [--layers 8] [--steps 40] [--accumulation 1]
    torchrun --nproc_per_node 2 benchmarks/rung.py speedkit --out result.json --layers 64 --steps 12      # FSDP2

Rungs, all on the same documents of chat lengths (benchmarks/geometry.py), bf16 weights, AdamW, 8,192 slots a
micro-batch, activation checkpointing on every layer:

    stock-fallback   padded in two dimensions (rows x longest <= slots), without fla and causal-conv1d
    kernels          the same with both packages
    trl              TRL's SFTTrainer, packing="bfd", both packages, its defaults
    speedkit         SpeedSFTTrainer, its defaults

The figures are those that ThroughputCallback makes; what it calls warm-up is left out by its rule, not by hand. The
first rung hides the kernel packages, as if they were not installed.
"""

from __future__ import annotations

import argparse
import importlib.abc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNGS = ("stock-fallback", "kernels", "trl", "speedkit")
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "reshard_after_forward": True,
        "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"],
        "cpu_ram_efficient_loading": False,  # the weights are made on the device, the same on every rank
    },
}


class _NotInstalled(importlib.abc.MetaPathFinder):
    """Hides packages from import, for the rung of a machine that lacks them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("fla", "causal_conv1d"):
            raise ModuleNotFoundError(f"No module named {name!r} (hidden by benchmarks/rung.py)", name=name)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rung", choices=RUNGS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    parser.add_argument("--checkpointing", type=int, default=1)
    parser.add_argument("--logging-steps", type=int, default=5)
    parser.add_argument("--trace", type=int, help="optimizer step to trace")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="SpeedSFTConfig settings to change")
    parser.add_argument("--commit", help="commit of the tree, where git is not at hand")
    return parser.parse_args()


def padded_sampler(lengths: list[int], slots: int) -> Any:
    """Batches of 2-D padding in the data set's order: rows x longest <= slots."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    class PaddedBatches(BatchRebalanceSampler):
        def __init__(self) -> None:
            self.lengths, self.batches, batch, longest = lengths, [], [], 0
            for index, length in enumerate(lengths):
                if batch and (len(batch) + 1) * max(longest, length) > slots:
                    self.batches.append(batch)
                    batch, longest = [], 0
                batch, longest = [*batch, index], max(longest, length)
            self.batches.append(batch)

        def __len__(self) -> int:
            return len(self.batches)

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.batches)

        def set_epoch(self, epoch: int) -> None:
            """The order does not change."""

    return PaddedBatches()


def build(given: argparse.Namespace, directory: str) -> tuple[Any, Any]:
    """The rung's trainer and its ThroughputCallback."""
    import torch
    from geometry import chat_dataset, qwen27b_config, random_model, stub_tokenizer
    from trl import SFTConfig, SFTTrainer

    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer, ThroughputCallback, TraceCallback, attach
    from hf_speedkit.core.flops import model_flops

    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    config = qwen27b_config(given.layers)
    # The same seed on every rank: FSDP2 shards what is there, so each rank must hold the same weights.
    model = random_model(config, device="cuda", dtype=torch.bfloat16)
    slots = given.tokens_per_batch
    # Padded batches hold about 0.6 of the tokens, so that many documents are enough for every rung.
    documents = int(given.steps * given.accumulation * world * slots / 1258.9 * 1.1) + 10
    dataset = chat_dataset(documents, vocabulary=config.vocab_size, longest=slots)
    common: dict[str, Any] = {
        "output_dir": directory,
        "max_steps": given.steps,
        "gradient_accumulation_steps": given.accumulation,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "bf16": False,
        "activation_checkpointing": bool(given.checkpointing),
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": given.logging_steps,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        **(FSDP2 if world > 1 else {}),
    }
    shared = {"model": model, "train_dataset": dataset, "processing_class": stub_tokenizer()}
    if given.rung == "speedkit":
        changed = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in given.set)}
        traced = {"trace_steps": [given.trace]} if given.trace else {}
        args = SpeedSFTConfig(
            **{**common, "tokens_per_batch": slots, "accelerator_config": {"non_blocking": True}, **traced, **changed},
            dataloader_num_workers=2,
        )
        trainer = SpeedSFTTrainer(args=args, **shared)
        return trainer, trainer.throughput
    if given.rung == "trl":
        args = SFTConfig(
            **common, packing=True, packing_strategy="bfd", max_length=slots, per_device_train_batch_size=1
        )
        trainer = SFTTrainer(args=args, **shared)
    else:

        class Padded(SFTTrainer):
            def _get_train_sampler(self, train_dataset: Any = None) -> Any:
                return padded_sampler([len(row) for row in self.train_dataset["input_ids"][:]], slots)

        trainer = Padded(args=SFTConfig(**common, max_length=None), **shared)
    throughput = ThroughputCallback(flops=model_flops(config.to_dict(), head_on="target"))
    attach(trainer, throughput, *([TraceCallback(given.trace)] if given.trace else []))
    return trainer, throughput


def main() -> None:
    """Run, print the rates, write the result."""
    given = arguments()
    if given.rung == "stock-fallback":
        sys.meta_path.insert(0, _NotInstalled())
    import torch

    with tempfile.TemporaryDirectory() as directory:
        trainer, throughput = build(given, directory)
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
        if int(os.environ.get("RANK", "0")) != 0:
            return
        traces = sorted(Path(directory, "traces").glob("*.json.gz"))
        for path in traces:
            shutil.copy(path, given.out.with_name(f"{given.out.stem}_{path.name}"))
    from hf_speedkit.core.records import to_dict
    from hf_speedkit.measure.environment import collect_environment
    from hf_speedkit.trainer.summary import print_summary

    totals = throughput.run_totals()
    result = {
        "what": f"rung {given.rung} of the 27B geometry",
        "settings": {key: value for key, value in vars(given).items() if key != "out"},
        "parameters": trainer.model.num_parameters(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "commit": given.commit,
        "environment": to_dict(collect_environment()),
        "train_call_s": seconds,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "rates": dict(totals.rates),
        "tokens": to_dict(totals.session),
        "steady_steps": totals.steady_steps,
        "session_steps": totals.session_steps,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
    }
    if given.rung == "speedkit":
        summary = trainer.summary()
        print_summary(summary)
        result["startup_s"] = dict(summary.startup_s)
        result["kernels"] = [to_dict(check) for check in summary.kernels]
        result["isolation"] = to_dict(summary.isolation)
    given.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(given.rung, json.dumps({key: round(value, 4) for key, value in totals.rates.items()}))


if __name__ == "__main__":
    main()
