"""The tiny job twice: packed rows, and the very same documents of every step as 2-D padded batches.

    python benchmarks/packed_against_padded.py [--out result.json] [--steps 60]

The losses must agree: packing changes how documents lie in memory, not what is learned. The padded twin runs through
transformers' own layers and TRL's own collator; only its sampler is ours, so that both see the same documents in the
same steps. On a CPU packing saves slots, not much time; no speed is claimed here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.records import to_dict
from hf_speedkit.measure.environment import collect_environment

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
import tiny_chat

SLOTS = 1024


class PaddedTwin(SpeedSFTTrainer):
    """Unpacked training on the documents that the packed run has in each step."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        self.args.tokens_per_batch = SLOTS
        self.args.packing_strategy = "auto"
        return self._packed_sampler(self.train_dataset, train=True)


def run(packed: bool, steps: int, directory: str) -> dict[str, Any]:
    """One run; its losses, slots, documents and CPU seconds."""
    tokenizer = tiny_chat.tiny_tokenizer()
    dataset, _ = tiny_chat.tiny_dataset(tokenizer, SLOTS)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_chat.tiny_config(), attn_implementation="sdpa")
    args = SpeedSFTConfig(
        output_dir=f"{directory}/{'packed' if packed else 'padded'}",
        packing=packed,
        tokens_per_batch=SLOTS if packed else None,
        max_length=SLOTS,
        max_steps=steps,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=6,
        activation_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = (SpeedSFTTrainer if packed else PaddedTwin)(
        model=model, args=args, train_dataset=dataset, processing_class=tokenizer
    )
    began_cpu, began = time.process_time(), time.perf_counter()
    trainer.train()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    tokens = trainer.throughput.run_totals().session
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "slots": tokens.slots,
        "real_tokens": tokens.real,
        "target_tokens": tokens.target,
        "documents": tokens.documents,
        "cpu_s": cpu_seconds,
        "wall_s": seconds,
    }


def main() -> None:
    """Run both, print the table, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runs = {name: run(name == "packed", given.steps, directory) for name in ("packed", "padded")}
    pairs = list(zip(runs["packed"]["losses"], runs["padded"]["losses"], strict=True))
    difference = max(abs(a - b) for a, b in pairs)
    table = Table(title=f"{given.steps} steps on the same documents")
    for column in ("", "packed", "padded"):
        table.add_column(column)
    for key in ("documents", "real_tokens", "target_tokens", "slots", "cpu_s", "wall_s"):
        values = [runs[name][key] for name in ("packed", "padded")]
        table.add_row(key, *(f"{value:,.0f}" for value in values))
    for start in range(0, given.steps, 10):
        means = [sum(runs[n]["losses"][start : start + 10]) / len(runs[n]["losses"][start : start + 10]) for n in runs]
        table.add_row(f"loss, steps {start + 1} to {min(start + 10, given.steps)}", *(f"{m:.4f}" for m in means))
    Console(width=90).print(table)
    print(f"largest difference of any step's loss: {difference:.2e}")
    if given.out is not None:
        result = {
            "what": "packed against padded, tiny job, same documents in every step",
            "steps": given.steps,
            "largest_loss_difference": difference,
            "runs": runs,
            "threads": torch.get_num_threads(),
            "environment": to_dict(collect_environment()),
        }
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
