"""`hf-speedkit bench`, with a launcher that writes results instead of training."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_speedkit.cli.main import app

LAUNCHER = f"""
import json, sys
task = json.loads(sys.argv[3])
if task["rehearse"]:
    if "sped" in task["settings"]:
        raise SystemExit("there is no setting sped")
    open(task["result"], "w").write("{{}}")
    raise SystemExit
sys.path[:0] = [{str(Path(__file__).parents[1])!r}, {str(Path(__file__).parents[2])!r}]
from bench_results import bench
from hf_speedkit.core.bench_records import as_text
dash_m, module, task, script, *options = sys.argv[1:]
assert (dash_m, module) == ("-m", "hf_speedkit.trainer.bench_child")
task = json.loads(task)
with open(script + ".calls", "a") as calls:
    calls.write(json.dumps([task, options]) + "\\n")
speed = task["settings"]["speed"]
if speed == "broken":
    raise SystemExit("CUDA out of memory")
result = bench(name=task["name"], workload=task["workload"], repetition=task["repetition"], speed=float(speed))
open(task["result"], "w").write(as_text(result))
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "launch.py").write_text(LAUNCHER)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "doubled.yaml").write_text("speed: 1\ndeep: [{x: 1, y: 2}]\nspeed: 2\n")
    for name, speed in (("a", 100), ("b", 150), ("bad", "broken")):
        (tmp_path / f"{name}.yaml").write_text(f"speed: {speed}\n")
    return tmp_path


def run(job, *arguments):
    common = ["--script", job / "train.py", "--launch", f"{sys.executable} {job / 'launch.py'}", "--out", job / "out"]
    return CliRunner().invoke(app, ["bench", *map(str, [*arguments, *common])])


def calls(job):
    return [json.loads(line) for line in (job / "train.py.calls").read_text().splitlines()]


def test_two_settings_are_measured_in_turns_and_compared(job):
    done = run(job, job / "a.yaml", job / "b.yaml")
    assert done.exit_code == 0, done.output
    assert [task["name"] for task, _ in calls(job)] == ["a", "b", "a", "b"]
    assert "| a | 2 | **100** (100 - 100) | 1.00 |" in done.output
    assert "b: 1.500 times a\n" in done.output


def test_one_run_each_is_not_enough_to_tell_them_apart(job):
    done = run(job, job / "a.yaml", job / "b.yaml", "--repetitions", 1)
    assert "b: 1.500 times a (not told apart" in done.output


def test_one_setting_can_be_varied_without_a_second_file(job):
    done = run(job, job / "a.yaml", "--vary", "speed=50", "--repetitions", 1)
    assert "a, speed=50: 0.500 times a" in done.output
    (plain, _), (varied, options) = calls(job)
    assert plain["settings"] == {"speed": 100}
    assert varied["settings"] == {"speed": 50}
    assert options[:4] == ["--config", str(job / "a.yaml"), "--speed", "50"]


def test_every_run_has_an_output_folder_of_its_own_that_is_gone_afterwards(job):
    run(job, job / "a.yaml", "--vary", "speed=50")
    folders = {options[options.index("--output_dir") + 1] for _, options in calls(job)}
    assert len(folders) == 4
    assert not any(Path(folder).parent.exists() for folder in folders)


@pytest.mark.parametrize(("limit", "code"), [(99, 0), (101, 1)])
def test_a_speed_that_is_asked_for_decides_the_exit_code(job, limit, code):
    done = run(job, job / "a.yaml", "--repetitions", 1, "--fail-under", limit)
    assert done.exit_code == code
    assert ("less than the 101 asked for" in done.output) is bool(code)


def test_a_run_that_fails_shows_why_and_the_others_are_measured(job):
    done = run(job, job / "bad.yaml", job / "a.yaml")
    assert done.exit_code == 1
    assert "CUDA out of memory" in done.output
    assert "| a | 2 |" in done.output


def test_results_are_measured_anew_unless_resume_is_asked_for(job):
    run(job, job / "a.yaml", "--repetitions", 1)
    run(job, job / "a.yaml", "--repetitions", 2, "--resume")
    assert [task["repetition"] for task, _ in calls(job)] == [1, 2]
    run(job, job / "a.yaml", "--repetitions", 1)
    assert [task["repetition"] for task, _ in calls(job)] == [1, 2, 1]


def test_a_step_is_traced_in_the_first_run_only(job):
    run(job, job / "a.yaml", "--steps", 12)
    assert [task["trace_step"] for task, _ in calls(job)] == [10, None]


def test_json_holds_rows_and_gains(job):
    done = CliRunner().invoke(app, ["--help"])
    assert "bench" in done.output
    done = run(job, job / "a.yaml", job / "b.yaml", "--json")
    document = json.loads(done.stdout)
    assert [row["name"] for row in document["rows"]] == ["a", "b"]
    assert document["gains"] == [{"name": "b", "base": "a", "ratio": 1.5, "apart": True}]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["missing.yaml"], "missing.yaml"),
        (["a.yaml", "a.yaml"], "given twice"),
        (["a.yaml", "--vary", "speed"], "not KEY=VALUE"),
        (["a.yaml", "doubled.yaml"], "speed stands twice in"),
    ],
    ids=["no such file", "twice", "no value", "a doubled key"],
)
def test_wrong_use_is_told_before_anything_runs(job, arguments, named):
    done = run(job, *(job / one if one.endswith(".yaml") else one for one in arguments))
    assert done.exit_code == 2
    assert re.sub(r"\s", "", named) in re.sub(r"[│\s]", "", done.output)  # the box breaks lines anywhere
    assert not (job / "out").exists()


def test_a_misspelt_setting_of_the_second_job_is_told_before_the_first_one_runs(job):
    done = run(job, job / "a.yaml", "--vary", "sped=50", "--vary", "speed=50")
    assert done.exit_code == 1
    assert "a, sped=50: its settings are not taken, and nothing was measured" in done.output
    assert "there is no setting sped" in done.output
    assert not (job / "train.py.calls").exists()
    assert [path.name for path in (job / "out").iterdir()] == ["a-sped-50_settings.failed.txt"]


@pytest.mark.parametrize(
    ("launch", "named"), [("acelerate launch", "no program 'acelerate'"), ("'a", "No closing quot")]
)
def test_a_launcher_that_cannot_start_is_told(job, launch, named):
    done = CliRunner().invoke(
        app, ["bench", str(job / "a.yaml"), "--script", str(job / "train.py"), "--launch", launch]
    )
    assert done.exit_code == 2
    assert re.sub(r"\s", "", named) in re.sub(r"[│\s]", "", done.output)


def test_without_a_script_the_recipe_beside_the_settings_is_meant(job):
    done = CliRunner().invoke(app, ["bench", str(job / "a.yaml")])
    assert done.exit_code == 2
    assert "qwen27b_sft.py" in re.sub(r"[│\s]", "", done.output)
