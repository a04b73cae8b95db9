"""Buffers that a checkpoint holds, sent to the ranks that wait for rank 0's weights.

With `cpu_ram_efficient_loading` accelerate (1.15, utils/fsdp_utils.py:628) sends every entry of the state dict as a
sharded parameter. A persistent buffer is none (the bias by which GLM-4, DeepSeek-V3 and Nemotron-H choose experts), and
preparing the model ends in "'Tensor' object has no attribute 'device_mesh'". Buffers outside the state dict accelerate
puts back by itself, from each rank's own copy; so for that time they all are, with rank 0's values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_speedkit.trainer.ranks.agreement import runs_alone


@contextmanager
def sent_buffers(model: torch.nn.Module, *, device: torch.device) -> Iterator[None]:
    """Send rank 0's persistent buffers to all ranks, and keep them out of the state dict while the context lasts.

    Args:
        model: before it is sharded; every rank must come with the same buffers.
        device: where the ranks can exchange tensors.

    Cost: one broadcast a buffer, before training.
    """
    import torch.distributed as dist

    owned = [(module, name) for module in model.modules() for name in _persistent(module)]
    for module, name in owned:
        held: Any = module._buffers[name]
        value = torch.empty_like(held, device=device) if held.device.type == "meta" else held.detach().to(device)
        if not runs_alone():
            dist.broadcast(value, src=0)
        module._buffers[name] = value.to("cpu" if held.device.type == "meta" else held.device)
        module._non_persistent_buffers_set.add(name)
    try:
        yield
    finally:
        for module, name in owned:
            module._non_persistent_buffers_set.discard(name)


def _persistent(module: torch.nn.Module) -> list[str]:
    return [
        name
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
