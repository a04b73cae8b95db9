"""Bytes of GPU memory a training step needs, in closed form: the highest of its phases, with what stands where.

A step has four places where memory can be highest: the loss head, forward or backward (all checkpoints are there and so
is the head's fp32 gradient), the backward of a layer (recomputed tensors, its gathered weights, the gradients so far),
the gradient of the embedding, and the optimizer step. Which of them it is depends on the number of GPUs: on two it is
the first layer's backward, on 64 it is the head. What a layer keeps and needs comes from `kernels/memory_trace.py`.

The order of gathers and reductions is that of torch 2.11-2.13 `fully_shard` (_fsdp_param_group.py) with accelerate
1.15's groups (fsdp_utils.py:846-885): one a layer, the embedding, and [final norm, head], which is not resharded
between forward and backward. While the head runs forward, what was gathered last is there twice: as weights, and as the
flat result of its all-gather, which `zero_copy` does without. In the backward of a layer there are its own weights,
those of the next one (prefetched; the embedding is gathered again behind the first layer although its backward needs no
weight), and the input of the previous group's reduce-scatter, which is freed one group later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from hf_speedkit.core.memory_sizes import BF16_BYTES, FP32_BYTES, LayerMemory, MemoryJob, MemorySetting, ModelMemory

# TRL 1.16's fused head: a tile of 4,096 tokens by 32,768 entries (chunked_logprob.py:31, utils.py:1506).
_TRL_TOKENS, _TRL_ENTRIES = 4096, 32_768
LOGITS_BYTES = 2**31
"""The one buffer of logits of our head at most (kernels/loss_head.py, which a test compares)."""
# cuBLAS' workspace of a handle, 32 MiB on Hopper (CublasHandlePool.cpp); forward and backward threads have one each.
_WORKSPACES = 2 * 32 * 2**20
PARTS = ("weights", "gradients", "moments", "gathered", "activations", "working set", "loss head", "workspaces")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one GPU holds at the highest point of a step.

    Args:
        setting: how states are kept.
        job: how the job is spread out.
        phase: where the highest point is.
        parts: bytes by the names in `PARTS`, those that are not zero.
        layers: decoder layers of the model.
    """

    setting: MemorySetting
    job: MemoryJob
    phase: str
    parts: dict[str, int] = field(default_factory=dict)
    layers: int = 0

    @property
    def allocated(self) -> int:
        """Bytes in live tensors, what torch.cuda.max_memory_allocated() reports."""
        return sum(self.parts.values())


def plan_memory(model: ModelMemory, setting: MemorySetting, job: MemoryJob) -> MemoryPlan:
    """The memory of one GPU at the highest point of a training step.

    Args:
        model: sizes of its parts, traced for this setting's precision.
        setting: how states are kept.
        job: how the job is spread out.
    """
    phase, parts = max(_phases(model, setting, job), key=lambda found: sum(found[1].values()))
    return MemoryPlan(
        setting=setting,
        job=job,
        phase=phase,
        parts={name: round(parts[name]) for name in PARTS if parts.get(name)},
        layers=len(model.layers),
    )


def _phases(model: ModelMemory, setting: MemorySetting, job: MemoryJob) -> Iterator[tuple[str, dict[str, float]]]:
    state = _State(model, setting, job)
    always = {"weights": state.weights, "moments": state.moments, "workspaces": _WORKSPACES}
    count = len(model.layers)
    kept = state.kept_before
    for gathered, head in (
        (state.gathered_at_head + state.gathered_last, _head_forward(model, setting, job)),
        (state.gathered_at_head, _head_backward(model, setting, job)),
    ):
        yield (
            "loss head",
            {
                **always,
                "gradients": state.gradients_before(count),
                "gathered": gathered,
                "activations": kept[count],
                "loss head": head,
            },
        )
    if any(layer.cast for layer in model.layers):
        yield (
            "end of forward",
            {
                **always,
                "gradients": state.gradients_before(count),
                "gathered": state.casts,
                "activations": kept[count],
                "loss head": _head_forward(model, setting, job),
            },
        )
    for index in reversed(range(count)):
        yield (
            f"backward of layer {index + 1}",
            {
                **always,
                "gradients": state.gradients_before(index),
                "gathered": state.gathered_at(index),
                "activations": kept[index],
                "working set": model.layers[index].work,
            },
        )
    if model.head_trained:
        yield (
            "gradient of the embedding",
            {
                **always,
                "gradients": state.gradients_before(-1) + state.embedding_gradient,
                "gathered": state.gathered_at_embedding,
                "activations": model.hidden,
            },
        )
    yield (
        "optimizer step",
        {**always, "gradients": state.gradients + model.trained * setting.step_bytes / state.shards},
    )


class _State:
    """Sizes that several phases share.

    Args:
        model, setting, job: see `plan_memory`.
    """

    def __init__(self, model: ModelMemory, setting: MemorySetting, job: MemoryJob) -> None:
        self._model, self._setting, self._job = model, setting, job
        self.shards = (job.shards or job.gpus) if job.fsdp else 1
        self._weight_shards = self.shards if setting.sharded else 1
        self._copies = job.gpus > 1 and not job.fsdp  # DDP: the reducer's buckets are a second set of gradients
        outside = model.embedding + model.tail
        frozen = sum(_frozen_bytes(layer, setting) for layer in model.layers)
        self.weights = (
            frozen / self._weight_shards
            + outside * (setting.trained_bytes if model.head_trained else BF16_BYTES) / self.shards
            + sum(layer.trained for layer in model.layers) * setting.trained_bytes / self.shards
        )
        self.moments = model.trained * setting.moment_bytes / self.shards
        self.gradients = model.trained * setting.trained_bytes / self.shards * (2 if self._copies else 1)
        count = len(model.layers)
        steps = [
            (model.hidden + (layer.products if job.keeps_products(index, count) else 0))
            if job.checkpointed(index, count)
            else layer.saved
            for index, layer in enumerate(model.layers)
        ]
        self.kept_before = [model.hidden, *(model.hidden + size for size in accumulate(steps))]

    def gradients_before(self, index: int) -> float:
        """Gradients there when the backward of a layer begins; its own come on top, -1 stands for the embedding."""
        model, job = self._model, self._job
        trained = [layer.trained for layer in model.layers]
        tail = model.tail if model.head_trained else 0
        later = sum(trained[index + 1 :]) + (tail if index < len(trained) else 0)
        one = self._setting.trained_bytes / self.shards
        if self._copies:
            return later * one + model.trained * self._setting.trained_bytes
        if job.accumulation == 1:
            return later * one
        if self.shards == 1 or job.sync_each_batch:
            return model.trained * one
        # Without synchronisation every rank keeps whole gradients until the last micro-batch reduces them.
        return later * one + (model.trained - later) * BF16_BYTES

    def gathered_at(self, index: int) -> float:
        """Gathered weights and buffers of collectives in the backward of a layer."""
        if self.shards == 1:
            return 0.0
        model, layers = self._model, self._model.layers
        embedding = 0 if model.tied else model.embedding
        before = self._weights_of(index - 1) if index else embedding * BF16_BYTES
        held = before if self._job.reshard else sum(self._weights_of(i) for i in range(index))
        tail = model.tail if model.head_trained else 0
        reduced = tail if index + 1 == len(layers) else layers[index + 1].trained
        return self._weights_of(index) + held + reduced * BF16_BYTES + self._tied_throughout

    @property
    def _tied_throughout(self) -> float:
        """A tied embedding is in the head's group: its whole weight and gradient stay until its second use."""
        model = self._model
        return model.embedding * BF16_BYTES * (2 if model.head_trained else 1) if model.tied else 0.0

    @property
    def casts(self) -> float:
        """Copies that autocast keeps of the weights of checkpointed layers; the others' are among what they save."""
        layers, job = self._model.layers, self._job
        return sum(layer.cast for index, layer in enumerate(layers) if job.checkpointed(index, len(layers)))

    @property
    def gathered_at_head(self) -> float:
        """Gathered weights while the head runs, forward and backward."""
        if self.shards == 1:
            return 0.0
        model = self._model
        tail = (model.tail + (model.embedding if model.tied else 0)) * BF16_BYTES
        return tail + (0 if self._job.reshard else sum(self._weights_of(i) for i in range(len(model.layers))))

    @property
    def gathered_last(self) -> float:
        """The flat result of the forward's last all-gather, kept beside the weights copied out of it.

        torch frees it after the next group's copy-out (_fsdp_param_group.py:429-432, :483 in 2.13) and, behind the last
        group, when the whole model's forward ends (_fsdp_state.py:335-342): the head's forward runs with it, its
        backward does not. A memory snapshot on two H200 showed it, 2.4 GiB of the 27B's head. The last group is that of
        final norm and head. Tied, it was gathered for the embedding; under adapters accelerate finds no final norm, and
        the head is gathered outside a forward (trainer/sharded/communication.py), where nothing is kept: the last
        layer's. Without copies there is no flat result.
        """
        if self.shards == 1 or self._job.zero_copy:
            return 0.0
        if self._model.tied or self._setting.adapters:
            return self._weights_of(len(self._model.layers) - 1)
        return self._model.tail * BF16_BYTES

    @property
    def embedding_gradient(self) -> float:
        """The embedding's own gradient before it is reduced."""
        size = BF16_BYTES if self.shards > 1 else self._setting.trained_bytes
        return self._model.embedding * size if not self._model.tied or self.shards == 1 else 0.0

    @property
    def gathered_at_embedding(self) -> float:
        """The embedding's reduce-scatter: its input, where it is a copy of the gradient, and its output, a shard."""
        if self.shards == 1:
            return 0.0
        copied = not self._job.zero_copy or self.shards < self._job.gpus  # torch's own code reduces hybrid shards
        return self._model.embedding * BF16_BYTES * (copied + 1 / self.shards)

    def _weights_of(self, index: int) -> float:
        layer = self._model.layers[index]
        gathered = layer.parameters if self._setting.sharded else 0
        adapters = layer.trained if self._setting.adapters else 0
        return (gathered + adapters) * BF16_BYTES


def _frozen_bytes(layer: LayerMemory, setting: MemorySetting) -> float:
    """Frozen weights of a layer: what can be packed as the setting says, the rest in bf16."""
    frozen = layer.parameters - (0 if setting.adapters else layer.trained)
    packed = min(frozen, layer.parameters if layer.packable is None else layer.packable)
    return packed * setting.frozen_bytes + (frozen - packed) * BF16_BYTES


def _head_forward(model: ModelMemory, setting: MemorySetting, job: MemoryJob) -> float:
    """The head's forward, all slots being targets.

    Ours makes the gradients there: bf16 of the hidden states, fp32 of the weight. TRL's keeps the targets' states only.
    """
    states = model.tokens * model.hidden_size * BF16_BYTES
    if job.head == "trl":
        return states + _trl_tiles(model, setting, job)
    logits = min(LOGITS_BYTES, model.tokens * (model.head // model.hidden_size) * BF16_BYTES)
    cast = model.head * BF16_BYTES if _fp32_weight(model, setting, job) else 0
    return 2 * states + logits + cast + (model.head * FP32_BYTES if model.head_trained else 0)


def _head_backward(model: ModelMemory, setting: MemorySetting, job: MemoryJob) -> float:
    """The head's backward: the weight's gradient is there in fp32 and, once rounded, a second time.

    TRL's (chunked_logprob.py:396-468) computes the gradients here, that of the hidden states in fp32 first.
    """
    states = model.tokens * model.hidden_size * BF16_BYTES
    rounded = 0 if _fp32_weight(model, setting, job) else BF16_BYTES
    weight = model.head * (FP32_BYTES + rounded) if model.head_trained else 0
    if job.head == "trl":
        return states * 4 + weight + _trl_tiles(model, setting, job)
    return states + weight


def _trl_tiles(model: ModelMemory, setting: MemorySetting, job: MemoryJob) -> float:
    """A tile of logits, and with an fp32 weight the slice of it that is cast for the tile."""
    cast = _TRL_ENTRIES * model.hidden_size * BF16_BYTES if _fp32_weight(model, setting, job) else 0
    return min(model.tokens, _TRL_TOKENS) * _TRL_ENTRIES * BF16_BYTES + cast


def _fp32_weight(model: ModelMemory, setting: MemorySetting, job: MemoryJob) -> bool:
    """Whether the head reads an fp32 weight: FSDP hands it a bf16 copy."""
    return setting.trained_bytes == FP32_BYTES and model.head_trained and (job.gpus == 1 or not job.fsdp)
