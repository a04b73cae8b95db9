"""What `hf-speedkit doctor` takes for a model, and what it says about anything else: exit 2, and never a traceback."""

import pytest
from typer.testing import CliRunner

from hf_speedkit.cli.main import app


def said(result):
    """The text of a message without the frame that typer draws round it."""
    return " ".join(result.output.replace("│", " ").split())


def run(name):
    return CliRunner().invoke(app, ["doctor", str(name)])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/nowhere/model", "/nowhere/model: no such file or directory. MODEL is a folder"),
        ("./model", "./model: no such file or directory"),
        ("runs/mine/checkpoint-10", "no such file or directory"),
        ("model/config.json", "no such file or directory"),
        ("~/no-such-model", "no such file or directory"),
        ("nobody/model", "nobody/model: no file or folder of that name here, and its config is not in the local cache"),
        ("gpt-none", "gpt-none: no file or folder of that name here"),
    ],
)
def test_a_name_that_is_nowhere_says_what_was_looked_for_and_what_is_accepted(name, says):
    result = run(name)
    assert result.exit_code == 2
    assert says in said(result)
    assert "or the id of a model on the Hub whose config is in the local cache" in said(result)
    assert ("hf download" in said(result)) is ("not in the local cache (" in said(result))


@pytest.mark.parametrize("name", ["tiny-qwen", "./tiny-qwen"])
def test_a_misspelt_folder_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-qwen3").mkdir()
    assert "Or was tiny-qwen3 meant?" in said(run(name))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is no JSON file"),
        (b"GGUF\xff", "is no JSON file"),
        (b"null", "holds no config"),
        (b'{"model_type": "no_such_type"}', "cannot be read"),
        (b'{"model_type": "llama", "num_attention_heads": 0}', "modulo by zero"),
        (b'{"model_type": "llama", "num_hidden_layers": "32"}', "expected int, got str"),
        (b'{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}', "doctor runs no foreign code"),
    ],
    ids=["half", "weights", "null", "unknown_type", "no_heads", "words_for_numbers", "remote_code"],
)
def test_a_config_that_cannot_be_read_exits_2_and_says_why(tmp_path, content, says):
    (tmp_path / "config.json").write_bytes(content)
    result = run(tmp_path)
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit)
    assert says in said(result)


def test_an_adapter_leads_to_its_base_model_and_a_link_to_the_id_in_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/base"}')
    assert "hf-speedkit doctor nobody/base" in said(run(tmp_path))
    assert "hf download nobody/model config.json" in said(run("https://huggingface.co/nobody/model/"))


def test_a_hub_id_is_looked_up_in_the_local_cache_only(tmp_path, monkeypatch):
    result = run("nobody/has-this-model")
    assert result.exit_code == 2
    assert "not in the local cache" in said(result)
    assert "hf download nobody/has-this-model config.json" in said(result)


def test_a_folder_without_a_config_exits_2(tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "no config.json" in result.output
