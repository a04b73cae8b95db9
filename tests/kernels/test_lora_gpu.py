"""On a real GPU: adapters beside the maps of a 27B, 8,192 rows, ours and peft's, numbers, times and memory."""

import pytest
import torch
from test_gated_delta_gpu import milliseconds
from test_kernels_gpu import GPU, SLOTS
from torch import nn

from hf_speedkit.kernels.fused_layers import fused_layer_checks, fused_layers

peft = pytest.importorskip("peft", reason="pip install peft")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(580)]

SHAPES = [(5_120, 17_408), (17_408, 5_120), (5_120, 10_240), (6_144, 5_120), (5_120, 48)]


class Model(nn.Module):
    def __init__(self, wide, out):
        super().__init__()
        self.map = nn.Linear(wide, out, bias=False)


def adapted(wide, out):
    torch.manual_seed(0)
    with GPU:
        model = Model(wide, out).to(torch.bfloat16)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["map"])
    layer = peft.get_peft_model(model, config).base_model.model.map
    nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    assert layer.lora_A["default"].weight.dtype is torch.float32
    return layer


def exact(layer, x, incoming):
    """Output and gradients in float32, without TF32 (which training may have on)."""
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        weights = layer.base_layer.weight.float(), layer.lora_A["default"].weight, layer.lora_B["default"].weight
        x = x.detach().float().requires_grad_()
        output = x @ weights[0].T + 2.0 * (x @ weights[1].T) @ weights[2].T
        return [output.detach(), *torch.autograd.grad(output, [x, *weights[1:]], incoming.float())]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


@pytest.mark.parametrize(("wide", "out"), SHAPES)
def test_an_adapter_of_a_27b_is_as_near_to_the_truth_as_pefts_and_faster(wide, out):
    layer = adapted(wide, out)
    make = torch.Generator(GPU).manual_seed(0)
    x = torch.randn(1, SLOTS, wide, generator=make, device=GPU).bfloat16().requires_grad_()
    incoming = torch.randn(1, SLOTS, out, generator=make, device=GPU).bfloat16()
    trained = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]

    def step():
        output = layer(x)
        return [output.detach(), *torch.autograd.grad(output, trained, incoming)]

    def held():
        before = torch.cuda.memory_allocated()
        output = layer(x)
        return (torch.cuda.memory_allocated() - before - output.nbytes) / 2**20

    def measured():
        return step(), milliseconds(lambda: layer(x)), milliseconds(step), held()

    wanted, theirs = exact(layer, x, incoming), measured()
    with fused_layers(layer, dtype=torch.bfloat16, tokens_per_batch=SLOTS) as lines:
        assert [check.function for check in fused_layer_checks(layer)] == ["lora"]
        ours = measured()
    for name, (_, forward, both, mib) in (("peft", theirs), ("ours", ours)):
        print(f"{wide} -> {out}, {name}: forward {forward:.3f} ms, with backward {both:.3f} ms, {mib:.0f} MiB held")
    print(*lines)
    names = ("the output", "the gradient of x", "of lora_A", "of lora_B")
    for name, value, other, true in zip(names, ours[0], theirs[0], wanted, strict=True):
        assert value.dtype == other.dtype, name
        error, pefts = ((each.float() - true).norm() / true.norm() for each in (value, other))
        print(f"{name}: off by {error:.1e}, peft by {pefts:.1e}")
        # Three roundings to 8 bits at most, of half an eps each; peft rounds what it adds to once.
        assert error < 1.5 * torch.finfo(torch.bfloat16).eps, name
    assert out < 1_000 or ours[2] < theirs[2]
