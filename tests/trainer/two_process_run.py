"""One rank of a two-process CPU run; started by test_two_process.py through torch.multiprocessing."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support import tiny_hybrid, tiny_tokenizer, tokenized

LENGTHS = [9, 4, 17, 2, 30, 8, 8, 21, 5, 13, 3, 28, 11, 6, 19, 2]


def build(path, *, accumulation, sharded=False, leaky_rank=None, model=None, data=None, plugin=(), **changes):
    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

    class Trainer(SpeedSFTTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            if sharded:
                shard_on_cpu(self, **dict(plugin))

    model = tiny_hybrid() if model is None else model
    if leaky_rank is not None and int(os.environ.get("RANK", "0")) == leaky_rank:
        forget_boundaries(model)
    values = {
        "output_dir": str(path), "use_cpu": True, "bf16": False, "tokens_per_batch": 32, "disable_tqdm": True,
        "activation_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "num_train_epochs": 2,
        "learning_rate": 1e-3, "report_to": "none", "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    return Trainer(
        model=model,
        args=SpeedSFTConfig(**{**values, **changes}),
        train_dataset=tokenized(LENGTHS) if data is None else data,
        eval_dataset=tokenized([2, 2, 2, 30, 4, 25, 3], seed=7),
        processing_class=tiny_tokenizer(),
    )


def shard_on_cpu(trainer, state_dict_type="FULL_STATE_DICT", **changes):
    """FSDP2 over gloo: accelerate 1.15 has no switch for it (state.py:986), so its private state is set."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    values = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Qwen3_5DecoderLayer"],
        "cpu_ram_efficient_loading": False,
        "state_dict_type": state_dict_type,
    }
    plugin = FullyShardedDataParallelPlugin(**{**values, **changes})
    if trainer.accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(trainer.accelerator.mixed_precision)  # as state.py does for GPUs
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    trainer.is_fsdp_enabled = True


def forget_boundaries(model):
    original = model.model.forward

    def dropping(*args, cu_seq_lens_q=None, cu_seq_lens_k=None, seq_idx=None, **kwargs):
        return original(*args, **kwargs)

    model.model.forward = dropping


def padded_loss(trainer, dataset):
    """Rows of unequal width, three a batch: 7 documents leave the last round of two ranks' batches to be filled up."""
    trainer.args.eval_packing, trainer.args.per_device_eval_batch_size = False, 3
    return trainer.evaluate(dataset)["eval_loss"]


def rank_main(rank, port, path, options):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    said = {}
    if options.pop("sent", False):  # rank 1 starts with an empty shell and gets its weights from rank 0
        from hf_speedkit.trainer.weights import empty_model

        options["plugin"] = {"cpu_ram_efficient_loading": True}
        options["model"] = empty_model(tiny_hybrid().config, dtype=torch.float32) if rank else tiny_hybrid()
        # What a checkpoint holds beside parameters (the bias by which GLM-4 chooses experts).
        bias = torch.full((3,), float("nan")) if rank else torch.arange(3.0)
        options["model"].model.layers[0].register_buffer("bias", bias)
    try:
        trainer = build(path, accumulation=1, **options)
        trainer.train()
        said = {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "totals": {k: v for k, v in trainer.state.log_history[-2].items() if k.startswith("speed/total")},
            "num_tokens": [e["num_tokens"] for e in trainer.state.log_history if "loss" in e][-1],
            "isolation": trainer.startup.isolation.passed,
            "operations": trainer.startup.isolation.operations,
            "gradient_leak": trainer.startup.isolation.gradient_leak,
            "sharded": any(hasattr(p, "device_mesh") for p in trainer.model.parameters()),
            "eval_loss": trainer.evaluate()["eval_loss"],
            "padded eval_loss": padded_loss(trainer, trainer.eval_dataset),
            "stream's eval_loss": padded_loss(trainer, trainer.eval_dataset.select(range(6)).to_iterable_dataset()),
            "buffers": {
                name: [buffer.tolist(), name in trainer.model.state_dict()]
                for name, buffer in trainer.model.named_buffers()
                if name.endswith(".bias")
            },
        }
    except Exception as error:
        said = {"error": type(error).__name__, "message": str(error)}
    Path(path, f"rank{rank}.json").write_text(json.dumps(said))
    # Torch's teardown can deadlock here: the reducer's destructor joins a gloo thread that waits for the GIL.
    os._exit(0)
