"""One rank of test_zero_copy.py: small FSDP2 trainings with torch's copies and without, over gloo."""

from __future__ import annotations

import functools
import json
import os
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torchs_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torchs_groups
from torch.distributed.tensor import Shard

from hf_speedkit.trainer.sharded import zero_copy, zero_copy_proof
from hf_speedkit.trainer.sharded.communication import corrected_gathers

STEPS = 3


class Block(nn.Module):
    fails_with = None

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        if self.fails_with is not None:
            raise self.fails_with
        return x + self.second(torch.relu(self.first(x * self.scale)))


class Body(nn.Module):
    """Only the layers in `runs` run; None: all."""

    runs = None

    def __init__(self, width):
        super().__init__()
        self.embed, self.layers = nn.Embedding(12, width), nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids, seen=0.0):
        x = self.embed(ids) + seen
        for number, layer in enumerate(self.layers):
            if self.runs is None or number in self.runs:
                x = layer(x)
        return self.norm(x)


class Tower(nn.Module):
    """What corrected_gathers asks of a model, and nothing else of transformers."""

    def __init__(self, width=8, frozen=False, unused=False, vision=0):
        super().__init__()
        self.visual = nn.ModuleList(Block(width) for _ in range(vision))
        self.base_model, self.head = Body(width), nn.Linear(width, 12, bias=False)
        self.layers = list(self.base_model.layers)  # no modules of its own
        if frozen:
            self.layers[1].requires_grad_(False)
        if unused:
            self.layers[2].extra = nn.Parameter(torch.ones(4, 2))

    def get_input_embeddings(self):
        return self.base_model.embed

    def get_output_embeddings(self):
        return None

    def forward(self, ids):
        weight = self.head.weight
        seen = torch.linspace(0, 1, self.head.in_features, dtype=weight.dtype, device=weight.device)
        for block in self.visual:
            seen = block(seen)
        return self.head(self.base_model(ids, seen if len(self.visual) else 0.0))


VARIANTS = {
    "as it is": {},
    "uneven": {"model": {"width": 9}},
    "frozen": {"model": {"frozen": True}},
    "unused": {"model": {"unused": True}},
    "accumulated": {"passes": 3},
    "accumulated, reduced once": {"passes": 3, "sync": False},
    "ahead": {"ahead": 2},
    "kept after forward": {"shard": {"reshard_after_forward": False}},
    "bf16": {"dtype": torch.bfloat16},
    "mixed precision": {"policy": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}},
    "mixed precision, bf16 sums": {"policy": {"param_dtype": torch.bfloat16}},
    "fp16": {"dtype": torch.float16},
    "second dimension": {"shard": {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}},
    "on the host": {"shard": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
    "hooked": {"hooked": True},
    "divided": {"divided": 3.0},
    "hybrid": {"mesh": (1, 2)},
    "hybrid of single ranks": {"mesh": (2, 1)},
    "vision": {"model": {"vision": 4}},
    "evaluated": {"evaluated": True},
}


COUNTED = {
    "gathers": (zero_copy, "gather_shards"),
    "reductions": (zero_copy, "reduce_shards"),
    "copies out": (torchs_groups, "foreach_all_gather_copy_out"),
    "copies in": (torchs_collectives, "foreach_reduce_scatter_copy_in"),
}


def count(stack, module, function, counts, name):
    real = getattr(module, function)

    @functools.wraps(real)
    def counted(*args, **kwargs):
        counts[name] += 1
        return real(*args, **kwargs)

    setattr(module, function, counted)
    stack.callback(setattr, module, function, real)


def sharded(*, model=None, shard=None, dtype=None, policy=None, mesh=None, device="cpu"):
    torch.manual_seed(0)
    tower = Tower(**(model or {})).to(dtype or torch.float32).to(device)
    body = tower.base_model
    units = [*tower.visual, body.embed, *body.layers, [body.norm, tower.head], tower]
    given = {"mp_policy": MixedPrecisionPolicy(**(policy or {})), **(shard or {})}
    names = ("replicate", "shard") if mesh else ("shard",)
    given["mesh"] = init_device_mesh(device, mesh or (2,), mesh_dim_names=names)
    for unit in units:
        fully_shard(unit, **given)
    return tower


def run(without_copies, *, passes=1, sync=True, ahead=None, hooked=False, divided=None, evaluated=False, **how):
    """Weights after some steps, and how often gathers and reductions went without copies."""
    tower = sharded(**how)
    if divided is not None:
        for unit in (tower.get_input_embeddings(), *tower.layers):
            unit.set_gradient_divide_factor(divided)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies before
    seen = []
    for parameter in tower.parameters() if hooked else ():
        parameter.register_post_accumulate_grad_hook(seen.append)
    counts = dict.fromkeys(COUNTED, 0)
    losses = []
    with ExitStack() as stack:
        for name, (module, function) in COUNTED.items():
            count(stack, module, function, counts, name)
        lines = stack.enter_context(
            corrected_gathers(tower, prefetch_layers=ahead, backward_passes=passes, without_copies=without_copies)
        )
        counts.update(dict.fromkeys(COUNTED, 0))  # what the proof did
        optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
        for step in range(STEPS):
            for turn in range(passes):
                tower.set_requires_gradient_sync(sync or turn + 1 == passes)
                torch.manual_seed(100 * step + 10 * turn + dist.get_rank())
                ids = torch.randint(12, (2, 5))
                loss = tower(ids).float().log_softmax(-1).square().mean()
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            if evaluated:
                with torch.inference_mode() if step else torch.no_grad():
                    losses.append(float(tower(ids).float().mean()))
    whole = "mesh" not in how and "shard" not in how
    weights = [(p.full_tensor() if whole else p._local_tensor).float().flatten() for p in tower.parameters()]
    return {
        "weights": torch.cat(weights).tolist(), "losses": losses, "hooks": len(seen), "lines": lines, **counts,
    }  # fmt: skip


def broken():
    """A backend that gathers or sums wrongly is found out, as is a torch with other private parts, and copies stay."""
    real = zero_copy.gather_shards

    def wrong(wholes, shards, group):
        real(wholes, shards, group)
        if dist.get_rank() == 1:
            wholes[-1][-1] += 1

    zero_copy.gather_shards = wrong
    try:
        found, hybrid = run(True), run(True, mesh=(1, 2))
    finally:
        zero_copy.gather_shards = real
    real_sum, zero_copy_proof.reduce_shards = zero_copy_proof.reduce_shards, lambda shards, *_: None
    try:
        sums = run(True)
    finally:
        zero_copy_proof.reduce_shards = real_sum
    real_shard = zero_copy._plain_shard
    zero_copy._plain_shard = lambda param: param.renamed_in_torch
    try:
        return found, hybrid, sums, run(True)
    finally:
        zero_copy._plain_shard = real_shard


def rank_main(rank, port, folder):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    said = {}
    for name, variant in VARIANTS.items():
        try:
            said[name] = {"copied": run(False, **variant), "direct": run(True, **variant)}
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    said.update(
        zip(("broken gathers", "broken gathers, hybrid", "broken sums", "another torch"), broken(), strict=True)
    )
    from unused_gathers_run import after_training, chains, in_training  # it imports this module

    said["not run"] = {"copied": in_training(False), "direct": in_training(True)}
    said["after"], said["chains"] = after_training(), chains()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)  # torch's teardown can deadlock, see two_process_run.py
