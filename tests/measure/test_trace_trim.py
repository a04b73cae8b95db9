"""A trimmed trace gives the same answers for its step, and nothing private."""

from __future__ import annotations

import gzip
import json

import pytest
from trace_files import SHARED_TRACES, TraceFile, small_trace, steady_trace

from hf_speedkit.core.errors import TraceError
from hf_speedkit.measure.trace import summarize_trace
from hf_speedkit.measure.trace_trim import trim_trace


def two_steps() -> TraceFile:
    trace = TraceFile(host_name="box", traceName="/home/someone/x.json", hf_speedkit={"step": 7, "real_tokens": 90})
    trace.step(1, 0, 100).op("aten::mm", 10, 50).launch(20, "gemm", 30, 10)
    trace.step(2, 100, 100).op("aten::add", 110, 50).op("aten::mul", 170, 5).launch(120, "add", 250, 10)
    trace.launch(180, "late", 270, 10).device("early", 5, 2, correlation=77)
    return trace


def test_only_the_chosen_step_and_what_it_launched_is_left(tmp_path):
    path = two_steps().write(tmp_path / "t.json")
    summary = summarize_trace(trim_trace(path, tmp_path / "cut.json.gz", 1))
    assert [step.label for step in summary.steps] == ["ProfilerStep#2"]
    assert {row.name for row in summary.kernels} == {"add", "late"}
    assert {row.name for row in summary.cpu_ops} == {"aten::add", "aten::mul"}
    assert summary.launches_before_window == 0
    assert summary.facts.real_tokens == 90
    assert summary.steps[0].duration_ns == 100_000


def test_a_share_keeps_the_first_part_of_a_step(tmp_path):
    path = two_steps().write(tmp_path / "t.json")
    summary = summarize_trace(trim_trace(path, tmp_path / "cut.json.gz", 1, share=0.5))
    assert {row.name for row in summary.kernels} == {"add"}
    assert [row.name for row in summary.cpu_ops] == ["aten::add"]
    assert summary.steps[0].duration_ns == 50_000


def test_no_host_name_and_no_home_directory_is_left(tmp_path):
    trace = two_steps().add("python_function", "/home/someone/project/train.py(3): main", 100, 90)
    trimmed = trim_trace(trace.write(tmp_path / "t.json"), tmp_path / "cut.json.gz", 1)
    text = gzip.decompress(trimmed.read_bytes()).decode()
    assert "someone" not in text
    assert "box" not in text
    assert "project/train.py(3): main" in text


def test_trimming_is_deterministic(tmp_path):
    path = small_trace().write(tmp_path / "t.json")
    one, two = (trim_trace(path, tmp_path / name).read_bytes() for name in ("a.gz", "b.gz"))
    assert one == two


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_share_out_of_range_is_refused(tmp_path, share):
    path = small_trace().write(tmp_path / "t.json")
    with pytest.raises(ValueError, match="share"):
        trim_trace(path, tmp_path / "o.gz", share=share)


def test_a_step_that_does_not_exist_is_refused(tmp_path):
    path = small_trace().write(tmp_path / "t.json")
    with pytest.raises(TraceError, match="no step 1"):
        trim_trace(path, tmp_path / "o.gz", 1)


def test_a_trimmed_step_has_the_same_verdict(tmp_path):
    from hf_speedkit.core.diagnosis import diagnose

    path = steady_trace(kernels=200, kernel_us=2, every_us=30).write(tmp_path / "t.json")
    rules = [finding.rule for finding in diagnose(summarize_trace(path))]
    trimmed = summarize_trace(trim_trace(path, tmp_path / "cut.json.gz", share=0.3))
    assert [finding.rule for finding in diagnose(trimmed)] == rules


@pytest.mark.skipif(not SHARED_TRACES.is_dir(), reason=f"{SHARED_TRACES} does not exist")
def test_a_real_step_keeps_its_numbers(tmp_path):
    path = SHARED_TRACES / "tracelens_mi300_resnet_ddp_ckpt.json.gz"
    whole = summarize_trace(path).steps[1]
    trimmed_path = trim_trace(path, tmp_path / "cut.json.gz", 1)
    (trimmed,) = summarize_trace(trimmed_path).steps
    for field in ("duration_ns", "cpu_ops", "launch_calls", "launches", "sync_wait_ns", "host_ns"):
        assert getattr(trimmed, field) == getattr(whole, field)
    assert trimmed.devices[0].busy_ns == whole.devices[0].busy_ns
    assert json.loads(gzip.decompress(trimmed_path.read_bytes()))["deviceProperties"] == [
        {"id": 2, "name": "AMD Instinct MI300X"}
    ]
