"""How much device memory a training state takes: weights, gradients and optimizer moments. Activations come on top."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What must be resident on the devices during a step, whatever the batch, in bytes over all devices together.

    Args:
        weights: the model's parameters.
        gradients: one for each trainable parameter.
        moments: the optimizer's running averages of the trainable parameters.
    """

    weights: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.weights + self.gradients + self.moments


def training_state_bytes(
    parameters: float,
    *,
    weight_bytes: float,
    trainable_parameters: float | None = None,
    trainable_bytes: float | None = None,
    moments: int = 2,
    moment_bytes: float | None = None,
) -> TrainingState:
    """Bytes of weights, gradients and optimizer moments of a model, over all devices together.

    A gradient has its weight's precision, and so have AdamW's moments unless told otherwise: 8 bytes a parameter when
    everything is bf16, 16 when everything is fp32. This is a lower bound of what training needs.

    Args:
        parameters: parameters of the model.
        weight_bytes: bytes of one weight as it is loaded: 2 for bf16, 4 for fp32, 0.5 for 4-bit.
        trainable_parameters: how many of them are trained; None means all. With adapters, the adapters' count.
        trainable_bytes: bytes of one trainable weight where they are held in another precision than they were loaded
            in (accelerate upcasts them to fp32 for FSDP with mixed precision, accelerate 1.15 fsdp_utils.py:816).
        moments: moments the optimizer keeps for each trainable parameter: 2 for AdamW, 0 for plain SGD.
        moment_bytes: bytes of one moment where it differs from the trainable weight's: 1 for 8-bit optimizers.

    Raises:
        ValueError: a count that cannot be one, or more trainable parameters than parameters.
    """
    trained = parameters if trainable_parameters is None else trainable_parameters
    if not (math.isfinite(parameters) and 0 <= trained <= parameters and parameters > 0):
        raise ValueError(f"{trained:g} trainable of {parameters:g} parameters is not possible")
    held = weight_bytes if trainable_bytes is None else trainable_bytes
    return TrainingState(
        weights=math.ceil((parameters - trained) * weight_bytes + trained * held),
        gradients=math.ceil(trained * held),
        moments=math.ceil(trained * moments * (held if moment_bytes is None else moment_bytes)),
    )


def devices_needed(state: TrainingState, memory_gib: float) -> int:
    """How many devices of `memory_gib` GiB hold a training state shared out evenly, with no room for activations.

    Raises:
        ValueError: `memory_gib` is not positive.
    """
    if memory_gib <= 0:
        raise ValueError(f"a device of {memory_gib} GiB holds nothing")
    return math.ceil(state.total / (memory_gib * GIB))


def room_for_tensors(total: int, *, others: int, unused: int) -> int:
    """Bytes of a device that tensors may take.

    Four hundredths of the device stay free for libraries that allocate by themselves.

    Args:
        total: bytes of the device.
        others: bytes that are taken outside the allocator (context, communication buffers, other processes).
        unused: bytes that the allocator held without using them. They are there, but in pieces: not counted on.
    """
    return total - total // 25 - others - unused


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """The most bytes of tensors in each part of a training step.

    Args:
        forward: until the backward pass reaches the last layer: forward passes, loss, the loss's own backward.
        backward: for each layer, first layer first, in its backward pass; the first layer's has the optimizer in it.
    """

    forward: int
    backward: Sequence[int]


@dataclass(frozen=True, slots=True)
class Kept:
    """What layers keep between their forward and their backward pass, the last layers first.

    Args:
        alone: how many are not checkpointed and keep everything.
        products: of how many of those before them the outputs of matrix products are kept.
    """

    alone: int
    products: int = 0


def layers_that_fit(
    kept: Sequence[int], peaks: StepPeaks, *, already: Collection[int], room: int, products: Sequence[int] = ()
) -> Kept:
    """How much layers can keep in `room` bytes.

    What a layer keeps is there from its forward pass to its own backward pass, and the last layers' goes first: where
    memory is highest at the end of the backward pass, as with whole gradients on few GPUs, it is gone by then. Products
    save more time a byte than what else a layer keeps, so layers are left alone only where all products fit.

    Args:
        kept: bytes that each layer keeps if it is not checkpointed, first layer first.
        peaks: of a step.
        already: the layers that kept everything in that step.
        room: bytes that tensors may take.
        products: bytes of each layer's products; () keeps none.
    """
    count = len(kept)

    def fits(alone: int, some: int) -> bool:
        first, wanted = count - alone, [0] * count
        wanted[first:] = kept[first:]
        wanted[first - some : first] = products[first - some : first] if some else []
        return _most_bytes(wanted, kept, peaks, already) <= room

    def most(fit: Callable[[int], bool], at_most: int) -> int:
        return next((number for number in range(at_most, 0, -1) if fit(number)), 0)

    alone = most(lambda number: fits(number, 0), count)
    if alone == count or not any(products):
        return Kept(alone)
    some = most(lambda number: fits(0, number), count)
    if some < count:
        return Kept(0, some)
    alone = most(lambda number: fits(number, count - number), count)
    return Kept(alone, count - alone)


def _most_bytes(wanted: Sequence[int], kept: Sequence[int], peaks: StepPeaks, already: Collection[int]) -> int:
    """The peak of a step in which layers keep `wanted`, from one in which those of `already` kept all they `kept`."""
    highest = more = 0
    for number, (want, peak) in enumerate(zip(wanted, peaks.backward, strict=True)):
        had = kept[number] if number in already else 0
        more += want - had
        # A checkpointed layer makes what it would have kept again in its own backward pass.
        highest = max(highest, peak + more + had - want)
    return max(highest, peaks.forward + more)


@dataclass(frozen=True, slots=True)
class Offloading:
    """A choice of how many layers keep their activations in host memory.

    Args:
        layers: how many.
        copy_layers: so many layers' forward passes take as long as one copy.
    """

    layers: int
    copy_layers: float

    @property
    def layers_ahead(self) -> int:
        """So many layers before a backward pass the copy back begins; a backward pass takes longer than a forward."""
        return max(1, math.ceil(self.copy_layers))


NO_OFFLOADING = Offloading(0, 1.0)
# Copies share the memory and the link with everything else: leave some of the time.
_COPY_SHARE = 0.85


def layers_to_offload(
    checkpointed: int,
    *,
    of: int,
    layer_bytes: int,
    forward_s: float,
    bytes_per_s: float,
    host_bytes: int,
    spare_bytes: int,
) -> Offloading:
    """As many layers as copies have time for beside one forward pass, and the host and the device room for.

    The backward pass takes twice as long or longer, so the forward pass is what bounds the copies.

    Args:
        checkpointed: layers that would otherwise be computed twice. of: layers of the model.
        layer_bytes: what one layer keeps.
        forward_s: time of one forward pass of all layers.
        bytes_per_s: of a copy between device and host.
        host_bytes: what may be taken of the host.
        spare_bytes: what is free on the device in the backward passes of the first layers; what comes back lies there.
    """
    if min(checkpointed, layer_bytes, forward_s, bytes_per_s) <= 0:
        return NO_OFFLOADING
    copy_layers = layer_bytes / bytes_per_s / (forward_s / of)
    count = max(0, min(checkpointed, int(_COPY_SHARE * of / copy_layers), host_bytes // layer_bytes))
    ahead = Offloading(count, copy_layers).layers_ahead
    # On the way at once: the layer whose backward pass runs, and those below it that are fetched.
    while count and layer_bytes * (1 + math.ceil(ahead * count / checkpointed)) > spare_bytes:
        count -= 1
    return Offloading(count, copy_layers)


def copied_before(places: Sequence[int], copy_layers: float) -> list[int]:
    """Before which layer's forward pass the copies of the layers at `places` are done, one after the other."""
    done, found = 0.0, []
    for place in places:
        done = max(done, place + 1) + copy_layers
        found.append(math.ceil(done))
    return found
