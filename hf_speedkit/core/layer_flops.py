"""Forward FLOPs of one decoder layer, from the numbers of a model's configuration.

Per token a linear map of n inputs and m outputs costs 2nm. Attention costs 4 x heads x head_dim for every (query, key)
pair. The recurrences, per token and head:

* gated delta rule (arXiv 2412.06464, equation 10: S' = a S (I - b k k^T) + b v k^T, o = S q), state S [V, K]: three
  products, S k, the rank-one update and S q: 6KV.
* Mamba-2 (arXiv 2405.21060, section 2.1: h' = a h + dt x B^T, y = h C), state h [P, N]: two products, the rank-one
  update and h C: 4PN. Heads of one group share B and C; the products are per head all the same.

The chunked algorithms of today's kernels do more arithmetic than that for the same result; like recompute, the surplus
is the implementation's, not the model's. The depthwise convolution before both costs 2 x width per channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model_type's numbers do not say.

    Args:
        gated: a feed-forward block has three maps (gate, up, down), not two.
        norm_after: a norm stands behind the feed-forward block, so its output is needed again in backward.
        sparse: layers may have experts.
        query_gate: a gate of the output's size is projected together with the query.
        recurrence: of the layers called "linear_attention".
        one_block: a layer is one block (mixer or feed-forward) and not one of each.
    """

    gated: bool = True
    norm_after: bool = False
    sparse: bool = False
    query_gate: bool = False
    recurrence: Literal["delta", "mamba2"] | None = None
    one_block: bool = False


_PLAIN = (
    "llama", "mistral", "qwen2", "qwen3", "cohere2", "gemma", "granite", "ministral", "phi3", "smollm3",
    "ernie4_5", "glm", "ministral3", "olmo", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text",
)  # fmt: skip
_NORM_AFTER = ("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4", "glm4")
_TWO_MAPS = ("arcee", "nemotron", "starcoder2")
_SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "gpt_oss", "granitemoe", "olmoe")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **dict.fromkeys(_PLAIN, Family()),
        **dict.fromkeys(_NORM_AFTER, Family(norm_after=True)),
        **dict.fromkeys(_TWO_MAPS, Family(gated=False)),
        **dict.fromkeys(_SPARSE, Family(sparse=True)),
        "qwen3_5_text": Family(recurrence="delta", query_gate=True),
        "qwen3_5_moe_text": Family(recurrence="delta", query_gate=True, sparse=True),
        "qwen3_next": Family(recurrence="delta", query_gate=True, sparse=True),
        "bamba": Family(recurrence="mamba2"),
        "falcon_h1": Family(recurrence="mamba2"),
        "granitemoehybrid": Family(recurrence="mamba2", sparse=True),
        "nemotron_h": Family(recurrence="mamba2", sparse=True, gated=False, one_block=True),
    }
)
"""Values of `model_type` whose formula is compared with torch's FlopCounterMode in tests/core/test_flops.py."""

_WINDOW_ON_ALL_LAYERS = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Families without `layer_types`: a sliding window, where the configuration has one, covers every layer."""


class MissingNumberError(Exception):
    """The configuration lacks a number, or has one that is not understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlops:
    """Forward FLOPs of one layer or of a block in it, per token unless it says otherwise.

    Args:
        attention: query, key, value and output projections.
        per_pair: softmax attention, per (query, key) pair.
        window: positions a token sees in it; None for all.
        linear_attention: projections of linear attention.
        core: its convolution and recurrence.
        feed_forward: gate, up, router and experts; the output as well where backward needs it again.
        output: the projection at the layer's end, where nothing but the residual sum follows.
    """

    attention: float = 0.0
    per_pair: float = 0.0
    window: int | None = None
    linear_attention: float = 0.0
    core: float = 0.0
    feed_forward: float = 0.0
    output: float = 0.0

    def __add__(self, other: LayerFlops) -> LayerFlops:
        """Two blocks of one layer, of which at most one is softmax attention."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return LayerFlops(window=self.window if other.window is None else other.window, **sums)


_SUMMED = tuple(field.name for field in fields(LayerFlops) if field.name != "window")


def layers_of(config: Mapping[str, object]) -> list[LayerFlops]:
    """Every decoder layer of a model, first layer first.

    Args:
        config: of the text model; its `model_type` is in `FAMILIES`.

    Raises:
        MissingNumberError: a number is missing, or a layer is of an unknown kind.
    """
    family = FAMILIES[str(config["model_type"])]
    return [_layer(config, family, index, kind) for index, kind in enumerate(_kinds(config))]


def head_of(config: Mapping[str, object]) -> float:
    """The map to the vocabulary.

    Raises:
        MissingNumberError: a number is missing.
    """
    return 2.0 * _number(config, "hidden_size") * _number(config, "vocab_size")


def _layer(config: Mapping[str, object], family: Family, index: int, kind: object) -> LayerFlops:
    blocks = []
    if kind in ("full_attention", "sliding_attention", "hybrid"):
        blocks.append(_attention(config, family, windowed=kind == "sliding_attention"))
    if kind in ("linear_attention", "hybrid") and family.recurrence is not None:
        blocks.append(_delta_rule(config) if family.recurrence == "delta" else _mamba2(config))
    if family.one_block and kind in ("mlp", "moe"):
        blocks.append(_feed_forward(config, family, sparse=kind == "moe"))
    if not blocks:
        raise MissingNumberError
    if not family.one_block:
        blocks.append(_feed_forward(config, family, sparse=_is_sparse(config, family, index)))
    return sum(blocks, LayerFlops())


def _kinds(config: Mapping[str, object]) -> Sequence[object]:
    """The kind of every layer, by the names of transformers 5."""
    name = config["model_type"]
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if name == "nemotron_h":  # as many layers as it lists
        if not isinstance(kinds, Sequence):
            raise MissingNumberError
        return kinds
    count = _number(config, "num_hidden_layers")
    if name == "bamba":
        with_attention = config.get("attn_layer_indices") or ()
        if not isinstance(with_attention, Sequence):
            raise MissingNumberError
        return ["full_attention" if index in with_attention else "linear_attention" for index in range(count)]
    if not kinds:
        windowed = name in _WINDOW_ON_ALL_LAYERS and config.get("sliding_window")
        kinds = ["hybrid" if name == "falcon_h1" else "sliding_attention" if windowed else "full_attention"] * count
    if not isinstance(kinds, Sequence) or len(kinds) != count:
        raise MissingNumberError
    return kinds


def _attention(config: Mapping[str, object], family: Family, *, windowed: bool) -> LayerFlops:
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    head_dim = _optional(config, "head_dim") or hidden // heads
    key_value_heads = _optional(config, "num_key_value_heads") or heads
    queries = heads * head_dim * (2 if family.query_gate else 1)
    output = 2.0 * hidden * heads * head_dim
    return LayerFlops(
        attention=2.0 * hidden * (queries + 2 * key_value_heads * head_dim) + (0.0 if family.one_block else output),
        output=output if family.one_block else 0.0,
        per_pair=4.0 * heads * head_dim,
        window=_number(config, "sliding_window") if windowed else None,
    )


def _delta_rule(config: Mapping[str, object]) -> LayerFlops:
    hidden = _number(config, "hidden_size")
    value_heads, value_dim = _number(config, "linear_num_value_heads"), _number(config, "linear_value_head_dim")
    key_dim = _number(config, "linear_key_head_dim")
    keys, values = _number(config, "linear_num_key_heads") * key_dim, value_heads * value_dim
    convolved = 2 * keys + values
    return LayerFlops(
        # qkv, output gate z, decay and write strength per value head, output projection
        linear_attention=2.0 * hidden * (convolved + values + 2 * value_heads + values),
        core=6.0 * value_heads * key_dim * value_dim + 2.0 * _number(config, "linear_conv_kernel_dim") * convolved,
    )


_MAMBA2_NAMES = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_NEMOTRON_NAMES = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")


def _mamba2(config: Mapping[str, object]) -> LayerFlops:
    hidden = _number(config, "hidden_size")
    names = _NEMOTRON_NAMES if config["model_type"] == "nemotron_h" else _MAMBA2_NAMES
    heads, head_dim, groups, state, width = (_number(config, name) for name in names)
    inner = heads * head_dim
    convolved = inner + 2 * groups * state
    return LayerFlops(
        # x, B and C, output gate, time step per head, output projection. mamba_ssm's fused kernel makes the last one
        # inside, so checkpointing makes it again even where it ends a layer.
        linear_attention=2.0 * hidden * (convolved + inner + heads + inner),
        core=4.0 * inner * state + 2.0 * width * convolved,
    )


def _feed_forward(config: Mapping[str, object], family: Family, *, sparse: bool) -> LayerFlops:
    """One feed-forward block, of its active experts where it is sparse."""
    hidden = _number(config, "hidden_size")
    # Without experts, granitemoehybrid's block is the one it calls shared.
    shared_is_a_block = config["model_type"] == "granitemoehybrid"
    if not sparse:
        name = "shared_intermediate_size" if shared_is_a_block else "intermediate_size"
        return _block(family, 2.0 * hidden * _number(config, name))
    maps = 3 if family.gated else 2
    experts = _first_of(config, "num_experts", "num_local_experts", "n_routed_experts")
    width = _optional(config, "moe_intermediate_size") or _number(config, "intermediate_size")
    inside = _optional(config, "moe_latent_size") or hidden
    routed = 2.0 * hidden * experts + maps * 2.0 * inside * width * _number(config, "num_experts_per_tok")
    into_latent_and_back = 0.0 if inside == hidden else 2 * 2.0 * hidden * inside
    found = LayerFlops(feed_forward=routed + into_latent_and_back)
    if shared_is_a_block:
        return found + _block(family, 2.0 * hidden * _number(config, "shared_intermediate_size"))
    if family.one_block:
        return found + _block(family, 2.0 * hidden * _number(config, "moe_shared_expert_intermediate_size"))
    shared = _optional(config, "shared_expert_intermediate_size")
    gate = 2.0 * hidden
    return found + LayerFlops(feed_forward=maps * 2.0 * hidden * shared + gate) if shared else found


def _block(family: Family, one: float) -> LayerFlops:
    """A dense feed-forward block of maps that cost `one` each, the last of them at the layer's end."""
    maps = 3 if family.gated else 2
    if family.norm_after:
        return LayerFlops(feed_forward=maps * one)
    return LayerFlops(feed_forward=(maps - 1) * one, output=one)


def _is_sparse(config: Mapping[str, object], family: Family, layer: int) -> bool:
    if not family.sparse or not _first_of(config, "num_experts", "num_local_experts"):
        return False
    dense_layers = config.get("mlp_only_layers") or ()
    every = _optional(config, "decoder_sparse_step") or 1
    return (layer + 1) % every == 0 and not (isinstance(dense_layers, Sequence) and layer in dense_layers)


def _first_of(config: Mapping[str, object], *keys: str) -> int:
    """The first of these numbers that is there and not 0; else 0."""
    return next((value for value in (_optional(config, key) for key in keys) if value), 0)


def _number(config: Mapping[str, object], key: str) -> int:
    value = _optional(config, key)
    if value is None:
        raise MissingNumberError
    return value


def _optional(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
