"""The most memory in each part of one training step, read from the allocator's host counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_speedkit.core.memory import StepPeaks
from hf_speedkit.measure.device_memory import DeviceMemory

_FORWARD = -1


class PeakWatch:
    """Notes, from now until `finish`, the most bytes before the backward passes of the layers and in each of them.

    Args:
        layers: the decoder layers, first layer first.
        memory: counters of the device; their peak is counted anew at every part.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], memory: DeviceMemory) -> None:
        self._memory = memory
        self._part = _FORWARD
        self._most = {_FORWARD: 0, **dict.fromkeys(range(len(layers)), 0)}
        self._reserved = 0
        memory.reset_peak()
        self._handles = [layers[0].register_forward_pre_hook(self._micro_batch)]
        for number, layer in enumerate(layers):
            self._handles.append(layer.register_forward_hook(self._announce(number)))

    def finish(self) -> tuple[StepPeaks, int]:
        """The peaks, and the bytes that the allocator held unused where it held most; takes the hooks away."""
        self._enter(_FORWARD)
        for handle in self._handles:
            handle.remove()
        backward = [self._most[number] for number in range(len(self._most) - 1)]
        return StepPeaks(self._most[_FORWARD], backward), max(0, self._reserved - max(self._most.values()))

    def _micro_batch(self, *_: Any) -> None:
        # Recomputation runs this too, inside a backward pass; that is how torch.utils.checkpoint tells it.
        if torch._C._current_graph_task_id() == -1:
            self._enter(_FORWARD)

    def _announce(self, number: int) -> Any:
        """A forward hook: the gradient of the layer's output arrives right before its backward pass."""

        def watch(_: Any, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad and torch._C._current_graph_task_id() == -1:
                hidden.register_hook(lambda _: self._enter(number))

        return watch

    def _enter(self, part: int) -> None:
        self._most[self._part] = max(self._most[self._part], self._memory.peak_allocated())
        self._reserved = max(self._reserved, self._memory.peak_reserved())
        self._memory.reset_peak()
        self._part = part
