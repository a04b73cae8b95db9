"""Functions without a reference of ours are run as parts of their layer and held against transformers' own."""

import textwrap
import types

import pytest
import torch
import transformers
import transformers.models.mamba2.modeling_mamba2  # now, while no fake is on the path: it binds for good
from fake_kernels import (
    RIGHT_CONVOLUTION,
    RIGHT_RULE,
    forget_fakes,
    fresh_copy_of_modeling_file,
    model_bound_to,
    write_fakes,
    write_modules,
)
from kernel_models import FAMILY_SETTINGS, tiny_model

from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels import probe
from hf_speedkit.kernels.bindings import bind_references
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.inspection import check_kernels
from hf_speedkit.kernels.layer_probe import probe_layer
from hf_speedkit.kernels.layout import live_layers, torch_fallback
from hf_speedkit.kernels.probe import TOLERANCES, probe_model

SCAN = """
def mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, seq_idx=None,
                                     dt_limit=None, activation=None, rmsnorm_weight=None, rmsnorm_eps=None,
                                     outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1,
                                     norm_before_gate=True):
    return None  # the layer goes on with the two functions below

def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, dt_bias=None, dt_softplus=False, seq_idx=None,
                              dt_limit=None):
    import torch
    from hf_speedkit.kernels.layout import torch_fallback
    from transformers.models.mamba2 import modeling_mamba2
    scan = torch_fallback(modeling_mamba2.mamba2_chunk_scan)
    def call(x=x, B=B, seq_idx=seq_idx):
        borders = [0, x.shape[1]]
        if seq_idx is not None:
            borders = [0, *((seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero()[:, 0] + 1).tolist(), x.shape[1]]
        parts = [slice(a, b) for a, b in zip(borders, borders[1:])]
        return torch.cat([scan(x[:, p], dt[:, p], A, B[:, p], C[:, p], chunk_size=chunk_size, D=D, dt_bias=dt_bias,
                               dt_softplus=dt_softplus, dt_limit=dt_limit) for p in parts], dim=1)
"""
RIGHT = "return call()"
QUANTISED = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)


@pytest.fixture(autouse=True)
def _no_fake_stays_behind():
    yield
    forget_fakes()


def mamba2_bound_to(folder, monkeypatch, body):
    write_fakes(folder, convolution=RIGHT_CONVOLUTION)
    text = SCAN + textwrap.indent(textwrap.dedent(body), "    ")
    write_modules(folder, mamba_ssm__ops__triton__ssd_combined=text)
    monkeypatch.syspath_prepend(str(folder))
    forget_fakes()
    modeling = fresh_copy_of_modeling_file("mamba2", monkeypatch)
    config_class, model_class, own = FAMILY_SETTINGS["mamba2"]
    settings = {"hidden_size": 32, "vocab_size": 61, "num_hidden_layers": 2, "chunk_size": 32, **own}
    torch.manual_seed(0)
    return getattr(modeling, model_class)(getattr(transformers, config_class)(**settings))


def outcome_of(model, *, packed=True, dtype=None):
    layer = live_layers(model)[0]
    return probe_layer(
        layer,
        model.get_submodule(layer.name),
        hidden_size=32,
        lengths=(1, 33, 40),  # chunks have 32 positions
        tolerance=TOLERANCES[dtype or torch.float32],
        dtype=dtype,
        packed=packed,
    )


def test_checks_of_functions_without_a_reference_say_what_running_their_layer_showed(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "EDGE_LENGTHS", (1, 33))
    model = mamba2_bound_to(tmp_path, monkeypatch, RIGHT)
    found = check_kernels(model, probe=True, tokens_per_batch=64, stack=Stack())
    scans = [check for check in found if check.function.startswith("mamba_")]
    assert [check.verdict for check in scans] == [KernelVerdict.FUSED] * 2
    assert all("ran both ways on cpu as a part of its layer, largest error" in check.evidence for check in scans)
    assert [check.first_call_s is None for check in scans] == [False, True]  # one run, counted once


@pytest.mark.parametrize(
    ("body", "verdict", "says"),
    [
        (RIGHT, KernelVerdict.FUSED, "largest error"),
        ("return call(seq_idx=None)", KernelVerdict.NO_BOUNDARIES, "documents alone agree"),
        ("return call().detach()", KernelVerdict.FORWARD_ONLY, "no gradient reaches dt_bias, A_log"),
        ("return call(B=B * 1.5 - B.detach() * 0.5)", KernelVerdict.BROKEN, "the gradient of"),
        ("out = call(); out[:, -1] = out[:, -1] * float('nan'); return out", KernelVerdict.BROKEN, "is not finite"),
        ("raise RuntimeError('no kernel image')", KernelVerdict.BROKEN, "raises RuntimeError: no kernel image"),
    ],
    ids=["right", "ignores_borders", "v55_detached", "v49_gradient_scaled", "not_finite", "raises"],
)
def test_a_scan_is_held_against_the_torch_function_of_its_layer(tmp_path, monkeypatch, body, verdict, says):
    outcome = outcome_of(mamba2_bound_to(tmp_path, monkeypatch, body))
    assert outcome.verdict is verdict, outcome
    assert says in outcome.detail


def test_rows_that_are_not_packed_are_run_one_by_one_and_bfloat16_is_within_the_tolerance(tmp_path, monkeypatch):
    model = mamba2_bound_to(tmp_path, monkeypatch, "return call(seq_idx=None)")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for kind in (None, torch.bfloat16):
        assert outcome_of(model, packed=False, dtype=kind).verdict is KernelVerdict.FUSED
    assert all(parameter.grad is None for parameter in model.parameters())  # a copy ran, not the job's own layer
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_an_adapter_that_a_fused_function_reads_past_gets_no_gradient_and_is_named(tmp_path, monkeypatch):
    """mamba_ssm takes the weight of out_proj and not out_proj: what PEFT puts there is never called."""

    class Adapter(torch.nn.Linear):
        def __init__(self, base):
            super().__init__(base.in_features, base.out_features, bias=False)
            self.adapter = torch.nn.Parameter(torch.ones(base.out_features))

        def forward(self, x):
            return super().forward(x) * self.adapter

    reads_past = (
        "import torch; return torch.nn.functional.linear(zxbcdt[..., :outproj_weight.shape[1]], outproj_weight)"
    )
    monkeypatch.setitem(globals(), "SCAN", SCAN.replace("return None", reads_past))
    model = mamba2_bound_to(tmp_path, monkeypatch, RIGHT)
    for layer in live_layers(model):
        module = model.get_submodule(layer.name)
        module.out_proj = Adapter(module.out_proj)
    outcome = outcome_of(model)
    assert outcome.verdict is KernelVerdict.FORWARD_ONLY
    assert "out_proj.adapter" in outcome.detail


def test_a_wrong_kernel_on_some_of_the_layers_is_found_whichever_layers_they_are(tmp_path, monkeypatch):
    """Layers of one class that are bound to different objects are a check each, and each is run."""
    wrong = RIGHT_CONVOLUTION.replace("return right(x, ", "return right(x * 1.5 - x.detach() * 0.5, ")
    for name, convolution in (("wrong", wrong), ("right", RIGHT_CONVOLUTION)):
        write_fakes(tmp_path / name, fla=RIGHT_RULE, convolution=convolution)
    patched = model_bound_to(tmp_path / "wrong", monkeypatch)
    model = model_bound_to(tmp_path / "right", monkeypatch)
    layer = model.model.layers[1].linear_attn
    layer.forward = types.MethodType(type(patched.model.layers[1].linear_attn).forward, layer)
    checks = [check for check in check_kernels(model, stack=Stack()) if check.function == "causal_conv1d_fn"]
    found = probe_model(model, checks)
    assert [(check.verdict, check.layers) for check in found] == [(KernelVerdict.FUSED, 2), (KernelVerdict.BROKEN, 1)]
    assert "the gradient of x is off by" in found[1].reason


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda module: setattr(module.in_proj, "weight", QUANTISED), "its weights are quantised"),
        (lambda module: setattr(module, "forward", None), "raises with transformers' own functions"),
    ],
    ids=["quantised", "cannot_be_called"],
)
def test_a_layer_that_cannot_be_compared_says_why_and_claims_nothing(tmp_path, monkeypatch, change, says):
    model = mamba2_bound_to(tmp_path, monkeypatch, RIGHT)
    change(model.get_submodule(live_layers(model)[0].name))
    outcome = outcome_of(model)
    assert outcome.verdict is KernelVerdict.UNVERIFIED
    assert says in outcome.detail


def test_the_torch_function_is_found_behind_whatever_is_bound():
    """For every function of every family, or nothing of the family could be held against it."""
    model = tiny_model("qwen3_5")
    plain = {f.global_name: torch_fallback(f.called) for layer in live_layers(model) for f in layer.functions}
    with bind_references(model):
        bound = {f.global_name: torch_fallback(f.called) for layer in live_layers(model) for f in layer.functions}
    assert plain == bound
    assert all(callable(function) for function in plain.values())
    assert torch_fallback(len) is None
