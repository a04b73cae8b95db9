"""Verdicts: each rule fires on its evidence, stays silent without it, and says what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trace_files import TraceFile, steady_trace

from hf_speedkit.core.diagnosis import RULES, diagnose, headline
from hf_speedkit.core.records import Severity
from hf_speedkit.core.trace_records import DeviceSummary, StepFacts, StepSummary, TraceSummary
from hf_speedkit.core.trace_rows import CallRow, CpuOpRow, GroupRow, KernelRow, RangeRow, SyncRow
from hf_speedkit.measure.trace import summarize_trace

MS = 1_000_000
SEED = TraceSummary(
    file="the seed's published tables",
    cpu_ops=(CpuOpRow(name="aten::bmm", calls=31_105, total_ns=2_000 * MS, self_ns=2_000 * MS),),
    cpu_self_ns=14_400 * MS,
    device_time_ns=10_300 * MS,
    launches=269_448,
)


def device(*, busy: float = 95, window: float = 100, **idle: float) -> DeviceSummary:
    """A device, in ms."""
    causes = {cause: int(idle.get(cause.split()[0].lower(), 0) * MS) for cause in
              ("data", "sync", "launch calls", "CPU operations", "Python", "queued work")}  # fmt: skip
    return DeviceSummary(
        device="0", name=None, streams=("7",), kernels=10, memcpy=0, memset=0, busy_ns=int(busy * MS),
        span_ns=int(window * MS), window_ns=int(window * MS), window_busy_ns=int(busy * MS), communication_ns=0,
        communication_overlap_ns=0, communication_exposed_ns=0, idle_ns=causes,
    )  # fmt: skip


def step(*, launch_calls: int = 100) -> StepSummary:
    return StepSummary(
        label="ProfilerStep#1", start_ns=0, duration_ns=100 * MS, cpu_ops=10, launch_calls=launch_calls, launches=100,
        launches_in_window=100, sync_wait_ns=0, data_wait_ns=0, host_ns=100 * MS, devices=(),
    )  # fmt: skip


HEALTHY = TraceSummary(
    file="healthy.json",
    steps=(step(),),
    cpu_ops=(CpuOpRow(name="aten::mm", calls=100, total_ns=20 * MS, self_ns=20 * MS),),
    cpu_op_calls=100,
    cpu_self_ns=20 * MS,
    kernels=(KernelRow(name="nvjet", calls=100, total_ns=95 * MS, group="GEMM", kind="kernel"),),
    device_time_ns=95 * MS,
    launches=100,
    launch_calls=100,
    launch_delay_ns=2 * MS,
    devices=(device(busy=95, queued=5),),
    groups=(
        GroupRow(group="GEMM", calls=80, total_ns=85 * MS),
        GroupRow(group="attention", calls=20, total_ns=10 * MS),
    ),
)


def rules(trace: TraceSummary) -> list[str]:
    return [finding.rule for finding in diagnose(trace)]


def op(name: str, calls: int) -> CpuOpRow:
    return CpuOpRow(name=name, calls=calls, total_ns=calls, self_ns=calls)


def with_ops(*rows: CpuOpRow, whole: bool = True, **changes) -> TraceSummary:
    calls = sum(row.calls for row in rows)
    return replace(HEALTHY, cpu_ops=rows, cpu_op_calls=calls if whole else None, **changes)


def test_the_seeds_published_tables_are_host_bound_by_a_gated_delta_net_fallback():
    findings = diagnose(SEED)
    assert [finding.rule for finding in findings] == ["host_bound", "gated_delta_fallback", "too_many_launches"]
    assert headline(findings).startswith(
        "Host-bound by a GatedDeltaNet fallback: 14.40 s of CPU operations against 10.3"
    )
    assert "flash-linear-attention" in findings[1].advice
    assert "causal-conv1d" in findings[1].advice
    assert any("31,105" in line for line in findings[1].evidence)
    assert any("269,448" in line for line in findings[0].evidence)


def test_the_seed_after_the_repair_has_no_launch_finding():
    """18,060 launches of 64 layers: below the limit."""
    repaired = replace(SEED, launches=18_060, cpu_ops=(op("aten::bmm", 32),), cpu_self_ns=1_000 * MS)
    assert rules(repaired) == ["device_bound"]


def test_a_healthy_trace_says_so_and_names_the_next_limit():
    (finding,) = diagnose(HEALTHY)
    assert finding.rule == "device_bound"
    assert finding.severity is Severity.NOTE
    assert "next limit is GEMM" in finding.message
    assert finding.evidence[0].startswith("GEMM 89 %")


def test_v75_without_device_events_the_verdict_is_unknown_and_never_host_bound():
    trace = replace(
        HEALTHY, kernels=None, device_time_ns=None, launches=None, devices=(), groups=(), device_unknown="CUPTI refused"
    )
    findings = diagnose(trace)
    assert findings[0].rule == "unknown"
    assert findings[0].evidence == ("CUPTI refused",)
    assert "host_bound" not in rules(trace)
    assert "device_bound" not in rules(trace)


def test_a_cpu_run_is_not_told_to_install_gpu_packages():
    trace = TraceSummary(cpu_ops=(op("aten::bmm", 31_105),), cpu_op_calls=31_105, device_unknown="a CPU run")
    assert rules(trace) == ["unknown"]


def test_v61_many_small_kernels_and_one_large_one_get_different_verdicts(tmp_path):
    """Utilisation by NVML's definition is high for both; the reasons differ."""
    small = summarize_trace(steady_trace(kernels=2000, kernel_us=4, every_us=9).write(tmp_path / "small.json"))
    large = summarize_trace(steady_trace(kernels=20, kernel_us=2_000, every_us=9).write(tmp_path / "large.json"))
    assert diagnose(small)[0].rule == "host_bound"
    assert diagnose(large)[0].rule == "device_bound"
    assert small.launches > large.launches
    assert large.devices[0].idle_share < 0.01


def test_idle_that_recording_alone_explains_is_a_warning_and_not_a_problem():
    idle = {"busy": 88, "cpu": 8, "python": 4}
    bound = replace(HEALTHY, devices=(device(**idle),), launch_delay_ns=5_000)
    assert diagnose(bound)[0].severity is Severity.PROBLEM
    # 4,000 operations cost about 9.2 ms of the 12 ms idle.
    slowed = replace(bound, cpu_op_calls=4_000)
    finding = diagnose(slowed)[0]
    assert (finding.rule, finding.severity) == ("host_bound", Severity.WARNING)
    # Known without the profiler: the step took 90 ms, the device works 88 of them.
    known = replace(bound, facts=StepFacts(untraced_step_time_s=0.090))
    assert diagnose(known)[0].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("changes", "fires"),
    [
        ({"busy": 80, "data": 19, "python": 1}, True),
        ({"busy": 80, "data": 5, "python": 15}, False),  # a quarter of the idle time
        ({"busy": 96, "data": 4}, False),  # all of it, but 4 % of the step
    ],
)
def test_waiting_for_batches_is_input_bound_from_a_third_of_the_idle_time(changes, fires):
    assert ("input_bound" in rules(replace(HEALTHY, devices=(device(**changes),)))) is fires


@pytest.mark.parametrize(
    ("delay_us", "idle", "rule"),
    [
        (5, {"cpu": 20}, "host_bound"),
        (49, {"python": 20}, "host_bound"),
        (605, {"cpu": 12, "queued": 8}, "unclear"),
        (27_000, {"queued": 20}, "stalled"),
        (27_000, {"cpu": 19, "queued": 1}, "unclear"),
    ],
)
def test_the_launch_delay_tells_a_late_host_from_a_stalled_device(delay_us, idle, rule):
    trace = replace(HEALTHY, devices=(device(busy=80, **idle),), launch_delay_ns=delay_us * 1000)
    assert diagnose(trace)[0].rule == rule


@pytest.mark.parametrize(
    ("bmm", "solves", "micro_batches", "fires"),
    [
        (640, 0, 1, False),  # eager attention of 64 layers
        (2_001, 0, 1, True),
        (2_001, 0, 4, False),
        (388 * 6, 6 * 6, 1, True),
        (100, 6, 1, True),
        (100, 3, 1, False),
    ],
)
def test_the_gated_delta_fallback_is_known_by_its_products_and_solves(bmm, solves, micro_batches, fires):
    trace = with_ops(
        op("aten::bmm", bmm),
        op("aten::linalg_solve_triangular", solves),
        op("aten::cumsum", 6),
        facts=StepFacts(micro_batches=micro_batches),
    )
    assert ("gated_delta_fallback" in rules(trace)) is fires


def test_a_fused_kernel_of_the_family_rules_the_fallback_out():
    kernel = KernelRow(
        name="chunk_gated_delta_rule_fwd_kernel_h_blockdim64", calls=6, total_ns=5, group="x", kind="kernel"
    )
    assert "gated_delta_fallback" not in rules(
        with_ops(op("aten::bmm", 9_000), op("aten::cumsum", 1), kernels=(*HEALTHY.kernels, kernel))
    )


@pytest.mark.parametrize(
    ("rows", "fires"),
    [
        ((op("aten::cumsum", 24), op("aten::einsum", 20), op("aten::tril", 16)), True),  # Mamba-2, 4 layers
        ((op("aten::cumsum", 24), op("aten::einsum", 1), op("aten::tril", 16)), False),
        ((op("aten::bmm", 3 * 2_048 * 2),), True),  # Mamba-1, 2 layers of 2,048 tokens
    ],
)
def test_the_mamba_fallback_is_known_by_its_segment_sums_or_its_product_per_token(rows, fires):
    found = rules(with_ops(*rows))
    assert ("mamba_fallback" in found) is fires
    assert "gated_delta_fallback" not in found


@pytest.mark.parametrize(
    ("launch_calls", "layers", "micro_batches", "fires"),
    [
        (20_001, None, None, True),
        (19_999, None, None, False),
        (30_000, None, 4, False),
        (15_431, 8, 1, True),  # transformers 5.23 fallback on an H200
        (3_429, 8, 1, False),  # fused, the same model
    ],
)
def test_launches_are_judged_per_micro_batch_and_layer(launch_calls, layers, micro_batches, fires):
    trace = replace(
        HEALTHY,
        steps=(step(launch_calls=launch_calls),),
        launches=launch_calls,
        facts=StepFacts(layers=layers, micro_batches=micro_batches),
    )
    assert ("too_many_launches" in rules(trace)) is fires


def test_a_cuda_graph_is_judged_by_its_launch_calls():
    trace = replace(HEALTHY, steps=(step(launch_calls=3),), launches=80_000, launches_per_call_max=40_000)
    assert "too_many_launches" not in rules(trace)


@pytest.mark.parametrize(("exposed", "fires"), [(11, True), (9, False)])
def test_exposed_communication_matters_from_a_tenth_of_the_step(exposed, fires):
    one = replace(device(busy=95, queued=5), communication_ns=20 * MS, communication_exposed_ns=exposed * MS)
    found = [finding for finding in diagnose(replace(HEALTHY, devices=(one,))) if finding.rule == "communication_bound"]
    assert bool(found) is fires
    if fires:
        assert "slowest rank" in " ".join(found[0].evidence)


@pytest.mark.parametrize(("idle_ms", "severity"), [(4, Severity.WARNING), (0.1, Severity.NOTE)])
def test_host_syncs_weigh_what_they_cost_and_name_their_line(idle_ms, severity):
    row = SyncRow(
        call="cudaStreamSynchronize", cause="aten::item", source="train.py(44): loss", calls=10, wait_ns=30 * MS,
        idle_after_ns=int(idle_ms * MS),
    )  # fmt: skip
    (finding,) = [f for f in diagnose(replace(HEALTHY, syncs=(row,))) if f.rule == "host_syncs"]
    assert finding.severity is severity
    assert "aten::item at train.py(44): loss" in finding.evidence[0]


def test_one_sync_per_micro_batch_is_nothing_to_speak_of():
    row = SyncRow(call="cudaStreamSynchronize", cause=None, source=None, calls=1, wait_ns=MS, idle_after_ns=0)
    assert rules(replace(HEALTHY, syncs=(row,))) == ["device_bound"]


@pytest.mark.parametrize(
    ("changes", "fires"),
    [
        ({"runtime_calls": (CallRow(name="cuModuleLoadData", calls=4, total_ns=2 * MS),)}, True),
        ({"overhead": (CallRow(name="Lazy Function Loading", calls=1, total_ns=2 * MS),)}, True),
        ({"runtime_calls": (CallRow(name="cuModuleLoadData", calls=1, total_ns=1000),)}, False),
        ({"longest_launch_call_ns": 51 * MS}, True),
        ({"longest_launch_call_ns": 49 * MS}, False),
    ],
)
def test_v58_code_loaded_inside_the_step_is_counted_and_named(changes, fires):
    found = [finding for finding in diagnose(replace(HEALTHY, **changes)) if finding.rule == "recompilation"]
    assert bool(found) is fires
    if fires:
        assert "one shape" in found[0].advice


@pytest.mark.parametrize(("real", "slots", "fires"), [(70, 100, True), (91, 100, False), (None, 100, False)])
def test_padding_is_told_only_where_the_job_wrote_its_counts(real, slots, fires):
    assert ("padding" in rules(replace(HEALTHY, facts=StepFacts(real_tokens=real, slots=slots)))) is fires


@pytest.mark.parametrize(
    ("launches", "device_ms", "extra", "fires"),
    [
        (600, 1, (), True),
        (400, 6, (), True),
        (400, 4, (), False),
        (600, 9, (op("aten::_foreach_add_", 3),), False),
        (600, 9, (op("aten::_fused_adamw_", 1),), False),
    ],
)
def test_an_optimizer_that_goes_parameter_by_parameter_is_named(launches, device_ms, extra, fires):
    row = RangeRow(
        name="Optimizer.step#AdamW.step", calls=1, total_ns=9 * MS, launches=launches, device_ns=device_ms * MS
    )
    trace = with_ops(op("aten::mm", 10), *extra, annotations=(row,))
    assert ("unfused_optimizer" in rules(trace)) is fires


@pytest.mark.parametrize(
    ("name", "fires"),
    [
        ("aten::_scaled_dot_product_efficient_attention", True),
        ("aten::_scaled_dot_product_cudnn_attention", True),
        ("aten::_scaled_dot_product_flash_attention", False),
    ],
)
def test_attention_with_a_materialised_mask_is_named(name, fires):
    assert ("masked_sdpa" in rules(with_ops(op(name, 4)))) is fires


def test_cheap_masked_attention_is_not_worth_a_word():
    groups = (GroupRow(group="GEMM", calls=1, total_ns=95 * MS), GroupRow(group="attention", calls=1, total_ns=MS))
    assert "masked_sdpa" not in rules(with_ops(op("aten::_scaled_dot_product_efficient_attention", 4), groups=groups))


def test_v60_mask_building_is_one_line_beside_attention():
    groups = (*HEALTHY.groups, GroupRow(group="mask building", calls=9, total_ns=20 * MS))
    (finding,) = [f for f in diagnose(replace(HEALTHY, groups=groups)) if f.rule == "mask_building"]
    assert finding.message == "Mask build 17 % of device time, attention 8.7 %."
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(("forward", "fires"), [(4, False), (8, False), (12, True)])
def test_two_checkpointings_around_one_layer_are_named(forward, fires):
    trace = with_ops(
        op("aten::_scaled_dot_product_flash_attention", forward),
        op("aten::_scaled_dot_product_flash_attention_backward", 4),
    )
    assert ("double_checkpointing" in rules(trace)) is fires


@pytest.mark.parametrize(
    ("changes", "fires"),
    [
        ({"overhead_ns": 2 * MS}, True),
        ({"cpu_op_calls": 5_000}, True),
        ({"facts": StepFacts(untraced_step_time_s=0.080)}, True),
        ({"facts": StepFacts(untraced_step_time_s=0.095)}, False),
    ],
)
def test_the_profilers_own_cost_is_told(changes, fires):
    assert ("profiler_cost" in rules(replace(HEALTHY, **changes))) is fires


def test_a_partial_trace_says_so_in_the_verdict():
    findings = diagnose(replace(HEALTHY, partial=("the gzip data ends early",)))
    assert [finding.rule for finding in findings] == ["partial", "device_bound"]
    assert findings[0].evidence == ("the gzip data ends early",)


def test_problems_come_before_warnings_and_warnings_before_notes():
    weights = [Severity.PROBLEM, Severity.WARNING, Severity.NOTE]
    order = [weights.index(finding.severity) for finding in diagnose(replace(SEED, partial=("cut",), overhead_ns=5))]
    assert order == sorted(order)


def test_every_finding_of_every_rule_has_evidence_and_advice(tmp_path):
    trace = TraceFile().step(1, 0, 100).op("aten::mm", 5, 20).launch(6, "gemm", 90, 5)
    for finding in (*diagnose(SEED), *diagnose(HEALTHY), *diagnose(summarize_trace(trace.write(tmp_path / "t.json")))):
        assert finding.evidence
        assert finding.advice
        assert finding.message.endswith(".")
    assert len({rule.__name__ for rule in RULES}) == len(RULES)


def test_only_a_trace_can_be_diagnosed():
    with pytest.raises(TypeError, match="TraceSummary"):
        diagnose("trace.json")
