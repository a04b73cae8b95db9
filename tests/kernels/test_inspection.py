"""The inspection of live models and configs, and the refusal, on a machine without any kernel package."""

import logging
import subprocess
import sys

import pytest
import torch
from kernel_models import tiny_model
from transformers import AttentionInterface, AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from hf_speedkit.core.errors import ConfigurationError, KernelAssertionError
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.bindings import bind_references
from hf_speedkit.kernels.inspection import assert_kernels, check_kernels
from hf_speedkit.kernels.refusal import refusal


def verdicts(checks):
    return {check.function: check.verdict for check in checks}


def test_v45_the_torch_fallback_is_refused_with_both_functions_and_both_commands():
    with pytest.raises(KernelAssertionError) as error:
        assert_kernels(tiny_model("qwen3_5"))
    assert str(error.value) == (
        "3 of 4 layers would run the reference implementation instead of a fused kernel.\n"
        "  causal_conv1d_fn         FALLBACK   Qwen3_5GatedDeltaNet, 3 layers   `causal_conv1d` is not installed "
        "[transformers' torch fallback]\n"
        "  chunk_gated_delta_rule   FALLBACK   Qwen3_5GatedDeltaNet, 3 layers   `fla` is not installed "
        "[transformers' torch fallback]\n"
        'Mend it:  pip install --no-build-isolation "causal-conv1d>=1.7"\n'
        '          pip install "flash-linear-attention>=0.6,<0.7"\n'
        'Go on all the same:  kernel_assertion="warn"'
    )


def test_v45_warn_goes_on_and_says_the_same(caplog):
    checks = assert_kernels(tiny_model("qwen3_5"), mode="warn")
    assert list(verdicts(checks).values()).count(KernelVerdict.FALLBACK) == 2
    assert "3 of 4 layers would run the reference implementation" in caplog.text
    assert {record.name for record in caplog.records} == {"hf_speedkit.kernels.inspection"}
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_off_checks_nothing_and_another_mode_is_an_error():
    assert assert_kernels(tiny_model("qwen3_5"), mode="off") == ()
    with pytest.raises(ConfigurationError, match="kernel_assertion is 'quiet'"):
        assert_kernels(tiny_model("llama"), mode="quiet")


def test_a_bound_reference_is_reported_as_one_and_refused_in_strict_mode():
    model = tiny_model("qwen3_5")
    with bind_references(model):
        checks = check_kernels(model)
        with pytest.raises(KernelAssertionError, match="hf_speedkit reference"):
            assert_kernels(model)
    assert [check.evidence for check in checks[:2]] == ["hf_speedkit reference"] * 2


def test_checks_made_before_are_not_made_again():
    fused = KernelCheck(function="f", verdict=KernelVerdict.FUSED, layer="L", layers=1, layers_total=1, evidence="e")
    assert assert_kernels(tiny_model("qwen3_5"), checks=[fused]) == (fused,)


def test_a_model_of_attention_only_passes_with_sdpa():
    assert verdicts(assert_kernels(tiny_model("llama"))) == {"attention": KernelVerdict.FUSED}


def test_every_function_of_mamba_is_reported_and_no_decode_function():
    assert set(verdicts(check_kernels(tiny_model("mamba")))) == {
        "causal_conv1d_fn",
        "mamba_inner_fn",
        "selective_scan_fn",
    }


def test_v57_sdpa_on_long_packed_rows_warns_with_the_bytes_of_its_mask(caplog):
    model = tiny_model("llama")
    assert_kernels(model, tokens_per_batch=16_384)
    assert "256 MiB" in caplog.text
    assert "16,384 slots" in caplog.text
    caplog.clear()
    assert_kernels(model, tokens_per_batch=4_096)
    assert_kernels(model)
    assert caplog.text == ""
    assert "a boolean mask of 16 MiB" in check_kernels(model, tokens_per_batch=4_096)[0].evidence


def test_eager_attention_is_a_fallback_with_the_bytes_of_its_scores():
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(KernelAssertionError, match='attn_implementation="sdpa"') as error:
        assert_kernels(model, tokens_per_batch=8_192)
    assert "512 MiB per layer" in str(error.value)  # 2 heads x 8,192 x 8,192 x 4 bytes


def test_an_attention_that_nobody_knows_is_unverified_and_ours_is_known():
    from hf_speedkit.kernels.attention import register

    model = tiny_model("llama")
    AttentionInterface.register("somebodys_attention", lambda *args, **kwargs: None)
    model.set_attn_implementation("somebodys_attention")
    assert verdicts(check_kernels(model)) == {"attention": KernelVerdict.UNVERIFIED}
    with pytest.raises(KernelAssertionError, match="somebodys_attention"):
        assert_kernels(model)
    model.set_attn_implementation(register())
    assert verdicts(assert_kernels(model)) == {"attention": KernelVerdict.FUSED}


def _forward_of_somebody(self, hidden_states, **kwargs):
    return hidden_states, None


@pytest.mark.parametrize(
    ("family", "patch", "layers", "of"),
    [("qwen3_5", "class", 1, 1), ("llama", "class", 4, 4), ("llama", "instance", 1, 4)],
)
def test_v51_attention_whose_forward_was_taken_is_unverified_on_its_layers(monkeypatch, family, patch, layers, of):
    """Without its own check a hybrid would pass on the strength of its other layers."""
    model = tiny_model(family)
    layer = next(module for module in model.modules() if type(module).__name__.endswith("Attention"))
    monkeypatch.setattr(type(layer) if patch == "class" else layer, "forward", _forward_of_somebody)
    found = [c for c in check_kernels(model) if (c.function, c.verdict) == ("attention", KernelVerdict.UNVERIFIED)]
    assert [(c.layers, c.layers_total) for c in found] == [(layers, of)]
    assert "_forward_of_somebody" in found[0].evidence


@pytest.mark.parametrize("function", [_forward_of_somebody, None], ids=["other_code", "nothing"])
def test_v51_a_global_that_other_code_has_replaced_does_not_double_the_layers(monkeypatch, function):
    model = tiny_model("qwen3_5")
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", function)
    found = [check for check in check_kernels(model) if check.function == "chunk_gated_delta_rule"]
    assert {check.verdict for check in found} <= {KernelVerdict.FALLBACK, KernelVerdict.UNVERIFIED}
    assert {(check.layers, check.layers_total) for check in found} == {(3, 3)}


def test_v46_a_function_of_somebody_else_under_the_name_sdpa_is_not_torchs(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _forward_of_somebody)
    (check,) = check_kernels(tiny_model("llama"))
    assert (check.verdict, check.evidence.startswith("sdpa, a name that")) == (KernelVerdict.UNVERIFIED, True)


@pytest.mark.parametrize(
    ("left", "slots", "verdict"),
    [
        ((), None, KernelVerdict.FALLBACK),
        (("flash",), None, KernelVerdict.FUSED),
        (("flash",), 64, KernelVerdict.FALLBACK),  # flash takes no mask
        (("cudnn",), 64, KernelVerdict.FUSED),
    ],
)
def test_v57_sdpa_with_its_fused_kernels_switched_off_is_a_fallback(monkeypatch, left, slots, verdict):
    for name in ("flash", "mem_efficient", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"{name}_sdp_enabled", lambda name=name: name in left)
    assert verdicts(check_kernels(tiny_model("llama"), tokens_per_batch=slots)) == {"attention": verdict}


@pytest.mark.parametrize(("disabled", "verdict"), [(True, KernelVerdict.FALLBACK), (False, KernelVerdict.FUSED)])
def test_v57_flex_attention_that_nothing_compiles_is_a_fallback(disabled, verdict):
    import torch._dynamo

    model = tiny_model("llama")
    model.set_attn_implementation("flex_attention")
    with torch._dynamo.config.patch(disable=disabled):
        assert verdicts(check_kernels(model)) == {"attention": verdict}


def torch_chunk_gated_delta_rule(query): ...


def chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None): ...


chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule.chunk"


class _Holds(torch.nn.Module):
    """A layer as remote code has it: the function in an attribute, torch's where the package is missing."""

    def __init__(self, rule):
        super().__init__()
        self.chunk_gated_delta_rule, self.causal_conv1d_fn = rule, None

    def forward(self, x, **kwargs):
        return self.chunk_gated_delta_rule(x)


class _Calls(torch.nn.Module):
    def forward(self, x, **kwargs):
        return chunk_gated_delta_rule(x)


class _Unread(torch.nn.Module):
    def forward(self, x, **kwargs):
        return x.cumsum(1)


@pytest.mark.parametrize(
    ("mixer", "function", "verdict", "says"),
    [
        (_Holds(torch_chunk_gated_delta_rule), "chunk_gated_delta_rule", KernelVerdict.FALLBACK, "is not installed"),
        (_Holds(torch_chunk_gated_delta_rule), "causal_conv1d_fn", KernelVerdict.FALLBACK, "is not installed"),
        (_Holds(chunk_gated_delta_rule), "chunk_gated_delta_rule", KernelVerdict.FUSED, None),
        (_Calls(), "chunk_gated_delta_rule", KernelVerdict.FUSED, None),
        (_Unread(), "layers", KernelVerdict.UNVERIFIED, "code of their own"),
    ],
    ids=["holds_torchs", "holds_none", "holds_flas", "calls_flas", "unread"],
)
def test_v45_layers_of_remote_code_do_not_pass_for_the_attention_layers_beside_them(mixer, function, verdict, says):
    model = tiny_model("llama")
    model.model.layers[1].self_attn = mixer
    found = {check.function: check for check in check_kernels(model)}
    assert (found[function].verdict, found["attention"].verdict) == (verdict, KernelVerdict.FUSED)
    assert says is None or says in found[function].reason
    assert found["attention"].layers == 3


def test_v56_experts_that_were_asked_for_and_not_got_are_refused():
    """transformers says nothing when grouped_mm cannot be used; only the setting in the live config shows it."""
    model = tiny_model("qwen3_5_moe", layer_types=["full_attention"] * 4)
    assert verdicts(assert_kernels(model)) == {"experts": KernelVerdict.FUSED, "attention": KernelVerdict.FUSED}
    model.set_experts_implementation("eager")
    with pytest.raises(KernelAssertionError, match="4 of 4 layers would run the reference") as error:
        assert_kernels(model)
    assert 'experts_implementation="grouped_mm"' in str(error.value)


def test_v56_experts_that_loop_under_the_name_of_the_grouped_product_are_a_fallback(monkeypatch):
    """transformers 5.23 decides that in every forward pass anew, by GPU and torch, and says nothing."""
    model = tiny_model("qwen3_5_moe", layer_types=["full_attention"] * 4)
    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *weights: False)
    assert verdicts(check_kernels(model))["experts"] is KernelVerdict.FALLBACK


def test_a_model_in_which_nothing_is_recognised_is_unverified():
    with pytest.raises(KernelAssertionError, match="could not be verified"):
        assert_kernels(torch.nn.Linear(2, 2))


def test_a_layer_whose_forward_was_replaced_is_unverified_and_named():
    model = tiny_model("qwen3_5")
    layer = model.model.layers[2].linear_attn
    layer.forward = lambda hidden_states, **kwargs: hidden_states
    found = [check for check in check_kernels(model) if check.verdict is KernelVerdict.UNVERIFIED]
    assert [(check.layers, check.layers_total) for check in found] == [(1, 3)]
    assert "on model.layers.2.linear_attn" in found[0].evidence


def test_functions_that_the_tables_demand_and_no_layer_calls_are_unverified(monkeypatch):
    model = tiny_model("qwen3_5")
    kind = type(model.model.layers[0].linear_attn)
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, **kwargs: hidden_states)
    assert verdicts(check_kernels(model)) == {
        "causal_conv1d_fn": KernelVerdict.UNVERIFIED,
        "chunk_gated_delta_rule": KernelVerdict.UNVERIFIED,
        "attention": KernelVerdict.FUSED,
    }


@pytest.mark.parametrize("wrap", [torch.nn.Sequential, lambda model: model])
def test_wrapped_models_are_looked_through(wrap):
    with pytest.raises(KernelAssertionError, match="3 of 4 layers"):
        assert_kernels(wrap(tiny_model("qwen3_5")))


@pytest.mark.parametrize(("model_type", "layers"), [("qwen3_5", 24), ("qwen3_next", 36), ("olmo_hybrid", 24)])
def test_a_config_is_enough_to_say_what_a_model_would_run(model_type, layers):
    checks = check_kernels(AutoConfig.for_model(model_type))
    found = {check.function: (check.verdict, check.layers) for check in checks}
    assert found["chunk_gated_delta_rule"] == (KernelVerdict.FALLBACK, layers)
    assert found["causal_conv1d_fn"] == (KernelVerdict.FALLBACK, layers)
    with pytest.raises(KernelAssertionError, match=f"{layers} of "):
        assert_kernels(AutoConfig.for_model(model_type))


def test_a_config_without_special_layers_needs_nothing():
    assert check_kernels(AutoConfig.for_model("llama")) == ()


def test_a_config_that_asks_for_an_absent_flash_attention_is_blocked():
    config = AutoConfig.for_model("llama", attn_implementation="flash_attention_2")
    (check,) = check_kernels(config)
    assert (check.verdict, check.layers) == (KernelVerdict.BLOCKED, 32)
    assert "`flash_attn` is not installed" in check.reason


@pytest.mark.parametrize(
    ("version", "verdict"), [(KERNELS_MIN_VERSION, KernelVerdict.UNVERIFIED), ("0.1.0", KernelVerdict.BLOCKED)]
)
def test_v46_a_flash_attention_that_transformers_takes_from_the_hub_instead_is_not_refused(
    tmp_path, monkeypatch, version, verdict
):
    (tmp_path / "kernels-0.dist-info").mkdir()
    (tmp_path / "kernels-0.dist-info" / "METADATA").write_text(f"Name: kernels\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (check,) = check_kernels(AutoConfig.for_model("llama", attn_implementation="flash_attention_3"))
    assert check.verdict is verdict
    assert ("kernels-community/" in check.evidence) == (verdict is KernelVerdict.UNVERIFIED)


@pytest.mark.parametrize(
    ("source", "verdict", "says"),
    [
        ("raise ImportError('undefined symbol: _ZN3c105Error')", KernelVerdict.BLOCKED, "fails to import: ImportError"),
        ("def flash_attn_func(): ...", KernelVerdict.BLOCKED, "has no flash_attn.flash_attn_varlen_func"),
        ("def flash_attn_varlen_func(): ...", KernelVerdict.FUSED, ""),
    ],
    ids=["another_torch", "another_version", "right"],
)
def test_v52_a_flash_attention_that_does_not_import_is_blocked_before_the_model_loads(
    tmp_path, monkeypatch, source, verdict, says
):
    """transformers 5.23 looks at its version only: the first forward pass would find out."""
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    (check,) = check_kernels(AutoConfig.for_model("llama", attn_implementation="flash_attention_2"))
    assert check.verdict is verdict
    assert says in (check.reason or "")


def test_what_is_neither_model_nor_config_is_refused_and_so_is_a_probe_without_a_model():
    with pytest.raises(ConfigurationError, match="got str"):
        check_kernels("Qwen/Qwen3.8-27B")
    with pytest.raises(ConfigurationError, match="load the model first"):
        check_kernels(AutoConfig.for_model("llama"), probe=True)


def check(function="f", verdict=KernelVerdict.FALLBACK, layer="Delta", layers=48, total=48, fix=None):
    return KernelCheck(
        function=function, verdict=verdict, layer=layer, layers=layers, layers_total=total, evidence="e", fix=fix
    )


@pytest.mark.parametrize(
    ("checks", "headline"),
    [
        ([check(), check("g")], "48 of 64 layers would run the reference implementation instead of a fused kernel."),
        ([check(layers=1)], "1 of 64 layers would run the reference implementation instead of a fused kernel."),
        ([check(layers=16), check(layers=32)], "48 of 64 layers would run the reference implementation"),
        ([check(), check("a", layer="Attention", layers=16, total=16)], "64 of 64 layers would run the reference"),
        ([check(verdict=KernelVerdict.NO_BOUNDARIES)], "48 of 64 layers would let packed documents see one another."),
        ([check(verdict=KernelVerdict.FORWARD_ONLY)], "48 of 64 layers would train without some of their gradients."),
        ([check(), check("g", KernelVerdict.BROKEN)], "48 of 64 layers would run kernels that are slow, wrong or not"),
        ([check(layers=200, total=200)], "200 of 200 layers would run the reference implementation"),
    ],
)
def test_a_layer_that_fails_twice_is_one_layer_and_the_headline_says_what_would_happen(checks, headline):
    assert str(refusal(checks, decoder_layers=64)).startswith(headline)


def test_equal_commands_are_given_once():
    text = str(refusal([check(fix="pip install x"), check("g", fix="pip install x")], decoder_layers=None))
    assert text.count("pip install x") == 1


def test_fused_checks_are_no_reason_to_refuse():
    assert refusal([check(verdict=KernelVerdict.FUSED)], decoder_layers=64) is None


def test_importing_the_inspection_and_the_bindings_imports_no_torch():
    """`hf-speedkit doctor` must be able to speak before, and without, a torch that works."""
    script = (
        "import sys, hf_speedkit.kernels.inspection, hf_speedkit.kernels.bindings;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
