"""What is recomputed is read off the model as it trains: which layers, how, and the head."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.debug_utils import DebugOption
from transformers.utils.import_utils import enable_tf32

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.flops import LAYER_PARTS, model_flops, pairs_in_window
from hf_speedkit.core.records import TokenCounts
from hf_speedkit.trainer.metrics.device_peak import training_dtype
from hf_speedkit.trainer.metrics.mfu_inputs import (
    FlopsInputs,
    RecomputedFlops,
    decoder_layers,
    flops_of,
    is_checkpointed,
)
from hf_speedkit.trainer.metrics.notices import missing_notices, notices, slowing_switches
from hf_speedkit.trainer.throughput_callback import ThroughputCallback

TOKENS = 12
COUNTS = TokenCounts(slots=TOKENS, real=TOKENS, target=5, documents=1, squared_lengths=TOKENS**2)


def tiny():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen3Config(**sizes, vocab_size=50, num_key_value_heads=2, head_dim=16, pad_token_id=0)
    config._attn_implementation = "eager"
    return Qwen3ForCausalLM(config).train()


def counted(model):
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(TOKENS)[None], use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def formula_of(model):
    return model_flops(model.config.to_dict(), causal=False)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_only_checkpointed_layers_are_computed_once_more(every, monkeypatch):
    model = tiny()
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
    formula = formula_of(model)
    again = RecomputedFlops(model, formula, None)
    # Eager attention computes all L x L pairs, which the counter sees; the metric counts the causal half.
    monkeypatch.setattr("hf_speedkit.trainer.metrics.mfu_inputs.model_flops", partial(model_flops, causal=False))
    assert counted(model) == formula.training([TOKENS]) + again(COUNTS)


def test_layers_that_are_switched_during_training_are_followed():
    model = tiny()
    model.activation_checkpointing_enable({"use_reentrant": False})
    again = RecomputedFlops(model, formula_of(model), None)
    all_layers = again(COUNTS)
    for layer in decoder_layers(model)[:2]:
        layer.gradient_checkpointing = False
    assert again(COUNTS) == pytest.approx(all_layers / 2)
    for layer in decoder_layers(model):
        layer.gradient_checkpointing = False
    assert again(COUNTS) == 0


def test_fsdps_wrapper_counts_as_checkpointing():
    model = tiny()
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    assert [is_checkpointed(layer) for layer in decoder_layers(model)] == [False, True, False, False]
    formula = formula_of(model)
    assert RecomputedFlops(model, formula, None)(COUNTS) > 0


def test_a_policy_of_ones_own_is_not_guessed_but_taken_at_its_word():
    model = tiny()
    keeps_products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": keeps_products})
    formula = formula_of(model)
    assert RecomputedFlops(model, formula, None)(COUNTS) is None
    told = RecomputedFlops(model, formula, {"attention"})
    assert told(COUNTS) == flops_of(model).recomputed(COUNTS, {"attention"})
    assert told(COUNTS) < formula.recomputed(COUNTS, LAYER_PARTS)


def test_a_head_that_makes_its_product_again_is_counted_with_and_without_checkpointing():
    model = tiny()
    formula = replace(formula_of(model), head_on="target", head_again=True)
    head = 2 * 32 * 50 * COUNTS.target
    assert RecomputedFlops(model, formula, None)(COUNTS) == head
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert RecomputedFlops(model, formula, None)(COUNTS) == head + flops_of(model).recomputed(COUNTS, LAYER_PARTS)


@pytest.mark.parametrize("kind", [Qwen3ForSequenceClassification, Qwen3Model])
def test_a_head_that_is_not_the_vocabularys_is_counted_as_it_is(kind, monkeypatch):
    monkeypatch.setattr("hf_speedkit.trainer.metrics.mfu_inputs.model_flops", partial(model_flops, causal=False))
    model = kind(tiny().config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(TOKENS)[None], use_cache=False)[0].sum().backward()
    assert counter.get_total_flops() == flops_of(model).training([TOKENS])


class Adapter(torch.nn.Module):
    """Stands for peft's LoRA beside a frozen linear map or embedding."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base
        if isinstance(base, torch.nn.Embedding):
            self.lora_embedding_A = torch.nn.Parameter(torch.randn(base.num_embeddings, rank))
            self.lora_embedding_B = torch.nn.Parameter(torch.randn(rank, base.embedding_dim))
        else:
            self.lora_A = torch.nn.Linear(base.in_features, rank, bias=False)
            self.lora_B = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        if isinstance(self.base_layer, torch.nn.Embedding):
            return self.base_layer(x) + self.lora_embedding_A[x] @ self.lora_embedding_B
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Saved(torch.nn.Module):
    """Stands for peft's modules_to_save: a trained copy in the place of the frozen original."""

    def __init__(self, original):
        super().__init__()
        self.original_module = original
        self.modules_to_save = copy.deepcopy(original).requires_grad_(True)

    def forward(self, x):
        return self.modules_to_save(x)


def lora(*also, kind="LORA", layers=range(4), **more):
    model = tiny().requires_grad_(False)
    for index in layers:
        attention = model.model.layers[index].self_attn
        attention.q_proj, attention.v_proj = Adapter(attention.q_proj), Adapter(attention.v_proj)
        for name in ("gate_proj", "down_proj"):
            if name in also:
                setattr(model.model.layers[index].mlp, name, Adapter(getattr(model.model.layers[index].mlp, name)))
    if "head" in also:
        model.lm_head = Saved(model.lm_head)
    if "embedding" in also:
        model.model.embed_tokens = Saved(model.model.embed_tokens)
    if "adapter of the embedding" in also:
        model.model.embed_tokens = Adapter(model.model.embed_tokens)
    if "norms" in also:
        model.model.norm.weight.requires_grad_(True)
    if "embedding" not in also:
        model.enable_input_require_grads()  # as the Trainer does under activation checkpointing
    model.peft_config = {"default": SimpleNamespace(peft_type=kind, **more)}
    return model


@pytest.mark.parametrize(
    "also", [(), ("head",), ("embedding",), ("head", "embedding"), ("adapter of the embedding",), ("norms",)]
)
def test_what_lora_trains_besides_its_maps_costs_what_the_counter_sees(also, monkeypatch):
    monkeypatch.setattr("hf_speedkit.trainer.metrics.mfu_inputs.model_flops", partial(model_flops, causal=False))
    model = lora(*also)
    assert counted(model) == flops_of(model).training([TOKENS])


def only(name):
    model = tiny().requires_grad_(False)
    model.get_submodule(name).requires_grad_(True)
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: lora(kind="PROMPT_TUNING"),
        lambda: lora(kind="LOHA"),
        lambda: lora(target_parameters=["mlp.experts.gate_up_proj"]),
        lambda: lora(layers=[3]),  # backward ends there
        lambda: tiny().requires_grad_(False),
        lambda: only("lm_head"),
    ],
    ids=["prompts", "another product", "weights of experts", "last layer only", "all frozen", "head only"],
)
def test_ways_of_training_that_the_formula_does_not_know_have_no_flops(model):
    assert flops_of(model()) is None


def with_image_tower():
    """A composed model: CLIP, a projection, and the text model of `tiny`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config=tiny().config, vision_config=CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    )
    config._attn_implementation = "eager"
    return LlavaForConditionalGeneration(config).train()


def frozen(*names):
    def freeze(model):
        for name, weight in model.named_parameters():
            weight.requires_grad_(not any(part in name for part in names))

    return freeze


def lora_everywhere(model):
    model.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        if isinstance(linear, torch.nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Adapter(linear))
    model.enable_input_require_grads()
    model.peft_config = {"default": SimpleNamespace(peft_type="LORA")}


def sparse():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
    config = Qwen3MoeConfig(**sizes, **experts, vocab_size=50, num_key_value_heads=2, head_dim=16, pad_token_id=0)
    config._attn_implementation = config._experts_implementation = "eager"  # the counter does not see grouped products
    return Qwen3MoeForCausalLM(config).train()


def asking(change):
    def changed(model):
        change(model)
        model.enable_input_require_grads()

    return changed


LOWER = ("embed_tokens", "layers.0.", "layers.1.")


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        frozen("mlp.gate.", "router"),
        frozen("experts"),
        frozen("self_attn.k_proj", "mlp.up_proj", "layers.2.self_attn.o_proj"),
        frozen("self_attn"),
        frozen(*LOWER),
        frozen(*LOWER, "self_attn.q_proj", "lm_head"),
        asking(frozen(*LOWER)),
        frozen("layers.0.", "layers.1."),
    ],
    ids=["routers", "experts", "some maps", "attention", "lower layers", "lower layers and maps", "input asked",
         "layers under trained embeddings"],
)  # fmt: skip
@pytest.mark.parametrize("make", [tiny, sparse])
def test_what_frozen_weights_save_of_a_full_fine_tune_is_what_the_counter_sees(make, change, checkpointed, monkeypatch):
    monkeypatch.setattr("hf_speedkit.trainer.metrics.mfu_inputs.model_flops", partial(model_flops, causal=False))
    model = make()
    change(model)
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    flops = flops_of(model)
    assert counted(model) == flops.training([TOKENS]) + RecomputedFlops(model, flops, None)(COUNTS)
    assert flops.training([TOKENS]) == flops(COUNTS)


def test_lower_layers_that_are_frozen_save_their_attention_inside_a_window_as_well(monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = MistralConfig(**sizes, vocab_size=50, num_key_value_heads=2, head_dim=16, sliding_window=5)
    config._attn_implementation = "eager"
    model = MistralForCausalLM(config).train()
    frozen(*LOWER)(model)
    pairs = int(pairs_in_window(TOKENS, 5))
    assert flops_of(model).training([TOKENS]) == flops_of(model)(replace(COUNTS, window_pairs=pairs))
    monkeypatch.setattr("hf_speedkit.trainer.metrics.mfu_inputs.model_flops", partial(model_flops, causal=False))
    assert counted(model) == flops_of(model).training([TOKENS])


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        frozen(),
        frozen("vision_tower"),
        frozen("vision_tower", "projector", "embed_tokens", "post_attention_layernorm"),
        frozen("lm_head"),
        lora_everywhere,
    ],
    ids=["all trained", "tower frozen", "embeddings and norms frozen", "head frozen", "lora everywhere"],
)
def test_v71_text_costs_a_composed_model_what_the_counter_sees(change, checkpointed, monkeypatch):
    monkeypatch.setattr("hf_speedkit.trainer.metrics.mfu_inputs.model_flops", partial(model_flops, causal=False))
    model = with_image_tower()
    change(model)
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    flops = flops_of(model)
    assert counted(model) == flops.training([TOKENS]) + RecomputedFlops(model, flops, None)(COUNTS)


def test_a_frozen_embedding_that_is_the_head_as_well_has_no_gradient_of_the_head(monkeypatch):
    monkeypatch.setattr("hf_speedkit.trainer.metrics.mfu_inputs.model_flops", partial(model_flops, causal=False))
    config = tiny().config
    config.tie_word_embeddings = True
    model = Qwen3ForCausalLM(config)
    model.model.embed_tokens.weight.requires_grad_(False)
    assert counted(model) == flops_of(model).training([TOKENS])


def test_doras_norms_of_weights_are_nothing_that_hfu_knows():
    model = lora(use_dora=True)
    assert RecomputedFlops(model, flops_of(model), None)(COUNTS) == 0
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert RecomputedFlops(model, flops_of(model), None)(COUNTS) is None


def test_only_the_adapters_of_checkpointed_layers_are_counted():
    model = lora("head")
    one_layer = 2 * (32 * 2 + 2 * 64) + 2 * (32 * 2 + 2 * 32)  # of query and value
    assert flops_of(model).adapter_per_token == 4 * one_layer
    assert flops_of(model, layers=[0, 2]).adapter_per_token == 2 * one_layer


@pytest.mark.parametrize("also", [(), ("gate_proj",), ("down_proj",), ("gate_proj", "down_proj")], ids="+".join)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_beside_lora_is_what_the_counter_sees(also, reentrant, monkeypatch):
    monkeypatch.setattr("hf_speedkit.trainer.metrics.mfu_inputs.model_flops", partial(model_flops, causal=False))
    model = lora(*also)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    flops = flops_of(model)
    assert counted(model) == flops.training([TOKENS]) + RecomputedFlops(model, flops, None)(COUNTS)


def test_lora_on_the_down_projection_has_it_computed_again_but_not_the_adapters_last_map():
    def again(*also):
        model = lora(*also)
        model.activation_checkpointing_enable({"use_reentrant": False})
        return RecomputedFlops(model, flops_of(model), None)(COUNTS)

    down, first = 2 * 24 * 32, 2 * 24 * 2  # multiply-adds of a token: 24 inputs, 32 outputs, rank 2
    assert again("down_proj") - again() == 4 * TOKENS * (down + first)


def test_several_gpus_in_one_process_have_no_mfu_and_are_told_how_to_start():
    args = SimpleNamespace(n_gpu=2, report_to=["wandb"], device=torch.device("cpu"))
    found = FlopsInputs().completed(args, tiny())
    assert found == FlopsInputs()  # FLOPs of all devices over one device's peak would be twice too much
    (line,) = missing_notices(args, attached=True, inputs=found)
    assert "accelerate launch --num_processes 2" in line
    model, args = tiny(), SimpleNamespace(n_gpu=1, report_to=["wandb"], device=torch.device("cpu"))
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "lm_head": 1}
    found = FlopsInputs().completed(args, model)
    assert found.flops is None
    (line,) = missing_notices(args, attached=True, inputs=found)
    assert "layers lie on 2 devices" in line


def test_v81_a_wandb_that_is_switched_off_is_said(monkeypatch):
    args = SimpleNamespace(n_gpu=1, report_to=["wandb"], device=torch.device("cpu"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    (line,) = missing_notices(args, attached=True, inputs=FlopsInputs())
    assert line.startswith("WANDB_MODE=disabled: nothing reaches wandb")


def test_products_in_fp8_are_measured_against_the_peak_of_fp8(monkeypatch):
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp8")
    assert training_dtype(SimpleNamespace(bf16=False, fp16=False), tiny()) == "float8"


@pytest.mark.parametrize("new_setting", [True, False])
def test_fp32_weights_have_the_peak_of_tf32_however_that_was_switched_on(new_setting):
    args = SimpleNamespace(bf16=False, fp16=False)
    assert training_dtype(args, tiny()) == "float32"
    try:
        if new_setting:
            enable_tf32(True)  # transformers' tf32=True
        else:
            torch.set_float32_matmul_precision("high")
        assert training_dtype(args, tiny()) == "tf32"
    finally:
        if new_setting:
            torch.backends.fp32_precision = "none"
        else:
            torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("given", "mend"),
    [
        *(({"peak_tflops": peak}, "in TFLOP/s of one device") for peak in ("989", -1, 0, float("inf"))),
        ({"flops": 6e9}, "counts.real for example"),
        ({"recompute": "attention"}, "some of "),
        ({"recompute": ("mlp",)}, "some of "),
        *(({"count_launches_every": every}, "0 for never") for every in (-1, None, 1.5)),
        *(({"sinks": sinks}, "JsonlSink") for sinks in ("steps.jsonl", None, [3])),
    ],
    ids=str,
)
def test_what_a_callback_cannot_use_is_refused_where_it_is_given(given, mend):
    """At the first log, behind a step of training, most of it ended in a TypeError."""
    with pytest.raises(ConfigurationError, match=mend):
        ThroughputCallback(**given)


@pytest.mark.parametrize(
    ("given", "said"), [(1979.0, True), (989.5e12, True), (378.0, True), (None, False), (900.0, False)]
)
def test_v71_a_peak_that_counts_sparsity_or_is_no_tflops_is_doubted(monkeypatch, given, said):
    monkeypatch.setattr("hf_speedkit.trainer.metrics.mfu_inputs.device_peak_tflops", lambda args, model: 989.5)
    args = SimpleNamespace(n_gpu=1, report_to=["wandb"], device=torch.device("cpu"))
    lines = missing_notices(args, attached=True, inputs=FlopsInputs(peak_tflops=given).completed(args, tiny()))
    assert [line for line in lines if "dense peak of this GPU in the training dtype is 990" in line] == list(lines)
    assert len(lines) == said


@pytest.mark.parametrize(
    ("variables", "settings", "said"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {}, "CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, {}, "compared over all ranks"),
        ({"NCCL_P2P_DISABLE": "1"}, {}, "through host memory"),
        ({}, {"torch_empty_cache_steps": 1}, "torch_empty_cache_steps=1"),
        ({}, {"include_num_input_tokens_seen": "all"}, "a gather and a read of the device"),
        ({}, {"debug": [DebugOption.UNDERFLOW_OVERFLOW]}, "underflow_overflow"),
        ({"CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, {"torch_empty_cache_steps": 100}, None),
    ],
)
def test_v61_v62_what_slows_every_step_is_said_with_its_cost(variables, settings, said):
    values = {"debug": [], "torch_empty_cache_steps": None, "device": torch.device("cuda")}
    values |= {"include_num_input_tokens_seen": "no", **settings}
    lines = slowing_switches(SimpleNamespace(**values), variables)
    assert len(lines) == (said is not None)
    assert all(said in line for line in lines)


def test_v61_anomaly_detection_is_said_on_any_device():
    args = SimpleNamespace(debug=[], device=torch.device("cpu"), n_gpu=1, report_to=["mlflow"])
    assert notices(args, attached=True, inputs=FlopsInputs()) == ()
    torch.autograd.set_detect_anomaly(True, check_nan=False)  # the context manager warns, as it should
    try:
        (line,) = notices(args, attached=True, inputs=FlopsInputs())
    finally:
        torch.autograd.set_detect_anomaly(False)
    assert "anomaly detection" in line
