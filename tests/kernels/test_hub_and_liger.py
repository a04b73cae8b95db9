"""Hub kernels that do not load, and Liger that patched nothing."""

from types import MethodType

import pytest
import torch
from fake_kernels import forget_fakes
from fused_fakes import write_fused_fakes
from kernel_models import tiny_model
from transformers import AutoConfig

from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.fused_layers import fused_layers
from hf_speedkit.kernels.hub import is_hub_name, judge_hub_kernel
from hf_speedkit.kernels.inspection import assert_kernels, check_kernels
from hf_speedkit.kernels.layout import BoundTo, LiveFunction
from hf_speedkit.kernels.liger import liger_check
from hf_speedkit.kernels.requirements import FUNCTIONS
from hf_speedkit.kernels.verdicts import judge

STACK = Stack(capability=(9, 0), versions={"torch": "2.11.0"}, python="3.12.3", cuda="13.0")
NAME = "kernels-community/flash-attn3"


@pytest.fixture(autouse=True)
def _no_fake_stays_behind():
    yield
    forget_fakes()


def no_variant(name):
    raise FileNotFoundError(f"{name}: no build variant torch211-cxx11-cu130-x86_64-linux")


def test_v46_a_hub_kernel_without_a_build_is_blocked_with_the_machine_and_three_ways_out():
    judgement = judge_hub_kernel(NAME, STACK, resolve=no_variant)
    assert judgement.verdict is KernelVerdict.BLOCKED
    assert "torch 2.11.0, CUDA 13.0, Python 3.12.3" in judgement.reason
    assert "FileNotFoundError: kernels-community/flash-attn3: no build variant" in judgement.reason
    for way in ("pin torch", "branch of the kernel", "install the package itself"):
        assert way in judgement.fix


def test_v46_another_attention_than_the_one_asked_for_is_a_fallback_that_names_both():
    judgement = judge_hub_kernel(NAME, STACK, loaded="sdpa")
    assert judgement.verdict is KernelVerdict.FALLBACK
    assert f"{NAME} was asked for and sdpa was loaded" in judgement.reason
    assert judge_hub_kernel(NAME, STACK, loaded=NAME).verdict is KernelVerdict.FUSED


@pytest.mark.parametrize(
    ("asked", "verdicts"),
    [
        (NAME, {KernelVerdict.FUSED, KernelVerdict.FALLBACK}),
        ("sdpa", {KernelVerdict.FUSED}),
        (None, {KernelVerdict.FUSED}),
    ],
)
def test_v46_a_live_model_with_another_attention_than_the_one_asked_for_is_found(asked, verdicts):
    checks = check_kernels(tiny_model("llama"), asked_attention=asked)
    assert {check.verdict for check in checks} == verdicts
    for check in checks:
        if check.verdict is KernelVerdict.FALLBACK:
            assert check.reason == f"{NAME} was asked for and sdpa was loaded"
            assert check.layers == checks[0].layers


def test_v46_a_config_that_names_a_hub_kernel_is_refused_before_the_model_is_built():
    """This machine has no `kernels` package that transformers accepts."""
    config = AutoConfig.for_model("llama", attn_implementation=NAME)
    with pytest.raises(KernelAssertionError, match="known to fail") as error:
        assert_kernels(config)
    assert NAME in str(error.value)


@pytest.mark.parametrize("name", [f"{NAME}@v1", f"{NAME}:flash_attn_varlen_func", NAME])
def test_revision_and_function_are_no_part_of_the_repository(name):
    asked = []
    assert is_hub_name(name)
    assert judge_hub_kernel(name, STACK, resolve=asked.append).verdict is KernelVerdict.FUSED
    assert asked == [NAME]


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "speedkit_varlen"])
def test_names_of_transformers_own_implementations_are_not_repositories(name):
    assert not is_hub_name(name)


class InferenceNorm(torch.nn.Module):
    """As a hub repository marks a layer without a backward."""

    has_backward = False

    def forward(self, x):
        return x.detach()


def test_v55_a_layer_prepared_with_a_kernel_for_inference_is_refused_for_training():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.input_layernorm.forward = MethodType(InferenceNorm.forward, layer.input_layernorm)
    with pytest.raises(KernelAssertionError, match="without some of their gradients") as error:
        assert_kernels(model)
    assert "LlamaRMSNorm, 4 of 9 layers" in str(error.value)


class Clashing(torch.nn.Module):
    kernel_layer_name = "causal_conv1d_fn"

    def forward(self, x, seq_idx, weight, bias=None, activation=None): ...


def test_v47_a_hub_kernel_whose_arguments_clash_with_the_layers_is_broken_before_it_runs():
    hub = Clashing()
    function = LiveFunction(
        function="causal_conv1d_fn", global_name="causal_conv1d_fn", binding=BoundTo.HUB, package="causal_conv1d",
        called=hub, implementation=Clashing.forward,
    )  # fmt: skip
    found = judge(function, FUNCTIONS["causal_conv1d_fn"], None, None)
    assert (found.verdict, "multiple values for argument 'seq_idx'" in found.reason) == (KernelVerdict.BROKEN, True)
    hub.forward = lambda *args, **kwargs: None  # says nothing of its arguments: left to the probe
    assert judge(function, FUNCTIONS["causal_conv1d_fn"], None, None).verdict is KernelVerdict.FUSED


def test_v56_liger_that_patched_nothing_is_refused_with_the_count():
    model = tiny_model("mamba")
    with pytest.raises(KernelAssertionError) as error:
        assert_kernels(model, liger=True)
    assert "use_liger_kernel was asked for, and 0 of 5 modules are patched" in str(error.value)
    assert not any(check.function == "liger" for check in check_kernels(model))


def test_v56_what_liger_patched_is_counted_by_class_and_by_instance():
    model = tiny_model("llama")
    kind = type("LigerRMSNorm", (type(model.model.norm),), {"__module__": "liger_kernel.transformers.rms_norm"})
    model.model.norm.__class__ = kind

    def forward(self, x):
        return x

    forward.__module__ = "liger_kernel.transformers.swiglu"
    mlp = model.model.layers[0].mlp
    mlp.forward = forward.__get__(mlp)
    check = liger_check(model)
    assert (check.verdict, check.layers, check.layers_total) == (KernelVerdict.FUSED, 2, 13)


def test_v56_our_own_binding_of_ligers_functions_is_not_liger_patching_the_model(tmp_path, monkeypatch):
    write_fused_fakes(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = tiny_model("llama")
    with torch.no_grad(), fused_layers(model, devices=("cpu",)) as lines:
        assert lines
        assert liger_check(model).verdict is KernelVerdict.FALLBACK
