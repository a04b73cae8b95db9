"""Collectives without copies against torch's own, on the real groups and backend, before they are trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_speedkit.trainer.sharded.zero_copy import gathers_directly, reduce_shards, reduces_directly

# Of a mean of bf16 numbers: NCCL multiplies each by 1 / ranks before the sum, which is exact for powers of two only.
_MEAN_TOLERANCE = 2.0**-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """What runs without copies, as it was seen.

    Args:
        groups, trained: how many parameter groups there are, and how many with trained parameters.
        gathered, reduced: how many of them are gathered, and how many reduced, without copies.
        on_host: shards lie in host memory.
        wrong: what was done otherwise than torch does it, on any rank; None where there is nothing.
    """

    groups: int
    trained: int
    gathered: int
    reduced: int
    on_host: bool
    wrong: str | None

    @property
    def line(self) -> str:
        """What runs without copies, in words."""
        if self.gathered == self.groups and self.reduced == self.trained:
            return "weights are gathered into the parameters and gradients reduced from where they are, without copies"
        return (
            f"without copies, weights of {self.gathered} of {self.groups} groups are gathered into the parameters and "
            f"gradients of {self.reduced} of {self.trained} reduced from where they are; torch copies the others"
        )

    @property
    def why_none(self) -> str:
        """Why nothing does, in words."""
        if self.on_host:
            return "the shards lie in host memory"
        return f"none of the {self.groups} groups is sharded in a way that can do without"


def proven(groups: Sequence[Any]) -> Proven:
    """Prove what runs without copies, and nothing else.

    One group of each layout is gathered, and each parameter compared bit by bit with `DTensor.full_tensor()`, which
    goes another way. Gradients of known numbers in the same layout are reduced. All ranks must call it, inside
    `zero_copy`, and get the same answer. Whole parameters are held one group at a time, and one parameter twice.

    Args:
        groups: FSDP2's parameter groups, all of them.
    """
    seen: set[tuple[Any, ...]] = set()
    gathered = reduced = trained = 0
    wrong: str | None = None
    for group in groups:
        group.lazy_init()  # with it dtypes are known, as before a first forward pass
        gathers, reduces = gathers_directly(group), reduces_directly(group)
        gathered, reduced = gathered + gathers, reduced + reduces
        trained += any(param.sharded_param.requires_grad for param in group.fsdp_params)
        layout = (gathers, reduces, *map(_layout, group.fsdp_params))
        if wrong is not None or layout in seen or not (gathers or reduces):
            continue
        seen.add(layout)
        # Both on every rank, whatever the first of them finds here: they are collectives.
        said = [_gathered_otherwise(group) if gathers else None, _reduced_otherwise(group) if reduces else None]
        found = torch.tensor([float(any(said))], device=group.device)
        mesh = group.fsdp_params[0].sharded_param.device_mesh
        for dimension in range(mesh.ndim):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.get_group(dimension))
        if found.item():
            wrong = said[0] or said[1] or "another rank found a difference"
    return Proven(
        groups=len(groups), trained=trained, gathered=gathered, reduced=reduced, wrong=wrong,
        on_host=any(param.offload_to_cpu for group in groups for param in group.fsdp_params),
    )  # fmt: skip


def _layout(param: Any) -> tuple[Any, ...]:
    held = param.sharded_param
    return held.shape, held.dtype, param.param_dtype, held.requires_grad, held.device_mesh


def _gathered_otherwise(group: Any) -> str | None:
    wrong = None
    group.unshard()
    group.wait_for_unshard()
    try:
        for param in group.fsdp_params:  # all of them, whatever is found: it is a collective
            gathered, whole = param.unsharded_param.detach(), param.sharded_param.detach().full_tensor()
            # Mixed precision computes with a rounded copy: so is what it is compared with.
            if wrong is None and not torch.equal(gathered, whole.to(gathered.dtype)):
                wrong = f"weights of shape {list(whole.shape)} were gathered otherwise than torch gathers them"
    finally:
        group.reshard()
    return wrong


def _reduced_otherwise(group: Any) -> str | None:
    process_group = group._reduce_scatter_process_group
    ranks, rank = process_group.size(), process_group.rank()
    trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    given = [_ramp(0, p._orig_size, p.param_dtype or p.orig_dtype, group.device).add_(rank) for p in trained]
    shards = [torch.empty_like(one.chunk(ranks)[rank]) for one in given]
    reduce_shards(shards, given, process_group, dist.ReduceOp.AVG)
    sizes = [list(one.shape) for one in given]
    given.clear()
    for shard, size in zip(shards, sizes, strict=True):
        mean = _ramp(rank * shard.numel(), shard.shape, shard.dtype, group.device).add_((ranks - 1) / 2)
        largest = float(mean.max())
        if float(shard.sub_(mean).abs_().max()) > _MEAN_TOLERANCE * (1 + largest):
            return f"gradients of shape {size} were averaged wrongly"
    return None


def _ramp(begin: int, size: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """0 to 6 again and again, from the place `begin` on; no more memory than its result, which may be a head's."""
    row = torch.arange(7, dtype=dtype, device=device).roll(-begin)
    return row.repeat(-(-size.numel() // 7))[: size.numel()].view(size)
