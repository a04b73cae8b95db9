"""On a real GPU: convolutions on slices of a projection at the sizes of a 27B, and a rule that copies nothing."""

import importlib

import pytest
import torch
from test_kernels_gpu import CHANNELS_27B, CONFIG_27B, GPU, SLOTS, filtered
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3_5TextConfig

from hf_speedkit.kernels.fla_convolution import FlaConvolution
from hf_speedkit.kernels.fused_layers import fused_layers
from hf_speedkit.kernels.probe_batch import batch_keys

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(580)]

SIZES = [2_048, 2_048, 6_144]
BORDERS = (0, 1, 100, 1_000, 1_063, SLOTS)


def convolution_of(package):
    if package == "causal_conv1d":
        return filtered(pytest.importorskip("causal_conv1d").causal_conv1d_fn)
    pytest.importorskip("fla")
    convolution = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    bound = FlaConvolution(lambda *args, **kwargs: None, convolution, ("cuda",))
    bound.holders = 1
    return bound


@pytest.mark.parametrize("package", ["causal_conv1d", "fla"])
def test_three_convolutions_on_slices_give_the_numbers_of_one_bit_for_bit(package):
    convolution, keys = convolution_of(package), batch_keys(BORDERS, GPU)
    make = torch.Generator(GPU).manual_seed(0)
    draw = {"generator": make, "device": GPU, "dtype": torch.bfloat16}
    row = torch.randn(1, SLOTS, CHANNELS_27B, **draw).requires_grad_()
    weight = torch.randn(CHANNELS_27B, 4, **draw).requires_grad_()
    incoming = torch.randn(1, SLOTS, CHANNELS_27B, **draw)

    def results(sizes):
        parts = [
            convolution(x.transpose(1, 2), w, None, activation="silu", **keys).transpose(1, 2)
            for x, w in zip(row.split(sizes, dim=-1), weight.split(sizes), strict=True)
        ]
        assert all(part.is_contiguous() for part in parts)
        output = torch.cat(parts, dim=-1)
        return output, *torch.autograd.grad(output, [row, weight], incoming)

    one, three = results([CHANNELS_27B]), results(SIZES)
    assert torch.equal(three[0], one[0])
    assert torch.equal(three[1], one[1])
    # causal-conv1d adds up blocks of positions as they end, in float32, and rounds once to 8 bits.
    assert (three[2] - one[2]).float().norm() / one[2].float().norm() <= 2**-8


def clones_in_the_rule(call):
    """How many times fla copies in the forward passes of the rule during a call."""

    def below(event):
        return sum((event.name == "aten::clone", *(below(child) for child in event.cpu_children)))

    with profile(activities=[ProfilerActivity.CPU]) as session:
        call()
    rules = [event for event in session.events() if event.name == "ChunkGatedDeltaRuleFunction"]
    assert rules
    return sum(below(event) for event in rules)


def milliseconds(call, repeats=10):
    call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def test_the_rule_of_a_27b_layer_copies_nothing_and_boundaries_hold():
    pytest.importorskip("fla")
    modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    with GPU:
        layer = modeling.Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**CONFIG_27B), 0).to(torch.bfloat16)
    make = torch.Generator(GPU).manual_seed(0)
    states = torch.randn(1, SLOTS, layer.hidden_size, generator=make, device=GPU).bfloat16().requires_grad_()
    keys = batch_keys(BORDERS, GPU)

    def step():
        output = layer(states, **keys)
        return output.detach(), *torch.autograd.grad(output, [states, *layer.parameters()], states.detach())

    found = {}
    for exclude in (("split_convolution",), ()):
        with fused_layers(layer, exclude=exclude, dtype=torch.bfloat16, tokens_per_batch=SLOTS) as lines:
            found[exclude] = step(), clones_in_the_rule(step), milliseconds(step)
    print(f"a GatedDeltaNet of 27B, forward and backward: {[result[2] for result in found.values()]} ms; {lines}")
    (own, own_clones, _), (split, clones, _) = found.values()
    assert [line for line in lines if line.startswith("split_convolution")]
    assert own_clones == 3
    assert clones == 0
    assert torch.equal(split[0], own[0])
    names = ["the input", *dict(layer.named_parameters())]
    for name, value, wanted in zip(names, split[1:], own[1:], strict=True):
        assert (value - wanted).float().norm() / wanted.float().norm() <= 2**-8, name
