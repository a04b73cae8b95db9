"""What families other than the delta net need of their kernels: keywords, a second package, boundaries that arrive."""

import pytest
from fake_kernels import RIGHT_CONVOLUTION, RIGHT_RULE, write_fakes, write_modules
from transformers import AutoConfig

from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.fla_convolution import through_fla
from hf_speedkit.kernels.inspection import assert_kernels, check_kernels

INNER = "def mamba_inner_fn(*a, delta_bias=None, delta_softplus=True{}): ...\n"
NORMS = ", b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6"
SCAN = "def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False): ...\n"


@pytest.mark.parametrize(
    ("family", "inner", "convolution", "verdict", "says", "fix"),
    [
        ("mamba", "", RIGHT_CONVOLUTION, KernelVerdict.FUSED, None, None),
        ("falcon_mamba", NORMS, RIGHT_CONVOLUTION, KernelVerdict.FUSED, None, None),
        ("falcon_mamba", "", RIGHT_CONVOLUTION, KernelVerdict.BROKEN, "no parameter b_rms_weight", "--upgrade --no-"),
        ("mamba", "", None, KernelVerdict.BLOCKED, "calls `causal_conv1d` by itself", '"causal-conv1d>=1.7"'),
        ("mamba", "", "import os; os.abort()", KernelVerdict.BLOCKED, "SIGABRT", "--force-reinstall --no-deps"),
    ],
    ids=["right", "right_with_norms", "old_without_norms", "without_causal_conv1d", "causal_conv1d_aborts"],
)  # fmt: skip
def test_v47_what_a_function_of_mamba_needs_beside_itself_is_asked_for(
    tmp_path, monkeypatch, family, inner, convolution, verdict, says, fix
):
    """mamba_ssm calls causal-conv1d's compiled functions; fla, whose convolution stands in elsewhere, is no help."""
    write_fakes(tmp_path, fla=RIGHT_RULE, convolution=convolution)
    write_modules(tmp_path, mamba_ssm__ops__selective_scan_interface=INNER.format(inner) + SCAN)
    monkeypatch.syspath_prepend(str(tmp_path))
    checks = {check.function: check for check in check_kernels(AutoConfig.for_model(family), stack=Stack())}
    found = checks["mamba_inner_fn"]
    assert (found.verdict, checks["selective_scan_fn"].verdict) == (verdict, KernelVerdict.FUSED)
    assert says is None or (says in found.reason and fix in found.fix)
    if convolution is None:
        wanted = 'pip install --no-build-isolation "causal-conv1d>=1.7"'
        assert (checks["causal_conv1d_fn"].fix, found.fix) == (wanted, wanted)
        assert through_fla(tuple(checks.values())) == tuple(checks.values())


def test_v11_a_family_that_loses_boundaries_is_refused_for_packed_rows_whatever_the_kernels(tmp_path, monkeypatch):
    """Kimi's layer hands `cu_seq_lens_q` to a function that calls it `cu_seqlens`: it never arrives."""
    write_fakes(
        tmp_path,
        fla=RIGHT_RULE,
        kda="def chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel, cu_seqlens=None): ...",
        convolution=RIGHT_CONVOLUTION,
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = AutoConfig.for_model("kimi_linear")
    assert {check.verdict for check in assert_kernels(config)} == {KernelVerdict.FUSED}
    with pytest.raises(KernelAssertionError, match="would let packed documents see one another"):
        assert_kernels(config, tokens_per_batch=8_192)
