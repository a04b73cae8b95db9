"""One rank of the two-process FSDP2 runs of test_fsdp.py: several short, really sharded trainings one after another."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import torch
from support import tiny_hybrid, tokenized
from transformers import TrainerCallback
from two_process_run import build

from hf_speedkit.trainer.memory import offload
from hf_speedkit.trainer.sharded.prepared import shard_groups

STEPS, LOOKED_AT = 20, (1, 11, 20)


class Gradients(TrainerCallback):
    """Whole gradients before some optimizer steps, whether they are sharded or not."""

    def __init__(self, steps):
        self.steps, self.kept = steps, {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if state.global_step + 1 in self.steps:
            self.kept[state.global_step + 1] = {
                name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
                for name, p in model.named_parameters()
            }


def lone_head(model=None):
    """As in a vision-language model: accelerate finds no final norm by its name, and shards the head alone."""
    model = tiny_hybrid() if model is None else model
    model.model.norm.__class__ = type("FinalScale", (type(model.model.norm),), {})
    return model


class SlowRank(TrainerCallback):
    """Rank 1 dawdles in every step."""

    def on_step_begin(self, args, *_, **__):
        time.sleep(0.1 * args.process_index)


class Forwards(TrainerCallback):
    """How often the first layer's MLP runs in a step."""

    def __init__(self):
        self.count = 0

    def on_step_begin(self, args, state, control, model=None, **_):
        # Before, not after: a recomputation ends inside the last module, once it has what the backward pass needs.
        self.handle = model.model.layers[0].mlp.register_forward_pre_hook(self.add)

    def on_step_end(self, *_, **__):
        self.handle.remove()

    def add(self, *_):
        self.count += 1


class FlatResults(TrainerCallback):
    """Numbers in the flat all-gather result that torch holds when the head runs, and behind the model's forward."""

    def __init__(self):
        self.held = []

    def on_step_begin(self, args, state, control, model=None, **_):
        norm = model.model.norm
        self.handles = [part.register_forward_hook(lambda *_: self.look(model)) for part in (norm, model)]

    def on_step_end(self, *_, **__):
        for handle in self.handles:
            handle.remove()

    def look(self, model):
        state = model._get_fsdp_state()._comm_ctx.all_gather_state
        self.held.append(0 if state is None else state.all_gather_result.all_gather_output.numel())


def numbers(*modules):
    return sum(p.numel() for module in modules for p in module.parameters())


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained(path, steps=(), *, callbacks=(), **changes):
    """A finished training and the gradients of its `steps`."""
    gradients = Gradients(steps)
    trainer = build(path, **{"accumulation": 1, "isolation_check": False, **changes})
    for callback in (gradients, *callbacks):
        trainer.add_callback(callback)
    trainer.train()
    return trainer, gradients.kept


def refused(path, **changes):
    try:
        build(path, accumulation=1, **changes).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def gathers_of_the_embedding(path, **changes):
    """How often the embedding is gathered in two steps, and how often its forward pass begins."""
    trainer = build(path, accumulation=1, max_steps=2, isolation_check=False, **changes)
    trainer.startup.prove = lambda: None  # its forward passes are no step's
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.train()
    names = [event.name for event in profile.events()]
    return [names.count(f"FSDP::{what} (model.embed_tokens)") for what in ("all_gather", "pre_forward")]


def rules(trainer):
    return {finding.rule: finding.message for finding in trainer.startup.findings}


def half_masked():
    """Eight documents that fill a row each, every other one without a target."""
    data = tokenized([32] * 8, seed=3)
    return data.map(lambda row, i: {"labels": [-100] * 32 if i % 2 else row["labels"]}, with_indices=True)


def low_precision(path):
    """V38: bf16 weights under mixed precision, trained with plain SGD at a rate bf16 could not follow."""
    model = tiny_hybrid().bfloat16()
    before = model.model.norm.weight.detach().float().clone()
    trainer, _ = trained(
        path, model=model, sharded=True, bf16=True, max_steps=1, optim="sgd", learning_rate=1e-5,
        lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    after = trainer.model.model.norm.weight
    yield "upcast", rules(trainer)
    yield "upcast dtype", str(after.dtype)
    yield "upcast moves", bool((after.full_tensor() - before).abs().max() > 0)


def as_older_torch(monkey):
    """torch before 2.13: a group's hooks run on its first and last module only, and end with the backward pass."""
    import torch.distributed.fsdp._fully_shard._fsdp_state as states

    if not hasattr(states.FSDPState, "_force_complete_incomplete_states"):
        return  # it is one
    from torch.autograd.graph import _MultiHandle

    def register(modules, before, after, to_run, *_):
        def first(*args, **kwargs):
            if to_run:
                return None
            to_run.update(modules)
            return before(*args, **kwargs)

        def last_of(module):
            def last(*args, **kwargs):
                to_run.discard(module)
                return None if to_run else after(*args, **kwargs)

            return last

        first_handles = [m.register_forward_pre_hook(first, prepend=True, with_kwargs=True) for m in modules]
        return _MultiHandle((*first_handles, *(m.register_forward_hook(last_of(m)) for m in modules)))

    monkey.setattr(states, "_register_group_forward_hooks", register)
    monkey.delattr(states.FSDPState, "_force_complete_incomplete_states")
    former = states.FSDPState._post_forward

    def post_forward(self, module, given, output):
        self._force_complete_incomplete_states = lambda output: output
        try:
            return former(self, module, given, output)
        finally:
            del self._force_complete_incomplete_states

    monkey.setattr(states.FSDPState, "_post_forward", post_forward)


def evaluates_and_saves(path):
    """Losses of a run that evaluates and writes a checkpoint after every step."""
    often = {
        "lr_scheduler_type": "constant",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    trainer, _ = trained(path, max_steps=3, sharded=True, **often)
    return losses(trainer)


def with_activations_on_the_host(path, **changes):
    """Losses of three steps in which two of four layers' activations leave the device, and how many storages did."""
    counts = []

    class Counts(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            counts.append([len(one.held) for one in trainer.offloading._offload._passes.values()])

    smallest, offload.SMALLEST_BYTES = offload.SMALLEST_BYTES, 64
    try:
        values = {"accumulation": 1, "isolation_check": False, "max_steps": 3, "activation_offloading_layers": 2}
        trainer = build(path, **{**values, **changes})
        trainer.add_callback(Counts())
        trainer.train()
    finally:
        offload.SMALLEST_BYTES = smallest
    return [losses(trainer), counts]


def scenarios(path, rank):
    import pytest

    sharded = {"sharded": True}
    proven = {"sharded": True, "isolation_check": True}
    whole, kept = trained(path / "whole", LOOKED_AT, max_steps=STEPS, lr_scheduler_type="constant", **proven)
    if rank == 0:
        torch.save(kept, path / "whole.pt")
    yield "losses", losses(whole)
    yield "quiet", rules(whole)
    yield "groups", [group.name for group in shard_groups(whole.model)]

    flat = FlatResults()
    copied = {"fsdp_zero_copy": False, **proven}
    alone, kept = trained(path / "alone", (1,), model=lone_head(), max_steps=1, callbacks=[flat], **copied)
    if rank == 0:
        torch.save(kept, path / "alone.pt")
    yield "alone groups", [group.name for group in shard_groups(alone.model)]
    yield "alone flat", [flat.held, numbers(alone.model.model.layers[-1])]

    yield "embedding", gathers_of_the_embedding(path / "embedding", **sharded)
    ahead, _ = trained(path / "kept", accumulation=2, max_steps=2, fsdp_prefetch_layers=2, **sharded)
    yield "kept", rules(ahead)
    yield "kept losses", losses(ahead)
    flat = FlatResults()
    slow = {"callbacks": [SlowRank(), flat], "data": half_masked(), "max_steps": 6}
    dawdling, _ = trained(path / "masked", fsdp_zero_copy=False, **slow, **sharded)
    yield "masked", losses(dawdling)
    yield "flat", [flat.held, numbers(dawdling.model.model.norm, dawdling.model.lm_head)]
    forwards, flat = Forwards(), FlatResults()
    trained(path / "forwards", callbacks=[forwards, flat], activation_checkpointing=True, max_steps=1, **sharded)
    yield "forwards", forwards.count
    yield "direct flat", flat.held

    for name, changes in (
        ("host", {"activation_checkpointing": True}),
        ("host, wrapped", {"plugin": {"activation_checkpointing": True}}),
    ):
        yield name, with_activations_on_the_host(path / name, lr_scheduler_type="constant", **changes, **sharded)

    keeps = {"activation_checkpointing": True, "activation_checkpointing_keep": "products", **sharded}
    products, _ = trained(path / "products", max_steps=3, lr_scheduler_type="constant", **keeps)
    once = [losses(products), products.recompute.with_products]
    products.train()
    yield "products", [once, [losses(products), products.recompute.with_products]]

    yield from low_precision(path / "upcast")
    mixed = tiny_hybrid().bfloat16()
    mixed.model.layers[1].input_layernorm.float()
    yield "mixed", refused(path / "mixed", model=mixed, max_steps=1, **sharded)
    twice = {"activation_checkpointing": True, "plugin": {"activation_checkpointing": True}}
    yield "twice", refused(path / "twice", max_steps=1, **twice, **sharded)
    rows = [9, 4, 17, 2, 30, 8, 8, 21 + rank]
    yield "other rows", refused(path / "rows", data=tokenized(rows), max_steps=1, **sharded)
    one_unit = {"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None}
    yield "one unit", rules(trained(path / "unit", max_steps=1, plugin=one_unit, **sharded)[0])
    with pytest.MonkeyPatch.context() as monkey:
        as_older_torch(monkey)
        yield "older torch", evaluates_and_saves(path / "older")


def rank_main(rank, port, folder):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    from accelerate.state import AcceleratorState

    torch.set_num_threads(1)
    said, began = {}, time.monotonic()
    try:
        for name, value in scenarios(Path(folder), rank):
            said[name] = value
            AcceleratorState._reset_state()
    except Exception as error:
        logging.exception("scenario after %s", list(said)[-1:])
        said["error"] = f"{type(error).__name__}: {error}"
    said["seconds"] = time.monotonic() - began
    Path(folder, f"rank{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # torch's teardown can deadlock, see two_process_run.py
