"""Every number of the README's table and picture comes from a committed file, and every such file can be trusted."""

import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from hf_speedkit.cli.main import app
from hf_speedkit.cli.report_bench import bars, bench_files, into, read
from hf_speedkit.core.bench_records import bench_result, is_bench, missing_provenance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / re.search(r"^RESULTS = (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
FILES = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))


def committed():
    return read(bench_files([RESULTS]))


@pytest.mark.parametrize("page", ["README.md", "docs/speed.md"])
def test_a_page_holds_the_table_of_the_committed_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert into(text, committed()) == text, "run: make bench-table"


def test_the_picture_is_that_of_the_committed_files():
    assert (ROOT / "docs" / "ladder.svg").read_text(encoding="utf-8") == bars(committed()), "run: make bench-table"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "benchmarks" / "results")))
def test_a_committed_result_says_where_it_comes_from(path):
    values = json.loads(path.read_text(encoding="utf-8"))
    if is_bench(values):
        assert missing_provenance(bench_result(values, name=path.name)) == ()
    else:  # a study of its own form
        assert "environment" in values
        assert values["what"]


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def stated():
    """By page, its sentences with figures, made from the files that the page names."""
    rate = "speed/real_tokens_per_second"
    floors = re.search(r"benchmarks/results/(\S+_floors\.json)", (ROOT / "docs/speed.md").read_text(encoding="utf-8"))
    left = {row["group"]: row["left_percent"] for row in result(floors.group(1))["rows"]}
    cost = result("2026-11-29_h200_callback_overhead.json")["rates"]
    learned, small = (result(f"2026-11-30_h200_accuracy_{task}.json")["verdict"] for task in ("27b-8", "tiny"))
    first = result("2026-11-29_2xh200_27b_fsdp2_first_run.json")
    steady = {}
    for found in committed():
        if found.repetition:
            steady.setdefault(found.workload, set()).add(found.steady_steps)
    parts = [
        result(f"{part}.json")["rates"][rate]
        for part in ("first_look/2026-11-29_h200_27b_cut_8_layers_checkpointing",
                     "first_look/2026-11-29_h200_27b_cut_8_layers_rung_speedkit",
                     "steps/2026-11-29_h200_27b-8_fused_adamw_full_checkpointing",
                     "steps/2026-11-29_h200_27b-8_full_checkpointing", "steps/2026-11-29_h200_27b-8_speedkit")
    ]  # fmt: skip
    whole = [
        median_step_rate(result(f"steps/{run}.json"))
        for run in ("2026-11-29_2xh200_27b-64_speedkit", "2026-11-30_2xh200_27b-64_speedkit",
                    "2026-11-30_2xh200_27b-64_zero_copy")
    ]  # fmt: skip
    earlier = "steps/2026-11-30_h200_27b-8_"
    cold, warm = (
        result(f"{run}.json")["startup_s"] for run in (f"{earlier}speedkit_rep1", "ladder/27b-8_speedkit_rep2")
    )
    ladder = "ladder/27b-8_speedkit"
    qla, ours = (result(f"{ladder}{name}.json") for name in ("-flashqla_rep1", "_rep4"))  # both on one GPU
    rates = {}
    for found in committed():
        rates.setdefault((found.workload, found.name), []).append(found.rates[rate])
    seed, trl, speedkit = (median(rates["27b-8", name]) for name in ("seed", "trl", "speedkit"))
    by_trls = rates["27b-8", "trl"]
    with_it, without, by_trl = (
        f"{median(rates['27b-8-lora', name]):,.0f}" for name in ("speedkit", "speedkit minus fused LoRA", "trl")
    )
    cut = result("2026-11-30_h200_27b-8_floors.json")
    host, packing = result("host_costs.json"), result("2026-11-29_packing_table.json")
    checksums, shell, scale = host["checksums_mb_per_cpu_second"], host["shell"], packing["scale"]
    return {
        "README.md": [
            f"{left['communication']:.1f} % of it was communication that nothing hid",
            f"the device was idle for {left['idle']:.1f} %",
            f"Measuring costs {cost['overhead_percent']:.2f} % of a step, "
            f"{cost['overhead_with_counting_percent']:.2f} % with one step in a hundred counted",
            f"({first['peak_memory_gib']:.0f} GiB a GPU at the least",
            f"are {learned['gap']:.3f} apart, those of two seeds {learned['noise']:.2f}",
            f"200 steps of a tiny model {small['gap']:.4f} and {small['noise']:.3f}",
            f"{speedkit / trl:.2f} times as fast as `trl` over all steady steps",
            f"its two runs are {100 * (max(by_trls) / min(by_trls) - 1):.1f} % apart",
            f"{speedkit / seed:.2f} times as fast as `seed`",
            *(f"{min(steady[name])} to {max(steady[name])} of `{name}`" for name in ("27b-8", "27b-64")),
        ],
        "docs/fsdp2.md": [
            f"{first['peak_memory_gib']:.1f} GiB peak ({first['peak_reserved_gib']:.1f} GiB reserved), "
            f"{first['rates']['speed/step_time_s']:.2f} s a step"
        ],
        "docs/speed.md": [
            *(f"| {before:,.0f} | {after:,.0f} |" for row in (parts, whole) for before, after in pairwise(row)),
            f"{sum(cold.values()):.0f} s with empty Triton and TileLang caches, and {sum(warm.values()):.1f} s with "
            f"filled ones, {warm['layers']:.0f} of them",
            f"{qla['device_groups_s']['linear attention'] * 1e3:.1f} ms a step instead of "
            f"{ours['device_groups_s']['linear attention'] * 1e3:.1f}",
            f"{median_step_rate(qla):,.0f} real tokens/s in the median step instead of {median_step_rate(ours):,.0f}",
            f"{with_it} real tokens/s, {without} with peft's own forward (`fused_lora: false`), {by_trl} by TRL",
            shares(ladder, (4,), "Fused layers", "packed attention", "loss head").replace(",", " %,", 1),
            shares(ladder, (5,), "fused optimizer", "`qk_rotary`", "unfiltered loss", "split convolution"),
            shares(ladder, (1, 2, 3), "fused norms alone", "non-blocking copies", "fused SwiGLU"),
            f"{cut['step_ms']:.1f} ms, of which they explain {sum(row['floor_ms'] for row in cut['rows']):.1f}",
        ],
        "docs/checkpoints.md": [
            f"{checksums['zlib.crc32']:,.0f} MB a CPU second on one core of the development machine (zlib.crc32; "
            f"sha256 {checksums['sha256']:,.0f}, blake2b {checksums['blake2b']:.0f}"
        ],
        "docs/launching.md": [f"{shell['memory_mb']:.0f} MB and {shell['cpu_seconds']:.1f} s on a CPU core"],
        "docs/packing.md": [
            *(f"{row['batches']:,}" for row in packing["batchings"] if "1,000" not in row["batching"]),
            f"planned in {scale['planning_cpu_s']:.0f} CPU s and dealt in {scale['dealing_cpu_s']:.1f} CPU s",
        ],
    }


def shares(whole, beside, *items):
    """By how many per cent the median step is longer without each item than in the runs on the same GPU, in words."""
    rate = median(median_step_rate(result(f"{whole}_rep{number}.json")) for number in beside)
    said = []
    for item in items:
        name = item.strip("`").removesuffix(" alone").lower().translate(str.maketrans(" _", "--"))
        said.append(f"{item} {100 * (rate / median_step_rate(result(f'{whole}-minus-{name}_rep1.json')) - 1):.1f}")
    return ", ".join(said)


def median_step_rate(run):
    """Real tokens per second and GPU of the median steady step."""
    return median(s["tokens"]["real"] / s["step_time_s"] for s in run["steps"] if not s.get("excluded"))


def test_sentences_with_figures_say_what_their_files_hold():
    for page, sentences in stated().items():
        text = re.sub(r"[\s*]+", " ", (ROOT / page).read_text(encoding="utf-8"))
        assert [sentence for sentence in sentences if sentence not in text] == [], f"{page}: its files say this now"


def test_the_traces_shown_are_what_the_command_prints():
    page = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```text\n(trace_h200_\w+\.json\.gz.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    for block in shown:
        file = ROOT / "tests" / "data" / block.split()[0]
        printed = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["trace", str(file)]).output
        lines = {" ".join(line.split()) for line in printed.splitlines()}
        for line in (" ".join(line.split()) for line in block.splitlines()):
            start = line.removesuffix("...").rstrip()
            assert any(other.startswith(start) for other in lines) if line.endswith("...") else line in lines, line


def test_make_bench_table_writes_what_the_tests_look_at(tmp_path):
    document = tmp_path / "README.md"
    document.write_text((ROOT / "README.md").read_text(encoding="utf-8").replace("real tokens/s |", "other |"))
    done = CliRunner().invoke(app, ["report", str(RESULTS), "--out", str(document)])
    assert done.exit_code == 0, done.output
    assert document.read_text(encoding="utf-8") == (ROOT / "README.md").read_text(encoding="utf-8")
