"""The probe itself: its own reference passes at real sizes, and its inputs show what they are there to show."""

import pytest
import torch
from kernel_models import tiny_model

from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels import reference
from hf_speedkit.kernels.inspection import check_kernels
from hf_speedkit.kernels.probe import EDGE_LENGTHS, TOLERANCES, probe_function
from hf_speedkit.kernels.probe_inputs import convolution_example, delta_rule_example

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


@pytest.mark.gpu
def test_the_bound_kernels_of_a_real_model_pass_on_this_gpu():
    model = tiny_model("qwen3_5", linear_key_head_dim=128, linear_value_head_dim=128).to("cuda", torch.bfloat16)
    found = {check.function: check for check in check_kernels(model, probe=True)}
    for function in ("chunk_gated_delta_rule", "causal_conv1d_fn"):
        if found[function].verdict is KernelVerdict.FALLBACK:
            pytest.skip(str(found[function].reason))
        assert found[function].verdict is KernelVerdict.FUSED, found[function]


@pytest.mark.gpu
def test_the_references_give_the_same_on_this_gpu():
    device = torch.device("cuda")
    for function, examples in (
        (
            reference.chunk_gated_delta_rule,
            lambda lengths, seed: delta_rule_example(
                lengths, sizes=QWEN_27B, device=device, dtype=torch.bfloat16, seed=seed
            ),
        ),
        (
            reference.causal_conv1d_fn,
            lambda lengths, seed: convolution_example(
                lengths, channels=1024, width=4, activation="silu", device=device, dtype=torch.bfloat16, seed=seed
            ),
        ),
    ):
        assert probe_function(function, examples).verdict is KernelVerdict.FUSED
