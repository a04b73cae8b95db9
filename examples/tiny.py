"""What every example trains on a CPU in seconds: a drawn model, a byte tokenizer with a chat template, a few chats."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from datasets import Dataset

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, three markers, and the chat template of Qwen3-Instruct-2507 that trl ships."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token=SPECIAL[0], eos_token=SPECIAL[2], additional_special_tokens=[SPECIAL[1]]
    )
    made.chat_template = (files("trl") / "chat_templates" / "qwen3_instruct_2507.jinja").read_text(encoding="utf-8")
    return made


def model() -> LlamaForCausalLM:
    """Two layers, drawn with a fixed seed."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=257, eos_token_id=256,
        )
    )  # fmt: skip


def folder(name: str) -> str:
    """A folder that holds no run yet: SpeedSFTTrainer writes over none."""
    return next(path for number in range(1, 1_000) if not Path(path := f"runs/{name}-{number}").exists())


def chats(count: int = 64) -> Dataset:
    """Chats of different lengths."""
    from datasets import Dataset

    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} times {number}?"},
                {"role": "assistant", "content": f"It is {number * number}. " + "Ask me more. " * (number % 7)},
            ]
        }
        for number in range(count)
    ]
    return Dataset.from_list(rows)
