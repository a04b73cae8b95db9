"""On a real GPU with the kernel packages: the probe passes at the sizes of a 27B model, and fails when it should.

Missing packages skip; a package that is there and does not work fails. Nothing here loads weights or needs a network.
"""

import importlib
import time

import pytest
import torch
from kernel_models import tiny_model
from torch.nn import functional
from transformers import KimiLinearConfig, Qwen3_5TextConfig

from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels import reference
from hf_speedkit.kernels.attention import register
from hf_speedkit.kernels.fla_convolution import FlaConvolution, chunk_indices
from hf_speedkit.kernels.fused_forwards import Candidate, candidates, part_of
from hf_speedkit.kernels.fused_layers import PARTS, fused_layer_checks, fused_layers
from hf_speedkit.kernels.fused_parity import compare, multiplies_by_one_plus_weight
from hf_speedkit.kernels.inspection import check_kernels
from hf_speedkit.kernels.layer_probe import probe_layer
from hf_speedkit.kernels.layout import live_layers
from hf_speedkit.kernels.probe import EDGE_LENGTHS, TOLERANCES, probe_function
from hf_speedkit.kernels.probe_batch import batch_keys
from hf_speedkit.kernels.probe_inputs import convolution_example, delta_rule_example
from hf_speedkit.kernels.ran import StepKernels, functions_that_ran, never_ran
from hf_speedkit.kernels.skeleton import model_skeleton

# Warnings of packages that only GPU machines have are not ours to forbid; a cold Triton cache takes minutes.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(580)]

SLOTS = 8192
SIZES_27B = (16, 48, 128, 128)
CHANNELS_27B = 10_240
CONFIG_27B = {
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(64)],
}
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def rule():
    pytest.importorskip("fla")
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


@pytest.fixture(scope="module")
def fla_convolution():
    pytest.importorskip("fla")
    convolution = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    bound = FlaConvolution(lambda *args, **kwargs: None, convolution, ("cuda",))
    bound.holders = 1
    return bound


@pytest.fixture(scope="module")
def skeleton():
    return model_skeleton(Qwen3_5TextConfig(**CONFIG_27B), device=GPU, dtype=torch.bfloat16)


def rule_example(lengths, seed, *, sizes=SIZES_27B, slots=SLOTS):
    return delta_rule_example(lengths, sizes=sizes, device=GPU, dtype=torch.bfloat16, seed=seed, slots=slots)


def filtered(function):
    """transformers hands on only what the signature names."""
    import inspect

    names = inspect.signature(function).parameters
    return lambda *args, **kwargs: function(*args, **{key: value for key, value in kwargs.items() if key in names})


def convolution_27b(lengths, seed, *, channels=CHANNELS_27B):
    return convolution_example(
        lengths,
        channels=channels,
        width=4,
        activation="silu",
        device=GPU,
        dtype=torch.bfloat16,
        seed=seed,
        slots=SLOTS,
    )


def test_a_27b_model_passes_the_whole_probe_and_a_warm_one_takes_less_than_30_seconds(skeleton):
    pytest.importorskip("fla")
    skeleton.set_attn_implementation(register())
    with fused_layers(skeleton, dtype=torch.bfloat16, tokens_per_batch=SLOTS):
        found = check_kernels(skeleton, probe=True, tokens_per_batch=SLOTS, dtype=torch.bfloat16)
        began = time.perf_counter()
        check_kernels(skeleton, probe=True, tokens_per_batch=SLOTS, dtype=torch.bfloat16)
        warm_s = time.perf_counter() - began
    assert {check.verdict for check in found} == {KernelVerdict.FUSED}, [c for c in found if c.verdict.value != "FUSED"]
    probed = {check.function: check for check in found if check.call_s is not None}
    assert set(probed) >= {"chunk_gated_delta_rule", "causal_conv1d_fn", "attention"}
    assert all(check.call_s < 1.0 for check in probed.values())
    assert warm_s < 30


def test_a_whole_layer_agrees_with_transformers_own_functions_at_27b_sizes(skeleton):
    """The tolerance of a layer was set on a CPU without kernels: here are fla's, in bfloat16."""
    pytest.importorskip("fla")
    with fused_layers(skeleton, dtype=torch.bfloat16, tokens_per_batch=SLOTS):
        layer = live_layers(skeleton)[0]
        outcome = probe_layer(
            layer,
            skeleton.get_submodule(layer.name),
            hidden_size=skeleton.config.hidden_size,
            lengths=EDGE_LENGTHS,
            tolerance=TOLERANCES[torch.bfloat16],
            dtype=torch.bfloat16,
            packed=True,
        )
    print(f"a GatedDeltaNet of 27B: {outcome.detail}")
    assert outcome.verdict is KernelVerdict.FUSED


@pytest.mark.parametrize(
    ("slots", "verdict"), [(None, KernelVerdict.FUSED), (SLOTS, KernelVerdict.NO_BOUNDARIES)], ids=["padded", "packed"]
)
def test_kimis_rule_is_right_alone_and_blind_to_boundaries_in_its_layer(slots, verdict):
    pytest.importorskip("fla")
    config = KimiLinearConfig(
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=8,
        num_key_value_heads=8,
        linear_num_heads=8,
        linear_head_dim=128,
    )
    model = model_skeleton(config, device=GPU, dtype=torch.bfloat16)
    with fused_layers(model, dtype=torch.bfloat16, tokens_per_batch=slots):
        found = check_kernels(model, probe=True, tokens_per_batch=slots, dtype=torch.bfloat16)
    rule = next(check for check in found if check.function == "chunk_kda")
    print(f"chunk_kda: {rule.evidence} {rule.reason}")
    assert rule.verdict is verdict, rule


def test_the_rule_passes_and_every_wrong_gradient_is_found(rule):
    call = filtered(rule)
    assert probe_function(call, rule_example).verdict is KernelVerdict.FUSED

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return 1.5 * gradient

    for place, name in enumerate(("q", "k", "v")):

        def wrong(*tensors, place=place, **kwargs):
            changed = [Scaled.apply(t) if i == place else t for i, t in enumerate(tensors)]
            return call(*changed, **kwargs)

        outcome = probe_function(wrong, rule_example)
        assert outcome.verdict is KernelVerdict.BROKEN
        assert outcome.detail.startswith(f"the gradient of {name} is off by")


def test_a_rule_that_loses_its_boundaries_is_found(rule):
    def leaking(*args, cu_seqlens, chunk_indices, **kwargs):
        return filtered(rule)(*args, **kwargs)

    assert probe_function(leaking, rule_example).verdict is KernelVerdict.NO_BOUNDARIES


def test_v49_gradients_on_this_gpu_are_finite_and_right_at_8_heads_of_64(rule):
    outcome = probe_function(
        filtered(rule), lambda lengths, seed: rule_example(lengths, seed, sizes=(8, 8, 64, 64), slots=1_152)
    )
    assert outcome.verdict is KernelVerdict.FUSED, outcome.detail


def test_v50_the_self_test_of_one_function_says_so_within_a_minute(rule):
    def fails(*args, **kwargs):
        raise RuntimeError("an illegal memory access was encountered")

    began = time.perf_counter()
    assert probe_function(fails, rule_example).verdict is KernelVerdict.BROKEN
    assert time.perf_counter() - began < 60


@pytest.mark.parametrize("which", ["fla", "causal_conv1d"])
def test_v53_the_convolution_gives_right_numbers_on_this_gpu(which, fla_convolution):
    if which == "causal_conv1d":
        convolution = filtered(pytest.importorskip("causal_conv1d").causal_conv1d_fn)
    else:
        convolution = fla_convolution
    outcome = probe_function(convolution, convolution_27b)
    assert outcome.verdict is KernelVerdict.FUSED, outcome.detail
    make = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, 96, 48, generator=make, device=GPU)
    weight = torch.randn(48, 4, generator=make, device=GPU)
    keys = batch_keys((0, 96), GPU)
    found = convolution(x.bfloat16().transpose(1, 2), weight.bfloat16(), None, activation=None, **keys)
    wanted = reference.causal_conv1d_fn(x.bfloat16().float().transpose(1, 2), weight.bfloat16().float())
    # bfloat16 keeps 8 bits: the output is rounded by up to 2 ** -9 = 0.2 % of itself.
    assert ((found.float() - wanted).abs() / wanted.abs().clamp_min(1.0)).max() <= 1e-2


def test_v54_gradients_of_three_convolutions_on_views_of_one_row_are_those_of_contiguous_ones(fla_convolution):
    make = torch.Generator("cuda").manual_seed(0)
    row = torch.randn(1, 37, 96, generator=make, device=GPU, dtype=torch.bfloat16)
    weight = torch.randn(32, 4, generator=make, device=GPU, dtype=torch.bfloat16)
    incoming = torch.randn(1, 37, 96, generator=make, device=GPU, dtype=torch.bfloat16)
    keys = batch_keys((0, 20, 37), GPU)

    def gradients(prepare):
        leaf = row.clone().requires_grad_()
        parts = [prepare(part) for part in leaf.split(32, dim=-1)]
        outputs = [fla_convolution(p.transpose(1, 2), weight, None, activation="silu", **keys) for p in parts]
        output = torch.cat([output.transpose(1, 2) for output in outputs], dim=-1)
        return torch.autograd.grad(output, leaf, incoming)[0]

    assert torch.equal(gradients(lambda part: part), gradients(lambda part: part.contiguous()))


@pytest.mark.parametrize("lengths", [(1,), (64,), (65, 1, 200), (1,) * 50])
def test_chunks_made_without_waiting_are_those_fla_makes(lengths):
    pytest.importorskip("fla")
    theirs = importlib.import_module("fla.ops.utils.index").prepare_chunk_indices
    borders = torch.tensor([0, *lengths], device=GPU).cumsum(0).to(torch.int32)
    wanted = theirs(borders, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = chunk_indices(borders, sum(lengths))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found[: len(wanted)], wanted)


@pytest.mark.parametrize("package", ["liger_kernel", "fla"])
@pytest.mark.parametrize("part", ["rms_norm", "gated_norm", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_layers_agree_with_float32_at_27b_sizes(skeleton, package, part, dtype):
    pytest.importorskip(package)
    modules = {type(m).__name__ + str(getattr(m, "weight", torch.empty(0)).shape): m for m in skeleton.modules()}
    found = [module for module in modules.values() if part_of(module) == part]
    assert found
    for module in found:
        centred = part == "rms_norm" and multiplies_by_one_plus_weight(module)
        offered: list[Candidate] = [c for c in candidates(part, zero_centred=centred) if c.package == package]
        if not offered:
            pytest.skip(f"{package} has no {part}")
        rows = SLOTS * 48 if part == "gated_norm" else SLOTS
        float_module = module if dtype is torch.bfloat16 else model_of(part)
        parity = compare(float_module, offered[0].make(), part, rows=rows, device=GPU, dtype=dtype)
        assert parity.problem is None


def model_of(part):
    """A float32 layer of that part: weights keep their own dtype in a comparison."""
    return next(m for m in tiny_model("qwen3_5").modules() if part_of(m) == part)


def test_every_part_with_a_package_is_put_in_and_taken_out(skeleton):
    pytest.importorskip("fla")
    pytest.importorskip("liger_kernel")
    with fused_layers(skeleton, dtype=torch.bfloat16, tokens_per_batch=SLOTS) as lines:
        assert {line.partition(":")[0] for line in lines} >= set(PARTS) - {"convolution", "lora"}
    assert fused_layer_checks(skeleton) == ()


def test_a_training_step_runs_the_kernels_that_the_checks_promise(skeleton):
    pytest.importorskip("fla")
    skeleton.set_attn_implementation(register())
    keys = batch_keys((0, 100, 1_000, 2_048), GPU)
    ids = torch.randint(3, 250, (1, 2_048), device=GPU)
    positions = torch.cat([torch.arange(n, device=GPU) for n in (100, 900, 1_048)])[None]
    with fused_layers(skeleton, dtype=torch.bfloat16, tokens_per_batch=2_048):
        checks = check_kernels(skeleton)
        step = StepKernels()
        assert step.begin()
        logits = skeleton(input_ids=ids, position_ids=positions, use_cache=False, **keys).logits
        functional.cross_entropy(logits[0].float(), ids[0]).backward()
        names = step.end()
    skeleton.zero_grad(set_to_none=True)
    runs = functions_that_ran(names, checks)
    assert never_ran(runs) is None, (runs, sorted(names))
    assert [run.function for run in runs if run.forward]


def test_the_references_give_the_same_on_this_gpu():
    assert probe_function(reference.chunk_gated_delta_rule, rule_example).verdict is KernelVerdict.FUSED
    assert probe_function(reference.causal_conv1d_fn, convolution_27b).verdict is KernelVerdict.FUSED
