"""How much device memory a training state takes: weights, gradients and optimizer moments. Activations come on top."""

from __future__ import annotations

import math
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


def memory_to_spare(total: int, *, others: int, reserved: int) -> int:
    """Bytes of a device that further activations may take beyond a measured peak; may be negative.

    What the allocator holds without using it is not counted on: it is there, but in pieces. Four hundredths of the
    device stay free for libraries that allocate by themselves.

    Args:
        total: bytes of the device.
        others: bytes that are taken outside the allocator (context, communication buffers, other processes).
        reserved: peak of what the allocator holds, in bytes.
    """
    return total - total // 25 - others - reserved


def layers_that_fit(kept: list[int], spare: int) -> int:
    """How many layers, the first of `kept` first, can keep their activations in `spare` bytes."""
    taken = 0
    for number, size in enumerate(kept):
        taken += size
        if taken > spare:
            return number
    return len(kept)
