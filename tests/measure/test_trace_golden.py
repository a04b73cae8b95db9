"""Every trace recorded by strangers (../shared/traces) gives the numbers of its truth file, exactly."""

from __future__ import annotations

import json

import pytest
from trace_files import SHARED_TRACES

from hf_speedkit.measure.trace import summarize_trace

TRACES = sorted(path for path in SHARED_TRACES.glob("*.json*") if ".truth." not in path.name)
pytestmark = pytest.mark.skipif(not TRACES, reason=f"{SHARED_TRACES} does not exist: it is laid beside a checkout only")


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def truth_of(path):
    return json.loads((path.parent / (path.name.split(".")[0] + ".truth.json")).read_text())


@pytest.fixture(scope="module", params=TRACES, ids=lambda path: path.name.split(".")[0])
def read(request):
    return summarize_trace(request.param), truth_of(request.param)


def test_every_shared_trace_is_here():
    assert len(TRACES) == 16


def test_events_and_categories_are_counted_exactly(read):
    summary, truth = read
    assert summary.events == truth["events"]
    assert summary.complete_events == truth["complete_events"]
    assert dict(summary.categories) == truth["categories"]
    assert summary.partial == ()
    assert summary.dropped_events == 0


def test_device_events_launches_and_times_are_exact(read):
    summary, truth = read
    kinds: dict[str, int] = {}
    for row in summary.kernels or ():
        kinds[row.kind] = kinds.get(row.kind, 0) + row.calls
    assert kinds == truth["device_events"]
    assert (summary.launches or 0) == truth["launches_total"]
    assert {row.name: row.calls for row in summary.runtime_calls if "Launch" in row.name} == truth["launch_calls"]
    assert summary.launches_before_window == truth["device_events_without_launch_call"]
    assert summary.launches_per_call_max == truth["max_device_events_per_correlation"]
    if summary.kernels is None:
        assert summary.device_time_ns is None
        assert summary.device_unknown
        return
    assert summary.device_time_ns == ns(truth["device_time_sum_us"])
    assert sum(row.total_ns for row in summary.kernels if row.kind == "kernel") == ns(truth["kernel_time_sum_us"])


def test_busy_time_and_span_of_every_device_are_exact(read):
    summary, truth = read
    assert [device.device for device in summary.devices] == truth["devices"]
    assert sorted(stream for device in summary.devices for stream in device.streams) == truth.get("streams", [])
    for device in summary.devices:
        expected = truth["busy_union_per_device"][device.device]
        assert device.busy_ns == ns(expected["busy_us"])
        assert device.span_ns == ns(expected["span_us"])
        assert sum(device.idle_ns.values()) == device.window_ns - device.window_busy_ns


def test_communication_and_its_overlap_are_exact(read):
    summary, truth = read
    kernels = sum(row.calls for row in summary.kernels or () if row.group == "communication")
    if "comm" not in truth:
        assert kernels == 0
        return
    device, expected = summary.devices[0], truth["comm"]
    assert kernels == expected["kernels"]
    assert device.communication_ns == ns(expected["union_us"])
    assert device.communication_overlap_ns == ns(expected["overlap_with_compute_kernels_us"])
    assert device.communication_ns - device.communication_overlap_ns == ns(expected["exposed_vs_kernels_us"])
    assert device.communication_exposed_ns == ns(expected["exposed_vs_all_device_work_us"])


def test_both_tables_are_exact(read):
    summary, truth = read
    assert summary.cpu_op_calls == truth["cpu_op_calls"]
    assert summary.cpu_self_ns == ns(truth["cpu_self_total_us"])
    assert summary.overlapping_ops == truth["cpu_partially_overlapping"]
    operations = {row.name: row for row in summary.cpu_ops}
    for expected in truth["top_cpu_by_self"]:
        row = operations[expected["name"]]
        assert (row.calls, row.total_ns, row.self_ns) == (
            expected["calls"],
            ns(expected["total_us"]),
            ns(expected["self_us"]),
        )
    assert [row.self_ns for row in summary.cpu_ops[: len(truth["top_cpu_by_self"])]] == [
        ns(expected["self_us"]) for expected in truth["top_cpu_by_self"]
    ]
    device: dict[str, list[int]] = {}  # the truth files cut names to 160 characters
    for row in summary.kernels or ():
        sums = device.setdefault(row.name[:160], [0, 0])
        sums[0] += row.calls
        sums[1] += row.total_ns
    for expected in truth.get("top_device", []):
        assert device[expected["name"]] == [expected["calls"], ns(expected["total_us"])]


def test_sync_calls_and_annotations_are_exact(read):
    summary, truth = read
    # The truth files list the calls that say Synchronize; blocking copies are known here as well.
    assert {row.name: (row.calls, row.total_ns) for row in summary.sync_calls if "Synchronize" in row.name} == {
        name: (row["calls"], ns(row["us"])) for name, row in truth["sync_calls"].items()
    }
    annotations = {row.name: row.calls for row in summary.annotations}
    assert {name: annotations.get(name) for name in truth["annotations"]} == truth["annotations"]
    assert {row.name: row.calls for row in summary.device_annotations} == truth["gpu_annotations"]


def test_every_step_is_exact(read):
    summary, truth = read
    assert [step.label for step in summary.steps] == [expected["name"] for expected in truth["steps"]]
    for step, expected in zip(summary.steps, truth["steps"], strict=True):
        assert step.duration_ns == ns(expected["dur_us"])
        assert (step.launches or 0) == expected["launches_by_launch_call"]
        assert (step.launches_in_window or 0) == expected["launches_by_device_ts"]
        assert step.cpu_ops == expected["cpu_ops_started"]
        assert step.host_ns + step.sync_wait_ns + step.data_wait_ns == step.duration_ns
        for device in step.devices:
            assert device.busy_in_window_ns == ns(expected[f"busy_in_step_window_us_dev{device.device}"])
            # The truth file leaves the union out where a step launched nothing.
            assert device.busy_ns == ns(expected.get("busy_of_step_launches_us", 0))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("kineto_resnet50_2021_schema", "input_bound"),
        ("hta_nccl_2rank_rank0", "host_bound"),
        ("tracelens_h100_bert_stack", "host_bound"),
        ("hta_mi250_rocm_train", "host_bound"),
        ("tracelens_mi300_resnet_ddp_ckpt", "communication_bound"),
        ("hta_sampled_rank-0", "communication_bound"),
        ("hta_cpu_only_gloo_rank34", "unknown"),
        ("hta_alexnet_cuda_sync", "recompilation"),
    ],
)
def test_the_verdict_on_a_strangers_trace(name, rule):
    from hf_speedkit.core.diagnosis import diagnose

    (path,) = [path for path in TRACES if path.name.startswith(name)]
    assert diagnose(summarize_trace(path))[0].rule == rule


def test_no_name_of_a_person_or_host_leaves_the_top_level_of_a_trace(read):
    summary, _ = read
    text = repr(summary)
    assert "username" not in text
    assert "host_name" not in text
    assert "/home/" not in " ".join(row.source or "" for row in summary.syncs)
