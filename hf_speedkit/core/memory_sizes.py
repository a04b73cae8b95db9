"""What a memory plan is computed from: the sizes of a model's parts, and the precision its states are kept in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BF16_BYTES = 2
FP32_BYTES = 4

Checkpointing = Literal["full", "selective", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """One decoder layer, for one row of the batch.

    Args:
        kind: what tells it from the others, for example "linear_attention".
        parameters: all its weights; adapters are none of them.
        trained: how many weights are trained: its own, or its adapters'.
        saved: bytes that stay from its forward to its backward without activation checkpointing: everything autograd
            keeps, its output included, its input and weights not.
        work: bytes at the highest point of its backward over what was there before it began and its checkpoint: the
            recomputed tensors, the gradient that comes in, the gradients of its own weights, and what its kernels need.
        cast: bytes of lower-precision copies of its weights that autocast keeps until the forward pass ends.
        products: bytes of the outputs of its linear maps but the last, which is not computed again: what it keeps with
            `MemoryJob.with_products`.
        packable: how many of its weights bitsandbytes would pack: those of linear maps, not experts in one tensor;
            None means all.
    """

    kind: str
    parameters: int
    trained: int
    saved: int
    work: int
    cast: int = 0
    products: int = 0
    packable: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """A model and a row of `tokens` slots.

    Args:
        layers: decoder layers in order.
        embedding: parameters of the input embedding.
        tail: parameters behind the layers: final norm and, unless tied, head.
        head: parameters of the map to the vocabulary, tied or not.
        tied: the head is the embedding.
        hidden: bytes of the hidden states of one row between two layers.
        tokens: slots of a row.
        hidden_size: width of the hidden states.
        head_trained: the head gets a gradient (full fine-tuning).
    """

    layers: tuple[LayerMemory, ...]
    embedding: int
    tail: int
    head: int
    tied: bool
    hidden: int
    tokens: int
    hidden_size: int
    head_trained: bool = True

    @property
    def parameters(self) -> int:
        """Weights without adapters."""
        return self.embedding + self.tail + sum(layer.parameters for layer in self.layers)

    @property
    def trained(self) -> int:
        """Weights that are trained."""
        outside = self.embedding + self.tail if self.head_trained else 0
        return outside + sum(layer.trained for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """How the states of a training job are kept.

    Args:
        name: as people call it.
        trained_bytes: of one trained weight as stored, and of its gradient.
        moment_bytes: of both moments of one trained weight together.
        frozen_bytes: of one frozen weight of a layer; embedding and head stay bf16 when frozen.
        step_bytes: of temporaries of the optimizer step, per trained weight: a copy for the foreach implementation.
        adapters: only adapters are trained.
        sharded: FSDP shards the weights (bitsandbytes' 4-bit weights are left out of it: accelerate 1.15
            fsdp_utils.py:803).
    """

    name: str
    trained_bytes: float
    moment_bytes: float
    frozen_bytes: float = BF16_BYTES
    step_bytes: float = 0.0
    adapters: bool = False
    sharded: bool = True


# 8-bit moments: one byte and one fp32 scale per block of 256 each. 4-bit weights: half a byte and one fp32 scale per
# block of 64, without nested quantization (bitsandbytes' and TRL's defaults).
_EIGHT_BIT = 2 * (1 + FP32_BYTES / 256)
_FOUR_BIT = 0.5 + FP32_BYTES / 64

PURE_BF16 = MemorySetting(name="pure bf16", trained_bytes=BF16_BYTES, moment_bytes=2 * BF16_BYTES)
FP32_MASTER = MemorySetting(name="fp32 master weights", trained_bytes=FP32_BYTES, moment_bytes=2 * FP32_BYTES)
EIGHT_BIT_ADAMW = MemorySetting(name="8-bit AdamW", trained_bytes=BF16_BYTES, moment_bytes=_EIGHT_BIT)
# peft keeps adapters in fp32 (tuners_utils.py:2705, autocast_adapter_dtype); TRL turns those of a quantized model into
# bf16 (sft_trainer.py:908).
LORA = MemorySetting(name="LoRA", trained_bytes=FP32_BYTES, moment_bytes=2 * FP32_BYTES, adapters=True)
QLORA = MemorySetting(
    name="QLoRA",
    trained_bytes=BF16_BYTES,
    moment_bytes=2 * BF16_BYTES,
    frozen_bytes=_FOUR_BIT,
    adapters=True,
    sharded=False,
)
SETTINGS = (PURE_BF16, FP32_MASTER, EIGHT_BIT_ADAMW, LORA, QLORA)
"""The settings that `hf-speedkit plan` compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryJob:
    """How a job is spread out, as far as memory is concerned.

    Args:
        gpus: processes, one GPU each.
        fsdp: weights, gradients and moments are shared out over the GPUs; False copies them to each (DDP).
        shards: over how many GPUs; None means all (hybrid sharding: those of one host).
        unchecked: how many layers keep their activations, the last ones first; the others are checkpointed.
        with_products: how many of the layers before those keep the outputs of their matrix products.
        every_n_layers: instead, transformers' setting: every n-th layer is checkpointed, the first included.
        reshard: FSDP frees a layer's gathered weights after its forward.
        accumulation: micro-batches of an optimizer step.
        sync_each_batch: gradients are reduced after every micro-batch, so that no rank keeps whole ones.
        head: whose loss head runs: "speedkit" (kernels/loss_head.py) or "trl".
        zero_copy: FSDP2 gathers and reduces without flat copies (trainer/sharded/zero_copy.py).
    """

    gpus: int = 1
    fsdp: bool = True
    shards: int | None = None
    unchecked: int = 0
    with_products: int = 0
    every_n_layers: int = 1
    reshard: bool = True
    accumulation: int = 1
    sync_each_batch: bool = False
    head: Literal["speedkit", "trl"] = "speedkit"
    zero_copy: bool = True

    def checkpointed(self, layer: int, layers: int) -> bool:
        """Whether a layer keeps its input only."""
        return layer < layers - self.unchecked and layer % self.every_n_layers == 0

    def keeps_products(self, layer: int, layers: int) -> bool:
        """Whether a checkpointed layer keeps the outputs of its products too."""
        return self.checkpointed(layer, layers) and layer >= layers - self.unchecked - self.with_products
