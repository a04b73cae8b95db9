import inspect
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_speedkit.core.errors import ConfigurationError, KernelAssertionError
from hf_speedkit.kernels import attention
from hf_speedkit.kernels.attention import NAME, register, unsupported_reason, varlen_attention

LENGTHS = (3, 11, 5, 8)


def packed(lengths=LENGTHS, seed=0, vocab=64):
    generator = torch.Generator().manual_seed(seed)
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return {
        "input_ids": torch.randint(0, vocab, (1, sum(lengths)), generator=generator),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def tiny(cls, config_cls, **kwargs):
    torch.manual_seed(0)
    config = config_cls(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **kwargs,
    )
    return cls(config).eval()


@pytest.mark.parametrize(
    ("cls", "config_cls", "kwargs"),
    [(LlamaForCausalLM, LlamaConfig, {}), (MistralForCausalLM, MistralConfig, {"sliding_window": 4})],
    ids=["full attention", "sliding window shorter than a document"],
)
def test_packed_attention_gives_each_document_what_sdpa_gives_it_alone(cls, config_cls, kwargs):
    model = tiny(cls, config_cls, **kwargs)
    batch = packed()
    edges = batch["cu_seq_lens_q"].tolist()
    alone = torch.cat(
        [model(batch["input_ids"][:, a:b], use_cache=False).logits for a, b in pairwise(edges)],
        dim=1,
    )
    model.set_attn_implementation(register())
    together = model(**batch, use_cache=False).logits
    # fp32, sums of at most 11 terms in another order
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_gradients_equal_those_of_the_masked_sdpa():
    batch = packed()
    gradients = {}
    for name in ("sdpa", register()):
        model = tiny(LlamaForCausalLM, LlamaConfig)
        model.set_attn_implementation(name)
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    difference = (gradients["sdpa"] - gradients[NAME]).norm() / gradients["sdpa"].norm()
    assert difference < 1e-5


def test_a_row_without_boundaries_is_one_causal_document():
    model = tiny(LlamaForCausalLM, LlamaConfig)
    ids = packed()["input_ids"]
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation(register())
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    assert model.generate(ids[:, :5], max_new_tokens=4, do_sample=False).shape == (1, 9)


@pytest.mark.parametrize(
    ("cls", "config_cls", "kwargs"),
    [(LlamaForCausalLM, LlamaConfig, {}), (MistralForCausalLM, MistralConfig, {"sliding_window": 4})],
    ids=["full attention", "sliding window shorter than a row"],
)
def test_padded_rows_and_what_is_generated_from_them_are_as_with_sdpa(cls, config_cls, kwargs):
    """A callback that shows samples during packed training pads its prompts on the left."""
    model = tiny(cls, config_cls, **kwargs)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    ids = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(0))

    def shown():
        logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        return logits, model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)

    logits, tokens = shown()
    model.set_attn_implementation(register())
    again = shown()
    torch.testing.assert_close(again[0], logits, atol=1e-5, rtol=1e-5)  # fp32, another order of summation
    assert torch.equal(again[1], tokens)


def test_boundaries_beside_a_padding_mask_and_masks_of_another_shape_are_refused():
    model = tiny(LlamaForCausalLM, LlamaConfig)
    model.set_attn_implementation(register())
    batch = packed()
    hidden = torch.ones_like(batch["input_ids"])
    hidden[0, -1] = 0
    with pytest.raises(ConfigurationError, match="one row and no mask"):
        model(**batch, attention_mask=hidden, use_cache=False)
    query = torch.zeros(2, 4, 6, 8)
    with pytest.raises(ConfigurationError, match=r"\[2, 6\] here"):
        varlen_attention(torch.nn.Module(), query, query, query, torch.ones(2, 5))


def dense_kernel(queries, keys, values, edges, edges_k, longest, longest_k, *, scale, window_size, enable_gqa=False):
    """What torch's kernel computes, written out; it takes one head size and no other (torch 2.13)."""
    assert queries.shape[-1] == keys.shape[-1] == values.shape[-1]
    group = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    at = torch.arange(len(queries))
    document = torch.bucketize(at, edges[1:].long(), right=True)
    distance = at[:, None] - at[None, :]
    back, ahead = (len(queries) if size < 0 else size for size in window_size)
    allowed = (document[:, None] == document[None, :]) & (distance <= back) & (distance >= -ahead)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (8, 6), (6, 8)], ids=["one size", "narrow values", "wide"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"scaling": 0.3}, {"sliding_window": 4}, {"is_causal": False}, {"is_causal": False, "sliding_window": 4}],
    ids=["causal", "scaled", "window", "both ways", "both ways in a window"],
)
def test_v57_the_kernel_gets_one_head_size_and_both_ways_of_running_agree(monkeypatch, settings, size, value_size):
    """Values of latent attention (DeepSeek, Kimi) are narrower than its keys, which the kernel refuses."""
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", dense_kernel)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 27, size), (1, 2, 27, size), (1, 2, 27, value_size))
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    edges = packed()["cu_seq_lens_q"]
    scaling, window = settings.get("scaling"), settings.get("sliding_window")
    causal = settings.get("is_causal", True)
    by_kernel = attention._by_kernel(*inputs, edges, edges, 11, 11, scaling, window, causal)
    keys = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    by_document, _ = varlen_attention(torch.nn.Module(), *inputs, None, **keys, **settings)
    torch.testing.assert_close(by_kernel[None], by_document, atol=1e-5, rtol=1e-5)


def test_a_layer_that_looks_both_ways_does_so_without_boundaries_too():
    layer = torch.nn.Module()
    layer.is_causal = False
    query, key, value = torch.randn(3, 2, 2, 5, 8)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    full = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(varlen_attention(layer, query, key, value, None)[0], full.transpose(1, 2))
    padded = varlen_attention(layer, query, key, value, mask)[0]
    short = torch.nn.functional.scaled_dot_product_attention(*(t[:1, :, :3] for t in (query, key, value)))
    torch.testing.assert_close(padded[:1, :3], short.transpose(1, 2))
    torch.testing.assert_close(padded[1:], full.transpose(1, 2)[1:])


def test_contract_no_layer_of_transformers_hands_over_what_would_be_dropped_without_a_word():
    """Every keyword of every attention call in the modeling files is one that is read, refused or harmless."""
    read = set(inspect.signature(varlen_attention).parameters) | set(attention._NOT_HERE)
    # Read before the attention is called, or by flash attention packages only.
    harmless = {"output_attentions", "position_ids", "deterministic", "query", "key", "value"}
    dropped, sinks = {}, set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        calls = re.findall(r"attention_interface\(\s*self,(.*?)\n *\)", text, re.DOTALL)
        names = {name for call in calls for name in re.findall(r"^ +(\w+)=", call, re.MULTILINE)}
        if names - read - harmless:
            dropped[file.name] = names - read - harmless
        if "s_aux" in names and re.search(r"_supports_flash_attn\w* = True", text):
            sinks.add(file.parent.name)
    assert dropped == {}
    # A vision family's text part has a type of its own; what 5.24 added is not in 5.23.
    families = {kind.removesuffix("_text") for kind in attention.SINKS}
    models = Path(transformers.__file__).parent / "models"
    assert sinks == {family for family in families if (models / family).is_dir()}


@pytest.mark.parametrize(
    "asked",
    [
        {"dropout": 0.1},
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},
        {"indices": torch.zeros(4)},
        {"position_bias": torch.zeros(4)},
    ],
    ids=["dropout", "softcap", "sinks", "indices", "bias"],
)
def test_what_the_kernel_does_not_have_is_refused(asked):
    query = torch.zeros(1, 4, 6, 8)
    with pytest.raises(KernelAssertionError, match="packed attention has no"):
        varlen_attention(torch.nn.Module(), query, query, query, None, **asked)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"attn_logit_softcapping": 50.0}, "soft-caps"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"attn_pdrop": 0.1}, "attn_pdrop"),
        ({"model_type": "granite_swa"}, "sinks"),
    ],
)
def test_the_reason_a_model_cannot_use_it_is_named(change, reason):
    config = LlamaConfig(hidden_size=32, num_attention_heads=4)
    for name, value in change.items():
        setattr(config, name, value)
    found = unsupported_reason(config, dtype=torch.float32, device=torch.device("cpu"))
    assert found is None if reason is None else reason in found


def test_a_class_that_needs_a_mask_or_has_an_attention_of_its_own_keeps_it():
    settings = {"dtype": torch.float32, "device": torch.device("cpu")}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4)
    assert "without a mask" in unsupported_reason(config, **settings, flash=False)
    assert "of its own" in unsupported_reason(config, **settings, settable=False)
    latent = LlamaConfig(hidden_size=32, num_attention_heads=4)
    latent.qk_nope_head_dim, latent.qk_rope_head_dim = 256, 64
    assert attention._head_size(latent) == 320


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kv_heads", "size", "value_size"), [(24, 256, 256), (4, 256, 256), (24, 192, 128)], ids=["MHA", "GQA", "MLA"]
)
def test_the_kernel_on_the_gpu_agrees_with_fp32_at_real_head_sizes(kv_heads, size, value_size):
    torch.manual_seed(0)
    lengths = [1, 33, 63, 64, 65, 127, 130, 700]
    slots = sum(lengths)
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    shapes = ((24, size), (kv_heads, size), (kv_heads, value_size))
    inputs = [torch.randn(1, heads, slots, width) for heads, width in shapes]
    upstream = torch.randn(1, slots, 24, value_size)
    results = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        tensors = [t.to(device, dtype).detach().requires_grad_(True) for t in inputs]
        bounds = edges.to(device)
        out, _ = varlen_attention(
            torch.nn.Module(), *tensors, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
            max_length_q=max(lengths), max_length_k=max(lengths),
        )  # fmt: skip
        out.backward(upstream.to(device, dtype))
        results[device] = [out.detach(), *(t.grad for t in tensors)]
    for reference, found in zip(results["cpu"], results["cuda"], strict=True):
        # bf16 operands: relative error between 1e-3 and 1e-2 (8 bits of mantissa)
        assert (found.float().cpu() - reference).norm() / reference.norm() < 1e-2
