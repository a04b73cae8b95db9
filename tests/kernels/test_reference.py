"""The references against their definitions: outputs and every gradient, in float64, at lengths round chunk edges."""

import pytest
import torch
import torch.nn.functional as F

from hf_speedkit.kernels.reference import causal_conv1d_fn, chunk_gated_delta_rule, recurrent_gated_delta_rule

EDGE_LENGTHS = (1, 33, 63, 64, 65, 95, 127, 129, 130)
# The two forms differ in the order of summation only: about 1e-15 in float64. Wrong boundaries show at 1e-2 and more.
SAME_IN_FLOAT64 = 1e-12


def delta_rule_inputs(slots, *, rows=1, key_heads=2, value_heads=4, dtype=torch.float64, seed=0):
    """Slow decay, so that a state that is not cleared stays visible for hundreds of positions."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_()

    q, k = normal(rows, slots, key_heads, 16), normal(rows, slots, key_heads, 16)
    v = normal(rows, slots, value_heads, 24)
    decay = (-0.02 * torch.rand(rows, slots, value_heads, generator=make, dtype=torch.float64)).to(dtype)
    beta = torch.rand(rows, slots, value_heads, generator=make, dtype=torch.float64).to(dtype)
    return q, k, v, decay.requires_grad_(), beta.requires_grad_()


def borders(lengths):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def document_numbers(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32)[None]


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_same_outputs_and_gradients(found, expected, inputs, tolerance):
    assert relative_error(found, expected) <= tolerance
    incoming = torch.randn(found.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(found.dtype)
    gradients, wanted = (torch.autograd.grad(out, inputs, incoming) for out in (found, expected))
    errors = [relative_error(f, w) for f, w in zip(gradients, wanted, strict=True)]
    assert max(errors) <= tolerance, errors


@pytest.mark.parametrize("length", EDGE_LENGTHS)
def test_the_chunked_rule_equals_the_token_by_token_rule_at_every_chunk_edge(length):
    inputs = delta_rule_inputs(length)
    found, _ = chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
    expected, _ = recurrent_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
    assert_same_outputs_and_gradients(found, expected, inputs, SAME_IN_FLOAT64)


def test_packed_documents_equal_each_document_alone_in_outputs_and_gradients():
    inputs = delta_rule_inputs(sum(EDGE_LENGTHS))
    found, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=borders(EDGE_LENGTHS), use_qk_l2norm_in_kernel=True)
    alone = [
        recurrent_gated_delta_rule(*parts, use_qk_l2norm_in_kernel=True)[0]
        for parts in zip(*(x.split(EDGE_LENGTHS, dim=1) for x in inputs), strict=True)
    ]
    assert_same_outputs_and_gradients(found, torch.cat(alone, dim=1), inputs, SAME_IN_FLOAT64)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1024])
def test_the_chunk_size_does_not_change_the_result(chunk_size):
    inputs = delta_rule_inputs(sum(EDGE_LENGTHS))
    found, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=borders(EDGE_LENGTHS), chunk_size=chunk_size)
    expected, _ = recurrent_gated_delta_rule(*inputs, cu_seqlens=borders(EDGE_LENGTHS))
    assert relative_error(found, expected) <= SAME_IN_FLOAT64


def test_without_boundaries_the_state_runs_on_so_the_tests_above_can_fail():
    inputs = delta_rule_inputs(sum(EDGE_LENGTHS))
    leaking, _ = chunk_gated_delta_rule(*inputs)
    expected, _ = recurrent_gated_delta_rule(*inputs, cu_seqlens=borders(EDGE_LENGTHS))
    assert relative_error(leaking, expected) > 0.1


@pytest.mark.parametrize("rows", [1, 3])
def test_states_go_in_and_come_out_as_the_recurrence_says(rows):
    inputs = delta_rule_inputs(70, rows=rows)
    start = torch.randn(rows, 4, 16, 24, dtype=torch.float64)
    found, found_state = chunk_gated_delta_rule(*inputs, initial_state=start, output_final_state=True)
    expected, state = recurrent_gated_delta_rule(*inputs, initial_state=start, output_final_state=True)
    assert relative_error(found, expected) <= SAME_IN_FLOAT64
    assert relative_error(found_state, state) <= SAME_IN_FLOAT64


def test_packed_documents_carry_one_state_each():
    lengths = (5, 40, 33)
    inputs, start = delta_rule_inputs(sum(lengths)), torch.randn(3, 4, 16, 24, dtype=torch.float64)
    arguments = {"initial_state": start, "output_final_state": True, "cu_seqlens": borders(lengths)}
    found, found_state = chunk_gated_delta_rule(*inputs, **arguments)
    expected, state = recurrent_gated_delta_rule(*inputs, **arguments)
    assert state.shape == (3, 4, 16, 24)
    assert relative_error(found, expected) <= SAME_IN_FLOAT64
    assert relative_error(found_state, state) <= SAME_IN_FLOAT64


def test_no_state_comes_out_unless_it_is_asked_for():
    assert chunk_gated_delta_rule(*delta_rule_inputs(3))[1] is None
    assert recurrent_gated_delta_rule(*delta_rule_inputs(3))[1] is None


def test_an_explicit_scale_replaces_the_usual_one():
    inputs = delta_rule_inputs(9)
    usual, scaled = chunk_gated_delta_rule(*inputs)[0], chunk_gated_delta_rule(*inputs, scale=1.0)[0]
    assert relative_error(scaled, usual * 4) <= SAME_IN_FLOAT64  # 16 ** 0.5


@pytest.mark.parametrize("lengths", [(4, 0, 6), (4, 6, 0), (0, 10)])
def test_an_empty_document_changes_nothing(lengths):
    inputs = delta_rule_inputs(10)
    full = tuple(length for length in lengths if length)
    found, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=borders(lengths))
    expected, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=borders(full))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rule", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
def test_positions_after_the_last_border_are_one_more_document(rule):
    inputs = delta_rule_inputs(12)
    found, _ = rule(*inputs, cu_seqlens=borders((4, 3)))
    expected, _ = rule(*inputs, cu_seqlens=borders((4, 3, 5)))
    assert torch.equal(found, expected)


# float32 adds up a chunk of 32 products in another order; bfloat16 inputs are computed in float32 and rounded once
# at the end, to 8 bits (2 ** -9 = 2e-3 relative).
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 3e-3)])
def test_lower_precision_stays_near_float64_and_keeps_its_dtype(dtype, tolerance):
    inputs = delta_rule_inputs(sum(EDGE_LENGTHS), dtype=dtype)
    found, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=borders(EDGE_LENGTHS), use_qk_l2norm_in_kernel=True)
    exact = [x.detach().double() for x in inputs]
    expected, _ = recurrent_gated_delta_rule(*exact, cu_seqlens=borders(EDGE_LENGTHS), use_qk_l2norm_in_kernel=True)
    assert found.dtype == dtype
    assert relative_error(found.double(), expected) <= tolerance


def test_v03_the_recurrence_lets_nothing_at_all_through_a_boundary():
    """Exactly zero, not merely small: forward when other documents change, backward at their inputs."""
    lengths = (40, 24, 33)
    inputs = delta_rule_inputs(sum(lengths), dtype=torch.float32)
    out, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=borders(lengths))
    gradients = torch.autograd.grad(out[:, 40:64].sum(), inputs)
    assert all(not gradient[:, :40].any() and not gradient[:, 64:].any() for gradient in gradients)
    assert all(gradient[:, 40:64].any() for gradient in gradients)
    others = delta_rule_inputs(sum(lengths), dtype=torch.float32, seed=1)
    mixed = [torch.cat((o[:, :40], x[:, 40:64], o[:, 64:]), dim=1) for x, o in zip(inputs, others, strict=True)]
    assert torch.equal(chunk_gated_delta_rule(*mixed, cu_seqlens=borders(lengths))[0][:, 40:64], out[:, 40:64])


def test_v03_a_recurrence_without_boundaries_is_seen_at_the_other_documents_inputs():
    inputs = delta_rule_inputs(64, dtype=torch.float32)
    out, _ = chunk_gated_delta_rule(*inputs)
    assert torch.autograd.grad(out[:, 40:].sum(), inputs[2])[0][:, :40].abs().max() > 1e-3


def test_training_calls_never_wait_for_the_device():
    """A meta tensor has no values: whatever would fetch one (.item(), .tolist(), a shape from data) raises."""
    inputs = [x.to("meta") for x in delta_rule_inputs(100)]
    assert chunk_gated_delta_rule(*inputs, cu_seqlens=borders((40, 60)).to("meta"))[0].shape == (1, 100, 4, 24)
    x, weight, bias = (x.to("meta") for x in convolution_inputs(100))
    assert causal_conv1d_fn(x, weight, bias, seq_idx=document_numbers((40, 60)).to("meta")).shape == (1, 6, 100)


@pytest.mark.parametrize(
    ("rows", "cu_seqlens", "message"),
    [
        (2, torch.tensor([0, 5]), "pack into one row"),
        (1, torch.tensor([[0, 5]]), "one-dimensional"),
        (1, torch.tensor([0.0, 5.0]), "integer"),
    ],
)
def test_borders_that_cannot_be_meant_are_refused(rows, cu_seqlens, message):
    for rule in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
        with pytest.raises(ValueError, match=message):
            rule(*delta_rule_inputs(5, rows=rows), cu_seqlens=cu_seqlens)


def test_a_state_per_document_is_demanded():
    with pytest.raises(ValueError, match="1 states for 2 documents"):
        chunk_gated_delta_rule(
            *delta_rule_inputs(5), cu_seqlens=borders((2, 3)), initial_state=torch.zeros(1, 4, 16, 24)
        )


def convolution_inputs(slots, *, rows=1, width=4, dtype=torch.float64):
    make = torch.Generator().manual_seed(0)
    x = torch.randn(rows, slots, 6, generator=make, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_()
    weight = torch.randn(6, width, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(6, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    return x, weight, bias


def convolution_by_definition(x, weight, bias, activation):
    out = F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[1])
    return F.silu(out) if activation else out


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_packed_convolution_equals_each_document_alone_in_outputs_and_gradients(width, activation):
    lengths = (1, 2, 3, 9, 1, 1, 40)
    x, weight, bias = convolution_inputs(sum(lengths), width=width)
    found = causal_conv1d_fn(x, weight, bias, activation=activation, seq_idx=document_numbers(lengths))
    alone = [convolution_by_definition(part, weight, bias, activation) for part in x.split(lengths, dim=2)]
    assert_same_outputs_and_gradients(found, torch.cat(alone, dim=2), (x, weight, bias), SAME_IN_FLOAT64)


@pytest.mark.parametrize("slots", [1, 3, 61, 65, 127, 131, 259])
def test_convolution_without_boundaries_is_the_plain_one(slots):
    x, weight, bias = convolution_inputs(slots, rows=2)
    found = causal_conv1d_fn(x, weight, bias, activation="swish")
    assert relative_error(found, convolution_by_definition(x, weight, bias, "swish")) <= SAME_IN_FLOAT64


def test_v02_the_convolution_lets_nothing_at_all_through_a_boundary():
    """Only the first three positions of a document can be wrong (four taps): row positions 5, 6 and 7 here."""
    x, weight, _ = convolution_inputs(11, dtype=torch.float32)
    isolated = causal_conv1d_fn(x, weight, seq_idx=document_numbers((5, 6)))
    leaking = causal_conv1d_fn(x, weight)
    assert not torch.autograd.grad(isolated[:, :, 5:].sum(), x)[0][:, :, :5].any()
    leak = torch.autograd.grad(leaking[:, :, 5:].sum(), x)[0][:, :, :5]
    assert leak[:, :, 2:].all()
    assert [t for t in range(11) if not torch.equal(isolated[:, :, t], leaking[:, :, t])] == [5, 6, 7]


def test_half_precision_convolution_is_computed_in_float32():
    x, weight, bias = convolution_inputs(50, dtype=torch.bfloat16)
    found = causal_conv1d_fn(x, weight, bias, seq_idx=document_numbers((20, 30)))
    exact = causal_conv1d_fn(x.double(), weight.double(), bias.double(), seq_idx=document_numbers((20, 30)))
    assert found.dtype == torch.bfloat16
    assert relative_error(found.double(), exact) <= 2e-3  # one rounding to 8 bits: at most 2 ** -9


def test_document_numbers_of_another_length_are_refused_with_the_usual_cause():
    x, weight, _ = convolution_inputs(11)
    with pytest.raises(ValueError, match="use_cache=False"):
        causal_conv1d_fn(x, weight, seq_idx=document_numbers((5, 5)))


def test_an_activation_that_no_kernel_has_is_refused():
    x, weight, _ = convolution_inputs(5)
    with pytest.raises(ValueError, match="'gelu' is not supported"):
        causal_conv1d_fn(x, weight, activation="gelu")


def test_autocast_does_not_reach_inside():
    """What mixed precision on a CPU does by itself: a product in bfloat16, and then a solver that has none."""
    inputs = delta_rule_inputs(40, dtype=torch.float32)
    x, weight, bias = convolution_inputs(40, dtype=torch.float32)
    numbers, edges = document_numbers((15, 25)), borders((15, 25))
    plain = causal_conv1d_fn(x, weight, bias, seq_idx=numbers), chunk_gated_delta_rule(*inputs, cu_seqlens=edges)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = causal_conv1d_fn(x=x, weight=weight, bias=bias, seq_idx=numbers)
        cast = found, chunk_gated_delta_rule(*inputs, cu_seqlens=edges)[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))
