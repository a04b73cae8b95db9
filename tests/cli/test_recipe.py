"""`hf-speedkit recipe`: the recipe out of the repository, out of a wheel, and never over somebody's changes."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_speedkit.cli.main import app, main
from hf_speedkit.cli.recipe import shipped_files

ROOT = Path(__file__).parents[2]
NEEDED = {
    "recipes/qwen27b_sft.py", "recipes/qwen27b_sft.yaml", "recipes/qwen27b_lora.yaml", "recipes/tiny_sft.yaml",
    "recipes/tiny_chat.py", "recipes/launch/slurm.sbatch", "recipes/launch/torchrun.sh",
    "recipes/launch/kubernetes.yaml", "accelerate_configs/fsdp2.yaml", "accelerate_configs/fsdp2_multinode.yaml",
    "accelerate_configs/single_gpu.yaml", "accelerate_configs/cpu.yaml",
}  # fmt: skip


def run(*words):
    return CliRunner().invoke(app, ["recipe", *map(str, words)])


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_an_editable_install_reads_the_repositorys_own_files():
    assert shipped_files() == ROOT


def test_a_recipe_is_written_with_everything_it_names(tmp_path):
    said = run("qwen27b_sft", "--output", tmp_path / "job")
    assert said.exit_code == 0, said.output
    assert files(tmp_path / "job") >= NEEDED
    assert not any("__pycache__" in name for name in files(tmp_path / "job"))
    for name in NEEDED:
        assert (tmp_path / "job" / name).read_bytes() == (ROOT / name).read_bytes()
    assert os.access(tmp_path / "job/recipes/launch/torchrun.sh", os.X_OK)
    assert "accelerate launch recipes/qwen27b_sft.py --config recipes/qwen27b_sft.yaml" in said.output
    again = run("qwen27b_lora", "--output", tmp_path / "job")
    assert again.exit_code == 0
    assert "0 files written" in again.output


def test_a_file_that_somebody_changed_is_not_written_over(tmp_path):
    run("tiny_sft", "--output", tmp_path)
    mine = tmp_path / "recipes" / "tiny_sft.yaml"
    mine.write_text("mine")
    (tmp_path / "recipes" / "tiny_chat.py").unlink()
    refused = run("tiny_sft", "--output", tmp_path)
    assert refused.exit_code == 1
    assert "recipes/tiny_sft.yaml" in refused.output
    assert mine.read_text() == "mine"
    assert not (tmp_path / "recipes" / "tiny_chat.py").exists()  # nothing at all, not a half
    forced = run("tiny_sft", "--output", tmp_path, "--force", "--json")
    assert json.loads(forced.output)["written"] == ["recipes/tiny_chat.py", "recipes/tiny_sft.yaml"]
    assert mine.read_bytes() == (ROOT / "recipes" / "tiny_sft.yaml").read_bytes()


@pytest.mark.parametrize("words", [("nothing",), (), ("tiny_sft", "--output", __file__)])
def test_wrong_use_is_exit_2_with_the_names(words):
    said = run(*words)
    assert said.exit_code == 2
    assert "--output" in said.output or ("qwen27b_sft" in said.output and "tiny_sft" in said.output)


def test_a_place_that_cannot_be_written_to_is_told_in_two_lines(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf-speedkit", "recipe", "tiny_sft", "--output", "/dev/null/job"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("/dev/null/job")


def test_the_list_says_what_each_is():
    lines = run("--list").output.splitlines()
    assert [line.split()[0] for line in lines] == ["qwen27b_lora", "qwen27b_sft", "tiny_sft"]
    assert "LoRA" in lines[0]
    assert json.loads(run("--list", "--json").output)["qwen27b_sft"].startswith("Qwen3.8-27B")


def test_a_wheel_carries_the_recipes_and_needs_no_repository(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    program = "from hf_speedkit.cli.main import main; import hf_speedkit; print(hf_speedkit.__file__); main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "recipe", "qwen27b_sft", "--output", "job"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert str(tmp_path / "installed") in ended.stdout.splitlines()[0]
    for name in NEEDED:
        assert (tmp_path / "job" / name).read_bytes() == (ROOT / name).read_bytes()
