"""`hf-speedkit export` from the command line."""

import json
import os

import pytest
import torch
from checkpoint_export import whole_checkpoint
from safetensors.torch import load_file, save_file
from support import tiny_llama
from torch.distributed.checkpoint import save
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_speedkit.cli.main import app
from hf_speedkit.trainer.checkpoints.resume import WEIGHTS_FOLDER


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


@pytest.mark.parametrize("dtype", [[], ["--dtype", "float16"]], ids=["stored", "float16"])
def test_weights_that_another_trainer_saved_under_the_names_of_a_compiled_model_get_those_that_load(
    checkpoint, tmp_path, dtype
):
    file = checkpoint / "model.safetensors"
    save_file({f"_orig_mod.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    (checkpoint / "speedkit_manifest.json").unlink(missing_ok=True)
    said = run(checkpoint, tmp_path / "out", *dtype)
    assert said.exit_code == 0, said.output
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"]


def test_weights_that_a_checkpoint_does_not_hold_are_not_exported_as_they_are_drawn(checkpoint, tmp_path):
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    (checkpoint / "speedkit_manifest.json").unlink(missing_ok=True)
    said = run(checkpoint, tmp_path / "out", "--dtype", "float16")
    assert said.exit_code == 1
    assert "1 weights are missing, such as model.norm.weight" in said.output


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda c: os.truncate(c / "model.safetensors", 99), "is damaged"),
        (lambda c: (c / "speedkit_manifest.json").write_text("{"), "its manifest cannot be read"),
        (lambda c: [path.unlink() for path in (c / "config.json", c / "speedkit_manifest.json")], "no config.json"),
    ],
    ids=["damaged", "manifest cut", "no config"],
)
def test_a_bad_checkpoint_ends_with_1_and_a_way_on(checkpoint, tmp_path, harm, said):
    harm(checkpoint)
    ended = run(checkpoint, tmp_path / "out")
    assert ended.exit_code == 1
    assert said in ended.stderr
    assert "Mend it:" in ended.stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
def test_of_a_run_the_newest_checkpoint_is_exported_as_it_is_stored_and_that_is_said(tmp_path, sharded):
    model = tiny_llama()  # fp32, one weight of it in bf16: both stay
    model.model.norm.to(torch.bfloat16)
    for number in (4, 12):
        checkpoint = tmp_path / "run" / f"checkpoint-{number}"
        if sharded:
            save({"model": model.state_dict()}, checkpoint_id=checkpoint / WEIGHTS_FOLDER, no_dist=True)
            config = type(model.config).from_dict(
                {**model.config.to_dict(), "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
            )
            config.save_pretrained(checkpoint)
        else:
            model.save_pretrained(checkpoint)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
    ended = run(tmp_path / "run", tmp_path / "out")
    assert ended.exit_code == 0, ended.output
    assert "is a run: exported checkpoint-12; also there: checkpoint-4" in ended.stdout
    assert "KiB of float32 weights" in ended.stdout
    assert "--dtype bfloat16 halves it" in ended.stdout
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["lm_head.weight"].equal(model.lm_head.weight / 2)
    assert written["model.norm.weight"].dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32
    model.save_pretrained(tmp_path / "run")  # a final model beside its checkpoints
    ended = run(tmp_path / "run", tmp_path / "final", "--dtype", "bfloat16")
    assert "the model in" in ended.stdout
    assert "also there: checkpoint-12, checkpoint-4" in ended.stdout
    assert "KiB of bfloat16 weights" in ended.stdout


def of_three_layers(checkpoint):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 3}))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda c: os.truncate(c / WEIGHTS_FOLDER / "__0_0.distcp", 999), "__0_0.distcp ends before its last tensor"),
        (lambda c: fill(c / WEIGHTS_FOLDER / "__0_0.distcp"), "cannot be read"),
        (lambda c: (c / "config.json").write_text("{"), "cannot be read"),
        (of_three_layers, "describes another model"),
        (None, None),
    ],
    ids=["cut", "overwritten", "config cut", "another config", "good"],
)
def test_a_sharded_checkpoint_without_a_manifest_is_exported_or_named(tmp_path, harm, said):
    checkpoint, model = tmp_path / "checkpoint-4", tiny_llama()
    save({"model": model.state_dict()}, checkpoint_id=checkpoint / WEIGHTS_FOLDER, no_dist=True)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(checkpoint)
    if harm is not None:
        harm(checkpoint)
    ended = run(checkpoint, tmp_path / "out", "--dtype", "float32")
    if said is not None:
        assert ended.exit_code == 1, ended.exception
        assert said in ended.stderr
        assert "Mend it:" in ended.stderr
        return
    assert ended.exit_code == 0, ended.output
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in model.state_dict().items())


def fill(path):
    path.write_bytes(b"0" * path.stat().st_size)


def test_a_folder_with_something_in_it_is_not_written_into(checkpoint, tmp_path):
    ended = run(checkpoint, checkpoint)
    assert ended.exit_code == 1
    assert "is not empty" in ended.stderr


@pytest.mark.parametrize("arguments", [("nowhere", "out"), (".", "out", "--dtype", "int3")])
def test_wrong_use_ends_with_2(arguments):
    assert run(*arguments).exit_code == 2
