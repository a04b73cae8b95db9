"""Model FLOPs against torch's FlopCounterMode on tiny models, and against hand counts.

The counter is exact with eager attention, eager experts and an unfused head (shared/facts/fsdp2.md 6); it counts the
full T x T of eager attention, so the comparison uses causal=False. It cannot see the recurrence and convolution of a
GatedDeltaNet or of Mamba-2 as the formula means them (the torch fallbacks do chunked products), so a hybrid is compared
by its linear maps, heads and softmax attention alone, with the recurrence replaced by something that costs nothing.
"""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_speedkit.core.flops import LAYER_PARTS, REENTRANT_PARTS, ModelFlops, model_flops
from hf_speedkit.core.layer_flops import FAMILIES
from hf_speedkit.core.records import TokenCounts

TOKENS = 12
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_expand": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
THREE_POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
IMAGE_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
SHARED = {"shared_expert_intermediate_size": 8}
MORE = {
    "mistral": {"sliding_window": 64},
    "gemma2": {"sliding_window": 64, "head_dim": 16},
    "gemma3_text": {"sliding_window": 64, "head_dim": 16},
    "qwen3": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "mixtral": LOCAL_EXPERTS,
    "gpt_oss": {**LOCAL_EXPERTS, "head_dim": 16},
    "granitemoe": LOCAL_EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, **SHARED},
    "qwen3_moe": {**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "qwen2_vl_text": THREE_POSITIONS,
    "qwen2_5_vl_text": THREE_POSITIONS,
    "qwen3_vl_text": {**THREE_POSITIONS, "head_dim": 8},
    "qwen3_vl_moe_text": {**THREE_POSITIONS, **EXPERTS, "head_dim": 8},
    "ministral3": {"head_dim": 16},
    "qwen3_5_text": {**DELTA_RULE, "head_dim": 16},
    "qwen3_5_moe_text": {**DELTA_RULE, **EXPERTS, **SHARED},
    "qwen3_next": {**DELTA_RULE, **EXPERTS, **SHARED, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 48},
    "granitemoehybrid": {
        **MAMBA2,
        **LOCAL_EXPERTS,
        "shared_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 6,
        "conv_kernel": 4,
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 12,
    },
}


def tiny(family, **more):
    composed = family.removesuffix("_text") if "_vl_" in family else None  # no model without its image tower
    values = {**SIZES, **MORE.get(family, {}), **more}
    config = CONFIG_MAPPING[composed](text_config=values, vision_config=IMAGE_TOWER) if composed else None
    config = CONFIG_MAPPING[family](**values) if config is None else config
    config._attn_implementation = "eager"
    if FAMILIES[family].sparse:
        config._experts_implementation = "eager"
    torch.manual_seed(0)
    return (AutoModelForImageTextToText if composed else AutoModelForCausalLM).from_config(config)


def without_recurrence(model, monkeypatch):
    """Let convolution and recurrence cost nothing; shapes and gradients stay as they are."""
    modeling = sys.modules[type(model).__module__]

    def convolution(x, *arguments, **keywords):
        return x

    def delta_rule(query, key, value, **keywords):
        reach = query.sum((-1, -2)) + key.sum((-1, -2)) + keywords["g"].sum(-1) + keywords["beta"].sum(-1)
        return value * reach[..., None, None], None

    def mamba2(x, dt, a, b, c, **keywords):
        return x * (b.sum((-1, -2)) + c.sum((-1, -2)) + dt.sum(-1))[..., None, None]

    monkeypatch.setattr(modeling, "causal_conv1d_fn", convolution)
    for name, stand_in in (("torch_chunk_gated_delta_rule", delta_rule), ("mamba2_chunk_scan", mamba2)):
        if hasattr(modeling, name):
            monkeypatch.setattr(modeling, name, stand_in)


def counted(model, lengths):
    """FLOPs of forward and backward by torch's counter, one document after the other."""
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            ids = torch.arange(length)[None] % SIZES["vocab_size"]
            model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def formula_of(family, model, monkeypatch):
    """The formula of a model as eager attention computes it, without the recurrence the counter cannot see."""
    formula = model_flops(model.config.to_dict(), causal=False)
    if FAMILIES[family].recurrence is None:
        return formula
    without_recurrence(model, monkeypatch)
    return replace(formula, core_per_token=0.0)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_formula_and_recompute_equal_the_flop_counter(family, monkeypatch):
    model = tiny(family)
    formula = formula_of(family, model, monkeypatch)
    # The first layer's input needs a gradient (the embedding is trained), so backward is exactly twice forward.
    assert counted(model, [TOKENS]) == formula.training([TOKENS])
    model.train().activation_checkpointing_enable({"use_reentrant": False})
    if family == "nemotron_h":
        # Without mamba_ssm's kernel the last projection of a Mamba-2 layer is a map of its own, not made again.
        last = 2 * 64 * 32
        formula = replace(
            formula,
            delta_linear_per_token=formula.delta_linear_per_token - last,
            feed_forward_output_per_token=formula.feed_forward_output_per_token + last,
        )
    flops = counted(model, [TOKENS])
    assert flops == of_one_document(formula, LAYER_PARTS)
    assert flops > formula.training([TOKENS])


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("granitemoehybrid", {"num_local_experts": 0}),  # granite-4.0-h-micro has none
        ("nemotron_h", {"moe_latent_size": None}),
        ("falcon_h1", {"mamba_d_ssm": None}),
    ],
)
def test_variants_of_a_family_equal_the_flop_counter(family, more, monkeypatch):
    model = tiny(family, **more)
    formula = formula_of(family, model, monkeypatch)
    assert counted(model, [TOKENS]) == formula.training([TOKENS])


@pytest.mark.parametrize("recurrence", ["delta", "mamba2"])
def test_the_recurrences_cost_what_the_textbook_form_costs(recurrence):
    heads, values, keys = 4, 8, 6  # of Mamba-2: heads, head_dim and state size
    state, k = torch.randn(heads, values, keys), torch.randn(heads, keys, 1)
    v, q = torch.randn(heads, values, 1), torch.randn(heads, keys, 1)
    with FlopCounterMode(display=False) as counter:
        write = v if recurrence == "mamba2" else v - state @ k
        state = state + write @ k.mT
        _ = state @ q
    if recurrence == "mamba2":
        config = {**SIZES, **MAMBA2, "model_type": "bamba", "mamba_n_heads": heads, "mamba_d_head": values}
        formula = model_flops({**config, "num_hidden_layers": 1, "mamba_n_groups": 1})
        convolution = 2 * 4 * (heads * values + 2 * keys)
    else:
        sizes = {"linear_num_value_heads": heads, "linear_value_head_dim": values, "linear_key_head_dim": keys}
        config = {**SIZES, **DELTA_RULE, **sizes, "model_type": "qwen3_5_text"}
        formula = model_flops({**config, "num_hidden_layers": 1, "layer_types": ["linear_attention"]})
        convolution = 2 * 4 * (2 * 2 * keys + heads * values)
    assert formula.core_per_token == counter.get_total_flops() + convolution
    only_linear = ModelFlops(linear_per_token=0, head_per_token=0, core_per_token=formula.core_per_token)
    assert only_linear.training([1024]) == only_linear.training([256] * 4)


@pytest.mark.parametrize("lengths", [(TOKENS,), (3, 11, 5, 8), (1,)])
def test_several_documents_cost_the_sum_of_their_squares(lengths):
    model = tiny("qwen3")
    formula = model_flops(model.config.to_dict(), causal=False)
    assert counted(model, lengths) == formula.training(lengths)


def test_v71_attention_counts_squared_document_lengths_and_not_the_row():
    formula = model_flops(tiny("llama").config.to_dict(), causal=False)
    packed = formula.training([256] * 4)
    one = formula.training([1024])
    per_pair = 3 * formula.per_pair
    assert one - packed == per_pair * (1024**2 - 4 * 256**2)
    assert 4 * 256**2 == 262_144


@pytest.mark.parametrize("length", [1, 2, 7, 100])
@pytest.mark.parametrize("window", [1, 5, 64])
def test_causal_pairs_are_those_a_mask_leaves(length, window):
    mask = torch.ones(length, length).tril()
    banded = mask.triu(1 - window)
    full = ModelFlops(linear_per_token=0, head_per_token=0, per_pair=1.0)
    sliding = ModelFlops(linear_per_token=0, head_per_token=0, per_pair_in_window=((window, 1.0),))
    assert full.training([length]) == 3 * mask.sum()
    assert sliding.training([length]) == 3 * banded.sum()


def test_counted_tokens_give_the_same_as_the_lengths():
    formula = model_flops(tiny("qwen3_5_text").config.to_dict())
    lengths = (3, 11, 5, 8)
    counts = TokenCounts(slots=64, real=27, target=9, documents=4, squared_lengths=sum(n * n for n in lengths))
    assert formula(counts) == pytest.approx(formula.training(lengths), rel=1e-12)


def test_padding_costs_nothing():
    formula = model_flops(tiny("llama").config.to_dict())
    counts = [TokenCounts(slots=slots, real=27, target=9, documents=4, squared_lengths=219) for slots in (27, 640)]
    assert formula(counts[0]) == formula(counts[1])


@pytest.mark.parametrize("missing", ["real", "squared_lengths"])
def test_unknown_counts_give_no_flops(missing):
    known = {"slots": 9, "real": 9, "target": 3, "documents": 1, "squared_lengths": 81}
    formula = model_flops(tiny("llama").config.to_dict())
    assert formula(TokenCounts(**known)) is not None
    assert formula(TokenCounts(**{**known, missing: None})) is None


def test_a_sliding_window_is_not_guessed_from_the_squared_lengths():
    formula = model_flops(tiny("mistral").config.to_dict())
    assert formula(TokenCounts(slots=9, real=9, target=3, documents=1, squared_lengths=81)) is None
    assert formula.training([9]) > 0


def test_a_head_on_target_tokens_counts_those_only():
    config = tiny("llama").config.to_dict()
    everywhere, on_target = model_flops(config), model_flops(config, head_on="target")
    saved = 3 * 2 * SIZES["hidden_size"] * SIZES["vocab_size"] * (27 - 9)
    assert everywhere.training([27]) - on_target.training([27], target=9) == saved
    counts = TokenCounts(slots=32, real=27, target=9, documents=1, squared_lengths=729)
    assert on_target(counts) == on_target.training([27], target=9)
    assert on_target(TokenCounts(slots=32, real=27, target=None, documents=1, squared_lengths=729)) is None
    with pytest.raises(ValueError, match="target="):
        on_target.training([27])


class Adapter(torch.nn.Module):
    """A low-rank adapter beside a frozen linear map."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_frozen_weights_skip_their_weight_gradient():
    model = tiny("qwen3")
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name), rank=2))
    # As with gradient checkpointing: the embedding's output asks for a gradient, so no layer's backward is cut short.
    model.enable_input_require_grads()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    formula = model_flops(model.config.to_dict(), causal=False, frozen=True, adapter_parameters=trained)
    assert counted(model, [TOKENS]) == formula.training([TOKENS])


def test_the_27b_geometry_costs_six_flops_per_parameter_and_token_plus_attention():
    config = {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "vocab_size": 248_320,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        },
    }
    formula = model_flops(config)
    # 24.35 billion parameters in the layers, 1.27 billion in the head (shared/facts/gpu.md).
    assert formula.linear_per_token / 2 == pytest.approx(24.35e9, rel=1e-3)
    assert formula.head_per_token / 2 == pytest.approx(1.27e9, rel=1e-2)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "gpt_oss", "hidden_size": 8},
        {"model_type": "llama", "hidden_size": 8},
        {"model_type": "llama", **SIZES, "layer_types": ["full_attention"]},
        {"model_type": "llama", **SIZES, "layer_types": ["something_new"] * 4},
    ],
)
def test_a_model_that_is_not_known_has_no_flops(config):
    assert model_flops(config) is None


def checkpointed(family, monkeypatch, **checkpointing):
    """FLOPs by torch's counter of one document under checkpointing, and the formula."""
    model = tiny(family).train()
    formula = model_flops(model.config.to_dict(), causal=False)
    model.activation_checkpointing_enable(checkpointing)
    return counted(model, [TOKENS]), formula


def of_one_document(formula, parts):
    counts = TokenCounts(slots=TOKENS, real=TOKENS, target=TOKENS, documents=1, squared_lengths=TOKENS**2)
    if formula.per_pair_in_window:  # a document shorter than the window: its layers see every pair
        more = sum(per_pair for _window, per_pair in formula.per_pair_in_window)
        formula = replace(formula, per_pair_in_window=(), per_pair=formula.per_pair + more)
    return formula.training([TOKENS]) + formula.recomputed(counts, parts)


def test_reentrant_checkpointing_computes_the_last_projection_as_well(monkeypatch):
    model = tiny("qwen3").train()
    model.enable_input_require_grads()
    formula = model_flops(model.config.to_dict(), causal=False)
    model.activation_checkpointing_enable({"use_reentrant": True})
    assert counted(model, [TOKENS]) == of_one_document(formula, REENTRANT_PARTS)


@pytest.mark.parametrize(
    ("kept", "recomputed"),
    [
        ([torch.ops.aten.mm.default], {"attention"}),
        ([torch.ops.aten.bmm.default], LAYER_PARTS - {"attention"}),
        ([torch.ops.aten.mm.default, torch.ops.aten.bmm.default], set()),
    ],
    ids=["linear maps kept", "attention kept", "both kept"],
)
def test_recompute_of_selective_checkpointing_equals_the_flop_counter(kept, recomputed, monkeypatch):
    flops, formula = checkpointed(
        "qwen3",
        monkeypatch,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, kept),
    )
    assert flops == of_one_document(formula, recomputed)


def test_recompute_of_the_head_is_on_the_tokens_that_it_scores():
    formula = model_flops(tiny("llama").config.to_dict(), head_on="target")
    counts = TokenCounts(slots=32, real=27, target=9, documents=1, squared_lengths=729)
    assert formula.recomputed(counts, {"head"}) == 2 * SIZES["hidden_size"] * SIZES["vocab_size"] * 9
    assert formula.recomputed(replace(counts, target=None), {"head"}) is None
    assert formula.recomputed(replace(counts, real=None), LAYER_PARTS) is None
    with pytest.raises(ValueError, match="not a part of a model: everything"):
        formula.recomputed(counts, {"everything"})


def test_a_sliding_window_is_counted_where_its_pairs_are():
    formula = model_flops({**tiny("mistral").config.to_dict(), "sliding_window": 4})
    lengths = (3, 11, 5, 8)
    counts = TokenCounts(slots=27, real=27, target=9, documents=4, squared_lengths=219)
    assert formula.window == 4
    assert formula(counts) is None
    pairs = sum(int(torch.ones(n, n).tril().triu(1 - 4).sum()) for n in lengths)
    assert formula(replace(counts, window_pairs=pairs)) == formula.training(lengths)
