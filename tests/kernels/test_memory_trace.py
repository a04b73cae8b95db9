"""What a memory trace counts, against autograd's own hooks, torch's MemTracker and the kernels' shapes."""

from __future__ import annotations

import logging

import pytest
import torch
from support import tiny_hybrid, tiny_llama
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_speedkit.kernels.stand_ins
from hf_speedkit.core.memory_sizes import FP32_MASTER, LORA, PURE_BF16, QLORA, MemoryJob
from hf_speedkit.kernels import memory_trace, saved_tensors
from hf_speedkit.kernels.live_bytes import LiveBytes
from hf_speedkit.kernels.memory_trace import Adapters, TracedSizes, TraceSettings, UntraceableError, trace_memory
from hf_speedkit.kernels.stand_ins import register_attention, stand_ins

T = 256
BF16 = {"dtype": torch.bfloat16}


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def row_of(model, layer):
    """What the model hands to a layer, on real tensors."""
    seen = []
    hook = layer.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    edges = torch.zeros(2, dtype=torch.int32)
    with torch.no_grad():
        model.base_model(
            input_ids=torch.zeros(1, T, dtype=torch.long),
            position_ids=torch.zeros(1, T, dtype=torch.long),
            cu_seq_lens_q=edges,
            cu_seq_lens_k=edges,
            max_length_q=T,
            max_length_k=T,
            use_cache=False,
        )
    hook.remove()
    args, kwargs = seen[0]
    hidden = args[0] if args else kwargs.pop("hidden_states")
    return hidden.clone().requires_grad_(), args[1:], kwargs


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("make", "index"), [(tiny_hybrid, 0), (tiny_hybrid, 3), (tiny_llama, 0)])
def test_what_is_saved_is_what_autograds_hooks_see_on_real_tensors(make, index, fused):
    model = make().to(torch.bfloat16).train()
    traced = trace_memory(model.config, TraceSettings(tokens=T, fused=fused))
    model.config._attn_implementation = register_attention()
    layer = layers_of(model)[index]
    with stand_ins(model, fused=fused):
        hidden, args, kwargs = row_of(model, layer)
        there = [hidden, *layer.parameters(), *layer.buffers(), *kwargs["position_embeddings"]]
        known = {tensor.untyped_storage()._cdata for tensor in there}
        saved = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                saved[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = layer(hidden, *args, **kwargs)
    saved[output.untyped_storage()._cdata] = output.untyped_storage()  # the next layer keeps it
    assert traced.layers[index].saved == sum(storage.nbytes() for storage in saved.values())


def test_the_peak_is_that_of_torchs_mem_tracker():
    with FakeTensorMode():
        config = tiny_hybrid().config
        config._attn_implementation = register_attention()
        peaks = []
        for tracker in ("ours", "torch's"):
            model = AutoModelForCausalLM.from_config(config, **BF16).train()
            with stand_ins(model, fused=True):
                layer = layers_of(model)[0]
                hidden, args, kwargs = row_of(model, layer)
                weights = list(layer.parameters())
                outside = [hidden, *weights, *(t for t in kwargs.values() if isinstance(t, torch.Tensor))]
                outside += list(kwargs["position_embeddings"])
                if tracker == "ours":
                    with LiveBytes(outside) as live:
                        layer(hidden, *args, **kwargs).sum().backward()
                    peaks.append(live.take_highest())
                else:
                    with (mem := MemTracker()):
                        mem.track_external(*outside)
                        layer(hidden, *args, **kwargs).sum().backward()
                    total = mem.get_tracker_snapshot("peak")[hidden.device]["Total"]
                    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in outside}
                    peaks.append(total - sum(storage.nbytes() for storage in storages.values()))
    assert peaks[0] == peaks[1] > 0


H, HV, K, V, D, F = 2, 4, 8, 16, 32, 48
CASES = {
    # every tensor named in saved_tensors.py, in bytes a slot: bf16 two, fp32 four
    "GatedDeltaRule": (
        lambda: (*(t(1, T, H, K) for _ in "qk"), t(1, T, HV, V), t(1, T, HV), t(1, T, HV), 5),
        2 * H * K * 2 + 2 * H * 4 + HV * V * 2 + HV * 4 + HV * 2 + HV * 64 * 2,
    ),
    "Convolution": (lambda: (t(1, D, T), t(D, 4)), D * 2),
    "RmsNorm": (lambda: (t(1, T, D), t(D)), D * 2 + 4),
    "GatedNorm": (lambda: (t(T, D), t(T, D), t(D)), 2 * D * 2 + 4),
    "SiluMultiply": (lambda: (t(T, F), t(T, F)), 2 * F * 2),
    "VarlenAttention": (lambda: (t(T, HV, D), t(T, H, D), t(T, H, D)), 2 * HV * D * 2 + 2 * H * D * 2 + HV * 4),
    "FourBitLinear": (lambda: (t(T, D), F, D), 0),
}


def t(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("name", CASES)
def test_a_stand_in_saves_what_its_kernel_saves_and_gives_gradients_of_the_right_shape(name):
    make, bytes_per_slot = CASES[name]
    inputs = make()
    saved = {}
    weights = {x.untyped_storage()._cdata for x in inputs if isinstance(x, torch.Tensor) and T not in x.shape}

    def pack(tensor):
        if tensor.untyped_storage()._cdata not in weights:
            saved[tensor.untyped_storage()._cdata] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = getattr(saved_tensors, name).apply(*inputs)
    assert sum(saved.values()) == bytes_per_slot * T
    output.sum().backward()
    for x in inputs:
        if isinstance(x, torch.Tensor):
            assert x.grad.shape == x.shape
            assert x.grad.dtype == x.dtype


def test_the_delta_rule_holds_the_states_of_all_chunks_in_backward():
    make, _ = CASES["GatedDeltaRule"]
    with LiveBytes() as live:
        output = saved_tensors.GatedDeltaRule.apply(*make())
        live.take_highest()
        before = live.live
        output.sum().backward()
        extra = live.take_highest() - before
    states = 5 * HV * K * V * 2
    assert extra >= 2 * states  # every chunk's state and its gradient


def config_of(kind, **values):
    common = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    return AutoConfig.for_model(kind, vocab_size=64, num_key_value_heads=2, pad_token_id=0, **common, **values)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_families_of_every_sort_are_traced(kind):
    model = trace_memory(config_of(kind), TraceSettings(tokens=T))
    real = AutoModelForCausalLM.from_config(config_of(kind))
    assert model.parameters == real.num_parameters()
    assert model.trained == model.parameters
    assert len(model.layers) == 4
    assert all(layer.work > layer.saved > model.hidden for layer in model.layers)


def test_layers_of_different_sizes_are_told_apart():
    model = trace_memory(tiny_hybrid().config, TraceSettings(tokens=T))
    assert [layer.kind for layer in model.layers] == ["linear_attention"] * 3 + ["full_attention"]
    assert model.layers[0] == model.layers[2] != model.layers[3]
    assert model.parameters == tiny_hybrid().num_parameters()


def test_tied_embeddings_are_counted_once():
    config = config_of("llama", tie_word_embeddings=True)
    model = trace_memory(config, TraceSettings(tokens=T))
    assert model.tied
    assert model.parameters == AutoModelForCausalLM.from_config(config).num_parameters()
    assert model.head == 64 * 32


def test_fused_layers_save_less():
    config = tiny_hybrid().config
    fused, plain = (trace_memory(config, TraceSettings(tokens=T, fused=fused)).layers[0] for fused in (True, False))
    assert fused.saved < 0.7 * plain.saved


def test_activations_grow_with_the_row_and_nothing_is_left_of_the_trace():
    from transformers.models.qwen3_5 import modeling_qwen3_5

    before = modeling_qwen3_5.causal_conv1d_fn, modeling_qwen3_5.torch_chunk_gated_delta_rule
    config = tiny_hybrid().config
    small, large = (trace_memory(config, TraceSettings(tokens=tokens)).layers[0].saved for tokens in (1024, 4096))
    assert large == pytest.approx(4 * small, rel=1e-3)
    assert (modeling_qwen3_5.causal_conv1d_fn, modeling_qwen3_5.torch_chunk_gated_delta_rule) == before
    assert config._attn_implementation != "speedkit_sizes"


def test_adapters_train_their_own_weights_only_and_can_be_put_on_some_maps():
    config = tiny_llama().config
    every = TracedSizes(config, T, adapters=Adapters(rank=4))(LORA, MemoryJob())
    some = TracedSizes(config, T, adapters=Adapters(rank=4, targets=("q_proj", "v_proj")))(LORA, MemoryJob())
    assert not every.head_trained
    # q and o 32 x 32, k and v 32 x 16, three of the feed-forward block 32 x 48
    assert every.layers[0].trained == 4 * (2 * 64 + 2 * 48 + 3 * 80)
    assert some.layers[0].trained == 4 * (64 + 48)
    assert some.layers[0].parameters == every.layers[0].parameters
    assert some.layers[0].saved < every.layers[0].saved
    fused = TracedSizes(config, T, adapters=Adapters(rank=4, fused=True), mixed_precision=False)(LORA, MemoryJob())
    pefts = TracedSizes(config, T, adapters=Adapters(rank=4), mixed_precision=False)(LORA, MemoryJob())
    # peft's hold the inputs of seven maps in fp32 (six of 32 channels, one of 48), ours those of four in bf16.
    assert pefts.layers[0].saved - fused.layers[0].saved > 3 / 4 * T * 4 * (6 * 32 + 48)


def test_the_precision_follows_setting_and_number_of_gpus():
    sizes = TracedSizes(tiny_llama().config, T)
    bf16, alone = sizes(PURE_BF16, MemoryJob()), sizes(FP32_MASTER, MemoryJob())
    assert alone.hidden == 2 * bf16.hidden  # autocast leaves the residual stream in the weights' precision
    assert alone.layers[0].cast > 0
    assert sizes(FP32_MASTER, MemoryJob(gpus=2)) == bf16  # FSDP computes with bf16 copies
    assert sizes(FP32_MASTER, MemoryJob(gpus=2, fsdp=False)) == alone
    assert sizes(QLORA, MemoryJob()).layers[0].work < sizes(LORA, MemoryJob()).layers[0].work


def test_a_model_that_cannot_run_on_fake_tensors_says_so_once(monkeypatch):
    def narrow(module, query, key, value, mask, **_):
        return value.transpose(1, 2), None

    with pytest.raises(UntraceableError, match=r"\w+Error"):
        trace_memory(config_of("llama", head_dim=-3), TraceSettings(tokens=T))
    monkeypatch.setattr(hf_speedkit.kernels.stand_ins, "_attention", narrow)
    reports = []
    listener = logging.Handler()
    listener.emit = reports.append
    theirs = logging.getLogger("torch._subclasses.fake_tensor")
    theirs.addHandler(listener)
    with pytest.raises(UntraceableError, match="same reduction dim"):
        trace_memory(config_of("llama"), TraceSettings(tokens=T))
    theirs.removeHandler(listener)
    assert reports == []  # torch's own would be twenty lines
    assert not theirs.disabled


def test_a_layer_that_goes_token_by_token_is_given_up_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(memory_trace, "_MOST_OPERATIONS", 500)  # a Mamba's 8,192 slots took more than ten minutes
    with pytest.raises(UntraceableError, match="token by token"):
        trace_memory(AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1), TraceSettings(tokens=T))
    trace_memory(config_of("llama"), TraceSettings(tokens=T))


def test_experts_in_one_tensor_are_not_packed_in_four_bits():
    config = config_of("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8)
    layer = trace_memory(config, TraceSettings(tokens=T)).layers[0]
    experts = 8 * 3 * 32 * 32
    assert 0 < layer.packable < layer.parameters - experts + 1
    dense = trace_memory(tiny_llama().config, TraceSettings(tokens=T)).layers[0]
    assert dense.parameters - dense.packable == 2 * 32  # the norms
