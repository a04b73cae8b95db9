"""`hf-speedkit trace`: output, exit codes, gates, hostile names; the command line as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from trace_files import DATA, TraceFile, small_trace, steady_trace
from typer.testing import CliRunner

from hf_speedkit.cli.main import app

HEALTHY = {"kernels": 40, "kernel_us": 500, "every_us": 9}
HOST_BOUND = {"kernels": 2000, "kernel_us": 2, "every_us": 30}


def run(*arguments):
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["trace", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def healthy(tmp_path):
    return steady_trace(**HEALTHY).write(tmp_path / "healthy.json.gz")


@pytest.fixture
def host_bound(tmp_path):
    return steady_trace(**HOST_BOUND).write(tmp_path / "host_bound.json.gz")


def test_a_healthy_trace_exits_0_with_both_tables_and_a_verdict(healthy):
    result = run(healthy)
    assert result.exit_code == 0
    for expected in ("Verdict: Device-bound, as it should be", "CPU operations, self time", "GPU kernels: 40 launches",
                     "aten::add", "Kernels by what they are", "element-wise"):  # fmt: skip
        assert expected in result.output


def test_a_problem_exits_1_and_says_what_to_do(host_bound):
    result = run(host_bound)
    assert result.exit_code == 1
    assert "Verdict: Host-bound" in result.output
    assert "-> start fewer, larger kernels" in result.output


@pytest.mark.parametrize(
    ("expressions", "code"),
    [
        (["launches>20000"], 0),
        (["launches>100"], 1),
        (["launches>20000", "device_idle>0.1"], 1),
        (["real_tokens_per_second<2500"], 1),
        (["launchez>1"], 2),
    ],
)
def test_with_gates_only_the_gates_decide(host_bound, expressions, code):
    result = run(host_bound, *(part for expression in expressions for part in ("--fail-if", expression)))
    assert result.exit_code == code
    assert ("FAILED" in result.output) is (code == 1)


def test_compare_shows_what_changed_and_gates_can_use_it(healthy, host_bound):
    result = run(host_bound, "--compare", healthy, "--fail-if", "launches_change>1")
    assert result.exit_code == 1
    assert "From healthy.json.gz to host_bound.json.gz" in result.output
    assert "FAILED  launches_change>1: launches_change is 49" in result.output


def test_json_holds_summary_findings_metrics_and_comparison(healthy, host_bound):
    result = run(host_bound, "--compare", healthy, "--json")
    document = json.loads(result.output)
    (trace,) = document["traces"]
    assert trace["verdict"].startswith("Host-bound")
    assert trace["metrics"]["launches"] == 2000
    assert trace["summary"]["kernels"][0]["calls"] == 2000
    assert trace["findings"][0]["rule"] == "host_bound"
    assert document["comparison"]["before"] == "healthy.json.gz"
    assert result.exit_code == 1


def test_unknown_device_numbers_are_null_and_never_zero(tmp_path):
    path = TraceFile().step(1, 0, 10).op("aten::mm", 1, 5).write(tmp_path / "cpu.json")
    document = json.loads(run(path, "--json").output)
    metrics = document["traces"][0]["metrics"]
    assert metrics["device_busy_ms"] is None
    assert metrics["launches"] is None
    result = run(path)
    assert result.exit_code == 0
    assert "GPU kernels: unknown" in result.output
    assert "Verdict: Unknown" in result.output


def test_several_files_are_ranks_of_one_job(tmp_path):
    paths = []
    for rank, kernel_us in ((0, 500), (1, 700)):
        trace = steady_trace(kernels=40, kernel_us=kernel_us, every_us=9)
        trace.top_level["distributedInfo"] = {"rank": rank, "world_size": 2}
        paths.append(trace.write(tmp_path / f"rank{rank}.json"))
    result = run(*paths)
    assert result.exit_code == 0
    assert "Most work of its own: rank 1 (rank1.json)" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["none.json"], 2, "no such file"),
        (["run"], 2, "run is a folder; traces in it: run/tb.pt.trace.json, run/traces/a.json.gz"),
        ([], 2, "Missing argument"),
        (["empty.json"], 1, "is empty"),
        (["text.json"], 1, "not a Chrome trace"),
        (["list.json"], 1, "none of its 3 entries is an event"),
        (["small.json", "small.json", "--compare", "small.json"], 2, "one FILE"),
        (["small.json", "--top", "0"], 2, "top"),
        (["small.json", "--max-gib", "0.001"], 0, "Verdict"),
    ],
)
def test_wrong_use_exits_2_and_a_damaged_file_1_with_an_instruction(tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").touch()
    (tmp_path / "run" / "traces").mkdir(parents=True)
    (tmp_path / "run" / "traces" / "a.json.gz").touch()
    (tmp_path / "run" / "tb.pt.trace.json").touch()
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "list.json").write_text("[1, 2, 3]")
    small_trace().write(tmp_path / "small.json")
    result = run(*arguments)
    assert result.exit_code == code
    assert words in result.output


def test_a_file_beyond_the_limit_says_how_to_go_on(tmp_path):
    path = steady_trace(kernels=8000, kernel_us=2, every_us=3).write(tmp_path / "big.json")
    result = run(path, "--max-gib", "0.001")
    assert result.exit_code == 1
    assert "--max-gib" in result.output


def test_names_of_a_hostile_file_reach_the_terminal_as_text_only(tmp_path):
    name = "\x1b[2J\x1b]0;owned\x07[red]<script>alert(1)</script>[/red]\u202e\r\n"
    trace = small_trace().op(name, 900, 90).launch(905, name, 910, 80)
    trace.top_level["deviceProperties"] = [{"id": 0, "name": "\x1b[31mGPU"}]
    result = run(trace.write(tmp_path / "t.json"))
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output
    assert "[red]<script>alert(1)</script>[/red]" in result.output


def test_at_80_columns_a_kernel_is_a_line_and_its_name_says_which():
    before, after = DATA / "trace_h200_fallback.json.gz", DATA / "trace_h200_speedkit.json.gz"
    result = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(
        app, ["trace", str(before), "--compare", str(after)]
    )
    for title in ("GPU kernels: ", "CPU operations, self time (", "Kernels that appeared", "CPU operations, per step"):
        head, *rows = result.output.partition(title)[2].partition("\n\n")[0].splitlines()[1:]
        assert len(rows) == 10, title
        assert max(map(len, [head, *rows])) <= 80
    assert "void " not in result.output
    assert "elementwise_kernel" in result.output
    assert (
        result.output.partition("Host syncs inside")[2].count("\ncudaStreamSynchronize ") >= 2
    )  # long causes are folded


def test_the_hand_written_traces_can_be_shown():
    for path in sorted(DATA.glob("trace_*.json")):
        assert run(path).exit_code in (0, 1)


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env={**os.environ})


def test_help_imports_nothing_heavy_and_is_quick():
    code = (
        "import sys; from hf_speedkit.cli.main import app; "
        "print([name for name in ('torch', 'transformers', 'numpy', 'msgspec') if name in sys.modules])"
    )
    assert python("-c", code).stdout.strip() == "[]"
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        assert python("-c", "from hf_speedkit.cli.main import main; main()", "--help").returncode == 0
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.6 * 4  # 0.4 s alone; the factor is for a machine shared with other tests


def test_reading_a_trace_needs_no_torch(healthy):
    code = f"import sys; from hf_speedkit.measure.trace import summarize_trace; summarize_trace({str(healthy)!r}); "
    assert python("-c", code + "print('torch' in sys.modules)").stdout.strip() == "False"
