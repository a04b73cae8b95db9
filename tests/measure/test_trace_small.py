"""Traces written by hand, with every number added up on paper."""

from __future__ import annotations

import json

import pytest
from trace_files import AUTOGRAD, DATA, MAIN, TraceFile, small_trace

from hf_speedkit.core.trace_records import StepDevice
from hf_speedkit.core.trace_rows import CpuOpRow, KernelRow, SyncRow
from hf_speedkit.measure.trace import summarize_trace


def test_two_streams_are_busy_once_and_hide_communication_only_where_they_overlap():
    summary = summarize_trace(DATA / "trace_two_streams.json")
    (device,) = summary.devices
    # 1000-1010 from before the window, then 1060.5-1110.75, 1100-1140 and 1130-1150 in one piece.
    assert device.busy_ns == 99_500
    assert device.span_ns == 150_000
    assert device.streams == ("7", "20")
    assert (device.communication_ns, device.communication_overlap_ns) == (40_000, 10_750)
    assert device.communication_exposed_ns == 19_250  # the copy hides 1130-1140
    assert summary.device_time_ns == 120_250
    assert (summary.rank, summary.world_size, device.name) == (0, 2, "NVIDIA Test")


def test_a_launch_belongs_to_the_step_of_its_call_and_not_to_the_step_of_its_kernel():
    summary = summarize_trace(DATA / "trace_two_streams.json")
    assert [step.launches for step in summary.steps] == [2, 1, 0]
    assert [step.launches_in_window for step in summary.steps] == [2, 2, 0]
    assert summary.steps[0].devices == (StepDevice(device="0", busy_ns=79_500, busy_in_window_ns=49_500),)
    assert summary.launches_before_window == 1
    assert summary.launches == 4


def test_the_empty_last_step_of_a_profiler_is_no_step():
    summary = summarize_trace(DATA / "trace_two_streams.json")
    assert [step.empty for step in summary.steps] == [False, False, True]
    assert summary.step_count == 2
    assert summary.devices[0].window_ns == 200_000


def test_idle_time_is_given_to_what_the_host_was_doing():
    summary = summarize_trace(DATA / "trace_causes.json")
    (device,) = summary.devices
    assert device.window_ns - device.window_busy_ns == 650_000
    assert dict(device.idle_ns) == {
        "data": 95_000,
        "sync": 90_000,
        "launch calls": 66_000,
        "CPU operations": 98_000,
        "Python": 131_000,
        "queued work": 170_000,
    }
    assert summary.syncs == (
        SyncRow(
            call="cudaStreamSynchronize",
            cause="aten::item",
            source=None,
            calls=1,
            wait_ns=4_000,
            idle_after_ns=90_000,
        ),
    )
    (step,) = summary.steps
    assert (step.data_wait_ns, step.sync_wait_ns, step.host_ns) == (95_000, 4_000, 901_000)


def test_the_schema_of_2021_reads_like_todays():
    summary = summarize_trace(DATA / "trace_2021.json")
    assert [step.label for step in summary.steps] == ["ProfilerStep#5"]
    assert summary.steps[0].launches == 2
    assert summary.cpu_op_calls == 3  # the step mark is no operator
    assert summary.cpu_ops[0] == CpuOpRow(name="aten::copy_", calls=1, total_ns=280_000, self_ns=280_000)
    assert [row.kind for row in summary.kernels] == ["memcpy", "kernel"]
    assert summary.devices[0].streams == ("7",)


def test_the_line_of_a_sync_is_found_in_a_call_stack_and_loses_its_home_directory():
    (sync,) = summarize_trace(DATA / "trace_2021.json").syncs
    assert sync.cause == "aten::to > aten::copy_"
    assert sync.source == "proj/train.py(44): <module>"


def test_both_tables_of_a_small_trace(tmp_path):
    summary = summarize_trace(small_trace().write(tmp_path / "t.json"))
    assert summary.cpu_ops == (
        CpuOpRow(name="aten::item", calls=1, total_ns=200_000, self_ns=200_000),
        CpuOpRow(name="aten::addmm", calls=1, total_ns=60_000, self_ns=60_000),
        CpuOpRow(name="aten::linear", calls=1, total_ns=100_000, self_ns=40_000),
    )
    assert summary.kernels == (
        KernelRow(name="ampere_sgemm_32x32", calls=1, total_ns=300_000, group="GEMM", kind="kernel"),
        KernelRow(name="Memcpy DtoH (Device -> Pinned)", calls=1, total_ns=10_000, group="copy", kind="memcpy"),
    )
    assert summary.rank == 3


@pytest.mark.parametrize("bare", [True, False], ids=["bare list", "object"])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_containers_give_the_same_numbers(tmp_path, bare, suffix, indent):
    import gzip

    trace = small_trace()
    text = json.dumps(trace.events if bare else trace.document(), indent=indent).encode()
    path = tmp_path / f"t{suffix}"
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    summary = summarize_trace(path)
    expected = summarize_trace(small_trace().write(tmp_path / "expected.json"))
    assert (summary.kernels, summary.cpu_ops, summary.devices[0].busy_ns) == (
        expected.kernels,
        expected.cpu_ops,
        expected.devices[0].busy_ns,
    )


def test_metadata_behind_the_events_is_read_and_compression_is_recognised_by_content(tmp_path):
    import gzip

    path = tmp_path / "looks_plain.json"
    document = {"traceEvents": small_trace().events, "distributedInfo": {"rank": 5}}
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    assert summarize_trace(path).rank == 5


@pytest.mark.parametrize(
    ("ts", "dur", "start_step_ns", "kernel_ns"),
    [
        (4458676422880.181, 41.407, 4458676422880181, 41_407),
        (1623142623460123, 50, 1623142623460123000, 50_000),
        ("1706000000000123.457", "7.125", 1706000000000123457, 7_125),
    ],
    ids=["fractions relative to a base", "integers since 1970", "fractions since 1970"],
)
def test_times_are_exact_to_the_nanosecond(tmp_path, ts, dur, start_step_ns, kernel_ns):
    path = tmp_path / "t.json"
    text = small_trace().text().replace('"ts": 140', f'"ts": {ts}').replace('"dur": 300', f'"dur": {dur}')
    path.write_text(text)
    from hf_speedkit.measure.trace_columns import read_columns
    from hf_speedkit.measure.trace_reader import TraceStream

    kernels = read_columns(TraceStream(path)).table("kernel")
    assert (int(kernels.start[0]), int(kernels.duration[0])) == (start_step_ns, kernel_ns)


def test_a_file_of_absolute_times_with_fractions_is_exact(tmp_path):
    """Written between 2024-01 and 2024-05: a double resolves 0.25 us there."""
    base = 1706000000000000
    lines = [
        f'{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":{base + i}.{i:03d},"dur":0.{i + 1:03d},'
        f'"args":{{"device":0,"stream":7,"correlation":{i}}}}}'
        for i in range(200)
    ]
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents":[' + ",".join(lines) + "]}")
    (device,) = summarize_trace(path).devices
    assert device.busy_ns == sum(range(1, 201))
    assert device.span_ns == 199_000 + 199 + 200


def test_a_cuda_graph_is_one_launch_call_and_many_launches(tmp_path):
    trace = TraceFile().step(1, 0, 100).call("cudaGraphLaunch", 10, 5, correlation=1)
    for i in range(20):
        trace.device("k", 20 + i, 1, correlation=1)
    summary = summarize_trace(trace.write(tmp_path / "t.json"))
    assert (summary.steps[0].launch_calls, summary.steps[0].launches) == (1, 20)
    assert summary.launches_per_call_max == 20
    assert summary.launch_delay_ns == 10_000  # of the first kernel, not of the twentieth


def test_sync_rows_and_annotations_on_a_device_are_not_work(tmp_path):
    trace = small_trace()
    trace.add("cuda_sync", "Stream Sync", 450, 400, (0, 7), device=0, stream=7, correlation=9)
    trace.add("gpu_user_annotation", "ProfilerStep#1", 140, 300, (0, 7))
    trace.op("aten::triton_poi", 700, 5, stream=7, device=0)  # an operator may carry an argument named stream
    summary = summarize_trace(trace.write(tmp_path / "t.json"))
    assert (summary.launches, summary.devices[0].busy_ns, len(summary.steps)) == (2, 310_000, 1)


def test_devices_are_never_summed(tmp_path):
    trace = TraceFile().step(1, 0, 100)
    for device in range(3):
        trace.launch(1 + device, "k", 10, 50, device=device)
    summary = summarize_trace(trace.write(tmp_path / "t.json"))
    assert [(device.device, device.busy_ns) for device in summary.devices] == [
        ("0", 50_000),
        ("1", 50_000),
        ("2", 50_000),
    ]


def test_without_step_marks_the_file_is_one_step_and_says_so(tmp_path):
    trace = TraceFile().op("aten::mm", 0, 10).launch(2, "gemm", 8, 10)
    trace.call("cudaDeviceSynchronize", 30, 5)  # the profiler's own, at the end of every recording
    summary = summarize_trace(trace.write(tmp_path / "t.json"))
    assert summary.steps == ()
    assert summary.step_count == 1
    assert "no ProfilerStep marks" in summary.notes[0]
    assert summary.syncs == ()


def test_v60_mask_building_is_a_group_of_its_own(tmp_path):
    trace = TraceFile().step(1, 0, 500).step(2, 500, 500)
    for start in (0, 500):
        trace.add("user_annotation", "hf_speedkit: mask build", start + 10, 50)
        trace.launch(start + 20, "void at::native::vectorized_elementwise_kernel<4>", start + 30, 30)
        trace.launch(start + 100, "flash_fwd_kernel", start + 110, 90)
    summary = summarize_trace(trace.write(tmp_path / "t.json"))
    assert {row.group: row.total_ns for row in summary.groups} == {"mask building": 60_000, "attention": 180_000}


def test_work_still_queued_from_the_step_before_is_in_no_group(tmp_path):
    trace = TraceFile().device("gemm", 0, 300, correlation=0).step(1, 10, 400).launch(20, "gemm", 300, 50)
    trace.device("gemm", 350, 7, correlation=99)  # its launch call is missing in the file, and it came later
    summary = summarize_trace(trace.write(tmp_path / "t.json"))
    assert [(row.group, row.calls, row.total_ns) for row in summary.groups] == [("GEMM", 2, 57_000)]
    assert summary.device_time_ns == 357_000


def test_modules_of_stacks_get_their_forward_and_their_backward(tmp_path):
    trace = TraceFile().step(1, 0, 1000)
    trace.add("python_function", "nn.Module: Model_0", 10, 200)
    trace.add("python_function", "nn.Module: Linear_0", 20, 100)
    trace.op("aten::linear", 30, 50, **{"Sequence number": 7, "Fwd thread id": 0})
    trace.launch(40, "gemm", 50, 10)
    trace.op("autograd::engine::evaluate_function: AddmmBackward0", 300, 60, AUTOGRAD, **{"Sequence number": 7})
    trace.launch(310, "gemm", 320, 20, where=AUTOGRAD)
    rows = {row.name: row for row in summarize_trace(trace.write(tmp_path / "t.json")).modules}
    assert set(rows) == {"Model_0", "Linear_0"}
    for row in rows.values():
        assert (row.calls, row.forward_launches, row.forward_device_ns) == (1, 1, 10_000)
        assert (row.backward_launches, row.backward_device_ns, row.backward_host_ns) == (1, 20_000, 60_000)
    assert rows["Linear_0"].forward_host_ns == 100_000


def test_modules_of_fsdp_annotations_have_qualified_names_in_both_directions(tmp_path):
    trace = TraceFile().step(1, 0, 1000)
    for name, start in (("FSDP::pre_forward (model.layers.3)", 10), ("FSDP::post_forward (model.layers.3)", 100)):
        trace.add("user_annotation", name, start, 5)
    trace.launch(50, "gemm", 60, 10)
    for name, start in (
        ("FSDP::pre_backward (model.layers.3)", 300),
        ("FSDP::post_backward_accumulate (model.layers.3)", 400),
        ("FSDP::post_backward_reduce (model.layers.3)", 410),
    ):
        trace.add("user_annotation", name, start, 5, AUTOGRAD)
    trace.launch(350, "gemm", 360, 30, where=AUTOGRAD)
    trace.launch(350, "other", 400, 1, where=MAIN)
    (row,) = summarize_trace(trace.write(tmp_path / "t.json")).modules
    assert (row.name, row.calls, row.forward_host_ns, row.forward_device_ns) == ("model.layers.3", 1, 95_000, 10_000)
    assert (row.backward_host_ns, row.backward_launches, row.backward_device_ns) == (105_000, 1, 30_000)


def test_the_picture_of_the_step_covers_what_the_groups_covered(tmp_path):
    summary = summarize_trace(small_trace().write(tmp_path / "t.json"))
    timeline = summary.timeline
    assert {group: sum(bins) for group, bins in timeline.groups.items()} == {"GEMM": 300_000, "copy": 10_000}
    assert all(len(bins) == 300 for bins in timeline.groups.values())
    assert max(max(bins) for bins in timeline.groups.values()) <= timeline.bin_ns


def test_v75_operators_without_device_events_leave_every_device_number_unknown(tmp_path):
    trace = TraceFile().step(1, 0, 100).op("aten::mm", 10, 50).call("cudaLaunchKernel", 20, 3, correlation=1)
    summary = summarize_trace(trace.write(tmp_path / "t.json"))
    assert summary.kernels is None
    assert summary.device_time_ns is None
    assert summary.launches is None
    assert summary.steps[0].launches is None
    assert summary.devices == ()
    assert "CUPTI" in summary.device_unknown
    assert summary.launch_calls == 1
