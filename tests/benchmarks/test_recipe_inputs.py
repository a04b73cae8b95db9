"""The folders that benchmarks/recipe_inputs.py makes are what the recipe reads."""

from pathlib import Path

import numpy as np
import pytest
import qwen27b_sft as recipe
import recipe_inputs
from datasets import load_dataset
from geometry import qwen27b_config
from tiny_chat import tiny_config
from transformers import AutoConfig, AutoTokenizer

TINY = Path(__file__).parents[2] / "recipes" / "tiny_sft.yaml"


@pytest.mark.parametrize("tokens", [8, 17, 100, 1259])
def test_a_conversation_has_the_tokens_that_were_asked_for(tokens):
    tokenizer = recipe_inputs.word_tokenizer()
    for seed in range(20):
        messages = recipe_inputs.conversation(tokens, np.random.default_rng(seed))
        assert [m["role"] for m in messages[:2]] == ["user", "assistant"]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        assert len(tokenizer(rendered)["input_ids"]) == tokens
        assert tokenizer.unk_token_id not in tokenizer(rendered)["input_ids"]


def test_the_folders_are_read_by_transformers_and_datasets_without_a_network(tmp_path):
    config = qwen27b_config(4)
    lengths = recipe_inputs.write_inputs(tmp_path, config=config.to_dict(), conversations=40)
    read = AutoConfig.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (read.hidden_size, read.num_hidden_layers, read.vocab_size) == (5120, 4, 248_320)
    assert (read.pad_token_id, read.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    chats = load_dataset(str(tmp_path / "chats"), split=recipe_inputs.SPLIT, cache_dir=str(tmp_path / "cache"))
    counted = [
        len(tokenizer(tokenizer.apply_chat_template(row["messages"], tokenize=False))["input_ids"]) for row in chats
    ]
    assert counted == lengths


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(ValueError, match="smaller than 4103"):
        recipe_inputs.write_inputs(tmp_path, config=qwen27b_config(4, vocab_size=64).to_dict(), conversations=2)


def test_the_recipe_runs_from_the_folders_alone_on_drawn_weights(tmp_path, capsys, monkeypatch):
    config = tiny_config(vocab_size=4224, hidden_size=64, intermediate_size=96, num_attention_heads=2).to_dict()
    recipe_inputs.write_inputs(tmp_path, config=config, conversations=12, longest=200)
    monkeypatch.setattr(recipe, "use_all_cores", lambda args: 1)  # the cores of the other tests
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    job = {"config": TINY, "tiny_chat": "false", "model_name_or_path": tmp_path / "model", "max_steps": 2,
           "dataset_name": tmp_path / "chats", "dataset_train_split": recipe_inputs.SPLIT, "random_weights": "true",
           "tokens_per_batch": 256, "disable_tqdm": "true", "output_dir": tmp_path / "run"}  # fmt: skip
    recipe.main([word for name, value in job.items() for word in (f"--{name}", str(value))])
    said = capsys.readouterr().out
    for line in ("12 documents", "proven on", "512 slots"):
        assert line in said
    assert (tmp_path / "run" / "model.safetensors").exists()
