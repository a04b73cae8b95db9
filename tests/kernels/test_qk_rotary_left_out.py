"""Norm and rotation of attention's heads in one pass: what is wrong, different or changed by others stays out."""

import logging

import pytest
import torch
import transformers
from kernel_models import COMMON, tiny_model
from rotary_models import fused, loss_and_gradients, small

from hf_speedkit.kernels import output_gate, qk_rotary
from hf_speedkit.kernels.fused_layers import fused_layer_checks
from hf_speedkit.kernels.qk_rotary import norm_and_rotate


def half_turned(queries, keys, norms, cos, sin):
    return norm_and_rotate(queries, keys, norms, cos, 0.5 * sin)


def keys_as_they_are(queries, keys, norms, cos, sin):
    turned, _, gate = norm_and_rotate(queries, keys, norms, cos, sin)
    return turned, keys.transpose(1, 2) * 1, gate


def without_gradient_of_keys(queries, keys, norms, cos, sin):
    return norm_and_rotate(queries, keys.detach() + 0 * keys, norms, cos, sin)


def as_if_in_first_document(queries, keys, norms, cos, sin):
    halves = [torch.cat((table[:, :25], table[:, :25]), dim=1)[:, : table.shape[1]] for table in (cos, sin)]
    return norm_and_rotate(queries, keys, norms, *halves)


def in_double(*inputs):
    return tuple(x if x is None else x.double() for x in norm_and_rotate(*inputs))


def not_finite(*inputs):
    turned, keys, gate = norm_and_rotate(*inputs)
    return turned * float("nan"), keys, gate


def fails(*inputs):
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (half_turned, "is off by"),
        (keys_as_they_are, "is off by"),
        (without_gradient_of_keys, "the gradient of k_proj's output is off by"),
        (as_if_in_first_document, "is off by"),
        (in_double, "the query is torch.float64, the layer's is torch.float32"),
        (not_finite, "is not finite"),
        (fails, "it raises RuntimeError: no kernel image"),
    ],
)
def test_a_wrong_rotation_is_left_out_with_the_reason(monkeypatch, caplog, function, reason):
    model = small("qwen3_5")
    monkeypatch.setattr(qk_rotary, "norm_and_rotate", function)
    with fused(model) as lines:
        assert lines == ()
        assert fused_layer_checks(model) == ()
    assert "qk_rotary of Qwen3_5Attention from hf_speedkit is left out" in caplog.text
    assert reason in caplog.text


def test_a_wrong_gate_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(output_gate, "gated", lambda output, gate: output * gate.tanh())
    with fused(small("qwen3_5")) as lines:
        assert lines == ()
    assert "the output is off by" in caplog.text


def test_layers_that_do_something_else_stay_and_their_likes_are_fused(caplog):
    """Every second layer of EXAONE 4 does not rotate: the same class, and another comparison."""
    config = transformers.Exaone4Config(**COMMON, sliding_window=8, sliding_window_pattern=2)
    model = transformers.Exaone4ForCausalLM(config)
    _, before = loss_and_gradients(model)
    with fused(model):
        (check,) = fused_layer_checks(model)
        _, after = loss_and_gradients(model)
    assert (check.layers, check.layers_total) == (2, 4)
    assert "it hands attention sliding_window=8, the layer sliding_window=None" in caplog.text
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-5 * float(before.abs().max()))


@pytest.mark.parametrize("how", ["forward", "hook"])
def test_a_norm_that_somebody_else_has_changed_keeps_its_place(how):
    model = small("Qwen3")
    norm = model.model.layers[0].self_attn.k_norm
    if how == "hook":
        norm.register_forward_hook(lambda norm, inputs, output: 2 * output)
    else:
        norm.forward = lambda x: type(norm).forward(norm, 2 * x)
    with fused(model):
        (check,) = fused_layer_checks(model)
    assert (check.layers, check.layers_total) == (1, 2)


def test_attention_without_head_norms_is_not_looked_at(caplog):
    caplog.set_level(logging.INFO)
    with fused(tiny_model("llama")) as lines:
        assert lines == ()
    assert "qk_rotary" not in caplog.text
