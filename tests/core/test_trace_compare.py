"""Comparison, gates, ranks, kernel groups and printable names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_files import TraceFile, small_trace

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.kernel_groups import GROUPS, blocks_host, builds_masks, kernel_group, loads_data, starts_work
from hf_speedkit.core.printable import printable
from hf_speedkit.core.trace_brief import brief
from hf_speedkit.core.trace_compare import METRICS, compare_traces, gate_metrics, parse_gate, trace_metrics
from hf_speedkit.core.trace_ranks import compare_ranks, slowest_rank
from hf_speedkit.core.trace_records import TraceSummary
from hf_speedkit.measure.trace import summarize_trace


def read(tmp_path, trace: TraceFile, name: str = "t.json") -> TraceSummary:
    return summarize_trace(trace.write(tmp_path / name))


def repeated(steps: int, *, fused: bool, rank: int = 0, comm_us: float = 10) -> TraceFile:
    """The same work in every step: three small kernels or one fused one."""
    trace = TraceFile(distributedInfo={"rank": rank})
    for i in range(steps):
        at = 100.0 * i
        trace.step(i, at, 100).op("aten::norm", at + 1, 40)
        for j in range(1 if fused else 3):
            trace.launch(at + 2 + 10 * j, "fused_rms_norm" if fused else f"mul_kernel{j}", at + 5 + 10 * j, 9)
        trace.launch(at + 40, "ncclDevKernel_AllReduce", at + 45, comm_us, stream=20)
    return trace


def test_what_changed_is_per_step_and_largest_first(tmp_path):
    before = read(tmp_path, repeated(4, fused=False), "before.json")
    after = read(tmp_path, repeated(2, fused=True), "after.json")
    comparison = compare_traces(before, after)
    assert (comparison.before, comparison.after) == ("before.json", "after.json")
    assert [change.name for change in comparison.appeared] == ["fused_rms_norm"]
    assert sorted(change.name for change in comparison.vanished) == ["mul_kernel0", "mul_kernel1", "mul_kernel2"]
    assert comparison.kernels == ()  # the collective did not change
    launches = next(change for change in comparison.metrics if change.name == "launches")
    assert (launches.before, launches.after, launches.relative) == (4, 2, -0.5)
    sizes = [abs(change.relative) for change in comparison.metrics if change.relative is not None]
    assert sizes == sorted(sizes, reverse=True)
    groups = {change.name: change.difference for change in comparison.groups}
    assert groups == {"norm": 9_000, "element-wise": -27_000}


def test_a_trace_in_three_lines_for_a_log(tmp_path):
    verdict, operations, kernels = brief(read(tmp_path, small_trace().op("\x1b[31mred", 950, 1)))
    assert verdict.startswith("verdict: ")
    assert operations.startswith("CPU operations: aten::item 1 x, 200.0 us; aten::addmm")
    assert "\x1b" not in operations
    assert kernels == "kernels: ampere_sgemm_32x32 1 x, 300.0 us; Memcpy DtoH (Device -> Pinned) 1 x, 10.0 us"


def test_a_trace_compared_with_itself_shows_nothing(tmp_path):
    trace = read(tmp_path, small_trace())
    comparison = compare_traces(trace, trace)
    assert (comparison.metrics, comparison.groups, comparison.kernels, comparison.appeared) == ((), (), (), ())


def test_tokens_per_second_use_the_untraced_step_time_where_it_is_known(tmp_path):
    facts = {"real_tokens": 800, "slots": 1000, "untraced_step_time_s": 0.5}
    trace = small_trace()
    trace.top_level["hf_speedkit"] = facts
    metrics = trace_metrics(read(tmp_path, trace))
    assert metrics["real_tokens_per_second"] == 1600
    assert metrics["packing_efficiency"] == 0.8
    del facts["untraced_step_time_s"]
    assert trace_metrics(read(tmp_path, trace))["real_tokens_per_second"] == 800_000  # of the traced step, 1 ms


@pytest.mark.parametrize(
    "facts",
    [
        {"real_tokens": "800"},
        {"real_tokens": -1},
        {"real_tokens": True},
        {"untraced_step_time_s": 0},
        {"untraced_step_time_s": "x"},
        {"untraced_step_time_s": True},
        [],
        "text",
    ],
)
def test_facts_of_strangers_that_are_no_plain_numbers_count_as_unknown(tmp_path, facts):
    trace = small_trace()
    trace.top_level["hf_speedkit"] = facts
    assert trace_metrics(read(tmp_path, trace))["real_tokens_per_second"] is None


def test_every_metric_is_there_and_unknown_ones_are_none(tmp_path):
    metrics = trace_metrics(read(tmp_path, TraceFile().op("aten::mm", 0, 10)))
    assert list(metrics) == list(METRICS)
    assert {name for name, value in metrics.items() if value is not None} == {"cpu_time_ms"}
    assert trace_metrics(TraceSummary())["launches"] is None


@pytest.mark.parametrize(
    ("expression", "fails"),
    [
        ("launches>1", True),
        ("launches > 2", False),
        ("launches>=2", True),
        ("launches==2", True),
        ("launches!=2", False),
        ("device_idle>0.1", True),
        ("device_idle<0.1", False),
        ("launches>2e0", False),
        ("launches<20_000", True),
    ],
)
def test_a_gate_fails_when_its_expression_is_true(tmp_path, expression, fails):
    metrics = gate_metrics(read(tmp_path, small_trace()))
    assert (parse_gate(expression).judge(metrics) is not None) is fails


def test_a_gate_on_an_unknown_number_fails(tmp_path):
    reason = parse_gate("real_tokens_per_second<2500").judge(gate_metrics(read(tmp_path, small_trace())))
    assert "unknown" in reason


def test_a_gate_can_ask_for_the_change_against_a_base(tmp_path):
    before, after = read(tmp_path, repeated(1, fused=True)), read(tmp_path, repeated(1, fused=False))
    gate = parse_gate("launches_change>0.05", comparing=True)
    assert gate.judge(gate_metrics(after, before)) == "launches_change>0.05: launches_change is 1"
    assert gate.judge(gate_metrics(before, after)) is None


@pytest.mark.parametrize(
    "text",
    ["", "launches", "launches>", "launchez>1", "launches>x", "launches_change>1", "__import__('os')>1", "1>launches"],
)
def test_an_expression_that_is_none_is_refused_with_the_metrics(text):
    with pytest.raises(ConfigurationError, match="metrics: step_time_ms"):
        parse_gate(text)


def test_the_rank_with_most_work_of_its_own_is_the_slowest(tmp_path):
    """The others only wait for it, inside their communication kernels."""
    traces = [
        read(tmp_path, repeated(2, fused=True, rank=1, comm_us=30)),
        read(tmp_path, repeated(2, fused=False, rank=0, comm_us=10)),
    ]
    rows = compare_ranks(traces)
    assert [row.rank for row in rows] == [0, 1]
    assert [row.compute_busy_ms for row in rows] == [pytest.approx(0.027), pytest.approx(0.009)]
    assert slowest_rank(rows).rank == 0
    assert slowest_rank(rows[:1]) is None


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void deep_ep::internode::dispatch<...>", "communication"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x32x64_MI16x16x1", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "GEMM"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>", "element-wise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copy"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "linear attention"),
        ("chunk_bwd_kernel_dqkwg", "linear attention"),
        ("prepare_wy_repr_bwd_kernel", "linear attention"),
        ("_chunk_scan_fwd_kernel", "linear attention"),
        ("causal_conv1d_fwd_kernel", "convolution"),
        ("_rms_norm_forward_kernel", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>", "norm"),
        ("liger_cross_entropy_kernel", "loss and softmax"),
        ("_swiglu_forward_kernel", "element-wise"),
        ("_qk_rotary_backward_kernel", "element-wise"),
        ("_output_gate_kernel", "element-wise"),
        ("triton_poi_fused_add_cos_sin_0", "element-wise"),
        ("triton_red_fused_mean_rsqrt_3", "norm"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float>>", "reduction"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<...>", "embedding and index"),
        # H200, 27B under FSDP2, torch 2.11 (trace of 2026-11-29); shortened where the name is long
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, UnaryOpFunctor"
            "<c10::BFloat16, 2, 1, 1>, at::native::Copy<c10::BFloat16, c10::BFloat16> >(TensorListMetadata<2>)",
            "FSDP copy",
        ),
        ("at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**, char**)", "FSDP copy"),
        ("void at::native::detail::chunk_cat_cuda_kernel<char, char>(char**, char*, long*)", "FSDP copy"),
        ("_sum_of_squares_kernel", "optimizer"),
        ("_adamw_kernel", "optimizer"),
        ("_nll_kernel", "loss and softmax"),
        ("_block_rms_norm_backward_kernel", "norm"),
        ("_swiglu_backward_kernel", "element-wise"),
        ("_forward_kernel", "loss and softmax"),  # TRL's head
        ("liger_geglu_forward_kernel", "element-wise"),
        ("void at::native::lpnorm_cleanup<c10::BFloat16, (at::native::NormType)1>(float const*)", "optimizer"),
        ("kernel_kernel", "linear attention"),
        ("my_kernel_kernel", "other"),
        ("tilelang_kkt_solve_kernel_kernel", "linear attention"),  # FlashQLA's, from a trace of an H200
        ("tilelang_group_reduce_vector_kernel_kernel", "linear attention"),
        (
            "void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>(long const*)",
            "embedding and index",
        ),
        ("void at::native::(anonymous namespace)::krn_partials_per_segment<long>(long*)", "embedding and index"),
        ("a kernel no one has heard of", "other"),
    ],
)
def test_kernels_are_grouped_by_what_they_are(name, group):
    assert kernel_group(name) == group
    assert group in GROUPS


def test_copies_and_memsets_need_no_pattern():
    assert kernel_group("Memcpy DtoD (Device -> Device)", "memcpy") == "copy"
    assert kernel_group("Memset (Device)", "memset") == "memset"


@pytest.mark.parametrize(
    ("name", "data", "mask"),
    [
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", True, False),
        ("torch/utils/data/dataloader.py(630): __next__", True, False),
        ("## data_load ##", True, False),
        ("trainer.py(3): get_train_dataloader", False, False),
        ("torch/nn/attention/flex_attention.py(1153): create_block_mask", False, True),
        ("transformers/masking_utils.py(900): create_causal_mask", False, True),
        ("hf_speedkit: mask build", False, True),
        ("aten::masked_fill", False, False),
    ],
)
def test_ranges_that_load_data_or_build_masks_are_known_by_name(name, data, mask):
    assert (loads_data(name), builds_masks(name)) == (data, mask)


@pytest.mark.parametrize(
    ("name", "blocks", "starts"),
    [
        ("cudaStreamSynchronize", True, False),
        ("hipMemcpyWithStream", True, False),
        ("cudaMemcpyAsync", False, False),
        ("cudaEventQuery", False, False),
        ("cuLaunchKernelEx", False, True),
        ("hipGraphLaunch", False, True),
        ("cudaLaunchHostFunc", False, False),
    ],
)
def test_calls_that_block_and_calls_that_launch(name, blocks, starts):
    assert (blocks_host(name), starts_work(name)) == (blocks, starts)


@given(st.text())
def test_printed_names_hold_no_control_character(text):
    shown = printable(text)
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown)
    assert "\u202e" not in shown
    shown.encode("utf-8")
    assert len(printable(text, width=10)) <= 10


def test_escapes_and_direction_overrides_are_replaced():
    assert printable("a\x1b[31mred\u202e") == "a\ufffd[31mred\ufffd"
    assert printable("void kernel<and a very long list of arguments>::run()", width=20) == "void kernel<a…:run()"
