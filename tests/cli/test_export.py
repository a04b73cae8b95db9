"""`hf-speedkit export` from the command line."""

import json
import os

import pytest
from checkpoint_export import whole_checkpoint
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_speedkit.cli.main import app


def run(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture
def checkpoint(tmp_path):
    return whole_checkpoint(tmp_path / "checkpoint-4")


def test_a_checkpoint_becomes_a_model_in_the_asked_type(checkpoint, tmp_path):
    said = run(checkpoint, tmp_path / "out", "--dtype", "float16", "--json")
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["size_bytes"] > 0
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype) == "torch.float16"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda c: os.truncate(c / "model.safetensors", 99), "is damaged"),
        (lambda c: [path.unlink() for path in (c / "config.json", c / "speedkit_manifest.json")], "no config.json"),
    ],
    ids=["damaged", "no config"],
)
def test_a_bad_checkpoint_ends_with_1_and_a_way_on(checkpoint, tmp_path, harm, said):
    harm(checkpoint)
    ended = run(checkpoint, tmp_path / "out")
    assert ended.exit_code == 1
    assert said in ended.stderr
    assert "Mend it:" in ended.stderr


def test_a_folder_with_something_in_it_is_not_written_into(checkpoint, tmp_path):
    ended = run(checkpoint, checkpoint)
    assert ended.exit_code == 1
    assert "is not empty" in ended.stderr


@pytest.mark.parametrize("arguments", [("nowhere", "out"), (".", "out", "--dtype", "int3")])
def test_wrong_use_ends_with_2(arguments):
    assert run(*arguments).exit_code == 2
