"""Recording on this machine, and reading what plain torch.profiler writes without any of our code."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from torch.profiler import profile, schedule

from hf_speedkit.core.diagnosis import diagnose
from hf_speedkit.measure.trace import summarize_trace
from hf_speedkit.measure.trace_recorder import StepRecorder


def work(model, steps, after_step):
    for _ in range(steps):
        model(torch.randn(4, 8)).sum().backward()
        after_step()


def test_a_trace_of_plain_torch_profiler_is_read(tmp_path):
    path = tmp_path / "plain.json"
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    with profile(
        schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        with_stack=True,
    ) as profiler:
        work(model, 3, profiler.step)
    summary = summarize_trace(path)
    assert [step.label for step in summary.full_steps] == ["ProfilerStep#1", "ProfilerStep#2"]
    calls = {row.name: row.calls for row in summary.cpu_ops}
    assert calls["aten::linear"] == 4
    assert calls["aten::relu"] == 2
    assert summary.launches is None
    assert diagnose(summary)[0].rule == "unknown"
    modules = {row.name: row for row in summary.modules}
    assert modules["Sequential_0"].calls == 2
    assert modules["Linear_0"].forward_device_ns is None
    assert modules["Linear_0"].backward_host_ns > 0
    assert modules["Sequential_0"].backward_host_ns >= modules["Linear_0"].backward_host_ns


@pytest.mark.parametrize("steps", [1, 2])
def test_the_recorder_writes_the_steps_it_was_asked_for(tmp_path, steps):
    recorder = StepRecorder(steps=steps)
    recorder.facts = {"step": 20, "real_tokens": 100, "nothing": None}
    recorder.start()
    work(torch.nn.Linear(8, 1), steps + 1, recorder.mark)
    recorder.stop()
    recorder.save(tmp_path / "new folder" / "t.json.gz")
    summary = summarize_trace(tmp_path / "new folder" / "t.json.gz")
    assert len(summary.full_steps) == steps
    assert {row.name: row.calls for row in summary.cpu_ops}["aten::linear"] == steps
    assert (summary.facts.step, summary.facts.real_tokens) == (20, 100)
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["t.json.gz"]


def test_the_host_name_and_the_path_are_blanked_in_the_file(tmp_path):
    recorder = StepRecorder(steps=1)
    recorder.start()
    work(torch.nn.Linear(8, 1), 2, recorder.mark)
    recorder.stop()
    recorder.save(tmp_path / "t.json.gz")
    document = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert document.get("host_name", "") == ""  # torch 2.11 writes none
    assert document["traceName"] == ""


def test_a_long_file_is_compressed_whole_and_blanked_at_both_ends(tmp_path, monkeypatch):
    import hf_speedkit.measure.trace_recorder as module

    monkeypatch.setattr(module, "_EDGE_BYTES", 64)
    plain = tmp_path / "t.json"
    body = ", ".join(["{}"] * 500)
    plain.write_text(f'{{"host_name": "secret", "traceEvents": [{body}], "traceName": "/home/secret"}}')
    module._compress(plain, tmp_path / "t.json.gz")
    text = gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode()
    assert "secret" not in text
    assert len(json.loads(text)["traceEvents"]) == 500


def test_stopping_before_the_last_step_keeps_what_there_is(tmp_path):
    recorder = StepRecorder(steps=3)
    recorder.start()
    work(torch.nn.Linear(8, 1), 2, recorder.mark)
    assert recorder.recording
    assert recorder.recorded == 1
    recorder.facts = {"partial": "1 of 3 steps"}
    recorder.stop()
    recorder.stop()
    recorder.save(tmp_path / "t.json.gz")
    summary = summarize_trace(tmp_path / "t.json.gz")
    assert summary.partial == ("partial: 1 of 3 steps",)
    assert len(summary.full_steps) == 1


def test_a_second_profiler_is_refused_and_the_first_keeps_its_events():
    with profile() as first:
        torch.ones(2).add(1)
        with pytest.raises(RuntimeError, match="another profiler"):
            StepRecorder(steps=1).start()
    assert any(event.key == "aten::add" for event in first.key_averages())
