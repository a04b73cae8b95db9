"""Fused adapters in the place of peft's forward, and peft's own wherever they do not serve."""

import logging
from types import MethodType

import pytest
import torch
from test_adapted_linear import OUT, RANK, WIDE, drawn
from torch import nn

from hf_speedkit.kernels.fused_layers import fused_layer_checks, fused_layers, is_fused
from hf_speedkit.kernels.lora_forward import adapted_forward, why_not_adapted
from hf_speedkit.kernels.lora_parity import compare_adapted

peft = pytest.importorskip("peft", reason="pip install peft")


class Model(nn.Module):
    def __init__(self, kind=nn.Linear):
        super().__init__()
        self.map = kind(WIDE, OUT)


def adapted(dtype=torch.float32, kind=nn.Linear, second=None, **changes):
    """A layer of peft's whose adapters are not zero, the second one of another rank."""
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": RANK, "lora_alpha": 5, "target_modules": ["map"], **changes})
    model = peft.get_peft_model(Model(kind).to(dtype), config)
    if second is not None:
        model.add_adapter(second, peft.LoraConfig(r=RANK + 1, lora_alpha=9, target_modules=["map"]))
    layer = model.base_model.model.map
    for name, weight in layer.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight)
    return layer


def both(layer, x):
    """Output and gradients of ours and of peft's, in pairs."""
    found = []
    for forward in (adapted_forward(), type(layer).forward):
        leaf = x.detach().clone().requires_grad_()
        output = forward(layer, leaf)
        trained = [leaf, *(weight for weight in layer.parameters() if weight.requires_grad)]
        found.append([output.detach(), *torch.autograd.grad(output.float().square().sum(), trained)])
    assert [value.dtype for value in found[0]] == [value.dtype for value in found[1]]
    return [(a.double(), b.double()) for a, b in zip(*found, strict=True)]


def runs_ours(layer, x):
    output = adapted_forward()(layer, x.clone().requires_grad_())
    return type(output.grad_fn).__name__ == "_OutputBackward"


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_outputs_and_gradients_are_pefts(dtype, rslora):
    layer, x = adapted(dtype, use_rslora=rslora), drawn(dtype)["x"]
    assert why_not_adapted(layer) is None
    assert runs_ours(layer, x)
    # Two orders of sums; in half precision three roundings more than peft's, of half an eps at most each.
    tolerance = 2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6
    for found, wanted in both(layer, x):
        assert (found - wanted).norm() / wanted.norm() < tolerance


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_both_come_in_its_dtype(weights, inputs):
    layer, x = adapted(weights), drawn(inputs)["x"]
    with torch.autocast("cpu", torch.bfloat16):
        assert runs_ours(layer, x)
        for found, wanted in both(layer, x):
            assert (found - wanted).norm() / wanted.norm() < 2 * torch.finfo(torch.bfloat16).eps


class Packed(torch.Tensor):
    """Stands for the weights of a package that quantises."""


class Split(Packed):
    """Stands for a DTensor: FSDP2 puts a plain tensor in its place while the layer runs, others do not."""

    device_mesh = None


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes'."""


def a_of(layer):
    return layer.lora_A["default"]


def b_of(layer):
    return layer.lora_B["default"]


def frozen_as(make):
    def change(layer):
        layer.base_layer.weight = nn.Parameter(make(layer.base_layer.weight.data), requires_grad=False)

    return change


@pytest.mark.parametrize(
    ("changes", "change", "said"),
    [
        ({"use_dora": True}, None, "its adapter is a DoraLinearVariant"),
        ({"lora_dropout": 0.1}, None, "its adapter has dropout"),
        ({"lora_bias": True}, None, "its adapter has a bias"),
        ({"kind": lambda wide, out: nn.Conv1d(wide, out, 1)}, None, "its class is peft.tuners.lora.layer.Conv1d"),
        ({"kind": Linear4bit}, None, "its base_layer is a Linear4bit"),
        ({}, lambda layer: layer.merge(), "an adapter is merged"),
        ({}, lambda layer: layer.enable_adapters(False), "its adapters are disabled"),
        ({}, lambda layer: layer.set_adapter([]), "0 adapters are active"),
        ({}, lambda layer: layer.base_layer.weight.requires_grad_(True), "its own weight or bias is trained"),
        ({}, lambda layer: layer.base_layer.bias.requires_grad_(True), "its own weight or bias is trained"),
        ({}, lambda layer: layer.base_layer.register_forward_hook(lambda *_: None), "its base_layer has hooks"),
        ({}, lambda layer: a_of(layer).register_forward_pre_hook(lambda *_: None), "its lora_A has hooks"),
        ({}, lambda layer: b_of(layer).register_full_backward_hook(lambda *_: None), "its lora_B has hooks"),
        ({}, lambda layer: setattr(layer.base_layer, "forward", print), "its base_layer has a forward of somebody"),
        ({}, lambda layer: setattr(b_of(layer), "forward", print), "its lora_B has a forward of somebody else"),
        ({}, lambda layer: nn.utils.parametrizations.weight_norm(a_of(layer)), "its lora_A is a Parametrized"),
        ({}, frozen_as(lambda weight: weight.to(torch.float8_e4m3fn)), "its weight is torch.float8_e4m3fn"),
        ({}, frozen_as(lambda weight: weight.as_subclass(Packed)), "its base_layer has a weight of Packed"),
        ({}, lambda layer: layer.scaling.update(default=torch.ones(())), "its scaling is a Tensor, not a number"),
    ],
    ids=["dora", "dropout", "bias", "conv", "4bit", "merged", "disabled", "none", "weight", "own_bias", "hooks",
         "hooks_a", "hooks_b", "forward", "forward_b", "parametrized", "float8", "subclass", "scaling"],
)  # fmt: skip
def test_what_is_not_covered_keeps_pefts_forward_and_the_reason_is_said(changes, change, said):
    layer = adapted(**changes)
    if change is not None:
        assert why_not_adapted(layer) is None
        change(layer)
    assert said in why_not_adapted(layer)


def test_what_changes_after_the_override_is_honoured_at_the_next_call(caplog):
    layer, x = adapted(second="second"), drawn(torch.float32)["x"]
    forward = adapted_forward()

    def same(**given):
        found = forward(layer, x, **given)
        torch.testing.assert_close(found, type(layer).forward(layer, x, **given))
        return found.detach()

    with caplog.at_level(logging.INFO):
        seen = [same()]
        layer.set_adapter("second")
        seen.append(same())
        layer.scale_layer(3.0)
        seen.append(same())
        same(adapter_names=None)
        assert "runs peft's forward" not in caplog.text
        layer.set_adapter(["default", "second"])
        seen.append(same())
        layer.set_adapter("default")
        layer.enable_adapters(False)
        seen.append(same())
        layer.enable_adapters(True)
        layer.merge()
        torch.testing.assert_close(same(), seen[0])
        layer.unmerge()
        torch.testing.assert_close(same(), seen[0])
        seen.append(same(adapter_names=["default", "__base__"]))
        assert runs_ours(layer, x)
    assert all((a - b).abs().max() > 0.1 for i, a in enumerate(seen) for b in seen[:i])
    for reason in ("2 adapters are active", "are disabled", "is merged", "called with more than its input"):
        assert caplog.text.count(reason) == 1


@pytest.mark.parametrize("which", [lambda layer: layer.base_layer, a_of, b_of], ids=["base", "a", "b"])
def test_weights_that_are_split_while_the_layer_runs_are_left_to_peft(which):
    layer = adapted()
    module = which(layer)
    weight = module.weight.data.as_subclass(Split)
    module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    assert why_not_adapted(layer) is None  # as before FSDP2 gathers
    assert not runs_ours(layer, drawn(torch.float32)["x"])


def test_dtypes_that_peft_handles_otherwise_are_left_to_it():
    with pytest.raises(RuntimeError, match="dtype"):  # as without ours
        adapted_forward()(adapted(torch.bfloat16), drawn(torch.float32)["x"])
    with torch.autocast("cpu", torch.bfloat16):  # leaves float64 as it is
        assert not runs_ours(adapted(torch.float64), drawn(torch.float64)["x"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda output, x: output * 1.01, "the output is off by"),
        (lambda output, x: output + (x - x.detach()).sum(), "the gradient of x is off by"),
        (lambda output, x: output.double(), "the output is torch.float64, the layer's is torch.float32"),
        (lambda output, x: output.view(-1, 9), "it raises RuntimeError"),
    ],
    ids=["scale", "gradient", "dtype", "raises"],
)
def test_a_forward_that_does_not_agree_is_found(wrong, said):
    layer, right = adapted(), adapted_forward()
    target = {"slots": 50, "device": torch.device("cpu"), "dtype": torch.float32}
    assert said in compare_adapted(layer, lambda self, x: wrong(right(self, x), x), **target).problem
    assert compare_adapted(layer, right, **target).problem is None


def test_layers_are_grouped_proven_and_restored_and_what_lies_on_top_stays(caplog):
    dropped = {"lora_dropout": 0.1}
    layers = [adapted(), adapted(), adapted(**dropped), adapted(r=1, **dropped)]
    model = nn.ModuleList(layers)
    with caplog.at_level(logging.INFO), fused_layers(model, devices=("cpu",)) as lines:
        (line,) = lines
        assert line.startswith("lora: hf_speedkit")
        assert line.endswith("on 2 Linear")
        (check,) = fused_layer_checks(model)
        assert (check.function, check.layers, check.layers_total) == ("lora", 2, 4)
        assert [is_fused(layer) for layer in layers] == [True, True, False, False]
        theirs = layers[1].forward = MethodType(lambda self, x: x, layers[1])
    assert caplog.text.count("lora of Linear is left out: its adapter has dropout") == 1
    assert "forward" not in layers[0].__dict__
    assert layers[1].forward is theirs
