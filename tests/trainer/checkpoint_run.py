"""Trainers and the two-process runs of test_checkpoint_ranks.py: really sharded over gloo (facts in shard_on_cpu)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from transformers import TrainerCallback

from hf_speedkit.core.errors import CheckpointError
from hf_speedkit.trainer.ranks.roll_call import leave

LENGTHS = [9, 4, 17, 2, 30, 8, 8, 21, 5, 13, 3, 28, 11, 6, 19, 2]
STEPS = 20


def build(
    path,
    *,
    model=None,
    dataset=None,
    eval_dataset=None,
    peft_config=None,
    sharded=False,
    callbacks=(),
    kind=None,
    **changes,
):
    from two_process_run import shard_on_cpu

    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

    layer = "LlamaDecoderLayer" if model is not None and model.config.model_type == "llama" else "Qwen3_5DecoderLayer"

    class Trainer(kind or SpeedSFTTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            if sharded:
                shard_on_cpu(self, "SHARDED_STATE_DICT", transformer_cls_names_to_wrap=[layer])

    values = {
        "output_dir": str(path), "use_cpu": True, "bf16": False, "tokens_per_batch": 32, "disable_tqdm": True,
        "activation_checkpointing": False, "save_strategy": "steps", "save_steps": 5, "logging_steps": 1,
        "learning_rate": 1e-3, "report_to": "none", "max_steps": STEPS, "isolation_check": False,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    return Trainer(
        model=tiny_hybrid() if model is None else model,
        args=SpeedSFTConfig(**{**values, **changes}),
        train_dataset=tokenized(LENGTHS) if dataset is None else dataset,
        eval_dataset=eval_dataset,
        processing_class=tiny_tokenizer(),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )


def losses(trainer):
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


class SignalAt(TrainerCallback):
    """Sends this process a signal inside a step, `step` of them being done."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def killed(rank, path):
    """Save at 10; the second rank is killed behind step 13, and the launcher ends the other."""
    callbacks = [SignalAt(13, signal.SIGKILL)] if rank == 1 else []
    build(path, sharded=True, save_steps=10, callbacks=callbacks).train()


def told_to_stop(rank, path):
    """One rank alone gets SIGTERM inside step 4; both stop, resume and export. Then one rank fails inside a save."""
    callbacks = [SignalAt(3, signal.SIGTERM)] if rank == 1 else []
    trainer = build(path, sharded=True, max_steps=8, callbacks=callbacks, model=tiny_hybrid(tie_word_embeddings=True))
    trainer.train()
    yield "stopped_by", trainer.stopped_by
    yield "stopped_at", trainer.state.global_step
    yield "losses", losses(trainer)

    resumed = build(path, sharded=True, max_steps=8, save_steps=7, model=tiny_hybrid(tie_word_embeddings=True, seed=1))
    resumed.train(resume_from_checkpoint=True)
    yield "resumed_at", resumed.startup.resumed_at
    yield "stopped_by_then", resumed.stopped_by
    yield "resumed_losses", losses(resumed)
    yield "num_tokens", [e["num_tokens"] for e in resumed.state.log_history if "loss" in e][-1]
    model = resumed.model
    yield "tied", model.lm_head.weight is model.model.embed_tokens.weight
    resumed.args.export_dtype = "bfloat16"
    resumed.save_model(str(path / "final"))
    if rank == 1:  # it goes by `if trainer.is_world_process_zero()`, and its script ends
        leave(resumed.startup._watch._store, 1)
    else:
        try:
            resumed.save_model(str(path / "alone"))
        except CheckpointError as error:
            yield "alone", str(error)

    # Nothing is exchanged in every step here: the ranks look at the flags where they log.
    callbacks = [SignalAt(2, signal.SIGUSR1)] if rank == 1 else []
    apart = {"average_tokens_across_devices": False, "logging_steps": 4, "save_steps": 50, "packing": False}
    apart |= {"tokens_per_batch": None, "per_device_train_batch_size": 2}
    trainer = build(path / "apart", sharded=True, callbacks=callbacks, **apart)
    trainer.train()
    yield "apart", [trainer.stopped_by, trainer.state.global_step]

    from hf_speedkit import SpeedSFTTrainer

    class FailingSave(SpeedSFTTrainer):
        def _save_rng_state(self, output_dir):
            if rank == 1:
                raise OSError("planted")
            super()._save_rng_state(output_dir)

    try:
        build(path / "failing", sharded=True, max_steps=2, save_steps=2, kind=FailingSave).train()
        yield "failed", ""
    except Exception as error:
        yield "failed", f"{type(error).__name__}: {error}"

    if importlib.util.find_spec("peft") is not None:
        yield from adapters(path / "adapters")


def adapted(path, **changes):
    import peft
    from support import tiny_llama

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return build(path, model=tiny_llama(), peft_config=config, max_steps=4, save_steps=2, learning_rate=1e-2, **changes)


def adapters(path):
    """A run of adapters, and the same one resumed at 2."""
    whole = adapted(path / "run", sharded=True)
    whole.train()
    yield "adapters", losses(whole)
    resumed = adapted(path / "run", sharded=True, allow_existing_output=True)
    resumed.train(resume_from_checkpoint=str(path / "run" / "checkpoint-2"))
    yield "adapters_resumed", losses(resumed)
    resumed.save_model(str(path / "run" / "final"))


def rank_main(rank, port, path, scenario):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    path = Path(path)
    said = globals()[scenario](rank, path)
    (path / f"rank{rank}.json").write_text(json.dumps(dict(said)))
    if scenario == "told_to_stop":
        killed(rank, path / "killed")
    # Torch's teardown can deadlock here: the reducer's destructor joins a gloo thread that waits for the GIL.
    os._exit(0)


def small(path, **changes):
    """A trainer of four steps that saves two checkpoints."""
    return build(path, **{"model": tiny_llama(), "max_steps": 4, "save_steps": 2, **changes})


def names(path):
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith(("checkpoint", "_")))
