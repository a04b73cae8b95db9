"""Activation checkpointing of as few layers as memory asks for: measured in the first two steps, then fixed.

Checkpointing every layer recomputes each layer's forward pass, a quarter of all the work, whether memory is short or
not. Rows have one shape, so what a layer keeps is the same in every step: the first step's peak and the bytes one
layer keeps say how many layers need not be checkpointed. The values computed are the same either way.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.memory import GIB, layers_that_fit, memory_to_spare
from hf_speedkit.trainer.reduction import gather_over_ranks

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass
class _Layer:
    """A decoder layer whose checkpointing can be switched, however it was switched on."""

    module: torch.nn.Module

    @property
    def kind(self) -> tuple[str, ...]:
        """Layers of one kind hold the same modules, so they keep the same bytes."""
        return tuple(type(child).__name__ for child in self.module.modules())

    def switch(self, on: bool) -> None:
        """Checkpoint this layer from the next forward pass on, or do not."""
        if isinstance(self.module, CheckpointWrapper):
            if on:
                self.module.__dict__.pop("forward", None)
            else:
                inner = self.module._checkpoint_wrapped_module
                self.module.forward = lambda *args, **kwargs: inner(*args, **kwargs)  # type: ignore[method-assign]
        else:
            self.module.gradient_checkpointing = on  # type: ignore[assignment]


def checkpointed_layers(model: torch.nn.Module) -> list[_Layer]:
    """The layers that are checkpointed now: by transformers, or by FSDP2's wrapper (accelerate), first layer first."""
    found: list[_Layer] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        wrapped = isinstance(module, CheckpointWrapper)
        own = isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
        if wrapped or own:
            found.append(_Layer(module))
            inside.update(map(id, module.modules()))
    return found


class RecomputeChoice(TrainerCallback):  # type: ignore[misc]
    """Chooses how many layers are checkpointed.

    Args:
        layers: "auto" (on a GPU, with packing), "all", or how many, counted from the first layer. The last layers are
            the ones left alone: the backward pass frees theirs first.
        packed: rows have one shape, so that what was measured stays true.
    """

    def __init__(self, layers: int | str, *, packed: bool) -> None:
        self.layers = int(layers) if str(layers).isdecimal() else layers
        self.measures = self.layers == AUTO and packed
        self.total = 0
        self.checkpointed: int | None = None
        self._candidates: list[_Layer] = []
        self._kept_bytes: dict[tuple[str, ...], int] = {}
        self._peaks = (0, 0)
        self._step = 0
        self._retries = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Find the layers; with a number, settle it."""
        self._candidates = checkpointed_layers(model)
        self.total = self.checkpointed = len(self._candidates)
        self._step = 0
        if isinstance(self.layers, int):
            if self.layers > self.total:
                raise ConfigurationError(
                    f"activation_checkpointing_layers={self.layers}, and {self.total} layers are checkpointed",
                    mend="activation_checkpointing=True, and activation_checkpointing_layers no more than the layers",
                )
            self._settle(self.total - self.layers)
        elif self._measuring(args.device):
            torch.cuda.reset_peak_memory_stats(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step 1 gives the peak, step 2 the bytes a layer keeps; later only a look whether memory ran short."""
        self._step += 1
        if not self._measuring(args.device):
            return
        if self._step == 1:
            self._peaks = (torch.cuda.max_memory_allocated(args.device), torch.cuda.max_memory_reserved(args.device))
            self._measure_last_of_each_kind(args.device)
        elif self._step == 2:
            self._choose(args.device)
        elif self._step in (4, 8) and self.checkpointed != self.total and _retries(args.device) > self._retries:
            logger.warning(
                "memory is short with %d of %d layers checkpointed, and the allocator searches for it in every step; "
                "set activation_checkpointing_layers to a higher number, or to all",
                self.checkpointed,
                self.total,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the layers as they were found."""
        for layer in self._candidates:
            layer.switch(True)

    def _measuring(self, device: torch.device) -> bool:
        return self.measures and bool(self._candidates) and device.type == "cuda"

    def _measure_last_of_each_kind(self, device: torch.device) -> None:
        for layer in {layer.kind: layer for layer in self._candidates}.values():
            layer.switch(False)
            self._watch(layer, device)

    def _watch(self, layer: _Layer, device: torch.device) -> None:
        """Note what the next forward pass of this layer leaves allocated; inside FSDP2's hooks, so without weights."""
        module = layer.module
        former, own = module.forward, module.__dict__.get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            if own is None:
                del module.forward
            else:
                module.forward = own
            before = torch.cuda.memory_allocated(device)
            output = former(*args, **kwargs)
            self._kept_bytes[layer.kind] = max(0, torch.cuda.memory_allocated(device) - before)
            return output

        module.forward = forward

    def _choose(self, device: torch.device) -> None:
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        spare = memory_to_spare(total, others=others, allocated=self._peaks[0], reserved=self._peaks[1])
        kept = [self._kept_bytes.get(layer.kind) for layer in self._candidates]
        left_alone = 0 if None in kept else layers_that_fit([k for k in reversed(kept) if k is not None], spare)
        # Once in a run: ranks that recompute differently would wait for one another in every step.
        left_alone = int(min(row[0] for row in gather_over_ranks([left_alone], device)))
        self._retries = _retries(device)
        self._settle(left_alone)
        logger.info(
            "activation checkpointing: %d of %d layers; %.1f GiB were to spare at the first peak, a layer keeps %s GiB",
            self.checkpointed,
            self.total,
            max(0, spare) / GIB,
            " or ".join(sorted({f"{b / GIB:.2f}" for b in self._kept_bytes.values()})) or "an unknown number of",
        )

    def _settle(self, left_alone: int) -> None:
        self.checkpointed = self.total - left_alone
        for number, layer in enumerate(self._candidates):
            layer.switch(number < self.checkpointed)


def _retries(device: torch.device) -> int:
    """How often the allocator had to empty its cache to find room; a host counter, no sync."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
