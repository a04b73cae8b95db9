"""Fused norms and SwiGLU: put in where they agree with the layer's own forward, left out where not, taken out again."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from fake_kernels import forget_fakes, model_bound_to
from fused_fakes import FLA_GATED, RMS, SWIGLU, write_fused_fakes
from kernel_models import COMMON, random_documents, summed_loss, tiny_model
from torch.distributed.fsdp import fully_shard
from transformers import Gemma4TextConfig, Gemma4TextModel

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels.attention import register, unsupported_reason
from hf_speedkit.kernels.attention_parity import compare_attention
from hf_speedkit.kernels.bindings import bind_references
from hf_speedkit.kernels.fused_forwards import candidates, part_of
from hf_speedkit.kernels.fused_layers import PARTS, fused_layer_checks, fused_layers
from hf_speedkit.kernels.fused_parity import compare, multiplies_by_one_plus_weight
from hf_speedkit.kernels.inspection import check_kernels
from hf_speedkit.kernels.layout import config_of

CPU = ("cpu",)
LAYERS = tuple(part for part in PARTS if part != "lora")  # of a model without adapters


@pytest.fixture(autouse=True)
def _no_fake_stays_behind():
    yield
    forget_fakes()


@pytest.fixture
def model_with(tmp_path, monkeypatch):
    def build(**fakes):
        write_fused_fakes(tmp_path, **fakes)
        model = model_bound_to(tmp_path, monkeypatch)
        for parameter in model.parameters():  # a norm whose weight is 0 would hide a wrong one
            torch.nn.init.normal_(parameter, std=0.3)
        return model

    return build


def parts(lines):
    return {line.partition(":")[0]: line for line in lines}


def gradients(model):
    (document,) = random_documents([40])
    model.zero_grad()
    summed_loss(model, {"input_ids": document[None], "use_cache": False}, document[None]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_every_part_is_fused_from_the_best_package_and_gradients_stay(model_with):
    model = model_with()
    before = gradients(model)
    with fused_layers(model, devices=CPU) as lines:
        found = parts(lines)
        after = gradients(model)
        checks = {check.function: check for check in fused_layer_checks(model)}
    assert set(found) == set(LAYERS)
    assert "liger_kernel 0.8.5" in found["rms_norm"]
    assert "liger_kernel 0.8.5" in found["swiglu"]
    assert "fla 0.6.0" in found["gated_norm"]
    assert "fla 0.6.0" in found["convolution"]
    assert "hf_speedkit" in found["split_convolution"]
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))
    assert {name: (check.layers, check.layers_total) for name, check in checks.items()} == {
        "split_convolution": (3, 3),
        "rms_norm": (11, 11),
        "gated_norm": (3, 3),
        "swiglu": (4, 4),
        "qk_rotary": (1, 1),
    }
    assert {check.verdict for check in checks.values()} == {KernelVerdict.FUSED}


def test_afterwards_everything_is_as_it_was(model_with):
    model = model_with()
    names = [(name, sorted(module.__dict__)) for name, module in model.named_modules()]
    checks = check_kernels(model)
    with fused_layers(model, devices=CPU):
        assert len(check_kernels(model)) > len(checks)
    assert [(name, sorted(module.__dict__)) for name, module in model.named_modules()] == names
    assert check_kernels(model) == checks


def test_the_inspection_lists_what_is_fused_with_its_package(model_with):
    model = model_with()
    with fused_layers(model, devices=CPU):
        found = {check.function: check.evidence for check in check_kernels(model)}
    assert found["rms_norm"].startswith("liger_kernel 0.8.5, largest error")
    assert found["causal_conv1d_fn"].startswith("fla 0.6.0: fla.modules.causal_conv1d, in the place of causal_conv1d")


@pytest.mark.parametrize("part", LAYERS)
def test_each_part_can_be_switched_off(model_with, part):
    # Where the convolution is transformers' torch fallback there is nothing to split.
    gone = {"convolution", "split_convolution"} if part == "convolution" else {part}
    with fused_layers(model_with(), exclude=(part,), devices=CPU) as lines:
        assert set(parts(lines)) == set(LAYERS) - gone


def test_a_part_that_does_not_exist_cannot_be_switched_off():
    with pytest.raises(ConfigurationError, match="names are: convolution, split_convolution, rms_norm"):
        fused_layers(tiny_model("llama"), exclude=("norms",)).__enter__()


def test_on_a_cpu_nothing_is_changed(model_with):
    model = model_with()
    with fused_layers(model) as lines:
        assert lines == ()
        assert fused_layer_checks(model) == ()


def test_without_the_packages_only_our_own_is_put_in_and_nobody_is_warned(caplog):
    model = tiny_model("qwen3_5")
    with fused_layers(model, devices=CPU) as lines:
        assert set(parts(lines)) == {"qk_rotary"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("module", "text", "reason"),
    [
        ("ops__rms_norm", RMS.replace("(offset + W.float())", "W.float()"), "the output is off by"),
        ("ops__rms_norm", RMS.replace("+ eps)", "* 1.5 + eps)"), "the output is off by"),
        ("ops__rms_norm", RMS.replace(".to(X.dtype)\n", ".to(torch.float64)\n"), "its output is torch.float64"),
        ("ops__rms_norm", 'raise ImportError("undefined symbol: x")', "fails to import: ImportError: undefined symbol"),
        ("ops__rms_norm", "", "fails to import: AttributeError"),
        ("ops__swiglu", SWIGLU.replace("return da, db", "return 1.5 * da, db"), "the gradient of input 1 is off by"),
        ("ops__swiglu", SWIGLU.replace("return torch", "return float('nan') * torch"), "the output is not finite"),
        ("ops__swiglu", SWIGLU.replace("da = dc", "raise RuntimeError('no'); da = dc"), "it raises RuntimeError: no"),
        ("ops__swiglu", SWIGLU.replace("return da, db", "return None, db"), "the gradient of input 1 is off by"),
    ],
    ids=["offset", "scale", "dtype", "import", "lacks", "gradient", "nan", "no_backward", "no_gradient"],
)
def test_what_does_not_agree_is_left_out_with_the_reason_and_the_next_package_is_taken(
    model_with, caplog, module, text, reason
):
    part = module.removeprefix("ops__")
    with fused_layers(model_with(liger={module: text}), devices=CPU) as lines:
        assert "fla 0.6.0" in parts(lines)[part]
    assert f"{part} of" in caplog.text
    assert reason in caplog.text


def test_a_part_without_a_candidate_that_agrees_stays_as_it_was(model_with, caplog):
    model = model_with(fla={"norm__fused_norm_gate": FLA_GATED.replace("silu", "sigmoid")})
    with fused_layers(model, devices=CPU) as lines:
        assert "gated_norm" not in parts(lines)
        assert "gated_norm" not in {check.function for check in fused_layer_checks(model)}
    assert "gated_norm of Qwen3_5RMSNormGated from fla is left out: the output is off by" in caplog.text


def test_a_forward_that_somebody_else_put_there_is_left_alone(model_with):
    model = model_with()
    norm = model.model.norm
    theirs = norm.forward = lambda x: type(norm).forward(norm, x)
    with fused_layers(model, devices=CPU):
        assert norm.forward is theirs
        checks = {check.function: check for check in fused_layer_checks(model)}
    assert norm.forward is theirs
    assert (checks["rms_norm"].layers, checks["rms_norm"].layers_total) == (10, 11)


def test_something_bound_on_top_of_ours_stays(model_with):
    model = model_with()
    with fused_layers(model, devices=CPU):
        theirs = model.model.norm.forward = lambda x: x
    assert model.model.norm.forward is theirs


def test_checkpoints_and_copies_do_not_see_the_change(model_with):
    model = model_with()
    names = list(model.state_dict())
    with fused_layers(model, devices=CPU):
        assert list(model.state_dict()) == names
        twin = copy.deepcopy(model)
    assert twin.model.norm.forward.__self__ is twin.model.norm


def test_frozen_weights_are_fused_as_well(model_with):
    model = model_with().requires_grad_(False)
    with fused_layers(model, devices=CPU) as lines:
        assert set(parts(lines)) == set(LAYERS)


def test_the_references_take_what_is_left(model_with):
    """Order in the trainer: fused first, then references for what only the torch fallback can do."""
    model = model_with()
    with fused_layers(model, devices=CPU), bind_references(model) as binding:
        assert binding.functions == ()
    with (
        fused_layers(model, exclude=("convolution",), devices=CPU),
        bind_references(model) as binding,
    ):
        assert [name.rpartition(".")[2] for name in binding.functions] == ["causal_conv1d_fn"]


@pytest.mark.parametrize(
    ("family", "centred"), [("qwen3_5", True), ("qwen3_next", True), ("llama", False), ("olmo_hybrid", False)]
)
def test_the_kind_of_norm_is_read_from_what_its_forward_does(family, centred):
    """liger's plain RMSNorm is wrong for Qwen3.5, whose norms multiply by 1 + weight."""
    norms = [module for module in tiny_model(family).modules() if part_of(module) == "rms_norm"]
    assert {multiplies_by_one_plus_weight(norm) for norm in norms} == {centred}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "llama", "olmo_hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layers_own_forward_passes_its_own_comparison(family, dtype):
    for module in tiny_model(family).modules():
        part = part_of(module)
        own, target = type(module).forward, {"device": torch.device("cpu"), "dtype": dtype}
        if part == "qk_rotary":
            assert compare_attention(module, own, slots=50, **target).problem is None
        elif part not in (None, "split_convolution"):
            assert compare(module, own, part, rows=50, **target).problem is None


def test_a_config_that_raises_for_what_its_layers_do_not_share_stops_nothing():
    """transformers 5.23 does so for Gemma 4, whose layers of full attention have another number of heads."""
    small = {"vocab_size_per_layer_input": 8, "hidden_size_per_layer_input": 8}
    config = Gemma4TextConfig(**COMMON, **small, num_global_key_value_heads=2, attention_k_eq_v=True)
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        config.num_key_value_heads  # noqa: B018
    model = Gemma4TextModel(config)
    assert [config_of(layer.self_attn).num_key_value_heads for layer in model.layers] == [1, 1, 1, 2]
    for attention in ("eager", register()):
        model.set_attn_implementation(attention)
        with fused_layers(model, devices=CPU) as lines:
            assert lines == ()
            check_kernels(model, probe=True, tokens_per_batch=64)
    of_a_gpu = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    assert unsupported_reason(config, **of_a_gpu) == "head_dim 512 is above 256"
    del model.layers[0].self_attn.v_norm  # what is left looks like a layer that could be fused
    assert part_of(model.layers[0].self_attn) is None


def test_a_layer_that_cannot_be_read_is_left_out_with_the_reason(caplog):
    """FSDP1 takes parameters out of their modules; whatever else does is no reason to end a job either."""
    model = tiny_model("qwen3_5")
    for layer in model.model.layers[:3]:
        del layer.linear_attn.conv1d.weight
    with bind_references(model), fused_layers(model, devices=CPU) as lines:
        assert set(parts(lines)) == {"qk_rotary"}
    assert (
        "split_convolution of Qwen3_5GatedDeltaNet is left out: AttributeError: 'Conv1d' object has no" in caplog.text
    )


def test_an_mlp_with_another_activation_is_not_a_swiglu():
    mlp = tiny_model("llama", hidden_act="gelu").model.layers[0].mlp
    assert part_of(mlp) is None


def test_rows_behind_those_compared_run_too():
    norm = tiny_model("llama").model.norm
    rows = []

    def look(self, x):
        rows.append(x.shape[1])
        return type(norm).forward(self, x)

    parity = compare(norm, look, "rms_norm", rows=20_000, device=torch.device("cpu"), dtype=torch.float32)
    assert parity.problem is None
    assert rows == [20_000]


def test_every_part_has_a_candidate():
    for part in set(PARTS) - {"convolution"}:
        assert candidates(part, zero_centred=True)


def test_layers_that_fsdp2_has_sharded_are_fused_too(model_with, tmp_path):
    """accelerate puts the final norm into a group of its own, which changes its class."""
    model = model_with()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for part in (*model.model.layers, [model.model.norm, model.lm_head], model):
            fully_shard(part, mesh=dist.init_device_mesh("cpu", (1,)))
        with fused_layers(model, devices=CPU) as lines:
            checks = {check.function: check for check in fused_layer_checks(model)}
            (document,) = random_documents([40])
            summed_loss(model, {"input_ids": document[None], "use_cache": False}, document[None]).backward()
            gradient = model.model.norm.weight.grad.full_tensor()
    finally:
        dist.destroy_process_group()
    assert set(parts(lines)) == set(LAYERS)
    assert sum(check.layers for name, check in checks.items() if name == "rms_norm") >= 1
    assert gradient.abs().max() > 0
