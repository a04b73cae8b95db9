"""The most memory in each part of one training step, read from the allocator's host counters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_speedkit.core.memory import StepPeaks
from hf_speedkit.measure.device_memory import DeviceMemory
from hf_speedkit.trainer.memory.layer_marks import mark_layers

_FORWARD, _BEFORE = -1, -2


class PeakWatch:
    """Notes, from the next training forward pass until `finish`, the most bytes before the layers' backward passes and
    in each of them.

    What is there before that forward pass does not count: the gradients of the step before may still be.

    Args:
        layers: the decoder layers, first layer first.
        memory: counters of the device; their peak is counted anew at every part.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], memory: DeviceMemory) -> None:
        self._memory = memory
        self._part = _BEFORE
        self._most = {_BEFORE: 0, _FORWARD: 0, **dict.fromkeys(range(len(layers)), 0)}
        self._reserved = 0
        self._handles = mark_layers(layers, forward=self._micro_batch, backward=self._enter)

    def finish(self) -> tuple[StepPeaks, int]:
        """The peaks, and the bytes that the allocator held unused where it held most; takes the hooks away."""
        self._enter(_FORWARD)
        for handle in self._handles:
            handle.remove()
        del self._most[_BEFORE]
        backward = [self._most[number] for number in range(len(self._most) - 1)]
        return StepPeaks(self._most[_FORWARD], backward), max(0, self._reserved - max(self._most.values()))

    def _micro_batch(self, layer: int) -> None:
        if layer == 0:
            self._enter(_FORWARD)

    def _enter(self, part: int) -> None:
        self._most[self._part] = max(self._most[self._part], self._memory.peak_allocated())
        self._reserved = max(self._reserved, self._memory.peak_reserved())
        self._memory.reset_peak()
        self._part = part
