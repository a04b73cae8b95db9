"""Every way a kernel package can be wrong gets a verdict and a message of its own."""

import types
from importlib.util import find_spec

import pytest
import torch
from fake_kernels import RIGHT_CONVOLUTION, RIGHT_RULE, forget_fakes, model_bound_to, rule, write_fakes
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels import patience, probe
from hf_speedkit.kernels.bindings import bind_references
from hf_speedkit.kernels.inspection import assert_kernels, check_kernels
from hf_speedkit.kernels.requirements import FUNCTIONS
from hf_speedkit.kernels.verdicts import upgrade_command

RULE, CONVOLUTION = "chunk_gated_delta_rule", "causal_conv1d_fn"


@pytest.fixture(autouse=True)
def _no_fake_stays_behind():
    yield
    forget_fakes()


def check_of(function, model, **settings):
    found = [check for check in check_kernels(model, **settings) if check.function == function]
    assert len(found) == 1
    assert (found[0].layers, found[0].layers_total) == (3, 3)
    return found[0]


def test_right_packages_are_fused_with_their_versions_and_the_error_of_the_probe(tmp_path, monkeypatch):
    write_fakes(tmp_path, fla=RIGHT_RULE, convolution=RIGHT_CONVOLUTION)
    model = model_bound_to(tmp_path, monkeypatch)
    state = torch.random.get_rng_state()
    checks = assert_kernels(model, probe=True)
    assert {check.verdict for check in checks} == {KernelVerdict.FUSED}
    evidence = {check.function: check.evidence for check in checks}
    assert evidence[RULE].startswith("fla 0.6.0: fla.ops.gated_delta_rule; ran both ways on cpu in float32")
    assert evidence[CONVOLUTION].startswith("causal_conv1d 1.7.0: causal_conv1d; ran both ways")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_probe_runs_in_the_dtype_that_training_will_use(tmp_path, monkeypatch):
    write_fakes(tmp_path, fla=RIGHT_RULE, convolution=RIGHT_CONVOLUTION)
    model = model_bound_to(tmp_path, monkeypatch)
    checks = check_kernels(model, probe=True, dtype=torch.bfloat16)
    assert all("in bfloat16" in check.evidence for check in checks if check.function != "attention")


def test_fused_kernels_are_left_alone_by_the_binding(tmp_path, monkeypatch):
    write_fakes(tmp_path, fla=RIGHT_RULE, convolution=RIGHT_CONVOLUTION)
    assert bind_references(model_bound_to(tmp_path, monkeypatch)).functions == ()


@pytest.mark.parametrize(
    ("fla", "reason", "fix"),
    [
        (None, "`fla` is not installed", 'pip install "flash-linear-attention>=0.6,<0.7"'),
        (
            'raise ImportError("libfla.so: undefined symbol: _ZN3c104cuda")',
            "`fla` is installed but fails to import: ImportError: libfla.so: undefined symbol: _ZN3c104cuda",
            'pip install --force-reinstall --no-deps --no-cache-dir "flash-linear-attention>=0.6,<0.7" '
            '"fla-core>=0.6,<0.7"',
        ),
        (
            "import a_module_that_is_not_there",
            "`fla` is installed but fails to import: ModuleNotFoundError: No module named 'a_module_that_is_not_there'",
            'pip install "flash-linear-attention>=0.6,<0.7"',
        ),
        (
            "import triton.of.a.kind",
            "`fla` is installed but fails to import: ModuleNotFoundError: No module named 'triton'",
            'pip install "triton>=3.7.1"',
        ),
        (
            "def another_function(): ...",
            "`fla` 0.6.0 imports but has no fla.ops.gated_delta_rule.chunk_gated_delta_rule",
            'pip install --upgrade "flash-linear-attention>=0.6,<0.7"',
        ),
    ],
    ids=["absent", "undefined_symbol", "lacks_a_dependency", "lacks_triton", "lacks_the_function"],
)
def test_a_package_that_cannot_be_used_is_a_fallback_with_the_real_cause(tmp_path, monkeypatch, fla, reason, fix):
    if "named 'triton'" in reason and find_spec("triton") is not None:
        pytest.skip("triton is installed: torch's CUDA builds bring it")
    write_fakes(tmp_path, fla=fla)
    check = check_of(RULE, model_bound_to(tmp_path, monkeypatch))
    assert (check.verdict, check.reason, check.fix) == (KernelVerdict.FALLBACK, reason, fix)


@pytest.mark.parametrize(
    ("convolution", "reason", "fix"),
    [
        (None, "`causal_conv1d` is not installed", 'pip install --no-build-isolation "causal-conv1d>=1.7"'),
        (
            'raise ImportError("causal_conv1d_cuda.so: undefined symbol: _ZN3c10")',
            "`causal_conv1d` is installed but fails to import: ImportError: causal_conv1d_cuda.so: undefined symbol: "
            "_ZN3c10",
            'pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation "causal-conv1d>=1.7"',
        ),
        (
            "def another_function(): ...",
            "`causal_conv1d` 1.7.0 imports but has no causal_conv1d.causal_conv1d_fn",
            'pip install --upgrade --no-build-isolation "causal-conv1d>=1.7"',
        ),
    ],
    ids=["absent", "undefined_symbol", "lacks_the_function"],
)
def test_v52_a_convolution_that_cannot_be_used_is_a_fallback_with_the_real_cause(
    tmp_path, monkeypatch, convolution, reason, fix
):
    write_fakes(tmp_path, convolution=convolution)
    check = check_of(CONVOLUTION, model_bound_to(tmp_path, monkeypatch))
    assert (check.verdict, check.reason, check.fix) == (KernelVerdict.FALLBACK, reason, fix)


def test_a_bound_reference_keeps_the_cause_and_is_named(tmp_path, monkeypatch):
    write_fakes(tmp_path, fla='raise ImportError("undefined symbol: x")')
    model = model_bound_to(tmp_path, monkeypatch)
    with bind_references(model):
        check = check_of(RULE, model)
    assert (check.verdict, check.evidence) == (KernelVerdict.FALLBACK, "hf_speedkit reference")
    assert "undefined symbol: x" in check.reason


def test_v51_what_counts_is_what_is_bound_and_not_what_can_be_imported_now(tmp_path, monkeypatch):
    model = model_bound_to(tmp_path, monkeypatch)
    write_fakes(tmp_path, fla="def chunk_gated_delta_rule(q, k, v): ...")  # installed after the model was imported
    check = check_of(RULE, model)
    assert check.verdict is KernelVerdict.FALLBACK
    assert "imports now, but did not when transformers' modeling file was imported" in check.reason
    assert check.fix == "start a new process"


@pytest.mark.parametrize(
    ("fakes", "function", "verdict", "reason"),
    [
        (
            {"fla": rule("return call(), None", "q, k, v, g, beta, use_qk_l2norm_in_kernel=False")},
            RULE,
            KernelVerdict.NO_BOUNDARIES,
            "it has no parameter cu_seqlens; transformers drops the boundaries silently",
        ),
        (
            {"convolution": "def causal_conv1d_fn(x, weight, bias=None, activation=None): ..."},
            CONVOLUTION,
            KernelVerdict.NO_BOUNDARIES,
            "it has no parameter seq_idx; transformers drops the boundaries silently",
        ),
        (
            {"fla": rule("return call(), None", "q, k, v, g, beta, cu_seqlens=None, use_qk_l2norm=False")},
            RULE,
            KernelVerdict.BROKEN,
            "it has no parameter use_qk_l2norm_in_kernel, which the layer needs and transformers drops silently",
        ),
        (
            {"convolution": "def causal_conv1d_fn(x, seq_idx, weight, bias=None, activation=None): ..."},
            CONVOLUTION,
            KernelVerdict.BROKEN,
            "it cannot be called the way the layer calls it: multiple values for argument 'seq_idx'",
        ),
    ],
    ids=["rule_without_borders", "convolution_without_borders", "lacks_an_argument", "v47_clashing_argument"],
)
def test_a_signature_that_cannot_do_is_found_without_running_it(
    tmp_path, monkeypatch, fakes, function, verdict, reason
):
    write_fakes(tmp_path, **fakes)
    check = check_of(function, model_bound_to(tmp_path, monkeypatch))
    assert (check.verdict, check.reason) == (verdict, reason)


SCALED_GRADIENT = """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        return 1.5 * gradient
return call(v=Scaled.apply(v)), None
"""
NO_BACKWARD = """
class Stuck(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("Triton < 3.7.1 on Hopper")
return Stuck.apply(call()), None
"""
GRADIENT = """
class Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        return CHANGE
return call(v=Changed.apply(v)), None
"""
NAN_AT_65 = """
out = call()
lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
parts = [part * float("nan") if part.shape[1] == 65 else part for part in out.split(lengths, dim=1)]
return torch.cat(parts, dim=1), None
"""


@pytest.mark.parametrize(
    ("fakes", "function", "verdict", "reason"),
    [
        (
            {"fla": rule("return call(cu_seqlens=None), None")},
            RULE,
            KernelVerdict.NO_BOUNDARIES,
            "when its neighbours in the row are replaced",
        ),
        (
            {
                "convolution": """
    from hf_speedkit.kernels.reference import causal_conv1d_fn as right
    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        return right(x, weight, bias, activation)
"""
            },
            CONVOLUTION,
            KernelVerdict.NO_BOUNDARIES,
            "when its neighbours in the row are replaced",
        ),
        ({"fla": rule("return call(q=k, k=q), None")}, RULE, KernelVerdict.BROKEN, "the output is off by"),
        (
            {
                "convolution": """
    from hf_speedkit.kernels.reference import causal_conv1d_fn as right
    def causal_conv1d_fn(x, bias, weight=None, seq_idx=None, activation=None):
        return right(x, weight, bias, activation, seq_idx)
"""
            },
            CONVOLUTION,
            KernelVerdict.BROKEN,
            "the forward raises AttributeError",
        ),
        (
            {"fla": rule("return call().detach(), None")},
            RULE,
            KernelVerdict.FORWARD_ONLY,
            "no gradient reaches q, k, v, g, beta",
        ),
        (
            {"fla": rule("return call(k=k.detach(), v=v.detach()), None")},
            RULE,
            KernelVerdict.FORWARD_ONLY,
            "no gradient reaches k, v",
        ),
        (
            {"fla": rule(SCALED_GRADIENT)},
            RULE,
            KernelVerdict.BROKEN,
            "the gradient of v is off by 50.0% (tolerance 0.2%)",
        ),
        (
            {"fla": rule(GRADIENT.replace("CHANGE", "torch.zeros_like(gradient)"))},
            RULE,
            KernelVerdict.FORWARD_ONLY,
            "no gradient reaches v",
        ),
        (
            {"fla": rule(GRADIENT.replace("CHANGE", "gradient / 0"))},
            RULE,
            KernelVerdict.BROKEN,
            "the gradient of v is not finite",
        ),
        (
            {
                "convolution": """
    import torch
    from hf_speedkit.kernels.reference import causal_conv1d_fn as right
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)
        @staticmethod
        def backward(ctx, gradient):
            return 1.5 * gradient
    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        return right(x, Scaled.apply(weight), bias, activation, seq_idx)
"""
            },
            CONVOLUTION,
            KernelVerdict.BROKEN,
            "the gradient of weight is off by 50.0%",
        ),
        ({"fla": rule(NAN_AT_65)}, RULE, KernelVerdict.BROKEN, "the output is not finite at length 65"),
        (
            {"fla": rule(NO_BACKWARD)},
            RULE,
            KernelVerdict.BROKEN,
            "the forward runs, the backward raises RuntimeError: Triton < 3.7.1 on Hopper",
        ),
    ],
    ids=[
        "v03_rule_ignores_borders",
        "v02_convolution_ignores_borders",
        "rule_with_swapped_arguments",
        "convolution_with_swapped_arguments",
        "v55_detached_output",
        "v55_two_inputs_without_gradient",
        "gradient_scaled",
        "v55_gradient_of_zeros",
        "v49_gradient_not_finite",
        "convolution_gradient_scaled",
        "nan_at_one_length",
        "v48_backward_raises",
    ],
)
def test_the_probe_tells_what_is_wrong(tmp_path, monkeypatch, fakes, function, verdict, reason):
    monkeypatch.setattr(probe, "EDGE_LENGTHS", (1, 33, 64, 65))  # as few as show it
    write_fakes(tmp_path, **fakes)
    model = model_bound_to(tmp_path, monkeypatch)
    assert check_of(function, model).verdict is KernelVerdict.FUSED  # nothing shows before it runs
    check = check_of(function, model, probe=True)
    assert check.verdict is verdict
    assert reason in check.reason
    assert check.fix == upgrade_command(FUNCTIONS[function])
    with pytest.raises(KernelAssertionError, match=function):
        assert_kernels(model, checks=[check])


@pytest.mark.parametrize(
    ("error", "way"),
    [
        ("PermissionError(13, 'Permission denied', '/home/else/.triton/cache')", "export TRITON_CACHE_DIR="),
        ("OSError(116, 'Stale file handle')", "export TRITON_CACHE_DIR="),
        ("RuntimeError('Failed to find C compiler. Please specify via CC environment variable')", "apt-get install"),
        ("RuntimeError('CUDA error: no kernel image is available for execution on the device')", "pip install --force"),
        ("torch.OutOfMemoryError('CUDA out of memory.')", "a smaller max_length"),
        ("AssertionError('ChunkDeltaRuleFunction does not support float32. Please use bfloat16.')", "bf16=True"),
    ],
    ids=["foreign_cache", "nfs_cache", "no_compiler", "no_image", "memory", "float32"],
)
def test_v50_a_fault_of_the_machine_is_not_mended_by_another_version_of_the_package(tmp_path, monkeypatch, error, way):
    monkeypatch.setattr(probe, "EDGE_LENGTHS", (1, 33))
    write_fakes(tmp_path, fla=rule(f"raise {error}"))
    found = check_of(RULE, model_bound_to(tmp_path, monkeypatch), probe=True)
    assert found.verdict is KernelVerdict.BROKEN
    assert found.fix.startswith(way)


def test_v50_a_kernel_that_does_not_come_back_is_named_while_it_runs(tmp_path, monkeypatch, caplog):
    """fla issues 947 and 999: on a GPU nothing raises when a kernel or its tuning hangs."""
    monkeypatch.setattr(probe, "EDGE_LENGTHS", (1, 33))
    write_fakes(tmp_path, fla=rule("import time; time.sleep(0.1); raise RuntimeError"))
    model = model_bound_to(tmp_path, monkeypatch)
    with patience.said_if_slow("what comes back"):
        pass
    monkeypatch.setattr(patience, "PATIENCE_S", 0.01)
    check_of(RULE, model, probe=True)
    assert caplog.text.count("the probe of") == 1
    assert "the probe of chunk_gated_delta_rule of Qwen3_5GatedDeltaNet has run for" in caplog.text


def test_one_layer_of_three_with_another_binding_is_counted_and_named(tmp_path, monkeypatch):
    write_fakes(tmp_path, fla=RIGHT_RULE, convolution=RIGHT_CONVOLUTION)
    model = model_bound_to(tmp_path, monkeypatch)
    layer = model.model.layers[1].linear_attn
    layer.forward = types.MethodType(Qwen3_5GatedDeltaNet.forward, layer)
    found = [check for check in check_kernels(model) if check.function == RULE]
    assert [(check.verdict, check.layers, check.layers_total) for check in found] == [
        (KernelVerdict.FUSED, 2, 3),
        (KernelVerdict.FALLBACK, 1, 3),
    ]
    assert "on model.layers.1.linear_attn" in found[1].evidence
    with pytest.raises(KernelAssertionError, match="1 of 4 layers would run the reference implementation"):
        assert_kernels(model)
