"""FSDP2's gradients in the memory that activations lie in, where a step has one backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class ReduceScatterInOneMemory:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter` whose results are allocated on the training stream.

    torch allocates them on the stream of the reduce-scatter, and its allocator keeps the free memory of each stream
    apart: between two steps the room of all gradients lies idle, where activations could be. On two H200 that is
    25 GiB a GPU of a 27B, what 14 of its layers keep.

    Nothing is written before the memory is free: the stream of the reduce-scatter waits for the training stream first.
    Nothing is reused before the writing is done: results are held here until `release`, which belongs behind the
    optimizer step, and that has waited for them on the training stream. So it is for steps of one backward pass only;
    in others results add up to one another, and would be held many times over.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._held: list[torch.Tensor] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for the input, or for the result, of one reduce-scatter."""
        if self._stream is None or (current := torch.cuda.current_stream(device)) == self._stream:
            return torch.empty(*size, dtype=dtype, device=device)
        current.wait_stream(self._stream)
        with torch.cuda.stream(self._stream):
            result = torch.empty(*size, dtype=dtype, device=device)
        self._held.append(result)
        return result

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce and scatter, as torch does."""
        reduce = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )  # its name before torch 2.13
        return reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    def release(self, *_: Any) -> None:
        """Let go of the results of the step that is over. Also a forward pre-hook of the whole model."""
        self._held.clear()

    def close(self) -> None:
        """Allocate as torch does from now on."""
        self._stream = None
        self.release()
