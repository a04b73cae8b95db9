"""One rank of the two-process runs of test_stream_ranks.py: several short trainings one after another."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support import tiny_hybrid, tiny_tokenizer, tokenized

# Two shards, one of them nearly empty: the ranks run dry at different steps.
LONG, SHORT = [9, 4, 17, 2, 30, 8, 8, 21, 5, 13, 28], [6, 11]
EVAL = [
    30,
    30,
    30,
    30,
    30,
    30,
    30,
    30,
    30,
    30,
    30,
    17,
    15,
    14,
]  # every other document: 7 rows on one rank, 6 on the other
STEP = [3, 11, 5, 8]


def unequal_stream():
    from datasets import IterableDataset

    return IterableDataset.from_generator(
        lambda lengths: (row for part in lengths for row in tokenized(part).to_list()),
        gen_kwargs={"lengths": [LONG, SHORT]},
    )


def make(path, dataset, **changes):
    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

    eval_dataset, callbacks = changes.pop("eval_dataset", None), changes.pop("callbacks", None)
    values = {
        "output_dir": str(path), "use_cpu": True, "bf16": False, "tokens_per_batch": 32, "disable_tqdm": True,
        "activation_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3,
        "report_to": "none", "allow_existing_output": True,
    }  # fmt: skip
    return SpeedSFTTrainer(
        model=tiny_hybrid(),
        args=SpeedSFTConfig(**{**values, **changes}),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=tiny_tokenizer(),
        callbacks=callbacks,
    )


def scenarios(path):
    from datasets import Dataset
    from test_gradients import GradientRecorder
    from test_sft import Recorder

    from hf_speedkit.core.errors import SpeedkitError

    def rows_of(steps, resume=None, **changes):
        recorder = Recorder()
        trainer = make(path / "resume", unequal_stream(), max_steps=steps, callbacks=[recorder], **changes)
        trainer.train(resume_from_checkpoint=resume)
        return recorder.rows, trainer

    whole, trainer = rows_of(12, save_strategy="steps", save_steps=5, accelerator_config={"dispatch_batches": True})
    yield "rows", whole
    yield "steps", trainer.state.global_step
    yield "read", trainer.summary().documents.documents
    yield "losses", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    rest, _ = rows_of(12, resume=str(path / "resume" / "checkpoint-5"))
    yield "resumed", rest

    # Every other document has targets, so the second rank's share has none.
    masked = [{**row, "labels": [-100] * 8} if at % 2 else row for at, row in enumerate(tokenized([8] * 6).to_list())]
    try:
        make(path / "one-sided", Dataset.from_list(masked).to_iterable_dataset(), max_steps=1)
        yield "one_sided", ""
    except SpeedkitError as error:
        yield "one_sided", str(error)

    recorder = GradientRecorder()
    settings = {"max_steps": 1, "max_grad_norm": 0.0, "tokens_per_batch": 16, "callbacks": [recorder]}
    make(path / "step", tokenized(STEP).to_iterable_dataset(num_shards=2), **settings).train()
    yield "gradient", recorder.gradient.tolist()

    recorder = GradientRecorder()
    settings = {"max_steps": 3, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2}
    make(path / "plan", tokenized(LONG + SHORT), callbacks=[recorder], **settings).train()
    straight = recorder.gradient
    resumed = make(path / "plan", tokenized(LONG + SHORT), callbacks=[recorder], **settings)
    resumed.train(resume_from_checkpoint=str(path / "plan" / "checkpoint-2"))
    yield "resumed_gradient_error", float((recorder.gradient - straight).norm() / straight.norm())

    seen = []
    trainer = make(path / "eval", tokenized(STEP), eval_dataset=tokenized(EVAL, seed=7), max_steps=1)
    original = trainer.count_tokens
    trainer.count_tokens = lambda mode, counts: (
        seen.append(counts) if mode == "eval" else None,
        original(mode, counts),
    )
    yield "eval_loss", trainer.evaluate()["eval_loss"]
    yield "eval_rows", len(seen)
    yield "eval_real", sum(counts.real for counts in seen)
    yield "eval_documents", sum(counts.documents for counts in seen)


def rank_main(rank, port, path):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    Path(path, f"rank{rank}.json").write_text(json.dumps(dict(scenarios(Path(path)))))
    # Torch's teardown can deadlock here: the reducer's destructor joins a gloo thread that waits for the GIL.
    os._exit(0)
