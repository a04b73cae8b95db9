"""Activation checkpointing of as few layers as memory asks for: measured in the first steps, then fixed.

Checkpointing every layer recomputes each layer's forward pass, a quarter of all the work, whether memory is short or
not. Rows have one shape, so what a layer keeps is the same in every step: the peaks of the second step's parts (the
first step has no optimizer state yet beside its activations) and the bytes one layer keeps say how many layers need not
be checkpointed, or how many can keep the outputs of their products (`kept_products`). The values computed are the same
either way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.memory import Kept, layers_that_fit, room_for_tensors
from hf_speedkit.core.memory_words import bytes_in_words
from hf_speedkit.measure.device_memory import DeviceMemory, device_memory
from hf_speedkit.trainer.memory.kept_products import KeptProducts
from hf_speedkit.trainer.memory.layer_marks import lay_over
from hf_speedkit.trainer.memory.peak_watch import PeakWatch
from hf_speedkit.trainer.ranks.reduction import gather_over_ranks

logger = logging.getLogger(__name__)

AUTO = "auto"
# After these steps it is seen whether memory ran short since the one before; the first only sets the mark.
_LOOKS = (3, 4, 5, 6, 8, 12, 16)


@dataclass
class _Layer:
    """A decoder layer whose checkpointing can be switched, however it was switched on."""

    module: torch.nn.Module
    on: bool = True
    products: KeptProducts | None = None

    @property
    def kind(self) -> tuple[str, ...]:
        """Layers of one kind hold the same modules, so they keep the same bytes."""
        return tuple(type(child).__name__ for child in self.module.modules())

    def switch(self, on: bool) -> None:
        """Checkpoint this layer from the next forward pass on, or do not."""
        if on == self.on:
            return  # what lies over the layer's forward by now stays
        self.on = on
        if isinstance(self.module, CheckpointWrapper):
            if on:
                self.module.__dict__.pop("forward", None)
            else:
                self.module.forward = MethodType(_inside, self.module)  # type: ignore[method-assign]
        else:
            self.module.gradient_checkpointing = on  # type: ignore[assignment]


def _inside(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper._checkpoint_wrapped_module(*args, **kwargs)


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
    """Chooses how many layers are checkpointed, and how many of those keep the outputs of their products.

    Args:
        layers: "auto" (on a GPU, with packing), "all", or how many, counted from the first layer. The last layers are
            the ones left alone: the backward pass frees theirs first.
        packed: rows have one shape, so that what was measured stays true.
        keep: "products": layers that stay checkpointed keep the outputs of their matrix products, as many as memory
            allows, and all of them where it is not measured; "auto": only where it is; "nothing".
        memory: gives a device's counters, or None where it has none.
    """

    def __init__(
        self,
        layers: int | str,
        *,
        packed: bool,
        keep: str = "nothing",
        memory: Callable[[torch.device], DeviceMemory | None] = device_memory,
    ) -> None:
        self.layers = int(layers) if str(layers).isdecimal() else layers
        self.total = 0
        self.checkpointed = 0
        self.kept_bytes: dict[tuple[str, ...], int] = {}
        self.spare_bytes = 0
        self.offloaded: frozenset[int] = frozenset()
        self.with_products = 0
        self._packed, self._keep, self._products = packed, keep, False
        self._memory_of = memory
        self._memory: DeviceMemory | None = None
        self._candidates: list[_Layer] = []
        self._peaks: PeakWatch | None = None
        self._unwatch: list[Callable[[], None]] = []
        self._searches = 0
        self._step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Find the layers; with a number, settle it."""
        self._candidates = checkpointed_layers(model)
        self.total = self.checkpointed = len(self._candidates)
        self.offloaded, self.with_products = frozenset(), 0
        self.kept_bytes = {}  # rows, or the model, may be others than in a training before
        self._step = 0
        one_device = args.n_gpu <= 1  # a replica of DataParallel's would run the forward of the first GPU's layer
        measures = self.layers == AUTO and self._packed and self._candidates and one_device
        self._memory = self._memory_of(args.device) if measures else None
        self._products = self._keep == "products" or (self._keep == AUTO and self._memory is not None)
        for layer in self._candidates if self._products and one_device else ():
            layer.products = KeptProducts(layer.module)
        if isinstance(self.layers, int):
            if self.layers > self.total:
                raise ConfigurationError(
                    f"activation_checkpointing_layers={self.layers}, and {self.total} layers are checkpointed",
                    mend="activation_checkpointing=True, and activation_checkpointing_layers no more than the layers",
                )
            self._settle(Kept(self.total - self.layers))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch products in the first step; what a forward pass left that had no backward pass is nobody's."""
        if self._step == 0:  # what is proven before it has passes of its own
            self._watch_products()
        for layer in self._candidates if self.with_products else ():
            if layer.products is not None:
                layer.products.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step 2 gives the peak and the bytes a layer keeps; the next ones show whether the choice was right."""
        self._step += 1
        if self._step == 1 and self._products:
            self._refuse_overwritten()
        if self._memory is None:
            if self._step == 1 and self._products:  # their sizes are known now
                some = self.checkpointed if any(self._product_bytes()) else 0
                self._settle(Kept(self.total - self.checkpointed, some))
            return
        if self._step == 1:
            # The last layer of each kind keeps its activations in step 2, and what it keeps is noted.
            for layer in self._last_of_each_kind().values():
                layer.switch(False)
                self._watch(layer, self._memory)
            self._memory.give_back_cache()  # what the proofs and the first step left in pieces is not step 2's
            self._peaks = PeakWatch([layer.module for layer in self._candidates], self._memory)
        elif self._peaks is not None:
            self._choose(self._peaks, self._memory, args.device)
            self._peaks = None
        elif self._step in _LOOKS and (self.checkpointed != self.total or self.with_products):
            self._look(self._memory, args.device)

    def undo(self) -> None:
        """Leave the layers as they were found, also where training failed in the middle of a step."""
        for restore in self._unwatch:
            restore()
        self._unwatch = []
        if self._peaks is not None:
            self._peaks.finish()
            self._peaks = None
        for layer in self._candidates:
            layer.switch(True)
            if layer.products is not None:
                layer.products.switch(False)

    @property
    def measures(self) -> bool:
        """Whether this run's device and rows let it measure what layers keep."""
        return self._memory is not None

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The layers, first layer first."""
        return [layer.module for layer in self._candidates]

    def offload(self, chosen: Sequence[int]) -> None:
        """Stop checkpointing these layers, whose activations someone moves to host memory; () checkpoints them again.

        Args:
            chosen: numbers of layers that are checkpointed.
        """
        self.offloaded = frozenset(chosen)
        self._settle(Kept(self.total - self.checkpointed, self.with_products))

    def line(self) -> str | None:
        """What was chosen, for the summary; None where nothing is checkpointed."""
        if not self.total:
            return None
        twice = len(set(range(self.checkpointed)) - self.offloaded)
        also = f", activations of {len(self.offloaded)} in host memory" if self.offloaded else ""
        keeping = len(set(range(self.checkpointed - self.with_products, self.checkpointed)) - self.offloaded)
        also += f", with the products of {keeping} kept" if keeping else ""
        return f"activation checkpointing: {twice} of {self.total} layers{also}"

    def _watch(self, layer: _Layer, memory: DeviceMemory) -> None:
        """Note what the next forward pass of this layer leaves allocated; inside FSDP2's hooks, so without weights."""

        def forward(former: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():  # an evaluation between the steps, where nothing is kept
                return former(*args, **kwargs)
            restore()
            before = memory.allocated()
            output = former(*args, **kwargs)
            self.kept_bytes[layer.kind] = max(0, memory.allocated() - before)
            return output

        restore = lay_over(layer.module, forward)
        self._unwatch.append(restore)

    def _watch_products(self) -> None:
        compared = self._last_of_each_kind().values()  # not all: they would hold in step 1 what may not fit
        for layer in self._candidates:
            if layer.products is not None:
                layer.products.watch(compare=layer in compared)

    def _refuse_overwritten(self) -> None:
        compared = {k: layer.products for k, layer in self._last_of_each_kind().items() if layer.products is not None}
        found = {kind: products.overwritten for kind, products in compared.items()}
        for layer in self._candidates:
            if layer.products is not None:
                layer.products.refuse(found[layer.kind])
                layer.products.begin_step()
        if count := sum(map(len, found.values())):
            logger.warning("outputs of %d maps a layer are written to behind torch's back: they are not kept", count)

    def _last_of_each_kind(self) -> dict[tuple[str, ...], _Layer]:
        return {layer.kind: layer for layer in self._candidates}

    def _choose(self, watch: PeakWatch, memory: DeviceMemory, device: torch.device) -> None:
        peaks, unused = watch.finish()
        room = room_for_tensors(memory.total(), others=memory.others(), unused=unused)
        self.spare_bytes = room - max(peaks.backward)
        kept = [self.kept_bytes.get(layer.kind) for layer in self._candidates]
        watched = list(self._last_of_each_kind().values())
        already = [number for number, layer in enumerate(self._candidates) if layer in watched]
        known = [size for size in kept if size is not None]
        chosen = Kept(0)
        if len(known) == len(kept):
            chosen = layers_that_fit(known, peaks, already=already, room=room, products=self._product_bytes())
        # Ranks that recompute differently would wait for one another in every step.
        rows = gather_over_ranks([chosen.alone, chosen.alone + chosen.products], device)
        alone, with_products = (int(min(column)) for column in zip(*rows, strict=True))
        self._settle(Kept(alone, with_products - alone))
        memory.give_back_cache()
        sizes = " or ".join(sorted(map(bytes_in_words, self.kept_bytes.values())))
        logger.info(
            "%s; tensors took %s of %s at most before the backward pass and %s in it, a layer keeps %s",
            self.line(), *map(bytes_in_words, (peaks.forward, room, max(peaks.backward))), sizes,
        )  # fmt: skip

    def _product_bytes(self) -> list[int]:
        return [0 if layer.products is None else layer.products.bytes for layer in self._candidates]

    def _look(self, memory: DeviceMemory, device: torch.device) -> None:
        """Leave a third fewer layers alone, or keep a third less, where the allocator had to search for memory.

        It finds some, by giving its cache back and asking the driver anew: right, but it stops host and device. With 17
        of 64 layers left alone and no room for them, a 27B did 2,346 tokens/s per H200 (benchmarks/NOTES.md).
        """
        searches, self._searches = memory.searches() - self._searches, memory.searches()
        if self._step == _LOOKS[0]:  # the step in which the new sizes were first asked for
            return
        if max(row[0] for row in gather_over_ranks([searches], device)) > 0:
            alone, some = self.total - self.checkpointed, self.with_products
            fewer = alone - math.ceil(alone / 3)
            self._settle(Kept(fewer, some) if alone else Kept(0, some - math.ceil(some / 3)))
            memory.give_back_cache()
            logger.info("memory ran short in step %d: %s", self._step, self.line())

    def _settle(self, kept: Kept) -> None:
        self.checkpointed, self.with_products = self.total - kept.alone, kept.products
        for number, layer in enumerate(self._candidates):
            layer.switch(number < self.checkpointed and number not in self.offloaded)
            if layer.products is not None and self._step:  # before, they are watched
                layer.products.switch(layer.on and number >= self.checkpointed - kept.products)
