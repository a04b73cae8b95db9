"""The memory lines of `hf-speedkit plan`."""

import json

import pytest
from support import tiny_hybrid, tiny_tokenizer
from typer.testing import CliRunner

from hf_speedkit.cli.main import app
from hf_speedkit.core.memory_sizes import SETTINGS


def run(*arguments, columns=80):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_hybrid().config.save_pretrained(folder)
    return folder


def test_a_model_alone_gives_one_line_a_setting_in_80_columns(model):
    result = run(model, "--gpus", 2, "--gpu", "h200", "--tokens-per-batch", 256)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if "2 x H200" in line]
    assert len(lines) == len(SETTINGS)
    for line, setting in zip(lines, SETTINGS, strict=True):
        assert f", 2 x H200, {setting.name}: " in line
        assert line.endswith(" MiB per GPU, fits")
    assert all(len(line) <= 80 for line in result.output.splitlines())
    assert "highest in the" in result.output
    assert "not needed" in result.output  # checkpointing
    assert "8-bit AdamW: no optimizer here" in result.output


def test_the_json_has_bytes_verdict_and_smallest_number_of_gpus(model):
    result = run(model, "--gpus", 1, "--gpu-memory", 3, "--tokens-per-batch", 256, "--json")
    memory = json.loads(result.stdout)["memory"]
    assert result.exit_code == 0
    assert memory["gpu_memory_gib"] == 3
    assert memory["fits"] is True
    for setting in memory["settings"]:
        assert setting["allocated_gib"] == pytest.approx(sum(setting["parts_gib"].values()))
        assert setting["smallest_gpus"] == 1


def test_a_model_that_fits_nowhere_is_a_bad_subject(model):
    result = run(model, "--gpus", 1, "--gpu-memory", 1, "--tokens-per-batch", 256)
    assert result.exit_code == 1  # CUDA's own context is larger
    assert "does not fit" in result.output


def test_without_a_gpu_nothing_is_said_about_fitting(model, monkeypatch):
    from hf_speedkit.measure import environment

    monkeypatch.setattr(environment, "visible_gpus", lambda: ())
    result = run(model, "--tokens-per-batch", 256)
    assert result.exit_code == 0
    assert "say which GPU, --gpu h200" in " ".join(result.output.split())
    assert "8 GPUs, pure bf16" in result.output
    assert "fits" not in result.output.replace("whether it fits", "")


def test_the_gpu_of_this_machine_is_taken_where_none_is_named(model, monkeypatch):
    from hf_speedkit.measure import environment
    from hf_speedkit.measure.environment import GpuInfo

    gpu = GpuInfo(name="NVIDIA L4", memory_gib=22.5, compute_capability="8.9")
    monkeypatch.setattr(environment, "visible_gpus", lambda: (gpu,))
    assert "1 x NVIDIA L4, pure bf16" in run(model, "--gpus", 1, "--tokens-per-batch", 256, columns=200).output


@pytest.mark.parametrize(
    "arguments",
    [("--gpu", "h2000"), ("--gpus", "0"), ("--gpu-memory", "-1"), ("--gpu-memory", "inf")],
    ids=lambda pair: pair[0],
)
def test_wrong_use_is_exit_code_two(model, arguments):
    assert run(model, *arguments).exit_code == 2


def test_a_tokenizer_alone_has_no_memory_to_plan(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "no model configuration" in " ".join(result.output.split())


def test_memory_and_batches_are_planned_together(model, tmp_path):
    (tmp_path / "lengths.json").write_text(json.dumps([100, 50, 200, 30]))
    result = run(model, "--lengths", tmp_path / "lengths.json", "--gpus", 2, "--gpu", "h200", "--tokens-per-batch", 256)
    assert result.exit_code == 0, result.output
    assert "2 x H200, pure bf16" in result.output
    assert "4 documents" in result.output
    assert "2 ranks" in " ".join(result.output.split())  # --gpus says how many, unless --ranks does


@pytest.mark.parametrize("kind", ["a wrong size", "no causal model"])
def test_a_model_that_cannot_be_traced_is_said_and_the_rest_goes_on(tmp_path, kind):
    from support import tiny_llama
    from transformers import T5Config

    config = tiny_llama().config if kind == "a wrong size" else T5Config()
    config.head_dim = -3
    config.save_pretrained(tmp_path)
    (tmp_path / "lengths.json").write_text("[10, 20]")
    result = run(tmp_path, "--lengths", tmp_path / "lengths.json", "--tokens-per-batch", 64)
    assert result.exit_code == 0, result.output
    assert "memory: not known" in result.output
    assert result.output.count("Config") < 20, "not the 200 classes that transformers knows"
    assert "2 documents" in result.output
