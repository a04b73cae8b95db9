"""Broken and hostile trace files: a clear error or a marked partial result, in bounded time, and nothing else."""

from __future__ import annotations

import gzip
import json
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_files import TraceFile, small_trace, steady_trace

import hf_speedkit.measure.trace_bytes as trace_bytes
import hf_speedkit.measure.trace_reader as trace_reader
from hf_speedkit.core.diagnosis import diagnose
from hf_speedkit.core.errors import TraceError
from hf_speedkit.core.records import to_json
from hf_speedkit.measure.trace import summarize_trace

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_bytes(folder, data: bytes):
    """Read bytes as a trace; a TraceError is a fine answer. What comes out must also be judged and printed."""
    path = folder / "hostile.json"
    path.write_bytes(data)
    try:
        summary = summarize_trace(path)
    except TraceError:
        return None
    diagnose(summary)
    to_json(summary).encode()
    return summary


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 64 bytes: every cut that can happen, happens."""
    monkeypatch.setattr(trace_bytes, "PIECE_BYTES", 64)


@pytest.fixture(params=["msgspec", "json"])
def decoder(request, monkeypatch):
    """The fast decoder, and the standard library alone."""
    if request.param == "json":
        monkeypatch.setattr(trace_reader, "fast_decoder", lambda: None)
    else:
        pytest.importorskip("msgspec")
    return request.param


def test_pieces_of_any_size_give_the_same_summary(tmp_path, monkeypatch, decoder):
    path = steady_trace(kernels=40, kernel_us=3, every_us=9).write(tmp_path / "t.json.gz")
    expected = summarize_trace(path)
    for size in (16, 100, 1000, 1 << 20):
        monkeypatch.setattr(trace_bytes, "PIECE_BYTES", size)
        assert summarize_trace(path) == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty", b""),
        ("text", b"hello"),
        ("number", b"12"),
        ("no events", b'{"a": 1}'),
        ("events that are no list", b'{"traceEvents": {}}'),
        ("empty gzip", gzip.compress(b"", mtime=0)),
        ("only a gzip header", gzip.compress(b"{}", mtime=0)[:8]),
        ("binary", bytes(range(256)) * 4),
    ],
)
def test_what_is_no_trace_is_refused_with_an_instruction(tmp_path, name, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        summarize_trace(path)
    assert caught.value.mend


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot open"):
        summarize_trace(tmp_path / "none.json")


@pytest.mark.parametrize("events", ["null", "1, 2, 3", "[]", '"text"'])
def test_an_array_that_holds_other_things_than_events_is_no_trace(tmp_path, events):
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{events}]}}')
    with pytest.raises(TraceError, match="no trace"):
        summarize_trace(path)


@pytest.mark.parametrize("events", ["", "{}"])
def test_an_array_without_events_is_an_empty_unknown_trace(tmp_path, events):
    summary = read_bytes(tmp_path, f'{{"traceEvents": [{events}]}}'.encode())
    assert summary is not None
    assert summary.launches is None
    assert diagnose(summary)[0].rule == "unknown"


def test_a_gzip_cut_short_gives_every_event_before_the_cut_and_says_so(tmp_path):
    """A killed job leaves a short .gz: torch compresses after writing."""
    trace = steady_trace(kernels=3000, kernel_us=3, every_us=9)
    random.Random(0).shuffle(trace.events)
    data = gzip.compress(trace.text().encode())
    whole = summarize_trace(trace.write(tmp_path / "whole.json.gz")).events
    for share in (0.2, 0.5, 0.9, 0.999):
        path = tmp_path / "cut.json.gz"
        path.write_bytes(data[: int(len(data) * share)])
        summary = summarize_trace(path)
        assert "ends early" in summary.partial[0]
        # deflate holds back less than one block; nothing else is lost
        assert summary.events > share * whole - 600


def test_a_plain_file_cut_anywhere_is_partial_or_refused(tmp_path, small_pieces):
    data = small_trace().text().encode()
    for length in range(1, len(data), 7):
        summary = read_bytes(tmp_path, data[:length])
        assert summary is None or summary.partial or length > data.rindex(b"]")


def test_two_gzip_members_are_read_as_one_file(tmp_path):
    data = small_trace().text().encode()
    summary = read_bytes(tmp_path, gzip.compress(data[:500]) + gzip.compress(data[500:]))
    assert summary.launches == 2
    assert summary.partial == ()


def test_bytes_behind_a_gzip_member_are_named(tmp_path):
    summary = read_bytes(tmp_path, gzip.compress(small_trace().text().encode()) + b"junk")
    assert "not gzip" in summary.partial[0]


def test_a_bomb_is_stopped_at_the_limit_with_the_way_to_go_on(tmp_path):
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (64 << 20)))
    with pytest.raises(TraceError, match=r"more than 0\.0312 GiB") as caught:
        summarize_trace(path, limit_bytes=32 << 20)
    assert "--max-gib" in (caught.value.regardless or "")


@pytest.mark.parametrize(
    "broken",
    [
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":NaN,"dur":1}',
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":NaN}',
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":Infinity}',
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1e400,"dur":1}',
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1e30,"dur":1}',
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":-5}',
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":"soon","dur":1}',
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":null,"dur":1}',
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":[1],"dur":1}',
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":' + "9" * 5000 + ',"dur":1}',
        '{"ph":"X","cat":"kernel","name":"un"escaped","ts":1,"dur":1}',
        '{"ph":"X","cat":"kernel","name":"C:\\Users\\x","ts":1,"dur":1}',
        '{"ph":"X","cat":"kernel","args":' + "[" * 100_000 + "]" * 100_000 + "}",
        "nonsense",
        "[1, 2]",
    ],
)
def test_one_broken_event_costs_itself_and_is_counted(tmp_path, decoder, broken):
    good = small_trace().events
    lines = [json.dumps(event) for event in good]
    lines.insert(3, broken)
    summary = read_bytes(tmp_path, ('{"traceEvents": [' + ",\n".join(lines) + "]}").encode())
    assert summary.launches == 2
    assert summary.devices[0].busy_ns == 310_000
    assert summary.dropped_events >= 1
    assert summary.partial


@pytest.mark.parametrize(
    "odd",
    [
        '{"ph":"Q","name":"unknown phase"}',
        '{"ph":7}',
        '{"ph":"X","dur":null}',
        '{"ph":"X","cat":"cpu_op","ts":1,"dur":1}',
        '{"ph":"X","cat":["kernel"],"name":{"a":1},"ts":1,"dur":1}',
        '{"ph":"X","cat":"cpu_op","name":["a"],"pid":{"a":1},"tid":[2],"ts":1,"dur":1}',
        '{"ph":"X","cat":"cpu_op","name":"raw\nnewline","ts":1,"dur":1}',
        '{"ph":"X","cat":"cpu_op","name":"},{","ts":1,"dur":1}',
        '{"ph":"X","cat":"cpu_op","name":"x","ts":1,"dur":1,"args":{"list":[{"a":1},{"b":2}, {"c":3}]}}',
        '{"ph":"X","cat":"cpu_op","name":"\\ud800","ts":"1.5","dur":"2"}',
        '{"ph":"X","cat":"cpu_op","name":5,"pid":null,"tid":true,"ts":1,"dur":1,"args":[1]}',
        '{"ph":"C","name":"memory","args":{"bytes":1e400}}',
    ],
)
def test_odd_events_change_nothing_else(tmp_path, decoder, small_pieces, odd):
    lines = [json.dumps(event) for event in small_trace().events]
    lines.insert(3, odd)
    summary = read_bytes(tmp_path, ('{"traceEvents": [' + ",\n".join(lines) + "]}").encode())
    assert (summary.launches, summary.devices[0].busy_ns) == (2, 310_000)
    assert summary.dropped_events == 0
    assert summary.partial == ()


def test_bad_utf8_is_replaced(tmp_path, decoder):
    data = small_trace().text().encode().replace(b"aten::linear", b"aten::\xff\xfe")
    summary = read_bytes(tmp_path, data)
    assert "aten::��" in {row.name for row in summary.cpu_ops}


def test_metadata_that_is_no_json_does_not_cost_the_events(tmp_path):
    """Windows paths with bare backslashes (pytorch#98432)."""
    data = b'{"traceName": "C:\\Users\\x", ' + small_trace().text().encode()[1:]
    assert read_bytes(tmp_path, data).launches == 2


def test_negative_times_and_a_negative_queue_delay_are_taken_as_they_are(tmp_path):
    trace = TraceFile().step(1, -100, 200).op("aten::mm", -90, 50)
    trace.launch(-50, "gemm", -73, 10)  # clocks of host and device differ
    summary = summarize_trace(trace.write(tmp_path / "t.json"))
    assert summary.launch_delay_ns == 0
    assert summary.devices[0].busy_ns == 10_000
    assert summary.steps[0].launches == 1


def test_operators_that_overlap_without_nesting_are_counted_and_noted(tmp_path):
    trace = TraceFile().op("a", 0, 100).op("b", 50, 100)
    summary = summarize_trace(trace.write(tmp_path / "t.json"))
    assert summary.overlapping_ops == 1
    assert "overlap" in " ".join(summary.notes)
    assert sum(row.self_ns for row in summary.cpu_ops) == 150_000  # the shared 50 us count once


@given(data=st.data())
@MANY
def test_flipped_bytes_never_crash(tmp_path, data):
    original = bytearray(small_trace().text().encode())
    for _ in range(data.draw(st.integers(1, 8))):
        original[data.draw(st.integers(0, len(original) - 1))] = data.draw(st.integers(0, 255))
    read_bytes(tmp_path, bytes(original))


@given(data=st.data())
@MANY
def test_flipped_bytes_of_compressed_data_never_crash(tmp_path, data):
    original = bytearray(gzip.compress(small_trace().text().encode()))
    for _ in range(data.draw(st.integers(1, 4))):
        original[data.draw(st.integers(0, len(original) - 1))] = data.draw(st.integers(0, 255))
    read_bytes(tmp_path, bytes(original))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=6),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
EVENTS = st.fixed_dictionaries(
    {
        "ph": st.one_of(st.just("X"), SCALARS),
        "cat": st.one_of(
            st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "user_annotation", "python_function", "gpu_memcpy"]),
            SCALARS,
        ),
        "name": st.one_of(
            st.sampled_from(["ProfilerStep#1", "cudaLaunchKernel", "nn.Module: A_0", "aten::item"]), SCALARS
        ),
        "pid": st.one_of(st.integers(0, 2), SCALARS),
        "tid": st.one_of(st.integers(0, 2), SCALARS),
        "ts": st.one_of(st.integers(-50, 50), SCALARS),
        "dur": st.one_of(st.integers(0, 50), SCALARS),
        "args": st.one_of(
            st.fixed_dictionaries(
                {"correlation": st.one_of(st.integers(0, 3), SCALARS), "device": SCALARS, "Sequence number": SCALARS}
            ),
            SCALARS,
        ),
    }
)


@given(events=st.lists(EVENTS, max_size=12))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_events_of_any_shape_never_crash(tmp_path, events):
    summary = read_bytes(tmp_path, json.dumps({"traceEvents": events}).encode())
    assert summary is not None
    assert summary.events == len(events)


@given(events=st.lists(EVENTS, max_size=8))
@MANY
def test_both_decoders_agree(tmp_path, events):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([*events, {"ph": "M"}]))
    fast = summarize_trace(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_reader, "fast_decoder", lambda: None)
        assert summarize_trace(path) == fast


CPU_SECONDS = 12  # at most 2 s where it was written; errors that each cost the whole piece took 40 s


@pytest.mark.parametrize(
    "unit",
    [
        '{"a":[{},',
        '{"a":[{},{"a":"',
        '{"a":"},{',
        '{"a":1e99999},',
        "{},",
        '{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":9,"pid":1,"tid":1},',
        "[" * 50,
        "}" + " " * 50 + "," + " " * 50,
        '"traceEvents"',
    ],
)
def test_hostile_text_takes_time_linear_in_its_length(tmp_path, decoder, unit):
    began = time.process_time()
    read_bytes(tmp_path, b'{"traceEvents": [' + unit.encode() * (2_000_000 // len(unit)))
    assert time.process_time() - began < CPU_SECONDS


def test_a_tower_of_operators_takes_time_linear_in_its_height(tmp_path):
    height = 60_000
    trace = TraceFile()
    for level in range(height):
        trace.op("aten::add", level, 2 * (height - level))
        trace.call("cudaStreamSynchronize", 2 * height + 2 * level, 1)
    began = time.process_time()
    summary = summarize_trace(trace.write(tmp_path / "tower.json"))
    assert summary.cpu_op_calls == height
    assert time.process_time() - began < CPU_SECONDS


def test_tens_of_thousands_of_threads_devices_and_names_take_bounded_time(tmp_path):
    trace = TraceFile()
    for number in range(30_000):
        trace.op(f"op{number}", number, 2, (number, number))
        trace.device(f"k{number}", number, 2, device=number, correlation=number)
        trace.add("user_annotation", f"ProfilerStep#{number}", number, 1, (number, 1))
    began = time.process_time()
    summary = summarize_trace(trace.write(tmp_path / "wide.json"))
    assert time.process_time() - began < CPU_SECONDS
    assert len(summary.devices) == 64
    assert len(summary.cpu_ops) == 20_001
    assert sum(row.calls for row in summary.cpu_ops) == 30_000
    assert len(summary.steps) == 10_000
