"""What every probe's row is made of: the keys of a packed batch, and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_SLOTS = 64
"""Chunk of fla 0.6.0's gated delta rule, for the chunk_indices that a packed batch brings."""


def batch_keys(borders: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Every key about documents that a packed batch brings and the layers hand on, named as there."""
    edges = torch.tensor(borders, dtype=torch.int32)
    lengths = edges.diff()
    number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    chunks = [(i, chunk) for i, length in enumerate(lengths.tolist()) for chunk in range(-(-length // CHUNK_SLOTS))]
    longest = min(borders[-1], max(128, 1 << (int(lengths.max()) - 1).bit_length()))
    on_device = edges.to(device)
    return {
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": number.to(torch.int32)[None].to(device),
        "chunk_indices": torch.tensor(chunks, dtype=torch.int32).to(device),
    }


class Draw:
    """Random leaves from a generator of their own: the job's random state stays as it is."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        # On the device itself: of a 27B at 8,192 slots 84 million numbers would have to be drawn on a CPU and copied.
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device
        self._dtype = dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers that want a gradient."""
        value = torch.randn(shape, generator=self._generator, device=self._device)
        return value.to(dtype or self._dtype).requires_grad_()

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype) -> Tensor:
        """Numbers between `low` and `high` that want a gradient."""
        value = low + (high - low) * torch.rand(shape, generator=self._generator, device=self._device)
        return value.to(dtype).requires_grad_()

    def decay(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Logarithms of decays, [..., heads]: slow in the first, third ... head, fast in the others."""
        value = -0.02 * torch.rand(shape, generator=self._generator, device=self._device)
        value[..., 1::2] = value[..., 1::2] * 200 - 0.5  # -4.5 to -0.5: e-fold and more at every position
        return value.to(dtype).requires_grad_()

    def incoming(self, examined: int, slots: int, *shape: int) -> Tensor:
        """A gradient [1, slots, ...] that is zero from position `examined` on."""
        value = torch.randn((1, slots, *shape), generator=self._generator, device=self._device).to(self._dtype)
        value[:, examined:] = 0
        return value
