"""The probe itself: its own reference passes at real sizes, and its inputs show what they are there to show."""

import pytest
import torch
from kernel_models import tiny_model

from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels import reference
from hf_speedkit.kernels.attention import register, varlen_attention
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.inspection import check_kernels
from hf_speedkit.kernels.probe import EDGE_LENGTHS, TOLERANCES, place, probe_function
from hf_speedkit.kernels.probe_batch import batch_keys
from hf_speedkit.kernels.probe_inputs import convolution_example, delta_rule_example
from hf_speedkit.kernels.probe_targets import function_target

CPU = torch.device("cpu")
QWEN_27B = (16, 48, 128, 128)


def delta_rule(dtype, sizes=(2, 4, 8, 8)):
    return lambda lengths, seed: delta_rule_example(lengths, sizes=sizes, device=CPU, dtype=dtype, seed=seed)


def convolution(dtype, channels=16):
    return lambda lengths, seed: convolution_example(
        lengths, channels=channels, width=4, activation="silu", device=CPU, dtype=dtype, seed=seed
    )


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_the_references_pass_their_own_probe_in_every_dtype(dtype):
    assert probe_function(reference.chunk_gated_delta_rule, delta_rule(dtype)).verdict is KernelVerdict.FUSED
    assert probe_function(reference.causal_conv1d_fn, convolution(dtype)).verdict is KernelVerdict.FUSED


def test_v53_a_convolution_that_forgets_the_bias_is_found_where_the_layer_has_one():
    """Mamba's convolutions have a bias, Qwen's have none."""

    def forgets(x, weight, bias, **keys):
        return reference.causal_conv1d_fn(x, weight, bias.detach(), keys["activation"], keys["seq_idx"])

    layer = tiny_model("mamba").backbone.layers[0].mixer
    found = {}
    for name, called in (("right", reference.causal_conv1d_fn), ("forgets", forgets)):
        target = function_target("causal_conv1d_fn", called, layer, None, None)
        found[name] = probe_function(target.called, target.make_example)
    assert found["right"].verdict is KernelVerdict.FUSED
    assert (found["forgets"].verdict, found["forgets"].detail) == (
        KernelVerdict.FORWARD_ONLY,
        "no gradient reaches bias",
    )


def test_the_token_by_token_rule_passes_the_probe_of_the_chunked_one():
    outcome = probe_function(reference.recurrent_gated_delta_rule, delta_rule(torch.float32))
    assert outcome.verdict is KernelVerdict.FUSED


def test_bfloat16_at_the_head_sizes_of_a_27b_model_is_within_a_tenth_of_the_tolerance():
    outcome = probe_function(reference.chunk_gated_delta_rule, delta_rule(torch.bfloat16, QWEN_27B))
    assert outcome.verdict is KernelVerdict.FUSED
    assert float(outcome.detail.removeprefix("largest error ")) < 2e-3


def test_v16_the_convolution_is_probed_on_both_sides_of_chunk_edges():
    assert {63, 64, 65, 127, 129} <= set(EDGE_LENGTHS)
    assert sum(EDGE_LENGTHS) % 64 != 0  # the end of the row is not the end of a chunk


def test_v04_the_decay_of_the_probe_is_slow_enough_for_a_leak_to_show_in_bfloat16():
    """With the decay of a fresh model the leak of a whole document dies out below the rounding of bfloat16."""

    def leaking(*args, cu_seqlens=None, **kwargs):
        return reference.chunk_gated_delta_rule(*args, **kwargs)

    assert probe_function(leaking, delta_rule(torch.bfloat16)).verdict is KernelVerdict.NO_BOUNDARIES


def test_v54_the_rule_gets_views_of_one_row_like_in_the_layer():
    example = delta_rule(torch.float32)((5, 6), 0)
    strides = []

    def look(q, k, v, **kwargs):
        strides.append((q.stride(1), k.stride(1), v.stride(1), q.shape[2] * q.shape[3]))
        return reference.chunk_gated_delta_rule(q, k, v, **kwargs)

    example.call(look)
    width = example.inputs["row"].shape[-1]
    assert strides == [(width, width, width, 16)]


def test_v54_the_convolution_gets_a_transposed_view_and_a_gradient_put_together_from_parts():
    example = convolution(torch.float32)((5, 6), 0)
    layouts = []

    def look(x, weight, bias, **kwargs):
        layouts.append(x.is_contiguous())
        return reference.causal_conv1d_fn(x, weight, bias, **kwargs)

    example.gradients(example.call(look))
    assert layouts == [False]


def test_a_gradient_that_vanishes_in_truth_may_be_rounding_in_the_kernel():
    """The decay of a single token has no effect; a kernel that rounds there is not broken."""

    class Rounding(torch.autograd.Function):
        @staticmethod
        def forward(ctx, g):
            return g.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient + 1e-6

    def rounding(q, k, v, g, **kwargs):
        return reference.chunk_gated_delta_rule(q, k, v, Rounding.apply(g), **kwargs)

    assert probe_function(rounding, delta_rule(torch.float32)).verdict is KernelVerdict.FUSED


def test_checks_that_are_not_fused_are_not_run():
    model = tiny_model("qwen3_5")
    assert check_kernels(model, probe=True) == check_kernels(model)


def test_on_a_long_row_only_the_first_documents_and_some_heads_are_compared_but_all_of_it_runs():
    shapes = []

    def look(q, k, v, **kwargs):
        shapes.append((q.shape, v.shape, kwargs["cu_seqlens"].tolist()[-2:]))
        return reference.chunk_gated_delta_rule(q, k, v, **kwargs)

    def example(lengths, seed):
        return delta_rule_example(lengths, sizes=(6, 12, 8, 8), device=CPU, dtype=torch.float32, seed=seed, slots=1_000)

    assert probe_function(look, example).verdict is KernelVerdict.FUSED
    assert set(map(str, shapes)) == {str((torch.Size([1, 1000, 6, 8]), torch.Size([1, 1000, 12, 8]), [707, 1000]))}
    row = example(EDGE_LENGTHS, 0)
    output, gradients = row.reference()
    assert output.shape == (1, 707, 4, 8)
    assert gradients["q"].shape == (1, 707, 2 * 8)


def test_what_nobody_compares_must_still_be_finite():
    def tail_is_nan(x, weight, bias, **kwargs):
        output = reference.causal_conv1d_fn(x, weight, bias, **kwargs)
        return torch.cat((output[..., :-1], output[..., -1:] * float("nan")), dim=-1)

    def example(lengths, seed):
        return convolution_example(
            lengths, channels=8, width=4, activation=None, device=CPU, dtype=torch.float32, seed=seed, slots=1_000
        )

    outcome = probe_function(tail_is_nan, example)
    assert (outcome.verdict, outcome.detail) == (KernelVerdict.BROKEN, "the output is not finite")


@pytest.mark.parametrize("length", [1, 64, 130])
def test_v16_a_fault_in_one_short_document_is_not_lost_in_the_row(length):
    """A token that is 10 % wrong is 0.4 % of the row's norm, below the tolerance of bfloat16."""

    def wrong(q, k, v, cu_seqlens, **kwargs):
        output, state = reference.chunk_gated_delta_rule(q, k, v, cu_seqlens=cu_seqlens, **kwargs)
        lengths = cu_seqlens.diff().tolist()
        parts = [part * 1.1 if part.shape[1] == length else part for part in output.split(lengths, dim=1)]
        return torch.cat(parts, dim=1), state

    outcome = probe_function(wrong, delta_rule(torch.bfloat16))
    assert outcome.verdict is KernelVerdict.BROKEN
    assert outcome.detail.endswith(f"at length {length}")


def test_v49_a_kernel_that_gives_another_answer_the_second_time_is_broken():
    calls = []

    def racing(q, k, v, **kwargs):
        calls.append(1)
        output, state = reference.chunk_gated_delta_rule(q, k, v, **kwargs)
        return output * (1.0 if len(calls) == 1 else 1.2), state

    outcome = probe_function(racing, delta_rule(torch.float32))
    assert (outcome.verdict, outcome.detail) == (
        KernelVerdict.BROKEN,
        "two runs on the same inputs differ: a race in the kernel",
    )


def test_every_other_head_of_the_probe_decays_fast():
    """Wrong gradients were reported for strong decay only (FlashQLA pull request 28)."""
    decay = delta_rule(torch.float32)(EDGE_LENGTHS, 0).inputs["g"]
    assert decay[..., 0::2].min() >= -0.02
    assert decay[..., 1::2].max() <= -0.5
    assert decay[..., 1::2].min() < -4


def test_the_probe_hands_on_the_keys_of_a_packed_batch_and_calls_once_per_question():
    seen = []

    def look(x, weight, bias, **kwargs):
        seen.append(kwargs)
        return reference.causal_conv1d_fn(x, weight, bias, **kwargs)

    assert probe_function(look, convolution(torch.float32)).verdict is KernelVerdict.FUSED
    assert len(seen) == 3  # forward and backward, and the two forwards of the leak test
    keys = seen[0]
    assert keys["cu_seq_lens_q"].dtype == keys["chunk_indices"].dtype == keys["seq_idx"].dtype == torch.int32
    assert keys["chunk_indices"].shape == (sum(-(-length // 64) for length in EDGE_LENGTHS), 2)
    assert (keys["max_length_q"], keys["activation"]) == (256, "silu")


def test_the_keys_of_the_probe_are_those_the_collator_makes():
    from hf_speedkit.packing.collator import PackedCollator

    lengths = (5, 64, 1, 130)
    rows = [{"input_ids": list(range(length))} for length in lengths]
    batch = PackedCollator(0, 256)(rows)
    keys = batch_keys((0, 5, 69, 70, 200, 256), CPU)
    for name, value in keys.items():
        assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_packed_attention_is_probed_at_the_sizes_of_the_layer(family):
    model = tiny_model(family)
    model.set_attn_implementation(register())
    (check,) = [check for check in check_kernels(model, probe=True) if check.function == "attention"]
    assert check.verdict is KernelVerdict.FUSED
    assert "speedkit_varlen" in check.evidence
    assert "ran both ways on cpu in float32, largest error" in check.evidence


def test_an_attention_that_ignores_boundaries_is_found_by_the_probe(monkeypatch):
    from hf_speedkit.kernels import attention

    def whole_row(query, key, value, *rest):
        return reference.causal_attention(None, query, key, value, None, scaling=rest[4])[0][0]

    monkeypatch.setattr(attention, "_by_document", whole_row)
    model = tiny_model("llama")
    model.set_attn_implementation(register())
    (check,) = check_kernels(model, probe=True)
    assert check.verdict is KernelVerdict.NO_BOUNDARIES


@pytest.mark.parametrize("window", [None, 7])
def test_the_written_out_attention_is_torchs_own(window):
    make = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 40, 8, generator=make) for heads in (4, 2, 2))
    borders = torch.tensor([0, 13, 40], dtype=torch.int32)
    found, _ = varlen_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        sliding_window=window,
        cu_seq_lens_q=borders,
        cu_seq_lens_k=borders,
    )
    wanted, _ = reference.causal_attention(None, query, key, value, None, sliding_window=window, cu_seq_lens_q=borders)
    torch.testing.assert_close(found, wanted)


def test_sdpa_is_torchs_own_and_is_not_probed():
    model = tiny_model("llama")
    assert check_kernels(model, probe=True) == check_kernels(model)


def test_under_autocast_the_convolutions_weight_stays_in_float32():
    example = convolution_example(
        (5, 6),
        channels=8,
        width=4,
        activation=None,
        device=CPU,
        dtype=torch.bfloat16,
        seed=0,
        weight_dtype=torch.float32,
    )
    assert (example.inputs["row"].dtype, example.inputs["weight"].dtype) == (torch.bfloat16, torch.float32)
    model = tiny_model("qwen3_5")
    target = function_target("causal_conv1d_fn", len, model.model.layers[0].linear_attn, torch.bfloat16, None)
    assert target.make_example((5,), 0).inputs["weight"].dtype is torch.float32


def test_v49_a_fault_names_the_gpu_its_architecture_and_the_versions(monkeypatch):
    stack = Stack(capability=(10, 0), versions={"torch": "2.13.0", "triton": "3.7.1", "fla-core": "0.6.0"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    assert place(torch.device("cuda", 0), stack) == "NVIDIA B200 (sm100, triton 3.7.1, torch 2.13.0)"
    assert place(torch.device("cpu"), stack) == "cpu"
