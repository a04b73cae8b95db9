"""On a real GPU: norm, rotation and gate of attention's heads at 27B sizes, right against float32 and timed."""

import pytest
import torch
from kernel_models import tiny_model
from test_kernels_gpu import CONFIG_27B, GPU, SLOTS
from transformers import Qwen3_5TextConfig, Qwen3Config

from hf_speedkit.kernels.attention import register
from hf_speedkit.kernels.attention_parity import compare_attention
from hf_speedkit.kernels.fused_attention import attention_forward, has_head_norms
from hf_speedkit.kernels.fused_layers import fused_layers
from hf_speedkit.kernels.output_gate import gated
from hf_speedkit.kernels.probe_batch import batch_keys
from hf_speedkit.kernels.qk_rotary import HeadNorms, norm_and_rotate
from hf_speedkit.kernels.skeleton import model_skeleton

# Triton is there on a machine with a GPU alone.
output_gate_triton, qk_rotary_triton = (
    pytest.importorskip(f"hf_speedkit.kernels.{name}_triton", exc_type=ImportError)
    for name in ("output_gate", "qk_rotary")
)
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(580)]

BORDERS = (0, 100, 1_000, 2_500, 6_001, SLOTS)
QWEN3_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
BANDWIDTH_BYTES = 4.3e12  # of a copy on an H200, as measured (benchmarks/NOTES.md)


def attention_of(kind):
    configs = {"27B": (Qwen3_5TextConfig, CONFIG_27B), "8B": (Qwen3Config, {**QWEN3_8B, "num_hidden_layers": 1})}
    config_class, settings = configs[kind]
    model = model_skeleton(config_class(**settings), device=GPU, dtype=torch.bfloat16)
    model.set_attn_implementation(register())
    layer = next(module for module in model.modules() if has_head_norms(module))
    for norm in (layer.q_norm, layer.k_norm):
        torch.nn.init.normal_(norm.weight, std=0.3)
    return model, layer


def milliseconds(step, rounds=20):
    for _ in range(3):
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Some 50 ms in which the host issues all rounds: these kernels are shorter than their launches.
    torch.cuda._sleep(100_000_000)
    start.record()
    for _ in range(rounds):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / rounds


@pytest.mark.parametrize("kind", ["27B", "8B"])
@pytest.mark.parametrize("slots", [1, 777, SLOTS])
def test_the_kernels_agree_with_float32_in_positions_that_begin_again(kind, slots):
    _, layer = attention_of(kind)
    forward = attention_forward(one_plus=kind == "27B")
    parity = compare_attention(layer, forward, slots=slots, device=GPU, dtype=torch.bfloat16)
    print(f"{kind}, {slots} slots: {parity}")
    assert parity.problem is None
    wrong = attention_forward(one_plus=kind != "27B")
    assert "off by" in compare_attention(layer, wrong, slots=slots, device=GPU, dtype=torch.bfloat16).problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_head_sizes_that_are_no_power_of_two(dtype):
    layer = next(m for m in tiny_model("qwen3_5", head_dim=48).modules() if has_head_norms(m))
    parity = compare_attention(layer, attention_forward(one_plus=True), slots=333, device=GPU, dtype=dtype)
    assert parity.problem is None


@pytest.mark.parametrize("kind", ["27B", "8B"])
def test_a_layer_with_packed_attention_gives_the_same_forward_and_backward_and_is_timed(kind):
    model, layer = attention_of(kind)
    make = torch.Generator(GPU).manual_seed(0)
    states = torch.randn(1, SLOTS, layer.q_proj.in_features, generator=make, device=GPU).bfloat16().requires_grad_()
    keys = batch_keys(BORDERS, GPU)
    edges = torch.tensor(BORDERS, device=GPU)
    places = torch.arange(SLOTS, device=GPU)
    positions = (places - edges[torch.bucketize(places, edges, right=True) - 1])[None]
    tables = model.model.rotary_emb(states, positions)

    def step():
        output = layer(states, position_embeddings=tables, attention_mask=None, **keys)[0]
        return output.detach(), *torch.autograd.grad(output, [states, *layer.parameters()], states.detach())

    found = {}
    # The norms run on Liger's kernels in both, if it is installed: as in training today.
    for part in ("qk_rotary", None):
        with fused_layers(model, exclude=[part] if part else [], dtype=torch.bfloat16, tokens_per_batch=SLOTS) as lines:
            found[part] = step(), milliseconds(step)
    (own, own_ms), (fused, fused_ms) = found.values()
    print(f"an attention layer of {kind}, forward and backward: own {own_ms:.2f} ms, fused {fused_ms:.2f} ms; {lines}")
    assert any(line.startswith("qk_rotary") for line in lines)
    for name, mine, theirs in zip(["output", "input", *dict(layer.named_parameters())], fused, own, strict=True):
        assert (mine - theirs).float().norm() <= 2e-2 * theirs.float().norm(), name


@pytest.mark.parametrize("elements", [1024, 2048, 4096])
def test_kernels_alone_at_27b_sizes_against_the_bandwidth(monkeypatch, elements):
    """The time of each and what the memory alone would take; for choosing how much a program holds."""
    monkeypatch.setattr(qk_rotary_triton, "_ELEMENTS", elements)
    monkeypatch.setattr(output_gate_triton, "_ELEMENTS", 2 * elements)
    make = torch.Generator(GPU).manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=make, device=GPU).bfloat16()

    projected, keys = random(1, SLOTS, 24, 512).requires_grad_(), random(1, SLOTS, 4, 256).requires_grad_()
    weights = [random(256).requires_grad_() for _ in "qk"]
    norms = HeadNorms(query_weight=weights[0], key_weight=weights[1], query_eps=1e-6, key_eps=1e-6, one_plus=True)
    tables = [random(1, SLOTS, 64) for _ in "cs"]
    outputs = norm_and_rotate(projected, keys, norms, *tables)
    grads = [random(1, SLOTS, heads, 256).transpose(1, 2) for heads in (24, 4)] + [random(1, SLOTS, 24, 256)]
    attended = random(1, SLOTS, 24, 256).requires_grad_()
    gate = outputs[2].detach().requires_grad_()
    product = gated(attended, gate)

    def turn_back():
        return torch.autograd.grad(outputs, [projected, keys, *weights], grads, retain_graph=True)

    def gate_back():
        return torch.autograd.grad(product, [attended, gate], grads[2], retain_graph=True)

    unit = SLOTS * 24 * 256 * 2  # bytes of all queries
    runs = {
        "norm and rotation": (lambda: norm_and_rotate(projected, keys, norms, *tables), 2 + 2 / 6),
        "its backward": (turn_back, 5 + 3 / 6),
        "gate": (lambda: gated(attended, gate), 3),
        "its backward ": (gate_back, 5),
    }
    first, second = turn_back(), turn_back()
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True)), "sums in a fixed order"
    for name, (call, units) in runs.items():
        found, floor = milliseconds(call), units * unit / BANDWIDTH_BYTES * 1e3
        print(f"{elements} elements, {name}: {found:.3f} ms, memory alone {floor:.3f} ms")
        assert found < 6 * floor
