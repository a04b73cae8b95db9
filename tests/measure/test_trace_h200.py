"""Steps recorded on H200s, cut small (tests/data/README.md): exact verdicts, launches and tops of tables."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from trace_files import DATA

from hf_speedkit.core.diagnosis import diagnose, headline
from hf_speedkit.core.kernel_groups import GROUPS
from hf_speedkit.measure.trace import summarize_trace


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a file says; times in nanoseconds."""

    file: str
    verdict: str
    rules: list[tuple[str, str]]
    events: int
    launches: int
    device_ns: int
    window_ns: int
    busy_ns: int
    cpu_op_calls: int
    cpu_self_ns: int
    launch_delay_ns: int
    operations: list[tuple[str, int, int]]
    kernels: list[tuple[str, int, int]]
    groups: list[tuple[str, int, int]]
    kinds: tuple[int, int, int]
    facts: dict[str, object] = field(default_factory=dict)


FALLBACK = Expected(
    file="trace_h200_fallback.json.gz",
    verdict="Host-bound by a GatedDeltaNet fallback: 80 % of the step the device waits for the host.",
    rules=[("host_bound", "problem"), ("gated_delta_fallback", "problem"), ("mask_building", "warning"),
           ("host_syncs", "note")],
    events=13_890,
    launches=1_665,
    device_ns=52_082_507,
    window_ns=255_316_186,
    busy_ns=52_082_507,
    cpu_op_calls=10_528,
    cpu_self_ns=220_608_720,
    launch_delay_ns=13_001,
    operations=[("aten::_cudnn_attention_forward", 1, 52_058_282), ("aten::bmm", 534, 42_912_685),
                ("aten::copy_", 261, 41_561_736), ("aten::mul", 211, 11_890_879), ("aten::mm", 27, 10_293_227)],
    kernels=[("nvjet_sm90_tst_192x208_64x4_2x1_v_bz_coopB_TNT", 6, 7_319_829),
             ("void batch_trsm_left_kernel<float, 64, 4, 3, false, true, tr", 6, 5_055_309),
             ("nvjet_sm90_tst_256x144_64x4_2x1_v_bz_coopA_TNT", 6, 4_951_021)],
    groups=[("GEMM", 567, 27_748_168), ("element-wise", 762, 11_660_002), ("copy", 252, 9_734_753)],
    kinds=(1_637, 9, 19),
    facts={"step": 12, "micro_batches": 1, "layers": 8, "real_tokens": None, "slots": 5_556},
)  # fmt: skip
SPEEDKIT = Expected(
    file="trace_h200_speedkit.json.gz",
    verdict="Device-bound, as it should be: the device was busy 90 % of the step. The next limit is GEMM.",
    rules=[("host_syncs", "note"), ("profiler_cost", "note"), ("device_bound", "note")],
    events=14_854,
    launches=2_482,
    device_ns=516_749_538,
    window_ns=573_929_996,
    busy_ns=516_747_361,
    cpu_op_calls=9_459,
    cpu_self_ns=501_673_706,
    launch_delay_ns=71_144_592,
    operations=[("aten::nonzero", 4, 149_904_503), ("aten::_fused_adamw_", 2, 109_912_702),
                ("aten::_local_scalar_dense", 1, 39_222_678), ("aten::mm", 280, 25_281_653),
                ("ChunkGatedDeltaRuleFunction", 12, 21_894_033)],
    kernels=[("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", 36, 71_494_678),
             ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", 50, 68_906_990),
             ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", 46, 50_108_203)],
    groups=[("GEMM", 316, 391_168_246), ("optimizer", 805, 44_288_158), ("linear attention", 102, 23_688_147)],
    kinds=(2_176, 24, 282),
    facts={"step": 25, "micro_batches": 1, "layers": 8, "real_tokens": 8_189, "slots": 8_192},
)  # fmt: skip
WHOLE_27B = Expected(
    file="trace_2xh200_27b_speedkit.json.gz",
    verdict="Device-bound, as it should be: the device was busy 95 % of the step. The next limit is GEMM.",
    rules=[("device_bound", "note")],
    events=9_871,
    launches=1_297,
    device_ns=358_755_798,
    window_ns=314_186_787,
    busy_ns=299_955_347,
    cpu_op_calls=6_141,
    cpu_self_ns=115_034_553,
    launch_delay_ns=45_073_779,
    operations=[("ChunkGatedDeltaRuleFunction", 20, 25_520_941), ("aten::mm", 198, 14_624_676),
                ("LigerRMSNormFunction", 51, 10_282_174), ("LayerNormGatedFunction", 19, 4_611_667),
                ("DaoAILab::_causal_conv1d_fwd_cpp", 60, 4_502_625)],
    kernels=[("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", 56, 113_463_441),
             ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", 70, 98_451_745),
             ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<409", 28, 54_474_272)],
    groups=[("GEMM", 198, 229_919_481), ("communication", 28, 54_474_272), ("FSDP copy", 312, 23_587_638)],
    kinds=(1_113, 38, 146),
    facts={"step": 27, "micro_batches": 1, "layers": 64, "real_tokens": 8_191, "slots": 8_192},
)  # fmt: skip
WHOLE_27B_TRL = Expected(
    file="trace_2xh200_27b_trl.json.gz",
    verdict="Mixed: the device is idle for 13 % of the step, most of it with the host in: sync.",
    rules=[("masked_sdpa", "warning"), ("unclear", "warning"), ("host_syncs", "note"), ("mask_building", "note"),
           ("profiler_cost", "note")],
    events=13_862,
    launches=2_314,
    device_ns=536_855_785,
    window_ns=486_779_675,
    busy_ns=422_998_284,
    cpu_op_calls=8_060,
    cpu_self_ns=209_484_285,
    launch_delay_ns=134_799_741,
    operations=[("aten::copy_", 462, 64_454_794), ("ChunkGatedDeltaRuleFunction", 20, 23_916_454),
                ("aten::silu", 45, 23_813_259), ("aten::mm", 198, 14_536_841), ("aten::add", 233, 12_427_133)],
    kernels=[("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<409", 28, 120_029_462),
             ("nvjet_sm90_tst_256x152_64x4_1x2_h_bz_coopA_TNT", 70, 105_412_073),
             ("nvjet_sm90_tst_256x160_64x4_1x2_h_bz_coopA_TNT", 70, 88_780_221)],
    groups=[("GEMM", 198, 206_072_384), ("communication", 28, 120_029_462), ("attention", 6, 74_454_864)],
    kinds=(2_122, 40, 152),
    facts={"step": 8, "micro_batches": 1, "layers": 64, "real_tokens": 8_185, "slots": 8_185},
)  # fmt: skip


@pytest.fixture(scope="module", params=[FALLBACK, SPEEDKIT, WHOLE_27B, WHOLE_27B_TRL],
                ids=["fallback", "speedkit", "27b on two", "27b on two, trl"])  # fmt: skip
def read(request):
    return summarize_trace(DATA / request.param.file), request.param


def test_the_file_is_small_and_names_no_one(read):
    path = DATA / read[1].file
    assert path.stat().st_size <= 300_000
    import gzip

    text = gzip.decompress(path.read_bytes())
    for word in (b"/root", b"/home", b"/work", b"host_name", b"username", b"hostname"):
        assert word not in text


def test_the_verdict_and_the_rules_behind_it(read):
    summary, expected = read
    findings = diagnose(summary)
    assert headline(findings) == expected.verdict
    assert [(finding.rule, finding.severity.value) for finding in findings] == expected.rules


def test_counts_and_times_are_exact(read):
    summary, expected = read
    (device,) = summary.devices
    assert device.name == "NVIDIA H200"
    assert (summary.events, summary.launches, summary.launch_calls) == (
        expected.events, expected.launches, expected.launches)  # fmt: skip
    assert (device.kernels, device.memcpy, device.memset) == expected.kinds
    assert summary.device_time_ns == expected.device_ns
    assert (device.window_ns, device.window_busy_ns) == (expected.window_ns, expected.busy_ns)
    assert sum(device.idle_ns.values()) == expected.window_ns - expected.busy_ns
    assert (summary.cpu_op_calls, summary.cpu_self_ns) == (expected.cpu_op_calls, expected.cpu_self_ns)
    assert summary.launch_delay_ns == expected.launch_delay_ns
    assert (summary.partial, summary.notes) == ((), ())


def test_the_tops_of_both_tables_and_the_groups(read):
    summary, expected = read
    assert [(row.name, row.calls, row.self_ns) for row in summary.cpu_ops[:5]] == expected.operations
    assert [(row.name[:60], row.calls, row.total_ns) for row in summary.kernels[:3]] == expected.kernels
    assert [(row.group, row.calls, row.total_ns) for row in summary.groups[:3]] == expected.groups
    assert {row.group for row in summary.groups} <= set(GROUPS)


def test_the_recording_jobs_own_facts_survive(read):
    summary, expected = read
    assert {name: getattr(summary.facts, name) for name in expected.facts} == expected.facts


def test_the_picture_covers_the_step_and_holds_every_group(read):
    summary, expected = read
    assert set(summary.timeline.groups) == {row.group for row in summary.groups}
    assert all(len(bins) == 300 for bins in summary.timeline.groups.values())
    assert 0 <= 300 * summary.timeline.bin_ns - expected.window_ns < 300
    covered = sum(map(sum, summary.timeline.groups.values()))
    # Groups are unions of their own: together they are at least what the device was busy, and one stream adds little.
    assert expected.busy_ns <= covered <= expected.device_ns


def test_the_packages_are_named_that_mend_the_fallback():
    findings = {finding.rule: finding for finding in diagnose(summarize_trace(DATA / FALLBACK.file))}
    advice = findings["gated_delta_fallback"].advice
    assert "flash-linear-attention" in advice
    assert "causal-conv1d" in advice
