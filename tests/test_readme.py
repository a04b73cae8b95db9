"""Every command and every snippet of the README runs."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import step_logs
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for kind, body in FENCES if kind == "" for line in body.splitlines() if line]
SNIPPETS = [body for kind, body in FENCES if kind == "python"]
BIN = Path(sys.executable).parent


def run(command, **changes):
    env = {**os.environ, "TQDM_DISABLE": "1", "PATH": f"{BIN}:{os.environ['PATH']}", **changes}
    return subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


def command_line(line):
    """The same for our own command, in this process: a new one imports torch for seconds, and finds nothing else."""
    from typer.testing import CliRunner

    from hf_speedkit.cli.main import app

    name, *words = shlex.split(line)
    assert name == "hf-speedkit"
    with contextlib.chdir(ROOT):
        return CliRunner().invoke(app, words, catch_exceptions=False)


def make_demo(tmp_path):
    # The environment is there already (-o); as long a run as shows every part of the table.
    arguments = f"--max_steps 6 --conversations 30 --output_dir {tmp_path}/run"
    done = run(f'make -o install-demo demo VENV="{sys.prefix}" DEMO_ARGS="{arguments}"')
    assert done.returncode == 0, done.stderr[-2000:]
    assert "what happened" in done.stdout
    assert "proven on" in done.stdout


def make_test(tmp_path):
    # Not inside itself: what it would run.
    planned = run("make -n -o install-dev test").stdout
    for part in ("ruff check", "ruff format --check", "lint-imports", "mypy", "-m pytest"):
        assert part in planned


def launch_the_real_job(tmp_path):
    done = run("accelerate launch recipes/qwen27b_sft.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "recipes/tiny_sft.yaml" in done.stderr.rstrip().splitlines()[-1]


def install(tmp_path):
    done = run(f'"{sys.executable}" -m pip install --dry-run --no-deps --no-build-isolation .')
    assert done.returncode == 0, done.stderr[-2000:]
    assert "hf-speedkit" in done.stdout + done.stderr


def install_kernels(tmp_path):
    import tomllib

    install(tmp_path)

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {re.split(r"[<>=]", need)[0] for need in extras["kernels"]} == {"flash-linear-attention", "liger-kernel"}
    # Built from source: in an extra of its own, and in nobody else's.
    assert [name for name, needs in extras.items() if "causal-conv1d" in str(needs)] == ["causal-conv1d"]


def doctor(tmp_path):
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    # The hub cannot be reached: what is said of the name, and the same of a config on disk.
    done = command_line("hf-speedkit doctor Qwen/Qwen3.8-27B")
    assert done.exit_code == 2
    Qwen3_5TextConfig().save_pretrained(tmp_path)
    done = command_line(f"hf-speedkit doctor {tmp_path}")
    assert done.exit_code == 1
    assert "flash-linear-attention" in done.stdout


def plan_memory(tmp_path):
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    assert command_line("hf-speedkit plan Qwen/Qwen3.8-27B --gpus 2 --gpu h200").exit_code == 2
    Qwen3_5TextConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    done = command_line(f"hf-speedkit plan {tmp_path} --gpus 2 --gpu h200")
    assert done.exit_code == 0, done.output
    assert ", 2 x H200, pure bf16: " in done.stdout


def plan(tmp_path):
    command = next(c for c in COMMANDS if c.startswith("hf-speedkit plan") and "ultrachat" in c)
    assert command_line(command).exit_code == 2
    (tmp_path / "lengths.json").write_text(json.dumps([900, 1200, 300, 2500] * 50))
    done = command_line(f"hf-speedkit plan --lengths {tmp_path}/lengths.json --tokens-per-batch 8192")
    assert done.exit_code == 0, done.output
    assert "200 documents" in done.stdout


def recipe(tmp_path):
    done = command_line(f"hf-speedkit recipe qwen27b_sft --output {tmp_path}/job")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "job" / "recipes" / "qwen27b_sft.py").is_file()


def trace(tmp_path):
    # tests/trainer/test_sft.py makes such a file; here one that was written by hand.
    assert command_line("hf-speedkit trace tests/data/trace_two_streams.json").exit_code in (0, 1)
    assert command_line("hf-speedkit trace runs/mine/traces/no_such_trace.json.gz").exit_code == 2


def report(tmp_path):
    step_logs.write(tmp_path / "run", step_logs.run())  # what a training leaves there; the demo above is one
    done = command_line(f"hf-speedkit report {tmp_path}/run --out {tmp_path}/report.html")
    assert done.exit_code == 0, done.output
    assert "real tokens" in (tmp_path / "report.html").read_text()
    assert command_line("hf-speedkit report runs/no_such_run").exit_code != 0


def bench(tmp_path):
    # On this machine the job refuses to start, and the bench shows why; tests/cli/test_bench.py measures one.
    command = next(command for command in COMMANDS if command.startswith("hf-speedkit bench"))
    compared = " --vary activation_checkpointing=false"  # a second setting, started like the first, for 10 s
    assert compared in command
    done = run(f"{command.replace(compared, '')} --out {tmp_path}", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "recipes/tiny_sft.yaml" in done.stderr


RUNS = {
    "make demo": make_demo,
    "make test": make_test,
    "accelerate launch recipes/qwen27b_sft.py": launch_the_real_job,
    'pip install ".[kernels,wandb]"': install_kernels,  # needs a GPU: that it names what it should
    "hf-speedkit doctor Qwen/Qwen3.8-27B": doctor,
    "hf-speedkit plan Qwen/Qwen3.8-27B --gpus 2 --gpu h200": plan_memory,
    "hf-speedkit plan Qwen/Qwen3.8-27B HuggingFaceH4/ultrachat_200k --split train_sft --overlong truncate": plan,
    "hf-speedkit recipe qwen27b_sft --output job": recipe,
    "hf-speedkit trace runs/mine/traces/trace_rank0_step20.json.gz": trace,
    "hf-speedkit report runs/mine --out report.html": report,
    next(command for command in COMMANDS if command.startswith("hf-speedkit bench")): bench,
}


def test_no_tested_command_left_the_readme():
    assert set(RUNS) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_readme_runs(tmp_path, command):
    assert command in RUNS, f"the README has a new command without a test: {command}"
    RUNS[command](tmp_path)


def test_the_three_lines_work_on_a_plain_trainer(tmp_path):
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    trainer = Trainer(
        model=tiny_llama(),
        args=TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=2, logging_steps=1, disable_tqdm=True, report_to="none",
            save_strategy="no",
        ),
        train_dataset=tokenized([5, 9, 7, 4] * 8),
        data_collator=DataCollatorForSeq2Seq(tiny_tokenizer()),
    )  # fmt: skip
    exec(SNIPPETS[0], {"trainer": trainer})
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1]["speed/real_tokens_per_second"] < logged[-1]["speed/slots_per_second"]


def test_the_two_names_work_in_place_of_trls(tmp_path, monkeypatch):
    import hf_speedkit

    class OnThisMachine(hf_speedkit.SpeedSFTConfig):
        """The README's settings with those that a CPU needs."""

        def __init__(self, **settings):
            needed = {"use_cpu": True, "bf16": False, "max_steps": 1, "save_strategy": "no", "disable_tqdm": True}
            super().__init__(**{**settings, **needed, "report_to": "none", "output_dir": str(tmp_path)})

    monkeypatch.setattr(hf_speedkit, "SpeedSFTConfig", OnThisMachine)
    names = {"model": tiny_hybrid(), "dataset": tokenized([30] * 300), "tokenizer": tiny_tokenizer()}
    exec(SNIPPETS[1], names)
    assert names["trainer"].summary().isolation.passed


def test_the_screen_in_the_readme_is_that_of_the_committed_demo():
    shown = next(body for kind, body in FENCES if kind == "text")
    result = json.loads((ROOT / "benchmarks" / "results" / "cpu_demo.json").read_text(encoding="utf-8"))
    assert shown.splitlines() == result["screen"], "run: python benchmarks/demo_screen.py"
    for line in ("packing efficiency", "2-D padding", "real tokens / s", "step time", "isolation", "kernels FALLBACK"):
        assert line in shown
