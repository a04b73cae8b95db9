"""`hf-speedkit report` on results of benches."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from bench_results import bench
from typer.testing import CliRunner

from hf_speedkit.cli.main import app
from hf_speedkit.cli.report_bench import BEGIN, BEGIN_WIDE, END, bars
from hf_speedkit.core.bench_records import as_text


@pytest.fixture
def folder(tmp_path):
    for name, speed, repetition in (("trl", 100.0, 1), ("trl", 120.0, 2), ("speedkit", 220.0, 1)):
        result = bench(name=name, speed=speed, repetition=repetition, mfu=speed / 10)
        (tmp_path / f"{name}_{repetition}.json").write_text(as_text(result))
    return tmp_path


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_table_with_median_spread_and_gain(folder):
    done = report(folder)
    assert done.exit_code == 0, done.output
    assert "| trl | 2 | **110** (100 - 120) | 1.00 | 11.0 |" in done.output
    assert "| speedkit | 1 | **220** | 2.00 | 22.0 |" in done.output
    assert (
        "1 x NVIDIA H200, driver 580.1, torch 2.11.0, transformers 5.23.0, trl 1.16.0. Commit aaaaaaaaaa."
        in done.output
    )


def test_several_workloads_make_one_table_and_one_of_items(tmp_path):
    """The six workloads of the benchmarks and the whole 27B on two GPUs, as a document shows them."""
    document = tmp_path / "page.md"
    document.write_text(f"{BEGIN}\n{END}\n")
    speeds = {"27b-8-32k": 160, "27b-8-ga4": 220, "27b-8-lora": 240, "27b-8": 200, "9b-8": 410, "dense-8b-8": 380}
    results = [
        bench(name=name, workload=workload, speed=speed / times, mfu=50.0)
        for workload, speed in speeds.items()
        for name, times in (("trl", 2.0), ("speedkit", 1.0))
    ]
    results += [bench(name="seed", workload="27b-8", speed=20.0)]
    results += [bench(name="speedkit minus loss head", workload="27b-8", speed=150.0)]
    results += [replace(bench(name="speedkit", workload="27b-64", speed=51.0, mfu=40.0), world_size=2)]
    for number, result in enumerate(results):
        (tmp_path / f"{number:02}.json").write_text(as_text(result))
    assert report(tmp_path, "--out", document).exit_code == 0
    ladder, several, foot = document.read_text().removeprefix(f"{BEGIN}\n\n").split("\n\n")[:3]
    assert [line.split(" | ")[0] for line in ladder.splitlines()] == [
        "| `27b-8`", "| ---", "| seed", "| trl", "| speedkit",
    ]  # fmt: skip
    assert "Commit" not in foot
    lines = several.splitlines()
    assert lines[0].startswith("| real tokens/s per GPU | runs | trl | speedkit | times trl | MFU % |")
    assert [line.split("`")[1] for line in lines[2:]] == [
        "27b-8", "27b-8-32k", "27b-8-ga4", "27b-8-lora", "9b-8", "dense-8b-8", "27b-64 on 2 GPUs",
    ]  # fmt: skip
    assert lines[2].startswith("| `27b-8` | 1 | 100 | **200** | 2.00 | 50.0 |")
    assert lines[-1].startswith("| `27b-64 on 2 GPUs` | 1 |  | **26** |  | 40.0 |")
    drawing = ElementTree.fromstring(bars(results))
    words = [one.text for one in drawing.findall(".//{*}text")]
    assert "27b-64 on 2 GPUs" in words
    assert "bars: real tokens per second and GPU, median of the runs" in words
    assert "speedkit minus loss head" not in words
    everything = report(tmp_path).output
    assert "| `27b-64 on 2 GPUs` | runs | real tokens/s per GPU |" in everything
    assert "| loss head | 1 | **150** | 25.0 | no |" in everything
    assert "share of the time per token without it" in everything
    document.write_text(f"{BEGIN_WIDE}\n{END}\n")
    assert report(*tmp_path.glob("*.json"), "--out", document).exit_code == 0
    assert "| loss head | 1 | **150** | 25.0 | no |" in document.read_text()


def test_columns_that_nothing_was_measured_for_are_left_out(folder):
    assert "launches" not in report(folder).output


def test_a_traced_step_shows_where_the_devices_time_goes(tmp_path):
    for name, groups in (("trl", {"GEMM": 0.4, "copy": 0.1}), ("speedkit", {"GEMM": 0.3})):
        result = replace(bench(name=name), device_groups_s=groups)
        (tmp_path / f"{name}.json").write_text(as_text(result))
    shown = report(tmp_path).output
    assert "| `w`: device ms of the traced step | speedkit | trl |" in shown
    assert "| GEMM | 300.0 | 400.0 |" in shown
    assert "| copy |  | 100.0 |" in shown


def test_the_document_keeps_what_is_around_its_table(folder):
    document = folder / "page.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert report(folder, "--out", document).exit_code == 0
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "**220**" in text
    assert "old" not in text


def test_a_document_without_a_place_for_the_table_stays_as_it_is(folder):
    document = folder / "page.md"
    document.write_text("nothing here\n")
    done = report(folder, "--out", document)
    assert done.exit_code == 1
    assert BEGIN in done.output
    assert document.read_text() == "nothing here\n"


def test_the_picture_has_a_bar_for_each_row_as_long_as_its_speed(folder):
    assert report(folder, "--out", folder / "bars.svg").exit_code == 0
    drawing = ElementTree.parse(folder / "bars.svg").getroot()
    slow, fast = [float(one.get("width")) for one in drawing.findall(".//{*}rect") if one.get("height") == "20"]
    assert fast / slow == pytest.approx(2.0, rel=0.01)  # coordinates are rounded to 0.1 px
    assert any(one.text == "220" for one in drawing.findall(".//{*}text"))


def test_a_ring_shows_utilization_over_the_width_of_the_picture():
    def measured(name, percent):
        return replace(bench(name=name), log=({"loss": 2.0, "speed/gpu_utilization": percent},))

    drawing = ElementTree.fromstring(bars([measured("a", 50.0), measured("b", 100.0)]))
    half, full = [float(one.get("cx")) for one in drawing.findall(".//{*}circle")]
    begin = min(float(one.get("x")) for one in drawing.findall(".//{*}rect") if one.get("height") == "20")
    assert half - begin == pytest.approx((full - begin) / 2, abs=0.2)
    assert not ElementTree.fromstring(bars([bench()])).findall(".//{*}circle")


def test_a_name_cannot_write_markup_into_the_picture():
    ElementTree.fromstring(bars([bench(name='<script>"&')]))


def test_a_result_without_provenance_is_named(tmp_path):
    values = json.loads(as_text(bench()))
    values["environment"]["commit"] = None
    (tmp_path / "a.json").write_text(json.dumps(values))
    done = report(tmp_path)
    assert done.exit_code == 0
    assert "w, a, run 1: no commit" in done.output


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "bench", "format": 1}'])
def test_a_damaged_file_is_refused_or_left_to_the_step_logs(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert report(path).exit_code == 1


def test_results_and_runs_are_not_mixed(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    done = report(folder, run)
    assert done.exit_code == 1
    assert "report them apart" in done.output


def test_the_page_of_a_run_is_no_form_for_results(folder):
    assert report(folder, "--out", folder / "page.html").exit_code == 2


def test_json_holds_the_rows(folder):
    (slow, fast) = json.loads(report(folder, "--json").output)
    assert {slow["name"], fast["name"]} == {"trl", "speedkit"}
