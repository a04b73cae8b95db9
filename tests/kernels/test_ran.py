"""Which expected kernels ran, from the names in a trace."""

import pytest
import torch

from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.ran import StepKernels, functions_that_ran, never_ran, stepped_aside, with_runs


def check(function, evidence, verdict=KernelVerdict.FUSED):
    return KernelCheck(function=function, verdict=verdict, layer="L", layers=1, layers_total=1, evidence=evidence)


CASES = [
    (
        check("chunk_gated_delta_rule", "fla 0.6.0: fla.ops.gated_delta_rule.chunk"),
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
    ),
    (check("chunk_gated_delta_rule", "fla 0.6.0"), "chunk_fwd_kernel_o", "kernel_kernel"),
    (
        check("causal_conv1d_fn", "causal_conv1d 1.7.0"),
        "void causal_conv1d_channellast_fwd_kernel<Causal_conv1d_channellast_fwd_kernel_traits<128, 4>>(...)",
        "void causal_conv1d_channellast_bwd_kernel<Causal_conv1d_channellast_bwd_kernel_traits<128, 4>>(...)",
    ),
    (check("causal_conv1d_fn", "fla 0.6.0: fla.modules"), "causal_conv1d_fwd_kernel", "causal_conv1d_bwd_kernel"),
    (
        check("split_convolution", "hf_speedkit 0.1.0, largest error 0.0e+00"),
        "causal_conv1d_fwd_kernel",
        "causal_conv1d_bwd_kernel",
    ),
    (
        check("attention", "speedkit_varlen, torch"),
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<256>>(Flash_fwd_params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>(Flash_bwd_params)",
    ),
    (
        check("attention", "speedkit_varlen, torch"),
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x64_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x128x64_4x1x1_kernel0_0",
    ),
    (check("rms_norm", "liger_kernel 0.8.5"), "_rms_norm_forward_kernel", "_block_rms_norm_backward_kernel"),
    (check("rms_norm", "fla 0.6.0"), "layer_norm_fwd_kernel", "layer_norm_bwd_kernel_row"),
    (check("gated_norm", "fla 0.6.0"), "layer_norm_gated_fwd_kernel", "layer_norm_gated_bwd_kernel"),
    (check("chunk_kda", "fla 0.6.0"), "chunk_kda_fwd_kernel_intra_sub_chunk", "chunk_kda_bwd_kernel_dAv"),
    (
        check("mamba_split_conv1d_scan_combined", "mamba_ssm 2.2.4"),
        "_chunk_scan_fwd_kernel",
        "_chunk_scan_chunk_state_bwd_dx_kernel",
    ),
    (
        check("mamba_inner_fn", "mamba_ssm 2.2.4"),
        "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16, 1>>(SSMParamsBase)",
        "void selective_scan_bwd_kernel<Selective_Scan_bwd_kernel_traits<128, 16>>(SSMParamsBwd)",
    ),
    (check("swiglu", "liger_kernel 0.8.5"), "_swiglu_forward_kernel", "_swiglu_backward_kernel"),
]
IDS = [f"{c.function}-{c.evidence.split()[0]}-{i}" for i, (c, _, _) in enumerate(CASES)]


@pytest.mark.parametrize(("expected", "forward", "backward"), CASES, ids=IDS)
def test_the_kernels_of_every_function_are_recognised_and_missed(expected, forward, backward):
    others = ["ampere_bf16_s16816gemm", "void at::native::vectorized_elementwise_kernel<4>", "Memset (Device)"]

    def run(*names):
        (found,) = functions_that_ran([*others, *names], [expected])
        return found.forward, found.backward

    assert run(forward, backward) == (True, True)
    assert run(forward) == (True, False)
    assert run() == (False, False)


@pytest.mark.parametrize(
    ("names", "missing"), [([], "no forward and no backward"), (["qk_rotary_forward"], "no backward")]
)
def test_a_layer_that_went_on_with_its_own_forward_is_told_and_not_refused(names, missing):
    runs = functions_that_ran(names, [check("qk_rotary", "hf_speedkit 0.1.0, largest error 1.0e-03"), CASES[0][0]])
    (told,) = stepped_aside(runs)
    assert told.startswith(f"qk_rotary of L: {missing} kernel among those of the step, so these layers run their own")
    assert "qk_rotary" not in str(never_ran(runs))
    assert never_ran(runs[:1]) is None


def test_a_function_that_did_not_run_backward_is_refused_by_name():
    checks = [CASES[0][0], CASES[2][0]]
    runs = functions_that_ran([CASES[0][1], CASES[0][2], CASES[2][1]], checks)
    error = never_ran(runs)
    assert str(error).startswith("1 of 2 fused functions did not run in the first training step.")
    assert "causal_conv1d_fn   L   no backward kernel" in str(error)
    assert never_ran(runs[:1]) is None


def test_what_is_not_fused_or_has_no_known_names_promises_nothing():
    checks = [check("attention", "sdpa"), check("chunk_gated_delta_rule", "fla", KernelVerdict.FALLBACK)]
    (run,) = functions_that_ran([], checks)
    assert (run.function, run.forward, run.backward) == ("attention", None, None)
    assert never_ran([run]) is None


def test_only_what_was_seen_both_ways_says_so_in_its_evidence():
    checks = [CASES[0][0], CASES[2][0], check("chunk_gated_delta_rule", "fla", KernelVerdict.FALLBACK)]
    runs = functions_that_ran([CASES[0][1], CASES[0][2], CASES[2][1]], checks)
    seen, not_seen, fallback = with_runs(checks, runs, 1)
    assert seen.evidence == f"{checks[0].evidence}; its kernels ran in step 1"
    assert (not_seen, fallback) == (checks[1], checks[2])


@pytest.mark.parametrize(
    ("kernel", "function"), [("flash_qla_chunk_kernel", "chunk_gated_delta_rule"), ("flash_kda_fwd", "chunk_kda")]
)
def test_the_rule_handed_to_another_backend_is_unknown_and_not_missing(kernel, function):
    (run,) = functions_that_ran([kernel], [check(function, "fla 0.6.0")])
    assert (run.forward, run.backward) == (None, None)


def test_the_rule_handed_to_a_backend_whose_kernels_are_known_is_seen_and_named():
    rule = check("chunk_gated_delta_rule", "fla 0.6.0")
    names = ["tilelang_fused_chunk_gdr_fwd_kernel_kernel", "tilelang_fused_chunk_gdr_bwd_kernel_kernel"]
    (run,) = functions_that_ran(names, [rule])
    assert (run.forward, run.backward, run.backend) == (True, True, "FlashQLA")
    (seen,) = with_runs([rule], [run], 1)
    assert seen.evidence.endswith("; kernels of FlashQLA, which it hands on to, ran in step 1")


def test_another_package_s_tilelang_kernel_is_not_the_rule_s_backward():
    """TileLang ends every kernel's name in _kernel; only the one of that very name is fla's."""
    names = ["chunk_gated_delta_rule_fwd_kernel", "somebodys_kernel_kernel"]
    (run,) = functions_that_ran(names, [check("chunk_gated_delta_rule", "fla 0.6.0")])
    assert (run.forward, run.backward) == (True, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_nothing_is_collected():
    step = StepKernels()
    assert step.begin() is False
    assert step.end() is None


def test_on_a_cpu_operators_are_collected_until_the_end_and_nothing_after_a_cancel():
    step = StepKernels("cpu")
    assert step.begin()
    assert step.begin() is False
    torch.ones(2).add(1)
    names = step.end()
    assert "aten::add" in names
    assert step.begin()
    step.cancel()
    assert step.end() is None
    assert not torch.autograd._profiler_enabled()


@pytest.mark.gpu
def test_the_names_of_one_step_are_collected_once_and_beside_another_profiler_not_at_all():
    step = StepKernels()
    x = torch.randn(256, 256, device="cuda", requires_grad=True)
    assert step.begin()
    assert step.begin() is False
    (x @ x).sum().backward()
    names = step.end()
    assert any("gemm" in name.lower() or "cutlass" in name.lower() or "nvjet" in name.lower() for name in names)
    assert step.end() is None
    with torch.profiler.profile():
        assert StepKernels().begin() is False
