"""Recordings that are wrong by themselves: no conclusion is drawn from what the profiler lost or made up."""

import json

import pytest
from trace_files import TraceFile

from hf_speedkit.core.diagnosis import diagnose
from hf_speedkit.core.trace_compare import trace_metrics
from hf_speedkit.measure.trace import summarize_trace

LAUNCHES, EVERY_US = 20, 20


def recording(steps=4, call="cudaLaunchKernel"):
    """A host-bound job: a kernel of 6 us every 20 us, right behind its call."""
    trace = TraceFile()
    for step in range(steps):
        begin = step * LAUNCHES * EVERY_US
        trace.step(step + 1, begin, LAUNCHES * EVERY_US)
        for at in range(begin, begin + LAUNCHES * EVERY_US, EVERY_US):
            trace.launch(at + 4, "elementwise_kernel", at + 9, 6, call=call)
    return trace


def without(trace, drops):
    trace.events = [event for number, event in enumerate(trace.events) if not drops(number, event)]
    return trace


def changed(trace, kind, change):
    for event in trace.events:
        if event["cat"] == kind or kind is None:
            change(event)
    return trace


def is_kernel(event):
    return event["cat"] == "kernel"


def text_args(event):
    event["args"] = {key: str(value) for key, value in event["args"].items()}


def read(tmp_path, trace):
    summary = summarize_trace(trace.write(tmp_path / "t.json"))
    return summary, [finding.rule for finding in diagnose(summary)]


@pytest.mark.parametrize(
    "trace",
    [recording(), changed(recording(), None, text_args), without(recording(20), lambda n, e: is_kernel(e) and n < 60)],
    ids=["whole", "arguments_as_text", "a_few_lost"],
)
def test_v75_a_sound_recording_of_such_a_job_is_host_bound(tmp_path, trace):
    summary, rules = read(tmp_path, trace)
    assert summary.idle_unknown is None
    assert "host_bound" in rules


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (
            without(recording(), lambda n, e: is_kernel(e) and e["ts"] < 3 * LAUNCHES * EVERY_US),
            "60 of 80 launch calls",
        ),
        (without(recording(), lambda n, e: is_kernel(e) and n % 3 == 0), "the profiler lost them"),
        (changed(recording(), None, lambda event: event.pop("args")), "the correlation is missing"),
        (without(recording(), lambda n, e: e["cat"] == "cuda_runtime"), "the correlation is missing"),
    ],
    ids=["steps_without_events", "every_other_event", "no_arguments", "no_calls"],
)
def test_v75_idle_time_of_which_nothing_is_known_is_never_host_bound(tmp_path, trace, says):
    summary, rules = read(tmp_path, trace)
    assert says in summary.idle_unknown
    assert [rule for rule in rules if rule != "partial"] == ["unknown"]
    assert not summary.devices[0].idle_ns.get("queued work") or summary.launch_delay_ns is not None
    metrics = trace_metrics(summary)
    assert (metrics["device_idle"], metrics["device_busy_ms"], metrics["launches"]) == (None, None, None)
    assert summary.launch_delay_ns is not None or sum(step.launches for step in summary.steps) == summary.launches


def test_v77_files_of_two_ranks_in_one_are_told_and_judge_nothing(tmp_path):
    trace, other = recording(), recording()
    trace.events += changed(other, "cuda_runtime", lambda event: event.update(pid=20)).events
    for event in other.events:
        if event["cat"] == "user_annotation":
            event["pid"] = 20
    summary, rules = read(tmp_path, trace)
    assert "2 processes marked steps" in summary.idle_unknown
    assert rules == ["unknown"]


@pytest.mark.parametrize(("call", "busy_us", "cut"), [("hipLaunchKernel", 480, 1), ("cudaLaunchKernel", 1200, 0)])
def test_v75_a_kernel_with_the_end_of_a_much_later_one_is_cut_in_a_rocm_file(tmp_path, call, busy_us, cut):
    """TraceLens issue 669: one kernel of 6 us recorded with 1 ms hides that the device was idle."""
    trace = recording(call=call)
    next(event for event in trace.events if is_kernel(event))["dur"] = 1000
    summary, rules = read(tmp_path, trace)
    assert [note.startswith("1 device events ran on") for note in summary.notes] == [True] * cut
    assert (round(summary.devices[0].busy_ns / 1000, -2) >= 1000) is (not cut)
    assert cut == 0 or abs(summary.devices[0].busy_ns / 1000 - busy_us) <= 20
    assert "host_bound" in rules


def test_v75_events_of_another_kind_are_named_and_not_taken_for_a_refusal(tmp_path):
    summary, _ = read(tmp_path, changed(recording(), "kernel", lambda event: event.update(cat="npu_kernel")))
    assert "Its categories npu_kernel are not ones this reader knows" in summary.device_unknown
    pairs = [{**event, "ph": ph} for event in recording().events for ph in "BE"]
    for event in pairs:
        del event["dur"]
    (tmp_path / "pairs.json").write_text(json.dumps({"traceEvents": pairs}))
    assert "has a duration (phase X)" in summarize_trace(tmp_path / "pairs.json").device_unknown
