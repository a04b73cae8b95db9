"""One small all-gather per logging step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_speedkit.trainer.ranks.agreement import runs_alone


def gather_over_ranks(vector: Sequence[float], device: torch.device) -> list[list[float]]:
    """Give every rank every rank's vector, in rank order. All ranks must call it, with the same length.

    Args:
        vector: this rank's numbers; float64 on the way, so integers up to 2**53 arrive exactly.
        device: where this rank trains; used where the process group has no CPU backend.

    Returns:
        One list per rank; just this one where there is no process group.
    """
    if runs_alone():
        return [list(vector)]
    # A CPU backend spares the device a launch and the host a wait; NCCL alone takes device tensors only.
    on = torch.device("cpu") if "cpu" in dist.get_backend_config() else device
    mine = torch.tensor(vector, dtype=torch.float64, device=on)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    # The one host read of a logging step that is ours; the Trainer has read its loss just before.
    rows: list[list[float]] = torch.stack(everyone).tolist()
    return rows
