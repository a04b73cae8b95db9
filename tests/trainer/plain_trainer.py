"""A plain transformers Trainer on a tiny Llama with padded batches: no TRL, none of our collators."""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.throughput_callback import ThroughputCallback

LENGTHS = (3, 11, 5, 8, 7, 2, 9, 4, 6, 10, 12, 1)
PROMPT = 2  # tokens of each document without a target


def tiny_llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def documents(lengths=LENGTHS):
    return [
        {
            "input_ids": [3 + (start + at) % 29 for at in range(length)],
            "labels": [-100 if at < PROMPT else 3 + (start + at) % 29 for at in range(length)],
        }
        for start, length in enumerate(lengths)
    ]


def pad(rows):
    width = max(len(row["input_ids"]) for row in rows)

    def filled(name, filler):
        return torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100), "attention_mask": mask}


def expected(lengths, batch_size):
    """(slots, real, target, documents, squared) counted by hand, for batches in order."""
    groups = [lengths[at : at + batch_size] for at in range(0, len(lengths), batch_size)]
    return (
        sum(len(group) * max(group) for group in groups),
        sum(lengths),
        sum(max(0, length - max(PROMPT, 1)) for length in lengths),
        len(lengths),
        sum(length * length for length in lengths),
    )


def arguments(directory, **more):
    settings = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "learning_rate": 1e-3,
    }
    return TrainingArguments(output_dir=str(directory), **{**settings, **more})


def make_trainer(
    directory, *, model=None, data=None, kind=Trainer, collator=pad, eval_data=None, callbacks=None, **more
):
    return kind(
        model=model or tiny_llama(),
        args=arguments(directory, **more),
        train_dataset=documents() if data is None else data,
        eval_dataset=eval_data,
        data_collator=collator,
        callbacks=callbacks,
    )


def training_rows(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def train(trainer, callback=None, **more):
    callback = callback or ThroughputCallback()
    attach(trainer, callback)
    trainer.train(**more)
    return callback


def as_tuple(counts):
    return counts.slots, counts.real, counts.target, counts.documents, counts.squared_lengths


class Slow(torch.utils.data.Dataset):
    """Documents that take their time."""

    def __init__(self, rows, seconds):
        self.rows = rows
        self.seconds = seconds

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.rows[index]


class SlowStream(torch.utils.data.IterableDataset):
    """The same as a stream: what is skipped on resume is read all the same."""

    def __init__(self, rows, seconds):
        self.rows = rows
        self.seconds = seconds

    def __iter__(self):
        for row in self.rows:
            time.sleep(self.seconds)
            yield row
