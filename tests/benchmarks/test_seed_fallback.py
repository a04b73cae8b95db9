"""The fallback of older transformers, as the ladder's lowest rung runs it."""

import pytest
import seed_fallback
import torch
from support import tiny_hybrid
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint


def inputs(slots, *, key_heads=2, value_heads=4, size=8):
    generator = torch.Generator().manual_seed(slots)
    drawn = {
        "query": torch.randn(2, slots, key_heads, size, generator=generator),
        "key": torch.randn(2, slots, key_heads, size, generator=generator),
        "value": torch.randn(2, slots, value_heads, size, generator=generator),
        "g": -torch.rand(2, slots, value_heads, generator=generator),
        "beta": torch.rand(2, slots, value_heads, generator=generator),
    }
    return {name: tensor.requires_grad_() for name, tensor in drawn.items()}


def todays(**given):
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return modeling_qwen3_5.torch_chunk_gated_delta_rule(**given)


@pytest.mark.parametrize("slots", [1, 63, 64, 150])
def test_it_computes_what_todays_fallback_computes(slots):
    results = []
    for function in (seed_fallback.chunk_gated_delta_rule, todays):
        given = inputs(slots)
        out, state = function(**given, use_qk_l2norm_in_kernel=True, output_final_state=True)
        (out.square().sum() + state.square().sum()).backward()
        results.append([out, state, *(tensor.grad for tensor in given.values())])
    for ours, theirs in zip(*results, strict=True):
        # Both are fp32; 150 positions of sums in another order differ by a few units in the last place.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [2, 5])
def test_it_does_as_many_batched_products_as_the_published_trace_shows(chunks):
    given = inputs(64 * chunks)

    def layer(*tensors):
        return seed_fallback.chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel=True)[0]

    with profile() as recorded:
        checkpoint(layer, *given.values(), use_reentrant=False).sum().backward()
    products = sum(event.count for event in recorded.key_averages() if event.key == "aten::bmm")
    assert products == 20 * chunks + 8


def test_packed_documents_are_refused():
    with pytest.raises(ValueError, match="pad instead of packing"):
        seed_fallback.chunk_gated_delta_rule(**inputs(8), cu_seqlens=torch.tensor([0, 8]))


def test_a_model_runs_it_while_it_is_bound_and_todays_afterwards():
    from transformers.models.qwen3_5 import modeling_qwen3_5

    model, rows = tiny_hybrid(), torch.arange(2, 32).repeat(2, 1)
    before, namespace = model(rows).logits, vars(modeling_qwen3_5)
    original = namespace["torch_chunk_gated_delta_rule"]
    with seed_fallback.bound():
        assert namespace["torch_chunk_gated_delta_rule"] is seed_fallback.chunk_gated_delta_rule
        torch.testing.assert_close(model(rows).logits, before, rtol=1e-4, atol=1e-5)
    assert namespace["torch_chunk_gated_delta_rule"] is original
