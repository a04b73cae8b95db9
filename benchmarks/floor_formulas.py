"""The least work of one training step by group of kernels: closed forms over a decoder's widths; floors.py uses them.

Bytes: every operation of the model reads its inputs and writes its outputs once, bf16, at the real tokens of the step.
Weights of norms and numbers per head are left out: thousands of times smaller. A width is in elements per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_speedkit.core.flops import LAYER_PARTS, ModelFlops, model_flops
from hf_speedkit.core.records import StepRecord

GEMM_FLOPS_PER_S = 790e12
"""What bf16 matrix products of a 27B's sizes reach on one H200 (770-800, measured before this project)."""

MEMORY_BYTES_PER_S = 4.3e12
"""What a copy on one H200 reaches, read and write together (measured likewise)."""

LINK_BYTES_PER_S = 450e9
"""NVLink of one H200, one way: the rated speed, measured by nobody here."""

BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least work of one group: FLOPs of matrix products, bytes of memory, bytes sent to other GPUs; and why."""

    formula: str
    flops: float = 0.0
    memory_bytes: float = 0.0
    sent_bytes: float = 0.0

    def seconds(self, link_bytes_per_s: float) -> float:
        """The longest of the three: they can run side by side."""
        return max(
            self.flops / GEMM_FLOPS_PER_S, self.memory_bytes / MEMORY_BYTES_PER_S, self.sent_bytes / link_bytes_per_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How often layers run in one step: forward, recompute included, and backward."""

    forward: int
    backward: int

    def __add__(self, other: Passes) -> Passes:
        return Passes(forward=self.forward + other.forward, backward=self.backward + other.backward)

    def elements(self, width: float, *, forward: int, backward: int) -> float:
        """Elements per token that an operation reads and writes, `forward` and `backward` times its width a pass."""
        return width * (forward * self.forward + backward * self.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one step did.

    Args:
        config: `config.to_dict()` of a dense or hybrid decoder.
        step: its record, with FLOPs.
        checkpointed: layers that run forward twice, counted from the first.
        ranks: over which weights are sharded.
        parameters: of the model. trained: of them, how many.
    """

    config: Mapping[str, Any]
    step: StepRecord
    checkpointed: int
    ranks: int
    parameters: int
    trained: int

    def passes(self, kind: str) -> Passes:
        """Of the layers of one kind."""
        kinds = self.config.get("layer_types") or ["full_attention"] * self.config["num_hidden_layers"]
        return Passes(forward=kinds.count(kind) + kinds[: self.checkpointed].count(kind), backward=kinds.count(kind))

    @property
    def real(self) -> int:
        """Real tokens."""
        return self.step.tokens.real or 0

    def width(self, heads: str, size: str) -> int:
        """Heads times their size; 0 for what the model has not."""
        return int(self.config.get(heads, 0) * self.config.get(size, 0))

    def moved(self, *elements: float) -> float:
        """Bytes of elements per token."""
        return BYTES * self.real * sum(elements)


def floors(job: Job) -> dict[str, Floor]:
    """The floor of every group that does work of the model or of sharding, by the names of `core.kernel_groups`."""
    return {**_products(job), **_memory_bound(job), **_per_step(job)}


def _products(job: Job) -> dict[str, Floor]:
    flops, again, step = known_flops(job.config), known_flops(job.config, range(job.checkpointed)), job.step
    pairs = ((step.tokens.squared_lengths or 0) + job.real) / 2
    mixers = (3 * flops.per_pair + again.per_pair) * pairs + (
        3 * flops.core_per_token + again.core_per_token
    ) * job.real
    attention, linear = job.passes("full_attention"), job.passes("linear_attention")
    queries = job.width("num_attention_heads", "head_dim")
    keys = job.width("num_key_value_heads", "head_dim")
    linear_keys = job.width("linear_num_key_heads", "linear_key_head_dim")
    linear_values = job.width("linear_num_value_heads", "linear_value_head_dim")
    rule = 6.0 * linear_values * job.config.get("linear_key_head_dim", 0) * job.real
    return {
        "GEMM": Floor(
            flops=(step.flops or 0.0) + (step.recomputed_flops or 0.0) - mixers,
            formula="FLOPs of the step and of recompute (core/flops.py) less attention, recurrence and convolution",
        ),
        "attention": Floor(
            flops=queries * pairs * (4 * attention.forward + 10 * attention.backward),
            memory_bytes=job.moved(attention.elements(2 * (queries + keys), forward=1, backward=2)),
            formula="causal pairs x heads x head size x 4 a forward, 10 a backward (scores are made again); "
            "q, k, v in, o out; backward q, k, v, o, do in, dq, dk, dv out",
        ),
        "linear attention": Floor(
            flops=rule * (linear.forward + 2 * linear.backward),
            memory_bytes=job.moved(
                linear.elements(2 * linear_keys + 2 * linear_values, forward=1, backward=1),
                linear.elements(2 * linear_keys + linear_values, forward=0, backward=1),
            ),
            formula="6KV a token and value head, twice in backward; q, k, v in, o out; backward q, k, v, do in, "
            "dq, dk, dv out; states never leave the chip, which no chunked kernel does",
        ),
    }


def _memory_bound(job: Job) -> dict[str, Floor]:
    attention, linear = job.passes("full_attention"), job.passes("linear_attention")
    layers = attention + linear
    # The last residual sum of a layer is not made again: torch's checkpointing stops before it.
    first_sums = layers
    second_sums = Passes(forward=layers.backward, backward=layers.backward)
    last_norm = Passes(forward=1, backward=1)
    hidden = job.config["hidden_size"]
    queries = job.width("num_attention_heads", "head_dim")
    heads = queries + job.width("num_key_value_heads", "head_dim")
    keys = job.width("linear_num_key_heads", "linear_key_head_dim")
    values = job.width("linear_num_value_heads", "linear_value_head_dim")
    rotary = (job.config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    return {
        "convolution": Floor(
            memory_bytes=job.moved(linear.elements(2 * keys + values, forward=2, backward=3)),
            formula="width of q, k, v x 2 a forward, 3 a backward",
        ),
        "norm": Floor(
            memory_bytes=job.moved(
                (layers + layers + last_norm).elements(hidden, forward=2, backward=3),
                attention.elements(heads, forward=2, backward=3),
                linear.elements(2 * keys, forward=2, backward=3),
                linear.elements(values, forward=3, backward=5),
            ),
            formula="RMSNorm (two a layer and one), norms of q and k: width x 2 a forward, 3 a backward; gated 3, 5",
        ),
        "element-wise": Floor(
            memory_bytes=job.moved(
                layers.elements(job.config["intermediate_size"], forward=3, backward=5),
                (first_sums + second_sums).elements(hidden, forward=3, backward=3),
                attention.elements(heads * rotary, forward=2, backward=2),
                attention.elements(queries if values else 0, forward=3, backward=5),  # Qwen3.5's output gate
            ),
            formula="SwiGLU and attention's output gate: width x 3 a forward, 5 a backward; residual sums (two a "
            "layer) 3 and 3; rotary 2 and 2 of the rotated part",
        ),
    }


def _per_step(job: Job) -> dict[str, Floor]:
    hidden, vocabulary, ranks = job.config["hidden_size"], job.config["vocab_size"], job.ranks
    outside = hidden * vocabulary * (1 if job.config.get("tie_word_embeddings") else 2)
    gathered = (2 * (job.parameters - outside) + outside) * job.step.micro_batches if ranks > 1 else 0
    reduced = job.trained if ranks > 1 else 0
    dense_gradient = hidden * vocabulary if job.trained == job.parameters else 0
    return {
        "loss and softmax": Floor(
            memory_bytes=BYTES * 2.0 * (job.step.tokens.target or 0) * vocabulary,
            formula="logits of target tokens read once, their gradient written once",
        ),
        "embedding and index": Floor(
            memory_bytes=job.moved(3 * hidden) + BYTES * dense_gradient,
            formula="rows read and written, their gradients read; the dense gradient written once",
        ),
        "optimizer": Floor(
            memory_bytes=BYTES * 8.0 * job.trained / ranks,
            formula="AdamW reads w, g, m, v and writes w, m, v; the norm reads g once; all bf16",
        ),
        "FSDP copy": Floor(
            memory_bytes=BYTES * 2.0 * (gathered * (1 + 1 / ranks) + reduced),
            formula="what FSDP2 copies: shards into the all-gathers and their results out (layers in forward and in "
            "backward, embedding and head once, each micro-batch), gradients into one reduce-scatter",
        ),
        "communication": Floor(
            sent_bytes=BYTES * (gathered + reduced) * (ranks - 1) / ranks,
            formula="these all-gathers and the reduce-scatter: (ranks - 1) / ranks of their bytes, over the link",
        ),
    }


def known_flops(config: Mapping[str, Any], layers: Iterable[int] | None = None) -> ModelFlops:
    """FLOPs of all or some layers of a model.

    Raises:
        SystemExit: there is no formula for it.
    """
    found = model_flops(config, head_on="target", layers=None if layers is None else frozenset(layers))
    if found is None:
        raise SystemExit(f"no FLOPs are known for model_type {config.get('model_type')!r}")
    return found


def checkpointed_layers(config: Mapping[str, Any], step: StepRecord) -> int:
    """How many layers, counted from the first as trainer/memory/recompute.py does, explain the step's recomputed FLOPs.

    Raises:
        SystemExit: no number does.
    """
    wanted = step.recomputed_flops or 0.0
    for layers in range(config["num_hidden_layers"] + 1):
        flops = known_flops(config, range(layers))
        for parts in (LAYER_PARTS, LAYER_PARTS | {"head"}):  # TRL's head makes its product once more
            cost = flops.recomputed(step.tokens, parts) or 0.0
            if abs(cost - wanted) <= 1e-6 * (step.flops or 1.0):
                return layers
    raise SystemExit("the step's recomputed FLOPs are of no number of whole layers: give --checkpointed")
