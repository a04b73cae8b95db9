"""Collectives without copies against torch's own, on the real groups and backend, before they are trained with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_speedkit.trainer.sharded.zero_copy import reduce_shards

# Of a mean of bf16 numbers: NCCL multiplies each by 1 / ranks before the sum, which is exact for powers of two only.
_MEAN_TOLERANCE = 2.0**-5


def difference(groups: Iterable[Any]) -> str | None:
    """What collectives without copies do otherwise than torch's own, on any rank; None where there is nothing.

    One group of each layout is gathered, and each parameter compared bit by bit with `DTensor.full_tensor()`, which
    goes another way. Gradients of known numbers in the same layout are reduced. All ranks must call it, inside
    `zero_copy`, and get the same answer.

    Args:
        groups: FSDP2 units, none inside another.
    """
    seen: set[tuple[Any, ...]] = set()
    for group in groups:
        parameters = dict(group.named_parameters())
        layout = tuple((name, p.shape, p.dtype) for name, p in parameters.items())
        meshes = {p.device_mesh for p in parameters.values() if hasattr(p, "device_mesh")}
        if layout in seen or len(meshes) != 1 or (mesh := meshes.pop()).ndim != 1:
            continue  # on a mesh of two dimensions torch's own copies run
        seen.add(layout)
        process_group = mesh.get_group()
        # Both on every rank, whatever the first of them finds here: they are collectives.
        wrong = [_gathered_otherwise(group, parameters), _reduced_otherwise(parameters.values(), process_group)]
        found = torch.tensor([float(any(wrong))], device=next(iter(parameters.values())).device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=process_group)
        if found.item():
            return wrong[0] or wrong[1] or "another rank found a difference"
    return None


def _gathered_otherwise(group: Any, parameters: dict[str, Any]) -> str | None:
    wholes = {name: parameter.detach().full_tensor() for name, parameter in parameters.items()}
    group.unshard()
    try:
        for name, gathered in group.named_parameters():
            if isinstance(gathered, DTensor):
                continue  # of a unit inside this one
            # Mixed precision computes with a rounded copy: so is what it is compared with.
            if not torch.equal(gathered.detach(), wholes[name].to(gathered.dtype)):
                return f"{name} was gathered otherwise than torch gathers it"
    finally:
        group.reshard()
    return None


def _reduced_otherwise(parameters: Iterable[Any], process_group: Any) -> str | None:
    ranks, rank = process_group.size(), process_group.rank()
    whole = [p for p in parameters if p.requires_grad and p.shape[0] % ranks == 0]
    if not whole:
        return None
    device = whole[0].device
    ramps = [(torch.arange(p.numel(), device=device) % 7).view(p.shape) for p in whole]
    given = [(ramp + rank).to(p.dtype) for ramp, p in zip(ramps, whole, strict=True)]
    shards = [torch.empty_like(one.chunk(ranks)[rank]) for one in given]
    reduce_shards(shards, given, process_group, dist.ReduceOp.AVG)
    for shard, ramp in zip(shards, ramps, strict=True):
        mean = ramp.chunk(ranks)[rank].float() + (ranks - 1) / 2
        if not torch.allclose(shard.float(), mean, rtol=_MEAN_TOLERANCE, atol=_MEAN_TOLERANCE):
            return f"gradients of shape {list(ramp.shape)} were averaged wrongly"
    return None
