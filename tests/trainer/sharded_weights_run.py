"""One rank of a two-process run whose weights rank 0 draws or reads and FSDP2 sends; see test_weights_ranks.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support import tiny_hybrid, tiny_tokenizer, tokenized
from two_process_run import LENGTHS, shard_on_cpu


def settings(path, accumulation):
    from hf_speedkit import SpeedSFTConfig

    return SpeedSFTConfig(
        output_dir=str(Path(path, f"run{accumulation}")),
        use_cpu=True, bf16=False, tokens_per_batch=32, disable_tqdm=True, report_to="none",
        activation_checkpointing=False, save_strategy="no", logging_steps=1, max_steps=3, learning_rate=1e-3,
        gradient_accumulation_steps=accumulation, fused_layers=False, seed=3,
    )  # fmt: skip


def trained(path, *, accumulation, sharded, receives):
    """Losses of three steps from random weights, and the weights before them by name."""
    from accelerate.state import AcceleratorState
    from trl import ModelConfig

    from hf_speedkit import SpeedSFTTrainer
    from hf_speedkit.trainer.weights import load_model

    class Trainer(SpeedSFTTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            if sharded:
                shard_on_cpu(self)
                AcceleratorState().fsdp_plugin.cpu_ram_efficient_loading = True

        def _prepare_for_training(self, *given):
            prepared = super()._prepare_for_training(*given)
            self.before = {
                name: (p.full_tensor() if sharded else p).detach().float().flatten().tolist()
                for name, p in self.model.named_parameters()
            }
            self.buffers = {name: b.flatten().tolist() for name, b in self.model.named_buffers()}
            return prepared

    args = settings(path, accumulation)
    model = load_model(
        ModelConfig(model_name_or_path=str(Path(path, "model", "config.json"))), args,
        random_weights=True, receives=receives,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=tokenized(LENGTHS), processing_class=tiny_tokenizer())
    trainer.train()
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "before": trainer.before,
        "buffers": trainer.buffers,
        "optimizer_holds_all": held == {id(p) for p in trainer.model.parameters()},
    }


def write_model(path):
    tiny_hybrid().save_pretrained(Path(path, "model"))


def rank_main(rank, port, path):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    try:
        said = trained(path, accumulation=1, sharded=True, receives=rank > 0)
        said["read"] = read(path, rank)
        said["refused"] = refusals(path, rank)
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    Path(path, f"rank{rank}.json").write_text(json.dumps(said))
    os._exit(0)


def read(path, rank):
    """What each rank holds after a checkpoint was read for sending: values on rank 0, a shell on rank 1."""
    import torch
    from trl import ModelConfig

    from hf_speedkit.trainer.weights import load_model

    model = load_model(ModelConfig(model_name_or_path=str(Path(path, "model"))), settings(path, 1), receives=rank > 0)
    return {
        "vectors_nan": all(bool(p.isnan().all()) for p in model.parameters() if p.dim() < 2),
        "any_nan": any(bool(torch.isnan(p).any()) for p in model.parameters()),
    }


def refusals(path, rank):
    """Errors of ranks that cannot agree: another dtype on rank 1, then a folder that only rank 1 lacks."""
    from trl import ModelConfig

    from hf_speedkit.trainer.weights import load_model

    folder = str(Path(path, "model"))
    said = []
    for model_args in (
        ModelConfig(model_name_or_path=folder, dtype="float32" if rank == 0 else "bfloat16"),
        ModelConfig(model_name_or_path=folder if rank == 0 else str(Path(path, "absent"))),
    ):
        try:
            load_model(model_args, settings(path, 1), receives=rank > 0)
        except Exception as error:
            said.append(str(error))
    return said
